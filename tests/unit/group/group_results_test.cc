// A group yields what one engine does with as many shards, to the bit, whatever its ranks are, threads or processes: in every
// option, direct, staged and committed, and after a step of the optimizer. And that is right, in double precision.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/support/comparison.h"
#include "tests/kernels/support/engine_run.h"
#include "tests/kernels/support/problem.h"
#include "tests/unit/expect_status.h"
#include "tests/unit/group/local_cpu_group.h"
#include "tests/unit/group/worker_threads.h"

namespace headwater::testing {
namespace {

// What a head is trained with; the options are the problem's.
struct ResultCase {
  Problem problem;
  std::string name;
};

std::vector<ResultCase> MakeCases() {
  std::vector<ProblemOptions> options = CrossEntropyOptionCases();
  for (const double beta : {0.0, 0.5, 1.0}) {
    ProblemOptions jsd = {.name = "Jsd" + std::to_string(beta),
                          .bias = true,
                          .label_smoothing = 0.1,
                          .jsd = true,
                          .beta = beta,
                          .student_temperature = 2,
                          .teacher_temperature = 0.5,
                          .hard_loss_weight = 0.3,
                          .teacher_hidden_size = 17};
    options.push_back(jsd);
    if (beta == 0.5) {
      jsd.name += "OfUnequalVocabularies";
      jsd.teacher_vocab_size = 61;
      jsd.softcap = 5;
      options.push_back(jsd);
    }
  }
  for (const bool jsd : {false, true}) {
    const ProblemOptions dithered = {
        .name = jsd ? "DitheredJsd" : "DitheredCrossEntropy", .token_weights = true, .jsd = jsd, .gradient_resolution = 0.125};
    options.push_back(dithered);
  }
  options.push_back(ProblemOptions{.name = "AllIgnored", .ignored_share = 1});
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
    options.push_back(WithType(CrossEntropyOptionCases().back(), type));
    options.back().name += DataTypeName(type);
  }

  std::vector<ResultCase> cases;
  for (ProblemOptions& one : options) {
    one.staging_slots = 1;
    ResultCase made{MakeProblem(one), one.name};
    // One optimizer and the other, in turn.
    OptimizerSpec& optimizer = made.problem.heads[0].spec.optimizer;
    if (cases.size() % 2 == 0) {
      optimizer = AdamWSpec{0.9, 0.999, 1e-8, 0.01};
    } else {
      optimizer = SgdSpec{0.9, 0, true, 0.01};
    }
    cases.push_back(std::move(made));
  }
  return cases;
}

// What becomes of the heads.
struct Trained {
  Outcome direct;                   // of a micro-batch that is added at once
  std::vector<Gradient> committed;  // after the same again, staged, and committed with a factor
  std::vector<Gradient> tensors;    // of the first head after a step, one after the other
};

Trained Train(LossEngine& engine, const Problem& problem) {
  LoadedHeads heads(engine, problem.heads);
  Trained trained;
  trained.direct = heads.Compute(problem);
  EXPECT_OK(heads.Stage(problem)->Commit(0.75));
  trained.committed = heads.ReadGradients();

  const OptimizerStep step = {.learning_rate = 0.1, .gradient_multiplier = 0.5, .settings = problem.heads[0].spec.optimizer};
  EXPECT_OK(heads.head(0).ApplyOptimizer(step));
  for (const HeadTensor tensor : {HeadTensor::kWeight, HeadTensor::kBias, HeadTensor::kMasterWeight, HeadTensor::kMoment1Weight,
                                  HeadTensor::kMoment2Weight, HeadTensor::kGradWeight}) {
    const std::vector<double> values = ReadTensorValues(heads.head(0), tensor);
    trained.tensors.push_back({{values.begin(), values.end()}, {}});
  }
  return trained;
}

void ExpectSame(const Trained& actual, const Trained& expected) {
  EXPECT_TRUE(actual.direct.BitwiseEquals(expected.direct));
  EXPECT_TRUE(actual.committed == expected.committed);
  EXPECT_TRUE(actual.tensors == expected.tensors);
}

class GroupResults : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(GroupResults, HaveTheBitsOfOneEngineWithAsManyShards) {
  EngineOptions options = {.shard_count = static_cast<int32_t>(GetParam().size())};
  if (GetParam().front() != 1) options.shard_weights = GetParam();
  options.token_chunk_rows = 5;
  options.thread_count = options.shard_count;
  for (const bool deterministic : {false, true}) {
    options.deterministic = deterministic;
    ASSERT_OK_AND_ASSIGN(const auto threads, CreateLocalCpuGroup(options));
    EngineOptions of_one = options;
    of_one.bfloat16_products = threads->options().bfloat16_products;
    ASSERT_OK_AND_ASSIGN(const auto one, CreateCpuEngine(of_one));
    EngineOptions of_each = options;
    of_each.thread_count = 1;
    std::unique_ptr<LossEngine> links;
    if (options.shard_count > 1) {
      ASSERT_OK_AND_ASSIGN(auto made, ThreadedGroup::Create(of_each));
      links = std::move(made);
    }
    for (const ResultCase& one_case : MakeCases()) {
      SCOPED_TRACE(one_case.name + (deterministic ? ", deterministic" : ""));
      const Trained expected = Train(*one, one_case.problem);
      ExpectOutcomeMatches(one_case.problem, ComputeExpected(one_case.problem), expected.direct);
      {
        SCOPED_TRACE("threads");
        ExpectSame(Train(*threads, one_case.problem), expected);
      }
      if (links != nullptr) {
        SCOPED_TRACE("links");
        ExpectSame(Train(*links, one_case.problem), expected);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, GroupResults,
                         ::testing::Values(std::vector<int64_t>{1}, std::vector<int64_t>{1, 1}, std::vector<int64_t>{3, 1, 2},
                                           std::vector<int64_t>(4, 1), std::vector<int64_t>(8, 1)),
                         [](const auto& test) { return std::to_string(test.param.size()); });

}  // namespace
}  // namespace headwater::testing
