// What a head tells and does beside its transactions: descriptions, arguments on their way to the engine,
// memory that is let go, heads that share a micro-batch.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "head_test_util.h"
#include "server/heads/weights/weight_tensors.h"

namespace headwater::heads {
namespace {

using headwater::testing::FakeControl;
using headwater::testing::FakeHead;

// An engine that remembers what its computations were to wait for, and whose heads the last update that they were asked for.
class RecordingEngine : public FakeEngine {
 public:
  absl::StatusOr<MicroBatchResult> DoCompute(const MicroBatch& micro_batch) override {
    awaited.push_back(micro_batch.after);
    labels.emplace_back(micro_batch.label != nullptr ? micro_batch.label : "");
    rows = {micro_batch.hidden.data, micro_batch.terms[0].teacher_hidden.data};
    terms.push_back(micro_batch.terms.size());
    outputs.push_back(0);
    for (const LossTerm& term : micro_batch.terms) {
      for (const float* output : {term.token_loss, term.lse, term.target_log_probability, term.entropy}) {
        outputs.back() += output != nullptr ? 1 : 0;
      }
      outputs.back() += term.argmax != nullptr ? 1 : 0;
    }
    return FakeEngine::DoCompute(micro_batch);
  }
  absl::StatusOr<std::unique_ptr<EngineHead>> DoCreateHead(const HeadSpec& spec) override {
    return std::make_unique<RecordingHead>(spec, control(), last_step);
  }
  OptimizerStep last_step;
  std::vector<const DeviceEvent*> awaited;
  std::vector<std::string> labels;
  std::vector<const void*> rows;  // of the last computation: its own, and the first term's teacher's
  std::vector<int> outputs;       // how many of each computation
  std::vector<size_t> terms;

 private:
  class RecordingHead : public FakeHead {
   public:
    RecordingHead(const HeadSpec& spec, FakeControl& control, OptimizerStep& last_step)
        : FakeHead(spec, 1, control), last_step_(last_step) {}
    absl::Status DoApplyOptimizer(const OptimizerStep& step) override {
      last_step_ = step;
      return FakeHead::DoApplyOptimizer(step);
    }

   private:
    OptimizerStep& last_step_;
  };
};

ApplyArguments With(std::optional<double> ApplyArguments::*member, double value) {
  ApplyArguments arguments;
  arguments.*member = value;
  return arguments;
}

HeadSpec WithBias() { return SpecWith(&HeadSpec::has_bias, true); }

TEST(HeadDetailsTest, ADescriptionIsComplete) {
  FakeEngine engine(2);
  const absl::Time before = absl::Now();
  const std::shared_ptr<Head> head = MakeReadyHead(engine, SmallSpec(), "described");
  const HeadInfo info = head->Describe();
  EXPECT_EQ(info.name.head, "described");
  EXPECT_EQ(info.shards.size(), 2u);
  EXPECT_EQ(info.plan.total_bytes, engine.PlanHead(SmallSpec())->total_bytes);
  EXPECT_GT(info.plan.total_bytes, 0);
  EXPECT_GE(info.create_time, before);
  EXPECT_LE(info.create_time, absl::Now());
  EXPECT_EQ(info.spec.vocab_size, SmallSpec().vocab_size);
}

TEST(HeadDetailsTest, OverridesOfAdamWReachTheEngineOneByOne) {
  RecordingEngine engine;
  const AdamWSpec adamw = {.beta1 = 0.5, .beta2 = 0.25, .epsilon = 0.125, .weight_decay = 2};
  const std::shared_ptr<Head> head = MakeReadyHead(engine, SpecWith(&HeadSpec::optimizer, adamw));
  const auto apply = [&](const ApplyArguments& arguments) {
    EXPECT_OK(head->Apply(KeyOf(*head), int64_t{0}, arguments));
    return std::get<AdamWSpec>(engine.last_step.settings);
  };
  const auto expect = [](const AdamWSpec& actual, double beta1, double beta2, double epsilon, double weight_decay) {
    EXPECT_EQ(actual.beta1, beta1);
    EXPECT_EQ(actual.beta2, beta2);
    EXPECT_EQ(actual.epsilon, epsilon);
    EXPECT_EQ(actual.weight_decay, weight_decay);
  };
  expect(apply(ApplyArguments()), 0.5, 0.25, 0.125, 2);
  expect(apply(With(&ApplyArguments::beta1, 0.75)), 0.75, 0.25, 0.125, 2);
  expect(apply(With(&ApplyArguments::beta2, 0.75)), 0.5, 0.75, 0.125, 2);
  expect(apply(With(&ApplyArguments::epsilon, 0)), 0.5, 0.25, 0, 2);
  expect(apply(With(&ApplyArguments::weight_decay, 0)), 0.5, 0.25, 0.125, 0);
  EXPECT_EQ(engine.last_step.update_count, 5);
}

TEST(HeadDetailsTest, OverridesOfSgdReachTheEngineOneByOne) {
  RecordingEngine engine;
  const std::shared_ptr<Head> head =
      MakeReadyHead(engine, SpecWith(&HeadSpec::optimizer, SgdSpec{.momentum = 0.5, .weight_decay = 2}));
  const auto apply = [&](const ApplyArguments& arguments) {
    EXPECT_OK(head->Apply(KeyOf(*head), int64_t{0}, arguments));
    return std::get<SgdSpec>(engine.last_step.settings);
  };
  EXPECT_EQ(apply(ApplyArguments()).momentum, 0.5);
  EXPECT_EQ(apply(ApplyArguments()).weight_decay, 2);
  EXPECT_EQ(apply(With(&ApplyArguments::momentum, 0.0)).momentum, 0);
  EXPECT_EQ(apply(With(&ApplyArguments::weight_decay, 1.0)).weight_decay, 1);
  EXPECT_EQ(apply(With(&ApplyArguments::weight_decay, 1.0)).momentum, 0.5);
}

// Half of the new weights, that wait for the other half.
std::weak_ptr<const void> ReplaceWeightAlone(Head& head) {
  EXPECT_OK(head.Seal(KeyOf(head), int64_t{0}, {}));
  auto values = std::make_shared<std::vector<float>>(15, 1.0f);
  const ShadowTensor tensor = {.data = std::shared_ptr<const void>(values, values->data()), .byte_count = 60};
  const absl::StatusOr<ReplaceReply> reply = head.Replace(KeyOf(head), tensor);
  EXPECT_OK(reply);
  EXPECT_FALSE(reply.ok() && reply->closed);
  return tensor.data;
}

TEST(HeadDetailsTest, HalfOfNewWeightsIsFreedWithItsStep) {
  FakeEngine engine;
  const std::function<void(Head&)> ends[] = {[](Head& head) { head.Retire(); },
                                             [](Head& head) { EXPECT_OK(head.Take(std::nullopt)); },
                                             [&](Head& head) {
                                               engine.control().FailNext("ZeroGradient", kEngineError);
                                               EXPECT_REASON(head.DiscardGradient(KeyOf(head)), kEngineFailed);
                                             }};
  for (const auto& end : ends) {
    const std::shared_ptr<Head> head = MakeReadyHead(engine, WithBias());
    const std::weak_ptr<const void> values = ReplaceWeightAlone(*head);
    EXPECT_FALSE(values.expired());
    end(*head);
    EXPECT_TRUE(values.expired());
  }
}

TEST(HeadDetailsTest, HalfOfNewWeightsIsLetGoWhereItsRoomIsNeeded) {
  FakeEngine engine;
  const std::shared_ptr<Head> head = MakeReadyHead(engine, WithBias());
  const std::weak_ptr<const void> values = ReplaceWeightAlone(*head);
  const int other = 0;
  EXPECT_FALSE(head->DropShadow(&other));
  EXPECT_FALSE(values.expired());
  EXPECT_TRUE(head->DropShadow(values.lock().get()));
  EXPECT_TRUE(values.expired());
  // The step is as it was, and needs both of them now.
  const std::vector<float> bias(5, 2.0f);
  ShadowTensor tensor = {.tensor = HeadTensor::kBias,
                         .data = std::shared_ptr<const void>(std::shared_ptr<const void>(), bias.data()),
                         .byte_count = 20};
  ASSERT_OK_AND_ASSIGN(const ReplaceReply alone, head->Replace(KeyOf(*head), tensor));
  EXPECT_FALSE(alone.closed);
  const std::vector<float> weight(15, 1.0f);
  tensor.tensor = HeadTensor::kWeight;
  tensor.data = std::shared_ptr<const void>(std::shared_ptr<const void>(), weight.data());
  tensor.byte_count = 60;
  engine.control().on_call = [&] { EXPECT_FALSE(head->DropShadow(weight.data())); };  // it is being written
  ASSERT_OK_AND_ASSIGN(const ReplaceReply both, head->Replace(KeyOf(*head), tensor));
  EXPECT_TRUE(both.closed && !both.replayed);
  EXPECT_EQ(both.head.open_step, 1);
  engine.control().on_call = nullptr;
  EXPECT_EQ(ReadWeight(*head), weight);
  const StepKey closed = {KeyOf(*head).epoch, 0};
  EXPECT_TRUE(head->Replace(closed, tensor)->replayed);
  const std::vector<float> others(15, 3.0f);
  tensor.data = std::shared_ptr<const void>(std::shared_ptr<const void>(), others.data());
  const absl::Status conflict = head->Replace(closed, tensor).status();
  EXPECT_REASON(conflict, kStepConflict);
  EXPECT_NE(conflict.message().find("other weights"), absl::string_view::npos) << conflict;
  const absl::Status discard = head->DiscardGradient(closed).status();
  EXPECT_REASON(discard, kStepConflict);
  EXPECT_NE(discard.message().find("new weights"), absl::string_view::npos) << discard;
}

TEST(HeadDetailsTest, EveryComputationOfAMicroBatchWaitsForItsSender) {
  RecordingEngine engine;
  // Without slots what must be finite is computed twice.
  const std::shared_ptr<Head> head = MakeReadyHead(engine, SpecWith(&HeadSpec::staging_slots, 0));
  const DeviceEvent event;
  MicroBatchCall call(head, 0, 0, kRowOfToken2);
  call.Refuse().submission().hold = MicroBatchCall::HoldNothing;
  call.submission().after = &event;
  call.submission().label = "request";
  EXPECT_OK(call.Run(engine));
  EXPECT_EQ(engine.labels, (std::vector<std::string>{"request", ""}));
  EXPECT_EQ(engine.awaited, (std::vector<const DeviceEvent*>{&event, &event}));
}

TEST(HeadDetailsTest, WhatIsHeldForgetsTermsThatAddNothing) {
  RecordingEngine engine;
  const std::shared_ptr<Head> head = MakeReadyHead(engine, SmallSpec());
  MicroBatchCall call(head, 0, 0, kRowOfToken2);
  call.Held();
  {
    const std::shared_ptr<Head> beside = MakeReadyHead(engine, FrozenSpec(), "frozen");
    call.submission().terms.push_back(MicroBatchCall(beside, 0, 0, kRowOfToken2).term());
    call.submission().terms.back().term.targets = call.term().term.targets;
    EXPECT_OK(call.Run(engine));
    call.submission().terms.pop_back();
  }
  // Its head is gone, and the commit does not need it.
  EXPECT_TRUE(*CommitTo(head, KeyOf(*head), 0, 0, 1));
  EXPECT_EQ(engine.terms, (std::vector<size_t>{2, 1}));
}

TEST(HeadDetailsTest, WhatIsHeldIsReadWhereItHasBeenMovedTo) {
  RecordingEngine engine;
  const std::shared_ptr<Head> head = MakeReadyHead(engine, SmallSpec());
  const std::vector<float> moved = kRowOfToken2.hidden, moved_teacher = kRowOfToken2.hidden;
  MicroBatchCall call(head, 0, 0, kRowOfToken2);
  call.Teacher(head).Held([&] {
    call.submission().hidden.data = moved.data();
    call.term().term.teacher_hidden.data = moved_teacher.data();
    return MicroBatchCall::HoldNothing();
  });
  EXPECT_OK(call.Run(engine));
  EXPECT_TRUE(*CommitTo(head, KeyOf(*head), 0, 0, 1));
  EXPECT_EQ(engine.rows, (std::vector<const void*>{moved.data(), moved_teacher.data()}));
}

TEST(HeadDetailsTest, WhereSumsAreCutIsPartOfTheirNumerics) {
  FakeEngine engine(2);
  const auto numerics = [&engine](int64_t vocab_size) {
    return DescribeNumerics(engine, **engine.CreateHead(SmallSpec(vocab_size)));
  };
  EXPECT_EQ(numerics(5), numerics(5));
  EXPECT_NE(numerics(5), numerics(6));  // as many shards, of other rows
  EXPECT_NE(numerics(5).find("; algorithms="), std::string::npos) << numerics(5);
}

TEST(HeadDetailsTest, AnUndecidedMicroBatchOfTwoHeadsGoesWithEither) {
  FakeEngine engine;
  std::shared_ptr<Head> first = MakeReadyHead(engine, SmallSpec(), "first");
  const std::shared_ptr<Head> second = MakeReadyHead(engine, SmallSpec(), "second");
  {
    MicroBatchCall call(first, 0, 0, kRowOfToken2);
    AddSecondTerm(call, second);
    EXPECT_OK(call.Explicit().Run(engine));
  }
  ASSERT_EQ(StateOf(*second, 0), ContributionState::kStaged);
  first.reset();
  EXPECT_EQ(StateOf(*second, 0), ContributionState::kDiscarded);
}

TEST(HeadDetailsTest, RowsOfAnAddedGradientMustBeTheHeads) {
  FakeEngine engine;
  const std::shared_ptr<Head> head = MakeReadyHead(engine, SmallSpec());
  const StepKey key = KeyOf(*head);
  const std::vector<float> rows(30);
  const auto add = [&](int64_t id, int64_t start, int64_t count) {
    EXPECT_EQ(ReasonOf(head->CheckAddGradient(key, id, 0, start, count)),
              ReasonOf(head->AddGradient(key, id, 0, Digest{}, {start, count, rows.data(), 1}, nullptr)));
    return ReasonOf(head->AddGradient(key, id, 0, Digest{}, {start, count, rows.data(), 1}, nullptr));
  };
  EXPECT_EQ(add(0, 0, 5), "OK");
  EXPECT_EQ(add(1, 4, 1), "OK");
  for (const auto& [start, count] : std::vector<std::pair<int64_t, int64_t>>{{-1, 1}, {0, 0}, {0, 6}, {5, 1}, {4, 2}, {0, -1}}) {
    EXPECT_EQ(add(2, start, count), "CHUNK_OUT_OF_RANGE") << start << " " << count;
  }
  const int calls = engine.control().CountOf("AddToGradient");
  EXPECT_REASON(head->AddGradient(key, 2, 0, Digest{}, {0, 5, rows.data(), 1e300}, nullptr), kInvalidField);
  EXPECT_EQ(engine.control().CountOf("AddToGradient"), calls);
  EXPECT_EQ(KeyOf(*head).step, 0);
  const std::shared_ptr<Head> teacher = MakeReadyHead(engine, FrozenSpec(), "teacher");
  EXPECT_REASON(teacher->CheckAddGradient(KeyOf(*teacher), 0, 0, 0, 1), kHeadNotTrainable);
}

}  // namespace
}  // namespace headwater::heads
