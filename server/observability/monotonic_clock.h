// The clock of durations: leases, deadlines, idle times, how long anything took. It only ever goes forward, at its own pace. A wall
// clock that is set, as it is when a machine wakes up, would end all of them at once, or none for hours.
#ifndef HEADWATER_SERVER_OBSERVABILITY_MONOTONIC_CLOCK_H_
#define HEADWATER_SERVER_OBSERVABILITY_MONOTONIC_CLOCK_H_

#include <chrono>

#include "absl/time/time.h"

namespace headwater::observability {

// Time since an unknown moment; only differences have a meaning. Never compare it with absl::Now(), nor pass it to Abseil's
// *WithDeadline(), which take wall clock times. Wait *WithTimeout() for the rest and check again: such a wait also ends early when
// the wall clock is set forward.
inline absl::Time MonotonicNow() {
  return absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

}  // namespace headwater::observability

#endif  // HEADWATER_SERVER_OBSERVABILITY_MONOTONIC_CLOCK_H_
