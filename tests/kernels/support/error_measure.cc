#include "tests/kernels/support/error_measure.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace headwater::testing {
namespace {

// |difference| / |reference| from squares; 0 / 0 is 0.
double Ratio(double difference_squared, double reference_norm) {
  if (difference_squared == 0) return 0;
  if (reference_norm == 0) return std::numeric_limits<double>::infinity() * difference_squared;
  return std::sqrt(difference_squared) / reference_norm;
}

// The worst group, given sums of squares by group.
double WorstGroup(const std::vector<double>& difference_squared, const std::vector<double>& reference_squared) {
  if (reference_squared.empty()) return 0;
  const double floor = 1e-3 * std::sqrt(*std::max_element(reference_squared.begin(), reference_squared.end()));
  double worst = 0;
  for (size_t i = 0; i < reference_squared.size(); ++i) {
    worst = Worse(Ratio(difference_squared[i], std::max(floor, std::sqrt(reference_squared[i]))), worst);
  }
  return worst;
}

}  // namespace

double Worse(double a, double b) { return std::isnan(a) || a > b ? a : b; }

TensorErrors ErrorsOfSums(const SquareSums& sums) {
  double difference = 0;
  double norm = 0;
  for (const double value : sums.row_difference) difference += value;
  for (const double value : sums.row_reference) norm += value;
  TensorErrors errors = {.whole = Ratio(difference, std::sqrt(norm))};
  if (sums.column_reference.size() > 1) errors.worst_row = WorstGroup(sums.row_difference, sums.row_reference);
  if (sums.row_reference.size() > 1) errors.worst_column = WorstGroup(sums.column_difference, sums.column_reference);
  return errors;
}

TensorErrors MeasureErrors(absl::Span<const double> actual, const reference::Matrix& expected) {
  const size_t rows = static_cast<size_t>(expected.rows);
  const size_t columns = static_cast<size_t>(expected.columns);
  SquareSums sums;
  sums.row_difference.resize(rows);
  sums.row_reference.resize(rows);
  sums.column_difference.resize(columns);
  sums.column_reference.resize(columns);
  for (size_t i = 0; i < expected.data.size(); ++i) {
    const double delta = actual[i] - expected.data[i];
    const double square = expected.data[i] * expected.data[i];
    sums.row_difference[i / columns] += delta * delta;
    sums.row_reference[i / columns] += square;
    sums.column_difference[i % columns] += delta * delta;
    sums.column_reference[i % columns] += square;
  }
  return ErrorsOfSums(sums);
}

}  // namespace headwater::testing
