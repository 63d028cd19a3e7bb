// CallTrace: what one call that is traced went through, with times; a file of Chrome's trace format in the end.
#ifndef HEADWATER_SERVER_OBSERVABILITY_CALL_TRACE_H_
#define HEADWATER_SERVER_OBSERVABILITY_CALL_TRACE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/observability/trace_context.h"

namespace headwater::observability {

// Thread-safe. Never holds contents of tensors.
class CallTrace {
 public:
  // Spans that are kept; of more only the number is. The last ones are not for rows: what comes at a call's end, the call itself,
  // has room however many rows it had.
  static constexpr size_t kMostSpans = 1024;
  static constexpr size_t kMostSpansWithRows = kMostSpans - 32;

  // `span_id` is the call's own span, a child of `parent`.
  CallTrace(TraceContext parent, std::string span_id, std::string request_id, std::string method);

  // Something took from `start` to `end`, both inclusive; equal: a moment. Spans of one `track` (static) stand in one line. Times
  // are MonotonicNow()'s, here and below.
  void AddSpan(const char* track, std::string name, absl::Time start, absl::Time end);
  // Rows up to `row_end` are done now: a span from when the last ones of this track were, or from `start`.
  void AddRows(const char* track, int64_t row_end, absl::Time start);
  // Something to be known about the call; the last value stays.
  void SetAttribute(const std::string& key, const std::string& value);

  const TraceContext& parent() const { return parent_; }
  const std::string& span_id() const { return span_id_; }
  // Chrome's trace format (JSON, object form): times in microseconds since 1970, by what the wall clock said when the trace was
  // begun, so that files of several calls, and of the client, can be looked at together in chrome://tracing or ui.perfetto.dev.
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

  // Leaves it out if there are `most` already.
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

}  // namespace headwater::observability

#endif  // HEADWATER_SERVER_OBSERVABILITY_CALL_TRACE_H_
