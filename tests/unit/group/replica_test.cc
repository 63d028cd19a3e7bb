// Heads that every rank of a group has all of (Parallelism::kRows): one engine's results, whichever rank computes them; several
// micro-batches at once; one gradient, one optimizer step, and weights that stay the same everywhere.
#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "headwater/kernels/communicator.h"
#include "headwater/kernels/digest.h"
#include "headwater/kernels/error.h"
#include "server/group/group_engine.h"
#include "server/group/rank_loads.h"
#include "tests/kernels/comparison.h"
#include "tests/kernels/engine_run.h"
#include "tests/kernels/problem.h"
#include "tests/unit/group/worker_threads.h"

namespace headwater::testing {
namespace {

// Longer than anything takes that is not stuck.
constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr double kRate = 0.01;

EngineOptions Alone() {
  EngineOptions options;
  options.thread_count = 1;
  options.token_chunk_rows = 16;
  return options;
}

EngineOptions Ranks(int32_t count) {
  EngineOptions options = Alone();
  options.shard_count = count;
  const std::vector<int64_t> uneven = {3, 1, 2, 2};
  options.shard_weights.assign(uneven.begin(), uneven.begin() + count);
  return options;
}

// Each rank with one thread.
std::unique_ptr<LossEngine> MakeGroup(EngineOptions options, bool links) {
  if (links) {
    auto group = ThreadedGroup::Create(options);
    EXPECT_TRUE(group.ok()) << group.status();
    return group.ok() ? *std::move(group) : nullptr;
  }
  options.thread_count = options.shard_count;
  auto group = group::CreateLocalCpuGroup(options);
  EXPECT_TRUE(group.ok()) << group.status();
  return group.ok() ? *std::move(group) : nullptr;
}

std::unique_ptr<LossEngine> MakeOne(const EngineOptions& options = Alone()) {
  auto engine = CreateCpuEngine(options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return *std::move(engine);
}

// A problem's heads on an engine, with the rows of the problem in parts.
struct Heads {
  Heads(LossEngine& of, const Problem& problem, Parallelism parallelism) : engine(of) {
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

  EngineHead& head() { return *pointers[0]; }

  Outcome Compute(const Problem& problem, ComputeOptions options = {}, RowFlow* flow = nullptr,
                  std::unique_ptr<StagedContribution>* staged = nullptr) {
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

  Gradient ReadGradient() {
    const auto read = [this](HeadTensor tensor) {
      const std::vector<double> values = ReadTensorValues(head(), tensor);
      return std::vector<float>(values.begin(), values.end());
    };
    Gradient gradient;
    gradient.weight = read(HeadTensor::kGradWeight);
    if (head().spec().has_bias) gradient.bias = read(HeadTensor::kGradBias);
    return gradient;
  }

  LossEngine& engine;
  std::vector<std::unique_ptr<EngineHead>> heads;
  std::vector<EngineHead*> pointers;
};

ProblemOptions Options(uint64_t seed, bool jsd) {
  ProblemOptions options;
  options.rows = 53;
  options.vocab_size = 211;
  options.bias = true;
  options.token_weights = true;
  options.label_smoothing = jsd ? 0 : 0.1;
  options.jsd = jsd;
  options.staging_slots = 1;
  options.seed = seed;
  return options;
}

// Rows of several micro-batches for the first one's heads.
std::vector<Problem> MakeProblems(size_t count, bool jsd, DataType type = DataType::kFloat32) {
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

// Where as many computations meet as there are ranks: each waits for the others in the middle of its own.
class Meeting {
 public:
  explicit Meeting(size_t count) : count_(count) {}
  bool Arrive() {
    const auto all_here = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return arrived_ >= count_; };
    absl::MutexLock lock(&mutex_);
    ++arrived_;
    return mutex_.AwaitWithTimeout(absl::Condition(&all_here), kPatience);
  }

 private:
  const size_t count_;
  absl::Mutex mutex_;
  size_t arrived_ ABSL_GUARDED_BY(mutex_) = 0;
};

class MeetingFlow final : public RowFlow {
 public:
  MeetingFlow(Meeting* meeting, absl::Status decision = absl::OkStatus()) : meeting_(meeting), decision_(std::move(decision)) {}
  absl::Status AwaitRows(int64_t) override { return absl::OkStatus(); }
  absl::Status Decide(const DigestBuilder* rows) override {
    if (rows != nullptr) digest = rows->Finish("test");
    if (meeting_ != nullptr && !meeting_->Arrive()) return absl::DeadlineExceededError("the others are not computed at this time");
    return decision_;
  }
  void GradHiddenReady(int64_t row_end) override {
    EXPECT_GE(row_end, rows_ready);
    rows_ready = row_end;
  }

  Digest digest{};
  int64_t rows_ready = 0;

 private:
  Meeting* const meeting_;
  const absl::Status decision_;
};

// One micro-batch on each rank, all at the same time.
std::vector<Outcome> ComputeAtOnce(Heads& heads, const std::vector<Problem>& problems) {
  std::vector<Outcome> outcomes(problems.size());
  Meeting meeting(problems.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < problems.size(); ++i) {
    threads.emplace_back([&, i] {
      MeetingFlow flow(&meeting);
      outcomes[i] = heads.Compute(problems[i], {}, &flow);
      EXPECT_EQ(flow.rows_ready, problems[i].rows);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

void ExpectSumOfGradients(Heads& heads, const std::vector<Problem>& problems, const std::vector<double>& factors) {
  Expected first = ComputeExpected(problems[0]);
  reference::HeadGradient sum = Combine(first.gradient(0), factors[0], first.gradient(0), 0);
  for (size_t i = 1; i < problems.size(); ++i) sum = Combine(sum, 1, ComputeExpected(problems[i]).gradient(0), factors[i]);
  ExpectGradientNear(heads.ReadGradient(), sum);
}

OptimizerStep Step(int64_t update_count) {
  OptimizerStep step;
  step.learning_rate = kRate;
  step.gradient_multiplier = 0.5;
  step.settings = AdamWSpec();
  step.update_count = update_count;
  return step;
}

constexpr HeadTensor kState[] = {HeadTensor::kWeight,        HeadTensor::kBias,          HeadTensor::kMasterWeight,
                                 HeadTensor::kMasterBias,    HeadTensor::kMoment1Weight, HeadTensor::kMoment1Bias,
                                 HeadTensor::kMoment2Weight, HeadTensor::kMoment2Bias};

class Replicas : public ::testing::TestWithParam<std::tuple<int32_t, bool>> {
 protected:
  int32_t ranks() const { return std::get<0>(GetParam()); }
  size_t count() const { return static_cast<size_t>(ranks()); }
  std::unique_ptr<LossEngine> Group() const { return MakeGroup(Ranks(ranks()), std::get<1>(GetParam())); }
};

// Really at the same time: each waits for the others. And each has the bits of one engine.
TEST_P(Replicas, ComputeAsManyMicroBatchesAtOnceWithTheBitsOfOneEngine) {
  for (const bool jsd : {false, true}) {
    SCOPED_TRACE(jsd ? "JSD" : "cross entropy");
    const std::vector<Problem> problems = MakeProblems(count(), jsd);
    const auto group = Group();
    Heads heads(*group, problems[0], Parallelism::kRows);
    const std::vector<Outcome> outcomes = ComputeAtOnce(heads, problems);
    const auto one = MakeOne();
    for (size_t i = 0; i < count(); ++i) {
      Heads alone(*one, problems[0], Parallelism::kVocabulary);
      EXPECT_TRUE(outcomes[i].BitwiseEquals(alone.Compute(problems[i]))) << i;
    }
    ExpectSumOfGradients(heads, problems, std::vector<double>(count(), 1));
    // Reading it has changed nothing, and another contribution is added to the sum.
    const Gradient sum = heads.ReadGradient();
    EXPECT_TRUE(heads.ReadGradient() == sum);
    heads.Compute(problems[0]);
    std::vector<double> factors(count(), 1);
    factors[0] = 2;
    ExpectSumOfGradients(heads, problems, factors);
    ASSERT_TRUE(heads.head().ZeroGradient().ok());
    ExpectGradientZero(heads.ReadGradient());
  }
}

// As many contributions as the ranks have slots, each on another rank; committed in another order, with factors, and dropped.
TEST_P(Replicas, StageOnEveryRankAndCommitThere) {
  const std::vector<Problem> problems = MakeProblems(count(), false);
  const auto group = Group();
  Heads heads(*group, problems[0], Parallelism::kRows);
  EXPECT_TRUE(heads.head().StagesConcurrently());
  EXPECT_EQ(heads.head().FreeStagingSlots(), ranks());
  ComputeOptions stage;
  stage.grad_weight = GradWeightMode::kStage;
  std::vector<std::unique_ptr<StagedContribution>> staged(count());
  for (size_t i = 0; i < count(); ++i) {
    heads.Compute(problems[i], stage, nullptr, &staged[i]);
    ASSERT_NE(staged[i], nullptr);
  }
  EXPECT_EQ(heads.head().FreeStagingSlots(), 0);
  {
    // No slot is left, which is told before the flow is asked for anything.
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
  ExpectSumOfGradients(heads, problems, factors);
  EXPECT_EQ(heads.head().FreeStagingSlots(), ranks());
  // The ranks have learned of it, too.
  for (size_t i = 0; i < count(); ++i) {
    heads.Compute(problems[i], stage, nullptr, &staged[i]);
    ASSERT_NE(staged[i], nullptr);
  }
}

// A caller that gives up costs nothing and leaves nothing.
TEST_P(Replicas, ARefusedDecisionAddsNothing) {
  const std::vector<Problem> problems = MakeProblems(1, false);
  const auto group = Group();
  Heads heads(*group, problems[0], Parallelism::kRows);
  for (const GradWeightMode mode : {GradWeightMode::kAccumulate, GradWeightMode::kStage}) {
    ComputeOptions options;
    options.grad_weight = mode;
    PreparedMicroBatch prepared(problems[0], heads.pointers, options);
    MeetingFlow flow(nullptr, MakeError(ErrorReason::kCancelled, "the caller gives up"));
    prepared.micro_batch.flow = &flow;
    EXPECT_TRUE(HasReason(group->Compute(prepared.micro_batch).status(), ErrorReason::kCancelled));
    ExpectGradientZero(heads.ReadGradient());
    EXPECT_EQ(heads.head().FreeStagingSlots(), ranks());
    EXPECT_TRUE(group->health().ok()) << group->health();
  }
  heads.Compute(problems[0]);
  ExpectSumOfGradients(heads, problems, {1});
}

TEST_P(Replicas, DigestTheRowsAsOneEngine) {
  const std::vector<Problem> problems = MakeProblems(1, true);
  const auto digest_of = [&](LossEngine& engine, Parallelism parallelism) {
    Heads heads(engine, problems[0], parallelism);
    PreparedMicroBatch prepared(problems[0], heads.pointers, {});
    MeetingFlow flow(nullptr);
    prepared.micro_batch.flow = &flow;
    prepared.micro_batch.digest_rows = true;
    EXPECT_TRUE(engine.Compute(prepared.micro_batch).ok());
    return flow.digest;
  };
  EXPECT_EQ(digest_of(*Group(), Parallelism::kRows), digest_of(*MakeOne(), Parallelism::kVocabulary));
}

// Several steps of AdamW: what the accumulators hold goes into one update, and all ranks go on with the same weights.
TEST_P(Replicas, UpdateTheWeightsTogether) {
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
    SCOPED_TRACE(DataTypeName(type));
    const std::vector<Problem> problems = MakeProblems(count(), false, type);
    const auto group = Group();
    Heads heads(*group, problems[0], Parallelism::kRows);
    const auto one = MakeOne();
    Heads alone(*one, problems[0], Parallelism::kVocabulary);
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
      ASSERT_TRUE(alone.head().ApplyOptimizer(Step(update)).ok());
      ASSERT_TRUE(heads.head().ApplyOptimizer(Step(update)).ok());
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
  const std::vector<Problem> problems = MakeProblems(count(), false, DataType::kBFloat16);
  const auto group = Group();
  Heads heads(*group, problems[0], Parallelism::kRows);
  ComputeAtOnce(heads, problems);
  ASSERT_TRUE(heads.head().ApplyOptimizer(Step(1)).ok());
  const auto other_group = MakeGroup(Ranks(3), false);
  Heads sharded(*other_group, problems[0], Parallelism::kVocabulary);
  const auto last_group = MakeGroup(Ranks(2), false);
  Heads back(*last_group, problems[0], Parallelism::kRows);
  // The masters last: a write of the weights sets them, as a checkpoint's tensors are ordered.
  const auto copy = [](Heads& from, Heads& to) {
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

INSTANTIATE_TEST_SUITE_P(Ranks, Replicas,
                         ::testing::Values(std::tuple(1, false), std::tuple(2, false), std::tuple(3, false), std::tuple(4, false),
                                           std::tuple(2, true), std::tuple(3, true), std::tuple(4, true)),
                         [](const auto& test) {
                           return std::to_string(std::get<0>(test.param)) + (std::get<1>(test.param) ? "Linked" : "Local");
                         });

TEST(ReplicaPlan, HasAllWeightsOnEachRankAndTheOptimizerStateOnce) {
  HeadSpec spec = MakeProblems(1, false, DataType::kBFloat16)[0].heads[0].spec;
  const int64_t elements = spec.vocab_size * spec.hidden_size;
  const auto one = MakeOne()->PlanHead(spec);
  const auto group = MakeGroup(Ranks(3), false);
  spec.parallelism = Parallelism::kRows;
  const auto plan = group->PlanHead(spec);
  ASSERT_TRUE(one.ok() && plan.ok()) << plan.status();
  for (size_t i = 0; i < plan->items.size(); ++i) {
    const MemoryPlan::Item& item = plan->items[i];
    ASSERT_EQ(item.purpose, one->items[i].purpose);
    const bool once = item.purpose == "master_weight" || item.purpose == "optimizer_state";
    const int64_t exchange = item.purpose == "workspace" ? 3 * 3 * kReduceScatterBytes : 0;
    EXPECT_EQ(item.bytes, (once ? 1 : 3) * one->items[i].bytes + exchange) << item.purpose;
  }
  EXPECT_EQ(plan->items[0].bytes, 3 * elements * 2);
  EXPECT_EQ(plan->token_chunk_rows, one->token_chunk_rows);
  // It does not fit where its shards would.
  EngineOptions small = Ranks(3);
  small.memory_budget_bytes = plan->total_bytes - 1;
  const auto small_group = MakeGroup(small, false);
  EXPECT_TRUE(HasReason(small_group->CreateHead(spec).status(), ErrorReason::kMemoryBudgetExceeded));
  EXPECT_EQ(small_group->planned_bytes(), 0);
  small.memory_budget_bytes = plan->total_bytes;
  EXPECT_TRUE(MakeGroup(small, false)->CreateHead(spec).ok());
}

TEST(ReplicaRefusals, AreClear) {
  const std::vector<Problem> problems = MakeProblems(1, true);
  HeadSpec spec = problems[0].heads[0].spec;
  spec.parallelism = Parallelism::kRows;
  EngineOptions deterministic = Ranks(2);
  deterministic.deterministic = true;
  for (const bool links : {false, true}) {
    const auto group = MakeGroup(deterministic, links);
    EXPECT_TRUE(HasReason(group->PlanHead(spec).status(), ErrorReason::kInvalidCombination));
    EXPECT_TRUE(HasReason(group->CreateHead(spec).status(), ErrorReason::kInvalidCombination));
    EXPECT_TRUE(group->health().ok());
  }
  // One engine has one order of its own.
  EngineOptions alone = Alone();
  alone.deterministic = true;
  EXPECT_TRUE(MakeOne(alone)->CreateHead(spec).ok());
  // A student and a teacher of two kinds do not meet.
  const auto group = MakeGroup(Ranks(2), false);
  Heads rows(*group, problems[0], Parallelism::kRows);
  Heads sharded(*group, problems[0], Parallelism::kVocabulary);
  PreparedMicroBatch prepared(problems[0], {rows.pointers[0], sharded.pointers[1]}, {});
  EXPECT_TRUE(HasReason(group->Compute(prepared.micro_batch).status(), ErrorReason::kInvalidCombination));
  prepared.ExpectOutputsUntouched();
}

// Heads of both kinds live side by side, and their calls do not disturb each other.
TEST(ReplicaCalls, MixWithThoseOfShardedHeads) {
  const std::vector<Problem> problems = MakeProblems(3, false);
  const auto group = MakeGroup(Ranks(3), true);
  Heads rows(*group, problems[0], Parallelism::kRows);
  Heads sharded(*group, problems[0], Parallelism::kVocabulary);
  constexpr int kRounds = 20;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < problems.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < kRounds; ++round) rows.Compute(problems[i]);
    });
  }
  for (int round = 0; round < kRounds; ++round) sharded.Compute(problems[0]);
  for (std::thread& thread : threads) thread.join();
  ExpectSumOfGradients(rows, problems, {kRounds, kRounds, kRounds});
  ExpectSumOfGradients(sharded, {problems[0]}, {kRounds});
}

// A worker goes while a micro-batch is in the middle of its computation on the leader's own rank: the group is lost to both.
TEST(ReplicaFailure, ARankThatIsGoneLosesTheGroupWhateverTheOthersCompute) {
  const std::vector<Problem> problems = MakeProblems(2, false);
  auto made = ThreadedGroup::Create(Ranks(2));
  ASSERT_TRUE(made.ok()) << made.status();
  ThreadedGroup& group = **made;
  Heads heads(group, problems[0], Parallelism::kRows);
  // Both are computing when it goes.
  class CuttingFlow final : public RowFlow {
   public:
    CuttingFlow(Meeting& meeting, std::function<void()> cut) : meeting_(meeting), cut_(std::move(cut)) {}
    absl::Status AwaitRows(int64_t) override { return absl::OkStatus(); }
    absl::Status Decide(const DigestBuilder*) override {
      if (!meeting_.Arrive()) return absl::DeadlineExceededError("not at the same time");
      cut_();
      return absl::OkStatus();
    }
    void GradHiddenReady(int64_t) override {}

   private:
    Meeting& meeting_;
    const std::function<void()> cut_;
  };
  Meeting meeting(2);
  std::vector<absl::Status> answers(2);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      PreparedMicroBatch prepared(problems[i], heads.pointers, {});
      CuttingFlow flow(meeting, [&] { group.Cut(1); });
      prepared.micro_batch.flow = &flow;
      answers[i] = group.Compute(prepared.micro_batch).status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  // The rank that is gone cannot have answered; the other one perhaps before anybody knew.
  EXPECT_TRUE(HasReason(answers[0], ErrorReason::kEngineFailed) || HasReason(answers[1], ErrorReason::kEngineFailed))
      << answers[0] << ", " << answers[1];
  EXPECT_TRUE(HasReason(group.health(), ErrorReason::kEngineFailed)) << group.health();
  for (const size_t i : {size_t{0}, size_t{1}}) {
    PreparedMicroBatch prepared(problems[i], heads.pointers, {});
    EXPECT_EQ(group.Compute(prepared.micro_batch).status(), group.health());
  }
  EXPECT_EQ(heads.head().ApplyOptimizer(Step(1)), group.health());
  EXPECT_FALSE(group.AwaitEnd(1).ok());
}

TEST(RankLoads, GiveToWhoHasLeastAndTakes) {
  group::RankLoads loads(3);
  const auto any = [](size_t) { return true; };
  std::optional<group::RankLoads::Share> a, b, c, d, none;
  loads.Give(10, any, &a);
  EXPECT_EQ(a->rank(), 0U);
  loads.Give(5, any, &b);
  EXPECT_EQ(b->rank(), 1U);
  loads.Give(0, any, &c);
  EXPECT_EQ(c->rank(), 2U);  // counts as one row
  loads.Give(1, any, &d);
  EXPECT_EQ(d->rank(), 2U);
  std::vector<size_t> asked;
  loads.Give(
      1,
      [&](size_t rank) {
        asked.push_back(rank);
        return false;
      },
      &none);
  EXPECT_FALSE(none.has_value());
  EXPECT_EQ(asked, (std::vector<size_t>{2, 1, 0}));
  a.reset();
  loads.Give(1, any, &none);
  EXPECT_EQ(none->rank(), 0U);
}

}  // namespace
}  // namespace headwater::testing
