// Numbers that no caller should send.
#ifndef HEADWATER_TESTS_KERNELS_SUPPORT_EXTREME_VALUES_H_
#define HEADWATER_TESTS_KERNELS_SUPPORT_EXTREME_VALUES_H_

#include <cstdint>
#include <limits>

namespace headwater::testing {

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_SUPPORT_EXTREME_VALUES_H_
