#include "server/observability/trace_writer.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/observability/logging.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::observability {
namespace {

namespace fs = std::filesystem;

constexpr char kPrefix[] = "headwater-";
constexpr char kSuffix[] = ".json";
constexpr char kUnfinished[] = ".json.tmp";
// Limits warnings: otherwise a full disk would warn at every call.
constexpr absl::Duration kWarnAgain = absl::Minutes(1);

}  // namespace

absl::StatusOr<std::unique_ptr<TraceWriter>> TraceWriter::Open(const std::string& directory, int64_t most_files, Metrics& metrics) {
  if (most_files < 1) return absl::InvalidArgumentError(absl::StrCat("max_trace_files: expected >= 1, got ", most_files));
  std::error_code error;
  fs::create_directories(directory, error);
  std::vector<std::string> names;
  std::vector<std::string> unfinished;
  if (!error) {
    for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
      const std::string name = entry->path().filename().string();
      if (!absl::StartsWith(name, kPrefix)) continue;
      if (absl::EndsWith(name, kSuffix)) names.push_back(name);
      if (absl::EndsWith(name, kUnfinished)) unfinished.push_back(name);
    }
  }
  if (error) return absl::InvalidArgumentError(absl::StrCat("trace_dir: cannot use ", directory, ": ", error.message()));
  // Leftovers of a process that ended while writing. A failure to remove one is harmless.
  for (const std::string& name : unfinished) fs::remove(fs::path(directory) / name, error);
  std::sort(names.begin(), names.end());  // by time
  return std::unique_ptr<TraceWriter>(new TraceWriter(directory, most_files, {names.begin(), names.end()}, metrics));
}

TraceWriter::TraceWriter(std::string directory, int64_t most_files, std::deque<std::string> files, Metrics& metrics)
    : directory_(std::move(directory)),
      most_files_(static_cast<size_t>(most_files)),
      metrics_(metrics),
      files_(std::move(files)),
      thread_([this] { Run(); }) {}

TraceWriter::~TraceWriter() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void TraceWriter::Write(std::shared_ptr<const CallTrace> trace) {
  {
    absl::MutexLock lock(&mutex_);
    if (waiting_.size() < kMostWaiting) {
      waiting_.push_back(std::move(trace));
      return;
    }
  }
  metrics_.Count(Metric::kTraces, 1, TraceOutcome::kLeftOut);
}

bool TraceWriter::MayWrite() {
  const absl::Time now = MonotonicNow();
  if (now >= second_ + absl::Seconds(1)) {
    second_ = now;
    begun_ = 0;
  }
  return ++begun_ <= kMostASecond;
}

absl::Status TraceWriter::WriteFile(const CallTrace& trace) {
  const std::string time = absl::FormatTime("%Y%m%dT%H%M%E6SZ", absl::Now(), absl::UTCTimeZone());
  const std::string name = absl::StrCat(kPrefix, time, "-", trace.parent().trace_id, "-", trace.span_id(), kSuffix);
  std::error_code error;
  while (files_.size() >= most_files_) {
    fs::remove(fs::path(directory_) / files_.front(), error);
    files_.pop_front();
  }
  const fs::path path = fs::path(directory_) / name;
  const fs::path unfinished = path.string() + ".tmp";
  std::ofstream file(unfinished, std::ios::binary);
  file << trace.ToJson();
  file.close();
  if (file) fs::rename(unfinished, path, error);
  if (!file || error) {
    fs::remove(unfinished, error);
    return absl::UnavailableError(absl::StrCat("cannot write ", path.string()));
  }
  files_.push_back(name);
  return absl::OkStatus();
}

void TraceWriter::Run() {
  const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || !waiting_.empty(); };
  while (true) {
    std::shared_ptr<const CallTrace> trace;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&ready));
      if (waiting_.empty()) return;
      trace = std::move(waiting_.front());
      waiting_.pop_front();
    }
    if (!MayWrite()) {
      metrics_.Count(Metric::kTraces, 1, TraceOutcome::kLeftOut);
      continue;
    }
    const absl::Status status = WriteFile(*trace);
    metrics_.Count(Metric::kTraces, 1, status.ok() ? TraceOutcome::kWritten : TraceOutcome::kFailed);
    if (!status.ok() && MonotonicNow() >= last_warning_ + kWarnAgain) {
      last_warning_ = MonotonicNow();
      Log(LogLevel::kWarning, "trace_not_written", {{"message", std::string(status.message())}});
    }
  }
}

}  // namespace headwater::observability
