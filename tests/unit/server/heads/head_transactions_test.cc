// Head's transactions beyond one head and one attempt: attempts, several heads, what is held, sessions, takers, trainers' own
// weights.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "head_test_util.h"
#include "server/heads/head.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::heads {
namespace {

constexpr SessionId kSession = {1};
constexpr SessionId kOtherSession = {2};

class HeadTransactionsTest : public ::testing::Test {
 protected:
  // Lets a call be held as rows: keeps a counter of what is kept.
  MicroBatchCall::Hold Hold() {
    return [this]() -> absl::StatusOr<std::shared_ptr<const void>> {
      ++holds_;
      return std::shared_ptr<const void>(this, [this](const void*) { --holds_; });
    };
  }
  std::vector<DecisionTarget> BothHeads() { return {{head_, KeyOf(*head_)}, {other_, KeyOf(*other_)}}; }

  int holds_ = 0;
  FakeEngine engine_;
  std::shared_ptr<Head> head_ = MakeReadyHead(engine_, SmallSpec());
  std::shared_ptr<Head> other_ = MakeReadyHead(engine_, SmallSpec(), "other");
};

// ---- several heads ---------------------------------------------------------------------------------------------------

TEST_F(HeadTransactionsTest, ARepeatIsAnsweredWhateverAttemptWaits) {
  MicroBatchCall call(head_, 0, 0, kRowOfToken2);
  ASSERT_OK(call.Run(engine_));
  MicroBatchCall higher(head_, 0, 0, kRowOfToken2);
  higher.Attempt(3);
  std::thread announcer;
  const absl::StatusOr<SubmissionOutcome> repeat = call.Run(engine_, [&] {
    // Asked when the repeat has its locks, so the other attempt waits for them.
    if (!announcer.joinable()) announcer = RunUntilItSleeps([&] { EXPECT_OK(Announce(higher.submission())); });
    return false;
  });
  ASSERT_TRUE(announcer.joinable());
  announcer.join();
  ASSERT_OK(repeat);
  EXPECT_TRUE(repeat->replayed);
}

TEST_F(HeadTransactionsTest, ARepeatThatFailsLeavesAHigherAttemptAlone) {
  ASSERT_OK(MicroBatchCall(head_, 0, 0, kRowOfToken2).Explicit().Run(engine_));
  ThreadGate gate;
  std::thread repeats;
  const std::thread::id self = std::this_thread::get_id();
  engine_.control().during_compute = [&] {
    if (std::this_thread::get_id() != self) return gate.Stop();
    gate.Open();
    repeats.join();
  };
  engine_.control().FailNext("Compute", kNotReady);
  repeats = std::thread([&] { EXPECT_REASON(MicroBatchCall(head_, 0, 0, kRowOfToken2).Run(engine_), kShardNotReady); });
  gate.AwaitStopped();
  ASSERT_OK(MicroBatchCall(head_, 0, 0, kRowOfToken4).Attempt(1).Run(engine_));
  EXPECT_EQ(StateOf(*head_, 0), ContributionState::kCommitted);
}

TEST_F(HeadTransactionsTest, AFrozenHeadsTermIsNotAnnounced) {
  HeadSpec frozen = FrozenSpec();
  frozen.initial_step = 4;
  MicroBatchCall call(head_, 0, 0, kRowOfToken2);
  call.Attempt(1);
  SubmittedTerm beside = call.term();
  beside.head = MakeReadyHead(engine_, frozen, "frozen");
  beside.head_epoch.reset();
  beside.step.reset();
  call.submission().terms.push_back(beside);
  ASSERT_OK(Announce(call.submission()));
  ASSERT_OK(call.Run(engine_));
}

TEST_F(HeadTransactionsTest, ATeacherStaysAsItIsWhileItIsRead) {
  MicroBatchCall call(head_, 0, 0, kRowOfToken2);
  call.Teacher(other_);
  std::thread setter;
  engine_.control().during_compute = [&] {
    setter = RunUntilItSleeps([&] { EXPECT_OK(SetWeights(*other_, std::vector<float>(15, 2.0f))); });
  };
  const absl::StatusOr<SubmissionOutcome> outcome = call.Run(engine_);
  ASSERT_TRUE(setter.joinable());
  setter.join();
  ASSERT_OK(outcome);
  EXPECT_EQ(outcome->teacher_weight_versions, std::vector<int64_t>{1});
  EXPECT_EQ(other_->Describe().weight_version, 2);
}

TEST_F(HeadTransactionsTest, ATeacherStaysAsItIsWhileWhatIsHeldIsAdded) {
  const HeadLimits in_order = {.deterministic = true};
  for (const bool deterministic : {false, true}) {
    head_ = MakeReadyHead(engine_, SmallSpec(), "student", deterministic ? in_order : HeadLimits());
    MicroBatchCall call(head_, 0, 0, kRowOfToken2);
    call.Held(Hold());
    call.term().term.loss = JsdSpec();
    call.term().teacher_head = other_;
    ASSERT_OK(call.Run(engine_));
    std::thread setter;
    engine_.control().during_compute = [&] {
      setter = RunUntilItSleeps([&] { EXPECT_OK(SetWeights(*other_, std::vector<float>(15, 2.0f))); });
    };
    EXPECT_TRUE(*CommitTo(head_, KeyOf(*head_), 0, 0, 1)) << deterministic;
    engine_.control().during_compute = nullptr;
    ASSERT_TRUE(setter.joinable());
    setter.join();
    EXPECT_EQ(ReadGradWeight(*head_), Gradient(2, {1, 2, 3})) << deterministic;
  }
}

TEST_F(HeadTransactionsTest, ADecisionNamesExactlyTheHeads) {
  MicroBatchCall call(head_, 0, 0, kRowOfToken2);
  AddSecondTerm(call, other_);
  ASSERT_OK(call.Explicit().Run(engine_));
  EXPECT_ERROR(CommitTo(head_, KeyOf(*head_), 0, 0, 1), kInvalidCombination, {"field", "heads"}, {"expected", "2"},
               {"actual", "1"});
  EXPECT_REASON(DiscardFrom(head_, KeyOf(*head_), 0, 0), kInvalidCombination);
  EXPECT_REASON(Commit({BothHeads()[0], BothHeads()[0]}, 0, 0, {}, std::nullopt), kInvalidCombination);
  EXPECT_REASON(Commit({}, 0, 0, {}, std::nullopt), kMissingField);
  EXPECT_REASON(Discard({}, 0, 0, std::nullopt), kMissingField);
  EXPECT_TRUE(*Commit(BothHeads(), 0, 0, {2.0, {}}, std::nullopt));
  EXPECT_FALSE(*Commit(BothHeads(), 0, 0, {2.0, {}}, std::nullopt));
  EXPECT_REASON(Commit(BothHeads(), 0, 0, {3.0, {}}, std::nullopt), kMicroBatchConflict);
  EXPECT_EQ(ReadGradWeight(*head_), Gradient(2, {2, 4, 6}));
  EXPECT_EQ(ReadGradWeight(*other_), Gradient(2, {2, 4, 6}));
}

TEST_F(HeadTransactionsTest, ARefusalSaysWhatDiscardedTheMicroBatch) {
  const std::pair<const char*, std::function<void()>> ways[] = {
      {"call", [&] { EXPECT_TRUE(*Discard(BothHeads(), 0, 0, kSession)); }},
      {"session", [&] { EXPECT_EQ(head_->DropSession(kSession) + other_->DropSession(kSession), 1); }},
      {"head", [&] { EXPECT_OK(other_->DiscardGradient(KeyOf(*other_))); }},
  };
  for (const auto& [by, discard] : ways) {
    head_ = MakeReadyHead(engine_, SmallSpec());
    other_ = MakeReadyHead(engine_, SmallSpec(), "other");
    MicroBatchCall call(head_, 0, 0, kRowOfToken2);
    AddSecondTerm(call, other_);
    ASSERT_OK(call.Explicit().Session(kSession).Run(engine_));
    discard();
    EXPECT_ERROR(Commit(BothHeads(), 0, 0, {}, kSession), kMicroBatchDiscarded, {"discardedAttempt", "0"}, {"discardedBy", by});
  }
}

// ---- held ------------------------------------------------------------------------------------------------------------

TEST_F(HeadTransactionsTest, AFullHeadReportsWhoseSlotsAreTaken) {
  const auto stage = [this](int64_t id, const std::optional<SessionId>& session) {
    return MicroBatchCall(head_, 0, id, kRowOfToken2).Explicit().Session(session).Run(engine_).status();
  };
  const auto refusal = [&](const std::optional<SessionId>& session) {
    ErrorMetadata metadata = GetErrorMetadata(stage(2, session));
    return metadata["ownSlots"] + " of " + metadata["stagingSlots"] + ", " + metadata["retryAfterMs"];
  };
  EXPECT_OK(stage(0, kSession));
  EXPECT_OK(stage(1, kOtherSession));
  EXPECT_EQ(refusal(kSession), "1 of 2, 100");
  EXPECT_EQ(refusal(std::nullopt), "0 of 2, 100");
  EXPECT_TRUE(*Discard({{head_, KeyOf(*head_)}}, 1, 0, kOtherSession));
  EXPECT_OK(stage(3, kSession));
  EXPECT_OK(MicroBatchCall(head_, 0, 4, kRowOfToken2).Held(Hold()).Run(engine_));
  // Only the session itself can free one, and it waits for this answer.
  EXPECT_EQ(refusal(kSession), "2 of 2, ");
  EXPECT_EQ(refusal(std::nullopt), "0 of 2, 100");
  EXPECT_EQ(head_->DropSession(kSession), 2);
  for (const int64_t id : {5, 6}) EXPECT_OK(stage(id, std::nullopt));
  EXPECT_EQ(refusal(std::nullopt), "0 of 2, 100");
}

TEST_F(HeadTransactionsTest, ASlotMayBeTakenBetweenTheLookAndTheComputation) {
  const absl::Status taken = MakeError(ErrorReason::kStagingFull, "all slots are taken");
  MicroBatchCall call(head_, 0, 0, kRowOfToken2);
  engine_.control().FailNext("Compute", taken);
  EXPECT_ERROR(call.Explicit().Run(engine_), kStagingFull, {"ownSlots", "0"}, {"retryAfterMs", "100"});
  call.submission().hold = Hold();
  engine_.control().FailNext("Compute", taken);
  ASSERT_OK_AND_ASSIGN(const SubmissionOutcome outcome, call.Run(engine_));
  EXPECT_EQ(outcome.form, ContributionForm::kHeld);
}

TEST_F(HeadTransactionsTest, LateTokenFactorsNeedWhatIsHeld) {
  MicroBatchCall staged(head_, 0, 0, kRowOfToken2);
  ASSERT_OK(staged.Explicit().Run(engine_));
  const std::vector<DecisionTarget> target = {{head_, KeyOf(*head_)}};
  EXPECT_ERROR(Commit(target, 0, 0, {1, {2.0F}}, std::nullopt), kInvalidCombination, {"field", "token_factors"});
  MicroBatchCall held(head_, 0, 1, kRowOfToken4);
  ASSERT_OK_AND_ASSIGN(const SubmissionOutcome outcome, held.Held(Hold()).Run(engine_));
  EXPECT_EQ(outcome.form, ContributionForm::kHeld);  // although a slot is free
  EXPECT_REASON(Commit(target, 1, 0, {1, {2.0F, 3.0F}}, std::nullopt), kShapeMismatch);
  EXPECT_REASON(Commit(target, 1, 0, {1, {std::numeric_limits<float>::infinity()}}, std::nullopt), kInvalidField);
  EXPECT_EQ(holds_, 1);
  EXPECT_TRUE(*Commit(target, 1, 0, {2, {1.0F}}, std::nullopt));
  EXPECT_FALSE(*Commit(target, 1, 0, {2, {1.0F}}, std::nullopt));
  EXPECT_REASON(Commit(target, 1, 0, {2, {4.0F}}, std::nullopt), kMicroBatchConflict);
  EXPECT_EQ(ReadGradWeight(*head_), Gradient(4, {-10, 0, 14}));
  EXPECT_EQ(holds_, 0);
  const float factor = 1;
  int64_t id = 1;
  for (const auto member : {&LossTerm::entropy_factors, &LossTerm::lse_factors}) {
    MicroBatchCall call(head_, 0, ++id, kRowOfToken4);
    call.term().term.*member = absl::MakeConstSpan(&factor, 1);
    ASSERT_OK(call.Held(Hold()).Run(engine_));
    EXPECT_REASON(Commit(target, id, 0, {1, {2.0F}}, std::nullopt), kInvalidCombination);
  }
}

TEST_F(HeadTransactionsTest, RowsThatTheSessionItselfHoldsAreNotWaitedFor) {
  const auto hold = [&](int64_t id, const std::optional<SessionId>& session, bool has_room) {
    const auto refuse = [] { return MakeError(ErrorReason::kStagingFull, "no room", {{"retryAfterMs", "500"}}); };
    return MicroBatchCall(head_, 0, id, kRowOfToken2).Held(has_room ? Hold() : refuse).Session(session).Run(engine_).status();
  };
  EXPECT_OK(hold(0, kOtherSession, true));
  EXPECT_TRUE(GetErrorMetadata(hold(1, kSession, false)).contains("retryAfterMs"));
  EXPECT_OK(hold(2, kSession, true));
  const absl::Status refused = hold(3, kSession, false);
  EXPECT_REASON(refused, kStagingFull);
  EXPECT_FALSE(GetErrorMetadata(refused).contains("retryAfterMs"));
}

TEST_F(HeadTransactionsTest, ASealWaitsForUnexpectedOnesThatAreComputed) {
  engine_.control().FailNext("Compute", kNotReady);
  ThreadGate gate;
  engine_.control().during_compute = [&] { gate.Stop(); };
  std::thread computes([&] { EXPECT_REASON(MicroBatchCall(head_, 0, 5, kRowOfToken2).Run(engine_), kShardNotReady); });
  gate.AwaitStopped();
  std::thread seals = RunUntilItSleeps([&] { EXPECT_OK(head_->Seal(KeyOf(*head_), int64_t{0}, AsLongAsItTakes())); });
  gate.Open();
  computes.join();
  seals.join();
}

// ---- sessions --------------------------------------------------------------------------------------------------------

TEST_F(HeadTransactionsTest, OnlyItsSessionDecidesAContribution) {
  ASSERT_OK(MicroBatchCall(head_, 0, 0, kRowOfToken2).Explicit().Session(kSession).Run(engine_));
  const std::vector<DecisionTarget> target = {{head_, KeyOf(*head_)}};
  observability::BusyClock busy;
  EXPECT_REASON(Commit(target, 0, 0, {}, std::nullopt, &busy), kNotSessionOwner);
  EXPECT_EQ(busy.total(), absl::ZeroDuration());
  EXPECT_REASON(Commit(target, 0, 0, {}, kOtherSession), kNotSessionOwner);
  EXPECT_REASON(Discard(target, 0, 0, kOtherSession), kNotSessionOwner);
  EXPECT_TRUE(*Discard(target, 0, 1, kOtherSession));  // a higher attempt is anybody's
  ASSERT_OK(MicroBatchCall(head_, 0, 1, kRowOfToken2).Explicit().Session(kSession).Run(engine_));
  EXPECT_TRUE(*Commit(target, 1, 0, {}, kSession, &busy));
  EXPECT_GT(busy.total(), absl::ZeroDuration());
}

// ---- taking, waiting -------------------------------------------------------------------------------------------------

TEST_F(HeadTransactionsTest, ASealMayWaitForWhatIsMissingOrUndecided) {
  ASSERT_OK(MicroBatchCall(head_, 0, 0, kRowOfToken2).Explicit().Run(engine_));
  EXPECT_REASON(head_->Seal(KeyOf(*head_), int64_t{2}), kMicroBatchMissing);
  EXPECT_REASON(head_->Seal(KeyOf(*head_), int64_t{2}, CancelledWait()), kCancelled);
  std::thread late([&] {
    absl::SleepFor(absl::Milliseconds(20));
    EXPECT_OK(MicroBatchCall(head_, 0, 1, kRowOfToken4).Run(engine_));
    absl::SleepFor(absl::Milliseconds(20));
    EXPECT_OK(CommitTo(head_, KeyOf(*head_), 0, 0, 1));
  });
  const WaitLimits long_wait = {observability::MonotonicNow() + absl::Seconds(30), nullptr};
  const absl::StatusOr<SealReply> reply = head_->Seal(KeyOf(*head_), int64_t{2}, long_wait);
  late.join();
  ASSERT_OK(reply);
  EXPECT_EQ(reply->totals.micro_batch_count, 2);
}

TEST_F(HeadTransactionsTest, WaitsForAStepEndWithIt) {
  const auto discard = [this] { return ReasonOf(head_->DiscardGradient(KeyOf(*head_))); };
  const auto take = [this] { return ReasonOf(head_->Take(std::nullopt)); };
  const auto lose = [&] {
    engine_.control().FailNext("ZeroGradient", kEngineError);
    return discard();
  };
  using Change = std::function<std::string()>;
  for (const auto& [change, reason] :
       std::vector<std::pair<Change, std::string>>{{discard, "STEP_MISMATCH"}, {take, "EPOCH_FENCED"}, {lose, "STEP_LOST"}}) {
    const StepKey key = KeyOf(*head_);
    std::string sealed;
    std::thread seals = RunUntilItSleeps([&] { sealed = ReasonOf(head_->Seal(key, int64_t{1}, AsLongAsItTakes())); });
    std::thread follows = RunUntilItSleeps([&] { EXPECT_OK(head_->AwaitStep({key.epoch, key.step + 1}, AsLongAsItTakes())); });
    EXPECT_EQ(change(), reason == "STEP_LOST" ? "ENGINE_FAILED" : "OK");
    seals.join();
    follows.join();
    EXPECT_EQ(sealed, reason);
  }
}

TEST_F(HeadTransactionsTest, AGradientThatCannotBeAddedIsRefusedWhileAnotherCallComputes) {
  const std::vector<float> row(3);
  absl::Notification answered;
  std::thread adder;
  engine_.control().during_compute = [&] {
    adder = std::thread([&] {
      const StepKey key = KeyOf(*head_);
      EXPECT_REASON(head_->AddGradient(key, 0, 0, Digest{}, {0, 1, row.data(), 1}, nullptr), kMicroBatchInProgress);
      EXPECT_REASON(head_->AddGradient(key, 1, 0, Digest{}, {5, 1, row.data(), 1}, nullptr), kChunkOutOfRange);
      answered.Notify();
    });
    EXPECT_TRUE(answered.WaitForNotificationWithTimeout(absl::Seconds(30)));
  };
  ASSERT_OK(MicroBatchCall(head_, 0, 0, kRowOfToken2).Run(engine_));
  adder.join();
}

}  // namespace
}  // namespace headwater::heads
