// StreamWatchdog: ends streams that should not go on: whose client is there but neither sends nor takes anything, that take too
// long altogether, or whose token has been withdrawn; so that none holds a thread and its budget forever.
//
// Holds no measured figure: it keeps --stream_idle_timeout, --max_stream_time and the two seconds after which a withdrawn token
// ends its streams (docs/security.md).
#ifndef HEADWATER_SERVER_GUARD_STREAM_WATCHDOG_H_
#define HEADWATER_SERVER_GUARD_STREAM_WATCHDOG_H_

#include <grpc/grpc.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/scheduler/repeated_task.h"

namespace headwater::guard {

class StreamWatchdog {
 public:
  // Streams that are idle for `idle_timeout`, or not over after `max_time` (both > 0), are ended within 5/4 of it, and within a
  // second.
  StreamWatchdog(absl::Duration idle_timeout, absl::Duration max_time);
  // No watch may be left when it is destroyed.
  StreamWatchdog(const StreamWatchdog&) = delete;
  StreamWatchdog& operator=(const StreamWatchdog&) = delete;

  // Streams that are watched now.
  size_t watch_count() const {
    absl::MutexLock lock(&mutex_);
    return watches_.size();
  }

  // A stream that is read or written. The client is waited for between Begin() and End() of each message; what the server does in
  // between, however long it takes, is not the client's fault.
  class Watch {
   public:
    // `end` is called at most once with what the client is to be told (kCancelled, kDeadlineExceeded, or what `Allow` says), on the
    // watchdog's thread, and never after the destructor has returned.
    Watch(StreamWatchdog* watchdog, std::function<void(const absl::Status&)> end);
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
    void Begin();
    void End();
    // Asks this, too, about once a second: an error ends the stream.
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
  scheduler::RepeatedTask look_;  // last: it uses the members above
};

// Ends a call of gRPC's with a status that its client gets. `context` is grpc::ServerContext or grpc::CallbackServerContext.
template <typename Context>
void EndCall(Context& context, const absl::Status& why) {
  grpc_call_cancel_with_status(context.c_call(), static_cast<grpc_status_code>(why.code()), std::string(why.message()).c_str(),
                               nullptr);
}

}  // namespace headwater::guard

#endif  // HEADWATER_SERVER_GUARD_STREAM_WATCHDOG_H_
