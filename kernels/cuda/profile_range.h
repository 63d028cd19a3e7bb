// A named range in NVIDIA's profilers, for as long as the object lives.
#ifndef HEADWATER_KERNELS_CUDA_PROFILE_RANGE_H_
#define HEADWATER_KERNELS_CUDA_PROFILE_RANGE_H_

#include <nvtx3/nvToolsExt.h>

namespace headwater::cuda {

class ProfileRange {
 public:
  explicit ProfileRange(const char* name) { nvtxRangePushA(name); }
  ~ProfileRange() { nvtxRangePop(); }
  ProfileRange(const ProfileRange&) = delete;
  ProfileRange& operator=(const ProfileRange&) = delete;
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_PROFILE_RANGE_H_
