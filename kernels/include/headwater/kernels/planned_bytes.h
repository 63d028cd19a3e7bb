// PlannedBytes: host memory whose size a call decides. Where the system has none, the call is refused; `new` that fails ends the
// server (docs/adr/0025-host-memory.md).
#ifndef HEADWATER_KERNELS_PLANNED_BYTES_H_
#define HEADWATER_KERNELS_PLANNED_BYTES_H_

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "absl/status/statusor.h"

namespace headwater {

struct FreeBytes {
  void operator()(void* bytes) const { std::free(bytes); }
};
using PlannedBytes = std::unique_ptr<uint8_t[], FreeBytes>;

// `byte_count` >= 0 bytes, uninitialised, 64-byte aligned; never null. kMemoryBudgetExceeded (requestedBytes).
absl::StatusOr<PlannedBytes> AllocatePlanned(int64_t byte_count);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_PLANNED_BYTES_H_
