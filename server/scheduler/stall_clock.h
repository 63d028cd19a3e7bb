// StallClock: how long a micro-batch that is being computed may hold the engine for rows that stay away.
//
// Where others wait: as long as it has been computed for. To give up costs them as much, because it is computed again; so they
// never lose more than twice what the best decision would have cost, whenever the rows come.
#ifndef HEADWATER_SERVER_SCHEDULER_STALL_CLOCK_H_
#define HEADWATER_SERVER_SCHEDULER_STALL_CLOCK_H_

#include <algorithm>

#include "absl/time/time.h"

namespace headwater::scheduler {

// Of one computation, by its thread; `now` never goes back.
class StallClock {
 public:
  // Bounds of what it may wait for once while others wait; the larger one also where nobody does.
  static constexpr absl::Duration kLeast = absl::Milliseconds(1);
  static constexpr absl::Duration kMost = absl::Milliseconds(20);

  // Rows are asked for. The first time tells that the engine is had.
  void BeginWait(absl::Time now) {
    had_since_ = std::min(had_since_, now);
    wait_begun_ = now;
    others_since_ = absl::InfiniteFuture();
  }
  // When it should give up, as things are. `others_wait`: somebody could be computed instead.
  absl::Time GiveUpAt(absl::Time now, bool others_wait) {
    others_since_ = others_wait ? std::min(others_since_, now) : absl::InfiniteFuture();
    const absl::Duration computed = wait_begun_ - had_since_ - waited_;
    return std::min(wait_begun_ + kMost, others_since_ + std::clamp(computed, kLeast, kMost));
  }
  // They have come.
  void EndWait(absl::Time now) { waited_ += now - wait_begun_; }

 private:
  absl::Time had_since_ = absl::InfiniteFuture();
  absl::Duration waited_;  // since then, for rows
  absl::Time wait_begun_;
  absl::Time others_since_ = absl::InfiniteFuture();  // during this wait
};

}  // namespace headwater::scheduler

#endif  // HEADWATER_SERVER_SCHEDULER_STALL_CLOCK_H_
