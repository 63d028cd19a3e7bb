#ifndef HEADWATER_KERNELS_CORE_FINITE_H_
#define HEADWATER_KERNELS_CORE_FINITE_H_

#include <cmath>

namespace headwater {

// Whether the value is finite in fp32, in which optimizers and engines compute.
inline bool IsFinite(double value) { return std::isfinite(static_cast<float>(value)); }

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_FINITE_H_
