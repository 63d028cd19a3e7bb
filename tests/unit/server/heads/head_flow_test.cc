// Head's submissions whose rows are still on their way, and those that are computed beside each other.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/barrier.h"
#include "absl/time/clock.h"
#include "head_test_util.h"
#include "headwater/kernels/digest.h"
#include "server/heads/head.h"

namespace headwater::heads {
namespace {

const Payload kTwoRows = {{1, 2, 3, 4, 5, 6}, {2, 4}};
const Payload kRowOfToken1 = {{-5, 0, 7}, {1}};

const std::vector<float> kNothing(15);
const std::vector<float> kGradientOfTwoRows = {0, 0, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 4, 5, 6};
const std::vector<float> kGradientOfToken1 = {0, 0, 0, -5, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0};

std::vector<float> Sum(std::vector<float> a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

// A call whose rows flow.
struct FlowingCall {
  FlowingCall(const std::shared_ptr<Head>& head, int64_t step, int64_t micro_batch, const Payload& payload)
      : rows(payload), call(head, step, micro_batch, payload) {
    call.submission().incoming = &rows;
    call.submission().digest = {};
  }
  TestRows rows;
  MicroBatchCall call;
};

class HeadFlowTest : public ::testing::Test {
 protected:
  // Nothing is left of micro-batch 0, and the head goes on: the same call, whole, is committed.
  void ExpectNoTrace(int64_t attempt = 0) {
    EXPECT_EQ(StateOf(*head_, 0), ContributionState::kNone);
    EXPECT_EQ(head_->Describe().state, HeadState::kReady);
    EXPECT_FALSE(head_->InUse());
    EXPECT_EQ(ReadGradWeight(*head_), kNothing);
    MicroBatchCall whole(head_, 0, 0, kTwoRows);
    whole.submission().attempt = attempt;
    ASSERT_OK_AND_ASSIGN(const SubmissionOutcome outcome, whole.Run(engine_));
    EXPECT_FALSE(outcome.replayed);
    EXPECT_EQ(ReadGradWeight(*head_), kGradientOfTwoRows);
  }
  // Tells a token that goes with a contribution.
  std::shared_ptr<const void> Token() {
    return std::shared_ptr<const void>(this, [this](const void*) { ++tokens_gone_; });
  }

  std::atomic<int> tokens_gone_ = 0;
  FakeEngine engine_;
  std::shared_ptr<Head> head_ = MakeReadyHead(engine_, SmallSpec());
  std::shared_ptr<Head> other_ = MakeReadyHead(engine_, SmallSpec(), "other");
};

// ---- rows on their way -----------------------------------------------------------------------------------------------

TEST_F(HeadFlowTest, AMicroBatchIsCommittedWithTheDigestOfItsRows) {
  FlowingCall flowing(head_, 0, 0, kTwoRows);
  ASSERT_OK_AND_ASSIGN(const SubmissionOutcome outcome, flowing.call.Run(engine_));
  EXPECT_FALSE(outcome.needs_all_rows);
  EXPECT_EQ(outcome.state, ContributionState::kCommitted);
  EXPECT_EQ(outcome.form, ContributionForm::kDirect);
  EXPECT_EQ(outcome.digest, DigestOf(kTwoRows));
  EXPECT_EQ(flowing.rows.awaited, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(flowing.rows.ready, std::vector<int64_t>{2});
  EXPECT_EQ(flowing.rows.finishes, 1);
  EXPECT_FALSE(flowing.rows.engine_digest.has_value());
  EXPECT_EQ(ReadGradWeight(*head_), kGradientOfTwoRows);
  EXPECT_EQ(head_->GetSteps(head_->Describe().epoch)->first.micro_batches.at(0).digest, DigestOf(kTwoRows));
  // Known by that digest: whole calls tell a repeat from a conflict.
  EXPECT_TRUE(MicroBatchCall(head_, 0, 0, kTwoRows).Run(engine_)->replayed);
  EXPECT_REASON(MicroBatchCall(head_, 0, 0, kRowOfToken1).Run(engine_), kMicroBatchConflict);
  EXPECT_EQ(ReadGradWeight(*head_), kGradientOfTwoRows);
}

TEST_F(HeadFlowTest, TheEngineSumsTheRowsUpIfItIsAskedTo) {
  FlowingCall flowing(head_, 0, 0, kTwoRows);
  flowing.call.submission().engine_digests = true;
  ASSERT_OK(flowing.call.Run(engine_));
  DigestBuilder expected;
  expected.AddRows(0, 0, 2, 12, kTwoRows.hidden.data());
  EXPECT_EQ(flowing.rows.engine_digest, expected.Finish("header"));
}

TEST_F(HeadFlowTest, CancellationCountsUntilTheDecision) {
  std::atomic<bool> cancelled = false;
  const auto is_cancelled = [&] { return cancelled.load(); };
  {
    FlowingCall flowing(head_, 0, 0, kTwoRows);
    flowing.rows.on_await = [&](int64_t) {
      cancelled = true;
      return absl::OkStatus();
    };
    EXPECT_REASON(flowing.call.Run(engine_, is_cancelled), kCancelled);
    EXPECT_EQ(flowing.rows.awaited, std::vector<int64_t>{1});  // looked at before each wait
  }
  cancelled = false;
  {
    FlowingCall flowing(head_, 0, 0, kTwoRows);
    flowing.rows.on_finish = [&] {
      cancelled = true;
      return absl::OkStatus();
    };
    EXPECT_REASON(flowing.call.Run(engine_, is_cancelled), kCancelled);
    EXPECT_EQ(ReadGradWeight(*head_), kNothing);
  }
  cancelled = false;
  engine_.control().after_decide = [&] { cancelled = true; };
  FlowingCall flowing(head_, 0, 0, kTwoRows);
  ASSERT_OK(flowing.call.Run(engine_, is_cancelled));
  EXPECT_TRUE(cancelled);
  EXPECT_EQ(ReadGradWeight(*head_), kGradientOfTwoRows);
}

TEST_F(HeadFlowTest, RowsThatStallAreWaitedForElsewhere) {
  for (const bool is_explicit : {false, true}) {
    FlowingCall flowing(head_, 0, 0, kTwoRows);
    if (is_explicit) flowing.call.Explicit();
    flowing.rows.Stall();
    ASSERT_OK_AND_ASSIGN(const SubmissionOutcome outcome, flowing.call.Run(engine_));
    EXPECT_TRUE(outcome.needs_all_rows);
    EXPECT_TRUE(outcome.terms.empty());
    EXPECT_EQ(outcome.state, ContributionState::kNone);
    EXPECT_EQ(outcome.weight_versions, std::vector<int64_t>{head_->Describe().weight_version});
  }
  ExpectNoTrace();
}

TEST_F(HeadFlowTest, AHigherAttemptEndsOneThatFlows) {
  FlowingCall flowing(head_, 0, 0, kTwoRows);
  MicroBatchCall higher(head_, 0, 0, kTwoRows);
  higher.submission().attempt = 1;
  std::thread announcer;
  flowing.rows.on_await = [&](int64_t row_end) {
    // The announcement leaves its mark, and waits for this computation.
    if (row_end == 1) announcer = RunUntilItSleeps([&] { EXPECT_OK(Announce(higher.submission())); });
    return absl::OkStatus();
  };
  EXPECT_REASON(flowing.call.Run(engine_), kAttemptSuperseded);
  EXPECT_EQ(flowing.rows.awaited.size(), 1U);
  announcer.join();
  EXPECT_REASON(flowing.call.Run(engine_), kAttemptSuperseded);
  ExpectNoTrace(1);
}

TEST_F(HeadFlowTest, WhatIsKnownNeedsAllRowsFirst) {
  ASSERT_OK(MicroBatchCall(head_, 0, 0, kTwoRows).Run(engine_));
  ASSERT_OK(MicroBatchCall(head_, 0, 1, kTwoRows).Explicit().Run(engine_));
  const int computed = engine_.control().CountOf("Compute");
  for (const int64_t id : {0, 1}) {
    for (const int64_t attempt : {0, 3}) {
      FlowingCall flowing(head_, 0, id, kRowOfToken1);
      flowing.call.submission().attempt = attempt;
      ASSERT_OK_AND_ASSIGN(const SubmissionOutcome outcome, flowing.call.Run(engine_));
      EXPECT_TRUE(outcome.needs_all_rows);
      EXPECT_FALSE(outcome.replayed);
      EXPECT_EQ(outcome.state, ContributionState::kNone);
      EXPECT_EQ(outcome.form, ContributionForm::kNone);
      EXPECT_TRUE(flowing.rows.awaited.empty());
    }
  }
  EXPECT_EQ(engine_.control().CountOf("Compute"), computed);
  EXPECT_EQ(StateOf(*head_, 1), ContributionState::kStaged);  // not superseded either
  // Then the rows tell.
  EXPECT_REASON(MicroBatchCall(head_, 0, 0, kRowOfToken1).Run(engine_), kMicroBatchConflict);
  MicroBatchCall first_wins(head_, 0, 0, kRowOfToken1);
  ASSERT_OK_AND_ASSIGN(const SubmissionOutcome differs, first_wins.FirstWins().Run(engine_));
  EXPECT_TRUE(differs.payload_differs);
  EXPECT_EQ(differs.state, ContributionState::kCommitted);
  EXPECT_EQ(differs.digest, DigestOf(kRowOfToken1));
  EXPECT_TRUE(MicroBatchCall(head_, 0, 0, kTwoRows).Run(engine_)->replayed);
  EXPECT_EQ(ReadGradWeight(*head_), kGradientOfTwoRows);
}

TEST_F(HeadFlowTest, StagedAndHeldOnesFlow) {
  int holds = 0;
  for (const bool late : {false, true}) {
    const int64_t id = late ? 1 : 0;
    FlowingCall flowing(head_, 0, id, kTwoRows);
    flowing.call.Explicit().submission().late_token_factors = late;
    flowing.call.submission().hold = [&]() -> absl::StatusOr<std::shared_ptr<const void>> {
      ++holds;
      return std::shared_ptr<const void>(&holds, [&holds](const void*) { --holds; });
    };
    flowing.call.submission().until_decided = Token();
    const absl::StatusOr<SubmissionOutcome> outcome = flowing.call.Run(engine_);
    flowing.call.submission().until_decided.reset();
    ASSERT_OK(outcome);
    EXPECT_EQ(outcome->state, ContributionState::kStaged);
    EXPECT_EQ(outcome->form, late ? ContributionForm::kHeld : ContributionForm::kStaged);
    EXPECT_EQ(outcome->digest, DigestOf(kTwoRows));
    EXPECT_EQ(holds, late ? 1 : 0);
    EXPECT_EQ(tokens_gone_, late ? 1 : 0);  // it stays with what is undecided
    EXPECT_TRUE(*CommitTo(head_, KeyOf(*head_), id, 0, 1));
    EXPECT_EQ(holds, 0);
    EXPECT_EQ(tokens_gone_, late ? 2 : 1);
  }
  EXPECT_EQ(ReadGradWeight(*head_), Sum(kGradientOfTwoRows, kGradientOfTwoRows));
}

TEST_F(HeadFlowTest, ADiscardLetsGoOfWhatWasKeptForTheDecision) {
  FlowingCall flowing(head_, 0, 0, kTwoRows);
  flowing.call.Explicit().submission().until_decided = Token();
  ASSERT_OK(flowing.call.Run(engine_));
  flowing.call.submission().until_decided.reset();
  EXPECT_EQ(tokens_gone_, 0);
  EXPECT_TRUE(*DiscardFrom(head_, KeyOf(*head_), 0, 0));
  EXPECT_EQ(tokens_gone_, 1);
}

TEST_F(HeadFlowTest, ForwardOnlyAndFrozenOnesFlow) {
  FlowingCall forward(head_, 0, 0, kTwoRows);
  ASSERT_OK(forward.call.ForwardOnly().Run(engine_));
  EXPECT_EQ(forward.rows.awaited.size(), 2U);
  EXPECT_EQ(forward.rows.finishes, 0);
  HeadSpec spec = SmallSpec();
  spec.trainable = false;
  spec.optimizer = std::monostate();
  std::shared_ptr<Head> frozen = MakeReadyHead(engine_, spec, "frozen");
  FlowingCall backward(frozen, 0, 0, kTwoRows);
  ASSERT_OK_AND_ASSIGN(const SubmissionOutcome outcome, backward.call.Run(engine_));
  EXPECT_EQ(outcome.digest, DigestOf(kTwoRows));
  EXPECT_EQ(outcome.state, ContributionState::kNone);
  EXPECT_EQ(backward.rows.ready, std::vector<int64_t>{2});
  backward.rows.Stall();
  EXPECT_TRUE(backward.call.Run(engine_)->needs_all_rows);
}

TEST_F(HeadFlowTest, AnEngineThatFailsBeforeTheDecisionLosesNothing) {
  for (const absl::Status& failure : {kEngineError, kNotReady}) {
    engine_.control().FailNext("Upload", failure);
    FlowingCall flowing(head_, 0, 0, kTwoRows);
    EXPECT_EQ(ReasonOf(flowing.call.Run(engine_)), ErrorReasonName(GetErrorReason(failure)));
  }
  ExpectNoTrace();
  engine_.control().FailNext("Compute", kEngineError);  // after the decision, with the products under way
  FlowingCall flowing(head_, 0, 1, kTwoRows);
  EXPECT_REASON(flowing.call.Run(engine_), kEngineFailed);
  EXPECT_EQ(head_->Describe().state, HeadState::kLost);
}

// An engine that does not ask before it adds.
class HastyEngine : public FakeEngine {
 public:
  absl::StatusOr<MicroBatchResult> DoCompute(const MicroBatch& micro_batch) override {
    MicroBatch whole = micro_batch;
    whole.flow = nullptr;
    return FakeEngine::DoCompute(whole);
  }
};

TEST_F(HeadFlowTest, AnEngineThatDoesNotAskMayHaveAddedWhatItShouldNot) {
  HastyEngine engine;
  head_ = MakeReadyHead(engine, SmallSpec());
  FlowingCall staged(head_, 0, 1, kTwoRows);
  EXPECT_REASON(staged.call.Explicit().Run(engine), kInternal);
  EXPECT_EQ(head_->Describe().state, HeadState::kReady);
  EXPECT_EQ(StateOf(*head_, 1), ContributionState::kNone);
  FlowingCall direct(head_, 0, 0, kTwoRows);
  EXPECT_REASON(direct.call.Run(engine), kInternal);
  EXPECT_EQ(head_->Describe().state, HeadState::kLost);
}

// ---- side by side ----------------------------------------------------------------------------------------------------

TEST_F(HeadFlowTest, MicroBatchesOfOneHeadReachTheEngineTogether) {
  constexpr int kCalls = 4;
  auto* const barrier = new absl::Barrier(kCalls);  // deleted by the last one, as its interface wants it
  engine_.control().during_compute = [barrier] {
    if (barrier->Block()) delete barrier;  // returns only when all are there
  };
  RunThreads(kCalls, [this](int64_t id) {
    FlowingCall flowing(head_, 0, id, kTwoRows);
    if (id % 2 == 1) flowing.call.submission().incoming = nullptr, flowing.call.submission().digest = DigestOf(kTwoRows);
    ASSERT_OK_AND_ASSIGN(const SubmissionOutcome outcome, flowing.call.Run(engine_));
    EXPECT_EQ(outcome.state, ContributionState::kCommitted);
  });
  engine_.control().during_compute = nullptr;
  EXPECT_OK(head_->Seal(KeyOf(*head_), int64_t{kCalls}));
  std::vector<float> expected = kNothing;
  for (int i = 0; i < kCalls; ++i) expected = Sum(expected, kGradientOfTwoRows);
  EXPECT_EQ(ReadGradWeight(*head_), expected);
}

TEST_F(HeadFlowTest, OneOfTwoEqualCallsIsTold) {
  // Whatever order the terms have: each micro-batch begins in all of its heads at once.
  for (int64_t id = 0; id < 50; ++id) {
    MicroBatchCall one(head_, 0, id, kTwoRows), two(other_, 0, id, kTwoRows);
    AddSecondTerm(one, other_);
    SubmittedTerm term = two.term();
    term.head = head_;
    term.head_epoch = head_->Describe().epoch;
    two.submission().terms.push_back(term);
    absl::StatusOr<SubmissionOutcome> first, second;
    std::thread thread([&] { first = one.Run(engine_); });
    second = two.Run(engine_);
    thread.join();
    EXPECT_TRUE(first.ok() || second.ok()) << first.status() << second.status();
    if (first.ok() && second.ok()) {
      EXPECT_NE(first->replayed, second->replayed);
    } else {
      EXPECT_REASON(first.ok() ? second : first, kMicroBatchInProgress);
    }
    EXPECT_EQ(StateOf(*head_, id), ContributionState::kCommitted);
    EXPECT_EQ(StateOf(*other_, id), ContributionState::kCommitted);
  }
  EXPECT_EQ(ReadGradWeight(*head_), ReadGradWeight(*other_));
  EXPECT_EQ(ReadGradWeight(*head_)[6], 50);
}

TEST_F(HeadFlowTest, WhatChangesTheHeadWaitsForAllThatCompute) {
  ASSERT_OK(MicroBatchCall(head_, 0, 7, kRowOfToken1).Explicit().Run(engine_));
  const StepKey key = KeyOf(*head_);
  ThreadGate gate;
  engine_.control().during_compute = [&] { gate.Stop(); };
  std::thread computes([&] { EXPECT_OK(MicroBatchCall(head_, 0, 0, kTwoRows).Run(engine_)); });
  gate.AwaitStopped();
  // Another one passes; a commit and, after it, a seal wait. The fake engine fails the test if one of them overlaps.
  EXPECT_OK(MicroBatchCall(head_, 0, 1, kTwoRows).Run(engine_));
  std::atomic<bool> committed = false;
  std::thread commits([&] {
    EXPECT_OK(CommitTo(head_, key, 7, 0, 1));
    committed = true;
  });
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_FALSE(committed);
  gate.Open();
  computes.join();
  commits.join();
  EXPECT_EQ(ReadGradWeight(*head_), Sum(kGradientOfToken1, Sum(kGradientOfTwoRows, kGradientOfTwoRows)));
  ApplyArguments update;
  update.learning_rate = 1;
  EXPECT_OK(head_->Apply(key, ExpectedMicroBatches(std::vector<int64_t>{0, 1, 7}), update));
  EXPECT_EQ(KeyOf(*head_).step, 1);
}

TEST_F(HeadFlowTest, ManyCallsOfAllSortsAddUp) {
  // Commits, discards, replays and statistics among calls that share the head; what was acknowledged is in the gradient.
  std::atomic<int> added = 0;
  RunThreads(4, [&](int64_t thread) {
    for (int64_t i = 0; i < 40; ++i) {
      const int64_t id = thread * 100 + i;
      FlowingCall flowing(head_, 0, id, kTwoRows);
      if (i % 4 == 1) flowing.rows.Stall();
      if (i % 4 == 2) {
        absl::StatusOr<SubmissionOutcome> outcome = flowing.call.Explicit().Run(engine_);
        if (HasReason(outcome.status(), ErrorReason::kStagingFull)) continue;
        ASSERT_OK(outcome);
        if (i % 8 == 2) {
          EXPECT_TRUE(*CommitTo(head_, KeyOf(*head_), id, 0, 1));
          ++added;
        } else {
          EXPECT_TRUE(*DiscardFrom(head_, KeyOf(*head_), id, 0));
        }
        continue;
      }
      ASSERT_OK_AND_ASSIGN(const SubmissionOutcome outcome, flowing.call.Run(engine_));
      EXPECT_EQ(outcome.needs_all_rows, i % 4 == 1);
      if (i % 2 == 1) {
        ASSERT_OK_AND_ASSIGN(const SubmissionOutcome again, MicroBatchCall(head_, 0, id, kTwoRows).Run(engine_));
        EXPECT_EQ(again.replayed, i % 4 == 3);
      } else {
        EXPECT_OK(head_->GradientNorm(KeyOf(*head_)));
      }
      ++added;
    }
  });
  EXPECT_EQ(ReadGradWeight(*head_)[6], static_cast<float>(added));
  EXPECT_EQ(head_->GetSteps(head_->Describe().epoch)->first.Totals().micro_batch_count, added);
}

TEST_F(HeadFlowTest, WhenTheEngineFailsOneItsNeighboursAreTold) {
  // The neighbour's rows are awaited, or its products are done: the head is lost before it can be acknowledged.
  for (const bool is_decided : {false, true}) {
    std::shared_ptr<Head> lost = MakeReadyHead(engine_, SmallSpec(), is_decided ? "decided" : "awaited");
    FlowingCall neighbour(lost, 0, 0, kTwoRows);
    if (is_decided) AddSecondTerm(neighbour.call, other_);
    ThreadGate gate;
    if (is_decided) {
      engine_.control().after_decide = [&] { gate.Stop(); };
    } else {
      neighbour.rows.on_await = [&](int64_t row_end) {
        if (row_end == 1) gate.Stop();
        return absl::OkStatus();
      };
    }
    absl::StatusOr<SubmissionOutcome> outcome;
    std::thread computes([&] { outcome = neighbour.call.Run(engine_); });
    gate.AwaitStopped();
    engine_.control().FailNext("Compute", kEngineError);
    EXPECT_REASON(MicroBatchCall(lost, 0, 1, kTwoRows).Run(engine_), kEngineFailed);
    EXPECT_EQ(lost->Describe().state, HeadState::kLost);
    gate.Open();
    computes.join();
    engine_.control().after_decide = nullptr;
    EXPECT_REASON(outcome, kStepLost);
    EXPECT_EQ(lost->Describe().state, HeadState::kLost);
    // The head begins again with nothing known, and takes what it did not get.
    ASSERT_OK(SetWeights(*lost, std::vector<float>(15)));
    EXPECT_EQ(ReadGradWeight(*lost), kNothing);
    EXPECT_OK(MicroBatchCall(lost, 0, 0, kTwoRows).Run(engine_));
    if (!is_decided) continue;
    // The other head of the neighbour has what its accumulator has.
    EXPECT_EQ(StateOf(*other_, 0), ContributionState::kCommitted);
    EXPECT_EQ(ReadGradWeight(*other_), kGradientOfTwoRows);
  }
}

TEST_F(HeadFlowTest, WhatIsToBeHeldIsNotLeftInALostHead) {
  FlowingCall held(head_, 0, 0, kTwoRows);
  held.call.Explicit().submission().late_token_factors = true;
  held.call.submission().hold = [this]() -> absl::StatusOr<std::shared_ptr<const void>> {
    std::thread fails([this] {
      engine_.control().FailNext("Compute", kEngineError);
      EXPECT_REASON(MicroBatchCall(head_, 0, 1, kTwoRows).Run(engine_), kEngineFailed);
    });
    fails.join();
    return Token();
  };
  EXPECT_REASON(held.call.Run(engine_), kStepLost);
  EXPECT_EQ(tokens_gone_, 1);
}

}  // namespace
}  // namespace headwater::heads
