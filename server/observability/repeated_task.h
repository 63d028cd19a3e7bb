// RepeatedTask: a function that is called again and again on a thread of its own.
#ifndef HEADWATER_SERVER_OBSERVABILITY_REPEATED_TASK_H_
#define HEADWATER_SERVER_OBSERVABILITY_REPEATED_TASK_H_

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/time/time.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::observability {

// Thread-safe. Waits by the steady clock with the standard library. Abseil's waits follow the wall clock in releases before 2023:
// setting that clock back would delay leases, watchdogs and heartbeats.
class Pause {
 public:
  // Waits for `duration`: false when it is over, true as soon as Stop() has been called, now or before.
  bool WaitFor(absl::Duration duration) {
    // No wait is so long that its end, counted in nanoseconds, is out of range.
    constexpr absl::Duration kLongest = absl::Hours(1);
    const absl::Time end = MonotonicNow() + duration;
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopped_) {
      const absl::Duration left = end - MonotonicNow();
      if (left <= absl::ZeroDuration()) return false;
      changed_.wait_for(lock, absl::ToChronoNanoseconds(std::min(left, kLongest)));
    }
    return true;
  }
  // Ends the wait, and all later ones.
  void Stop() {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;  // guarded by mutex_
};

class RepeatedTask {
 public:
  // Calls `round` `interval` (> 0) from now, and again `interval` after each end of it.
  RepeatedTask(absl::Duration interval, std::function<void()> round)
      : round_(std::move(round)), thread_([this, interval] {
          while (!pause_.WaitFor(interval)) round_();
        }) {}
  // Waits for a running round; starts no further one.
  ~RepeatedTask() {
    pause_.Stop();
    thread_.join();
  }

 private:
  const std::function<void()> round_;
  Pause pause_;
  std::thread thread_;  // last: it uses the members above
};

}  // namespace headwater::observability

#endif  // HEADWATER_SERVER_OBSERVABILITY_REPEATED_TASK_H_
