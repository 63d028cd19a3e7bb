// The differentiable triple (loss, entropy, lse) and the per-token outputs beside it, where a careless form loses every digit.
//
// The hidden states are the identity, so that row i's logits are column i of the weight, exactly. The tests thus measure the
// engine's work on logits, not its products.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/support/comparison.h"

namespace headwater::testing {
namespace {

constexpr int64_t kVocabSize = 1100;
constexpr int64_t kValidVocabSize = 880;  // the last of four shards is padding alone
constexpr double kRelativeBound = 1e-6;
constexpr double kSmallest = 1e-12;     // down to which an output is relatively exact
constexpr double kRoundedBound = 4e-3;  // of gradients of which a 16-bit engine rounds each entry once

struct Row {
  std::vector<double> logits;  // [valid_vocab_size]
  int32_t target = 0;
};

struct TripleCase {
  std::string name;
  std::vector<Row> rows;
  double temperature = 1;
  double softcap = 0;
};

std::vector<double> Flat(double value) { return std::vector<double>(kValidVocabSize, value); }

std::vector<double> Peaks(double margin, const std::vector<size_t>& columns) {
  std::vector<double> logits = Flat(-0.25);
  for (const size_t column : columns) logits[column] += margin;
  return logits;
}

std::vector<double> Normal(uint64_t seed, double spread) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(0, spread);
  std::vector<double> logits = Flat(0);
  for (double& logit : logits) logit = normal(random);
  return logits;
}

// Each with the largest column as target, and with another one.
void AddBoth(const std::vector<double>& logits, std::vector<Row>* rows) {
  const auto top = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  rows->push_back({logits, top});
  rows->push_back({logits, top == 0 ? 1 : top - 1});
}

std::vector<TripleCase> TripleCases() {
  std::vector<TripleCase> cases;
  TripleCase one_hot = {"OneHot", {}};
  for (const double margin : {4.0, 15.5, 25.0, 34.25, 37.75, 60.0}) AddBoth(Peaks(margin, {700}), &one_hot.rows);
  cases.push_back(one_hot);
  TripleCase uniform = {"Uniform", {}};
  for (const double value : {0.0, 3.25, -40.0}) AddBoth(Flat(value), &uniform.rows);
  cases.push_back(uniform);
  // Within a shard, side by side and apart; and across shards.
  TripleCase ties = {"Ties", {}};
  for (const std::vector<size_t>& columns : {std::vector<size_t>{10, 11}, {3, 450}, {499, 500}, {0, 520, 879}}) {
    for (const double margin : {6.0, 30.5}) AddBoth(Peaks(margin, columns), &ties.rows);
  }
  cases.push_back(ties);
  TripleCase one_column = {"OneColumn", {}};
  for (const double value : {0.0, 7.5, -300.0}) one_column.rows.push_back({{value}, 0});
  cases.push_back(one_column);
  TripleCase cold = {"LowTemperature", {}, 0.1};
  TripleCase hot = {"HighTemperature", {}, 10};
  for (uint64_t seed = 1; seed < 5; ++seed) {
    AddBoth(Normal(seed, 1.0), &cold.rows);
    AddBoth(Normal(seed, 20.0), &hot.rows);
  }
  AddBoth(Peaks(3.5, {17}), &cold.rows);
  AddBoth(Peaks(250.0, {17}), &hot.rows);
  cases.push_back(cold);
  cases.push_back(hot);
  // Arguments far beyond the cap on both sides, close to it, and one column alone above all others.
  TripleCase capped = {"SaturatedCap", {}, 1, 12};
  AddBoth(Peaks(2000.0, {5, 600}), &capped.rows);
  AddBoth(Normal(7, 400.0), &capped.rows);
  AddBoth(Normal(8, 15.0), &capped.rows);
  std::vector<double> alone = Flat(-500);
  alone[321] = 40;
  AddBoth(alone, &capped.rows);
  cases.push_back(capped);
  return cases;
}

Problem MakeExact(const TripleCase& test, DataType type) {
  const int64_t rows = static_cast<int64_t>(test.rows.size());
  const auto valid = static_cast<int64_t>(test.rows.front().logits.size());
  Problem problem = {.rows = rows, .hidden_size = rows, .hidden_type = type};
  problem.hidden.assign(static_cast<size_t>(rows * rows), 0);
  TestHead head = {.spec = {.vocab_size = kVocabSize, .hidden_size = rows, .data_type = type, .has_bias = true, .trainable = true}};
  head.spec.transform.valid_vocab_size = valid;
  if (test.softcap > 0) head.spec.transform.softcap = test.softcap;
  head.weight.assign(static_cast<size_t>(kVocabSize * rows), std::numeric_limits<double>::quiet_NaN());  // of the padding
  head.bias.assign(kVocabSize, std::numeric_limits<double>::quiet_NaN());
  std::fill_n(head.bias.begin(), valid, 0.0);
  TestTerm term = {.row_count = rows};
  const reference::CrossEntropyOptions loss = {.temperature = test.temperature};
  term.loss = loss;
  for (int64_t i = 0; i < rows; ++i) {
    const Row& row = test.rows[static_cast<size_t>(i)];
    problem.hidden[static_cast<size_t>(i * rows + i)] = 1;
    for (int64_t v = 0; v < valid; ++v) head.weight[static_cast<size_t>(v * rows + i)] = row.logits[static_cast<size_t>(v)];
    term.targets.push_back(row.target);
  }
  problem.heads.push_back(std::move(head));
  problem.terms.push_back(std::move(term));
  RoundToStorage(&problem);
  return problem;
}

std::vector<EngineOptions> Partitions() {
  const EngineOptions four = {.shard_count = 4, .shard_weights = {5, 1, 3, 2}};
  return {EngineOptions(), four};
}

void ExpectRelative(const char* what, const std::vector<float>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    const double value = static_cast<double>(actual[i]);
    EXPECT_LE(std::abs(value - expected[i]), kRelativeBound * std::max(std::abs(expected[i]), kSmallest))
        << what << " of row " << i << ": " << value << ", expected " << expected[i];
  }
}

// Rows cancel in a column of grad_bias, and columns of equal logits are rounded alike, which no other computation's error shows. So
// each entry is compared with the magnitudes of its summands. Row i's gradient is column i of grad_weight.
void ExpectGradientsMatch(const Problem& problem, const EngineOptions& options) {
  // The gradient of the hidden states would be sums over columns that cancel.
  Outcome outcome = RunOnce(problem, options, {.grad_hidden = false});
  const Expected expected = ComputeExpected(problem);
  const reference::HeadGradient& gradient = expected.result.gradient.at(&expected.heads[0]);
  std::vector<float>& bias = outcome.gradients[0].bias;
  ASSERT_EQ(bias.size(), gradient.bias.size());
  const double bound = problem.hidden_type == DataType::kFloat32 ? kGradientBound : kRoundedBound;
  for (size_t v = 0; v < bias.size(); ++v) {
    double magnitude = 0;
    for (int64_t i = 0; i < problem.rows; ++i) magnitude += std::abs(gradient.weight.at(static_cast<int64_t>(v), i));
    EXPECT_LE(std::abs(static_cast<double>(bias[v]) - gradient.bias[v]), bound * magnitude + 1e-8) << "grad_bias of column " << v;
    bias[v] = static_cast<float>(gradient.bias[v]);
  }
  ExpectOutcomeMatches(problem, expected, outcome);
}

class TokenTriple : public ::testing::TestWithParam<TripleCase> {
 protected:
  // For both 16-bit and 32-bit heads, whole and on shards.
  template <typename Check>
  void ForEachForm(const Check& check) {
    for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
      const Problem problem = MakeExact(GetParam(), type);
      for (const EngineOptions& options : Partitions()) {
        SCOPED_TRACE(std::string(DataTypeName(type)) + ", " + std::to_string(options.shard_count) + " shards");
        check(problem, options);
      }
    }
  }
};

TEST_P(TokenTriple, OutputsAreExactDownToTheSmallest) {
  ForEachForm([](const Problem& problem, const EngineOptions& options) {
    const Expected expected = ComputeExpected(problem);
    const reference::TermResult& term = expected.result.terms[0];
    const ComputeOptions forward = {.backward = false, .grad_hidden = false, .grad_weight = GradWeightMode::kNone};
    const Outcome outcome = RunOnce(problem, options, forward);
    const TermOutcome& actual = outcome.terms[0];
    ExpectRelative("entropy", actual.entropy, term.entropy);
    ExpectRelative("log_sum_sq_probs", actual.log_sum_sq_probs, term.log_sum_sq_probs);
    for (size_t i = 0; i < actual.entropy.size(); ++i) {
      EXPECT_GE(actual.entropy[i], 0.0f) << i;
      EXPECT_LE(actual.log_sum_sq_probs[i], 0.0f) << i;
      EXPECT_LE(std::abs(actual.mean_logits[i] - term.mean_logits[i]), kTokenBound * std::max(1.0, term.max_abs_logit[i])) << i;
      EXPECT_EQ(actual.argmax[i], term.argmax[i]) << i;
    }
  });
}

// With factors of one kind alone the gradient is that kind's own, and with all of them together it is the sum.
TEST_P(TokenTriple, EachFactorHasItsOwnGradient) {
  ForEachForm([](Problem problem, const EngineOptions& options) {
    TestTerm& term = problem.terms[0];
    const size_t rows = static_cast<size_t>(problem.rows);
    for (size_t i = 0; i < rows; ++i) {
      const auto x = static_cast<float>(i);
      term.token_weights.push_back(std::cos(2 * x));
      term.entropy_factors.push_back(std::sin(3 * x + 1));
      term.lse_factors.push_back(std::cos(x + 1));
    }
    ExpectGradientsMatch(problem, options);
    for (const int kept : {0, 1, 2}) {
      SCOPED_TRACE(kept == 0 ? "loss alone" : kept == 1 ? "entropy alone" : "lse alone");
      Problem alone = problem;
      if (kept != 0) alone.terms[0].token_weights.assign(rows, 0.0f);
      if (kept != 1) alone.terms[0].entropy_factors.clear();
      if (kept != 2) alone.terms[0].lse_factors.assign(rows, 0.0f);
      ExpectGradientsMatch(alone, options);
    }
  });
}

// The gradient of the logits of a row adds up to its factor of lse: those of loss and entropy add up to 0.
TEST_P(TokenTriple, GradientsAddUpToTheFactorOfLse) {
  ForEachForm([](Problem problem, const EngineOptions& options) {
    problem.heads[0].spec.transform.softcap.reset();  // it has a derivative of its own in every column
    TestTerm& term = problem.terms[0];
    const size_t rows = static_cast<size_t>(problem.rows);
    term.entropy_factors.assign(rows, 0.0f);
    term.lse_factors.assign(rows, 0.0f);
    term.token_weights.assign(rows, 0.0f);
    const double temperature = std::get<reference::CrossEntropyOptions>(term.loss).temperature;
    for (const size_t row : {size_t{0}, rows / 2, rows - 1}) {
      Problem one = problem;
      one.terms[0].token_weights[row] = 1.5f;
      one.terms[0].entropy_factors[row] = -0.75f;
      one.terms[0].lse_factors[row] = 2.5f;
      const Outcome outcome = RunOnce(one, options);
      double sum = 0;
      double magnitude = 0;
      for (const float value : outcome.gradients[0].bias) {
        sum += static_cast<double>(value);
        magnitude += std::abs(static_cast<double>(value));
      }
      const double bound = problem.hidden_type == DataType::kFloat32 ? 1e-6 : kRoundedBound;
      EXPECT_LE(std::abs(sum - 2.5 / temperature), bound * magnitude) << "row " << row;
    }
  });
}

TEST_P(TokenTriple, FactorsOfZeroChangeNoBit) {
  ForEachForm([](Problem problem, const EngineOptions& options) {
    for (const GradWeightMode mode : {GradWeightMode::kAccumulate, GradWeightMode::kNone}) {
      ComputeOptions compute = {.grad_weight = mode};
      Problem zeros = problem;
      zeros.terms[0].entropy_factors.assign(static_cast<size_t>(problem.rows), 0.0f);
      zeros.terms[0].lse_factors.assign(static_cast<size_t>(problem.rows), 0.0f);
      EXPECT_TRUE(RunOnce(zeros, options, compute).BitwiseEquals(RunOnce(problem, options, compute)));
      // Without the outputs, the entropy is not even computed.
      compute.token_outputs = false;
      EXPECT_TRUE(RunOnce(zeros, options, compute).BitwiseEquals(RunOnce(problem, options, compute)));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, TokenTriple, ::testing::ValuesIn(TripleCases()), [](const auto& test) { return test.param.name; });

// Loss and lse with opposite factors: nothing of p is left, and the target's column keeps its factor.
TEST(TokenTriple, OppositeFactorsCancelExactly) {
  const ProblemOptions options = {.bias = true, .ignored_share = 0};
  Problem problem = MakeProblem(options);
  TestTerm& term = problem.terms[0];
  term.token_weights.assign(static_cast<size_t>(problem.rows), 0.75f);
  term.lse_factors.assign(static_cast<size_t>(problem.rows), -0.75f);
  std::vector<double> expected(static_cast<size_t>(options.vocab_size));
  for (const int32_t target : term.targets) expected[static_cast<size_t>(target)] -= 0.75;
  const Outcome outcome = RunOnce(problem);
  for (size_t v = 0; v < expected.size(); ++v) {
    EXPECT_LE(std::abs(outcome.gradients[0].bias[v] - expected[v]), 1e-6 * std::abs(expected[v])) << v;
  }
}

}  // namespace
}  // namespace headwater::testing
