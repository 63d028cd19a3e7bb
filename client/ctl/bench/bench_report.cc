#include "client/ctl/bench/bench_report.h"

#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/ctl/bench_plot_script.h"
#include "client/ctl/table.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::ctl {
namespace {

std::string Milliseconds(double value) { return absl::StrFormat("%.*f", value < 10 ? 3 : 2, value); }

// Runs `python3 -c SCRIPT FILE` with `input`: its exit status, 127 if there is no python3. Errors of the script are not shown if
// `quiet`.
absl::StatusOr<int> RunPython(const std::string& script, const std::string& file, const std::string& input, bool quiet) {
  setenv("HEADWATERCTL_SCRIPT", script.c_str(), 1);
  setenv("HEADWATERCTL_FILE", file.c_str(), 1);
  const std::string command =
      absl::StrCat(R"(exec python3 -c "$HEADWATERCTL_SCRIPT" "$HEADWATERCTL_FILE" >/dev/null)", quiet ? " 2>&1" : "");
  void (*const before)(int) = signal(SIGPIPE, SIG_IGN);  // a script that ends early must not end this program
  FILE* const python = popen(command.c_str(), "we");
  if (python == nullptr) return absl::InternalError(absl::StrCat("popen: ", std::strerror(errno)));
  fwrite(input.data(), 1, input.size(), python);
  const int status = pclose(python);
  signal(SIGPIPE, before);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// The engine's time for such a micro-batch alone. With several in flight, the server's own time includes waiting for the others.
double EngineMsAlone(const BenchReport& report, const BenchRow& row) {
  const auto alone = std::find_if(report.rows.begin(), report.rows.end(), [&](const BenchRow& other) {
    return other.in_flight == 1 && other.transport == row.transport && other.rows == row.rows;
  });
  return alone == report.rows.end() ? 0 : alone->engine_ms;
}

Table TableOf(const BenchReport& report, const std::string& sweep, std::vector<std::string> titles) {
  titles.insert(titles.end(), {">MS", ">P90 MS", ">ENGINE MS", ">OVER ENGINE", ">ROWS/S"});
  const bool by_size = sweep == "size";
  const bool by_concurrency = sweep == "concurrency";
  Table table(std::move(titles));
  for (const BenchRow& row : report.rows) {
    if (row.sweep != sweep) continue;
    std::vector<std::string> cells = {row.transport};
    if (by_size) cells.push_back(FormatCount(row.rows));
    if (by_concurrency) cells.push_back(absl::StrCat(row.in_flight));
    // With several in flight a micro-batch waits for others: the interval between results counts.
    const double ms = by_concurrency ? row.period_ms : row.median_ms;
    const double engine_ms = EngineMsAlone(report, row);
    cells.insert(cells.end(), {Milliseconds(ms), Milliseconds(row.p90_ms), Milliseconds(engine_ms),
                               engine_ms > 0 ? absl::StrFormat("%.3f x", ms / engine_ms) : "-",
                               FormatCount(static_cast<int64_t>(row.rows_per_second))});
    table.AddRow(std::move(cells));
  }
  return table;
}

}  // namespace

std::string BenchText(const BenchReport& report) {
  int64_t rows = 0;
  for (const BenchRow& row : report.rows) {
    if (row.sweep == "transport") rows = row.rows;
  }
  std::string text =
      absl::StrCat(report.server, ": ", report.engine, ", ", report.device, "\nhead [", FormatCount(report.spec.vocab_size), ", ",
                   FormatCount(report.spec.hidden_size), "] ", client::DataTypeName(report.spec.data_type),
                   ", cross entropy, forward and backward, added at once; ENGINE MS is the server's own time, one at a time\n");
  absl::StrAppend(&text, "\nOne micro-batch of ", FormatCount(rows), " rows at a time\n",
                  TableOf(report, "transport", {"PATH"}).ToString());
  for (const BenchGap& gap : report.gaps) absl::StrAppend(&text, gap.transport, "  not measured: ", gap.why, "\n");
  absl::StrAppend(&text, "\nSeveral in flight; MS is from one result to the next, P90 MS from call to result\n",
                  TableOf(report, "concurrency", {"PATH", ">IN FLIGHT"}).ToString());
  absl::StrAppend(&text, "\nOne at a time, by rows\n", TableOf(report, "size", {"PATH", ">ROWS"}).ToString());
  return text;
}

nlohmann::json BenchJson(const BenchReport& report) {
  return {{"server", report.server},
          {"engine", report.engine},
          {"device", report.device},
          {"vocab_size", report.spec.vocab_size},
          {"hidden_size", report.spec.hidden_size},
          {"data_type", client::DataTypeName(report.spec.data_type)},
          {"measurements", report.rows},
          {"not_measured", report.gaps}};
}

std::string BenchCsv(const BenchReport& report) {
  std::string text =
      "sweep,transport,in_flight,rows,hidden_size,vocab_size,data_type,micro_batches,median_ms,p90_ms,period_ms,engine_ms,"
      "rows_per_second\n";
  for (const BenchRow& row : report.rows) {
    absl::StrAppendFormat(&text, "%s,%s,%d,%d,%d,%d,%s,%d,%.6g,%.6g,%.6g,%.6g,%.8g\n", row.sweep, row.transport, row.in_flight,
                          row.rows, report.spec.hidden_size, report.spec.vocab_size, client::DataTypeName(report.spec.data_type),
                          row.micro_batches, row.median_ms, row.p90_ms, row.period_ms, row.engine_ms, row.rows_per_second);
  }
  return text;
}

absl::Status CheckPlotting() {
  HEADWATER_ASSIGN_OR_RETURN(const int status, RunPython("import matplotlib", "", "", /*quiet=*/true));
  if (status == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(status == 127 ? "--png needs a python3 with matplotlib, and there is no python3 on the PATH"
                                 : "--png needs matplotlib, which the python3 on the PATH does not have",
                   "; --csv needs neither, and its figures can be drawn elsewhere"));
}

absl::Status DrawBench(const std::string& csv, const std::string& path) {
  HEADWATER_ASSIGN_OR_RETURN(const int status, RunPython(kBenchPlotScript, path, csv, /*quiet=*/false));
  if (status == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the plot could not be drawn into ", path, " (python3 ended with ", status, ")"));
}

}  // namespace headwater::ctl
