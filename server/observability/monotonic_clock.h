// The clock of durations: leases, deadlines, idle times, how long anything took. It only ever goes forward, at its own pace. A wall
// clock that is set, as it is when a machine wakes up, would end all of them at once, or none for hours.
#ifndef HEADWATER_SERVER_OBSERVABILITY_MONOTONIC_CLOCK_H_
#define HEADWATER_SERVER_OBSERVABILITY_MONOTONIC_CLOCK_H_

#include <chrono>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace headwater::observability {

// Time since an unknown moment; only differences have a meaning. Never compare it with absl::Now(), nor pass it to Abseil's
// *WithDeadline(), which take wall clock times. Wait *WithTimeout() for the rest and check again: such a wait also ends early when
// the wall clock is set forward.
inline absl::Time MonotonicNow() {
  return absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

// The time during which at least one of many workers is busy. Thread-safe.
class BusyClock {
 public:
  // A worker becomes busy, and idle.
  void Begin() {
    absl::MutexLock lock(&mutex_);
    if (workers_++ == 0) since_ = MonotonicNow();
  }
  void End() {
    absl::MutexLock lock(&mutex_);
    if (--workers_ == 0) total_ += MonotonicNow() - since_;
  }
  // A worker that is busy while this lives.
  class Work {
   public:
    explicit Work(BusyClock& clock) : clock_(clock) { clock_.Begin(); }
    ~Work() { clock_.End(); }
    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;

   private:
    BusyClock& clock_;
  };

  // The total up to now; overlapping work counts once.
  absl::Duration total() const {
    absl::MutexLock lock(&mutex_);
    return total_ + (workers_ > 0 ? MonotonicNow() - since_ : absl::ZeroDuration());
  }

 private:
  mutable absl::Mutex mutex_;
  int64_t workers_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time since_ ABSL_GUARDED_BY(mutex_);  // while a worker is busy: when the first one began
  absl::Duration total_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace headwater::observability

#endif  // HEADWATER_SERVER_OBSERVABILITY_MONOTONIC_CLOCK_H_
