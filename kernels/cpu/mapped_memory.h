// Zeroed memory from the kernel, touched only where it is used.
#ifndef HEADWATER_KERNELS_CPU_MAPPED_MEMORY_H_
#define HEADWATER_KERNELS_CPU_MAPPED_MEMORY_H_

#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"

namespace headwater::cpu {

// Owns an anonymous mapping. Pages are zero until written and take memory only then; aligned to a page.
class MappedMemory {
 public:
  MappedMemory() = default;
  // `bytes` >= 0; 0 maps nothing. kMemoryBudgetExceeded if the kernel refuses.
  static absl::StatusOr<MappedMemory> Map(int64_t bytes);
  ~MappedMemory();
  MappedMemory(MappedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  MappedMemory& operator=(MappedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  int64_t bytes() const { return bytes_; }
  template <typename T>
  T* As() const {
    return static_cast<T*>(data_);
  }

 private:
  MappedMemory(void* data, int64_t bytes) : data_(data), bytes_(bytes) {}

  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace headwater::cpu

#endif  // HEADWATER_KERNELS_CPU_MAPPED_MEMORY_H_
