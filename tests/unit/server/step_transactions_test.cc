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
  static void Commit(StepTransactions& steps, int64_t micro_batch) {
    Stage(steps, micro_batch);
    steps.FinishCommit(micro_batch, CommitFactor());
  }

  const HeadName name_{"default", "student"};
  StepTransactions steps_{name_, SmallSpec(), HeadLimits()};
};

TEST_F(StepTransactionsTest, AHigherAttemptDropsALowerOne) {
  const auto lower = Stage(steps_, 3, 0);
  const auto higher = Stage(steps_, 3, 1);
  EXPECT_TRUE(lower->dropped());
  EXPECT_FALSE(higher->dropped());
  EXPECT_EQ(steps_.FindPending(3), higher);
  EXPECT_OK(steps_.Supersede(0, 3, 2));
  EXPECT_TRUE(higher->dropped());
  EXPECT_EQ(steps_.FindPending(3), nullptr);
  EXPECT_REASON(steps_.CheckBegin(0, 3, 1), kAttemptSuperseded);
}

TEST_F(StepTransactionsTest, TheHighestAttemptThatWaitsKeepsItsMark) {
  steps_.waiting_attempts().Mark(3, 5);
  steps_.waiting_attempts().Mark(3, 4);
  EXPECT_EQ(steps_.waiting_attempts().Higher(3, 4), 5);
  EXPECT_EQ(steps_.waiting_attempts().Higher(3, 5), std::nullopt);
  EXPECT_EQ(steps_.waiting_attempts().Higher(4, 0), std::nullopt);
  steps_.waiting_attempts().Unmark(3, 4);
  EXPECT_EQ(steps_.waiting_attempts().Higher(3, 0), 5);
  steps_.waiting_attempts().Unmark(3, 5);
  EXPECT_EQ(steps_.waiting_attempts().Higher(3, 0), std::nullopt);
}

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

TEST_F(StepTransactionsTest, WithoutOrderNothingWaits) {
  EXPECT_FALSE(steps_.in_order());
  Commit(steps_, 5);
  steps_.MarkAdded(5);
  EXPECT_EQ(steps_.waiting_count(), 0);
  EXPECT_OK(steps_.CheckNothingWaits());
  EXPECT_OK(steps_.CheckBegin(0, 3, 0));
  HeadSpec frozen = SmallSpec();
  frozen.trainable = false;
  EXPECT_FALSE(StepTransactions(name_, frozen, {.deterministic = true, .ordered_window = 1}).in_order());
}

}  // namespace
}  // namespace headwater::heads
