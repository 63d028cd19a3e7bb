// StreamWatchdog: ends streams that would hold a thread and its budget forever. Their client neither sends nor takes anything, they
// exceed the time for a stream, or their token has been withdrawn. SlowUploads: ends uploads that others wait for.
//
// Both hold no measured figure. The watchdog keeps --stream_idle_timeout, --max_stream_time and the two seconds after which a
// withdrawn token ends its streams (docs/security.md). tests/integration/limits_test.cc has the bounds of uploads (Overload).
#ifndef HEADWATER_SERVER_GUARD_STREAM_WATCHDOG_H_
#define HEADWATER_SERVER_GUARD_STREAM_WATCHDOG_H_

#include <grpc/grpc.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/observability/repeated_task.h"
#include "server/transport/row_exchange.h"

namespace headwater::guard {

class StreamWatchdog {
 public:
  // Ends streams that are idle for `idle_timeout`, or not over after `max_time` (both > 0). It is late by at most a quarter of that
  // time, and by at most a second. Outlives its watches.
  StreamWatchdog(absl::Duration idle_timeout, absl::Duration max_time);

  // A stream that is read or written. Only the time between Begin() and End() of each message counts as the client's; the server's
  // own time in between does not.
  class Watch {
   public:
    // `end` is called at most once with the status for the client: kCancelled, kDeadlineExceeded, or the error of `Allow`. Runs on
    // the watchdog's thread, and never after the destructor has returned.
    Watch(StreamWatchdog* watchdog, std::function<void(const absl::Status&)> end);
    ~Watch();
    void Begin();
    void End();
    // Checks this too, about once a second: an error ends the stream.
    void Allow(std::function<absl::Status()> allowed);
    // Why the stream was ended; OK if it was not.
    absl::Status why() const;

   private:
    friend class StreamWatchdog;
    StreamWatchdog* const watchdog_;
    const std::function<void(const absl::Status&)> end_;
    const int64_t created_ns_;
    std::atomic<int64_t> begun_ns_;          // kNotWaiting outside of Begin() and End()
    std::function<absl::Status()> allowed_;  // guarded by the watchdog's mutex, like the next
    absl::Status why_;
  };

 private:
  void Look();
  absl::Status Judge(const Watch& watch, int64_t now_ns) const;

  const absl::Duration idle_timeout_;
  const absl::Duration max_time_;
  mutable absl::Mutex mutex_;
  std::set<Watch*> watches_ ABSL_GUARDED_BY(mutex_);
  observability::RepeatedTask look_;  // last: it uses the members above
};

// Ends a gRPC call with a status for the client. `context` is grpc::ServerContext or grpc::CallbackServerContext.
template <typename Context>
void EndCall(Context& context, const absl::Status& why) {
  grpc_call_cancel_with_status(context.c_call(), static_cast<grpc_status_code>(why.code()), std::string(why.message()).c_str(),
                               nullptr);
}

// The micro-batches whose rows still come. When threads or bytes run out for other clients, a stalled upload gives way. So clients
// that only pretend to upload cannot keep others out. A proxy does not know which upload has a thread and bytes. Thread-safe.
class SlowUploads {
  struct Upload {
    std::shared_ptr<transport::RowExchange> rows;
    absl::Time begin;
  };

 public:
  // While it lives, the upload may have to give way. `now`, here and below, is observability::MonotonicNow().
  class Place {
   public:
    Place(SlowUploads& uploads, std::shared_ptr<transport::RowExchange> rows, absl::Time now) : uploads_(uploads) {
      absl::MutexLock lock(&uploads_.mutex_);
      upload_ = uploads_.uploads_.insert(uploads_.uploads_.end(), {std::move(rows), now});
    }
    ~Place() {
      absl::MutexLock lock(&uploads_.mutex_);
      uploads_.uploads_.erase(upload_);
    }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

   private:
    SlowUploads& uploads_;
    std::list<Upload>::iterator upload_;
  };

  // Ends one upload with kQueueFull: the longest without a row, if that is more than 2 s. Else the slowest of those older than 5 s,
  // if it brings less than 64 KiB/s. Uploads that lack only other processes' rows, a joined teacher's, are exempt. False if no
  // upload qualifies.
  bool GiveWay(absl::Time now);

 private:
  absl::Mutex mutex_;
  std::list<Upload> uploads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace headwater::guard

#endif  // HEADWATER_SERVER_GUARD_STREAM_WATCHDOG_H_
