// Dithering of a gradient's small entries: the draw, and the decision. Included by files that are compiled for a particular
// instruction set, so every function is inlined; the same lines run in CUDA kernels.
//
// A row has a resolution q, a power of two in units of its entries. An entry e with |e| < q becomes sign(e) q with probability
// |e| / q, else 0; other entries stay. The result's expected value is e, its variance |e| (q - |e|).
//
// The draw is a hash of the term's seed, the row's number in the micro-batch and the column of the vocabulary alone. Retries,
// chunks, shards and threads therefore never change it. LossTerm::dither_seed says how the seed is made. It has 16 bits, which
// decide all but one of 65536 entries, and a tail.
#ifndef HEADWATER_KERNELS_CORE_LOSS_DITHER_H_
#define HEADWATER_KERNELS_CORE_LOSS_DITHER_H_

#include <cstdint>

#ifdef __CUDACC__
#define HEADWATER_DITHER_INLINE static __host__ __device__ __forceinline__
#else
#define HEADWATER_DITHER_INLINE static inline __attribute__((always_inline))
#endif

namespace headwater {

// GradientDither of some entries; travels between shards as doubles.
struct DitherSums {
  double entry_count = 0;
  double squared_error = 0;
  double squared_norm = 0;
};
inline constexpr int kDitherSumsDoubles = 3;
static_assert(sizeof(DitherSums) == kDitherSumsDoubles * sizeof(double), "DitherSums travels between shards as doubles");

// Seed of a row's draws.
struct DitherKey {
  uint32_t low = 0;
  uint32_t high = 0;
};

// SplitMix64's finalizer: every bit of the result depends on every bit of x.
HEADWATER_DITHER_INLINE uint64_t MixBits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

HEADWATER_DITHER_INLINE DitherKey MakeDitherKey(uint64_t seed, int64_t row) {
  const uint64_t key = MixBits(MixBits(seed) + 0x9E3779B97F4A7C15u * static_cast<uint64_t>(row + 1));
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

// 32 uniform bits, number `index` of a row's.
HEADWATER_DITHER_INLINE uint32_t DitherBits(DitherKey key, uint32_t index) {
  uint32_t x = (index * 0x9E3779B1u) ^ key.low;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15) ^ key.high) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// 16 uniform bits of one entry, half of the bits that a pair of columns shares.
HEADWATER_DITHER_INLINE uint32_t DitherDraw(DitherKey key, uint32_t column) {
  return DitherBits(key, column >> 1) >> (column % 2 * 16) & 0xFFFFu;
}

// 31 more bits, which decide where the draw does not.
HEADWATER_DITHER_INLINE int32_t DitherTail(DitherKey key, uint32_t column) {
  return static_cast<int32_t>(DitherBits({key.high, key.low}, column) >> 1);
}

// Whether an entry of size `ratio` q, 0 <= ratio < 1, becomes q. It does if the 47 bits of draw and tail, as a fraction, are below
// the ratio.
HEADWATER_DITHER_INLINE bool DitherSurvives(float ratio, DitherKey key, uint32_t column) {
  const float scaled = ratio * 65536.0f;
  const int32_t whole = static_cast<int32_t>(scaled);
  const int32_t draw = static_cast<int32_t>(DitherDraw(key, column));
#ifdef __CUDA_ARCH__
  if (draw != whole) return draw < whole;  // elsewhere loops over columns stay free of branches
#endif
  const int32_t rest = static_cast<int32_t>((scaled - static_cast<float>(whole)) * 0x1p31f);
  return (draw < whole) | ((draw == whole) & (DitherTail(key, column) < rest));
}

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_LOSS_DITHER_H_
