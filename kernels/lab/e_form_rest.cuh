// What the E form needs beside its three products: target logits, row factors, the scaled hidden states, the targets' rows.

#ifndef HEADWATER_KERNELS_LAB_E_FORM_REST_CUH_
#define HEADWATER_KERNELS_LAB_E_FORM_REST_CUH_

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace headwater::sm90 {

// R = rows (tokens), H = width, V = vocabulary.

struct Bf16x8 {
  uint4 raw;
  __device__ __forceinline__ void ToFloat(float (&out)[8]) const {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = __uint_as_float(words[i] << 16);
      out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
};

// offset[i] = logit of row i's target, by an fp32 dot product that does not go through the tensor cores (whose accumulation
// truncates: -1.2e-5 to -4.8e-5 of a logit would be the relative loss error of a confident row). bf16 hidden [R, H], weight [V, H].
// Mapping: one warp a row, 16-byte loads; reads 4 R H bytes. Requires H a multiple of 8.
static __global__ void __launch_bounds__(256)
    TargetLogitKernel(const __nv_bfloat16* hidden, const __nv_bfloat16* weight, const int32_t* targets, const float* bias,
                      float logit_scale, float softcap, int32_t rows, int32_t width, float* offset) {
  const int32_t row = static_cast<int32_t>(blockIdx.x) * 8 + static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  if (row >= rows) return;
  const int32_t target = targets[row];
  const auto* x = reinterpret_cast<const Bf16x8*>(hidden + static_cast<int64_t>(row) * width);
  const auto* w = reinterpret_cast<const Bf16x8*>(weight + static_cast<int64_t>(target) * width);
  float sum = 0.0f;
#pragma unroll 4
  for (int32_t i = lane; i < width / 8; i += 32) {
    float a[8], b[8];
    Bf16x8{__ldg(&x[i].raw)}.ToFloat(a);
    Bf16x8{__ldg(&w[i].raw)}.ToFloat(b);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = fmaf(a[j], b[j], sum);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (lane == 0) {
    float logit = logit_scale * (bias != nullptr ? sum + bias[target] : sum);
    if (softcap > 0.0f) logit = softcap * tanhf(logit / softcap);
    offset[row] = logit;
  }
}

// S_i = sum of partial_sum[tile, i] in a fixed order; token_loss = log1p(S), row_factor = g / (1 + S), target_factor = g S / (1 +
// S). An infinite S (max_j z_ij - z_iy over 88 nats) gives infinite loss and row factor 0: the caller repeats such rows with c_i =
// max. Mapping: 32 rows a block, 16 slices of tiles; reads 4 tiles R bytes.
static __global__ void __launch_bounds__(512)
    FinishRowsKernel(const float* partial_sum, int32_t tiles, int32_t rows, const float* grad_loss, float* token_loss,
                     float* row_factor, float* target_factor) {
  __shared__ float slices[16][33];
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, slice = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t row = static_cast<int32_t>(blockIdx.x) * 32 + lane;
  float sum = 0.0f;
  if (row < rows) {
#pragma unroll 8
    for (int32_t tile = slice; tile < tiles; tile += 16) sum += partial_sum[static_cast<int64_t>(tile) * rows + row];
  }
  slices[slice][lane] = sum;
  __syncthreads();
  if (slice != 0 || row >= rows) return;
  for (int i = 1; i < 16; ++i) sum += slices[i][lane];
  const float factor = grad_loss[row] / (1.0f + sum);
  token_loss[row] = log1pf(sum);
  row_factor[row] = factor;
  target_factor[row] = isinf(sum) ? grad_loss[row] : factor * sum;
}

// scaled [R, H] = bf16(row_factor_i * hidden_i). Reads and writes 2 R H bytes each. Requires R * H a multiple of 8.
static __global__ void __launch_bounds__(256) ScaleRowsKernel(const __nv_bfloat16* hidden, const float* row_factor, int64_t vectors,
                                                              int32_t vectors_per_row, __nv_bfloat16* scaled) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= vectors) return;
  const float factor = __ldg(row_factor + i / vectors_per_row);
  float x[8];
  Bf16x8{__ldg(reinterpret_cast<const uint4*>(hidden) + i)}.ToFloat(x);
  __nv_bfloat162 out[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) out[j] = __floats2bfloat162_rn(x[2 * j] * factor, x[2 * j + 1] * factor);
  reinterpret_cast<uint4*>(scaled)[i] = *reinterpret_cast<const uint4*>(out);
}

// grad_weight[y, :] -= sum over the rows i of target y of target_factor_i * hidden_i. `order` lists rows grouped by target,
// group u being order[starts[u] .. starts[u + 1]): one CTA a vocabulary row and a fixed order, so repeatable without atomics.
// Reads 2 R H bytes, reads and writes 4 H bytes a distinct target. Requires H a multiple of 4.
static __global__ void __launch_bounds__(256)
    SubtractTargetsKernel(const __nv_bfloat16* hidden, const float* target_factor, const int32_t* targets, const int32_t* order,
                          const int32_t* starts, int32_t width, float* grad_weight) {
  const int32_t first = starts[blockIdx.x], last = starts[blockIdx.x + 1];
  float4* out = reinterpret_cast<float4*>(grad_weight + static_cast<int64_t>(targets[order[first]]) * width);
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < width / 4; i += 256) {
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int32_t member = first; member < last; ++member) {
      const int32_t row = order[member];
      const float factor = target_factor[row];
      const auto* x = reinterpret_cast<const __nv_bfloat162*>(hidden + static_cast<int64_t>(row) * width) + 2 * i;
      const float2 low = __bfloat1622float2(x[0]), high = __bfloat1622float2(x[1]);
      sum.x = fmaf(factor, low.x, sum.x);
      sum.y = fmaf(factor, low.y, sum.y);
      sum.z = fmaf(factor, high.x, sum.z);
      sum.w = fmaf(factor, high.y, sum.w);
    }
    float4 value = out[i];
    value.x -= sum.x;
    value.y -= sum.y;
    value.z -= sum.z;
    value.w -= sum.w;
    out[i] = value;
  }
}

}  // namespace headwater::sm90

#endif  // HEADWATER_KERNELS_LAB_E_FORM_REST_CUH_
