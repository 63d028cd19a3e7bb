#include "server/service/loss/transfer_registry.h"

#include <gtest/gtest.h>

#include <atomic>
#include <optional>

#include "absl/time/clock.h"
#include "headwater/kernels/error.h"
#include "server/observability/monotonic_clock.h"
#include "server/service/call/call_threads.h"
#include "tests/unit/expect_status.h"

namespace headwater::service {
namespace {

TransferId Id(uint8_t byte) {
  TransferId id;
  id.fill(byte);
  return id;
}

// A stripe that asks for its transfer.
struct Stripe {
  Stripe(TransferRegistry& registry, uint8_t id) {
    registry.Find(Id(id), this, [this](const absl::StatusOr<std::shared_ptr<Transfer>>& transfer) {
      EXPECT_FALSE(told.has_value()) << "told twice";
      told = transfer.status();
    });
  }
  std::optional<absl::Status> told;  // nothing yet
};

TEST(TransferRegistry, LetsStripesWaitForTheirPrimary) {
  TransferRegistry registry(absl::Seconds(10));
  const Stripe early(registry, 1);
  const Stripe other(registry, 2);
  EXPECT_EQ(registry.waiting(), 2);
  {
    ASSERT_OK_AND_ASSIGN(auto entry, registry.Announce(Id(1)));
    EXPECT_FALSE(early.told.has_value());
    // An announced one is waited for as long as it takes.
    registry.Expire(observability::MonotonicNow() + absl::Seconds(1));
    registry.Drain();
    EXPECT_FALSE(early.told.has_value());
    EXPECT_REASON(*other.told, kTransferNotFound);
    entry.Open(nullptr);
    ASSERT_TRUE(early.told.has_value());
    EXPECT_TRUE(early.told->ok());
  }
  const Stripe late(registry, 1);
  EXPECT_REASON(*late.told, kTransferNotFound);
  const Stripe draining(registry, 3);
  EXPECT_REASON(*draining.told, kTransferNotFound);
  EXPECT_EQ(registry.waiting(), 0);
}

TEST(TransferRegistry, TellsThoseWhosePrimaryIsRefused) {
  TransferRegistry registry(absl::Seconds(10));
  const Stripe stripe(registry, 1);
  { const auto entry = registry.Announce(Id(1)); }
  EXPECT_REASON(*stripe.told, kTransferNotFound);
}

TEST(TransferRegistry, SendsAwayWhoHasWaitedForTooLong) {
  TransferRegistry registry(absl::Seconds(10));
  const Stripe stripe(registry, 1);
  registry.Expire(observability::MonotonicNow() + absl::Seconds(9));
  EXPECT_FALSE(stripe.told.has_value());
  registry.Expire(observability::MonotonicNow() + absl::Seconds(11));
  EXPECT_REASON(*stripe.told, kTransferNotFound);
  EXPECT_EQ(registry.waiting(), 0);
}

TEST(TransferRegistry, ForgetsWhoLeaves) {
  TransferRegistry registry(absl::Seconds(10));
  const Stripe gone(registry, 1);
  const Stripe there(registry, 1);
  registry.Leave(Id(1), &gone);
  registry.Leave(Id(1), &gone);
  registry.Leave(Id(9), &gone);
  registry.Drain();
  EXPECT_FALSE(gone.told.has_value());
  EXPECT_TRUE(there.told.has_value());
}

TEST(TransferRegistry, AnIdNamesOneCallAndIsNotUsedAgainSoon) {
  TransferRegistry registry(absl::Seconds(10));
  {
    ASSERT_OK_AND_ASSIGN(const auto first, registry.Announce(Id(1)));
    EXPECT_ERROR(registry.Announce(Id(1)), kInvalidField, {"field", "header.transfer_id"});
  }
  EXPECT_REASON(registry.Announce(Id(1)), kInvalidField);
  // What is remembered is bounded.
  for (int i = 0; i < 5000; ++i) {
    TransferId id = Id(9);
    id[0] = static_cast<uint8_t>(i);
    id[1] = static_cast<uint8_t>(i >> 8);
    ASSERT_TRUE(registry.Announce(id).ok());
  }
  EXPECT_TRUE(registry.Announce(Id(1)).ok());
}

TEST(CallThreads, RunsAtOnceWhatItAcceptsAndNoMore) {
  std::atomic<int> running{0};
  std::atomic<bool> go{false};
  {
    CallThreads threads(3);
    const auto wait = [&] {
      ++running;
      while (!go) absl::SleepFor(absl::Milliseconds(1));
    };
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(threads.TryRun(wait));
    while (running < 3) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_FALSE(threads.TryRun(wait));
    go = true;
    // A place is free again once a task has ended; the thread that ran it is used again.
    while (!threads.TryRun(wait)) absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(running, 4);
}

TEST(CallThreads, RunsWhatIsPostedEvenIfAllAreBusy) {
  std::atomic<int> done{0};
  {
    CallThreads threads(2);
    for (int i = 0; i < 1000; ++i) threads.Post([&] { ++done; });
  }
  EXPECT_EQ(done, 1000);
}

}  // namespace
}  // namespace headwater::service
