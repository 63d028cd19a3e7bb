// StallClock: bounds how long a micro-batch that computes may hold the engine for rows that stay away.
//
// If others wait, the bound is the time that it has computed. To give up costs them as much, because it is computed again. So they
// never lose more than twice the cost of the best decision, whenever the rows come.
#ifndef HEADWATER_SERVER_SCHEDULER_STALL_CLOCK_H_
#define HEADWATER_SERVER_SCHEDULER_STALL_CLOCK_H_

#include <algorithm>

#include "absl/time/time.h"

namespace headwater::scheduler {

// The clock of one computation, used by its thread; `now` never goes back.
class StallClock {
 public:
  // Bounds of one wait for rows while others wait; the larger one holds also while no other job waits.
  static constexpr absl::Duration kLeast = absl::Milliseconds(1);
  static constexpr absl::Duration kMost = absl::Milliseconds(20);

  // A wait for rows begins. The first call marks that the computation has the engine.
  void BeginWait(absl::Time now) {
    had_since_ = std::min(had_since_, now);
    wait_begun_ = now;
    others_since_ = absl::InfiniteFuture();
  }
  // The time to give up, as things are. `others_wait`: another job could be computed instead.
  absl::Time GiveUpAt(absl::Time now, bool others_wait) {
    others_since_ = others_wait ? std::min(others_since_, now) : absl::InfiniteFuture();
    const absl::Duration computed = wait_begun_ - had_since_ - waited_;
    return std::min(wait_begun_ + kMost, others_since_ + std::clamp(computed, kLeast, kMost));
  }
  // The rows have come.
  void EndWait(absl::Time now) { waited_ += now - wait_begun_; }

 private:
  absl::Time had_since_ = absl::InfiniteFuture();
  absl::Duration waited_;  // of earlier waits for rows
  absl::Time wait_begun_;
  absl::Time others_since_ = absl::InfiniteFuture();  // during this wait
};

}  // namespace headwater::scheduler

#endif  // HEADWATER_SERVER_SCHEDULER_STALL_CLOCK_H_
