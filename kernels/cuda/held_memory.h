// HeldMemory: memory that goes back to CUDA with its holder.
#ifndef HEADWATER_KERNELS_CUDA_HELD_MEMORY_H_
#define HEADWATER_KERNELS_CUDA_HELD_MEMORY_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "kernels/cuda/engine_core.h"

namespace headwater::cuda {

// `Base`: HostMemory or DeviceRegion. Given back while the engine's device is current, on whatever thread that is.
template <typename Base>
class HeldMemory final : public Base {
 public:
  // cudaFreeHost() and the like.
  using GiveBack = cudaError_t (*)(void* data);
  HeldMemory(std::shared_ptr<EngineCore> core, void* data, int64_t bytes, GiveBack give_back)
      : core_(std::move(core)), data_(data), bytes_(bytes), give_back_(give_back) {}
  HeldMemory(const HeldMemory&) = delete;
  HeldMemory& operator=(const HeldMemory&) = delete;
  ~HeldMemory() override {
    core_->MakeCurrent();
    if (give_back_(data_) != cudaSuccess) static_cast<void>(cudaGetLastError());
  }
  void* data() const override { return data_; }
  int64_t bytes() const override { return bytes_; }

 private:
  const std::shared_ptr<EngineCore> core_;
  void* const data_;
  const int64_t bytes_;
  const GiveBack give_back_;
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_HELD_MEMORY_H_
