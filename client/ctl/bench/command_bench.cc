// `bench`: the time of the server's engine, and the additional time of each path of the rows, as measured from here.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "client/ctl/arguments.h"
#include "client/ctl/bench/bench_report.h"
#include "client/ctl/bench/bench_run.h"
#include "client/ctl/command.h"
#include "client/ctl/connection.h"
#include "client/ctl/head_flags.h"
#include "headwater/kernels/return_if_error.h"
#include "server/flags/flag_types.h"

ABSL_FLAG(int64_t, rows, 0, "rows of a micro-batch; not given: 8192 on a GPU, 512 without");
ABSL_FLAG(std::vector<std::string>, sizes, {}, "rows of the sweep over sizes; not given: an eighth, a quarter and half of --rows");
ABSL_FLAG(std::vector<std::string>, concurrency, std::vector<std::string>({"2", "4", "8"}),
          "micro-batches in flight of that sweep");
ABSL_FLAG(std::vector<std::string>, transports, std::vector<std::string>({"grpc", "shared_memory", "cuda_ipc"}),
          "paths to measure");
ABSL_FLAG(headwater::DurationFlag, duration, absl::Seconds(1), "how long each measurement takes, from 10ms to 1m");
ABSL_FLAG(std::string, csv, "", "file that the figures go into");
ABSL_FLAG(std::string, png, "", "file that a plot goes into; needs a python3 with matplotlib on the PATH");

namespace headwater::ctl {
namespace {

using client::Transport;

constexpr int64_t kMaxInFlight = 64;

// Whether a file can be written there, so that minutes of measuring are not for nothing. Leaves existing files as they are.
absl::Status CheckWritable(const char* flag, const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  std::error_code error;
  const std::filesystem::path file(path);
  const bool is_there = std::filesystem::exists(file, error);
  const std::filesystem::path folder = file.has_parent_path() ? file.parent_path() : ".";
  if (std::filesystem::is_directory(file, error)) {
    errno = EISDIR;
  } else if (!is_there && !std::filesystem::is_directory(folder, error)) {
    errno = ENOENT;
  } else if (access(is_there ? path.c_str() : folder.c_str(), is_there ? W_OK : W_OK | X_OK) == 0) {
    return absl::OkStatus();
  }
  return UsageError(absl::StrCat("--", flag, ": expected a file that can be written, got ", path, ": ", std::strerror(errno)));
}

// Numbers in [1, most], ascending, each once.
absl::StatusOr<std::vector<int64_t>> Numbers(const char* flag, const std::vector<std::string>& values, int64_t most) {
  std::set<int64_t> numbers;
  for (const std::string& value : values) {
    int64_t number = 0;
    if (!absl::SimpleAtoi(value, &number) || number < 1 || number > most) {
      return UsageError(absl::StrCat("--", flag, ": expected numbers from 1 to ", most, ", got `", value, "`"));
    }
    numbers.insert(number);
  }
  return std::vector<int64_t>(numbers.begin(), numbers.end());
}

absl::StatusOr<std::vector<Transport>> Transports() {
  std::vector<Transport> transports;
  for (const std::string& name : absl::GetFlag(FLAGS_transports)) {
    bool known = false;
    for (const Transport transport : {Transport::kGrpc, Transport::kSharedMemory, Transport::kCudaIpc}) {
      if (name != client::TransportName(transport)) continue;
      known = true;
      transports.push_back(transport);
    }
    if (!known) return UsageError(absl::StrCat("--transports: expected grpc, shared_memory or cuda_ipc, got `", name, "`"));
  }
  if (transports.empty()) return UsageError("--transports names no path");
  return transports;
}

struct Plan {
  client::HeadSpec spec;
  int64_t rows = 0;
  std::vector<int64_t> sizes;        // ascending
  std::vector<int64_t> concurrency;  // ascending
  std::vector<Transport> transports;
  std::chrono::nanoseconds duration{0};
  int64_t max_micro_batches = 0;
};

absl::StatusOr<Plan> MakePlan(const client::ServerInfo& info) {
  Plan plan;
  const bool gpu = info.engine == "cuda";
  const int64_t most_rows = info.limits.at("max_micro_batch_rows");
  plan.rows = FlagGiven("rows") ? absl::GetFlag(FLAGS_rows) : std::min<int64_t>(gpu ? 8192 : 512, most_rows);
  if (plan.rows < 1 || plan.rows > most_rows) {
    return UsageError(absl::StrCat("--rows: the server takes 1 to ", most_rows, ", got ", plan.rows));
  }
  std::vector<std::string> sizes = absl::GetFlag(FLAGS_sizes);
  if (!FlagGiven("sizes")) {
    for (const int64_t part : {8, 4, 2}) {
      if (plan.rows >= part) sizes.push_back(absl::StrCat(plan.rows / part));
    }
  }
  std::vector<std::string> concurrency = absl::GetFlag(FLAGS_concurrency);
  // The sweeps contain the plan's own sizes, in order.
  sizes.push_back(absl::StrCat(plan.rows));
  concurrency.push_back("1");
  HEADWATER_ASSIGN_OR_RETURN(plan.sizes, Numbers("sizes", sizes, most_rows));
  HEADWATER_ASSIGN_OR_RETURN(plan.concurrency, Numbers("concurrency", concurrency, kMaxInFlight));
  HEADWATER_ASSIGN_OR_RETURN(plan.transports, Transports());
  const absl::Duration duration = absl::GetFlag(FLAGS_duration);
  if (duration < absl::Milliseconds(10) || duration > absl::Minutes(1)) return UsageError("--duration: expected 10ms to 1m");
  plan.duration = absl::ToChronoNanoseconds(duration);

  client::HeadSpec defaults;
  defaults.vocab_size = gpu ? 128256 : 8192;
  defaults.hidden_size = gpu ? 4096 : 256;
  defaults.data_type = gpu ? client::DataType::kBFloat16 : client::DataType::kFloat32;
  HEADWATER_ASSIGN_OR_RETURN(plan.spec, HeadSpecFromFlags(defaults, /*config_beside=*/"", Output(/*json=*/false)));
  plan.spec.trainable = true;
  plan.spec.staging_slots = 0;  // everything is added at once
  plan.max_micro_batches = info.limits.at("max_step_micro_batches");
  return plan;
}

// Everything there is to measure over one path.
absl::Status MeasurePath(BenchTrainer& trainer, const Plan& plan, Output& output, BenchReport* report) {
  std::optional<BenchRow> first;  // the common row of all sweeps
  const auto measure = [&](const char* sweep, int64_t rows, int64_t in_flight) -> absl::Status {
    if (!first.has_value() || rows != plan.rows || in_flight != 1) {
      HEADWATER_ASSIGN_OR_RETURN(BenchRow row,
                                 trainer.Measure(rows, static_cast<int>(in_flight), plan.duration, plan.max_micro_batches));
      output.Progress(absl::StrCat(row.transport, ": ", rows, " rows, ", in_flight, " in flight: ", row.period_ms, " ms"));
      report->rows.push_back(row);
      if (!first.has_value()) first = row;
    } else {
      report->rows.push_back(*first);
    }
    report->rows.back().sweep = sweep;
    return absl::OkStatus();
  };
  HEADWATER_RETURN_IF_ERROR(measure("transport", plan.rows, 1));
  for (const int64_t in_flight : plan.concurrency) {
    HEADWATER_RETURN_IF_ERROR(measure("concurrency", plan.rows, in_flight));
  }
  for (const int64_t rows : plan.sizes) {
    HEADWATER_RETURN_IF_ERROR(measure("size", rows, 1));
  }
  return absl::OkStatus();
}

absl::Status MeasureAll(const Plan& plan, const std::string& head, Output& output, BenchReport* report) {
  for (const Transport transport : plan.transports) {
    absl::StatusOr<std::unique_ptr<BenchTrainer>> trainer =
        BenchTrainer::Make(transport, head, plan.sizes.back(), static_cast<int>(plan.concurrency.back()));
    if (!trainer.ok()) {
      // Another path may work where this one cannot be taken; a server that has gone is the end.
      if (BenchInterrupted() || absl::IsUnavailable(trainer.status())) return trainer.status();
      report->gaps.push_back({client::TransportName(transport), std::string(trainer.status().message())});
      continue;
    }
    HEADWATER_RETURN_IF_ERROR(MeasurePath(**trainer, plan, output, report));
  }
  if (!report->rows.empty()) return absl::OkStatus();
  std::vector<std::string> reasons;
  for (const BenchGap& gap : report->gaps) reasons.push_back(absl::StrCat(gap.transport, ": ", gap.why));
  return absl::FailedPreconditionError(absl::StrCat("no path could be measured: ", absl::StrJoin(reasons, "; ")));
}

absl::Status WriteFiles(const std::string& csv, const std::string& csv_path, const std::string& png_path) {
  if (!csv_path.empty()) {
    std::ofstream file(csv_path, std::ios::trunc);
    file << csv;
    file.close();
    if (!file) return absl::InternalError(absl::StrCat(csv_path, " could not be written"));
  }
  return png_path.empty() ? absl::OkStatus() : DrawBench(csv, png_path);
}

absl::StatusOr<ExitCode> RunBench(client::Client& client, const std::vector<std::string>&, Output& output) {
  const std::string csv_path = absl::GetFlag(FLAGS_csv);
  const std::string png_path = absl::GetFlag(FLAGS_png);
  for (const auto& [flag, path] : {std::pair("csv", csv_path), std::pair("png", png_path)}) {
    HEADWATER_RETURN_IF_ERROR(CheckWritable(flag, path));
  }
  if (!png_path.empty()) {
    HEADWATER_RETURN_IF_ERROR(CheckPlotting());
  }
  HEADWATER_ASSIGN_OR_RETURN(client::ServerInfo info, client.GetServerInfo());
  HEADWATER_ASSIGN_OR_RETURN(Plan plan, MakePlan(info));
  CatchInterruptions();
  const int64_t asked = plan.spec.vocab_size;
  output.Progress("making a head of random weights");
  HEADWATER_ASSIGN_OR_RETURN(const std::string head, MakeBenchHead(client, &plan.spec));
  if (plan.spec.vocab_size != asked) {
    output.Progress(absl::StrCat("the server's memory has room for ", plan.spec.vocab_size, " of ", asked, " vocabulary rows"));
  }
  BenchReport report;
  report.server = ServerAddress();
  report.engine = absl::StrCat("engine ", info.engine);
  std::vector<std::string> devices;
  for (const client::DeviceInfo& device : info.devices) devices.push_back(device.model.empty() ? device.name : device.model);
  report.device = absl::StrJoin(devices, ", ");
  report.spec = plan.spec;
  const absl::Status measured = MeasureAll(plan, head, output, &report);
  if (const absl::Status deleted = client.DeleteHead(head, /*force=*/true); !deleted.ok()) {
    output.Progress(absl::StrCat("the head ", head, " could not be deleted: ", deleted.message()));
    if (measured.ok()) return deleted;
  }
  if (!measured.ok()) return measured;
  const absl::Status written = WriteFiles(BenchCsv(report), csv_path, png_path);
  // An error is a document of its own, and there is one at most.
  if (written.ok() || !output.json()) output.Print(BenchText(report), BenchJson(report));
  if (!written.ok()) return written;
  return kExitOk;
}

}  // namespace

Command BenchCommand() {
  return {
      .name = "bench",
      .synopsis = "[ADDRESS]",
      .summary = "measures the engine, and what each path of the rows adds to it from here",
      .help =
          "Makes a head of random weights on the server at ADDRESS (or --server), submits micro-batches to it over gRPC, over\n"
          "host memory shared with the server, and from a GPU's memory in place, and deletes it again. It names each path that\n"
          "cannot be taken, with the reason. Three tables: the paths, several micro-batches in flight, and smaller ones. OVER\n"
          "ENGINE is the time over what the server's engine alone took for it. Other work on the server is slowed down, and\n"
          "slows this down. Takes about 2 s for each path and number, by --duration; Ctrl-C ends it early and cleans up.\n"
          "\n"
          "  headwaterctl bench localhost:50051 --csv=bench.csv --png=bench.png\n"
          "  headwaterctl bench --transports=grpc --vocab_size=32000 --hidden_size=2048 --rows=1024 --duration=3s\n",
      .flags = {"vocab_size", "hidden_size", "data_type", "rows", "sizes", "concurrency", "transports", "duration", "csv", "png"},
      .first_argument_is_server = true,
      .run = RunBench};
}

}  // namespace headwater::ctl
