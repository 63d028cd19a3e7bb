// CudaEngine as the ranks of a group, one GPU each: the results of a single engine, for every option, however rows and shards are
// cut. Repetitions have the same bits. Failures of a rank end the group as specified. Skipped where there are fewer GPUs than
// ranks, unless they share one (cuda_group.h).
#include "tests/kernels/cuda/cuda_group.h"

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
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

namespace headwater::testing {
namespace {

const bool kSkipsWithoutGpu = SkipTestsWithoutGpu();

// Far longer than anything here takes, and far shorter than a hang.
constexpr auto kSoon = std::chrono::seconds(30);

Outcome RunOnGroup(CudaGroup& group, const Problem& problem, const ComputeOptions& options = {}) {
  return GroupHeads(group, problem.heads).Compute(problem, options);
}

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

class CudaGroupTest : public CudaGroupCaseTest {};

// Without token outputs, which exponentials do not have (nor has a divergence any but the cross entropy's), and no gradient either.
constexpr ComputeOptions kPlain = {.token_outputs = false};
constexpr ComputeOptions kForward = {
    .backward = false, .grad_hidden = false, .token_outputs = false, .grad_weight = GradWeightMode::kNone};

void ExpectMatches(CudaGroup& group, const ProblemOptions& options, const ComputeOptions& compute = {}) {
  SCOPED_TRACE(options.name + ", " + DataTypeName(options.head_type));
  const Problem problem = MakeProblem(options);
  Outcome outcome = RunOnGroup(group, problem, compute);
  if (compute.grad_weight == GradWeightMode::kNone) {
    for (const Gradient& gradient : outcome.gradients) ExpectGradientZero(gradient);
    outcome.gradients.clear();
  }
  ExpectOutcomeMatches(problem, ComputeExpected(problem), outcome);
}

TEST_P(CudaGroupTest, EveryCrossEntropyMatchesTheReference) {
  const std::unique_ptr<CudaGroup> group = Make();
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    for (const ProblemOptions& options : CrossEntropyOptionCases()) ExpectMatches(*group, WithType(options, type));
  }
}

TEST_P(CudaGroupTest, EveryDivergenceMatchesTheReference) {
  const std::unique_ptr<CudaGroup> group = Make();
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    for (const ProblemOptions& options : DivergenceCases()) ExpectMatches(*group, WithType(options, type));
  }
}

TEST_P(CudaGroupTest, DivergencesWithoutTokenOutputsMatchTheReference) {
  const std::unique_ptr<CudaGroup> group = Make();
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
  const std::unique_ptr<CudaGroup> group = Make();
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
  const std::unique_ptr<CudaGroup> group = Make();
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

TEST_P(CudaGroupTest, HowRowsAreCutDoesNotMatter) {
  for (const int64_t token_chunk_rows : {1, 17, 1000}) {
    EngineOptions engine_options = PlainOptions();
    engine_options.token_chunk_rows = token_chunk_rows;
    const std::unique_ptr<CudaGroup> group = Make(engine_options);
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
  const std::unique_ptr<CudaGroup> group = Make();
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

// A problem of many rows on the group, against one GPU, which other tests compare with fp64.
void ExpectAgreesWithOneGpu(CudaGroup& group, bool jsd, int64_t rows, int64_t vocab_size, int64_t teacher_vocab_size = 0) {
  SCOPED_TRACE(std::string(jsd ? "divergence, " : "cross entropy, ") + std::to_string(rows) + " x " + std::to_string(vocab_size) +
               ", " + std::to_string(teacher_vocab_size));
  const ProblemOptions options = {
      .rows = rows, .vocab_size = vocab_size, .hidden_size = 72, .jsd = jsd, .teacher_vocab_size = teacher_vocab_size};
  const Problem problem = MakeProblem(WithType(options, DataType::kBFloat16));
  const Outcome together = RunOnGroup(group, problem, kPlain);
  const Outcome alone = RunOnce(problem, PlainOptions(), kPlain);
  const double loss = alone.terms[0].sums.loss_sum;
  EXPECT_NEAR(together.terms[0].sums.loss_sum, loss, 1e-5 * std::abs(loss));
  // bf16's rounding falls the other way here and there; in a divergence everywhere, since one GPU alone has a kernel of its own.
  EXPECT_LE(RelativeDifference(together.grad_hidden, alone.grad_hidden), jsd ? 5e-3 : 1e-3);
  EXPECT_LE(RelativeDifference(together.gradients[0].weight, alone.gradients[0].weight), jsd ? 5e-3 : 1e-4);
}

// Rows come and leave in slices beside the products. There are few columns, so many that their gradient is two products, and more
// rows at once than one GPU takes.
TEST_P(CudaGroupTest, ManyRowsAgreeWithOneGpu) {
  const std::unique_ptr<CudaGroup> group = Make();
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
  const std::unique_ptr<CudaGroup> group = Make(engine_options);
  ExpectAgreesWithOneGpu(*group, /*jsd=*/true, 4500, 3001);
  ExpectAgreesWithOneGpu(*group, /*jsd=*/true, 4500, 3001, 2950);
}

TEST_P(CudaGroupTest, RepeatsBitwise) {
  std::vector<ProblemOptions> cases = {CrossEntropyOptionCases().back(), DivergenceCases().back(), ExponentialCases().front(),
                                       ShardPassCases().back()};
  for (const bool deterministic : {false, true}) {
    EngineOptions engine_options = PlainOptions();
    engine_options.deterministic = deterministic;
    std::vector<Outcome> first;
    for (int made = 0; made < 2; ++made) {
      const std::unique_ptr<CudaGroup> group = Make(engine_options);
      for (size_t i = 0; i < cases.size(); ++i) {
        SCOPED_TRACE(cases[i].name + (deterministic ? ", deterministic" : ""));
        const Problem problem = MakeProblem(WithType(cases[i], DataType::kBFloat16));
        GroupHeads heads(*group, problem.heads);
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
  const std::unique_ptr<CudaGroup> group = Make();
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
    const Problem problem = MakeProblem(WithType({.bias = true, .staging_slots = 1}, type));
    GroupHeads heads(*group, problem.heads);
    const Outcome direct = heads.Compute(problem);
    heads.ZeroGradients();
    const ComputeOptions stage = {.grad_weight = GradWeightMode::kStage};
    std::vector<std::unique_ptr<StagedContribution>> staged;
    const Outcome before = heads.Compute(problem, stage, &staged);
    for (const float value : before.gradients[0].weight) ASSERT_EQ(value, 0);
    // The only slot is taken on every rank.
    group->Run([&](int32_t rank) {
      const PreparedMicroBatch prepared(problem, heads.On(rank), stage);
      const auto refused = group->engine(rank).Compute(prepared.micro_batch);
      EXPECT_TRUE(HasReason(refused.status(), ErrorReason::kStagingFull)) << refused.status();
    });
    group->Run([&](int32_t rank) { CheckStatus(staged[static_cast<size_t>(rank)]->Commit(1), "Commit"); });
    const std::vector<float> committed = heads.Read(0, HeadTensor::kGradWeight);
    for (size_t i = 0; i < committed.size(); ++i) {
      ASSERT_NEAR(committed[i], direct.gradients[0].weight[i], 1e-5 * (1 + std::abs(direct.gradients[0].weight[i])));
    }
  }
}

// Only the first rank has rows of grad_hidden, and sees that they do not fit their type.
TEST_P(CudaGroupTest, AllRanksShareTheRefusalOfOne) {
  ProblemOptions options = {.staging_slots = 1};
  const Problem clean = MakeProblem(WithType(options, DataType::kFloat16));
  options.grad_hidden_scale = 1e9;
  const Problem problem = MakeProblem(WithType(options, DataType::kFloat16));
  const ComputeOptions stage = {.grad_weight = GradWeightMode::kStage, .refuse_non_finite = true};
  LoadedHeads alone(problem.heads, PlainOptions());
  const absl::Status expected = alone.TryCompute(problem, stage).status();
  ASSERT_TRUE(HasReason(expected, ErrorReason::kNonFiniteValues)) << expected;
  const std::unique_ptr<CudaGroup> group = Make();
  GroupHeads heads(*group, problem.heads);
  group->Run([&](int32_t rank) {
    const PreparedMicroBatch prepared(problem, heads.On(rank), stage);
    const absl::Status status = group->engine(rank).Compute(prepared.micro_batch).status();
    EXPECT_TRUE(HasReason(status, ErrorReason::kNonFiniteValues)) << status;
    EXPECT_EQ(status.message(), expected.message());
    EXPECT_EQ(heads.On(rank)[0]->FreeStagingSlots(), 1);
  });
  std::vector<std::unique_ptr<StagedContribution>> staged;
  heads.Compute(clean, stage, &staged);
  for (const auto& contribution : staged) EXPECT_NE(contribution, nullptr);
}

// Weights and optimizer state stay with their rows.
TEST_P(CudaGroupTest, UpdatesLikeOneGpu) {
  Problem problem = MakeProblem({.bias = true});
  problem.heads[0].spec.optimizer = AdamWSpec();
  const OptimizerStep step = {.learning_rate = 0.1, .settings = AdamWSpec()};
  const std::unique_ptr<CudaGroup> group = Make();
  GroupHeads heads(*group, problem.heads);
  LoadedHeads alone(problem.heads, PlainOptions());
  // The same accumulator on both sides: AdamW's work is exact then.
  std::vector<float> gradient(static_cast<size_t>(alone.head(0).ElementCount(HeadTensor::kGradWeight)));
  for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<float>(std::sin(static_cast<double>(i)));
  const int64_t count = static_cast<int64_t>(gradient.size());
  double norm = 0;
  std::vector<GradientStats> stats(static_cast<size_t>(group->world_size()));
  group->Run([&](int32_t rank) {
    EngineHead& head = *heads.On(rank)[0];
    CheckStatus(head.AddToGradient(HeadTensor::kGradWeight, 0, count, 1, gradient.data()), "AddToGradient");
    const absl::StatusOr<GradientStats> own = head.ComputeGradientStats();
    CheckStatus(own.status(), "ComputeGradientStats");
    stats[static_cast<size_t>(rank)] = *own;
    CheckStatus(head.ApplyOptimizer(step), "ApplyOptimizer");
  });
  for (const GradientStats& own : stats) norm += own.norm_squared;
  CheckStatus(alone.head(0).AddToGradient(HeadTensor::kGradWeight, 0, count, 1, gradient.data()), "AddToGradient");
  EXPECT_NEAR(norm, alone.head(0).ComputeGradientStats()->norm_squared, 1e-9 * norm);
  CheckStatus(alone.head(0).ApplyOptimizer(step), "ApplyOptimizer");
  for (const HeadTensor tensor : {HeadTensor::kWeight, HeadTensor::kMoment1Weight, HeadTensor::kMoment2Weight}) {
    std::vector<float> expected(gradient.size());
    CheckStatus(alone.head(0).ReadTensor(tensor, 0, count, expected.data()), "ReadTensor");
    EXPECT_EQ(std::memcmp(heads.Read(0, tensor).data(), expected.data(), expected.size() * sizeof(float)), 0);
  }
}

TEST_P(CudaGroupTest, EndedFlowAddsNothingAndTheGroupContinues) {
  const std::unique_ptr<CudaGroup> group = Make();
  const ProblemOptions options = {.rows = 4500, .vocab_size = 301};
  const Problem problem = MakeProblem(WithType(options, DataType::kBFloat16));
  GroupHeads heads(*group, problem.heads);
  // All ranks' flows answer alike.
  const auto with_flow = [&](int failing_await, bool fails_decide) {
    group->Run([&](int32_t rank) {
      PreparedMicroBatch prepared(problem, heads.On(rank), kPlain);
      CheckedFlow flow(prepared.micro_batch);
      flow.FailAtAwait(failing_await);
      if (fails_decide) flow.FailAtDecide();
      prepared.micro_batch.flow = &flow;
      const absl::Status status = group->engine(rank).Compute(prepared.micro_batch).status();
      EXPECT_EQ(absl::IsCancelled(status), failing_await > 0) << status;
      EXPECT_EQ(absl::IsAborted(status), fails_decide) << status;
      if (failing_await > 0 || fails_decide) return;
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_EQ(flow.decided(), 1);
      EXPECT_EQ(flow.ready(), rank == 0 ? options.rows : 0);
    });
  };
  with_flow(1, false);
  with_flow(2, false);
  with_flow(0, true);
  for (const float value : heads.Read(0, HeadTensor::kGradWeight)) ASSERT_EQ(value, 0);
  with_flow(0, false);
  const std::vector<float> flowed = heads.Read(0, HeadTensor::kGradWeight);
  heads.ZeroGradients();
  const Outcome whole = heads.Compute(problem, kPlain);
  EXPECT_EQ(std::memcmp(flowed.data(), whole.gradients[0].weight.data(), flowed.size() * sizeof(float)), 0);
}

TEST_P(CudaGroupTest, UnreadyRankChangesNothing) {
  const Problem problem = MakeProblem(ProblemOptions());
  const std::unique_ptr<CudaGroup> group = MakeFailing(ShardPhase::kPrepare);
  GroupHeads heads(*group, problem.heads);
  fails_ = true;
  group->Run([&](int32_t rank) {
    const PreparedMicroBatch prepared(problem, heads.On(rank), {});
    const absl::Status status = group->engine(rank).Compute(prepared.micro_batch).status();
    EXPECT_TRUE(HasReason(status, ErrorReason::kShardNotReady)) << status;
    EXPECT_EQ(GetErrorMetadata(status).at("shard"), std::to_string(ranks() - 1));
    EXPECT_TRUE(HasReason(heads.On(rank)[0]->ZeroGradient(), ErrorReason::kShardNotReady));
    EXPECT_TRUE(group->engine(rank).health().ok());
  });
  fails_ = false;
  ExpectOutcomeMatches(problem, ComputeExpected(problem), heads.Compute(problem));
}

// A rank that fails while the others are in the middle of it: they must not wait for it on the device.
TEST_P(CudaGroupTest, FailedRankBreaksTheGroupSoon) {
  const Problem problem = MakeProblem(ProblemOptions());
  const std::unique_ptr<CudaGroup> group = MakeFailing(ShardPhase::kAct);
  {
    GroupHeads heads(*group, problem.heads);
    heads.Compute(problem);
    fails_ = true;
    const auto start = std::chrono::steady_clock::now();
    group->Run([&](int32_t rank) {
      const PreparedMicroBatch prepared(problem, heads.On(rank), {});
      const absl::Status status = group->engine(rank).Compute(prepared.micro_batch).status();
      EXPECT_TRUE(HasReason(status, ErrorReason::kEngineFailed)) << status;
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, kSoon);
    fails_ = false;
    group->Run([&](int32_t rank) {
      EXPECT_TRUE(HasReason(group->engine(rank).health(), ErrorReason::kEngineFailed));
      EXPECT_TRUE(HasReason(heads.On(rank)[0]->ZeroGradient(), ErrorReason::kEngineFailed));
    });
  }
  // New engines on the same GPUs, while the broken ones are still there.
  const std::unique_ptr<CudaGroup> next = Make();
  ExpectOutcomeMatches(problem, ComputeExpected(problem), RunOnGroup(*next, problem));
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
  CudaGroup group(2, options);
  const int64_t rows = 64;
  std::vector<uint16_t> hidden(static_cast<size_t>(rows * spec.hidden_size), 0x3f80);
  const std::vector<int32_t> targets(static_cast<size_t>(rows), 200000);
  group.Run([&](int32_t rank) {
    const std::unique_ptr<EngineHead> head = MakeHeadOn(group.engine(rank), spec);
    LossTerm term = {.head = head.get(), .row_count = rows, .targets = targets, .loss_scale = 1};
    std::vector<uint16_t> gradient(hidden.size());
    const MicroBatch micro_batch = {.hidden = {hidden.data(), rows, spec.hidden_size, DataType::kBFloat16},
                                    .terms = absl::MakeConstSpan(&term, 1),
                                    .backward = true,
                                    .grad_hidden = {gradient.data(), rows, spec.hidden_size, DataType::kBFloat16},
                                    .grad_weight = GradWeightMode::kAccumulate};
    const absl::StatusOr<MicroBatchResult> result = group.engine(rank).Compute(micro_batch);
    CheckStatus(result.status(), "Compute");
    // Weights of 0: every class is as likely.
    EXPECT_NEAR(result->terms[0].loss_sum, static_cast<double>(rows) * std::log(256000.0), 1e-3);
    CheckStatus(head->ApplyOptimizer(OptimizerStep{.learning_rate = 1e-3, .settings = AdamWSpec()}), "ApplyOptimizer");
  });
}

}  // namespace

// The support's own: engines that stand beside a group.
const EngineFactory& SuiteEngineFactory() {
  static const EngineFactory factory = [](const EngineOptions& options) { return CreateCudaEngine(options); };
  return factory;
}
double SuiteGradWeightFactor() { return 1.42 * kPlainFactor; }
double SuiteAccumulationError() { return 1.5e-9; }

}  // namespace headwater::testing
