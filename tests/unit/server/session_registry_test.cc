#include "server/heads/session_registry.h"

#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <set>
#include <utility>

#include "tests/unit/server/heads/head_test_util.h"

namespace headwater::heads {
namespace {

using Use = SessionRegistry::Use;

class SessionRegistryTest : public ::testing::Test {
 protected:
  SessionId MustOpen(absl::Duration lease = absl::Seconds(30), const std::string& client_name = "trainer") {
    const absl::StatusOr<SessionRegistry::Grant> grant = sessions_.Open(client_name, lease);
    EXPECT_OK(grant);
    return grant.ok() ? grant->id : SessionId{};
  }
  Use MustBegin(const SessionId& id) {
    absl::StatusOr<Use> use = sessions_.Begin(id);
    EXPECT_OK(use);
    return use.ok() ? *std::move(use) : Use();
  }
  void Pass(absl::Duration duration) { now_ += duration; }

  absl::Time now_ = absl::UnixEpoch();
  std::vector<SessionId> ended_;
  std::vector<SessionRegistry::End> hows_;  // of those
  int64_t dropped_ = 0;                     // of each
  SessionRegistry sessions_{{.max_sessions = 3, .max_lease = absl::Seconds(60)},
                            [this](const SessionId& id, const std::string&, SessionRegistry::End how) {
                              sessions_.size();  // would hang if the lock were held
                              ended_.push_back(id);
                              hows_.push_back(how);
                              return dropped_;
                            },
                            [this] { return now_; }};
};

TEST_F(SessionRegistryTest, IdsAreRandom) {
  std::set<SessionId> ids;
  std::array<int, 256> bit_counts{};
  constexpr int kSessions = 400;
  for (int i = 0; i < kSessions; ++i) {
    const SessionId id = MustOpen();
    EXPECT_TRUE(ids.insert(id).second);
    for (size_t bit = 0; bit < bit_counts.size(); ++bit) bit_counts[bit] += (id[bit / 8] >> (bit % 8)) & 1;
    EXPECT_TRUE(sessions_.Close(id));
  }
  // Each bit is set about half of the time: 200 +- 7 standard deviations.
  for (const int count : bit_counts) {
    EXPECT_GE(count, 130);
    EXPECT_LE(count, 270);
  }
}

TEST_F(SessionRegistryTest, TheLeaseIsBounded) {
  EXPECT_EQ(sessions_.Open("a", absl::Seconds(30))->lease, absl::Seconds(30));
  ASSERT_OK_AND_ASSIGN(const SessionRegistry::Grant longest, sessions_.Open("b", absl::InfiniteDuration()));
  EXPECT_EQ(longest.lease, absl::Seconds(60));
  EXPECT_EQ(*sessions_.Renew(longest.id), absl::Seconds(60));
  Pass(absl::Seconds(59));
  EXPECT_OK(sessions_.Begin(longest.id));
  for (const absl::Duration lease : {absl::ZeroDuration(), -absl::Seconds(1), -absl::InfiniteDuration()}) {
    EXPECT_REASON(sessions_.Open("c", lease), kInvalidField);
  }
}

TEST_F(SessionRegistryTest, ALeaseEndsWithoutCalls) {
  const SessionId id = MustOpen(absl::Seconds(30), "trainer-7");
  const SessionId longer = MustOpen(absl::Seconds(40));
  Pass(absl::Seconds(30) - absl::Nanoseconds(1));
  EXPECT_EQ(sessions_.Expire().size(), 0u);
  EXPECT_TRUE(ended_.empty());
  Pass(absl::Nanoseconds(1));
  dropped_ = 3;
  const std::vector<SessionRegistry::Expired> expired = sessions_.Expire();
  ASSERT_EQ(expired.size(), 1u);
  EXPECT_EQ(expired[0].client_name, "trainer-7");
  EXPECT_EQ(expired[0].dropped, 3);
  EXPECT_EQ(ended_, std::vector<SessionId>{id});
  EXPECT_EQ(hows_, std::vector<SessionRegistry::End>{SessionRegistry::End::kExpired});
  EXPECT_EQ(sessions_.size(), 1);
  EXPECT_REASON(sessions_.Begin(id), kSessionNotFound);
  EXPECT_FALSE(sessions_.Close(id));
  EXPECT_OK(sessions_.Renew(longer));
  EXPECT_EQ(sessions_.Expire().size(), 0u);
  EXPECT_EQ(ended_.size(), 1u);
}

TEST_F(SessionRegistryTest, ClosingWithRunningCallsEndsItOnceMoreAfterTheLast) {
  const SessionId id = MustOpen();
  std::optional<Use> first = MustBegin(id);
  std::optional<Use> second = MustBegin(id);
  EXPECT_TRUE(sessions_.Close(id));
  EXPECT_EQ(ended_.size(), 1u);
  EXPECT_REASON(sessions_.Begin(id), kSessionNotFound);
  EXPECT_REASON(sessions_.Renew(id), kSessionNotFound);
  EXPECT_FALSE(sessions_.Close(id));
  EXPECT_EQ(sessions_.size(), 0);
  Pass(absl::Hours(1));
  EXPECT_EQ(sessions_.Expire().size(), 0u);
  first.reset();
  EXPECT_EQ(ended_.size(), 1u);
  second.reset();  // may have left something since the session ended
  EXPECT_EQ(ended_, (std::vector<SessionId>{id, id}));
  EXPECT_EQ(sessions_.Expire().size(), 0u);
}

TEST(SessionRegistryEndTest, ASessionWhoseLeaseEndsWhileItIsEndedEndsOnce) {
  absl::Time now = absl::UnixEpoch();
  int ends = 0;
  SessionRegistry sessions(
      {},
      [&](const SessionId&, const std::string&, SessionRegistry::End) {
        ++ends;
        now += absl::Hours(1);
        EXPECT_TRUE(sessions.Expire().empty());
        return 0;
      },
      [&now] { return now; });
  const auto open = [&] { return sessions.Open("a", absl::Seconds(1))->id; };
  EXPECT_TRUE(sessions.Close(open()));
  EXPECT_EQ(ends, 1);
  const SessionId closed = open();
  {
    const absl::StatusOr<SessionRegistry::Use> call = sessions.Begin(closed);
    now += absl::Hours(1);
    EXPECT_OK(sessions.Renew(closed));
    EXPECT_TRUE(sessions.Close(closed));
  }
  EXPECT_EQ(ends, 3);
  open();
  now += absl::Hours(1);
  EXPECT_EQ(sessions.Expire().size(), 1u);
  EXPECT_EQ(ends, 4);
}

TEST_F(SessionRegistryTest, TheirNumberIsBounded) {
  const SessionId first = MustOpen();
  MustOpen();
  std::optional<Use> call = MustBegin(first);
  MustOpen(absl::Seconds(60));
  EXPECT_ERROR(sessions_.Open("d", absl::Seconds(1)), kQuotaExceeded, {"limit", "max_sessions"}, {"maximum", "3"});
  // One that has ended keeps its place as long as its calls run.
  EXPECT_TRUE(sessions_.Close(first));
  EXPECT_REASON(sessions_.Open("d", absl::Seconds(1)), kQuotaExceeded);
  call.reset();
  MustOpen(absl::Seconds(60));
  // One whose lease has ended does not, though nobody has looked.
  EXPECT_REASON(sessions_.Open("d", absl::Seconds(1)), kQuotaExceeded);
  ended_.clear();
  Pass(absl::Seconds(30));
  std::vector<SessionRegistry::Expired> expired;
  EXPECT_OK(sessions_.Open("d", absl::Seconds(60), &expired));
  EXPECT_EQ(expired.size(), 1u);
  EXPECT_EQ(ended_.size(), 1u);
  EXPECT_EQ(sessions_.Expire().size(), 0u);
  EXPECT_REASON(sessions_.Open("d", absl::Seconds(60), &expired), kQuotaExceeded);
  EXPECT_TRUE(expired.empty());
}

TEST(SessionRegistryThreadsTest, ManyThreadsOpenUseCloseAndExpire) {
  std::atomic<int64_t> now_seconds = 0;
  std::atomic<int> end_count = 0;
  SessionRegistry sessions(
      {.max_sessions = 64, .max_lease = absl::Seconds(10)},
      [&](const SessionId&, const std::string&, SessionRegistry::End) { return int64_t{++end_count}; },
      [&] { return absl::UnixEpoch() + absl::Seconds(now_seconds.load()); });
  ASSERT_OK_AND_ASSIGN(const SessionRegistry::Grant shared, sessions.Open("shared", absl::Seconds(10)));
  std::atomic<int> opened = 1;
  std::atomic<int> closed_while_running = 0;
  RunThreads(6, [&](int64_t thread) {
    for (int i = 0; i < 300; ++i) {
      const absl::StatusOr<SessionRegistry::Grant> grant = sessions.Open("own", absl::Seconds(1 + i % 3));
      if (grant.ok()) ++opened;
      {
        absl::StatusOr<Use> call = sessions.Begin(shared.id);
        if (grant.ok()) {
          absl::StatusOr<Use> own = sessions.Begin(grant->id);
          if (i % 3 == 0 && own.ok() && sessions.Close(grant->id)) ++closed_while_running;
        }
      }
      if (grant.ok() && i % 3 == 1) sessions.Close(grant->id);
      if (thread == 0) ++now_seconds;
      if (thread == 1) sessions.Expire();
    }
  });
  now_seconds += 1000;
  sessions.Expire();
  EXPECT_EQ(sessions.size(), 0);
  // Each has ended once, and once more if a call of it ran then.
  EXPECT_EQ(end_count.load(), opened.load() + closed_while_running.load());
}

TEST(MonotonicNowTest, NeverGoesBack) {
  absl::Time last = observability::MonotonicNow();
  for (int i = 0; i < 1000; ++i) {
    const absl::Time now = observability::MonotonicNow();
    EXPECT_GE(now, last);
    last = now;
  }
}

}  // namespace
}  // namespace headwater::heads
