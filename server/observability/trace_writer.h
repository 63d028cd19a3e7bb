// TraceWriter: writes traced calls into files in the background, and keeps a bounded number of them.
#ifndef HEADWATER_SERVER_OBSERVABILITY_TRACE_WRITER_H_
#define HEADWATER_SERVER_OBSERVABILITY_TRACE_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/observability/call_trace.h"
#include "server/observability/metrics.h"

namespace headwater::observability {

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

#endif  // HEADWATER_SERVER_OBSERVABILITY_TRACE_WRITER_H_
