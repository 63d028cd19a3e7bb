// A head's reference row: the mean of some of its rows, the same on every rank of a group. A row's product with it is near the mean
// of its logits, wherever they lie. Each rank has it without the others, as the offset of exponentials (products/e_product.h).
#ifndef HEADWATER_KERNELS_CUDA_ROWS_REFERENCE_ROW_H_
#define HEADWATER_KERNELS_CUDA_ROWS_REFERENCE_ROW_H_

#include <algorithm>

#include "kernels/cuda/launch_types.h"

namespace headwater::cuda {

// Rows that a shard of so many columns contributes, evenly spaced.
constexpr int64_t ReferenceSamples(int64_t columns) { return std::min<int64_t>(columns, 256); }

// sums [shard.stride + 1] fp64: factor * the sum of the shard's samples. Behind their elements stands that of their biases, each
// limited to 100 in size; 0 without. The shard is bf16; columns may be 0.
cudaError_t LaunchSumReference(const ShardWeights& shard, double factor, double* sums, cudaStream_t stream);
// out [count] bf16 = sums.
cudaError_t LaunchRoundReference(const double* sums, int64_t count, void* out, cudaStream_t stream);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_ROWS_REFERENCE_ROW_H_
