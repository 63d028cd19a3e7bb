#include "tests/kernels/support/replica_suite.h"

#include "absl/time/time.h"
#include "headwater/kernels/error.h"
#include "tests/unit/run_threads.h"

namespace headwater::testing {
namespace {

// Longer than anything takes that is not stuck.
constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr double kRate = 0.01;

constexpr HeadTensor kState[] = {HeadTensor::kWeight,        HeadTensor::kBias,          HeadTensor::kMasterWeight,
                                 HeadTensor::kMasterBias,    HeadTensor::kMoment1Weight, HeadTensor::kMoment1Bias,
                                 HeadTensor::kMoment2Weight, HeadTensor::kMoment2Bias};

ProblemOptions Options(uint64_t seed, bool jsd) {
  return {.rows = 53,
          .vocab_size = 211,
          .bias = true,
          .token_weights = true,
          .label_smoothing = jsd ? 0.0 : 0.1,
          .jsd = jsd,
          .staging_slots = 1,
          .seed = seed};
}

}  // namespace

ReplicaHeads::ReplicaHeads(LossEngine& of, const Problem& problem, Parallelism parallelism) : engine(of) {
  for (const TestHead& test_head : problem.heads) {
    HeadSpec spec = test_head.spec;
    spec.parallelism = parallelism;
    auto head = engine.CreateHead(spec);
    EXPECT_TRUE(head.ok()) << head.status();
    heads.push_back(*std::move(head));
    pointers.push_back(heads.back().get());
    WriteTensorValues(*pointers.back(), HeadTensor::kWeight, test_head.weight);
    if (spec.has_bias) WriteTensorValues(*pointers.back(), HeadTensor::kBias, test_head.bias);
  }
}

Outcome ReplicaHeads::Compute(const Problem& problem, ComputeOptions options, RowFlow* flow,
                              std::unique_ptr<StagedContribution>* staged) {
  PreparedMicroBatch prepared(problem, pointers, options);
  prepared.micro_batch.flow = flow;
  Outcome outcome;
  auto result = engine.Compute(prepared.micro_batch);
  EXPECT_TRUE(result.ok()) << result.status();
  if (!result.ok()) return outcome;
  prepared.Collect(*result, &outcome);
  if (staged != nullptr) *staged = std::move(result->staged);
  return outcome;
}

Gradient ReplicaHeads::ReadGradient() {
  const auto read = [this](HeadTensor tensor) {
    const std::vector<double> values = ReadTensorValues(head(), tensor);
    return std::vector<float>(values.begin(), values.end());
  };
  Gradient gradient = {.weight = read(HeadTensor::kGradWeight)};
  if (head().spec().has_bias) gradient.bias = read(HeadTensor::kGradBias);
  return gradient;
}

std::vector<Problem> MakeReplicaProblems(size_t count, bool jsd, DataType type) {
  std::vector<Problem> problems;
  for (uint64_t seed = 1; seed <= count; ++seed) {
    ProblemOptions options = WithType(Options(seed, jsd), type);
    Problem problem = MakeProblem(options);
    for (TestHead& head : problem.heads) head.spec.optimizer = head.spec.trainable ? OptimizerSpec(AdamWSpec()) : std::monostate();
    if (!problems.empty()) problem.heads = problems.front().heads;
    problems.push_back(std::move(problem));
  }
  return problems;
}

bool Meeting::Arrive() {
  const auto all_here = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return arrived_ >= count_; };
  absl::MutexLock lock(&mutex_);
  ++arrived_;
  return mutex_.AwaitWithTimeout(absl::Condition(&all_here), kPatience);
}

// One micro-batch on each rank, all at the same time.
std::vector<Outcome> ComputeAtOnce(ReplicaHeads& heads, const std::vector<Problem>& problems) {
  std::vector<Outcome> outcomes(problems.size());
  Meeting meeting(problems.size());
  RunThreads(problems.size(), [&](int64_t i) {
    MeetingFlow flow(&meeting);
    outcomes[i] = heads.Compute(problems[i], {}, &flow);
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

OptimizerStep ReplicaStep(int64_t update_count) {
  return {.learning_rate = kRate, .gradient_multiplier = 0.5, .settings = AdamWSpec(), .update_count = update_count};
}

// Really at the same time: each waits for the others. And each has the bits of one engine.
TEST_P(Replicas, ComputeConcurrentMicroBatchesWithTheBitsOfOneEngine) {
  for (const bool jsd : {false, true}) {
    SCOPED_TRACE(jsd ? "JSD" : "cross entropy");
    const std::vector<Problem> problems = MakeReplicaProblems(count(), jsd);
    const auto group = Group();
    ReplicaHeads heads(*group, problems[0], Parallelism::kRows);
    const std::vector<Outcome> outcomes = ComputeAtOnce(heads, problems);
    const auto one = One();
    for (size_t i = 0; i < count(); ++i) {
      ReplicaHeads alone(*one, problems[0], Parallelism::kVocabulary);
      EXPECT_TRUE(outcomes[i].BitwiseEquals(alone.Compute(problems[i]))) << i;
    }
    ExpectSumOfGradients(heads.ReadGradient(), problems, std::vector<double>(count(), 1));
    // Reading it has changed nothing, and another contribution is added to the sum.
    const Gradient sum = heads.ReadGradient();
    EXPECT_TRUE(heads.ReadGradient() == sum);
    heads.Compute(problems[0]);
    std::vector<double> factors(count(), 1);
    factors[0] = 2;
    ExpectSumOfGradients(heads.ReadGradient(), problems, factors);
    ASSERT_TRUE(heads.head().ZeroGradient().ok());
    ExpectGradientZero(heads.ReadGradient());
  }
}

// As many contributions as the ranks have slots, each on another rank; committed in another order, with factors, and dropped.
TEST_P(Replicas, StageOnEveryRankAndCommitThere) {
  const std::vector<Problem> problems = MakeReplicaProblems(count(), false);
  const auto group = Group();
  ReplicaHeads heads(*group, problems[0], Parallelism::kRows);
  EXPECT_TRUE(heads.head().StagesConcurrently());
  EXPECT_EQ(heads.head().FreeStagingSlots(), ranks());
  const ComputeOptions stage = {.grad_weight = GradWeightMode::kStage};
  std::vector<std::unique_ptr<StagedContribution>> staged(count());
  for (size_t i = 0; i < count(); ++i) {
    heads.Compute(problems[i], stage, nullptr, &staged[i]);
    ASSERT_NE(staged[i], nullptr);
  }
  EXPECT_EQ(heads.head().FreeStagingSlots(), 0);
  {
    // No slot is left, which is reported before the flow is asked for anything.
    PreparedMicroBatch prepared(problems[0], heads.pointers, stage);
    MeetingFlow flow(nullptr, absl::InternalError("asked"));
    prepared.micro_batch.flow = &flow;
    EXPECT_TRUE(HasReason(group->Compute(prepared.micro_batch).status(), ErrorReason::kStagingFull));
    prepared.ExpectOutputsUntouched();
  }
  ExpectGradientZero(heads.ReadGradient());
  std::vector<double> factors(count(), 0);
  for (size_t i = count(); i > 0; --i) {
    if (i == 2) {
      staged[i - 1].reset();
      continue;
    }
    factors[i - 1] = static_cast<double>(i) - 2.5;
    ASSERT_TRUE(staged[i - 1]->Commit(factors[i - 1]).ok());
  }
  ExpectSumOfGradients(heads.ReadGradient(), problems, factors);
  EXPECT_EQ(heads.head().FreeStagingSlots(), ranks());
  // The ranks have learned of it, too.
  for (size_t i = 0; i < count(); ++i) {
    heads.Compute(problems[i], stage, nullptr, &staged[i]);
    ASSERT_NE(staged[i], nullptr);
  }
}

// A caller that gives up costs nothing and leaves nothing.
TEST_P(Replicas, ARefusedDecisionAddsNothing) {
  const std::vector<Problem> problems = MakeReplicaProblems(1, false);
  const auto group = Group();
  ReplicaHeads heads(*group, problems[0], Parallelism::kRows);
  for (const GradWeightMode mode : {GradWeightMode::kAccumulate, GradWeightMode::kStage}) {
    PreparedMicroBatch prepared(problems[0], heads.pointers, ComputeOptions{.grad_weight = mode});
    MeetingFlow flow(nullptr, MakeError(ErrorReason::kCancelled, "the caller gives up"));
    prepared.micro_batch.flow = &flow;
    EXPECT_TRUE(HasReason(group->Compute(prepared.micro_batch).status(), ErrorReason::kCancelled));
    ExpectGradientZero(heads.ReadGradient());
    EXPECT_EQ(heads.head().FreeStagingSlots(), ranks());
    EXPECT_TRUE(group->health().ok()) << group->health();
  }
  heads.Compute(problems[0]);
  ExpectSumOfGradients(heads.ReadGradient(), problems, {1});
}

TEST_P(Replicas, DigestTheRowsAsOneEngine) {
  const std::vector<Problem> problems = MakeReplicaProblems(1, true);
  const auto digest_of = [&](LossEngine& engine, Parallelism parallelism) {
    ReplicaHeads heads(engine, problems[0], parallelism);
    PreparedMicroBatch prepared(problems[0], heads.pointers, {});
    MeetingFlow flow(nullptr);
    prepared.micro_batch.flow = &flow;
    prepared.micro_batch.digest_rows = true;
    EXPECT_TRUE(engine.Compute(prepared.micro_batch).ok());
    return flow.digest;
  };
  EXPECT_EQ(digest_of(*Group(), Parallelism::kRows), digest_of(*One(), Parallelism::kVocabulary));
}

// Several steps of AdamW: the accumulators' sum goes into one update, and all ranks continue with the same weights.
TEST_P(Replicas, UpdateTheWeightsTogether) {
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
    SCOPED_TRACE(DataTypeName(type));
    const std::vector<Problem> problems = MakeReplicaProblems(count(), false, type);
    const auto group = Group();
    ReplicaHeads heads(*group, problems[0], Parallelism::kRows);
    const auto one = One();
    ReplicaHeads alone(*one, problems[0], Parallelism::kVocabulary);
    for (int64_t update = 1; update <= 3; ++update) {
      ComputeAtOnce(heads, problems);
      const auto stats = heads.head().ComputeGradientStats();
      ASSERT_TRUE(stats.ok()) << stats.status();
      // The same sum, so that the update must have the same bits.
      const Gradient gradient = heads.ReadGradient();
      double norm_squared = 0;
      for (const std::vector<float>* part : {&gradient.weight, &gradient.bias}) {
        for (const float value : *part) norm_squared += static_cast<double>(value) * value;
      }
      EXPECT_NEAR(stats->norm_squared / norm_squared, 1, 1e-6);
      EXPECT_EQ(stats->non_finite_count, 0);
      ASSERT_TRUE(alone.head()
                      .WriteTensor(HeadTensor::kGradWeight, 0, static_cast<int64_t>(gradient.weight.size()), gradient.weight.data())
                      .ok());
      ASSERT_TRUE(alone.head()
                      .WriteTensor(HeadTensor::kGradBias, 0, static_cast<int64_t>(gradient.bias.size()), gradient.bias.data())
                      .ok());
      ASSERT_TRUE(alone.head().ApplyOptimizer(ReplicaStep(update)).ok());
      ASSERT_TRUE(heads.head().ApplyOptimizer(ReplicaStep(update)).ok());
      for (const HeadTensor tensor : kState) {
        EXPECT_EQ(ReadTensorValues(heads.head(), tensor), ReadTensorValues(alone.head(), tensor)) << HeadTensorName(tensor);
      }
      ExpectGradientZero(heads.ReadGradient());
    }
    // Every rank computes with them.
    const std::vector<Problem> same(count(), problems[0]);
    const Outcome expected = alone.Compute(problems[0]);
    for (const Outcome& outcome : ComputeAtOnce(heads, same)) EXPECT_TRUE(outcome.BitwiseEquals(expected));
  }
}

// State goes over to a head of the other kind, and back.
TEST_P(Replicas, HaveTheTensorsOfAnyOtherHead) {
  const std::vector<Problem> problems = MakeReplicaProblems(count(), false, DataType::kBFloat16);
  const auto group = Group();
  ReplicaHeads heads(*group, problems[0], Parallelism::kRows);
  ComputeAtOnce(heads, problems);
  ASSERT_TRUE(heads.head().ApplyOptimizer(ReplicaStep(1)).ok());
  const auto other_group = GetParam().make_group(GetParam().other_weights);
  ReplicaHeads sharded(*other_group, problems[0], Parallelism::kVocabulary);
  const auto last_group = GetParam().make_group(GetParam().last_weights);
  ReplicaHeads back(*last_group, problems[0], Parallelism::kRows);
  // The masters last: a write of the weights sets them, as a checkpoint's tensors are ordered.
  const auto copy = [](ReplicaHeads& from, ReplicaHeads& to) {
    for (const HeadTensor tensor : kState) {
      WriteTensorValues(to.head(), tensor, ReadTensorValues(from.head(), tensor));
    }
  };
  copy(heads, sharded);
  copy(sharded, back);
  for (const HeadTensor tensor : kState) {
    EXPECT_EQ(ReadTensorValues(back.head(), tensor), ReadTensorValues(heads.head(), tensor)) << HeadTensorName(tensor);
  }
  // A range that begins and ends in the middle of shards.
  std::vector<float> range(1500, 0.25F);
  ASSERT_TRUE(heads.head().WriteTensor(HeadTensor::kMasterWeight, 1111, 1500, range.data()).ok());
  ASSERT_TRUE(sharded.head().WriteTensor(HeadTensor::kMasterWeight, 1111, 1500, range.data()).ok());
  for (const HeadTensor tensor : {HeadTensor::kWeight, HeadTensor::kMasterWeight}) {
    EXPECT_EQ(ReadTensorValues(heads.head(), tensor), ReadTensorValues(sharded.head(), tensor));
  }
  ASSERT_TRUE(heads.head().AddToGradient(HeadTensor::kGradWeight, 1111, 1500, 2, range.data()).ok());
  const std::vector<double> gradient = ReadTensorValues(heads.head(), HeadTensor::kGradWeight);
  for (size_t i = 0; i < gradient.size(); ++i) ASSERT_EQ(gradient[i], i >= 1111 && i < 2611 ? 0.5 : 0) << i;
}

}  // namespace headwater::testing
