// What this machine's processors can do, for measuring utilisation against it.
#ifndef HEADWATER_KERNELS_PRODUCT_RATE_H_
#define HEADWATER_KERNELS_PRODUCT_RATE_H_

#include <cstdint>

namespace headwater {

// Floating point operations a second (a multiply-add is two) that `thread_count` (>= 1) threads reach together with bare fp32
// matrix products by the BLAS of the CPU engine: the best of a few rounds of a few milliseconds each. Each thread counts its own
// processor time, so that the rate is the machine's also while other processes take the processors; it is at most that of
// ProcessorLimit(). Starts and joins threads of its own.
double MeasureCpuProductRate(int32_t thread_count);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_PRODUCT_RATE_H_
