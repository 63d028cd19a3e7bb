// Rows' statistics on Hopper straight out of the accumulators of hidden . weight^T: no pass reads the logits for them, and without
// a gradient nobody writes them. For calls that want entropy and its kin.
#ifndef HEADWATER_KERNELS_CUDA_DISTRIBUTION_PRODUCT_H_
#define HEADWATER_KERNELS_CUDA_DISTRIBUTION_PRODUCT_H_

#include "kernels/cuda/launch_types.h"
#include "kernels/cuda/row_passes.h"

namespace headwater::cuda {

struct DistributionProductParams {
  ConstMatrix hidden;                // [row_count, stride] bf16
  ShardWeights shard;                // bf16
  const int32_t* targets = nullptr;  // [row_count], columns of the whole vocabulary
  Transform transform;
  void* scratch = nullptr;     // DistributionScratchBytes()
  void* products = nullptr;    // [row_count, product_stride] fp32 out, as LogitsView has them; null: not written
  int64_t product_stride = 0;  // a multiple of 4, >= columns
};

int64_t DistributionScratchBytes(int64_t row_count, int64_t columns);

// out[i] as LaunchRowStats() with CrossEntropyOptions::want_rest writes it, `linear` without class weights.
cudaError_t LaunchDistributionProduct(const DistributionProductParams& params, RowStats* out, cudaStream_t stream);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_DISTRIBUTION_PRODUCT_H_
