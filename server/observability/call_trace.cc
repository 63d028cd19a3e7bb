#include "server/observability/call_trace.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <regex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
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

void CallTrace::AddSpan(const char* track, std::string name, absl::Time start, absl::Time end) {
  absl::MutexLock lock(&mutex_);
  AddLocked({track, std::move(name), start, std::max(start, end)}, kMostSpans);
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

void CallTrace::SetAttribute(const std::string& key, const std::string& value) {
  absl::MutexLock lock(&mutex_);
  attributes_[key] = value;
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

}  // namespace headwater::observability
