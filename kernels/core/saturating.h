// Arithmetic on byte counts that saturates at INT64_MAX instead of wrapping, so that an absurd head is refused and not mistaken
// for a small one. Operands must be >= 0.
#ifndef HEADWATER_KERNELS_CORE_SATURATING_H_
#define HEADWATER_KERNELS_CORE_SATURATING_H_

#include <cstdint>
#include <limits>

namespace headwater {

inline int64_t SaturatingAdd(int64_t a, int64_t b) {
  int64_t result = 0;
  return __builtin_add_overflow(a, b, &result) ? std::numeric_limits<int64_t>::max() : result;
}

inline int64_t SaturatingMultiply(int64_t a, int64_t b) {
  int64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? std::numeric_limits<int64_t>::max() : result;
}

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_SATURATING_H_
