// Operations on a head's parameters and accumulators, element by element, on flat arrays (padding included: it is 0 and stays 0).
#ifndef HEADWATER_KERNELS_CUDA_ROWS_PARAMETERS_H_
#define HEADWATER_KERNELS_CUDA_ROWS_PARAMETERS_H_

#include "kernels/core/optimizer_scalars.h"
#include "kernels/cuda/launch_types.h"

namespace headwater::cuda {

using headwater::AdamWScalars;
using headwater::SgdScalars;

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

// One read and one write of each array. The formulas are those of kernels/cpu/rows/row_kernels_impl.h, where the compiler fuses
// operations as the CPU's instruction set allows. Here every rounding is spelled out, so that all GPUs agree bit for bit. Arrays
// that are not aligned (16 bytes; `stored` 8) are only slower. cudaErrorInvalidValue for a `stored` that is not of 16 bits.
cudaError_t LaunchAdamW(const AdamWScalars& scalars, const ParameterArrays& arrays, cudaStream_t stream);
cudaError_t LaunchSgd(const SgdScalars& scalars, const ParameterArrays& arrays, cudaStream_t stream);

// Bytes of scratch that LaunchGradientStats needs.
inline constexpr int64_t kGradientStatsBytes = int64_t{1} << 16;
struct GradientStatsResult {
  double norm_squared;
  int64_t non_finite_count;
};
// result = sum of squares in fp64 and number of non-finite elements of `gradient` [count]. `scratch` has kGradientStatsBytes,
// aligned to 16. NaN and infinities are counted, and are in the sum too, as CpuEngine has it. The same bits on every GPU.
cudaError_t LaunchGradientStats(const float* gradient, int64_t count, void* scratch, GradientStatsResult* result,
                                cudaStream_t stream);

// y += alpha * x, fused.
cudaError_t LaunchAddScaled(const float* x, int64_t count, float alpha, float* y, cudaStream_t stream);
// y = fp32(y + fp32(alpha * x)): two roundings, never fused.
cudaError_t LaunchAddProduct(const float* x, int64_t count, float alpha, float* y, cudaStream_t stream);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_ROWS_PARAMETERS_H_
