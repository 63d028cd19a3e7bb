// Head's submissions whose rows are still on their way, and those that are computed beside each other.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/barrier.h"
#include "head_test_util.h"
#include "headwater/kernels/digest.h"
#include "server/heads/head.h"

namespace headwater::heads {
namespace {

const Payload kTwoRows = {{1, 2, 3, 4, 5, 6}, {2, 4}};
const Payload kRowOfToken1 = {{-5, 0, 7}, {1}};

const std::vector<float> kNothing(15);
const std::vector<float> kGradientOfTwoRows = {0, 0, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 4, 5, 6};

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
  void ExpectNoTrace() {
    EXPECT_EQ(StateOf(*head_, 0), ContributionState::kNone);
    EXPECT_EQ(head_->Describe().state, HeadState::kReady);
    EXPECT_FALSE(head_->InUse());
    EXPECT_EQ(ReadGradWeight(*head_), kNothing);
    MicroBatchCall whole(head_, 0, 0, kTwoRows);
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

TEST_F(HeadFlowTest, WhatIsToBeHeldIsNotLeftInALostHead) {
  FlowingCall held(head_, 0, 0, kTwoRows);
  held.call.Held([this] {
    std::thread fails([this] {
      engine_.control().FailNext("Compute", kEngineError);
      EXPECT_REASON(MicroBatchCall(head_, 0, 1, kTwoRows).Run(engine_), kEngineFailed);
    });
    fails.join();
    return Token();
  });
  EXPECT_REASON(held.call.Run(engine_), kStepLost);
  EXPECT_EQ(tokens_gone_, 1);
}

}  // namespace
}  // namespace headwater::heads
