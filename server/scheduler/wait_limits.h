// WaitLimits: how long a call may wait for its turn, and where it is counted meanwhile.
#ifndef HEADWATER_SERVER_SCHEDULER_WAIT_LIMITS_H_
#define HEADWATER_SERVER_SCHEDULER_WAIT_LIMITS_H_

#include <functional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace headwater::scheduler {

// A bounded number of places for calls that wait. Thread-safe.
class WaitPlaces {
 public:
  virtual ~WaitPlaces() = default;
  // Takes a place, which the caller has until GiveBack(); an error says why there is none.
  virtual absl::Status Take() = 0;
  virtual void GiveBack() = 0;
};

// One place out of `places`, from Take() to the end of this object. `places` null: none is needed.
class WaitPlace {
 public:
  explicit WaitPlace(WaitPlaces* places) : places_(places) {}
  WaitPlace(const WaitPlace&) = delete;
  WaitPlace& operator=(const WaitPlace&) = delete;
  ~WaitPlace() {
    if (taken_) places_->GiveBack();
  }
  // May be called again.
  absl::Status Take() {
    if (places_ == nullptr || taken_) return absl::OkStatus();
    absl::Status status = places_->Take();
    taken_ = status.ok();
    return status;
  }

 private:
  WaitPlaces* const places_;
  bool taken_ = false;
};

// How long a call may wait for its turn.
struct WaitLimits {
  absl::Time deadline = absl::InfinitePast();  // of observability::MonotonicNow(); past: do not wait
  std::function<bool()> cancelled;             // polled every few milliseconds; may be null
  WaitPlaces* places = nullptr;                // where a call is while it waits for files; null: it needs no place
};

inline WaitLimits AsLongAsItTakes() { return {absl::InfiniteFuture(), nullptr}; }

// How often a waiting call asks whether it has been cancelled.
inline constexpr absl::Duration kWaitInterval = absl::Milliseconds(10);

// Why a wait returned: the state may have changed, or a limit ended it.
enum class Waited { kAWhile, kCancelled, kTooLong };

// One turn of a loop that waits for a change. Returns after a signal or kWaitInterval, and at once if the limits end the wait.
Waited WaitForChange(absl::CondVar& changed, absl::Mutex& mutex, const WaitLimits& limits) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

}  // namespace headwater::scheduler

#endif  // HEADWATER_SERVER_SCHEDULER_WAIT_LIMITS_H_
