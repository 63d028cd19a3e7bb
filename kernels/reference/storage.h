// Rounding to and from storage types by arithmetic on doubles, independent of any engine's bit tricks.
#ifndef HEADWATER_KERNELS_REFERENCE_STORAGE_H_
#define HEADWATER_KERNELS_REFERENCE_STORAGE_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "headwater/kernels/types.h"

namespace headwater::reference {

// The nearest value that `type` can hold, ties to even; overflow gives an infinity; NaN stays NaN. Subnormals are kept.
double RoundTo(DataType type, double value);

// `values` as little-endian elements of `type`, each rounded by RoundTo().
std::vector<uint8_t> Encode(DataType type, absl::Span<const double> values);

// The exact values of `count` elements of `type` at `bytes`.
std::vector<double> Decode(DataType type, const void* bytes, int64_t count);

}  // namespace headwater::reference

#endif  // HEADWATER_KERNELS_REFERENCE_STORAGE_H_
