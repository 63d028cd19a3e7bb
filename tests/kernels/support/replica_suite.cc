#include "tests/kernels/support/replica_suite.h"

#include <cmath>

#include "absl/time/time.h"
#include "headwater/kernels/error.h"
#include "tests/unit/expect_status.h"
#include "tests/unit/run_threads.h"

namespace headwater::testing {
namespace {

// Longer than anything takes that is not stuck.
constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr double kRate = 0.01;

constexpr HeadTensor kState[] = {HeadTensor::kWeight,        HeadTensor::kBias,          HeadTensor::kMasterWeight,
                                 HeadTensor::kMasterBias,    HeadTensor::kMoment1Weight, HeadTensor::kMoment1Bias,
                                 HeadTensor::kMoment2Weight, HeadTensor::kMoment2Bias};

// Sums of the same contributions in another order, some of them perhaps in one product.
void ExpectSameSum(const Gradient& actual, const Gradient& expected) {
  constexpr double kBound = 1e-4;
  for (const auto part : {&Gradient::weight, &Gradient::bias}) {
    const reference::Matrix sum(1, static_cast<int64_t>((expected.*part).size()), ToDoubles(expected.*part));
    EXPECT_LE(MeasureErrors(ToDoubles(actual.*part), sum).whole, kBound);
  }
}

void WriteFloats(EngineHead& head, HeadTensor tensor, const std::vector<float>& values, int64_t start = 0) {
  EXPECT_OK(head.WriteTensor(tensor, start, static_cast<int64_t>(values.size()), values.data()));
}

}  // namespace

ProblemOptions ReplicaOptions(bool jsd, DataType type) {
  return WithType({.rows = 53,
                   .vocab_size = 211,
                   .hidden_size = 21,  // rows have padding on a GPU
                   .bias = true,
                   .token_weights = true,
                   .label_smoothing = jsd ? 0.0 : 0.1,
                   .jsd = jsd,
                   .staging_slots = 1},
                  type);
}

std::vector<Problem> MakeReplicaProblems(size_t count, ProblemOptions options, const OptimizerSpec& optimizer) {
  std::vector<Problem> problems;
  for (options.seed = 1; options.seed <= count; ++options.seed) {
    Problem problem = MakeProblem(options);
    for (TestHead& head : problem.heads) {
      head.spec.parallelism = Parallelism::kRows;
      if (head.spec.trainable) head.spec.optimizer = optimizer;
    }
    if (!problems.empty()) problem.heads = problems.front().heads;
    problems.push_back(std::move(problem));
  }
  return problems;
}

std::vector<TestHead> ByVocabulary(std::vector<TestHead> heads) {
  for (TestHead& head : heads) head.spec.parallelism = Parallelism::kVocabulary;
  return heads;
}

bool Meeting::Arrive() {
  const auto all_here = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return arrived_ >= count_; };
  absl::MutexLock lock(&mutex_);
  ++arrived_;
  return mutex_.AwaitWithTimeout(absl::Condition(&all_here), kPatience);
}

// One micro-batch on each rank, all at the same time.
std::vector<Outcome> ComputeAtOnce(LoadedHeads& heads, const std::vector<Problem>& problems, ComputeOptions options) {
  std::vector<Outcome> outcomes(problems.size());
  Meeting meeting(problems.size());
  options.read_gradients = false;
  RunThreads(static_cast<int64_t>(problems.size()), [&](int64_t caller) {
    const size_t i = static_cast<size_t>(caller);
    MeetingFlow flow(&meeting);
    ComputeOptions own = options;
    own.flow = &flow;
    EXPECT_OK(heads.TryCompute(problems[i], own, &outcomes[i]));
    EXPECT_EQ(flow.rows_ready, problems[i].rows);
  });
  return outcomes;
}

void ExpectSumOfGradients(const Gradient& gradient, const std::vector<Problem>& problems, const std::vector<double>& factors) {
  Expected first = ComputeExpected(problems[0]);
  reference::HeadGradient sum = Combine(first.gradient(0), factors[0], first.gradient(0), 0);
  for (size_t i = 1; i < problems.size(); ++i) sum = Combine(sum, 1, ComputeExpected(problems[i]).gradient(0), factors[i]);
  ExpectGradientNear(gradient, sum);
}

OptimizerStep ReplicaStep(int64_t update_count, const OptimizerSpec& optimizer) {
  return {.learning_rate = kRate, .gradient_multiplier = 0.5, .settings = optimizer, .update_count = update_count};
}

// Really at the same time: each waits for the others. And each has the bits of one engine.
TEST_P(Replicas, ComputeConcurrentMicroBatchesWithTheBitsOfOneEngine) {
  const auto group = Group();
  const auto one = One();
  for (const auto& [options, compute] : GetParam().forms) {
    SCOPED_TRACE(options.name + (options.jsd ? " divergence, " : " cross entropy, ") + DataTypeName(options.head_type));
    const std::vector<Problem> problems = MakeReplicaProblems(count(), options);
    LoadedHeads heads(*group, problems[0].heads), alone(*one, problems[0].heads);
    const std::vector<Outcome> outcomes = ComputeAtOnce(heads, problems, compute);
    ComputeOptions without_gradients = compute;
    without_gradients.read_gradients = false;
    for (size_t i = 0; i < count(); ++i) {
      EXPECT_TRUE(outcomes[i].BitwiseEquals(alone.Compute(problems[i], without_gradients))) << i;
    }
    ExpectSameSum(heads.ReadGradient(0), alone.ReadGradient(0));
    // One's gradient has its bits, too: the other ranks add zeros.
    heads.ZeroGradients();
    alone.ZeroGradients();
    const Gradient together = heads.Compute(problems[0], compute).gradients[0];
    const Gradient expected = alone.Compute(problems[0], compute).gradients[0];
    EXPECT_EQ(together.weight, expected.weight);
    EXPECT_EQ(together.bias, expected.bias);
  }
}

TEST_P(Replicas, SumTheirGradients) {
  const auto group = Group();
  for (const bool jsd : {false, true}) {
    const std::vector<Problem> problems = MakeReplicaProblems(count(), ReplicaOptions(jsd));
    LoadedHeads heads(*group, problems[0].heads);
    ComputeAtOnce(heads, problems);
    ExpectSumOfGradients(heads.ReadGradient(0), problems, std::vector<double>(count(), 1));
    // Reading it has changed nothing, and another contribution is added to the sum.
    const Gradient sum = heads.ReadGradient(0);
    EXPECT_TRUE(heads.ReadGradient(0) == sum);
    std::vector<double> factors(count(), 1);
    factors[0] = 2;
    ExpectSumOfGradients(heads.Compute(problems[0]).gradients[0], problems, factors);
    heads.ZeroGradients();
    ExpectGradientZero(heads.ReadGradient(0));
  }
}

// As many contributions as the ranks have slots, each on another rank; committed in another order, with factors, and dropped.
TEST_P(Replicas, StageOnEveryRankAndCommitThere) {
  const std::vector<Problem> problems = MakeReplicaProblems(count(), ReplicaOptions());
  const auto group = Group();
  LoadedHeads heads(*group, problems[0].heads);
  EXPECT_TRUE(heads.head(0).StagesConcurrently());
  EXPECT_EQ(heads.head(0).FreeStagingSlots(), ranks());
  std::vector<std::unique_ptr<StagedContribution>> staged;
  for (const Problem& problem : problems) staged.push_back(heads.Stage(problem));
  EXPECT_EQ(heads.head(0).FreeStagingSlots(), 0);
  {
    // No slot is left, which is reported before the flow is asked for anything.
    MeetingFlow flow(nullptr, absl::InternalError("asked"));
    const PreparedMicroBatch prepared(problems[0], heads.pointers(),
                                      ComputeOptions{.grad_weight = GradWeightMode::kStage, .flow = &flow});
    EXPECT_REASON(group->Compute(prepared.micro_batch), kStagingFull);
    prepared.ExpectOutputsUntouched();
  }
  ExpectGradientZero(heads.ReadGradient(0));
  std::vector<double> factors(count(), 0);
  for (size_t i = count(); i > 0; --i) {
    if (i == 2) {
      staged[i - 1].reset();
      continue;
    }
    factors[i - 1] = static_cast<double>(i) - 2.5;
    EXPECT_OK(staged[i - 1]->Commit(factors[i - 1]));
  }
  ExpectSumOfGradients(heads.ReadGradient(0), problems, factors);
  EXPECT_EQ(heads.head(0).FreeStagingSlots(), ranks());
  // The ranks have learned of it, too.
  for (size_t i = 0; i < count(); ++i) staged[i] = heads.Stage(problems[i]);
}

// A caller that gives up costs nothing and leaves nothing.
TEST_P(Replicas, ARefusedDecisionAddsNothing) {
  const std::vector<Problem> problems = MakeReplicaProblems(1, ReplicaOptions());
  const auto group = Group();
  LoadedHeads heads(*group, problems[0].heads);
  for (const GradWeightMode mode : {GradWeightMode::kAccumulate, GradWeightMode::kStage}) {
    MeetingFlow flow(nullptr, MakeError(ErrorReason::kCancelled, "the caller gives up"));
    EXPECT_REASON(heads.TryCompute(problems[0], {.grad_weight = mode, .flow = &flow}), kCancelled);
    ExpectGradientZero(heads.ReadGradient(0));
    EXPECT_EQ(heads.head(0).FreeStagingSlots(), ranks());
    EXPECT_OK(group->health());
  }
  ExpectSumOfGradients(heads.Compute(problems[0]).gradients[0], problems, {1});
}

TEST_P(Replicas, DigestTheRowsAsOneEngine) {
  const std::vector<Problem> problems = MakeReplicaProblems(1, ReplicaOptions(/*jsd=*/true));
  const auto digest_of = [&](LossEngine& engine) {
    LoadedHeads heads(engine, problems[0].heads);
    MeetingFlow flow(nullptr);
    PreparedMicroBatch prepared(problems[0], heads.pointers(), {.flow = &flow});
    prepared.micro_batch.digest_rows = true;
    EXPECT_OK(engine.Compute(prepared.micro_batch));
    return flow.digest;
  };
  EXPECT_EQ(digest_of(*Group()), digest_of(*One()));
}

// Several steps: the accumulators' sum goes into one update, and all ranks continue with the same weights.
TEST_P(Replicas, UpdateTheWeightsTogether) {
  const auto group = Group();
  const auto one = One();
  for (const OptimizerSpec& optimizer :
       {OptimizerSpec(AdamWSpec()), OptimizerSpec(SgdSpec{.momentum = 0.9}), OptimizerSpec(SgdSpec())}) {
    for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
      SCOPED_TRACE(std::string(DataTypeName(type)) + ", optimizer " + std::to_string(optimizer.index()));
      const std::vector<Problem> problems = MakeReplicaProblems(count(), ReplicaOptions(/*jsd=*/false, type), optimizer);
      LoadedHeads heads(*group, problems[0].heads), alone(*one, problems[0].heads);
      for (int64_t update = 1; update <= 3; ++update) {
        ComputeAtOnce(heads, problems);
        ASSERT_OK_AND_ASSIGN(const GradientStats stats, heads.head(0).ComputeGradientStats());
        // The same sum, so that the update must have the same bits.
        const Gradient gradient = heads.ReadGradient(0);
        EXPECT_NEAR(stats.norm_squared / gradient.SquaredNorm(), 1, 1e-9);
        EXPECT_EQ(stats.non_finite_count, 0);
        WriteFloats(alone.head(0), HeadTensor::kGradWeight, gradient.weight);
        WriteFloats(alone.head(0), HeadTensor::kGradBias, gradient.bias);
        for (LoadedHeads* each : {&alone, &heads}) EXPECT_OK(each->head(0).ApplyOptimizer(ReplicaStep(update, optimizer)));
        for (const HeadTensor tensor : kState) {
          EXPECT_EQ(ReadTensorValues(heads.head(0), tensor), ReadTensorValues(alone.head(0), tensor)) << HeadTensorName(tensor);
        }
        ExpectGradientZero(heads.ReadGradient(0));
      }
      // Every rank computes with them.
      const std::vector<Problem> same(count(), problems[0]);
      const Outcome expected = alone.Compute(problems[0], {.read_gradients = false});
      for (const Outcome& outcome : ComputeAtOnce(heads, same)) EXPECT_TRUE(outcome.BitwiseEquals(expected));
    }
  }
}

// State goes over to a head of the other kind, and back.
TEST_P(Replicas, HaveTheTensorsOfAnyOtherHead) {
  const std::vector<Problem> problems = MakeReplicaProblems(count(), ReplicaOptions(/*jsd=*/false, DataType::kBFloat16));
  const auto group = Group();
  LoadedHeads heads(*group, problems[0].heads);
  ComputeAtOnce(heads, problems);
  ASSERT_OK(heads.head(0).ApplyOptimizer(ReplicaStep(1)));
  const auto other_group = GetParam().make_group(GetParam().other_weights, false);
  LoadedHeads sharded(*other_group, ByVocabulary(problems[0].heads));
  const auto last_group = GetParam().make_group(GetParam().last_weights, false);
  LoadedHeads back(*last_group, problems[0].heads);
  // The masters last: a write of the weights sets them, as a checkpoint's tensors are ordered.
  const auto copy = [](LoadedHeads& from, LoadedHeads& to) {
    for (const HeadTensor tensor : kState) WriteTensorValues(to.head(0), tensor, ReadTensorValues(from.head(0), tensor));
  };
  copy(heads, sharded);
  copy(sharded, back);
  for (const HeadTensor tensor : kState) {
    EXPECT_EQ(ReadTensorValues(back.head(0), tensor), ReadTensorValues(heads.head(0), tensor)) << HeadTensorName(tensor);
  }
  // A range that begins and ends in the middle of shards.
  for (LoadedHeads* each : {&heads, &sharded}) {
    WriteFloats(each->head(0), HeadTensor::kMasterWeight, std::vector<float>(1500, 0.25F), 1111);
  }
  for (const HeadTensor tensor : {HeadTensor::kWeight, HeadTensor::kMasterWeight}) {
    EXPECT_EQ(ReadTensorValues(heads.head(0), tensor), ReadTensorValues(sharded.head(0), tensor));
  }
}

// A written gradient replaces the sum, whatever the ranks had; ranges begin and end within rows and shards.
TEST_P(Replicas, TakeAGradientFromOutside) {
  const std::vector<Problem> problems = MakeReplicaProblems(count(), ReplicaOptions());
  const auto group = Group();
  LoadedHeads heads(*group, problems[0].heads);
  for (const HeadTensor tensor : {HeadTensor::kGradWeight, HeadTensor::kGradBias}) {
    const int64_t size = heads.head(0).ElementCount(tensor);
    const int64_t start = 10, part = size - 25;
    std::vector<float> all, written, added;
    std::vector<double> expected;
    for (int64_t i = 0; i < size; ++i) {
      all.push_back(static_cast<float>(std::sin(static_cast<double>(i))));
      expected.push_back(all.back());
      if (i < start || i >= start + part) continue;
      written.push_back(static_cast<float>(std::cos(static_cast<double>(i))));
      added.push_back(static_cast<float>(std::sin(0.1 * static_cast<double>(i))));
      expected.back() = written.back() + 2 * added.back();
    }
    ComputeAtOnce(heads, problems);
    WriteFloats(heads.head(0), tensor, all);
    WriteFloats(heads.head(0), tensor, written, start);
    EXPECT_OK(heads.head(0).AddToGradient(tensor, start, part, 2, added.data()));
    EXPECT_EQ(ReadTensorValues(heads.head(0), tensor), expected) << HeadTensorName(tensor);
    EXPECT_OK(heads.head(0).ReduceGradient());
    EXPECT_EQ(ReadTensorValues(heads.head(0), tensor), expected) << HeadTensorName(tensor);
  }
}

// Both kinds side by side: one rank's calls between those of all, and work that one kind puts off when the other comes.
TEST_P(Replicas, LiveBesideHeadsByVocabularyButNotInOneCall) {
  constexpr int kRounds = 20;
  const std::vector<Problem> problems = MakeReplicaProblems(count(), ReplicaOptions(/*jsd=*/true, DataType::kBFloat16));
  const Problem other = MakeReplicaProblems(1, ReplicaOptions(/*jsd=*/true))[0];
  const auto group = Group();
  const auto one = One();
  LoadedHeads rows(*group, problems[0].heads), alone(*one, problems[0].heads);
  LoadedHeads sharded(*group, ByVocabulary(other.heads)), sharded_16_bits(*group, ByVocabulary(problems[0].heads));
  const PreparedMicroBatch mixed(other, {rows.pointers()[0], sharded.pointers()[1]}, {});
  EXPECT_REASON(group->Compute(mixed.micro_batch), kInvalidCombination);
  mixed.ExpectOutputsUntouched();
  const Expected expected = ComputeExpected(other);
  RunThreads(ranks() + 1, [&](int64_t caller) {
    for (int round = 0; round < kRounds; ++round) {
      Outcome outcome;
      EXPECT_OK(caller < ranks() ? rows.TryCompute(problems[static_cast<size_t>(caller)], {})
                                 : sharded.TryCompute(other, {.read_gradients = false}, &outcome));
      if (caller == ranks()) ExpectOutcomeMatches(other, expected, outcome);
    }
  });
  // Work of the replicas may still wait here.
  ExpectHeadsMatch(sharded_16_bits, problems[0], ComputeExpected(problems[0]));
  for (int round = 0; round < kRounds; ++round) {
    for (const Problem& problem : problems) EXPECT_OK(alone.TryCompute(problem, {}));
  }
  ExpectSameSum(rows.ReadGradient(0), alone.ReadGradient(0));
  ExpectSumOfGradients(sharded.ReadGradient(0), {other}, {kRounds});
}

// One engine has one order of its own.
TEST_P(Replicas, AreRefusedInDeterministicModeUnlessOneIsAlone) {
  const HeadSpec spec = MakeReplicaProblems(1, ReplicaOptions())[0].heads[0].spec;
  const auto group = Group(/*deterministic=*/true);
  const std::string expected = count() == 1 ? "OK" : ErrorReasonName(ErrorReason::kInvalidCombination);
  EXPECT_EQ(ReasonOf(group->PlanHead(spec)), expected);
  EXPECT_EQ(ReasonOf(group->CreateHead(spec)), expected);
  EXPECT_OK(group->health());
}

}  // namespace headwater::testing
