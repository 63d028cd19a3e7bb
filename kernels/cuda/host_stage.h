// Page-locked memory for the data that goes up to the device and comes back beside the tensors. It is taken piece by piece, and
// given back all at once when the streams have been waited for.
#ifndef HEADWATER_KERNELS_CUDA_HOST_STAGE_H_
#define HEADWATER_KERNELS_CUDA_HOST_STAGE_H_

#include <cstdint>

#include "kernels/cuda/computation/workspace.h"
#include "kernels/cuda/device_memory.h"

namespace headwater::cuda {

class HostStage {
 public:
  explicit HostStage(const PinnedMemory& memory) : space_(memory.As<void>(), memory.bytes()) {}

  bool HasRoom(int64_t bytes) const { return space_.free_bytes() >= bytes; }
  template <typename T>
  T* Take(int64_t count) {
    return space_.Take<T>(count);
  }
  // Pieces taken so far stay taken.
  void Keep() { kept_ = space_.used(); }
  void Reset() { space_.Rewind(kept_); }

 private:
  Workspace space_;
  int64_t kept_ = 0;
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_HOST_STAGE_H_
