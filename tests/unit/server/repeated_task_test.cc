#include "server/observability/repeated_task.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::observability {
namespace {

TEST(RepeatedTask, IsDoneAgainAndAgainUntilItIsDestroyed) {
  absl::Notification third;
  std::atomic<int> rounds{0};
  {
    RepeatedTask task(absl::Milliseconds(1), [&] {
      if (++rounds == 3) third.Notify();
    });
    third.WaitForNotification();
  }
  const int last = rounds;
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_EQ(rounds, last);
}

TEST(RepeatedTask, BeginsAfterAnInterval) {
  const absl::Time begin = observability::MonotonicNow();
  absl::Notification first;
  RepeatedTask task(absl::Milliseconds(20), [&] {
    if (!first.HasBeenNotified()) first.Notify();
  });
  first.WaitForNotification();
  EXPECT_GE(observability::MonotonicNow() - begin, absl::Milliseconds(20));
}

TEST(RepeatedTask, EndsWithoutWaitingForTheInterval) {
  auto task = std::make_unique<RepeatedTask>(absl::InfiniteDuration(), [] { FAIL() << "there is no end of the interval"; });
  task.reset();  // else the test does not end
}

}  // namespace
}  // namespace headwater::observability
