// Epilogue of product 1 that writes no E: exponentials below a row's resolution are dithered, and what is not zero then is appended
// to the pool that gradient_lists.cuh sorts.
//
//   e_ij = exp(logit_scale * acc - c_i), 0 at the target; partial_sum as EProductEpilogue has it
//   e_ij < unit_i: an entry of unit_i with probability e_ij / unit_i, else none; e_ij >= unit_i: an entry of bf16(e_ij)
// unit_i is a power of two.
//
// Draws     kStraight, kRolled: a hash of the row's key and the column for every element.
//           kSystematic: one a group of 16 columns of a row, {8 j + 2 g, 8 j + 2 g + 1} of each 64 columns, g < 4, which a lane has
//           in its accumulators. The ratios e_ij / unit_i of a group are added up from the draw on, in (0, 1); an entry survives
//           where the sum reaches 1, which is taken off then. Every entry's probability is its ratio, as before; entries of one
//           group exclude each other. That takes one multiply-add an element instead of a hash.
// Pool      Entries of a warp's 16 rows of a tile meet in its staging memory (4 bytes each) and take one atomic addition to the
//           pool's counter; entries beyond the staging memory take one each. Their order in the pool is not repeatable, their
//           set is. Entries beyond the pool's capacity are counted only: the micro-batch is computed densely then.
// Code      kStraight is straight code over registers. kRolled loops over exponentials in staging memory. kSystematic does so for
//           those 16 accumulators of a warp among which a sum reaches 1.

#ifndef HEADWATER_KERNELS_LAB_LIST_PRODUCT_CUH_
#define HEADWATER_KERNELS_LAB_LIST_PRODUCT_CUH_

#include "sm90_product.cuh"

namespace headwater::sm90 {

// What a row's draws are made of.
struct DrawKey {
  uint32_t low;
  uint32_t high;
};

// 32 uniform bits.
__host__ __device__ __forceinline__ uint32_t Draw(DrawKey key, uint32_t column) {
  uint32_t x = (column * 0x9E3779B1u) ^ key.low;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15) ^ key.high) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

enum class Dithering { kNone, kStraight, kRolled, kSystematic };

template <Dithering kDithering>
struct ListProductEpilogue {
  struct Params {
    const float* offset;     // [m] c_i, nats
    const int32_t* targets;  // [m] column of the target, or -1
    const float* units;      // [m]
    const DrawKey* keys;     // [m]
    float* partial_sum;      // [column tiles, m] out
    uint32_t* pool_keys;     // [capacity] out: column << row_bits | row
    float* pool_values;      // [capacity] out
    uint32_t* pool_count;    // in and out
    uint32_t capacity;
    int32_t row_bits;
    float logit_scale;
  };
  struct Rows {
    float offset_log2[2];
    int32_t target[2];
  };
  // The staging memory of a warp: a counter, entries, and but for kStraight exponentials from its middle on.
  static constexpr uint32_t kRoom = (kDithering == Dithering::kStraight ? kStagingBytes : kStagingBytes / 2) / 4 - 1;

  struct Dither {
    float unit[2];
    float inverse[2];
    DrawKey key[2];
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

  static __device__ __forceinline__ void Write(const Params& params, const EpiloguePosition& position, uint32_t place,
                                               uint32_t packed) {
    if (place >= params.capacity) return;
    const auto row = static_cast<uint32_t>(position.row) + (packed >> 25);
    const auto column = static_cast<uint32_t>(position.column) + (packed >> 16 & 511u);
    params.pool_keys[place] = column << params.row_bits | row;
    params.pool_values[place] = __uint_as_float(packed << 16);
  }

  // `column` within the tile.
  static __device__ __forceinline__ void Consider(float exponential, int half, int32_t column, const Dither& dither,
                                                  const Params& params, const EpiloguePosition& position) {
    const float ratio = exponential * dither.inverse[half];
    const uint32_t bits = __float_as_uint(ratio), shift = 126u - (bits >> 23);
    const uint32_t draw = Draw(dither.key[half], static_cast<uint32_t>(position.column + column));
    const bool large = !(ratio < 1.0f);
    if (!(large || (shift < 32 && draw < ((bits << 8) | 0x80000000u) >> shift))) return;
    Append(large ? exponential : dither.unit[half], half, column, params, position);
  }

  static __device__ __forceinline__ void Append(float entry, int half, int32_t column, const Params& params,
                                                const EpiloguePosition& position) {
    const uint32_t value = PackBf16(entry, 0.0f) & 0xffffu;
    const uint32_t packed = static_cast<uint32_t>(position.lane / 4 + 8 * half) << 25 | static_cast<uint32_t>(column) << 16 | value;
    uint32_t place;
    asm volatile("atom.shared.add.u32 %0, [%1], 1;" : "=r"(place) : "r"(position.staging) : "memory");
    if (place < kRoom) {
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(position.staging + 4 + 4 * place), "r"(packed) : "memory");
    } else {
      Write(params, position, atomicAdd(params.pool_count, 1u), packed);
    }
  }

  // 64 columns' accumulators become exponentials.
  template <bool kMasked>
  static __device__ __forceinline__ void Exponentials(float* accumulators, int first, const Rows& rows, const Params& params,
                                                      const EpiloguePosition& position, float (&sum)[2]) {
    const float scale_log2 = params.logit_scale * kLog2E;
#pragma unroll
    for (int k = 0; k < 32; ++k) {
      const int half = k / 2 % 2;
      const int32_t column = first + k / 4 * 8 + 2 * (position.lane % 4) + k % 2;
      float exponential = Exp2(fmaf(accumulators[k], scale_log2, -rows.offset_log2[half]));
      if constexpr (kMasked) {
        if (column == rows.target[half] || position.column + column >= position.n) exponential = 0.0f;
      }
      sum[half] += exponential;
      accumulators[k] = exponential;
    }
  }

  // A group's draw; `block` is the number of its 64 columns.
  static __device__ __forceinline__ float GroupDraw(DrawKey key, int32_t block, int32_t group) {
    return static_cast<float>(Draw(key, static_cast<uint32_t>(4 * block + group)) >> 8) * 0x1p-24f;
  }

  // Entries of 64 columns by groups.
  static __device__ __forceinline__ void GroupEntries(const float* exponentials, int first, const Dither& dither,
                                                      const Params& params, const EpiloguePosition& position) {
    const int32_t begin = first + 2 * (position.lane % 4);
    const uint32_t mine = position.staging + kStagingBytes / 2 + 4 * static_cast<uint32_t>(position.lane);
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = GroupDraw(dither.key[half], (position.column + first) / 64, position.lane % 4);
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float after[2] = {sum[0], sum[1]};
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        after[k / 2 % 2] = fmaf(exponentials[16 * part + k], dither.inverse[k / 2 % 2], after[k / 2 % 2]);
      }
      // A NaN does not stay below.
      if (__any_sync(0xffffffffu, !(after[0] < 1.0f && after[1] < 1.0f))) {
#pragma unroll
        for (int k = 0; k < 16; ++k) {
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(mine + 128 * k), "f"(exponentials[16 * part + k]) : "memory");
        }
#pragma unroll 1
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int half = k / 2;
            float exponential;
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(exponential) : "r"(mine + 512 * j + 128 * k) : "memory");
            const bool large = !(exponential < dither.unit[half]);
            const float reached = fmaf(exponential, dither.inverse[half], sum[half]);
            const bool survives = large || reached >= 1.0f;
            if (!large) sum[half] = survives ? reached - 1.0f : reached;
            if (survives) {
              Append(large ? exponential : dither.unit[half], half, begin + (4 * part + j) * 8 + k % 2, params, position);
            }
          }
        }
      } else {
        sum[0] = after[0];
        sum[1] = after[1];
      }
    }
  }

  // The same columns' exponentials become entries.
  static __device__ __forceinline__ void Entries(const float* exponentials, int first, const Dither& dither, const Params& params,
                                                 const EpiloguePosition& position) {
    const int32_t begin = first + 2 * (position.lane % 4);
    if constexpr (kDithering == Dithering::kStraight) {
#pragma unroll
      for (int k = 0; k < 32; ++k) Consider(exponentials[k], k / 2 % 2, begin + k / 4 * 8 + k % 2, dither, params, position);
    } else {
      // A lane reads what it wrote itself.
      const uint32_t mine = position.staging + kStagingBytes / 2 + 4 * static_cast<uint32_t>(position.lane);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int k = 0; k < 16; ++k) {
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(mine + 128 * k), "f"(exponentials[16 * part + k]) : "memory");
        }
#pragma unroll 1
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            float exponential;
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(exponential) : "r"(mine + 512 * j + 128 * k) : "memory");
            Consider(exponential, k / 2, begin + (4 * part + j) * 8 + k % 2, dither, params, position);
          }
        }
      }
    }
  }

  template <int kAccumulators>
  static __device__ __forceinline__ void Run(float (&accumulators)[kAccumulators], const Rows& rows, const Params& params,
                                             const EpiloguePosition& position) {
    Dither dither{};
    if constexpr (kDithering != Dithering::kNone) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = position.row + position.lane / 4 + 8 * half;
        // A row beyond the last one has exponentials of zero products; no draw lets them pass.
        dither.unit[half] = row < position.m ? params.units[row] : 0x1p120f;
        dither.inverse[half] = 1.0f / dither.unit[half];
        dither.key[half] = row < position.m ? params.keys[row] : DrawKey{};
      }
      if (position.lane == 0) asm volatile("st.shared.u32 [%0], 0;" ::"r"(position.staging) : "memory");
      __syncwarp();
    }
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int block = 0; block < kAccumulators / 32; ++block) {
      const int first = 64 * block;
      const bool holds_target =
          static_cast<uint32_t>(rows.target[0] - first) < 64u || static_cast<uint32_t>(rows.target[1] - first) < 64u;
      if (__any_sync(0xffffffffu, holds_target || position.column + first + 64 > position.n)) {
        Exponentials<true>(accumulators + 32 * block, first, rows, params, position, sum);
      } else {
        Exponentials<false>(accumulators + 32 * block, first, rows, params, position, sum);
      }
      if constexpr (kDithering == Dithering::kSystematic) {
        GroupEntries(accumulators + 32 * block, first, dither, params, position);
      } else if constexpr (kDithering != Dithering::kNone) {
        Entries(accumulators + 32 * block, first, dither, params, position);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
      const int32_t row = position.row + position.lane / 4 + 8 * half;
      if (position.lane % 4 == 0 && row < position.m) {
        params.partial_sum[static_cast<int64_t>(position.column_tile) * position.m + row] = sum[half];
      }
    }
    if constexpr (kDithering != Dithering::kNone) {
      __syncwarp();
      uint32_t count;
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(count) : "r"(position.staging) : "memory");
      count = min(count, kRoom);
      if (count > 0) {
        uint32_t base = 0;
        if (position.lane == 0) base = atomicAdd(params.pool_count, count);
        base = __shfl_sync(0xffffffffu, base, 0);
        for (uint32_t i = static_cast<uint32_t>(position.lane); i < count; i += 32) {
          uint32_t packed;
          asm volatile("ld.shared.u32 %0, [%1];" : "=r"(packed) : "r"(position.staging + 4 + 4 * i) : "memory");
          Write(params, position, base + i, packed);
        }
      }
      __syncwarp();
    }
  }
};

}  // namespace headwater::sm90

#endif  // HEADWATER_KERNELS_LAB_LIST_PRODUCT_CUH_
