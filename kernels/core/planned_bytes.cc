#include "headwater/kernels/planned_bytes.h"

#include <string>

#include "headwater/kernels/error.h"

namespace headwater {

absl::StatusOr<PlannedBytes> AllocatePlanned(int64_t byte_count) {
  constexpr size_t kAlignment = 64;
  const size_t blocks = static_cast<size_t>(byte_count) / kAlignment + 1;
  PlannedBytes bytes(static_cast<uint8_t*>(std::aligned_alloc(kAlignment, blocks * kAlignment)));
  if (bytes != nullptr) return bytes;
  return MakeError(ErrorReason::kMemoryBudgetExceeded, "the host has no memory for " + std::to_string(byte_count) + " bytes",
                   {{"requestedBytes", std::to_string(byte_count)}});
}

}  // namespace headwater
