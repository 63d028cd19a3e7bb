#include "tests/fuzz/support/leak_check.h"

#include <gtest/gtest.h>

namespace headwater::fuzz {
namespace {

TEST(ThreadNumbers, ComeRoundWhenTheyReachTheFirstAgain) {
  ThreadNumbers numbers(1000);
  for (const pid_t number : {1000, 1001, 32000, 32767}) {
    numbers.Add(number);
    EXPECT_FALSE(numbers.came_round()) << number;
  }
  // Begun anew: nobody in this process had one below the first.
  for (const pid_t number : {300, 900, 999}) {
    numbers.Add(number);
    EXPECT_FALSE(numbers.came_round()) << number;
  }
  numbers.Add(1000);
  EXPECT_TRUE(numbers.came_round());
  numbers.Add(400);
  EXPECT_TRUE(numbers.came_round());
}

TEST(ThreadNumbers, ComeRoundWhereTheFirstWasPassedUnseen) {
  ThreadNumbers numbers(1000);
  numbers.Add(2000);
  numbers.Add(1500);
  EXPECT_TRUE(numbers.came_round());
}

}  // namespace
}  // namespace headwater::fuzz
