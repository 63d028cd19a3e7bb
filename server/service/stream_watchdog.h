// StreamWatchdog: ends streams whose client is there but neither sends nor takes anything, so that none holds a thread and its
// budget for ever.
#ifndef HEADWATER_SERVER_SERVICE_STREAM_WATCHDOG_H_
#define HEADWATER_SERVER_SERVICE_STREAM_WATCHDOG_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace headwater::service {

class StreamWatchdog {
 public:
  // Streams that are idle for `idle_timeout` (> 0) are ended within 5/4 of it.
  explicit StreamWatchdog(absl::Duration idle_timeout);
  ~StreamWatchdog();  // no watch may be left
  StreamWatchdog(const StreamWatchdog&) = delete;
  StreamWatchdog& operator=(const StreamWatchdog&) = delete;

  // A stream that is read or written. The client is waited for between Begin() and End() of each message; what the server does in
  // between, however long it takes, is not the client's fault.
  class Watch {
   public:
    // `on_idle` is called at most once, on the watchdog's thread, and never after the destructor has returned.
    Watch(StreamWatchdog* watchdog, std::function<void()> on_idle);
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
    void Begin();
    void End();
    bool expired() const { return expired_.load(); }

   private:
    friend class StreamWatchdog;
    StreamWatchdog* const watchdog_;
    const std::function<void()> on_idle_;
    std::atomic<int64_t> begun_ns_;  // kNotWaiting outside of Begin() and End()
    std::atomic<bool> expired_{false};
  };

 private:
  void Run();

  const absl::Duration idle_timeout_;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<Watch*> watches_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_STREAM_WATCHDOG_H_
