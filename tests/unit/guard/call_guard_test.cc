#include "server/guard/call_guard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/observability/monotonic_clock.h"

namespace headwater::guard {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// With a clock in the hand, and a list of who is dropped.
struct Backlog {
  explicit Backlog(int64_t most, double forgotten_a_second = 1)
      : calls(most, forgotten_a_second, [this](const std::string& peer) { dropped.push_back(peer); }) {}
  bool Call(int64_t connection) { return calls.OnCall(connection, now); }
  void Take(int64_t connection, const std::string& peer) { calls.OnTaken(connection, peer, now); }

  absl::Time now = absl::UnixEpoch();
  std::vector<std::string> dropped;
  CallBacklog calls;
};

TEST(CallBacklog, TakesSoManyAndRefusesOneMore) {
  Backlog backlog(3);
  const int64_t one = backlog.calls.NewConnection();
  const int64_t other = backlog.calls.NewConnection();
  ASSERT_NE(one, other);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(backlog.Call(one));
  EXPECT_FALSE(backlog.Call(one));
  EXPECT_TRUE(backlog.Call(other));
  EXPECT_THAT(backlog.dropped, IsEmpty());  // nobody knows yet whose it is
  backlog.Take(other, "ipv4:10.0.0.1:2");
  EXPECT_THAT(backlog.dropped, IsEmpty());
  backlog.Take(one, "ipv4:10.0.0.1:1");
  EXPECT_THAT(backlog.dropped, ElementsAre("ipv4:10.0.0.1:1"));
  EXPECT_FALSE(backlog.Call(one));  // there is room, but it is over
  backlog.Take(one, "ipv4:10.0.0.1:1");
  EXPECT_THAT(backlog.dropped, ElementsAre("ipv4:10.0.0.1:1"));  // once
}

TEST(CallBacklog, DropsAtOnceWhomItKnows) {
  Backlog backlog(2);
  const int64_t connection = backlog.calls.NewConnection();
  EXPECT_TRUE(backlog.Call(connection));
  backlog.Take(connection, "ipv4:10.0.0.1:1");
  EXPECT_TRUE(backlog.Call(connection));
  EXPECT_TRUE(backlog.Call(connection));
  EXPECT_THAT(backlog.dropped, IsEmpty());
  EXPECT_FALSE(backlog.Call(connection));
  EXPECT_THAT(backlog.dropped, ElementsAre("ipv4:10.0.0.1:1"));
}

TEST(CallBacklog, CallsThatAreTakenMakeRoom) {
  Backlog backlog(2);
  const int64_t connection = backlog.calls.NewConnection();
  for (int i = 0; i < 1000; ++i) {
    EXPECT_TRUE(backlog.Call(connection));
    EXPECT_TRUE(backlog.Call(connection));
    backlog.Take(connection, "ipv4:10.0.0.1:1");
    backlog.Take(connection, "ipv4:10.0.0.1:1");
  }
  EXPECT_THAT(backlog.dropped, IsEmpty());
}

TEST(CallBacklog, CallsThatNobodyTakesAreForgottenWithTime) {
  Backlog backlog(2, /*forgotten_a_second=*/10);
  const int64_t connection = backlog.calls.NewConnection();
  EXPECT_TRUE(backlog.Call(connection));
  EXPECT_TRUE(backlog.Call(connection));
  backlog.now += absl::Milliseconds(100);
  EXPECT_TRUE(backlog.Call(connection));
  backlog.now += absl::Milliseconds(99);
  EXPECT_FALSE(backlog.Call(connection));
}

TEST(CallBacklog, ForgetsConnectionsOfWhichNothingWaits) {
  Backlog backlog(2);
  const int64_t busy = backlog.calls.NewConnection();
  for (int i = 0; i < 100000; ++i) {
    const int64_t connection = backlog.calls.NewConnection();
    ASSERT_TRUE(backlog.Call(connection));
    backlog.Take(connection, "ipv4:10.0.0.1:1");
    if (i % 100 == 0) {
      ASSERT_TRUE(backlog.Call(busy));
      if (i > 0) backlog.Take(busy, "ipv4:10.0.0.1:2");  // one is left
    }
  }
  EXPECT_LE(backlog.calls.known_connections(), 1024U);
  EXPECT_TRUE(backlog.Call(busy));
  EXPECT_FALSE(backlog.Call(busy));
}

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
