// Page-locked memory for what goes up to the device and comes back beside the tensors: taken piece by piece, given back all at once
// when the stream has been waited for.
#ifndef HEADWATER_KERNELS_CUDA_HOST_STAGE_H_
#define HEADWATER_KERNELS_CUDA_HOST_STAGE_H_

#include <cstdint>

#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/workspace.h"

namespace headwater::cuda {

class HostStage {
 public:
  explicit HostStage(const PinnedMemory& memory) : space_(memory.As<void>(), memory.bytes()) {}

  bool HasRoom(int64_t bytes) const { return space_.free_bytes() >= bytes; }
  template <typename T>
  T* Take(int64_t count) {
    return space_.Take<T>(count);
  }
  void Reset() { space_.Rewind(0); }

 private:
  Workspace space_;
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_HOST_STAGE_H_
