// Top-k teachers: entries x types x transforms x shards against fp64, the modes of a contribution, and the refusals.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/support/comparison.h"
#include "tests/unit/expect_status.h"

namespace headwater::testing {
namespace {

ProblemOptions Small(int64_t k, ProblemOptions options = {}) {
  options.rows = 23;
  options.top_k = k;
  return options;
}

class TopKTeacher : public ::testing::TestWithParam<DataType> {};

TEST_P(TopKTeacher, MatchesFp64) {
  for (const int64_t k : {1, 2, 16, 101}) {  // the last one is the whole vocabulary
    for (const int32_t shards : {1, 3}) {
      SCOPED_TRACE("k " + std::to_string(k) + ", shards " + std::to_string(shards));
      const EngineOptions engine_options = {.shard_count = shards};
      ExpectEngineMatches(MakeProblem(WithType(Small(k), GetParam())), engine_options);
    }
  }
}

TEST_P(TopKTeacher, MatchesFp64WithEveryOption) {
  for (const double student_temperature : {1.0, 0.6, 2.5}) {
    for (const double softcap : {0.0, 6.0}) {
      SCOPED_TRACE("temperature " + std::to_string(student_temperature) + ", softcap " + std::to_string(softcap));
      const Problem problem = MakeProblem(WithType(Small(8, {.bias = true,
                                                             .logit_scale = -0.8,
                                                             .softcap = softcap,
                                                             .valid_vocab_size = 90,
                                                             .token_weights = true,
                                                             .loss_scale = 0.3,
                                                             .grad_hidden_scale = 2,
                                                             .student_temperature = student_temperature}),
                                                   GetParam()));
      LoadedHeads heads(problem.heads, {});
      if (softcap == 0 || heads.engine().name() == "cpu") {
        ExpectEngineMatches(problem);
        continue;
      }
      // The CUDA engine sets columns aside by a logit of -inf, which a softcap has not.
      const auto result = heads.TryCompute(problem, {});
      EXPECT_REASON(result, kFeatureNotBuilt);
    }
  }
}

TEST_P(TopKTeacher, MatchesFp64WithoutTargets) {
  ExpectEngineMatches(MakeProblem(WithType(Small(8, {.with_targets = false}), GetParam())));
}

INSTANTIATE_TEST_SUITE_P(All, TopKTeacher, ::testing::Values(DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16),
                         [](const auto& test) { return DataTypeName(test.param); });

// A gradient of small differences.
TEST(TopKTeacherRows, NearlyDistilledStudentMatchesFp64) {
  ExpectEngineMatches(MakeProblem(Small(20, {.logit_spread = 8, .teacher_noise = 0.01})));
}

TEST(TopKTeacherRows, ForwardOnlyMatchesFp64) {
  const ComputeOptions options = {.backward = false, .grad_hidden = false, .grad_weight = GradWeightMode::kNone};
  ExpectEngineMatches(MakeProblem(Small(8)), {}, options);
}

// One entry of probability 1 is a cross entropy's target.
TEST(TopKTeacherRows, OneCertainEntryIsACrossEntropy) {
  Problem problem = MakeProblem({.logit_spread = 12});
  const Expected expected = ComputeExpected(problem);
  reference::TopKOptions teacher = {1, problem.terms[0].targets, std::vector<float>(problem.terms[0].targets.size(), 0.0f)};
  for (int32_t& id : teacher.ids) id = std::max(id, -1);  // of ignored rows
  problem.terms[0].loss = teacher;
  const Outcome outcome = RunOnce(problem);
  const LossSums& sums = expected.result.terms[0].sums;
  EXPECT_LE(std::abs(outcome.terms[0].sums.loss_sum - sums.loss_sum), kLossSumBound * sums.loss_sum);
  ExpectGradientNear(outcome.gradients[0], expected.gradient(0));
}

TEST(TopKTeacherRows, CommitAddsTheContributionTimesTheFactor) {
  for (const int32_t shards : {1, 3}) {
    const Problem problem = MakeProblem(Small(8, {.staging_slots = 1}));
    LoadedHeads heads(problem.heads, EngineOptions{.shard_count = shards});
    const std::unique_ptr<StagedContribution> staged = heads.Stage(problem);
    ExpectGradientZero(heads.ReadGradient(0));
    ASSERT_TRUE(staged->Commit(-0.5).ok());
    const Expected expected = ComputeExpected(problem);
    ExpectGradientNear(heads.ReadGradient(0), Combine(expected.gradient(0), -0.5, expected.gradient(0), 0));
  }
}

TEST(TopKTeacherRows, StagedIn16BitsEqualsDirect) {
  ProblemOptions options = WithType(Small(12, {.vocab_size = 1201, .staging_slots = 1}), DataType::kBFloat16);
  options.rows = 301;
  const Problem problem = MakeProblem(options);
  LoadedHeads heads(problem.heads, {});
  ASSERT_TRUE(heads.Stage(problem)->Commit(1).ok());
  const Gradient staged = heads.ReadGradient(0);
  const Gradient direct = ExpectEngineMatches(problem).gradients[0];
  const reference::Matrix expected(1201, options.hidden_size, {direct.weight.begin(), direct.weight.end()});
  ExpectTensorNear("grad_weight", ToDoubles(staged.weight), expected, nullptr);
}

// integration_bad_input_test has the other rows of ids and log-probabilities.
TEST(TopKTeacherRows, BadRowsAreRefusedAndNothingChanges) {
  Problem problem = MakeProblem(Small(4));
  LoadedHeads heads(problem.heads, {});
  auto& teacher = std::get<reference::TopKOptions>(problem.terms[0].loss);
  const reference::TopKOptions good = teacher;
  for (const int32_t id : {101, -2, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
    teacher.ids[7] = id;
    EXPECT_REASON(heads.TryCompute(problem, {}), kTargetOutOfVocab) << id;
  }
  teacher = good;
  teacher.log_probs[2] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_REASON(heads.TryCompute(problem, {}), kInvalidField);
  teacher = good;
  teacher.ids.pop_back();
  EXPECT_REASON(heads.TryCompute(problem, {}), kShapeMismatch);
  teacher = good;
  teacher.log_probs.push_back(-1);
  EXPECT_REASON(heads.TryCompute(problem, {}), kShapeMismatch);
  teacher = good;
  teacher.k = 1025;
  EXPECT_REASON(heads.TryCompute(problem, {}), kInvalidField);
  ExpectGradientZero(heads.ReadGradient(0));
}

TEST(TopKTeacherRows, OtherTokenOutputsAreRefused) {
  const Problem problem = MakeProblem(Small(4));
  LoadedHeads heads(problem.heads, {});
  PreparedMicroBatch prepared(problem, heads.pointers(), {});
  std::vector<float> lse(23);
  prepared.terms[0].lse = lse.data();
  const auto result = heads.engine().Compute(prepared.micro_batch);
  EXPECT_REASON(result, kInvalidCombination);
}

}  // namespace
}  // namespace headwater::testing
