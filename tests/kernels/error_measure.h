// The project's error measure.
//
// Error = norm of the difference / norm of the fp64 reference, of the whole tensor and of the worst row and column, whose
// denominators have a floor at 1e-3 of the largest row's (column's) norm.
#ifndef HEADWATER_TESTS_KERNELS_ERROR_MEASURE_H_
#define HEADWATER_TESTS_KERNELS_ERROR_MEASURE_H_

#include "absl/types/span.h"
#include "kernels/reference/loss_reference.h"

namespace headwater::testing {

// The larger one; NaN if either is.
double Worse(double a, double b);

struct TensorErrors {
  double whole = 0;
  double worst_row = 0;     // 0 for a tensor of one column
  double worst_column = 0;  // 0 for a tensor of one row
};

// Infinity where the reference is 0 and `actual` is not; NaN if there is a NaN.
TensorErrors MeasureErrors(absl::Span<const double> actual, const reference::Matrix& expected);

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_ERROR_MEASURE_H_
