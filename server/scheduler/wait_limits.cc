#include "server/scheduler/wait_limits.h"

#include <algorithm>

#include "server/observability/monotonic_clock.h"

namespace headwater::scheduler {

Waited WaitForChange(absl::CondVar& changed, absl::Mutex& mutex, const WaitLimits& limits) {
  if (limits.cancelled != nullptr && limits.cancelled()) return Waited::kCancelled;
  const absl::Duration left = limits.deadline - observability::MonotonicNow();
  if (left <= absl::ZeroDuration()) return Waited::kTooLong;
  changed.WaitWithTimeout(&mutex, std::min(left, kWaitInterval));
  return Waited::kAWhile;
}

}  // namespace headwater::scheduler
