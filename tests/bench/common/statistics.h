// Statistics of repeated times.
#ifndef HEADWATER_TESTS_BENCH_COMMON_STATISTICS_H_
#define HEADWATER_TESTS_BENCH_COMMON_STATISTICS_H_

#include <algorithm>
#include <vector>

namespace headwater::bench {

// `values` is not empty.
inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// (largest - smallest) / median.
inline double Spread(const std::vector<double>& values) {
  const auto [smallest, largest] = std::minmax_element(values.begin(), values.end());
  return (*largest - *smallest) / Median(values);
}

}  // namespace headwater::bench

#endif  // HEADWATER_TESTS_BENCH_COMMON_STATISTICS_H_
