// Memory handed out from the front of a block, for as long as one piece of work lasts.
#ifndef HEADWATER_KERNELS_CUDA_COMPUTATION_WORKSPACE_H_
#define HEADWATER_KERNELS_CUDA_COMPUTATION_WORKSPACE_H_

#include <cstdint>

#include "kernels/cuda/launch_types.h"

namespace headwater::cuda {

// Hands out [base, base + bytes). Without a block it only counts, so that one function both measures a layout and makes it.
class Workspace {
 public:
  static constexpr int64_t kAlignment = 256;

  Workspace() = default;
  Workspace(void* base, int64_t bytes) : base_(static_cast<char*>(base)), bytes_(bytes) {}

  // Room for `count` elements; null when only counting, or when the block is used up (see fits()).
  template <typename T>
  T* Take(int64_t count) {
    return static_cast<T*>(TakeBytes(count * static_cast<int64_t>(sizeof(T))));
  }
  void* TakeBytes(int64_t bytes) {
    const int64_t start = used_;
    used_ += RoundUp(bytes, kAlignment);
    return base_ == nullptr || used_ > bytes_ ? nullptr : base_ + start;
  }

  int64_t used() const { return used_; }
  int64_t free_bytes() const { return bytes_ - used_; }
  bool fits() const { return used_ <= bytes_; }
  // Gives back the blocks taken since used() was `mark`.
  void Rewind(int64_t mark) { used_ = mark; }

 private:
  char* base_ = nullptr;
  int64_t bytes_ = 0;
  int64_t used_ = 0;
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_COMPUTATION_WORKSPACE_H_
