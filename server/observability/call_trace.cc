#include "server/observability/call_trace.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <regex>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/observability/logging.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::observability {
namespace {

constexpr int kProcess = 1;
constexpr size_t kTraceparentLength = 55;  // of version 00

bool AreZeros(absl::string_view text) { return text.find_first_not_of('0') == absl::string_view::npos; }

}  // namespace

std::optional<TraceContext> ParseTraceparent(absl::string_view text) {
  static const std::regex form("([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]([0-9a-f])");
  const std::string known(text.substr(0, kTraceparentLength));
  std::smatch parts;
  if (!std::regex_match(known, parts, form)) return std::nullopt;
  TraceContext context{parts[2], parts[3], (std::stoi(parts[4], nullptr, 16) & 1) != 0};
  if (parts[1] == "ff" || AreZeros(context.trace_id) || AreZeros(context.parent_id)) return std::nullopt;
  // Later versions may have more behind another dash.
  if (text.size() > kTraceparentLength && (parts[1] == "00" || text[kTraceparentLength] != '-')) return std::nullopt;
  return context;
}

std::string NewSpanId() {
  thread_local std::mt19937_64 generator{std::random_device{}()};
  uint64_t id = 0;
  while (id == 0) id = generator();
  return absl::StrCat(absl::Hex(id, absl::kZeroPad16));
}

CallTrace::CallTrace(TraceContext parent, std::string span_id, std::string request_id, std::string method)
    : parent_(std::move(parent)), span_id_(std::move(span_id)), since_1970_(absl::Now() - MonotonicNow()) {
  attributes_ = {{"request_id", std::move(request_id)},
                 {"method", std::move(method)},
                 {"trace_id", parent_.trace_id},
                 {"parent_span_id", parent_.parent_id},
                 {"span_id", span_id_}};
}

void CallTrace::AddLocked(Span span, size_t most) {
  if (spans_.size() < most) {
    spans_.push_back(std::move(span));
  } else {
    ++left_out_;
  }
}

void CallTrace::AddRows(const char* track, int64_t row_end, absl::Time start) {
  const absl::Time now = MonotonicNow();
  absl::MutexLock lock(&mutex_);
  Progress& progress = progress_.try_emplace(track, Progress{0, start}).first->second;
  if (row_end <= progress.row_end) return;
  AddLocked({track, absl::StrCat("rows ", progress.row_end, " to ", row_end), progress.time, std::max(progress.time, now)},
            kMostSpansWithRows);
  progress = {row_end, now};
}

std::string CallTrace::ToJson() const {
  absl::MutexLock lock(&mutex_);
  nlohmann::json events = nlohmann::json::array();
  events.push_back({{"ph", "M"}, {"pid", kProcess}, {"name", "process_name"}, {"args", {{"name", "headwaterd"}}}});
  std::vector<const char*> tracks;  // in the order in which they first come
  for (const Span& span : spans_) {
    auto track = std::find_if(tracks.begin(), tracks.end(), [&](const char* name) { return std::strcmp(name, span.track) == 0; });
    if (track == tracks.end()) {
      track = tracks.insert(tracks.end(), span.track);
      events.push_back({{"ph", "M"},
                        {"pid", kProcess},
                        {"tid", track - tracks.begin()},
                        {"name", "thread_name"},
                        {"args", {{"name", span.track}}}});
    }
    const double start = absl::ToDoubleMicroseconds(span.start - absl::UnixEpoch() + since_1970_);
    nlohmann::json event = {{"pid", kProcess}, {"tid", track - tracks.begin()}, {"name", span.name}, {"ts", start}};
    if (span.start == span.end) {
      event["ph"] = "i";
      event["s"] = "t";
    } else {
      event["ph"] = "X";
      event["dur"] = absl::ToDoubleMicroseconds(span.end - span.start);
    }
    event["args"] = {{"trace_id", parent_.trace_id}, {"parent_span_id", span_id_}};
    events.push_back(std::move(event));
  }
  nlohmann::json document = {{"traceEvents", std::move(events)}, {"displayTimeUnit", "ms"}, {"otherData", attributes_}};
  if (left_out_ > 0) document["otherData"]["spans_left_out"] = absl::StrCat(left_out_);
  // Names that clients chose need not be UTF-8.
  return document.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

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
  std::error_code error, ignored;
  fs::create_directories(directory, error);
  std::deque<std::string> names;
  if (!error) {
    for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
      const std::string name = entry->path().filename().string();
      if (!absl::StartsWith(name, kPrefix)) continue;
      if (absl::EndsWith(name, kSuffix)) names.push_back(name);
      // A leftover of a process that ended while writing; a failure to remove it is harmless.
      if (absl::EndsWith(name, kUnfinished)) fs::remove(entry->path(), ignored);
    }
  }
  if (error) return absl::InvalidArgumentError(absl::StrCat("trace_dir: cannot use ", directory, ": ", error.message()));
  std::sort(names.begin(), names.end());  // by time
  return std::unique_ptr<TraceWriter>(new TraceWriter(directory, most_files, std::move(names), metrics));
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
