// StepTransactions: the ledger, what is pending and the order agree with each other.
#include "server/heads/steps/step_transactions.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <set>

#include "tests/unit/server/heads/head_test_util.h"

namespace headwater::heads {
namespace {

using headwater::testing::SmallSpec;

constexpr Digest kDigest = {1};

class StepTransactionsTest : public ::testing::Test {
 protected:
  // Begins and leaves undecided.
  static std::shared_ptr<PendingContribution> Stage(StepTransactions& steps, int64_t micro_batch, int64_t attempt = 0) {
    EXPECT_OK(steps.ledger().CheckBegin(steps.open().step, micro_batch, attempt, kDigest, /*first_wins=*/false));
    steps.ledger().Begin(micro_batch, attempt, kDigest);
    steps.DropLowerAttempt(micro_batch);
    auto pending = std::make_shared<PendingContribution>(std::set<const Head*>(), attempt, std::nullopt, HeldRows(), nullptr);
    steps.FinishPending(micro_batch, pending, ContributionForm::kHeld, ContributionCounts());
    return pending;
  }

  const HeadName name_{"default", "student"};
  StepTransactions steps_{name_, SmallSpec(), HeadLimits()};
};

TEST_F(StepTransactionsTest, TheEndOfAStepDropsWhatIsPending) {
  const auto closed = Stage(steps_, 1);
  steps_.last_apply() = AppliedStep();
  EXPECT_TRUE(steps_.HasContributions());
  EXPECT_OK(steps_.Close(0, StepState::kDiscarded));
  EXPECT_TRUE(closed->dropped());
  EXPECT_FALSE(steps_.HasContributions());
  EXPECT_FALSE(steps_.last_apply().has_value());
  EXPECT_EQ(steps_.open().step, 1);
  const auto reset = Stage(steps_, 1);
  steps_.last_apply() = AppliedStep();
  steps_.Reset(7);
  EXPECT_FALSE(steps_.last_apply().has_value());
  EXPECT_TRUE(reset->dropped());
  EXPECT_TRUE(steps_.pending().empty());
  EXPECT_EQ(steps_.open().step, 7);
}

}  // namespace
}  // namespace headwater::heads
