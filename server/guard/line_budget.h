// LineBudget: bounds the log lines of failed calls, so that a client cannot fill the disk, or a processor, with refusals.
//
// Holds hostile_resets_latency_ratio of docs/benchmarks/trust.md, where each of 33,000 calls a second fails.
#ifndef HEADWATER_SERVER_GUARD_LINE_BUDGET_H_
#define HEADWATER_SERVER_GUARD_LINE_BUDGET_H_

#include <algorithm>
#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::guard {

// Thread-safe.
class LineBudget {
 public:
  // `a_second` lines (> 0) each second, and as many as `at_once` after a quiet time.
  LineBudget(double a_second, double at_once) : a_second_(a_second), at_once_(at_once), left_(at_once) {}

  // The number of lines dropped since the last one written, if one may be written now; nullopt: this line is dropped too.
  std::optional<int64_t> Take(absl::Time now = observability::MonotonicNow()) {
    absl::MutexLock lock(&mutex_);
    left_ = std::min(at_once_, left_ + a_second_ * std::max(0.0, absl::ToDoubleSeconds(now - last_)));
    last_ = now;
    if (left_ < 1) {
      ++left_out_;
      return std::nullopt;
    }
    left_ -= 1;
    const int64_t left_out = left_out_;
    left_out_ = 0;
    return left_out;
  }

 private:
  const double a_second_;
  const double at_once_;
  absl::Mutex mutex_;
  double left_ ABSL_GUARDED_BY(mutex_);
  absl::Time last_ ABSL_GUARDED_BY(mutex_) = observability::MonotonicNow();
  int64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The process's budget for lines of calls that were refused, cancelled or cut off.
inline LineBudget& FailedCallLines() {
  static auto* const budget = new LineBudget(100, 1000);
  return *budget;
}

}  // namespace headwater::guard

#endif  // HEADWATER_SERVER_GUARD_LINE_BUDGET_H_
