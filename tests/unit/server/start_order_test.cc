#include "server/scheduler/start_order.h"

#include <gtest/gtest.h>

#include <utility>

namespace headwater::scheduler {
namespace {

const absl::Time kStart = absl::UnixEpoch();

TEST(StartOrder, LetsTheEarlierOneBeginFirst) {
  StartOrder order;
  StartOrder::Place first = order.Join(kStart);
  StartOrder::Place second = order.Join(kStart);
  EXPECT_TRUE(order.IsFirst(first, kStart));
  EXPECT_FALSE(order.IsFirst(second, kStart));
  first.Release();
  EXPECT_TRUE(order.IsFirst(second, kStart));
}

TEST(StartOrder, WaitsForNobodyWhoTakesLong) {
  StartOrder order;
  const StartOrder::Place slow = order.Join(kStart);
  const StartOrder::Place place = order.Join(kStart + absl::Milliseconds(15));
  EXPECT_FALSE(order.IsFirst(place, kStart + StartOrder::kPrecedence));
  EXPECT_TRUE(order.IsFirst(place, kStart + StartOrder::kPrecedence + absl::Nanoseconds(1)));
}

TEST(StartOrder, LooksAtEveryoneWhoCameBefore) {
  StartOrder order;
  const StartOrder::Place slow = order.Join(kStart);
  const StartOrder::Place recent = order.Join(kStart + absl::Milliseconds(30));
  const StartOrder::Place place = order.Join(kStart + absl::Milliseconds(30));
  EXPECT_FALSE(order.IsFirst(place, kStart + absl::Milliseconds(31)));
}

TEST(StartOrder, APlaceGoesWithItsOwner) {
  StartOrder order;
  StartOrder::Place kept;
  {
    StartOrder::Place gone = order.Join(kStart);
    StartOrder::Place moved = order.Join(kStart);
    kept = std::move(moved);
  }
  const StartOrder::Place last = order.Join(kStart);
  EXPECT_TRUE(order.IsFirst(kept, kStart));
  EXPECT_FALSE(order.IsFirst(last, kStart));
  kept = StartOrder::Place();
  EXPECT_TRUE(order.IsFirst(last, kStart));
}

}  // namespace
}  // namespace headwater::scheduler
