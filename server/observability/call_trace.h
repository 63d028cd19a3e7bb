// CallTrace: the timed spans of one traced call, written as a file of Chrome's trace format.
#ifndef HEADWATER_SERVER_OBSERVABILITY_CALL_TRACE_H_
#define HEADWATER_SERVER_OBSERVABILITY_CALL_TRACE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/observability/metrics.h"

namespace headwater::observability {

// Metadata key of W3C Trace Context (https://www.w3.org/TR/trace-context/), by which a call belongs to a trace.
inline constexpr char kTraceparentKey[] = "traceparent";

// The caller's span.
struct TraceContext {
  std::string trace_id;   // 32 lower-case hexadecimal digits, not all 0
  std::string parent_id;  // 16 of them, not all 0
  bool sampled = false;   // the caller records this trace
};

// Empty for values that the standard says to ignore: another form, ids of zeros, version ff. Unknown versions are parsed as version
// 00.
std::optional<TraceContext> ParseTraceparent(absl::string_view text);

// Random: 16 digits, not all 0.
std::string NewSpanId();

// Thread-safe. Never holds contents of tensors.
class CallTrace {
 public:
  // Spans that are kept; further ones are only counted. The last places are not for rows: the spans at a call's end, and the call's
  // own, always have room.
  static constexpr size_t kMostSpans = 1024;
  static constexpr size_t kMostSpansWithRows = kMostSpans - 32;

  // `span_id` is the call's own span, a child of `parent`.
  CallTrace(TraceContext parent, std::string span_id, std::string request_id, std::string method);

  // A span from `start` to `end`, both inclusive; equal: a moment. Spans of one `track` (static) are shown in one line. Times are
  // MonotonicNow()'s, here and below.
  void AddSpan(const char* track, std::string name, absl::Time start, absl::Time end) {
    absl::MutexLock lock(&mutex_);
    AddLocked({track, std::move(name), start, std::max(start, end)}, kMostSpans);
  }
  // Rows up to `row_end` are done: a span from the end of this track's last rows, or from `start`.
  void AddRows(const char* track, int64_t row_end, absl::Time start);
  // An attribute of the call; the last value stays.
  void SetAttribute(const std::string& key, const std::string& value) {
    absl::MutexLock lock(&mutex_);
    attributes_[key] = value;
  }

  const TraceContext& parent() const { return parent_; }
  const std::string& span_id() const { return span_id_; }
  // Chrome's trace format (JSON, object form), with times in microseconds since 1970. The wall clock is read once, when the trace
  // begins. So files of several calls, and of the client, can be shown together in chrome://tracing or ui.perfetto.dev.
  std::string ToJson() const;

 private:
  struct Span {
    const char* track;
    std::string name;
    absl::Time start;
    absl::Time end;
  };
  struct Progress {
    int64_t row_end = 0;
    absl::Time time;
  };

  // Drops the span if there are `most` already.
  void AddLocked(Span span, size_t most) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const TraceContext parent_;
  const std::string span_id_;
  const absl::Duration since_1970_;  // of MonotonicNow()'s zero
  mutable absl::Mutex mutex_;
  std::vector<Span> spans_ ABSL_GUARDED_BY(mutex_);
  int64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, Progress> progress_ ABSL_GUARDED_BY(mutex_);  // by track
  std::map<std::string, std::string> attributes_ ABSL_GUARDED_BY(mutex_);
};

// Writes traced calls into files in the background, and keeps a bounded number of them.
class TraceWriter {
 public:
  // Calls that wait to be written, and files begun in one second; further calls are dropped, and counted.
  static constexpr size_t kMostWaiting = 64;
  static constexpr int64_t kMostASecond = 50;

  // Files go to `directory`, which is created if missing, as headwater-TIME-TRACE_ID-SPAN_ID.json. At most `most_files` (>= 1) with
  // such names stay, including those of earlier servers; the oldest are removed. InvalidArgument, saying why. `metrics` outlives
  // this.
  static absl::StatusOr<std::unique_ptr<TraceWriter>> Open(const std::string& directory, int64_t most_files, Metrics& metrics);
  // Writes the waiting calls.
  ~TraceWriter();

  // Returns at once. Any thread.
  void Write(std::shared_ptr<const CallTrace> trace);

 private:
  TraceWriter(std::string directory, int64_t most_files, std::deque<std::string> files, Metrics& metrics);
  void Run();
  // False if the call must be dropped.
  bool MayWrite();
  absl::Status WriteFile(const CallTrace& trace);

  const std::string directory_;
  const size_t most_files_;
  Metrics& metrics_;
  std::deque<std::string> files_;  // names, the oldest first; of the thread, like the next three
  absl::Time second_;              // in which `begun_` files were begun; of MonotonicNow(), like the one below
  int64_t begun_ = 0;
  absl::Time last_warning_ = absl::InfinitePast();
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<std::shared_ptr<const CallTrace>> waiting_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;  // last: it uses the members above
};

}  // namespace headwater::observability

#endif  // HEADWATER_SERVER_OBSERVABILITY_CALL_TRACE_H_
