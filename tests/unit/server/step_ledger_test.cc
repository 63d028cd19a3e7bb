#include "server/heads/steps/step_ledger.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <optional>

#include "server/heads/steps/step_transactions.h"
#include "tests/unit/server/heads/head_test_util.h"

namespace headwater::heads {
namespace {

using Ids = std::vector<int64_t>;

constexpr int64_t kRoom = 100;
constexpr Digest kFirst = {1};
constexpr Digest kSecond = {2};
const ContributionCounts kCounts = {10, 2.5, 9.0, 1};

CommitFactor Factor(double factor) { return {factor, std::nullopt}; }

absl::StatusOr<BeginDecision> Begin(StepLedger& ledger, int64_t step, int64_t id, int64_t attempt,
                                    const std::optional<Digest>& digest, bool first_wins) {
  const absl::StatusOr<BeginDecision> decision = ledger.CheckBegin(step, id, attempt, digest, first_wins);
  if (decision.ok() && *decision == BeginDecision::kCompute) ledger.Begin(id, attempt, digest);
  return decision;
}

class StepLedgerTest : public ::testing::Test {
 protected:
  // False if only the digest can decide.
  absl::StatusOr<bool> BeginProvisionally(int64_t step, int64_t id, int64_t attempt) {
    const absl::StatusOr<BeginDecision> decision = Begin(ledger_, step, id, attempt, std::nullopt, false);
    return decision.ok() ? absl::StatusOr<bool>(*decision == BeginDecision::kCompute) : decision.status();
  }
  BeginDecision MustBegin(int64_t id, const Digest& digest = kFirst, int64_t attempt = 0) {
    absl::StatusOr<BeginDecision> decision = Begin(ledger_, 7, id, attempt, digest, false);
    EXPECT_TRUE(decision.ok()) << decision.status();
    return decision.value_or(BeginDecision::kCompute);
  }
  void Commit(int64_t id, const Digest& digest = kFirst) {
    EXPECT_EQ(MustBegin(id, digest), BeginDecision::kCompute);
    EXPECT_OK(ledger_.FinishCommitted(id, ContributionForm::kDirect, kCounts));
  }
  void Stage(int64_t id, int64_t attempt = 0) {
    EXPECT_EQ(MustBegin(id, kFirst, attempt), BeginDecision::kCompute);
    EXPECT_OK(ledger_.FinishStaged(id, ContributionForm::kStaged, kCounts));
  }
  const MicroBatchRecord& Record(int64_t id) { return ledger_.open().micro_batches.at(id); }

  StepLedger ledger_{7, kRoom};
};

TEST_F(StepLedgerTest, AProvisionalOneGetsItsDigestLater) {
  EXPECT_TRUE(*BeginProvisionally(7, 3, 0));
  EXPECT_EQ(Record(3).state, ContributionState::kInProgress);
  EXPECT_REASON(BeginProvisionally(7, 3, 0), kMicroBatchInProgress);
  EXPECT_REASON(Begin(ledger_, 7, 3, 0, kFirst, true), kMicroBatchInProgress);
  EXPECT_REASON(ledger_.FinishCommitted(3, ContributionForm::kDirect, kCounts), kInternal);  // as what would it be known?
  EXPECT_REASON(ledger_.CheckClose(7, StepState::kDiscarded), kMicroBatchInProgress);
  EXPECT_OK(ledger_.SetDigest(3, kSecond));
  EXPECT_REASON(ledger_.SetDigest(3, kFirst), kInternal);
  EXPECT_OK(ledger_.FinishStaged(3, ContributionForm::kStaged, kCounts));
  EXPECT_EQ(Record(3).digest, kSecond);
  EXPECT_REASON(ledger_.SetDigest(3, kFirst), kInternal);
  EXPECT_REASON(ledger_.SetDigest(4, kFirst), kInternal);
}

TEST_F(StepLedgerTest, NegativeIdsAreRefused) {
  EXPECT_REASON(ledger_.CheckBegin(7, -1, 0), kInvalidField);
  EXPECT_REASON(ledger_.CheckBegin(7, 0, -1), kInvalidField);
  EXPECT_REASON(ledger_.Discard(7, -1, 0), kInvalidField);
}

TEST_F(StepLedgerTest, FinishingWhatIsNotInProgressIsADefect) {
  Commit(0);
  EXPECT_REASON(ledger_.FinishCommitted(0, ContributionForm::kDirect, kCounts), kInternal);
  EXPECT_REASON(ledger_.FinishStaged(1, ContributionForm::kStaged, kCounts), kInternal);
  EXPECT_REASON(ledger_.Abort(0), kInternal);
  EXPECT_REASON(ledger_.FinishCommit(0, Factor(1)), kInternal);
  EXPECT_REASON(ledger_.Close(7, StepState::kOpen), kInternal);
}

TEST_F(StepLedgerTest, DiscardLeavesATombstone) {
  Stage(0);
  EXPECT_TRUE(*ledger_.Discard(7, 0, 0));
  EXPECT_FALSE(*ledger_.Discard(7, 0, 0, DiscardedBy::kHead));
  EXPECT_ERROR(ledger_.CheckCommit(7, 0, 0, Factor(1)), kMicroBatchDiscarded, {"discardedBy", "call"});  // the first
  EXPECT_EQ(Record(0).state, ContributionState::kDiscarded);
  EXPECT_EQ(Record(0).digest, kFirst);
  EXPECT_REASON(Begin(ledger_, 7, 0, 0, kFirst, true), kMicroBatchDiscarded);
  EXPECT_FALSE(*ledger_.Discard(7, 8, 3));
  EXPECT_EQ(Record(8).attempt, 3);
  EXPECT_FALSE(*ledger_.Discard(7, 9, 0));
  EXPECT_FALSE(Record(9).digest.has_value());
  EXPECT_REASON(ledger_.CheckBegin(7, 9, 0), kMicroBatchDiscarded);
}

TEST_F(StepLedgerTest, AnAnnouncedAttemptFencesLowerOnesOff) {
  EXPECT_FALSE(*ledger_.Supersede(7, 0, 0));
  EXPECT_TRUE(ledger_.open().micro_batches.empty());  // attempt 0 leaves nothing behind
  EXPECT_FALSE(*ledger_.Supersede(7, 0, 2));
  EXPECT_EQ(Record(0).state, ContributionState::kNone);
  EXPECT_EQ(Record(0).attempt, 2);
  EXPECT_FALSE(ledger_.open().HasUndecided());
  EXPECT_ERROR(ledger_.CheckBegin(7, 0, 1), kAttemptSuperseded, {"knownAttempt", "2"});
  EXPECT_REASON(Begin(ledger_, 7, 0, 1, kFirst, false), kAttemptSuperseded);
  EXPECT_REASON(ledger_.Supersede(7, 0, 1), kAttemptSuperseded);
  EXPECT_REASON(ledger_.CheckCommit(7, 0, 2, Factor(1)), kMicroBatchNotFound);
  EXPECT_ERROR(ledger_.CheckCommit(7, 0, 1, Factor(1)), kAttemptSuperseded, {"knownAttempt", "2"});
  EXPECT_REASON(ledger_.Seal(7, int64_t{1}), kMicroBatchMissing);
  EXPECT_EQ(MustBegin(0, kFirst, 2), BeginDecision::kCompute);
  EXPECT_OK(ledger_.FinishCommitted(0, ContributionForm::kDirect, kCounts));
  EXPECT_TRUE(*ledger_.Seal(7, int64_t{1}));
}

TEST_F(StepLedgerTest, AHigherAttemptIsLetThroughWhileALowerOneIsComputed) {
  EXPECT_EQ(MustBegin(0, kFirst, 1), BeginDecision::kCompute);
  EXPECT_REASON(ledger_.CheckBegin(7, 0, 0), kAttemptSuperseded);
  EXPECT_REASON(ledger_.CheckBegin(7, 0, 1), kMicroBatchInProgress);
  EXPECT_OK(ledger_.CheckBegin(7, 0, 2));
  EXPECT_REASON(Begin(ledger_, 7, 0, 2, kFirst, false), kMicroBatchInProgress);
  EXPECT_REASON(ledger_.Supersede(7, 0, 2), kInternal);
}

TEST_F(StepLedgerTest, SealNeedsExactlyTheExpectedOnes) {
  Commit(0);
  Commit(2);
  const absl::Status missing = ledger_.Seal(7, int64_t{3}).status();
  EXPECT_ERROR(missing, kMicroBatchMissing, {"missing", "1"});
  EXPECT_FALSE(GetErrorMetadata(missing).contains("uncommitted"));
  EXPECT_ERROR(ledger_.Seal(7, int64_t{2}), kMicroBatchMissing, {"unexpected", "2"});
  EXPECT_ERROR(ledger_.Seal(7, Ids{0}), kMicroBatchUnexpected, {"unexpected", "2"});
  Stage(5);
  EXPECT_ERROR(ledger_.Seal(7, Ids{2, 0}), kMicroBatchUncommitted, {"uncommitted", "5"});
  EXPECT_REASON(ledger_.Seal(7, Ids{0, 2, 5}), kMicroBatchUncommitted);
  EXPECT_EQ(ledger_.open().state, StepState::kOpen);
  EXPECT_TRUE(*ledger_.Discard(7, 5, 0));
  EXPECT_REASON(ledger_.Seal(7, Ids{0, 2, 5}), kMicroBatchMissing);
  EXPECT_TRUE(*ledger_.Seal(7, Ids{2, 0}));
  EXPECT_EQ(ledger_.open().state, StepState::kSealed);
}

TEST_F(StepLedgerTest, SealedStepReplaysAndRefusesNewOnes) {
  Commit(0);
  EXPECT_TRUE(*ledger_.Seal(7, int64_t{1}));
  EXPECT_FALSE(*ledger_.Seal(7, int64_t{1}));
  EXPECT_FALSE(*ledger_.Seal(7, Ids{0}));
  EXPECT_REASON(ledger_.Seal(7, int64_t{2}), kMicroBatchMissing);
  EXPECT_EQ(MustBegin(0), BeginDecision::kReplay);
  EXPECT_REASON(Begin(ledger_, 7, 0, 0, kSecond, false), kMicroBatchConflict);
  EXPECT_ERROR(ledger_.CheckBegin(7, 1, 0), kStepSealed, {"openStep", "7"});
  EXPECT_REASON(ledger_.CheckCommit(7, 1, 0, Factor(1)), kMicroBatchNotFound);
  EXPECT_FALSE(*ledger_.CheckCommit(7, 0, 0, Factor(1)));
  EXPECT_FALSE(*ledger_.Discard(7, 1, 0));
  EXPECT_EQ(ledger_.open().micro_batches.size(), 1u);
}

TEST_F(StepLedgerTest, HugeAndWrongExpectations) {
  Commit(0);
  EXPECT_ERROR(ledger_.Seal(7, std::numeric_limits<int64_t>::max()), kMicroBatchMissing,
               {"missing", "1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,..."}, {"missingCount", "9223372036854775806"});
  Ids ids(17);
  std::iota(ids.begin(), ids.end(), 1);
  EXPECT_EQ(GetErrorMetadata(ledger_.Seal(7, ids).status()).at("missing"), "1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,...");
  ids.pop_back();
  EXPECT_EQ(GetErrorMetadata(ledger_.Seal(7, ids).status()).at("missing"), "1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16");
  EXPECT_REASON(ledger_.Seal(7, int64_t{-1}), kInvalidField);
  EXPECT_REASON(ledger_.Seal(7, Ids{0, 0}), kInvalidField);
  EXPECT_REASON(ledger_.Seal(7, Ids{-5}), kInvalidField);
  EXPECT_EQ(ledger_.open().state, StepState::kOpen);
}

TEST(StepLedgerLimitTest, TheLastNumberIsNotPassed) {
  StepLedger ledger(std::numeric_limits<int64_t>::max(), kRoom);
  EXPECT_REASON(ledger.Close(std::numeric_limits<int64_t>::max(), StepState::kDiscarded), kLimitExceeded);
}

TEST(StepTransactionsTest, TheEndOfAStepForgetsItsApply) {
  StepTransactions steps({"default", "student"}, SmallSpec(), HeadLimits());
  steps.last_apply() = AppliedStep();
  EXPECT_OK(steps.Close(0, StepState::kDiscarded));
  EXPECT_FALSE(steps.last_apply().has_value());
  steps.last_apply() = AppliedStep();
  steps.Reset(7);
  EXPECT_FALSE(steps.last_apply().has_value());
}

}  // namespace
}  // namespace headwater::heads
