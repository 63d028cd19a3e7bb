// Micro-batches of hundreds of rows in 16 bits, for which an engine may have other kernels than for a few. They take every option,
// are cut in every way, and have the data that breaks naive implementations.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/support/comparison.h"
#include "tests/kernels/support/kernel_suite.h"
#include "tests/kernels/support/plain_computation.h"

namespace headwater::testing {
namespace {

// More rows than a tile of any kernel, and a vocabulary of more than one.
ProblemOptions ManyRows(ProblemOptions options) {
  options = WithType(options, DataType::kBFloat16);
  options.rows = 390;
  options.hidden_size = 52;
  if (options.valid_vocab_size > 0) options.valid_vocab_size += 200;
  options.vocab_size = 301;
  return options;
}

class ManyRowsOption : public ::testing::TestWithParam<ProblemOptions> {
 protected:
  // Computes in every way that an engine is to be made, and compares with fp64.
  void ExpectMatches(ProblemOptions options, const std::vector<EngineOptions>& engines, const ComputeOptions& compute) const {
    // The reference takes longer than the engine: the tests of an option share its results.
    static std::map<std::string, std::pair<Problem, Expected>> solved;
    const std::string key = options.name + (options.entropy_factors || options.lse_factors ? ", factors" : "");
    auto found = solved.find(key);
    if (found == solved.end()) {
      Problem problem = MakeProblem(ManyRows(options));
      Expected expected = ComputeExpected(problem);
      found = solved.emplace(key, std::pair(std::move(problem), std::move(expected))).first;
    }
    const auto& [problem, expected] = found->second;
    for (const EngineOptions& engine : engines) {
      SCOPED_TRACE("shards " + std::to_string(engine.shard_count));
      ExpectEngineMatches(problem, expected, engine, compute);
    }
  }
};

TEST_P(ManyRowsOption, MatchesFp64) { ExpectMatches(GetParam(), {EngineOptions()}, {}); }

// Chunks of as many rows as a large micro-batch, and a small rest.
TEST_P(ManyRowsOption, MatchesFp64OnUnevenShardsInChunks) {
  ExpectMatches(GetParam(), {{.shard_count = 3, .shard_weights = {2, 5, 1}, .token_chunk_rows = 300}}, {});
}

// Only the outputs of a training step: no entropy and no argmax.
TEST_P(ManyRowsOption, MatchesFp64WithoutTokenOutputs) {
  ExpectMatches(GetParam(), {EngineOptions(), {.shard_count = 3}}, {.token_outputs = false});
}

// Outputs alone: an engine may have them without logits in memory.
TEST_P(ManyRowsOption, OutputsWithoutAGradientMatchFp64) {
  ProblemOptions options = GetParam();
  options.entropy_factors = options.lse_factors = false;
  ExpectMatches(options, {EngineOptions(), {.shard_count = 3}},
                {.backward = false, .grad_hidden = false, .grad_weight = GradWeightMode::kNone});
}

INSTANTIATE_TEST_SUITE_P(All, ManyRowsOption, ::testing::ValuesIn(CrossEntropyOptionCases()),
                         [](const auto& test) { return test.param.name; });

// The following tests ask for no token outputs either, in bf16: the form that large training steps take.
ComputeOptions TrainingStep() { return {.token_outputs = false}; }

ProblemOptions Plain(ProblemOptions options = {}) {
  options.bias = true;
  return ManyRows(options);
}

TEST(ManyRowsTest, OddSizes) {
  struct Sizes {
    int64_t rows, vocab_size, hidden_size;
  };
  for (const Sizes& sizes : std::vector<Sizes>{
           {257, 256, 64}, {512, 512, 128}, {300, 3, 8}, {300, 2, 1}, {259, 257, 37}, {700, 129, 65}, {384, 1025, 24}}) {
    SCOPED_TRACE("N = " + std::to_string(sizes.rows) + ", V = " + std::to_string(sizes.vocab_size) +
                 ", H = " + std::to_string(sizes.hidden_size));
    ProblemOptions options = Plain();
    options.rows = sizes.rows;
    options.vocab_size = sizes.vocab_size;
    options.hidden_size = sizes.hidden_size;
    ExpectEngineMatches(MakeProblem(options), {}, TrainingStep());
  }
}

// Logits far above the targets': no exponential of their difference fits.
TEST(ManyRowsTest, LogitsUpTo600) {
  ExpectEngineMatches(MakeProblem(Plain({.logit_spread = 190})), {}, TrainingStep());
  // A single such row among ordinary ones.
  Problem problem = MakeProblem(Plain());
  for (int64_t h = 0; h < problem.hidden_size; ++h) problem.hidden[static_cast<size_t>(200 * problem.hidden_size + h)] *= 64;
  RoundToStorage(&problem);
  ExpectEngineMatches(problem, {}, TrainingStep());
}

// Rows whose target has nearly all the probability: their loss and gradient come from the other columns.
TEST(ManyRowsTest, ConfidentRows) {
  ProblemOptions options = Plain({.logit_spread = 0.5, .ignored_share = 0});
  options.bias = false;
  options.rows = 280;
  options.vocab_size = 601;
  options.hidden_size = 256;
  Problem problem = MakeProblem(options);
  for (int64_t i = 0; i < options.rows; ++i) {
    MakeConfident(&problem, i, 1 + 2 * i, 7 + 20 * static_cast<double>(i) / static_cast<double>(options.rows));
  }
  RoundToStorage(&problem);
  const Outcome outcome = ExpectEngineMatches(problem, {}, TrainingStep());
  EXPECT_GT(outcome.terms[0].sums.loss_sum, 0);
}

// Many rows add to one row of grad_weight.
TEST(ManyRowsTest, OneTargetForAll) {
  for (const int32_t target : {0, 150, 300}) {
    Problem problem = MakeProblem(Plain());
    std::fill(problem.terms[0].targets.begin(), problem.terms[0].targets.end(), target);
    ExpectEngineMatches(problem, {.shard_count = 2}, TrainingStep());
  }
}

TEST(ManyRowsTest, MostRowsIgnored) {
  for (const double share : {0.4, 0.9, 1.0}) {
    SCOPED_TRACE("ignored " + std::to_string(share));
    ExpectEngineMatches(MakeProblem(Plain({.ignored_share = share})), {}, TrainingStep());
  }
}

TEST(ManyRowsTest, NonFiniteRowsAreCountedAndStayAlone) {
  const Problem clean = MakeProblem(Plain());
  for (const double value : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    Problem problem = clean;
    problem.terms[0].targets[70] = problem.terms[0].targets[380] = 3;
    problem.hidden[static_cast<size_t>(70 * problem.hidden_size + 5)] = value;
    problem.hidden[static_cast<size_t>(380 * problem.hidden_size)] = value;
    ComputeOptions options = TrainingStep();
    options.grad_weight = GradWeightMode::kNone;
    const Outcome expected = RunOnce(clean, {}, options);
    const Outcome outcome = RunOnce(problem, {}, options);
    EXPECT_EQ(outcome.terms[0].sums.non_finite_row_count, 2);
    EXPECT_FALSE(std::isfinite(outcome.terms[0].sums.loss_sum));
    for (int64_t row = 0; row < problem.rows; ++row) {
      if (row == 70 || row == 380) continue;
      for (int64_t h = 0; h < problem.hidden_size; ++h) {
        const size_t element = static_cast<size_t>(row * problem.hidden_size + h);
        // A chunk with such rows may be computed in another form.
        ASSERT_LE(std::abs(outcome.grad_hidden[element] - expected.grad_hidden[element]),
                  0.02 * std::abs(expected.grad_hidden[element]) + 1e-2)
            << "row " << row;
      }
    }
  }
}

// Kept beside the accumulator, whether a slot has room for the rows (a large head) or for products only.
TEST(ManyRowsTest, AreStagedAndCommitted) {
  for (const bool is_large : {false, true}) {
    ProblemOptions options = Plain({.staging_slots = 1});
    options.rows = 260;
    options.vocab_size = is_large ? 1501 : 301;
    options.hidden_size = is_large ? 220 : 52;
    const Problem problem = MakeProblem(options);
    const Expected expected = ComputeExpected(problem);
    const PlainResult& plain = PlainOf(problem, expected);
    for (const int32_t shard_count : {1, 3}) {
      SCOPED_TRACE((is_large ? "a large head, shards " : "a small head, shards ") + std::to_string(shard_count));
      LoadedHeads heads(problem.heads, EngineOptions{.shard_count = shard_count});
      Outcome outcome;
      std::unique_ptr<StagedContribution> staged = heads.Stage(problem, TrainingStep(), &outcome);
      ExpectGradientZero(outcome.gradients[0]);
      outcome.gradients.clear();
      ExpectOutcomeMatches(problem, expected, outcome);
      ASSERT_TRUE(staged->Commit(1).ok());
      const Gradient gradient = heads.ReadGradient(0);
      ExpectTensorNear("grad_weight", ToDoubles(gradient.weight), expected.gradient(0).weight, &plain.grad_weight[0],
                       Suite().grad_weight_factor * kPlainFactor);
      // Minus the same contribution leaves next to nothing, of the weights' part alone too.
      ASSERT_TRUE(heads.Stage(problem, TrainingStep())->Commit(-1).ok());
      const Gradient rest = heads.ReadGradient(0);
      EXPECT_LE(rest.SquaredNorm(), 1e-10 * gradient.SquaredNorm());
      EXPECT_LE(Gradient{.weight = rest.weight}.SquaredNorm(), 1e-10 * Gradient{.weight = gradient.weight}.SquaredNorm());
    }
  }
}

// More rows than an engine has logits of at once: it cuts the micro-batch into chunks, or a chunk's logits into slices. An odd
// number, so that the last one is smaller.
TEST(ManyRowsTest, MoreThanHaveLogitsAtOnce) {
  std::vector<ProblemOptions> cases = CrossEntropyOptionCases();
  cases = {cases.front(), cases.back()};
  cases.push_back({});
  cases.back().name = "Jsd";
  cases.back().jsd = true;
  cases.push_back(cases.back());
  cases.back().name = "JsdWithHardLoss";
  cases.back().bias = true;
  cases.back().hard_loss_weight = 0.3;
  cases.back().teacher_hidden_size = 20;
  cases.push_back({});
  cases.back().name = "TopKTeacher";
  cases.back().top_k = 12;
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
    for (ProblemOptions options : cases) {
      options = WithType(options, type);
      options.rows = 5501;
      options.vocab_size = 131;
      options.hidden_size = 36;
      options.ignored_share = 0.03;
      const Problem problem = MakeProblem(options);
      const Expected expected = ComputeExpected(problem);
      for (const int32_t shard_count : {1, 3}) {
        SCOPED_TRACE(options.name + " " + DataTypeName(type) + ", shards " + std::to_string(shard_count));
        const EngineOptions engine_options = {.shard_count = shard_count};
        const Outcome outcome = ExpectEngineMatches(problem, expected, engine_options);
        EXPECT_TRUE(outcome.BitwiseEquals(RunOnce(problem, engine_options)));
      }
    }
  }
}

}  // namespace
}  // namespace headwater::testing
