#include <gtest/gtest.h>

#include "server/scheduler/work_queue.h"

namespace headwater::scheduler {
namespace {

absl::Time At(double milliseconds) { return absl::UnixEpoch() + absl::Milliseconds(milliseconds); }

TEST(StallClock, WaitsLongWhileNobodyElseDoes) {
  StallClock clock;
  clock.BeginWait(At(0));
  EXPECT_EQ(clock.GiveUpAt(At(0), false), At(20));
  EXPECT_EQ(clock.GiveUpAt(At(15), false), At(20));
}

TEST(StallClock, GivesUpSoonWhereLittleHasBeenComputed) {
  StallClock clock;
  clock.BeginWait(At(0));
  EXPECT_EQ(clock.GiveUpAt(At(0), true), At(1));
  EXPECT_EQ(clock.GiveUpAt(At(0.5), true), At(1));
}

TEST(StallClock, WaitsForAsLongAsItHasBeenComputing) {
  StallClock clock;
  clock.BeginWait(At(0));
  clock.EndWait(At(4));
  clock.BeginWait(At(10));  // 6 ms of them computing
  EXPECT_EQ(clock.GiveUpAt(At(10), true), At(16));
  clock.EndWait(At(12));
  clock.BeginWait(At(100));
  EXPECT_EQ(clock.GiveUpAt(At(100), true), At(120));
}

TEST(StallClock, CountsFromWhenOthersCame) {
  StallClock clock;
  clock.BeginWait(At(0));
  clock.EndWait(At(0));
  clock.BeginWait(At(5));
  EXPECT_EQ(clock.GiveUpAt(At(5), false), At(25));
  EXPECT_EQ(clock.GiveUpAt(At(14), true), At(19));
  EXPECT_EQ(clock.GiveUpAt(At(16), true), At(19));
  EXPECT_EQ(clock.GiveUpAt(At(17), false), At(25));  // they have gone elsewhere
  EXPECT_EQ(clock.GiveUpAt(At(18), true), At(23));
  EXPECT_EQ(clock.GiveUpAt(At(24), true), At(23));
}

TEST(StallClock, NeverWaitsLongerThanAlone) {
  StallClock clock;
  clock.BeginWait(At(0));
  clock.EndWait(At(0));
  clock.BeginWait(At(50));
  EXPECT_EQ(clock.GiveUpAt(At(65), true), At(70));
}

}  // namespace
}  // namespace headwater::scheduler
