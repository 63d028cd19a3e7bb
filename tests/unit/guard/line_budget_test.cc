// LineBudget: which lines are left out, and that the next one says how many.
#include <gtest/gtest.h>

#include "server/guard/call_guard.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::guard {
namespace {

TEST(LineBudget, LeavesOutWhatIsTooMuchAndSaysSo) {
  LineBudget budget(2, 3);
  const absl::Time start = observability::MonotonicNow() + absl::Seconds(1);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(budget.Take(start), 0);
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(budget.Take(start).has_value());
  EXPECT_EQ(budget.Take(start + absl::Milliseconds(500)), 5);
  EXPECT_FALSE(budget.Take(start + absl::Milliseconds(500)).has_value());
  EXPECT_FALSE(budget.Take(start - absl::Hours(1)).has_value());  // a clock that jumps gives nothing
  const absl::Time later = start + absl::Hours(1);
  EXPECT_EQ(budget.Take(later), 2);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(budget.Take(later), 0);
  EXPECT_FALSE(budget.Take(later).has_value());
}

}  // namespace
}  // namespace headwater::guard
