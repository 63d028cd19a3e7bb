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

// One thread at a time.
class CallMemory {
 public:
  // A block that lives as long as this; null without host memory, which status() reports from then on.
  void* Take(int64_t byte_count) {
    absl::StatusOr<PlannedBytes> block = AllocatePlanned(byte_count);
    if (block.ok()) return blocks_.emplace_back(*std::move(block)).get();
    // The other ranks compute already, and would wait for this one.
    status_ = MakeError(ErrorReason::kEngineFailed, std::string(block.status().message()));
    return nullptr;
  }
  const absl::Status& status() const { return status_; }

 private:
  std::vector<PlannedBytes> blocks_;
  absl::Status status_;
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_CALL_MEMORY_H_
