// The effect of the caller's factors on a row's gradient, for every form.
#ifndef HEADWATER_KERNELS_CUDA_DEVICE_ROW_FACTORS_CUH_
#define HEADWATER_KERNELS_CUDA_DEVICE_ROW_FACTORS_CUH_

#include <cstdint>

#include "kernels/core/loss/row_loss.h"
#include "kernels/cuda/rows/row_passes.h"

namespace headwater::cuda::row_factors {

__device__ __forceinline__ double FactorOf(const float* factors, int64_t row, double absent) {
  return factors == nullptr ? absent : static_cast<double>(factors[row]);
}

// The factor of everything in a row's gradient: loss_scale * token weight * logit_scale.
__device__ __forceinline__ double GradientFactor(const ChunkRows& rows, const FinishOptions& options, int64_t row) {
  return options.loss_scale * FactorOf(rows.token_weights, row, 1) * options.transform.logit_scale;
}

// d(objective)/d(logit argument) = factor * gradient, hard_weight and the softcap aside.
struct FactoredGradient {
  double factor;
  RowGradient gradient;
};

// The token weight is in `factor`, unless entropy or log-sum-exp have factors in this row: then in `gradient`.
__device__ __forceinline__ FactoredGradient FactoredGradientOf(const RowLoss& loss, const ChunkRows& rows,
                                                               const FinishOptions& options, int64_t row) {
  const RowFactors factors = {FactorOf(rows.token_weights, row, 1), FactorOf(rows.entropy_factors, row, 0),
                              FactorOf(rows.lse_factors, row, 0)};
  if (factors.entropy == 0 && factors.lse == 0) return {GradientFactor(rows, options, row), GradientOf(loss, RowFactors())};
  return {options.loss_scale * options.transform.logit_scale, GradientOf(loss, factors)};
}

}  // namespace headwater::cuda::row_factors

#endif  // HEADWATER_KERNELS_CUDA_DEVICE_ROW_FACTORS_CUH_
