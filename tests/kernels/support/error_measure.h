// The project's error measure.
//
// Error = norm of the difference / norm of the fp64 reference, of the whole tensor and of the worst row and column. The
// denominators of rows (columns) have a floor at 1e-3 of the largest row's (column's) norm.
#ifndef HEADWATER_TESTS_KERNELS_SUPPORT_ERROR_MEASURE_H_
#define HEADWATER_TESTS_KERNELS_SUPPORT_ERROR_MEASURE_H_

#include <vector>

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

// The same from the squares of the differences and of the reference, summed by row and by column.
struct SquareSums {
  std::vector<double> row_difference, row_reference;        // [rows]
  std::vector<double> column_difference, column_reference;  // [columns]
};
TensorErrors ErrorsOfSums(const SquareSums& sums);

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_SUPPORT_ERROR_MEASURE_H_
