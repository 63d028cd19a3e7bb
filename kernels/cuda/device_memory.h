// Memory of the device, and page-locked memory of the host. Both are zeroed, and freed by their destructors.
#ifndef HEADWATER_KERNELS_CUDA_DEVICE_MEMORY_H_
#define HEADWATER_KERNELS_CUDA_DEVICE_MEMORY_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/status.h"

namespace headwater::cuda {

// How memory is had and given back. Zero fills it with zeros and returns when it has.
struct OnDevice {  // the current one
  static constexpr char kAllocating[] = "allocating device memory";
  static cudaError_t Take(void** data, size_t bytes) { return cudaMalloc(data, bytes); }
  static cudaError_t Zero(void* data, size_t bytes) {
    const cudaError_t error = cudaMemset(data, 0, bytes);
    // It may return before the memory is clear, and the engine's stream would not wait for it.
    return error == cudaSuccess ? cudaStreamSynchronize(nullptr) : error;
  }
  static cudaError_t Free(void* data) { return cudaFree(data); }
};
struct PageLocked {
  static constexpr char kAllocating[] = "allocating page-locked memory";
  static cudaError_t Take(void** data, size_t bytes) { return cudaMallocHost(data, bytes); }
  static cudaError_t Zero(void* data, size_t bytes) {
    std::memset(data, 0, bytes);
    return cudaSuccess;
  }
  static cudaError_t Free(void* data) { return cudaFreeHost(data); }
};

// `bytes` of one kind; null for 0.
template <typename Kind>
class OwnedMemory {
 public:
  OwnedMemory() = default;
  OwnedMemory(OwnedMemory&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  OwnedMemory& operator=(OwnedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  // The result of freeing is useless here: an error of earlier work shows in the next call that is checked.
  ~OwnedMemory() { static_cast<void>(Kind::Free(data_)); }

  static absl::StatusOr<OwnedMemory> Allocate(int64_t bytes) {
    OwnedMemory memory;
    if (bytes == 0) return memory;
    absl::Status status = CudaStatus(Kind::Take(&memory.data_, static_cast<size_t>(bytes)), Kind::kAllocating);
    if (!status.ok()) {
      static_cast<void>(cudaGetLastError());  // an allocation that was refused must not show in the next call
      return status;
    }
    memory.bytes_ = bytes;
    status = CudaStatus(Kind::Zero(memory.data_, static_cast<size_t>(bytes)), "clearing memory");
    if (!status.ok()) return status;
    return memory;
  }

  int64_t bytes() const { return bytes_; }
  template <typename T>
  T* As() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

using DeviceMemory = OwnedMemory<OnDevice>;
using PinnedMemory = OwnedMemory<PageLocked>;

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_DEVICE_MEMORY_H_
