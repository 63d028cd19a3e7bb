// Epilogue of product 1 in the E form: what the softmax needs of a tile of logits, without the logits ever leaving registers.
//
// z = softcap * tanh(u / softcap), u = logit_scale * (acc + bias); without a softcap z = u.
//   E_ij = bf16(exp(z_ij - c_i)), 0 at the target; times 1 - (z/softcap)^2 if there is a softcap: the gradient's factor
//   partial_sum[tile, i] = sum over the tile's columns j, without the target, of exp(z_ij - c_i): fp32, unrounded, without that
//   factor partial_max[tile, i] = largest z_ij of them, in nats (policy kMax)
// c_i is the target's logit, from a dot product of its own: then log1p(S_i) is the loss, exact for confident rows. bf16 has fp32's
// exponent range, so one offset a row is enough while max_j z_ij - c_i stays under 60 nats, and S_i itself tells: it is then >=
// e^60.
//
// Cost      per element one FFMA, one EX2, one FADD and half a conversion; comparisons with the target only in the few 16 x 64
// blocks
//           that hold a target or the vocabulary's edge. Two shuffles a row and tile: a row lies in one quad.
// Numerics  exp2 of a fused multiply-add: relative error 2^-22 + 2^-24 * |z_ij - c_i| + 2^-24 * |c_i| (c_i * log2 e is rounded).

#ifndef HEADWATER_KERNELS_LAB_E_PRODUCT_CUH_
#define HEADWATER_KERNELS_LAB_E_PRODUCT_CUH_

#include "sm90_product.cuh"

namespace headwater::sm90 {

template <bool kWithBias, bool kWithSoftcap, bool kWithMax>
struct EProductEpilogue {
  struct Params {
    const float* offset;     // [m] c_i, nats
    const int32_t* targets;  // [m] column of the target, or -1
    const float* bias;       // [n]; null without kWithBias
    float* partial_sum;      // [column tiles, m] out
    float* partial_max;      // [column tiles, m] out; null without kWithMax
    float logit_scale;
    float softcap;  // nats, > 0; not read without kWithSoftcap
  };
  struct Rows {
    float offset_log2[2];
    int32_t target[2];
  };

  static __device__ __forceinline__ Rows LoadRows(const Params& params, const EpiloguePosition& position) {
    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = position.row + position.lane / 4 + 8 * half;
      rows.offset_log2[half] = row < position.m ? params.offset[row] * kLog2E : 0.0f;
      rows.target[half] = (row < position.m ? params.targets[row] : -1) - position.column;
    }
    return rows;
  }

  // 64 columns from `first` on: exponentials into `packed`, sums and maxima into the running ones.
  template <bool kMasked>
  static __device__ __forceinline__ void Block(const float* accumulators, int first, const Rows& rows, const Params& params,
                                               const EpiloguePosition& position, uint32_t (&packed)[16], float (&sum)[2],
                                               float (&largest)[2]) {
    const float scale_log2 = params.logit_scale * kLog2E;
    const float tanh_scale = kWithSoftcap ? 2.0f * scale_log2 / params.softcap : 0.0f;
    const float softcap_log2 = kWithSoftcap ? params.softcap * kLog2E : 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int32_t pair = first + 8 * j + 2 * (position.lane % 4);
      float bias[2] = {0.0f, 0.0f};
      if constexpr (kWithBias) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int32_t column = position.column + pair + i;
          bias[i] = !kMasked || column < position.n ? __ldg(params.bias + column) : 0.0f;
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float value[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float logit = accumulators[4 * j + 2 * half + i];
          if constexpr (kWithBias) logit += bias[i];
          float exponent, factor = 1.0f;
          if constexpr (kWithSoftcap) {
            const float tanh_value = 1.0f - 2.0f * ReciprocalApprox(1.0f + Exp2(logit * tanh_scale));
            exponent = fmaf(tanh_value, softcap_log2, -rows.offset_log2[half]);
            factor = fmaf(-tanh_value, tanh_value, 1.0f);
          } else {
            exponent = fmaf(logit, scale_log2, -rows.offset_log2[half]);
          }
          float exponential = Exp2(exponent);
          bool counted = true;
          if constexpr (kMasked) {
            counted = pair + i != rows.target[half] && position.column + pair + i < position.n;
            if (!counted) exponential = 0.0f;
          }
          sum[half] += exponential;
          if constexpr (kWithMax) largest[half] = counted ? fmaxf(largest[half], exponent) : largest[half];
          value[i] = kWithSoftcap ? exponential * factor : exponential;
        }
        packed[2 * j + half] = PackBf16(value[0], value[1]);
      }
    }
  }

  template <int kAccumulators>
  static __device__ __forceinline__ void Run(float (&accumulators)[kAccumulators], const Rows& rows, const Params& params,
                                             const EpiloguePosition& position) {
    float sum[2] = {0.0f, 0.0f};
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int block = 0; block < kAccumulators / 32; ++block) {
      const int first = 64 * block;
      const bool holds_target =
          static_cast<uint32_t>(rows.target[0] - first) < 64u || static_cast<uint32_t>(rows.target[1] - first) < 64u;
      uint32_t packed[16];
      if (__any_sync(0xffffffffu, holds_target || position.column + first + 64 > position.n)) {
        Block<true>(accumulators + 32 * block, first, rows, params, position, packed, sum, largest);
      } else {
        Block<false>(accumulators + 32 * block, first, rows, params, position, packed, sum, largest);
      }
      StoreBf16Block(position, block, packed);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
      if constexpr (kWithMax) {
        largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 1));
        largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 2));
      }
      const int32_t row = position.row + position.lane / 4 + 8 * half;
      if (position.lane % 4 == 0 && row < position.m) {
        const int64_t index = static_cast<int64_t>(position.column_tile) * position.m + row;
        params.partial_sum[index] = sum[half];
        if constexpr (kWithMax) params.partial_max[index] = (largest[half] + rows.offset_log2[half]) / kLog2E;
      }
    }
  }
};

}  // namespace headwater::sm90

#endif  // HEADWATER_KERNELS_LAB_E_PRODUCT_CUH_
