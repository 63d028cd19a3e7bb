// Epilogues of the two gradient products of the E form.

#ifndef HEADWATER_KERNELS_LAB_GRADIENT_EPILOGUES_CUH_
#define HEADWATER_KERNELS_LAB_GRADIENT_EPILOGUES_CUH_

#include "sm90_product.cuh"

namespace headwater::sm90 {

// grad_weight [m, n] fp32 += scale * acc, added in L2 by the copy engine: the accumulator is never read into an SM, and the
// additions of one tile run under the main loop of the next. Each element is added to once a launch, by one CTA: repeatable.
struct GradWeightEpilogue {
  struct Params {
    float scale;
  };
  struct Rows {};

  static __device__ __forceinline__ Rows LoadRows(const Params&, const EpiloguePosition&) { return {}; }

  template <int kAccumulators>
  static __device__ __forceinline__ void Run(float (&accumulators)[kAccumulators], const Rows&, const Params& params,
                                             const EpiloguePosition& position) {
    const int32_t quad_row = position.lane / 4;
#pragma unroll
    for (int block = 0; block < kAccumulators / 16; ++block) {  // 32 columns: one box of 128 bytes a row
      const uint32_t box = TakeBox(position, block);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2 value[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* source = accumulators + 16 * block + 4 * j + 2 * half;
          value[j] = make_float2(source[0] * params.scale, source[1] * params.scale);
        }
        // A half warp stores 8 bytes each of four rows. Were all to store the same columns, rows 2 i and 2 i + 1 would meet in the
        // same banks (the swizzle exchanges 16-byte columns within such a pair): odd rows store columns j ^ 2 instead.
        const bool odd = quad_row % 2 != 0;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float2 low = value[j], high = value[j + 2];
          value[j] = odd ? high : low;
          value[j + 2] = odd ? low : high;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          // 16-byte column 2 j + (lane % 4) / 2 of the box, swizzled by the row; rows r and r + 8 swizzle alike.
          const int32_t column = 2 * (j ^ (odd ? 2 : 0)) + position.lane % 4 / 2;
          const uint32_t address = box + (quad_row + 8 * half) * 128 + ((column ^ quad_row) << 4) + position.lane % 2 * 8;
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(value[j].x), "f"(value[j].y) : "memory");
        }
      }
      FenceProxyAsync();
      __syncwarp();
      if (position.lane == 0) {
        TensorReduceAdd(position.map_c, box, position.column + 32 * block, position.row, position.policy_c);
        StoreCommit();
      }
    }
  }
};

// The same addition straight from registers, 8 bytes a thread and 32 contiguous bytes a quad, without shared memory.
struct GradWeightDirectEpilogue {
  struct Params {
    float* grad_weight;  // [m, n]
    float scale;
  };
  struct Rows {};

  static __device__ __forceinline__ Rows LoadRows(const Params&, const EpiloguePosition&) { return {}; }

  template <int kAccumulators>
  static __device__ __forceinline__ void Run(float (&accumulators)[kAccumulators], const Rows&, const Params& params,
                                             const EpiloguePosition& position) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = position.row + position.lane / 4 + 8 * half;
      float* out = params.grad_weight + static_cast<int64_t>(row) * position.n + position.column + 2 * (position.lane % 4);
#pragma unroll
      for (int j = 0; j < kAccumulators / 4; ++j) {
        if (row < position.m && position.column + 8 * j + 2 * (position.lane % 4) < position.n) {
          asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(out + 8 * j),
                       "f"(accumulators[4 * j + 2 * half] * params.scale), "f"(accumulators[4 * j + 2 * half + 1] * params.scale)
                       : "memory");
        }
      }
    }
  }
};

// grad_hidden [m, n] bf16 = row_factor_i * acc - target_factor_i * weight[target_i, :], with row_factor = g / (1 + S) and
// target_factor = g * S / (1 + S): the target's term never enters a 16-bit matrix, and the result is rounded once.
struct GradHiddenEpilogue {
  struct Params {
    const float* row_factor;      // [m]
    const float* target_factor;   // [m]
    const int32_t* targets;       // [m] row of weight, >= 0
    const __nv_bfloat16* weight;  // [vocab, n]
  };
  struct Rows {
    float row_factor[2];
    float target_factor[2];
    int32_t target[2];
  };

  static __device__ __forceinline__ Rows LoadRows(const Params& params, const EpiloguePosition& position) {
    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = position.row + position.lane / 4 + 8 * half;
      const bool valid = row < position.m;
      rows.row_factor[half] = valid ? params.row_factor[row] : 0.0f;
      rows.target_factor[half] = valid ? params.target_factor[row] : 0.0f;
      rows.target[half] = valid ? params.targets[row] : 0;
    }
    return rows;
  }

  template <int kAccumulators>
  static __device__ __forceinline__ void Run(float (&accumulators)[kAccumulators], const Rows& rows, const Params& params,
                                             const EpiloguePosition& position) {
#pragma unroll
    for (int block = 0; block < kAccumulators / 32; ++block) {
      uint32_t packed[16];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int32_t column = position.column + 64 * block + 8 * j + 2 * (position.lane % 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // n is even (rows are 16-byte aligned), so a pair lies wholly inside or outside.
          __nv_bfloat162 weight = __floats2bfloat162_rn(0.0f, 0.0f);
          if (column < position.n) {
            weight = *reinterpret_cast<const __nv_bfloat162*>(params.weight + static_cast<int64_t>(rows.target[half]) * position.n +
                                                              column);
          }
          const float* value = accumulators + 32 * block + 4 * j + 2 * half;
          packed[2 * j + half] = PackBf16(fmaf(rows.row_factor[half], value[0], -rows.target_factor[half] * __low2float(weight)),
                                          fmaf(rows.row_factor[half], value[1], -rows.target_factor[half] * __high2float(weight)));
        }
      }
      StoreBf16Block(position, block, packed);
    }
  }
};

}  // namespace headwater::sm90

#endif  // HEADWATER_KERNELS_LAB_GRADIENT_EPILOGUES_CUH_
