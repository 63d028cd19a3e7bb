// The E form's first product on Hopper: exponentials and their sums out of the accumulators; logits are never written.
//
//   E_ij = bf16(exp(z_ij - c_i)), 0 at the target; times dz/da of the softcap, if there is one
//   S_i  = sum over j != y_i of exp(z_ij - c_i), fp32 partials per column tile, unrounded, without that factor
// c_i is any offset near the row's logits. It is the target's logit z_{y_i}, or on a rank of a group, which may lack the target,
// the reference row's (rows/reference_row.h). Let t = exp(z_{y_i} - c_i). Then
//   loss = log1p(S / t), and M = E with row_factor = g / (t + S), target_factor = -g S / (t + S): see row_passes.h.
// The form takes a bf16 cross entropy with a target in every row. It takes bias, logit scale, softcap, z-loss, class and token
// weights, factors of the log-sum-exp, a temperature. It takes no smoothing, no entropy and its kin, no argmax. sm_90 only.
#ifndef HEADWATER_KERNELS_CUDA_PRODUCTS_E_PRODUCT_H_
#define HEADWATER_KERNELS_CUDA_PRODUCTS_E_PRODUCT_H_

#include "kernels/cuda/launch_types.h"
#include "kernels/cuda/rows/row_passes.h"

namespace headwater::cuda {

// Floats of `partial_sums` for one shard.
int64_t EProductPartialCount(int64_t row_count, int64_t columns);

struct EProductParams {
  ConstMatrix hidden;                // [row_count, stride] bf16
  ShardWeights shard;                // bf16
  const int32_t* targets = nullptr;  // [row_count], columns of the whole vocabulary
  const double* offsets = nullptr;   // [row_count] c_i, before the softcap
  Transform transform;
  void* exponentials = nullptr;   // [row_count, e_stride] bf16 out
  int64_t e_stride = 0;           // a multiple of 8, >= columns; columns up to it are written as 0 or left: never read
  float* partial_sums = nullptr;  // [tiles, row_count] out
};
cudaError_t LaunchEProduct(const EProductParams& params, cudaStream_t stream);

// sums[i] = S of one shard, the tiles in order (fp64).
cudaError_t LaunchSumPartials(const float* partial_sums, int64_t row_count, int64_t columns, double* sums, cudaStream_t stream);

// rows[i].unit = the row's resolution in units of E: the largest power of two <= resolution * S, of the sums [shard_count,
// row_count]; 0 if there is none. The rest of rows[i] is LaunchFinishERows()'s.
cudaError_t LaunchEResolutions(const double* sums, int32_t shard_count, int64_t row_count, double resolution, DitherRow* rows,
                               cudaStream_t stream);

// Rows whose largest logit, the target's aside, is more than this above c_i cannot take the form; S shows them.
inline constexpr double kEFormLargestSum = 1.1420073898156842e26;  // e^60

// sums [shard_count, row_count]; the targets' arguments, of all shards', and the offsets [row_count]. Writes reports, row_factor
// and target_factor. Sets *overflow = 1 if a sum is over kEFormLargestSum or not finite, or a target's logit is not finite, and
// leaves it alone otherwise. All ranks have these alike, whatever each has read as its rows, so all decide alike. The chunk must
// then be computed by the R form. With a resolution `dither` [row_count] is completed.
cudaError_t LaunchFinishERows(const double* sums, int32_t shard_count, const double* target_arguments, const double* offsets,
                              const ChunkRows& rows, const FinishOptions& options, RowReport* reports, float* row_factor,
                              float* target_factor, int32_t* overflow, DitherRow* dither, cudaStream_t stream);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_PRODUCTS_E_PRODUCT_H_
