#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kernels/cuda/device/elements.cuh"
#include "kernels/cuda/rows/reference_row.h"

namespace headwater::cuda {
namespace {

using elements::Rounded;
using elements::ValueOf;

constexpr int kThreads = 128;
constexpr float kLargestBias = 100.0f;  // larger ones mask ids, and say nothing of where the others' logits are

unsigned BlocksOf(int64_t elements) { return static_cast<unsigned>((elements + kThreads - 1) / kThreads); }

// One thread an element; the samples in order.
__global__ void __launch_bounds__(kThreads)
    SumReferenceKernel(const __nv_bfloat16* weight, const __nv_bfloat16* bias, int64_t columns, int64_t stride, int64_t samples,
                       double factor, double* sums) {
  const int64_t element = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (element > stride) return;
  double sum = 0;
#pragma unroll 8
  for (int64_t sample = 0; sample < samples; ++sample) {
    const int64_t column = sample * columns / samples;
    if (element < stride) {
      sum += ValueOf<double>(weight[column * stride + element]);
    } else if (bias != nullptr) {
      sum += static_cast<double>(fminf(fmaxf(ValueOf<float>(bias[column]), -kLargestBias), kLargestBias));
    }
  }
  sums[element] = factor * sum;
}

__global__ void __launch_bounds__(kThreads) RoundReferenceKernel(const double* sums, int64_t count, __nv_bfloat16* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) out[i] = Rounded<__nv_bfloat16>(static_cast<float>(sums[i]));
}

}  // namespace

cudaError_t LaunchSumReference(const ShardWeights& shard, double factor, double* sums, cudaStream_t stream) {
  if (shard.element != Element::kBFloat16) return cudaErrorInvalidValue;
  SumReferenceKernel<<<BlocksOf(shard.stride + 1), kThreads, 0, stream>>>(
      static_cast<const __nv_bfloat16*>(shard.weight), static_cast<const __nv_bfloat16*>(shard.bias), shard.columns, shard.stride,
      ReferenceSamples(shard.columns), factor, sums);
  return cudaGetLastError();
}

cudaError_t LaunchRoundReference(const double* sums, int64_t count, void* out, cudaStream_t stream) {
  RoundReferenceKernel<<<BlocksOf(count), kThreads, 0, stream>>>(sums, count, static_cast<__nv_bfloat16*>(out));
  return cudaGetLastError();
}

}  // namespace headwater::cuda
