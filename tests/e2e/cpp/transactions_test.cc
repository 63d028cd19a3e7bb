// Transactions through the C++ client and the real server: several terms, take-over, the trainer's own optimizer, and a server that
// is killed in mid-step.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <string>
#include <vector>

#include "headwater/client/client.h"
#include "tests/e2e/cpp/support/fp64_head.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace headwater::client;

constexpr int64_t kVocabSize = 101;
constexpr int64_t kHiddenSize = 19;
constexpr int64_t kRows = 13;
constexpr double kLossTolerance = 1e-6;
constexpr double kGradientTolerance = 1e-5;

std::vector<float> Weight(uint32_t seed) { return RandomFloats(seed, kVocabSize * kHiddenSize, 0.3F); }
std::vector<float> Hidden(uint32_t seed) { return RandomFloats(seed, kRows * kHiddenSize, 1.0F); }
std::vector<int32_t> Targets(uint32_t seed) { return RandomTargets(seed, kRows, kVocabSize); }
Fp64Head Reference(uint32_t seed) { return Fp64Head(kVocabSize, kHiddenSize, Weight(seed), std::vector<float>(kVocabSize)); }
RowsView Rows(const std::vector<float>& hidden) { return RowsView::Float32(hidden, kHiddenSize); }

HeadSpec Spec() {
  return {.vocab_size = kVocabSize, .hidden_size = kHiddenSize, .trainable = true, .optimizer = AdamW(), .staging_slots = 2};
}

Head MakeHead(Client client, const std::string& name, uint32_t seed) {
  Head head = Value(client.CreateHead(name, Spec()));
  Value(head.UploadWeights(HeadTensor::kWeight, TensorView::Float32(Weight(seed))));
  return head;
}

MicroBatchOptions Id(int64_t step, int64_t micro_batch, CommitMode commit = CommitMode::kEager) {
  return {.step = step, .micro_batch = micro_batch, .commit = commit};
}

std::vector<float> WeightOf(Head head) {
  const TensorBuffer weight = Value(head.DownloadWeights());
  return {weight.float32().begin(), weight.float32().end()};
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(Transactions, SeveralHeadsInOneMicroBatchEqualDoublePrecision) {
  ServerProcess server;
  Client client = server.Connect();
  Head first = MakeHead(client, "first", 1);
  Head second = MakeHead(client, "second", 2);
  Fp64Head first_reference = Reference(1);
  Fp64Head second_reference = Reference(2);
  const std::vector<float> hidden = Hidden(3);
  const std::vector<int32_t> first_targets = Targets(4);
  const std::vector<int32_t> all_targets = Targets(5);
  const std::vector<int32_t> second_targets(all_targets.begin() + 4, all_targets.end());  // of the rows from 4 on
  const std::vector<float> tail(hidden.begin() + 4 * kHiddenSize, hidden.end());

  std::vector<LossTerm> terms(2);
  terms[0].targets = first_targets;
  terms[0].loss_scale = 0.5;
  terms[1].targets = second_targets;
  terms[1].head = second;
  terms[1].row_start = 4;
  const MultiResult result = Value(first.Multi(Rows(hidden), terms, Id(0, 0, CommitMode::kExplicit)).Get());
  ASSERT_TRUE(result.contribution.has_value());
  EXPECT_EQ(result.state, ContributionState::kStaged);
  EXPECT_FALSE(Value(result.contribution->Commit({.factor = 2.0}).Get()).replayed);

  const Fp64Head::Loss first_loss = first_reference.CrossEntropy(hidden, first_targets, 0.5, 2.0);
  const Fp64Head::Loss second_loss = second_reference.CrossEntropy(tail, second_targets, 1.0, 2.0);
  ASSERT_EQ(result.terms.size(), 2u);
  EXPECT_LE(std::abs(result.terms[0].loss_sum / first_loss.sum - 1), kLossTolerance);
  EXPECT_LE(std::abs(result.terms[1].loss_sum / second_loss.sum - 1), kLossTolerance);
  Doubles grad_hidden = first_loss.grad_hidden;
  for (size_t i = 0; i < second_loss.grad_hidden.size(); ++i) grad_hidden[4 * kHiddenSize + i] += second_loss.grad_hidden[i];
  EXPECT_LE(RelativeError(result.grad_hidden.float32(), grad_hidden), kGradientTolerance);
  EXPECT_LE(RelativeError(Value(first.Gradient(0)).float32(), first_reference.grad_weight()), kGradientTolerance);
  EXPECT_LE(RelativeError(Value(second.Gradient(0)).float32(), second_reference.grad_weight()), kGradientTolerance);

  // All or nothing: a step that is wrong for one head changes none.
  terms[1].step = 7;
  EXPECT_EQ(ErrorReason(first.Multi(Rows(hidden), terms, Id(0, 1)).Get().status()), "STEP_MISMATCH");
  EXPECT_EQ(Value(first.GetStep()).open.micro_batches.size(), 1u);
}

TEST(Transactions, TrainerReplacesTheWeightsAndAddsItsOwnGradient) {
  ServerProcess server;
  Client client = server.Connect();
  Head head = MakeHead(client, "student", 1);
  const std::vector<float> own = RandomFloats(4, 3 * kHiddenSize, 1.0F);
  EXPECT_FALSE(Value(head.AddGradient(0, 0, Rows(own), 5, 0.5)).replayed);
  EXPECT_TRUE(Value(head.AddGradient(0, 0, Rows(own), 5, 0.5)).replayed);
  Doubles expected(kVocabSize * kHiddenSize);
  for (size_t i = 0; i < own.size(); ++i) expected[5 * kHiddenSize + i] = 0.5 * static_cast<double>(own[i]);
  EXPECT_EQ(Value(head.Seal(0, 1)).totals.micro_batch_count, 1);
  EXPECT_LE(RelativeError(Value(head.Gradient(0)).float32(), expected), kGradientTolerance);
  const std::vector<float> weight = Weight(2);
  EXPECT_EQ(Value(head.ReplaceWeights(0, TensorView::Float32(weight))).open_step, 1);
  EXPECT_TRUE(SameBits(WeightOf(head), weight));
  const StepStates states = Value(head.GetStep());
  ASSERT_TRUE(states.last_closed.has_value());
  EXPECT_EQ(states.last_closed->state, StepState::kReplaced);

  EXPECT_EQ(ErrorReason(head.ReplaceWeights(1, TensorView::Float32(weight), TensorView::Float32(own)).status()),
            "INVALID_COMBINATION");
  EXPECT_EQ(ErrorReason(head.AddGradient(1, 0, RowsView::Float32(own, 1)).status()), "SHAPE_MISMATCH");
  const std::vector<uint16_t> half(kHiddenSize);
  EXPECT_EQ(ErrorReason(head.AddGradient(1, 0, RowsView::BFloat16(half, kHiddenSize)).status()), "DATA_TYPE_MISMATCH");
}

TEST(Transactions, RunThatTakesTheHeadFencesTheOther) {
  ServerProcess server;
  Client client = server.Connect();
  Head old_run = MakeHead(client, "student", 1);
  const std::vector<float> hidden = Hidden(2);
  Value(old_run.CrossEntropy(Rows(hidden), Targets(3), {}, Id(0, 0)).Get());
  HeadSpec spec = Spec();
  Head new_run = Value(client.AttachHead("student", spec));
  EXPECT_FALSE(new_run.created());
  EXPECT_TRUE(Value(client.AttachHead("another", spec)).created());
  spec.hidden_size += 1;
  EXPECT_EQ(ErrorReason(client.AttachHead("student", spec).status()), "HEAD_SPEC_MISMATCH");

  EXPECT_EQ(Value(new_run.Take(/*only_if_current=*/true)).open_step, 0);
  EXPECT_EQ(ErrorReason(old_run.CrossEntropy(Rows(hidden), Targets(3), {}, Id(0, 0)).Get().status()), "EPOCH_FENCED");
  EXPECT_EQ(ErrorReason(old_run.Take(/*only_if_current=*/true).status()), "EPOCH_FENCED");
  EXPECT_TRUE(Value(new_run.GetStep()).open.micro_batches.empty());
  EXPECT_TRUE(SameBits(WeightOf(new_run), Weight(1)));

  ClientOptions options = {.tenant = "research"};
  Client tenant = server.Connect(options);
  EXPECT_TRUE(Value(tenant.ListHeads()).empty());
  Head theirs = Value(tenant.CreateHead("student", Spec()));
  EXPECT_EQ(theirs.name(), "tenants/research/heads/student");
  EXPECT_EQ(Value(tenant.ListHeads()).size(), 1u);
  EXPECT_EQ(Value(client.ListHeads()).size(), 2u);
}

TEST(Transactions, ASlotThatIsMissingIsSaidOnceForEachHead) {
  ServerProcess server;
  std::vector<std::string> notices;
  ClientOptions options = {.transport = Transport::kGrpc};
  options.on_notice = [&notices](const std::string& sentence) { notices.push_back(sentence); };
  Client client = server.Connect(options);
  Head head = MakeHead(client, "student", 1);  // two slots
  const std::vector<float> hidden = Hidden(2);
  const auto submit = [&](int64_t id, bool allow_held) {
    MicroBatchOptions micro_batch = Id(0, id, CommitMode::kExplicit);
    micro_batch.allow_held = allow_held;
    return head.CrossEntropy(Rows(hidden), Targets(3), {}, micro_batch).Get();
  };
  EXPECT_EQ(Value(submit(0, false)).form, ContributionForm::kStaged);
  EXPECT_EQ(Value(submit(1, true)).form, ContributionForm::kStaged);
  EXPECT_TRUE(notices.empty());
  for (const int64_t id : {2, 3}) {
    const LossResult held = Value(submit(id, true));
    EXPECT_EQ(held.form, ContributionForm::kHeld);
    EXPECT_EQ(held.attempt, 0);  // nothing was refused before
  }
  ASSERT_EQ(notices.size(), 1u);
  EXPECT_NE(notices[0].find("staging_slots"), std::string::npos) << notices[0];
  // Nobody but this client frees the slots: to wait for one would be to wait for itself.
  const absl::Status full = submit(4, false).status();
  EXPECT_EQ(ErrorReason(full), "STAGING_FULL");
  EXPECT_EQ(ErrorMetadata(full)["ownSlots"], "2");
  EXPECT_FALSE(RetryDelay(full).has_value());
  EXPECT_EQ(ToString(full).rfind("RESOURCE_EXHAUSTED / STAGING_FULL: all 2 staging slots of ", 0), 0u) << ToString(full);
}

TEST(Transactions, AStepWithoutMicroBatchesIsAppliedOnlyIfThatIsMeant) {
  ServerProcess server;
  Client client = server.Connect();
  Head head = MakeHead(client, "student", 1);
  const std::vector<float> before = WeightOf(head);
  ApplyOptions apply{.learning_rate = 0.1, .weight_decay = 0.5};
  for (const ExpectedMicroBatches& none : {ExpectedMicroBatches(int64_t{0}), ExpectedMicroBatches(std::vector<int64_t>())}) {
    apply.expected = none;
    const absl::Status refused = head.Apply(0, apply).status();
    EXPECT_EQ(ErrorReason(refused), "INVALID_COMBINATION");
    EXPECT_EQ(ErrorMetadata(refused)["field"], "allow_empty");
  }
  apply.expected.reset();
  EXPECT_EQ(Value(head.Seal(0, int64_t{0})).totals.micro_batch_count, 0);
  EXPECT_EQ(ErrorReason(head.Apply(0, apply).status()), "INVALID_COMBINATION");
  EXPECT_TRUE(SameBits(WeightOf(head), before));
  apply.allow_empty = true;
  EXPECT_EQ(Value(head.Apply(0, apply)).open_step, 1);
  EXPECT_FALSE(SameBits(WeightOf(head), before));  // decayed
  // A gradient of the trainer's own is a micro-batch.
  Value(head.AddGradient(1, 0, Rows(Hidden(4))));
  Value(head.Seal(1, 1));
  EXPECT_EQ(Value(head.Apply(1, {.learning_rate = 0.1})).open_step, 2);
}

ClientOptions WithReplay() {
  ClientOptions options = {.replay_bytes = int64_t{1} << 24};
  options.retry.max_attempts = 20;
  return options;
}

// Two steps with every kind of contribution; `disturb` comes in the middle of the second one and behind it. Saved at the beginning
// of each, or of the first one alone.
template <typename Disturb>
std::vector<float> TrainTwoSteps(Head head, Head teacher, bool save_both, Disturb disturb) {
  for (int64_t step = 0; step < 2; ++step) {
    const uint32_t seed = 10 + 10 * static_cast<uint32_t>(step);
    if (step == 0 || save_both) Value(head.Save(step == 0 ? "step-0" : "step-1"));
    const auto submit = [&](int64_t id, CommitMode commit) {
      const std::vector<float> hidden = Hidden(seed + static_cast<uint32_t>(id));
      return Value(head.CrossEntropy(Rows(hidden), Targets(seed), {}, Id(step, id, commit)).Get());
    };
    submit(0, CommitMode::kEager);
    const LossResult committed = submit(1, CommitMode::kExplicit);
    Value(committed.contribution->Commit({.factor = 0.25}).Get());
    submit(2, CommitMode::kExplicit);
    Value(head.Discard(step, 2).Get());
    {
      MicroBatchOptions late = Id(step, 3, CommitMode::kExplicit);
      late.late_token_factors = true;
      const std::vector<float> hidden = Hidden(seed + 3);
      const std::vector<float> factors = RandomFloats(seed + 3, kRows, 1.0F);
      const LossResult held = Value(head.CrossEntropy(Rows(hidden), Targets(seed), {}, late).Get());
      Value(held.contribution->Commit({.factor = 1.5, .token_factors = factors}).Get());
    }
    {
      const std::vector<float> hidden = Hidden(seed + 4);
      const std::vector<float> teacher_hidden = Hidden(seed + 5);
      Value(head.Jsd(Rows(hidden), teacher, Rows(teacher_hidden), {}, {}, Id(step, 4)).Get());
    }
    Value(head.AddGradient(step, 5, Rows(Hidden(seed + 6)), 7, 0.1));
    const LossResult undecided = submit(6, CommitMode::kExplicit);
    if (step == 1) disturb(0);
    Value(undecided.contribution->Commit({.factor = -0.5}).Get());
    submit(7, CommitMode::kEager);
    const std::vector<int64_t> ids = {0, 1, 3, 4, 5, 6, 7};
    Value(head.Seal(step, ids, {.wait = true}));
    if (step == 1) disturb(1);
    Value(head.Apply(step, {.learning_rate = 0.01, .max_grad_norm = 1.0}));
  }
  disturb(2);
  EXPECT_EQ(Value(head.Save("trained")).step, 2);
  disturb(3);
  return WeightOf(head);
}

TEST(Transactions, KilledServerAndReplayEndAtTheUndisturbedWeightBitForBit) {
  ServerProcess server;
  const auto make_teacher = [](Client client) {
    HeadSpec spec = Spec();
    spec.trainable = false;
    spec.optimizer = {};
    spec.staging_slots = {};
    Head teacher = Value(client.CreateHead("teacher", spec));
    Value(teacher.UploadWeights(HeadTensor::kWeight, TensorView::Float32(Weight(9))));
    Value(teacher.Save("kept"));
    return teacher;
  };
  std::vector<float> undisturbed;
  {
    ServerProcess quiet;
    Client client = quiet.Connect();
    undisturbed = TrainTwoSteps(MakeHead(client, "student", 1), make_teacher(client), true, [](int) {});
  }
  Client client = server.Connect(WithReplay());
  const Head teacher = make_teacher(client);
  for (const bool save_both : {true, false}) {  // false: the log reaches back over a step that was closed
    SCOPED_TRACE(save_both);
    Head head = MakeHead(client, save_both ? "student" : "other", 1);
    int restarts = 0;
    const std::string epoch = head.epoch();
    const std::vector<float> disturbed = TrainTwoSteps(head, teacher, save_both, [&](int) {
      server.KillAndStart();
      ++restarts;
    });
    EXPECT_EQ(restarts, 4);
    EXPECT_NE(head.epoch(), epoch);
    EXPECT_TRUE(SameBits(disturbed, undisturbed));
    EXPECT_FALSE(SameBits(disturbed, Weight(1)));
    EXPECT_TRUE(head.Delete(true).ok());
  }
}

TEST(Transactions, WeightsOfTheTrainersOwnAreRepeatedToo) {
  ServerProcess server;
  for (const bool has_room : {true, false}) {
    ClientOptions options = WithReplay();
    if (!has_room) options.replay_bytes = 4096;  // less than the weights
    Client client = server.Connect(options);
    Head head = MakeHead(client, has_room ? "student" : "other", 1);
    Value(head.Save("begin"));
    const std::vector<float> hidden = Hidden(2);
    Value(head.CrossEntropy(Rows(hidden), Targets(3), {}, Id(0, 0)).Get());
    Value(head.Seal(0, 1));
    Value(head.ReplaceWeights(0, TensorView::Float32(Weight(7))));
    Value(head.DiscardGradient(1));
    Value(head.CrossEntropy(Rows(hidden), Targets(3), {}, Id(2, 0)).Get());
    const TensorBuffer before = Value(head.Gradient(2));
    server.KillAndStart();
    const absl::StatusOr<TensorBuffer> again = head.Gradient(2);
    if (has_room) {
      ASSERT_TRUE(again.ok()) << again.status();
      EXPECT_EQ(std::memcmp(again->data(), before.data(), static_cast<size_t>(before.bytes())), 0);
      EXPECT_TRUE(SameBits(WeightOf(head), Weight(7)));
    } else {
      EXPECT_EQ(ErrorReason(again.status()), "STEP_LOST") << again.status();
      EXPECT_EQ(RestoredFrom(again.status())->checkpoints.size(), 1u);
      // The weights that came back are older ones: they are not given out as this trainer's, but to who opens the head as it is.
      EXPECT_EQ(ErrorReason(head.DownloadWeights().status()), "STEP_LOST");
      EXPECT_TRUE(SameBits(WeightOf(Value(client.OpenHead("other"))), Weight(1)));
    }
  }
}

TEST(Transactions, HeadsOfOneMicroBatchAreRecoveredTogether) {
  ServerProcess server;
  Client client = server.Connect(WithReplay());
  Head first = MakeHead(client, "first", 1);
  Head second = MakeHead(client, "second", 2);
  Value(first.Save("begin"));
  Value(second.Save("begin"));
  const std::vector<float> hidden = Hidden(3);
  const std::vector<int32_t> targets = Targets(4);
  std::vector<LossTerm> terms(2);
  terms[0].targets = targets;
  terms[1].targets = targets;
  terms[1].head = second;
  const MultiResult undecided = Value(first.Multi(Rows(hidden), terms, Id(0, 0, CommitMode::kExplicit)).Get());
  Value(first.Multi(Rows(hidden), terms, Id(0, 1)).Get());
  Value(undecided.contribution->Commit({.factor = 0.5}).Get());
  const TensorBuffer before = Value(second.Gradient(0));
  server.KillAndStart();
  Value(first.CrossEntropy(Rows(hidden), targets, {}, Id(0, 2)).Get());
  const TensorBuffer after = Value(second.Gradient(0));
  EXPECT_EQ(std::memcmp(before.data(), after.data(), static_cast<size_t>(before.bytes())), 0);
  EXPECT_EQ(Value(first.Seal(0, 3)).totals.micro_batch_count, 3);
  EXPECT_EQ(Value(second.Seal(0, 2)).totals.micro_batch_count, 2);
}

}  // namespace
}  // namespace headwater::e2e
