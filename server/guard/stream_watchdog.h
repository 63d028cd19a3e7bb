// StreamWatchdog: ends streams that would hold a thread and its budget forever. Their client neither sends nor takes anything, they
// exceed the time for a stream, or their token has been withdrawn.
//
// Holds no measured figure: it keeps --stream_idle_timeout, --max_stream_time and the two seconds after which a withdrawn token
// ends its streams (docs/security.md).
#ifndef HEADWATER_SERVER_GUARD_STREAM_WATCHDOG_H_
#define HEADWATER_SERVER_GUARD_STREAM_WATCHDOG_H_

#include <grpc/grpc.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/observability/repeated_task.h"

namespace headwater::guard {

class StreamWatchdog {
 public:
  // Ends streams that are idle for `idle_timeout`, or not over after `max_time` (both > 0). It is late by at most a quarter of that
  // time, and by at most a second.
  StreamWatchdog(absl::Duration idle_timeout, absl::Duration max_time);
  // No watch may be left when it is destroyed.
  StreamWatchdog(const StreamWatchdog&) = delete;
  StreamWatchdog& operator=(const StreamWatchdog&) = delete;

  // A stream that is read or written. Only the time between Begin() and End() of each message counts as the client's; the server's
  // own time in between does not.
  class Watch {
   public:
    // `end` is called at most once with the status for the client: kCancelled, kDeadlineExceeded, or the error of `Allow`. Runs on
    // the watchdog's thread, and never after the destructor has returned.
    Watch(StreamWatchdog* watchdog, std::function<void(const absl::Status&)> end);
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
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

}  // namespace headwater::guard

#endif  // HEADWATER_SERVER_GUARD_STREAM_WATCHDOG_H_
