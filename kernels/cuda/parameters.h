// What is done to a head's parameters and accumulators, element by element, on flat arrays (padding included: it is 0 and stays 0).
#ifndef HEADWATER_KERNELS_CUDA_PARAMETERS_H_
#define HEADWATER_KERNELS_CUDA_PARAMETERS_H_

#include "kernels/cuda/launch_types.h"

namespace headwater::cuda {

// Scalars in fp32, taken from fp64 once, as CpuEngine does.
struct AdamWScalars {
  float multiplier;
  float decay;  // 1 - lr * weight_decay
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float step_size;        // lr / (1 - beta1^t)
  float root_correction;  // sqrt(1 - beta2^t), a divisor
  float epsilon;
};

struct SgdScalars {
  float multiplier;
  float learning_rate;
  float weight_decay;
  float momentum;
  float one_minus_dampening;
  bool first_step;
  bool nesterov;
};

// fp32 arrays of `count` elements; `stored` is the 16-bit tensor that follows the master (null if there is none).
struct ParameterArrays {
  float* parameter = nullptr;
  float* gradient = nullptr;  // set to 0
  float* moment1 = nullptr;   // AdamW; SGD with momentum, else null
  float* moment2 = nullptr;   // AdamW
  void* stored = nullptr;
  Element stored_element = Element::kFloat32;
  int64_t count = 0;
};

// One read and one write of each array: bit for bit the operations of kernels/cpu/row_kernels_impl.h, in the same order, so that
// nothing is fused there that is not fused here.
cudaError_t LaunchAdamW(const AdamWScalars& scalars, const ParameterArrays& arrays, cudaStream_t stream);
cudaError_t LaunchSgd(const SgdScalars& scalars, const ParameterArrays& arrays, cudaStream_t stream);

// Bytes of scratch that LaunchGradientStats needs.
inline constexpr int64_t kGradientStatsBytes = int64_t{1} << 16;
struct GradientStatsResult {
  double norm_squared;
  int64_t non_finite_count;
};
// result = sum of squares in fp64 and number of non-finite elements of `gradient` [count]. `scratch` has kGradientStatsBytes.
// NaN and infinities are counted, and stay out of the sum only as far as CpuEngine keeps them out.
cudaError_t LaunchGradientStats(const float* gradient, int64_t count, void* scratch, GradientStatsResult* result,
                                cudaStream_t stream);

// y += alpha * x, fused.
cudaError_t LaunchAddScaled(const float* x, int64_t count, float alpha, float* y, cudaStream_t stream);
// y = fp32(y + fp32(alpha * x)): two roundings, never fused.
cudaError_t LaunchAddProduct(const float* x, int64_t count, float alpha, float* y, cudaStream_t stream);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_PARAMETERS_H_
