// The steps around the products of every form: the target's logit, factors applied to rows, the target's share of both gradients.
// M, row_factor and target_factor: row_passes.h.
#ifndef HEADWATER_KERNELS_CUDA_ROWS_FINISH_H_
#define HEADWATER_KERNELS_CUDA_ROWS_FINISH_H_

#include "kernels/cuda/launch_types.h"

namespace headwater::cuda {

// arguments[i] = logit_scale * (`hidden_i . w_y` + bias_y) for the rows whose target lies in this shard; `targets` null: y is the
// shard's first column in all rows. Other rows are left alone (the caller sets them to 0 before the first shard). Computed by an
// fp32 dot with 8 partial sums a lane (fp64 if hidden is kFloat32) outside the tensor cores, whose accumulation truncates. That
// bias would be the relative loss error of a confident row.
cudaError_t LaunchTargetArguments(const ConstMatrix& hidden, const ShardWeights& shard, const int32_t* targets, double logit_scale,
                                  double* arguments, cudaStream_t stream);

// scaled [rows, stride] = hidden_i * row_factor_i * 2^-exponent in `scaled`'s element. `exponent` is chosen for the whole chunk so
// that nothing overflows fp16 (0 for other elements). The factor of the grad_weight product is *alpha = 2^exponent, on the device.
// Padding stays 0.
cudaError_t LaunchScaleRows(const ConstMatrix& hidden, const float* row_factor, const MutableMatrix& scaled, float* alpha,
                            cudaStream_t stream);

// Where a chunk's grad_hidden goes.
struct GradHiddenTarget {
  // Exactly one of them. `sum` [chunk rows, stride] fp32: row map[i] += (no scale yet). `out`: row map[i] = scale * value.
  float* sum = nullptr;
  int64_t sum_stride = 0;
  void* out = nullptr;  // host-visible or device memory, contiguous rows of `width`
  Element out_element = Element::kFloat32;
  int64_t out_stride = 0;
  const int32_t* map = nullptr;   // [rows], or null: row i
  float scale = 1;                // grad_hidden_scale; `out` only
  uint8_t* non_finite = nullptr;  // [rows]: set to 1 where a written row is not finite in `out_element`; `out` only; or null
};

// value_i = row_factor_i * product_i + target_factor_i * w_{y_i} (the second part only if the target lies in this shard).
// product [rows, stride] fp32.
cudaError_t LaunchFinishGradHidden(const ConstMatrix& product, const float* row_factor, const float* target_factor,
                                   const int32_t* targets, const ShardWeights& shard, const GradHiddenTarget& target,
                                   cudaStream_t stream);
// Like LaunchFinishGradHidden() for a product that ranks add up, with nearly all rows unchanged. product_i becomes the rank's share
// of value_i / LateFactor_i; the late factor is row_factor_i, or 1 if row_factor_i would lose digits. Rows whose target lies in
// another shard are not touched.
cudaError_t LaunchFinishShare(const MutableMatrix& product, const float* row_factor, const float* target_factor,
                              const int32_t* targets, const ShardWeights& shard, cudaStream_t stream);

// [rows]. Sums of such shares have both, other sums none.
struct ShareFactors {
  const float* row_factor = nullptr;
  const float* target_factor = nullptr;
};
// The rest of a chunk whose grad_hidden was summed: out[map[i], :] = scale * sum[i, :], of shares times LateFactor_i.
cudaError_t LaunchWriteGradHidden(const ConstMatrix& sum, const ShareFactors& factors, const GradHiddenTarget& target,
                                  cudaStream_t stream);

// Rows of a chunk grouped by target, in increasing order of target and then row: group g is order[starts[g], starts[g + 1]).
struct TargetGroups {
  const int32_t* order = nullptr;
  const int32_t* starts = nullptr;  // [group_count + 1]
  int32_t group_count = 0;
};
// grad_weight[y - vocab_start, :] += factor * sum over the group of target_factor_i * hidden_i. grad_bias (if not null) gets the
// sum of target_factor_i alone. Only groups whose target lies in this shard. One block a vocabulary row: no atomics. grad_weight
// rows have shard.stride elements.
cudaError_t LaunchAddTargetRows(const ConstMatrix& hidden, const float* target_factor, const int32_t* targets,
                                const TargetGroups& groups, const ShardWeights& shard, float factor, float* grad_weight,
                                float* grad_bias, cudaStream_t stream);

// grad_bias[v] += factor * sum_i row_factor_i * M_iv for the shard's columns. Fixed order. `scratch` has GradBiasScratchBytes().
int64_t GradBiasScratchBytes(int64_t columns);
cudaError_t LaunchAddGradBias(const ConstMatrix& matrix, const float* row_factor, float factor, void* scratch, float* grad_bias,
                              cudaStream_t stream);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_ROWS_FINISH_H_
