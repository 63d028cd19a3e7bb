// Dithering (kernels/core/loss/dither.h) of eight bf16 entries at once, in 20 instructions an entry and without a branch on any.
// MayHaveEntries() takes 15 to find the chunks of which something may be left.
//
// A pair of columns shares a hash, 16 bits of which are an entry's draw. They leave one entry of 65536 undecided: all eight of its
// chunk then go through DitherSurvives().
#ifndef HEADWATER_KERNELS_CUDA_DEVICE_DITHER_CHUNK_CUH_
#define HEADWATER_KERNELS_CUDA_DEVICE_DITHER_CHUNK_CUH_

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/core/loss/dither.h"

namespace headwater::cuda {

// A thread's sums over its entries.
struct EntrySums {
  int32_t large = 0;   // how many are not below the resolution
  float error = 0.0f;  // sum of r (1 - r) of those below, r = |entry| / resolution
  float norm = 0.0f;   // sum of r^2 of all
};

// One of a pair's two entries.
__device__ __forceinline__ float EntryOf(uint32_t pair, int half) {
  return __uint_as_float(half == 0 ? pair << 16 : pair & 0xffff0000u);
}

// floor(2^16 ratio) - draw, of 16 bits of `draws`: the entry survives above 0, and may at 0. NaN of a NaN.
__device__ __forceinline__ float AboveDraw(float ratio, uint32_t draws, int half) {
  // From 2^23 on a number's last bit is 1.
  return __fmaf_rd(ratio, 65536.0f, 0x1p23f) - __uint_as_float(__byte_perm(draws, 0x4B000000u, half == 0 ? 0x7410 : 0x7432));
}

__device__ __forceinline__ void AddRatio(float ratio, EntrySums* sums) {
  sums->error += __saturatef(fmaf(-ratio, ratio, ratio));  // 0 from the resolution on
  sums->norm = fmaf(ratio, ratio, sums->norm);
}

// Whether something may be left of eight entries, as DitherChunk() takes them. Adds to *sums what that does, except `large`.
__device__ __forceinline__ bool MayHaveEntries(const uint4& chunk, uint32_t column, DitherKey key, float inverse, EntrySums* sums) {
  const uint32_t entries[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
  uint32_t signs = ~0u;  // the first bit: all are below their draws
#pragma unroll
  for (uint32_t pair = 0; pair < 4; ++pair) {
    const uint32_t draws = DitherBits(key, column / 2 + pair);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float ratio = fabsf(EntryOf(entries[pair], half)) * inverse;
      signs &= __float_as_uint(AboveDraw(ratio, draws, half));
      AddRatio(ratio, sums);
    }
  }
  return static_cast<int32_t>(signs) >= 0;
}

// One entry after the other: each goes through the lowest 16 bits.
__device__ __forceinline__ uint4 DitherOneByOne(uint4 entries, uint32_t column, DitherKey key, float unit, float inverse) {
#pragma unroll 1
  for (uint32_t i = 0; i < 8; ++i) {
    uint32_t bits = entries.x & 0xffffu;
    const float ratio = fabsf(__uint_as_float(bits << 16)) * inverse;
    if (ratio < 1.0f) {
      bits = (DitherSurvives(ratio, key, column + i) ? __float_as_uint(unit) >> 16 : 0u) | (bits & 0x8000u);
    }
    entries.x = __funnelshift_r(entries.x, entries.y, 16);
    entries.y = __funnelshift_r(entries.y, entries.z, 16);
    entries.z = __funnelshift_r(entries.z, entries.w, 16);
    entries.w = entries.w >> 16 | bits << 16;
  }
  return entries;
}

// Entries of columns `column` to column + 7 of the vocabulary, of which the first is even. `unit`, the row's resolution, is a bf16
// number, `inverse` its reciprocal. Signs stay, of zeros too; NaNs stay. Adds to *sums.
__device__ __forceinline__ uint4 DitherChunk(uint4 chunk, uint32_t column, DitherKey key, float unit, float inverse,
                                             EntrySums* sums) {
  const uint32_t entries[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
  const __nv_bfloat162 units = __float2bfloat162_rn(unit);
  uint32_t dithered[4];
  __nv_bfloat162 large{};
  float product = 1.0f;  // 0, or not a number: a draw is not enough
#pragma unroll
  for (uint32_t pair = 0; pair < 4; ++pair) {
    const uint32_t draws = DitherBits(key, column / 2 + pair);
    const uint32_t sizes = entries[pair] & 0x7fff7fffu;
    float survives[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float ratio = EntryOf(sizes, half) * inverse;
      const float above = AboveDraw(ratio, draws, half);
      product *= above;
      survives[half] = __saturatef(above);
      AddRatio(ratio, sums);
    }
    const auto size = reinterpret_cast<const __nv_bfloat162&>(sizes);
    large = __hadd2(large, __hge2(size, units));
    const __nv_bfloat162 survive = __floats2bfloat162_rn(survives[0], survives[1]);
    const __nv_bfloat162 kept = __hmul2(survive, __hmax2_nan(size, units));
    dithered[pair] = reinterpret_cast<const uint32_t&>(kept) | (entries[pair] & 0x80008000u);
  }
  sums->large += static_cast<int32_t>(__low2float(large) + __high2float(large));
  if (!(fabsf(product) > 0.0f)) return DitherOneByOne(chunk, column, key, unit, inverse);
  return {dithered[0], dithered[1], dithered[2], dithered[3]};
}

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_DEVICE_DITHER_CHUNK_CUH_
