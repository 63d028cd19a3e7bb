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

// `bytes` on the current device; null for 0.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(DeviceMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  // What cudaFree() says is of no use here: an error of earlier work shows in the next call that is checked.
  ~DeviceMemory() { static_cast<void>(cudaFree(data_)); }

  static absl::StatusOr<DeviceMemory> Allocate(int64_t bytes) {
    DeviceMemory memory;
    if (bytes == 0) return memory;
    absl::Status status = CudaStatus(cudaMalloc(&memory.data_, static_cast<size_t>(bytes)), "allocating device memory");
    if (!status.ok()) {
      static_cast<void>(cudaGetLastError());  // an allocation that was refused must not show in the next call
      return status;
    }
    memory.bytes_ = bytes;
    status = CudaStatus(cudaMemset(memory.data_, 0, static_cast<size_t>(bytes)), "clearing device memory");
    // It may return before the memory is clear, and the engine's stream would not wait for it.
    if (status.ok()) status = CudaStatus(cudaStreamSynchronize(nullptr), "clearing device memory");
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

class PinnedMemory {
 public:
  PinnedMemory() = default;
  PinnedMemory(PinnedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~PinnedMemory() { static_cast<void>(cudaFreeHost(data_)); }

  static absl::StatusOr<PinnedMemory> Allocate(int64_t bytes) {
    PinnedMemory memory;
    if (bytes == 0) return memory;
    absl::Status status = CudaStatus(cudaMallocHost(&memory.data_, static_cast<size_t>(bytes)), "allocating page-locked memory");
    if (!status.ok()) {
      static_cast<void>(cudaGetLastError());
      return status;
    }
    memory.bytes_ = bytes;
    std::memset(memory.data_, 0, static_cast<size_t>(bytes));
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

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_DEVICE_MEMORY_H_
