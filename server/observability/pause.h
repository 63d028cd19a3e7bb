// Pause: an interruptible wait between the rounds of a periodic thread.
#ifndef HEADWATER_SERVER_OBSERVABILITY_PAUSE_H_
#define HEADWATER_SERVER_OBSERVABILITY_PAUSE_H_

#include <algorithm>
#include <condition_variable>
#include <mutex>

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

}  // namespace headwater::observability

#endif  // HEADWATER_SERVER_OBSERVABILITY_PAUSE_H_
