// Data that breaks naive implementations: extreme logits, confident rows, poisoned padding, NaN and infinities.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/error.h"
#include "tests/kernels/support/comparison.h"
#include "tests/kernels/support/extreme_values.h"
#include "tests/unit/expect_status.h"

namespace headwater::testing {
namespace {

// Rows whose target has a margin of `margins[i]` over logits that are small otherwise.
Problem MakeConfidentProblem(const std::vector<double>& margins, DataType type) {
  const ProblemOptions options =
      WithType({.rows = static_cast<int64_t>(margins.size()), .hidden_size = 128, .logit_spread = 0.5, .ignored_share = 0}, type);
  Problem problem = MakeProblem(options);
  for (int64_t i = 0; i < options.rows; ++i) MakeConfident(&problem, i, 3 + 7 * i, margins[static_cast<size_t>(i)]);
  RoundToStorage(&problem);
  return problem;
}

TEST(Hostile, ConfidentRowsKeepTheirDigits) {
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    SCOPED_TRACE(DataTypeName(type));
    const Problem problem = MakeConfidentProblem({2, 5, 8, 11, 14, 17, 20, 23, 25.5, 26}, type);
    const Expected expected = ComputeExpected(problem);
    const std::vector<double>& log_probability = expected.result.terms[0].target_log_probability;
    EXPECT_GE(*std::max_element(log_probability.begin(), log_probability.end()), -1.5e-9);
    ExpectOutcomeMatches(problem, expected, RunOnce(problem));
  }
}

TEST(Hostile, LogitsUpTo600) {
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    SCOPED_TRACE(DataTypeName(type));
    const Problem problem = MakeProblem(WithType({.rows = 29, .logit_spread = 190}, type));
    const Expected expected = ComputeExpected(problem);
    const std::vector<double>& largest = expected.result.terms[0].max_abs_logit;
    EXPECT_GE(*std::max_element(largest.begin(), largest.end()), 550);
    ExpectOutcomeMatches(problem, expected, RunOnce(problem));
  }
}

// A single shard holds every row's target, or none of them.
TEST(Hostile, TargetsOnOneShard) {
  for (const int32_t column : {0, 49, 50, 51, 100}) {
    SCOPED_TRACE("target " + std::to_string(column));
    Problem problem = MakeProblem(ProblemOptions());
    std::fill(problem.terms[0].targets.begin(), problem.terms[0].targets.end(), column);
    ExpectEngineMatches(problem, {.shard_count = 2});
  }
}

// Whole shards of padding, poisoned with NaN: no probability, no gradient, no NaN.
TEST(Hostile, ShardsOfPaddingOnly) {
  for (const bool jsd : {false, true}) {
    const ProblemOptions options = {.bias = true, .softcap = 10, .valid_vocab_size = 30, .jsd = jsd};
    const Outcome outcome = ExpectEngineMatches(MakeProblem(options), {.shard_count = 5});
    for (int64_t i = options.valid_vocab_size * options.hidden_size; i < options.vocab_size * options.hidden_size; ++i) {
      ASSERT_EQ(outcome.gradients[0].weight[static_cast<size_t>(i)], 0.0f) << "gradient of padding";
    }
    for (size_t v = 30; v < 101; ++v) EXPECT_EQ(outcome.gradients[0].bias[v], 0.0f);
  }
}

// A bias of -infinity rules a class out, on either side; 0 * ln 0 is 0.
TEST(Hostile, ClassesRuledOutByTheirBias) {
  for (const bool jsd : {false, true}) {
    for (const double beta : {0.0, 0.5, 1.0}) {
      Problem problem = MakeProblem({.bias = true, .jsd = jsd, .beta = beta});
      for (const size_t v : {5u, 6u, 77u}) {
        for (TestHead& head : problem.heads) head.bias[v] = -1e4;  // exp underflows everywhere, and the reference stays finite
      }
      for (int32_t& target : problem.terms[0].targets) {
        if (target == 5 || target == 6 || target == 77) target = 8;
      }
      Outcome outcome = RunOnce(problem);
      // Their size would loosen the tokens' tolerance: compare with that of the other logits, all but the mean that they are part
      // of.
      Expected strict = ComputeExpected(problem);
      for (double& largest : strict.result.terms[0].max_abs_logit) largest = std::min(largest, 20.0);
      const std::vector<double>& means = strict.result.terms[0].mean_logits;
      for (size_t i = 0; i < means.size(); ++i) EXPECT_LE(std::abs(outcome.terms[0].mean_logits[i] - means[i]), 1e-6 * 1e4) << i;
      outcome.terms[0].mean_logits.assign(means.begin(), means.end());
      SCOPED_TRACE(std::string(jsd ? "JSD " : "cross entropy ") + std::to_string(beta));
      ExpectOutcomeMatches(problem, strict, outcome);
      // With an infinity the result is the same, except for that mean.
      for (const size_t v : {5u, 6u, 77u}) {
        for (TestHead& head : problem.heads) head.bias[v] = -kInfinity;
      }
      Outcome infinite = RunOnce(problem);
      for (size_t i = 0; i < means.size(); ++i) {
        const bool ignored = problem.terms[0].targets[i] == kDefaultIgnoreIndex;
        EXPECT_EQ(infinite.terms[0].mean_logits[i], ignored ? 0 : -kInfinity) << i;
      }
      infinite.terms[0].mean_logits = outcome.terms[0].mean_logits;
      ExpectOutcomeMatches(problem, strict, infinite);
    }
  }
}

// Classes ruled out where only a divergence's loss is asked for, which engines may compute in one pass. They are ruled out on one
// side alone, too, and by the least number of bf16, as attention masks have it.
TEST(Hostile, ClassesRuledOutByOneSide) {
  const ComputeOptions compute_options = {.token_outputs = false};
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    for (const double beta : {0.0, 0.5, 1.0}) {
      for (const auto& [student, teacher] : {std::pair{true, true}, {true, false}, {false, true}}) {
        SCOPED_TRACE(std::string(DataTypeName(type)) + ", beta " + std::to_string(beta) + (student ? ", student" : "") +
                     (teacher ? ", teacher" : ""));
        const ProblemOptions options = WithType({.vocab_size = 203, .bias = true, .jsd = true, .beta = beta}, type);
        Problem problem = MakeProblem(options);
        for (int32_t& target : problem.terms[0].targets) {
          if (target % 5 == 0 && target >= 0) ++target;
        }
        const auto rule_out = [&](double bias) {
          for (size_t v = 0; v < static_cast<size_t>(options.vocab_size); v += 5) {
            if (student) problem.heads[0].bias[v] = bias;
            if (teacher) problem.heads[1].bias[v] = bias;
          }
        };
        rule_out(-8192);  // exp underflows everywhere, and the reference stays finite
        const Problem finite = problem;
        Expected expected = ComputeExpected(finite);
        for (double& largest : expected.result.terms[0].max_abs_logit) largest = std::min(largest, 20.0);
        // Infinitely far from a student, or a teacher, that has no probability where the other has some.
        const bool is_far = student != teacher && beta == (student ? 0.0 : 1.0);
        if (!is_far) ExpectOutcomeMatches(finite, expected, RunOnce(finite, {}, compute_options));
        for (const double bias : {-kInfinity, -0x1.fep127}) {
          if (bias > -kInfinity && (type == DataType::kFloat16 || is_far)) continue;  // it has no such number; the loss overflows
          rule_out(bias);
          const Outcome outcome = RunOnce(problem, {}, compute_options);
          if (is_far) {
            EXPECT_TRUE(std::isinf(outcome.terms[0].sums.loss_sum)) << outcome.terms[0].sums.loss_sum;
          } else {
            ExpectOutcomeMatches(finite, expected, outcome);
          }
        }
      }
    }
  }
}

TEST(Hostile, NonFiniteRowsAreCountedAndStayAlone) {
  for (const bool jsd : {false, true}) {
    for (const double value : {kNan, kInfinity, -kInfinity}) {
      for (const int32_t shard_count : {1, 3}) {
        SCOPED_TRACE(std::string(jsd ? "JSD " : "cross entropy ") + std::to_string(value));
        const ProblemOptions options = {.ignored_share = 0, .jsd = jsd};
        Problem problem = MakeProblem(options);
        const EngineOptions engine_options = {.shard_count = shard_count};
        const ComputeOptions compute_options = {.grad_weight = GradWeightMode::kNone};
        const Outcome clean = RunOnce(problem, engine_options, compute_options);
        problem.hidden[static_cast<size_t>(2 * options.hidden_size + 5)] = value;
        problem.hidden[static_cast<size_t>(9 * options.hidden_size)] = value;
        if (jsd) problem.terms[0].teacher_hidden[static_cast<size_t>(4 * options.hidden_size)] = value;
        const Outcome outcome = RunOnce(problem, engine_options, compute_options);
        EXPECT_EQ(outcome.terms[0].sums.non_finite_row_count, jsd ? 3 : 2);
        EXPECT_EQ(outcome.terms[0].sums.valid_token_count, options.rows);
        EXPECT_FALSE(std::isfinite(outcome.terms[0].sums.loss_sum));
        for (int64_t i = 0; i < options.rows; ++i) {
          const size_t row = static_cast<size_t>(i);
          if (i == 2 || i == 9 || (jsd && i == 4)) {
            EXPECT_FALSE(std::isfinite(outcome.terms[0].token_loss[row])) << i;
            continue;
          }
          EXPECT_LE(std::abs(outcome.terms[0].token_loss[row] - clean.terms[0].token_loss[row]), 1e-5) << i;
          for (int64_t h = 0; h < options.hidden_size; ++h) {
            const size_t element = static_cast<size_t>(i * options.hidden_size + h);
            EXPECT_LE(std::abs(outcome.grad_hidden[element] - clean.grad_hidden[element]), 1e-4) << i;
          }
        }
      }
    }
  }
}

TEST(Hostile, NonFiniteWeightsReachTheCount) {
  Problem problem = MakeProblem(ProblemOptions());
  problem.heads[0].weight[static_cast<size_t>(17 * problem.hidden_size)] = kNan;
  const Outcome outcome = RunOnce(problem);
  EXPECT_EQ(outcome.terms[0].sums.non_finite_row_count, outcome.terms[0].sums.valid_token_count);
}

// Without a contribution there is nothing to refuse but the answer.
TEST(Hostile, RefusingNonFiniteWorksWithoutGradients) {
  Problem problem = MakeProblem(ProblemOptions());
  const ComputeOptions compute_options = {
      .backward = false, .grad_hidden = false, .grad_weight = GradWeightMode::kNone, .refuse_non_finite = true};
  ExpectEngineMatches(problem, {}, compute_options);
  problem.hidden[static_cast<size_t>(1 * problem.hidden_size + 3)] = kNan;
  LoadedHeads heads(problem.heads, {});
  const auto result = heads.TryCompute(problem, compute_options);
  EXPECT_REASON(result, kNonFiniteValues);
}

TEST(Hostile, RefusingNonFiniteKeepsTheAccumulatorBitwise) {
  const ProblemOptions options = {.staging_slots = 1};
  const Problem clean = MakeProblem(options);
  for (const double value : {kNan, kInfinity}) {
    Problem problem = clean;
    problem.hidden[static_cast<size_t>(1 * options.hidden_size + 3)] = value;
    LoadedHeads heads(clean.heads, {});
    heads.Compute(clean);
    const Gradient before = heads.ReadGradient(0);
    const ComputeOptions compute_options = {.grad_weight = GradWeightMode::kStage, .refuse_non_finite = true};
    const auto result = heads.TryCompute(problem, compute_options);
    EXPECT_REASON(result, kNonFiniteValues);
    EXPECT_TRUE(heads.ReadGradient(0) == before);
    EXPECT_EQ(heads.head(0).FreeStagingSlots(), 1);
    // Clean rows pass under the same policy.
    EXPECT_NE(heads.Stage(clean, compute_options), nullptr);
  }
}

}  // namespace
}  // namespace headwater::testing
