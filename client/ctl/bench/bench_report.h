// The results of `bench`, as tables, JSON, CSV and a plot.
#ifndef HEADWATER_CLIENT_CTL_BENCH_BENCH_REPORT_H_
#define HEADWATER_CLIENT_CTL_BENCH_BENCH_REPORT_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "headwater/client/types.h"

namespace headwater::ctl {

// One way of submitting micro-batches for a while.
struct BenchRow {
  std::string sweep;  // "transport", "concurrency", "size"
  std::string transport;
  int in_flight = 1;
  int64_t rows = 0;  // of a micro-batch
  int64_t micro_batches = 0;
  double median_ms = 0;  // of one micro-batch, from the call to its result
  double p90_ms = 0;
  double period_ms = 0;  // from one result to the next, on average
  double engine_ms = 0;  // median of the server's time in the engine
  double rows_per_second = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BenchRow, sweep, transport, in_flight, rows, micro_batches, median_ms, p90_ms, period_ms,
                                   engine_ms, rows_per_second)

// A path that could not be measured.
struct BenchGap {
  std::string transport;
  std::string why;  // one sentence
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BenchGap, transport, why)

struct BenchReport {
  std::string server, engine, device;
  client::HeadSpec spec;
  std::vector<BenchRow> rows;
  std::vector<BenchGap> gaps;
};

std::string BenchText(const BenchReport& report);
nlohmann::json BenchJson(const BenchReport& report);
// With a line of titles; one line for each row.
std::string BenchCsv(const BenchReport& report);

// FAILED_PRECONDITION unless a Python with matplotlib is there, which draws the plot. Asked before anything is measured.
absl::Status CheckPlotting();
// Draws the CSV's figures into a PNG file.
absl::Status DrawBench(const std::string& csv, const std::string& path);

}  // namespace headwater::ctl

#endif  // HEADWATER_CLIENT_CTL_BENCH_BENCH_REPORT_H_
