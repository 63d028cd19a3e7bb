// Head's transactions: micro-batches and steps.
#include "server/heads/head.h"

#include <gtest/gtest.h>

#include <limits>
#include <thread>

#include "head_test_util.h"

namespace headwater::heads {
namespace {

class HeadTest : public ::testing::Test {
 protected:
  absl::StatusOr<SubmissionOutcome> Submit(int64_t micro_batch, const Payload& payload, int64_t step = 0) {
    return MicroBatchCall(head_, step, micro_batch, payload).Run(engine_);
  }
  absl::StatusOr<SubmissionOutcome> Stage(int64_t micro_batch, const Payload& payload) {
    return MicroBatchCall(head_, KeyOf(*head_).step, micro_batch, payload).Explicit().Run(engine_);
  }

  FakeEngine engine_;
  std::shared_ptr<Head> head_ = MakeReadyHead(engine_, SmallSpec());
};

// ---- micro-batches ---------------------------------------------------------------------------------------------------

TEST_F(HeadTest, EagerIsDirectAndCommitted) {
  MicroBatchCall call(head_, 0, 0, kRowOfToken2);
  ASSERT_OK_AND_ASSIGN(const SubmissionOutcome outcome, call.Run(engine_));
  EXPECT_EQ(outcome.state, ContributionState::kCommitted);
  EXPECT_EQ(outcome.form, ContributionForm::kDirect);
  EXPECT_FALSE(outcome.replayed);
  EXPECT_EQ(outcome.step, 0);
  EXPECT_EQ(outcome.weight_versions, std::vector<int64_t>{1});
  EXPECT_EQ(outcome.terms[0].valid_token_count, 1);
  EXPECT_EQ(call.grad_hidden(), kRowOfToken2.hidden);
  EXPECT_EQ(ReadGradWeight(*head_), Gradient(2, {1, 2, 3}));
}

TEST_F(HeadTest, GradHiddenIsScaled) {
  MicroBatchCall call(head_, 0, 0, kRowOfToken2);
  call.submission().grad_hidden_scale = 0.5;
  ASSERT_OK(call.Run(engine_));
  EXPECT_EQ(call.grad_hidden(), (std::vector<float>{0.5, 1, 1.5}));
}

TEST_F(HeadTest, AHigherAttemptTakesTheStagedOnesPlace) {
  head_ = MakeReadyHead(engine_, SpecWith(&HeadSpec::staging_slots, 1));
  ASSERT_OK(Stage(0, kRowOfToken2));
  ASSERT_OK(MicroBatchCall(head_, 0, 0, kRowOfToken4).Attempt(1).Explicit().Run(engine_));  // in the only slot
  EXPECT_REASON(CommitTo(head_, KeyOf(*head_), 0, 0, 1), kAttemptSuperseded);
  EXPECT_TRUE(*CommitTo(head_, KeyOf(*head_), 0, 1, 1));
  EXPECT_EQ(ReadGradWeight(*head_), Gradient(4, {-5, 0, 7}));
}

TEST_F(HeadTest, StaleEpochsAndOtherStepsAreRefused) {
  MicroBatchCall stale(head_, 0, 0, kRowOfToken2);
  const Epoch old_epoch = head_->Describe().epoch;
  ASSERT_OK(SetWeights(*head_, std::vector<float>(15, 2.0f)));
  EXPECT_ERROR(stale.Run(engine_), kEpochFenced, {"actual", EpochToHex(old_epoch)},
               {"expected", EpochToHex(head_->Describe().epoch)}, {"openStep", "0"});
  EXPECT_REASON(Submit(0, kRowOfToken2, 1), kStepMismatch);
  EXPECT_REASON(head_->CheckEpoch(old_epoch), kEpochFenced);
  EXPECT_OK(head_->CheckEpoch(head_->Describe().epoch));
  EXPECT_EQ(engine_.control().CountOf("Compute"), 0);
}

TEST_F(HeadTest, WeightVersionsAreCheckedAndReported) {
  MicroBatchCall call(head_, 0, 0, kRowOfToken2);
  call.term().expected_weight_version = 2;
  EXPECT_ERROR(call.Run(engine_), kWeightVersionMismatch, {"expected", "2"}, {"actual", "1"},
               {"field", "head.expected_weight_version"});
  call.term().expected_weight_version = 1;
  EXPECT_OK(call.Run(engine_));
}

TEST_F(HeadTest, FrozenHeadsHaveNoSteps) {
  head_ = MakeReadyHead(engine_, FrozenSpec(), "frozen");
  MicroBatchCall call(head_, 0, 0, kRowOfToken2);
  ASSERT_OK_AND_ASSIGN(const SubmissionOutcome outcome, call.Run(engine_));
  EXPECT_EQ(outcome.state, ContributionState::kNone);
  EXPECT_EQ(call.grad_hidden(), kRowOfToken2.hidden);
  EXPECT_FALSE(head_->Describe().open_step.has_value());
  call.term().step = 0;
  EXPECT_REASON(call.Run(engine_), kHeadNotTrainable);
  const StepKey key = KeyOf(*head_);
  EXPECT_REASON(head_->GetSteps(key.epoch), kHeadNotTrainable);
  EXPECT_REASON(head_->Seal(key, int64_t{0}), kHeadNotTrainable);
  EXPECT_REASON(head_->Apply(key, int64_t{0}, ApplyArguments()), kHeadNotTrainable);
  EXPECT_REASON(head_->DiscardGradient(key), kHeadNotTrainable);
  EXPECT_REASON(CommitTo(head_, key, 0, 0, 1), kHeadNotTrainable);
  EXPECT_REASON(DiscardFrom(head_, key, 0, 0), kHeadNotTrainable);
  EXPECT_REASON(head_->GradientNorm(key), kHeadNotTrainable);
}

// ---- while another call computes -------------------------------------------------------------------------------------

TEST_F(HeadTest, ASubmissionThatWaitedSeesTheNewEpoch) {
  ThreadGate gate;
  engine_.control().during_compute = [&] { gate.Stop(); };
  std::thread first([&] { EXPECT_OK(Submit(0, kRowOfToken2)); });
  gate.AwaitStopped();
  MicroBatchCall call(head_, 0, 1, kRowOfToken4);  // with the epoch of now
  std::thread setter = RunUntilItSleeps([&] { EXPECT_OK(SetWeights(*head_, std::vector<float>(15, 2.0f))); });
  std::thread second = RunUntilItSleeps([&] { EXPECT_REASON(call.Run(engine_), kEpochFenced); });
  gate.Open();
  first.join();
  second.join();
  setter.join();
  EXPECT_EQ(ReadGradWeight(*head_), std::vector<float>(15));
  EXPECT_TRUE(head_->GetSteps(KeyOf(*head_).epoch)->first.micro_batches.empty());
}

TEST_F(HeadTest, ManyThreadsAddEveryContributionOnce) {
  head_ = MakeReadyHead(engine_, SpecWith(&HeadSpec::staging_slots, 64));
  const std::shared_ptr<Head> teacher = MakeReadyHead(engine_, SpecWith(&HeadSpec::staging_slots, 64), "teacher");
  constexpr int kThreads = 4;
  constexpr int kPerThread = 50;
  RunThreads(kThreads, [&](int64_t thread) {
    for (int i = 0; i < kPerThread; ++i) {
      // Every id is sent by two threads: one computes it, the other replays it or finds it in progress.
      const int64_t id = (thread / 2) * kPerThread + i;
      MicroBatchCall call(head_, 0, id, {{1, 0, static_cast<float>(id)}, {static_cast<int32_t>(id % 5)}});
      call.Teacher(thread % 2 == 0 ? teacher : head_);
      if (id % 2 == 1) call.Explicit();
      absl::StatusOr<SubmissionOutcome> outcome = call.Run(engine_);
      while (HasReason(outcome.status(), ErrorReason::kMicroBatchInProgress)) outcome = call.Run(engine_);
      EXPECT_OK(outcome);
      if (id % 2 == 1) EXPECT_OK(CommitTo(head_, KeyOf(*head_), id, 0, 2));
      EXPECT_OK(head_->GetSteps(KeyOf(*head_).epoch));
    }
  });
  std::vector<float> expected(15);
  for (int64_t id = 0; id < kThreads / 2 * kPerThread; ++id) {
    const float factor = id % 2 == 1 ? 2 : 1;
    expected[static_cast<size_t>(id % 5 * 3)] += factor;
    expected[static_cast<size_t>(id % 5 * 3 + 2)] += factor * static_cast<float>(id);
  }
  EXPECT_EQ(ReadGradWeight(*head_), expected);
  EXPECT_OK(head_->Seal(KeyOf(*head_), int64_t{kThreads / 2 * kPerThread}));
}

// ---- engine failures -------------------------------------------------------------------------------------------------

TEST_F(HeadTest, AFailureWhileAddingLosesTheHead) {
  ASSERT_OK(Stage(0, kRowOfToken2));
  engine_.control().FailNext("Compute", kEngineError);
  EXPECT_REASON(Submit(1, kRowOfToken4), kEngineFailed);
  EXPECT_EQ(head_->Describe().state, HeadState::kLost);
  const StepKey key = KeyOf(*head_);
  const absl::Status lost = Submit(1, kRowOfToken4).status();
  EXPECT_REASON(lost, kStepLost);
  EXPECT_NE(lost.message().find(kEngineError.message()), absl::string_view::npos) << lost;
  EXPECT_REASON(MicroBatchCall(head_, 0, 0, kRowOfToken2).ForwardOnly().Run(engine_), kStepLost);
  EXPECT_REASON(CommitTo(head_, key, 0, 0, 1), kStepLost);
  EXPECT_REASON(DiscardFrom(head_, key, 0, 0), kStepLost);
  EXPECT_REASON(head_->GetSteps(key.epoch), kStepLost);
  EXPECT_REASON(head_->Seal(key, int64_t{1}), kStepLost);
  EXPECT_REASON(head_->Apply(key, int64_t{1}, Rate(1)), kStepLost);
  EXPECT_REASON(head_->DiscardGradient(key), kStepLost);
  EXPECT_REASON(head_->GradientNorm(key), kStepLost);
  float value;
  EXPECT_REASON(head_->ReadWeights(HeadTensor::kWeight, 0, 1, &value, std::nullopt), kStepLost);
  EXPECT_FALSE(head_->InUse());
  // New weights bring it back, with a new epoch and nothing of what was.
  ASSERT_OK(SetWeights(*head_, std::vector<float>(15, 2.0f)));
  EXPECT_EQ(head_->Describe().state, HeadState::kReady);
  EXPECT_NE(head_->Describe().epoch, key.epoch);
  EXPECT_EQ(ReadGradWeight(*head_), std::vector<float>(15));
  EXPECT_OK(Stage(0, kRowOfToken2));
  EXPECT_OK(Stage(1, kRowOfToken2));
}

// ---- steps -----------------------------------------------------------------------------------------------------------

TEST_F(HeadTest, ClippingAsPyTorchDoes) {
  ASSERT_OK(Submit(0, {{3, 0, 4}, {1}}));
  ApplyArguments arguments = Rate(1);
  arguments.other_grad_norm_squared = 144;
  arguments.max_grad_norm = 6.5;
  ASSERT_OK_AND_ASSIGN(const ApplyReply reply, head_->Apply(KeyOf(*head_), int64_t{1}, arguments));
  EXPECT_EQ(reply.global_grad_norm, 13);
  EXPECT_EQ(reply.gradient_norm_squared, 25);
  EXPECT_EQ(reply.clip_factor, 6.5 / (13 + 1e-6));
}

TEST_F(HeadTest, TheLastStepThatCanBeNumberedIsNotClosed) {
  HeadSpec spec = SpecWith(&HeadSpec::initial_step, std::numeric_limits<int64_t>::max());
  head_ = MakeReadyHead(engine_, spec);
  const std::vector<float> weight = ReadWeight(*head_);
  ASSERT_OK(Submit(0, kRowOfToken2, spec.initial_step));
  EXPECT_REASON(head_->Apply(KeyOf(*head_), int64_t{1}, Rate(1)), kLimitExceeded);
  EXPECT_REASON(head_->DiscardGradient(KeyOf(*head_)), kLimitExceeded);
  EXPECT_EQ(ReadWeight(*head_), weight);
  EXPECT_EQ(ReadGradWeight(*head_), Gradient(2, {1, 2, 3}));
}

TEST_F(HeadTest, ArgumentsOfApplyAreChecked) {
  const auto refused = [this](const std::function<void(ApplyArguments&)>& change) {
    ApplyArguments arguments = Rate(1);
    change(arguments);
    return ReasonOf(head_->Apply(KeyOf(*head_), int64_t{9}, arguments));
  };
  const double nan = std::nan("");
  EXPECT_EQ(refused([](ApplyArguments&) {}), "MICRO_BATCH_MISSING");
  for (const double wrong : {-1.0, nan, std::numeric_limits<double>::infinity()}) {
    EXPECT_EQ(refused([&](ApplyArguments& a) { a.learning_rate = wrong; }), "INVALID_FIELD");
    EXPECT_EQ(refused([&](ApplyArguments& a) { a.other_grad_norm_squared = wrong; }), "INVALID_FIELD");
    EXPECT_EQ(refused([&](ApplyArguments& a) { a.weight_decay = wrong; }), "INVALID_FIELD");
  }
  EXPECT_EQ(refused([&](ApplyArguments& a) { a.gradient_factor = nan; }), "INVALID_FIELD");
  for (const double wrong : {0.0, -1.0, nan}) {
    EXPECT_EQ(refused([&](ApplyArguments& a) { a.max_grad_norm = wrong; }), "INVALID_FIELD");
  }
  // The head's optimizer is SGD without momentum.
  EXPECT_EQ(refused([](ApplyArguments& a) { a.beta1 = 0.5; }), "INVALID_COMBINATION");
  EXPECT_EQ(refused([](ApplyArguments& a) { a.beta2 = 0.5; }), "INVALID_COMBINATION");
  EXPECT_EQ(refused([](ApplyArguments& a) { a.epsilon = 0.5; }), "INVALID_COMBINATION");
  EXPECT_EQ(refused([](ApplyArguments& a) { a.momentum = 0.5; }), "INVALID_COMBINATION");

  HeadSpec spec = SpecWith(&HeadSpec::optimizer, AdamWSpec());
  head_ = MakeReadyHead(engine_, spec);
  EXPECT_EQ(refused([](ApplyArguments& a) { a.momentum = 0.5; }), "INVALID_COMBINATION");
  for (const double wrong : {-0.1, 1.0, nan}) {
    EXPECT_EQ(refused([&](ApplyArguments& a) { a.beta1 = wrong; }), "INVALID_FIELD");
    EXPECT_EQ(refused([&](ApplyArguments& a) { a.beta2 = wrong; }), "INVALID_FIELD");
  }
  EXPECT_EQ(refused([](ApplyArguments& a) { a.epsilon = -1; }), "INVALID_FIELD");
  spec.optimizer = SgdSpec{.momentum = 0.9, .nesterov = true};
  head_ = MakeReadyHead(engine_, spec);
  EXPECT_EQ(refused([](ApplyArguments& a) { a.momentum = 1; }), "INVALID_FIELD");
  EXPECT_EQ(refused([](ApplyArguments& a) { a.momentum = 0; }), "INVALID_COMBINATION");
  EXPECT_EQ(refused([](ApplyArguments& a) { a.momentum = 0.5; }), "MICRO_BATCH_MISSING");
  spec.optimizer = std::monostate();
  head_ = MakeReadyHead(engine_, spec);
  EXPECT_EQ(refused([](ApplyArguments&) {}), "OPTIMIZER_NOT_CONFIGURED");
  EXPECT_EQ(head_->GetSteps(KeyOf(*head_).epoch)->first.state, StepState::kOpen);
}

}  // namespace
}  // namespace headwater::heads
