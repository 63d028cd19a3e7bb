// A scale for a row of M whose few large entries carry its gradient. The rounding of few entries to 16 bits does not average out,
// so M is scaled until they round to nearly themselves. The factor beside M takes the rest.
//
// The best of kTries scales in (1/2, 1] for two entries. It leaves about a tenth of the error of an arbitrary scale. The first try
// makes the first entry a power of two, so that one entry, or two of the same size, become exact.
#ifndef HEADWATER_KERNELS_CUDA_DEVICE_EXACT_ENTRIES_CUH_
#define HEADWATER_KERNELS_CUDA_DEVICE_EXACT_ENTRIES_CUH_

#include <cstdint>

namespace headwater::cuda::exact_entries {

constexpr int kTries = 128;
static_assert((kTries & (kTries - 1)) == 0, "a try's number takes the low bits of its key");

// Relative error of a number >= 0 in bf16 or fp16; 0 for numbers out of the range where it matters, and NaN.
__device__ __forceinline__ float RoundingError(float value, bool half) {
  if (!(value > 1e-30f && value < 1e30f)) return 0.0f;
  constexpr uint32_t kFraction = 0x7fffffu;
  const float digits = __uint_as_float((__float_as_uint(value) & kFraction) | 0x3f800000u) * (half ? 1024.0f : 128.0f);
  return fabsf(digits - rintf(digits)) / digits;
}

// Whether both entries may stay as they are. A factor beside M that is no power of two makes the hidden states round once more.
// That costs 1.66e-3 in bf16, an eighth of that in fp16.
__device__ __forceinline__ bool AreNearlyExact(float first, float second, bool half) {
  const float limit = half ? 2e-4f : 1.6e-3f;
  return !(RoundingError(first, half) > limit || RoundingError(second, half) > limit);
}

// The scale of a try; `first` is in the range of RoundingError().
__device__ __forceinline__ float ScaleOf(int attempt, float first) {
  if (attempt > 0) return exp2f(-static_cast<float>(attempt) / kTries);
  return __uint_as_float(__float_as_uint(first) & 0x7f800000u) / first;
}

// The key of a try: its error, with the try's number in the low bits, so that the least key is the best try.
__device__ __forceinline__ uint32_t KeyOf(int attempt, float first, float second, bool half) {
  const float scale = ScaleOf(attempt, first);
  const float of_first = RoundingError(first * scale, half), of_second = RoundingError(second * scale, half) * (second / first);
  return (__float_as_uint(fmaf(of_first, of_first, of_second * of_second)) & ~static_cast<uint32_t>(kTries - 1)) |
         static_cast<uint32_t>(attempt);
}

// The scale for two entries >= 0, which are not nearly exact; first > 1e-30.
__device__ __forceinline__ float BestScale(float first, float second, bool half) {
  uint32_t best = ~0u;
  for (int attempt = 0; attempt < kTries; ++attempt) {
    best = min(best, KeyOf(attempt, first, second, half));
    if (best < kTries) break;  // exact
  }
  return ScaleOf(static_cast<int>(best & (kTries - 1)), first);
}

#if __CUDA_ARCH__ >= 800
// The same by a whole warp, of the same entries.
__device__ __forceinline__ float BestScaleOfWarp(float first, float second, bool half) {
  uint32_t best = ~0u;
  for (int attempt = static_cast<int>(threadIdx.x) % 32; attempt < kTries; attempt += 32) {
    best = min(best, KeyOf(attempt, first, second, half));
  }
  return ScaleOf(static_cast<int>(__reduce_min_sync(0xffffffffu, best) & (kTries - 1)), first);
}
#endif

}  // namespace headwater::cuda::exact_entries

#endif  // HEADWATER_KERNELS_CUDA_DEVICE_EXACT_ENTRIES_CUH_
