#include "tests/kernels/support/comparison.h"

#include <algorithm>
#include <cmath>

#include "gtest/gtest.h"
#include "tests/kernels/support/kernel_suite.h"
#include "tests/kernels/support/plain_computation.h"

namespace headwater::testing {
namespace {

bool NeedsPlain(const Problem& problem) {
  if (problem.hidden_type != DataType::kFloat32 || problem.grad_hidden_type != DataType::kFloat32) return true;
  return std::any_of(problem.heads.begin(), problem.heads.end(),
                     [](const TestHead& head) { return head.spec.data_type != DataType::kFloat32; });
}

void ExpectSumNear(const char* what, double actual, double expected, double scale, double bound) {
  // A sum that cancels has the error of its summands: the floor is 1e-1 of their magnitudes' sum, with kLossSumBound two
  // roundings to fp32. The last summand: where the exact value is 0, both sides may have a rounding error of fp64's.
  EXPECT_LE(std::abs(actual - expected), bound * std::max(std::abs(expected), 1e-1 * scale) + 1e-15)
      << what << ": " << actual << ", expected " << expected;
}

void ExpectSumsMatch(const LossSums& actual, const reference::TermResult& expected, const TestTerm& term, const PlainTerm* plain,
                     int64_t hidden_size) {
  double scale = 0;
  double weighted_logits = 0;
  for (size_t i = 0; i < expected.token_loss.size(); ++i) {
    const double weight = std::abs(term.token_weights.empty() ? 1.0 : term.token_weights[i]);
    scale += std::abs(expected.token_loss[i]) * weight;
    weighted_logits += expected.max_abs_logit[i] * weight;
  }
  const LossSums& sums = expected.sums;
  double bound = kLossSumBound;
  if (plain != nullptr && sums.loss_sum != 0) {
    const double truncated = Suite().accumulation_error * static_cast<double>(hidden_size) * weighted_logits;
    bound += (kPlainFactor * std::abs(plain->loss_sum - sums.loss_sum) + truncated) / std::abs(sums.loss_sum);
  }
  ExpectSumNear("loss_sum", actual.loss_sum, sums.loss_sum, scale, bound);
  ExpectSumNear("soft_loss_sum", actual.soft_loss_sum, sums.soft_loss_sum, scale, bound);
  ExpectSumNear("hard_loss_sum", actual.hard_loss_sum, sums.hard_loss_sum, scale, bound);
  ExpectSumNear("z_loss_sum", actual.z_loss_sum, sums.z_loss_sum, scale, bound);
  ExpectSumNear("loss_sum as the sum of its parts", actual.soft_loss_sum + actual.hard_loss_sum + actual.z_loss_sum,
                actual.loss_sum, scale, 1e-12);
  ExpectSumNear("token_weight_sum", actual.token_weight_sum, sums.token_weight_sum, 1, 1e-12);
  ExpectSumNear("target_weight_sum", actual.target_weight_sum, sums.target_weight_sum, 1, 1e-6);
  EXPECT_EQ(actual.valid_token_count, sums.valid_token_count);
  EXPECT_EQ(actual.non_finite_row_count, 0);
}

// Per-token values: absolute, relative to the row's logits.
void ExpectTokensNear(const char* what, const std::vector<float>& actual, const std::vector<double>& expected,
                      const reference::TermResult& term, const std::vector<double>* plain) {
  ASSERT_EQ(actual.size(), expected.size());
  double plain_error = 0;
  if (plain != nullptr) {
    for (size_t i = 0; i < expected.size(); ++i) plain_error = Worse(std::abs((*plain)[i] - expected[i]), plain_error);
  }
  for (size_t i = 0; i < actual.size(); ++i) {
    const double bound = kPlainFactor * plain_error + kTokenBound * std::max(1.0, term.max_abs_logit[i]);
    EXPECT_LE(std::abs(actual[i] - expected[i]), term.argmax[i] < 0 ? 0.0 : bound)
        << what << " of token " << i << ": " << actual[i] << ", expected " << expected[i];
  }
}

// Outputs that keep their digits however small they are: an error of a logit is a relative one of them.
void ExpectTokensRelativelyNear(const char* what, const std::vector<float>& actual, const std::vector<double>& expected,
                                const reference::TermResult& term) {
  for (size_t i = 0; i < actual.size(); ++i) {
    const double bound = 2 * kTokenBound * std::max(1.0, term.max_abs_logit[i]);
    EXPECT_LE(std::abs(actual[i] - expected[i]), bound * std::max(std::abs(expected[i]), 1e-12))
        << what << " of token " << i << ": " << actual[i] << ", expected " << expected[i];
  }
}

void ExpectArgmaxMatches(const std::vector<int32_t>& actual, const reference::TermResult& expected) {
  ASSERT_EQ(actual.size(), expected.argmax.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    if (actual[i] == expected.argmax[i]) continue;
    // Another column is right only where fp32 cannot distinguish the two logits.
    ASSERT_TRUE(expected.argmax[i] >= 0 && actual[i] >= 0 && actual[i] < expected.logits.columns)
        << "argmax of token " << i << " is " << actual[i] << ", expected " << expected.argmax[i];
    const int64_t row = static_cast<int64_t>(i);
    EXPECT_LE(expected.logits.at(row, expected.argmax[i]) - expected.logits.at(row, actual[i]),
              kTokenBound * std::max(1.0, expected.max_abs_logit[i]))
        << "argmax of token " << i << " is " << actual[i] << ", expected " << expected.argmax[i];
  }
}

// Rows that take no part must be exactly 0.
void ExpectIdleRowsZero(const Problem& problem, const Outcome& outcome) {
  std::vector<bool> idle(static_cast<size_t>(problem.rows), true);
  for (const TestTerm& term : problem.terms) {
    for (int64_t row = 0; row < term.row_count; ++row) {
      const bool ignored = !term.targets.empty() && term.targets[static_cast<size_t>(row)] == term.ignore_index;
      if (!ignored) idle[static_cast<size_t>(term.row_start + row)] = false;
    }
  }
  for (int64_t row = 0; row < problem.rows; ++row) {
    if (!idle[static_cast<size_t>(row)]) continue;
    for (int64_t h = 0; h < problem.hidden_size; ++h) {
      ASSERT_EQ(outcome.grad_hidden[static_cast<size_t>(row * problem.hidden_size + h)], 0.0) << "grad_hidden of idle row " << row;
    }
  }
}

}  // namespace

void ExpectTensorNear(const std::string& what, absl::Span<const double> actual, const reference::Matrix& expected,
                      const std::vector<double>* plain, double plain_factor) {
  ASSERT_EQ(actual.size(), expected.data.size()) << what;
  const TensorErrors errors = MeasureErrors(actual, expected);
  const TensorErrors allowance = plain == nullptr ? TensorErrors{} : MeasureErrors(*plain, expected);
  const double bound = plain_factor * allowance.whole + kGradientBound;
  EXPECT_LE(errors.whole, bound) << what << ", whole tensor";
  EXPECT_LE(errors.worst_row, std::max(10 * bound, plain_factor * allowance.worst_row + 10 * kGradientBound))
      << what << ", worst row";
  EXPECT_LE(errors.worst_column, std::max(10 * bound, plain_factor * allowance.worst_column + 10 * kGradientBound))
      << what << ", worst column";
}

void ExpectOutcomeMatches(const Problem& problem, const Expected& expected, const Outcome& outcome) {
  const PlainResult* const plain = NeedsPlain(problem) ? &PlainOf(problem, expected) : nullptr;
  ASSERT_EQ(outcome.terms.size(), problem.terms.size());
  for (size_t i = 0; i < problem.terms.size(); ++i) {
    SCOPED_TRACE("term " + std::to_string(i));
    const TermOutcome& actual = outcome.terms[i];
    const reference::TermResult& term = expected.result.terms[i];
    ExpectSumsMatch(actual.sums, term, problem.terms[i], plain ? &plain->terms[i] : nullptr, problem.hidden_size);
    if (actual.token_loss.empty()) continue;
    for (const TokenOutput& output : kTokenOutputs) {
      const bool is_loss = output.kept == &TermOutcome::token_loss;
      if (!is_loss && actual.lse.empty()) break;
      ExpectTokensNear(output.name, actual.*output.kept, term.*output.expected, term,
                       plain && is_loss ? &plain->terms[i].token_loss : nullptr);
    }
    if (actual.lse.empty()) continue;
    if (!plain) {
      ExpectTokensRelativelyNear("entropy", actual.entropy, term.entropy, term);
      ExpectTokensRelativelyNear("log_sum_sq_probs", actual.log_sum_sq_probs, term.log_sum_sq_probs, term);
    }
    ExpectArgmaxMatches(actual.argmax, term);
  }
  if (!outcome.grad_hidden.empty()) {
    ExpectTensorNear("grad_hidden", outcome.grad_hidden, expected.result.grad_hidden, plain ? &plain->grad_hidden : nullptr);
    ExpectIdleRowsZero(problem, outcome);
  }
  for (size_t i = 0; i < outcome.gradients.size(); ++i) {
    SCOPED_TRACE("head " + std::to_string(i));
    const auto gradient = expected.result.gradient.find(&expected.heads[i]);
    if (gradient == expected.result.gradient.end()) continue;
    ExpectGradientNear(outcome.gradients[i], gradient->second, plain, i, Suite().grad_weight_factor * kPlainFactor);
  }
}

Outcome ExpectEngineMatches(const Problem& problem, const EngineOptions& engine_options, const ComputeOptions& options) {
  return ExpectEngineMatches(problem, ComputeExpected(problem), engine_options, options);
}

Outcome ExpectEngineMatches(const Problem& problem, const Expected& expected, const EngineOptions& engine_options,
                            const ComputeOptions& options) {
  LoadedHeads heads(problem.heads, engine_options);
  return ExpectHeadsMatch(heads, problem, expected, options);
}

Outcome ExpectHeadsMatch(LoadedHeads& heads, const Problem& problem, const Expected& expected, const ComputeOptions& options) {
  Outcome outcome = heads.Compute(problem, options);
  if (options.grad_weight != GradWeightMode::kAccumulate) {
    for (const Gradient& gradient : outcome.gradients) ExpectGradientZero(gradient);
    outcome.gradients.clear();
  }
  ExpectOutcomeMatches(problem, expected, outcome);
  return outcome;
}

void ExpectGradientZero(const Gradient& gradient) {
  const auto is_zero = [](float value) { return value == 0.0f; };
  EXPECT_TRUE(std::all_of(gradient.weight.begin(), gradient.weight.end(), is_zero));
  EXPECT_TRUE(std::all_of(gradient.bias.begin(), gradient.bias.end(), is_zero));
}

void ExpectGradientNear(const Gradient& actual, const reference::HeadGradient& expected, const PlainResult* plain, size_t head,
                        double weight_factor) {
  ExpectTensorNear("grad_weight", ToDoubles(actual.weight), expected.weight, plain ? &plain->grad_weight[head] : nullptr,
                   weight_factor);
  ExpectTensorNear("grad_bias", ToDoubles(actual.bias),
                   reference::Matrix(1, static_cast<int64_t>(expected.bias.size()), expected.bias),
                   plain ? &plain->grad_bias[head] : nullptr);
}

reference::HeadGradient Combine(const reference::HeadGradient& a, double factor_a, const reference::HeadGradient& b,
                                double factor_b) {
  reference::HeadGradient sum = a;
  for (size_t i = 0; i < sum.weight.data.size(); ++i)
    sum.weight.data[i] = factor_a * a.weight.data[i] + factor_b * b.weight.data[i];
  for (size_t i = 0; i < sum.bias.size(); ++i) sum.bias[i] = factor_a * a.bias[i] + factor_b * b.bias[i];
  return sum;
}

}  // namespace headwater::testing
