// CallMemory: memory blocks of one call, sized by its rows.
#ifndef HEADWATER_SERVER_GROUP_CALL_MEMORY_H_
#define HEADWATER_SERVER_GROUP_CALL_MEMORY_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/planned_bytes.h"

namespace headwater::group {

// Memory of one rank. kEngineFailed if the host has none: the other ranks compute already, and would wait for this one.
inline absl::StatusOr<PlannedBytes> AllocateOnRank(int64_t byte_count) {
  absl::StatusOr<PlannedBytes> bytes = AllocatePlanned(byte_count);
  return bytes.ok() ? std::move(bytes) : MakeError(ErrorReason::kEngineFailed, std::string(bytes.status().message()));
}

// One thread at a time.
class CallMemory {
 public:
  // A block that lives as long as this; null without host memory, which status() reports from then on.
  void* Take(int64_t byte_count) {
    absl::StatusOr<PlannedBytes> block = AllocateOnRank(byte_count);
    status_.Update(block.status());
    return block.ok() ? blocks_.emplace_back(*std::move(block)).get() : nullptr;
  }
  const absl::Status& status() const { return status_; }

 private:
  std::vector<PlannedBytes> blocks_;
  absl::Status status_;
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_CALL_MEMORY_H_
