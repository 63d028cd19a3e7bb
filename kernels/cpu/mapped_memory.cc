#include "kernels/cpu/mapped_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "headwater/kernels/error.h"

namespace headwater::cpu {

absl::StatusOr<MappedMemory> MappedMemory::Map(int64_t bytes) {
  if (bytes == 0) return MappedMemory();
  void* data =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    return MakeError(ErrorReason::kMemoryBudgetExceeded,
                     "the system refused " + std::to_string(bytes) + " bytes of memory: " + std::strerror(errno),
                     {{"requestedBytes", std::to_string(bytes)}});
  }
  // Large pages where the system offers them: products walk through hundreds of megabytes.
  madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  return MappedMemory(data, bytes);
}

MappedMemory::~MappedMemory() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
}

}  // namespace headwater::cpu
