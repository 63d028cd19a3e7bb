// The clock of leases and idle times: it only ever goes forward, at its own pace. A wall clock that is set would end every lease at
// once, or none for hours.
#ifndef HEADWATER_SERVER_HEADS_MONOTONIC_CLOCK_H_
#define HEADWATER_SERVER_HEADS_MONOTONIC_CLOCK_H_

#include <chrono>

#include "absl/time/time.h"

namespace headwater::heads {

// Time since an unknown moment; only differences mean anything.
inline absl::Time MonotonicNow() {
  return absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_MONOTONIC_CLOCK_H_
