// CudaEngine as the ranks of a group, one GPU each: the results of a single engine, for every option, however rows and shards are
// cut. Repetitions have the same bits. Failures of a rank end the group as specified. Calls are those of the engine that a server
// drives, or where a test says so each rank's own. Skipped where there are fewer GPUs than ranks, unless they share one
// (cuda_group.h).
#include "tests/kernels/cuda/cuda_group.h"

#include <chrono>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/error.h"
#include "tests/kernels/cuda/cuda_group_heads.h"
#include "tests/kernels/cuda/cuda_support.h"
#include "tests/kernels/cuda/cuda_test_environment.h"
#include "tests/kernels/support/checked_flow.h"
#include "tests/kernels/support/comparison.h"
#include "tests/kernels/support/engine_run.h"
#include "tests/kernels/support/kernel_suite.h"
#include "tests/kernels/support/problem.h"
#include "tests/kernels/support/replica_suite.h"
#include "tests/unit/expect_status.h"

namespace headwater::testing {
namespace {

const bool kSkipsWithoutGpu = SkipTestsWithoutGpu();

// Far longer than anything here takes, and far shorter than a hang.
constexpr auto kSoon = std::chrono::seconds(30);

std::vector<ProblemOptions> DivergenceCases() {
  std::vector<ProblemOptions> cases;
  for (const double beta : {0.0, 0.4, 1.0}) {
    ProblemOptions options = {.name = "Jsd" + std::to_string(beta), .jsd = true, .beta = beta, .teacher_hidden_size = 23};
    cases.push_back(options);
    options.name += "WithEverything";
    options.bias = true;
    options.hard_loss_weight = 0.3;
    options.student_temperature = 1.7;
    options.teacher_temperature = 0.8;
    options.label_smoothing = 0.1;
    options.token_weights = true;
    options.class_weights = true;
    options.valid_vocab_size = 90;
    cases.push_back(options);
  }
  return cases;
}

// Divergences that a rank of Hopper GPUs computes by passes of its own (kernels/cuda/rows/divergence_shards.h). They have flat and
// confident rows, some of which disagree, columns that one side lacks, ranks without a column, and rows enough for two parts.
std::vector<ProblemOptions> ShardPassCases() {
  std::vector<ProblemOptions> cases;
  for (const double beta : {0.0, 0.1, 0.5, 1.0}) {
    ProblemOptions options = {.name = "Jsd" + std::to_string(beta), .jsd = true, .beta = beta, .teacher_hidden_size = 40};
    cases.push_back(options);
    options.logit_spread = 15;
    options.name += "Confident";
    cases.push_back(options);
    options.logit_spread = 3;
    options.name += "Tempered";
    options.student_temperature = 1.7;
    options.teacher_temperature = 0.8;
    options.logit_scale = 0.7;
    options.token_weights = true;
    options.valid_vocab_size = 90;
    cases.push_back(options);
    options.name += "OfThreeColumns";
    options.vocab_size = 3;
    options.valid_vocab_size = 0;
    cases.push_back(options);
    options.name += "AndManyRows";
    options.vocab_size = 301;
    options.rows = 1100;
    cases.push_back(options);
  }
  return cases;
}

// Many rows, so that Hopper computes exponentials; without options that exponentials do not have.
std::vector<ProblemOptions> ExponentialCases() {
  std::vector<ProblemOptions> cases;
  for (ProblemOptions options : CrossEntropyOptionCases()) {
    if (options.label_smoothing > 0 || options.entropy_factors) continue;
    options.rows = 400;
    options.head_type = options.hidden_type = DataType::kBFloat16;
    cases.push_back(options);
  }
  return cases;
}

// One case of each form in which ranks compute.
std::vector<ProblemOptions> FormCases() {
  return {CrossEntropyOptionCases().back(), DivergenceCases().back(), ExponentialCases().front(), ShardPassCases().back()};
}

class CudaGroupTest : public CudaGroupCaseTest {
 protected:
  std::unique_ptr<LossEngine> Make(EngineOptions options = PlainOptions()) const {
    options.shard_count = ranks();
    options.shard_weights = GetParam().weights;
    return MakeCudaGroupEngine(options);
  }
};

// Without token outputs, which exponentials do not have (nor has a divergence any but the cross entropy's), and no gradient either.
constexpr ComputeOptions kPlain = {.token_outputs = false};
constexpr ComputeOptions kForward = {
    .backward = false, .grad_hidden = false, .token_outputs = false, .grad_weight = GradWeightMode::kNone};

void ExpectMatches(LossEngine& group, const ProblemOptions& options, const ComputeOptions& compute = {}) {
  SCOPED_TRACE(options.name + ", " + DataTypeName(options.head_type));
  const Problem problem = MakeProblem(options);
  LoadedHeads heads(group, problem.heads);
  ExpectHeadsMatch(heads, problem, ComputeExpected(problem), compute);
}

TEST_P(CudaGroupTest, EveryCrossEntropyMatchesTheReference) {
  const std::unique_ptr<LossEngine> group = Make();
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    for (const ProblemOptions& options : CrossEntropyOptionCases()) ExpectMatches(*group, WithType(options, type));
  }
}

TEST_P(CudaGroupTest, EveryDivergenceMatchesTheReference) {
  const std::unique_ptr<LossEngine> group = Make();
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    for (const ProblemOptions& options : DivergenceCases()) ExpectMatches(*group, WithType(options, type));
  }
}

TEST_P(CudaGroupTest, DivergencesWithoutTokenOutputsMatchTheReference) {
  const std::unique_ptr<LossEngine> group = Make();
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
    for (const ProblemOptions& options : ShardPassCases()) {
      ExpectMatches(*group, WithType(options, type), kPlain);
      ExpectMatches(*group, WithType(options, type), kForward);
    }
  }
}

// Student and teacher are cut at other columns then, and the ranks exchange the teacher's logits. The vocabularies have a few
// columns more or less, nothing in common with the student's on most ranks, and fewer classes than ranks.
TEST_P(CudaGroupTest, DivergencesBetweenOtherVocabulariesMatchTheReference) {
  const std::unique_ptr<LossEngine> group = Make();
  for (const int64_t teacher_vocab_size : {90, 104, 333, 3}) {
    SCOPED_TRACE("the teacher's vocabulary has " + std::to_string(teacher_vocab_size));
    for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
      for (ProblemOptions options : DivergenceCases()) {
        options.teacher_vocab_size = teacher_vocab_size;
        ExpectMatches(*group, WithType(options, type));
      }
    }
    // Where a row has two or three columns in common, the rounding of single entries of M decides; the bounds are for more columns.
    if (teacher_vocab_size < 10) continue;
    for (ProblemOptions options : ShardPassCases()) {
      options.teacher_vocab_size = teacher_vocab_size;
      ExpectMatches(*group, WithType(options, DataType::kBFloat16), kPlain);
    }
  }
}

TEST_P(CudaGroupTest, ExponentialsMatchTheReference) {
  const std::unique_ptr<LossEngine> group = Make();
  for (const ProblemOptions& options : ExponentialCases()) {
    ExpectMatches(*group, options, kPlain);
    ProblemOptions without_factors = options;  // those are the gradient's
    without_factors.lse_factors = false;
    ExpectMatches(*group, without_factors, kForward);
    ExpectMatches(*group, options, ComputeOptions{.grad_hidden = false, .token_outputs = false});
  }
  // Rows whose exponentials do not fit their offset are computed again as logits.
  ProblemOptions far = ExponentialCases().front();
  far.name = "Overflow";
  far.logit_spread = 120;
  ExpectMatches(*group, far, kPlain);
  // Factors that are too small to be divided by are applied on every rank, and not where the sum is written.
  ProblemOptions small = ExponentialCases().front();
  small.name = "Tiny factors";
  small.loss_scale = 1e-31;
  small.grad_hidden_scale = 1e31;
  ExpectMatches(*group, small, kPlain);
}

// Their offsets are made of the weights, and made again from these, whichever way they change.
TEST_P(CudaGroupTest, ExponentialsFollowTheWeights) {
  Problem problem = MakeProblem(ExponentialCases().front());
  problem.heads[0].spec.optimizer = AdamWSpec();
  const std::unique_ptr<LossEngine> group = Make();
  LoadedHeads heads(*group, problem.heads);
  std::vector<double>& weight = problem.heads[0].weight;
  for (const bool written : {false, true}) {
    heads.Compute(problem, kPlain);
    if (written) {
      for (double& value : weight) value = -value;
      WriteTensorValues(heads.head(0), HeadTensor::kWeight, weight);
    } else {
      EXPECT_OK(heads.head(0).ApplyOptimizer({.learning_rate = 0.1, .settings = AdamWSpec()}));
      weight = ReadTensorValues(heads.head(0), HeadTensor::kWeight);
    }
    heads.ZeroGradients();
    EXPECT_TRUE(heads.Compute(problem, kPlain).BitwiseEquals(LoadedHeads(*group, problem.heads).Compute(problem, kPlain)));
  }
}

TEST_P(CudaGroupTest, HowRowsAreCutDoesNotMatter) {
  for (const int64_t token_chunk_rows : {1, 17, 1000}) {
    EngineOptions engine_options = PlainOptions();
    engine_options.token_chunk_rows = token_chunk_rows;
    const std::unique_ptr<LossEngine> group = Make(engine_options);
    ProblemOptions options = CrossEntropyOptionCases().back();
    options.rows = 41;
    options.vocab_size = 211;
    ExpectMatches(*group, options);
    options = DivergenceCases().back();
    options.rows = 41;
    ExpectMatches(*group, options);
    options.teacher_vocab_size = 104;
    ExpectMatches(*group, options);
  }
}

// Ranks without a single row of the vocabulary, and rows that none has a target for.
TEST_P(CudaGroupTest, FewerClassesThanRanks) {
  const std::unique_ptr<LossEngine> group = Make();
  for (const int64_t rows : {6, 400}) {
    for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
      ProblemOptions options = {.name = "One class", .rows = rows, .vocab_size = 1};
      ExpectMatches(*group, WithType(options, type));
      options.name = "All ignored but one";
      options.vocab_size = 7;
      options.ignored_share = 0.95;
      ExpectMatches(*group, WithType(options, type));
    }
  }
}

// A problem of many rows on the group, against one GPU; a cross entropy's gradients are as near to fp64 as that one's.
void ExpectAgreesWithOneGpu(LossEngine& group, bool jsd, int64_t rows, int64_t vocab_size, int64_t teacher_vocab_size = 0) {
  SCOPED_TRACE(std::string(jsd ? "divergence, " : "cross entropy, ") + std::to_string(rows) + " x " + std::to_string(vocab_size) +
               ", " + std::to_string(teacher_vocab_size));
  const ProblemOptions options = {
      .rows = rows, .vocab_size = vocab_size, .hidden_size = 72, .jsd = jsd, .teacher_vocab_size = teacher_vocab_size};
  const Problem problem = MakeProblem(WithType(options, DataType::kBFloat16));
  const Outcome together = LoadedHeads(group, problem.heads).Compute(problem, kPlain);
  const Outcome alone = RunOnce(problem, PlainOptions(), kPlain);
  const double loss = alone.terms[0].sums.loss_sum;
  EXPECT_NEAR(together.terms[0].sums.loss_sum, loss, 1e-5 * std::abs(loss));
  // Rounding to bf16 falls otherwise: one GPU has other offsets of exponentials, and its own kernel for divergences.
  if (jsd) {
    EXPECT_LE(RelativeDifference(together.grad_hidden, alone.grad_hidden), 5e-3);
    EXPECT_LE(RelativeDifference(together.gradients[0].weight, alone.gradients[0].weight), 5e-3);
    return;
  }
  // The reference takes longer than the engines: all groups share its results.
  static std::map<std::pair<int64_t, int64_t>, Expected> solved;
  auto found = solved.find({rows, vocab_size});
  if (found == solved.end()) found = solved.emplace(std::pair(rows, vocab_size), ComputeExpected(problem)).first;
  const auto errors = [&exact = found->second](const Outcome& of) {
    return std::pair(RelativeDifference(of.grad_hidden, exact.result.grad_hidden.data),
                     RelativeDifference(of.gradients[0].weight, exact.gradient(0).weight.data));
  };
  const auto [hidden, weight] = errors(together);
  const auto [hidden_alone, weight_alone] = errors(alone);
  EXPECT_LE(hidden, 1.05 * hidden_alone);
  EXPECT_LE(weight, 1.05 * weight_alone);
}

// Rows come and leave in slices beside the products. There are few columns, so many that their gradient is two products, and more
// rows at once than one GPU takes.
TEST_P(CudaGroupTest, ManyRowsAgreeWithOneGpu) {
  const std::unique_ptr<LossEngine> group = Make();
  for (const bool jsd : {false, true}) {
    ExpectAgreesWithOneGpu(*group, jsd, 4500, 3001);
    ExpectAgreesWithOneGpu(*group, jsd, 4500, 2500 * int64_t{ranks()} + 1);
    ExpectAgreesWithOneGpu(*group, jsd, 13000, 1001);
  }
  ExpectAgreesWithOneGpu(*group, /*jsd=*/true, 4500, 3001, 3050);
}

// A workspace that has M of all rows, and logits of half of them: a divergence's come slice by slice.
TEST_P(CudaGroupTest, SlicesOfLogitsAgreeWithOneGpu) {
  EngineOptions engine_options = PlainOptions();
  const int64_t mebibytes = ranks() == 2 ? 46 : ranks() == 3 ? 36 : 28;
  engine_options.workspace_bytes = (64 + mebibytes) << 20;
  const std::unique_ptr<LossEngine> group = Make(engine_options);
  ExpectAgreesWithOneGpu(*group, /*jsd=*/true, 4500, 3001);
  ExpectAgreesWithOneGpu(*group, /*jsd=*/true, 4500, 3001, 2950);
}

TEST_P(CudaGroupTest, RepeatsBitwise) {
  const std::vector<ProblemOptions> cases = FormCases();
  for (const bool deterministic : {false, true}) {
    EngineOptions engine_options = PlainOptions();
    engine_options.deterministic = deterministic;
    std::vector<Outcome> first;
    for (int made = 0; made < 2; ++made) {
      const std::unique_ptr<LossEngine> group = Make(engine_options);
      for (size_t i = 0; i < cases.size(); ++i) {
        SCOPED_TRACE(cases[i].name + (deterministic ? ", deterministic" : ""));
        const Problem problem = MakeProblem(WithType(cases[i], DataType::kBFloat16));
        LoadedHeads heads(*group, problem.heads);
        ComputeOptions compute;
        compute.token_outputs = problem.rows < 256;  // exponentials have none of them, nor have a rank's own passes
        const Outcome outcome = heads.Compute(problem, compute);
        heads.ZeroGradients();
        EXPECT_TRUE(outcome.BitwiseEquals(heads.Compute(problem, compute))) << "on the same group";
        if (made == 0) {
          first.push_back(outcome);
        } else {
          EXPECT_TRUE(outcome.BitwiseEquals(first[i])) << "on a new group";
        }
      }
    }
  }
}

TEST_P(CudaGroupTest, CommitsStagedContributions) {
  const std::unique_ptr<LossEngine> group = Make();
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
    const Problem problem = MakeProblem(WithType({.bias = true, .staging_slots = 1}, type));
    LoadedHeads heads(*group, problem.heads);
    const std::vector<float> direct = heads.Compute(problem).gradients[0].weight;
    heads.ZeroGradients();
    const std::unique_ptr<StagedContribution> staged = heads.Stage(problem);
    ExpectGradientZero(heads.ReadGradient(0));
    EXPECT_REASON(heads.TryCompute(problem, {.grad_weight = GradWeightMode::kStage}), kStagingFull);
    EXPECT_OK(staged->Commit(1));
    const std::vector<float> committed = heads.ReadGradient(0).weight;
    for (size_t i = 0; i < committed.size(); ++i) ASSERT_NEAR(committed[i], direct[i], 1e-5 * (1 + std::abs(direct[i])));
  }
}

// Weights and optimizer state stay with their rows.
TEST_P(CudaGroupTest, UpdatesLikeOneGpu) {
  Problem problem = MakeProblem({.bias = true});
  problem.heads[0].spec.optimizer = AdamWSpec();
  const std::unique_ptr<LossEngine> group = Make();
  LoadedHeads heads(*group, problem.heads), alone(problem.heads, PlainOptions());
  // The same accumulator on both sides: AdamW's work is exact then.
  std::vector<float> gradient(problem.heads[0].weight.size());
  for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<float>(std::sin(static_cast<double>(i)));
  std::vector<double> norms;
  for (LoadedHeads* each : {&heads, &alone}) {
    EngineHead& head = each->head(0);
    EXPECT_OK(head.AddToGradient(HeadTensor::kGradWeight, 0, static_cast<int64_t>(gradient.size()), 1, gradient.data()));
    ASSERT_OK_AND_ASSIGN(const GradientStats stats, head.ComputeGradientStats());
    norms.push_back(stats.norm_squared);
    EXPECT_OK(head.ApplyOptimizer({.learning_rate = 0.1, .settings = AdamWSpec()}));
  }
  EXPECT_NEAR(norms[0], norms[1], 1e-9 * norms[1]);
  for (const HeadTensor tensor : {HeadTensor::kWeight, HeadTensor::kMoment1Weight, HeadTensor::kMoment2Weight}) {
    EXPECT_EQ(ReadTensorValues(heads.head(0), tensor), ReadTensorValues(alone.head(0), tensor)) << HeadTensorName(tensor);
  }
}

TEST_P(CudaGroupTest, EndedFlowAddsNothingAndTheGroupContinues) {
  const std::unique_ptr<LossEngine> group = Make();
  const Problem problem = MakeProblem(WithType({.rows = 4500, .vocab_size = 301}, DataType::kBFloat16));
  LoadedHeads heads(*group, problem.heads);
  const auto with_flow = [&](int failing_await, bool fails_decide) {
    PreparedMicroBatch prepared(problem, heads.pointers(), kPlain);
    CheckedFlow flow(prepared.micro_batch);
    flow.FailAtAwait(failing_await);
    if (fails_decide) flow.FailAtDecide();
    prepared.micro_batch.flow = &flow;
    const absl::Status status = group->Compute(prepared.micro_batch).status();
    EXPECT_EQ(absl::IsCancelled(status), failing_await > 0) << status;
    EXPECT_EQ(absl::IsAborted(status), fails_decide) << status;
    if (failing_await > 0 || fails_decide) return;
    EXPECT_OK(status);
    flow.ExpectComplete();
  };
  with_flow(1, false);
  with_flow(2, false);
  with_flow(0, true);
  ExpectGradientZero(heads.ReadGradient(0));
  with_flow(0, false);
  const Gradient flowed = heads.ReadGradient(0);
  heads.ZeroGradients();
  EXPECT_TRUE(heads.Compute(problem, kPlain).gradients[0] == flowed);
}

TEST_P(CudaGroupTest, UnreadyRankChangesNothing) {
  const Problem problem = MakeProblem(ProblemOptions());
  const std::unique_ptr<LossEngine> group = Make(FailingOptions(ShardPhase::kPrepare));
  LoadedHeads heads(*group, problem.heads);
  fails_ = true;
  const absl::Status status = heads.TryCompute(problem, {}).status();
  EXPECT_REASON(status, kShardNotReady);
  EXPECT_EQ(GetErrorMetadata(status)["shard"], std::to_string(ranks() - 1));
  EXPECT_REASON(heads.head(0).ZeroGradient(), kShardNotReady);
  EXPECT_OK(group->health());
  fails_ = false;
  ExpectHeadsMatch(heads, problem, ComputeExpected(problem));
}

// Calls on each rank. All ranks have outputs, but only the first one's are results.
TEST_P(CudaGroupTest, RanksStayWithinTheirOutputsAndOnlyTheFirstReportsRows) {
  const std::unique_ptr<CudaGroup> group = CudaGroupCaseTest::Make();
  std::vector<ProblemOptions> cases = FormCases();
  cases.push_back({.rows = 4500, .vocab_size = 301});  // rows leave in slices
  for (const ProblemOptions& options : cases) {
    const Problem problem = MakeProblem(WithType(options, DataType::kBFloat16));
    const GroupHeads heads(*group, problem.heads);
    group->Run([&](int32_t rank) {
      PreparedMicroBatch prepared(problem, heads.On(rank).pointers(), ComputeOptions{.token_outputs = problem.rows < 256});
      CheckedFlow flow(prepared.micro_batch);
      prepared.micro_batch.flow = &flow;
      CheckStatus(group->engine(rank).Compute(prepared.micro_batch).status(), options.name.c_str());
      prepared.ExpectGuardsAndInputsIntact();
      EXPECT_EQ(flow.decided(), 1);
      if (rank == 0) flow.ExpectComplete();
      EXPECT_EQ(flow.notes() > 0, rank == 0) << options.name;
    });
  }
}

// Calls on each rank. Only the first one has rows of grad_hidden, and sees that they do not fit their type.
TEST_P(CudaGroupTest, EveryRankRefusesWithTheReason) {
  const Problem problem = MakeReplicaProblems(1, ReplicaOptions(/*jsd=*/true, DataType::kFloat16))[0];
  Problem large = problem;
  large.grad_hidden_scale = 1e9;
  const std::unique_ptr<CudaGroup> group = CudaGroupCaseTest::Make(FailingOptions(ShardPhase::kPrepare));
  const GroupHeads replicas(*group, problem.heads), heads(*group, ByVocabulary(problem.heads));
  const ComputeOptions stage = {.grad_weight = GradWeightMode::kStage, .refuse_non_finite = true};
  group->Run([&](int32_t rank) {
    LoadedHeads& own = heads.On(rank);
    EXPECT_REASON(own.TryCompute(large, stage), kNonFiniteValues);
    EXPECT_EQ(own.head(0).FreeStagingSlots(), 1);
    const std::unique_ptr<StagedContribution> staged = own.Stage(problem);
    EXPECT_REASON(own.TryCompute(problem, stage), kStagingFull);
    // A student and a teacher of two kinds; each rank refuses them without waiting for the others.
    const PreparedMicroBatch mixed(problem, {replicas.On(rank).pointers()[0], own.pointers()[1]}, {});
    EXPECT_REASON(group->engine(rank).Compute(mixed.micro_batch), kInvalidCombination);
    mixed.ExpectOutputsUntouched();
  });
  fails_ = true;
  group->Run([&](int32_t rank) {
    EXPECT_ERROR(heads.On(rank).TryCompute(problem, {}), kShardNotReady, {"shard", std::to_string(ranks() - 1)});
    EXPECT_REASON(heads.On(rank).head(0).ZeroGradient(), kShardNotReady);
    EXPECT_OK(group->engine(rank).health());
  });
}

// They would compute by other forms, and wait for each other's results in other orders.
TEST_P(CudaGroupTest, RefusesUnlikeKernels) {
  EngineOptions options = PlainOptions();
  options.shard_count = ranks();
  std::vector<EngineOptions> of_ranks = OptionsOfRanks(options, /*shared_views=*/false);
  of_ranks.back().portable_kernels = true;
  std::vector<std::thread> threads;
  for (const EngineOptions& own : of_ranks) {
    threads.emplace_back([&own] {
      const absl::Status made = CreateCudaEngine(own).status();
      EXPECT_EQ(HasReason(made, ErrorReason::kInvalidCombination), GpuCapability() == 90) << made;
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A rank that fails while the others are in the middle of it: they must not wait for it on the device.
TEST_P(CudaGroupTest, FailedRankBreaksTheGroupSoon) {
  const Problem problem = MakeProblem(ProblemOptions());
  const std::unique_ptr<LossEngine> group = Make(FailingOptions(ShardPhase::kAct));
  {
    LoadedHeads heads(*group, problem.heads);
    heads.Compute(problem);
    fails_ = true;
    const auto start = std::chrono::steady_clock::now();
    EXPECT_REASON(heads.TryCompute(problem, {}), kEngineFailed);
    EXPECT_LT(std::chrono::steady_clock::now() - start, kSoon);
    fails_ = false;
    EXPECT_REASON(group->health(), kEngineFailed);
    EXPECT_REASON(heads.head(0).ZeroGradient(), kEngineFailed);
  }
  // New engines on the same GPUs, while the broken ones are still there.
  const std::unique_ptr<LossEngine> next = Make();
  LoadedHeads heads(*next, problem.heads);
  ExpectHeadsMatch(heads, problem, ComputeExpected(problem));
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaGroupTest, ::testing::ValuesIn(GroupCases()), [](const auto& test) { return test.param.name; });

// 71 GiB of weights, gradient and AdamW's state: more than one engine is allowed here, and no more than two are together.
TEST(CudaGroupMemory, HeadTooLargeForOneGpuRunsOnTwo) {
  const std::string reason = ReasonForNoGroup(2);
  if (!reason.empty()) GTEST_SKIP() << reason;
  const HeadSpec spec = {.vocab_size = 256000,
                         .hidden_size = 16384,
                         .data_type = DataType::kBFloat16,
                         .transform = {.valid_vocab_size = 256000},
                         .trainable = true,
                         .optimizer = AdamWSpec()};
  EngineOptions options = PlainOptions();
  options.memory_budget_bytes = int64_t{48} << 30;
  options.workspace_bytes = int64_t{2} << 30;
  {
    const std::unique_ptr<LossEngine> alone = MakeCudaEngine(options);
    const absl::StatusOr<MemoryPlan> plan = alone->PlanHead(spec);
    CheckStatus(plan.status(), "PlanHead");
    EXPECT_GT(plan->total_bytes, int64_t{70} << 30);
    const absl::Status refused = alone->CreateHead(spec).status();
    EXPECT_TRUE(HasReason(refused, ErrorReason::kMemoryBudgetExceeded)) << refused;
  }
  options.shard_count = 2;
  const std::unique_ptr<LossEngine> group = MakeCudaGroupEngine(options);
  const std::unique_ptr<EngineHead> head = MakeHeadOn(*group, spec);
  const int64_t rows = 64;
  const std::vector<uint16_t> hidden(static_cast<size_t>(rows * spec.hidden_size), 0x3f80);
  const std::vector<int32_t> targets(static_cast<size_t>(rows), 200000);
  const LossTerm term = {.head = head.get(), .row_count = rows, .targets = targets, .loss_scale = 1};
  std::vector<uint16_t> gradient(hidden.size());
  const MicroBatch micro_batch = {.hidden = {hidden.data(), rows, spec.hidden_size, DataType::kBFloat16},
                                  .terms = absl::MakeConstSpan(&term, 1),
                                  .backward = true,
                                  .grad_hidden = {gradient.data(), rows, spec.hidden_size, DataType::kBFloat16},
                                  .grad_weight = GradWeightMode::kAccumulate};
  ASSERT_OK_AND_ASSIGN(const MicroBatchResult result, group->Compute(micro_batch));
  // Weights of 0: every class is as likely.
  EXPECT_NEAR(result.terms[0].loss_sum, static_cast<double>(rows) * std::log(256000.0), 1e-3);
  EXPECT_OK(head->ApplyOptimizer({.learning_rate = 1e-3, .settings = AdamWSpec()}));
}

}  // namespace

// The support's own: engines that stand beside a group.
const SuiteEngine& Suite() {
  static const SuiteEngine engine = {.make = CreateCudaEngine, .grad_weight_factor = 1.42, .accumulation_error = 1.5e-9};
  return engine;
}

}  // namespace headwater::testing
