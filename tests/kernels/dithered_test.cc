// Gradients with a resolution: the dithered entries, their draws, and everything else unchanged.
//
// Where the hidden states are the identity, row i's logits are column i of the weight, and so is its gradient of the logits. The
// tensor grad_weight then shows every entry.
#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/error.h"
#include "tests/kernels/support/comparison.h"
#include "tests/kernels/support/kernel_suite.h"
#include "tests/unit/expect_status.h"

namespace headwater::testing {
namespace {

constexpr int64_t kFewRows = 24;
constexpr int64_t kDitheredColumns = 1100;
constexpr double kTau = 0x1p-6;
constexpr int64_t kSamples = 256;  // rows by which an engine chooses the form of gradients
constexpr uint64_t kDitherSeed = 0x5EED;
constexpr int64_t kMostOtherDraws = 4;  // see Dithered16

std::vector<ProblemOptions> DitherCases() {
  return {
      {.name = "Plain"},
      {.name = "Flat", .logit_spread = 0.05},
      {.name = "Confident", .logit_spread = 20},
      {.name = "CommonOffset", .bias = true, .logit_spread = 0.5},
      {.name = "Softcap", .softcap = 4},
      {.name = "Temperature", .temperature = 0.6},
      {.name = "Smoothing", .label_smoothing = 0.1},
      {.name = "Everything",
       .bias = true,
       .logit_scale = -0.8,
       .valid_vocab_size = 880,
       .token_weights = true,
       .class_weights = true,
       .token_scaling = true,
       .label_smoothing = 0.2,
       .z_loss = 1e-3,
       .loss_scale = 3},
      {.name = "ForwardKl", .jsd = true, .beta = 0},
      {.name = "Jsd",
       .valid_vocab_size = 880,
       .token_weights = true,
       .jsd = true,
       .student_temperature = 1.5,
       .teacher_temperature = 0.7},
      {.name = "ReverseKlOfOtherVocabulary", .softcap = 6, .loss_scale = 0.25, .jsd = true, .beta = 1, .teacher_vocab_size = 700},
  };
}

// A problem with an identity for hidden states, of these sizes.
Problem MakeIdentityProblem(ProblemOptions options, int64_t rows = kFewRows, int64_t vocab_size = kDitheredColumns) {
  options.rows = options.hidden_size = rows;
  options.vocab_size = vocab_size;
  options.staging_slots = 1;
  Problem problem = MakeProblem(options);
  std::vector<double> identity(static_cast<size_t>(rows * rows));
  for (int64_t i = 0; i < rows; ++i) identity[static_cast<size_t>(i * (rows + 1))] = 1;
  problem.hidden = identity;
  TestTerm& term = problem.terms[0];
  if (options.jsd) term.teacher_hidden = identity;
  for (size_t head = 0; head < problem.heads.size(); ++head) {
    std::mt19937_64 random(11 + head);
    const std::vector<double> logits =
        RandomValues(random, static_cast<int64_t>(problem.heads[head].weight.size()), options.logit_spread, DataType::kFloat32);
    // Padding is NaN and stays so.
    for (size_t i = 0; i < logits.size(); ++i) {
      if (!std::isnan(problem.heads[head].weight[i])) problem.heads[head].weight[i] = logits[i];
    }
    if (options.name == "CommonOffset") {
      for (double& bias : problem.heads[head].bias) bias += 300;
    }
  }
  term.gradient_resolution = kTau;
  term.dither_seed = kDitherSeed;
  RoundToStorage(&problem);
  return problem;
}

Problem WithoutResolution(Problem problem) {
  for (TestTerm& term : problem.terms) term.gradient_resolution = 0;
  return problem;
}

// Everything but gradients is bitwise the same.
void ExpectSameButGradients(Outcome a, Outcome b) {
  for (Outcome* outcome : {&a, &b}) {
    outcome->gradients.clear();
    outcome->grad_hidden_bytes.clear();
    outcome->terms[0].sums.dither = {};
  }
  EXPECT_TRUE(a.BitwiseEquals(b));
}

class Dithered : public ::testing::TestWithParam<ProblemOptions> {
 protected:
  Dithered() : problem_(MakeIdentityProblem(GetParam())) {}

  // Whether the engine has a resolution for this loss. If not, it must say so.
  bool IsBuilt() const {
    const auto* cross_entropy = std::get_if<reference::CrossEntropyOptions>(&problem_.terms[0].loss);
    if (Suite().dither.has_smoothing || cross_entropy == nullptr || cross_entropy->label_smoothing == 0) return true;
    LoadedHeads heads(problem_.heads, {});
    const auto result = heads.TryCompute(problem_, {});
    EXPECT_TRUE(HasReason(result.status(), ErrorReason::kFeatureNotBuilt)) << result.status();
    EXPECT_NE(result.status().message().find("gradient_resolution"), std::string::npos) << result.status();
    ExpectGradientZero(heads.ReadGradient(0));
    return false;
  }

  const Problem problem_;
};

INSTANTIATE_TEST_SUITE_P(All, Dithered, ::testing::ValuesIn(DitherCases()), [](const auto& test) { return test.param.name; });

// Entries of which an engine and the reference make different things. `tolerance` is relative.
int64_t CountOtherEntries(const Problem& problem, const Outcome& outcome, const Expected& expected, double tolerance) {
  const std::vector<float>& actual = outcome.gradients[0].weight;
  const reference::Matrix& weight = expected.gradient(0).weight;
  EXPECT_EQ(actual.size(), weight.data.size());
  int64_t count = 0;
  for (int64_t row = 0; row < problem.rows; ++row) {
    double largest = 0;
    for (int64_t v = 0; v < weight.rows; ++v) largest = std::max(largest, std::abs(weight.at(v, row)));
    for (int64_t v = 0; v < problem.heads[0].spec.transform.valid_vocab_size; ++v) {
      const double value = static_cast<double>(actual[static_cast<size_t>(v * problem.rows + row)]);
      const double entry = weight.at(v, row);
      if (!(std::abs(value - entry) <= tolerance * std::abs(entry) + 2e-6 * largest)) ++count;
    }
  }
  return count;
}

void ExpectReportNear(const GradientDither& actual, const GradientDither& expected, double tolerance) {
  EXPECT_NEAR(static_cast<double>(actual.entry_count), static_cast<double>(expected.entry_count),
              tolerance * static_cast<double>(expected.entry_count));
  EXPECT_NEAR(actual.squared_error, expected.squared_error, tolerance * expected.squared_error);
  EXPECT_NEAR(actual.squared_norm, expected.squared_norm, tolerance * expected.squared_norm);
}

TEST_P(Dithered, MatchesFp64EntryByEntry) {
  if (!IsBuilt()) return;
  const Expected expected = ComputeExpected(problem_);
  EXPECT_GT(expected.result.terms[0].sums.dither.entry_count, kFewRows * kDitheredColumns / 4);
  for (const int32_t shards : {1, 3}) {
    for (const int64_t chunk_rows : {0, 7}) {
      const EngineOptions engine = {.shard_count = shards, .token_chunk_rows = chunk_rows, .thread_count = 2 * shards};
      const Outcome outcome = ExpectEngineMatches(problem_, engine);
      EXPECT_EQ(CountOtherEntries(problem_, outcome, expected, 1e-5), 0) << shards << " shards, chunks of " << chunk_rows;
      EXPECT_EQ(outcome.terms[0].sums.dither.entry_count, expected.result.terms[0].sums.dither.entry_count);
      ExpectReportNear(outcome.terms[0].sums.dither, expected.result.terms[0].sums.dither, 1e-4);
    }
  }
}

TEST_P(Dithered, LossesAndOutputsAreBitwiseThoseOfTheExactGradient) {
  if (!IsBuilt()) return;
  const Outcome exact = RunOnce(WithoutResolution(problem_));
  const Outcome dithered = RunOnce(problem_);
  EXPECT_FALSE(dithered.gradients == exact.gradients);
  EXPECT_EQ(exact.terms[0].sums.dither.entry_count, 0);
  ExpectSameButGradients(dithered, exact);
}

// A repeat, a staged contribution that is committed, and a call that computes grad_weight alone.
TEST_P(Dithered, RepeatsAndCommitsHaveTheSameBits) {
  if (!IsBuilt()) return;
  LoadedHeads heads(problem_.heads, {});
  const Outcome first = heads.Compute(problem_);
  heads.ZeroGradients();
  EXPECT_TRUE(heads.Compute(problem_).BitwiseEquals(first));
  heads.ZeroGradients();
  Outcome staged;
  auto contribution = heads.Stage(problem_, {}, &staged);
  ASSERT_TRUE(contribution->Commit(1).ok());
  if (Suite().keeps_staged_rows(kFewRows, kFewRows, 1)) {
    EXPECT_TRUE(heads.ReadGradient(0) == first.gradients[0]);
  }
  EXPECT_EQ(staged.grad_hidden_bytes, first.grad_hidden_bytes);
  heads.ZeroGradients();
  const ComputeOptions weight_alone = {.grad_hidden = false};
  EXPECT_TRUE(heads.Compute(problem_, weight_alone).gradients == first.gradients);
}

// The same entries become the same values whatever multiplies them afterwards.
TEST_P(Dithered, FactorsComeAfterTheDraw) {
  if (!IsBuilt()) return;
  const Outcome first = RunOnce(problem_);
  Problem scaled = problem_;
  scaled.terms[0].loss_scale *= -4;
  const Outcome other = RunOnce(scaled);
  for (size_t i = 0; i < first.gradients[0].weight.size(); ++i) {
    ASSERT_EQ(other.gradients[0].weight[i], -4 * first.gradients[0].weight[i]) << i;
  }
  EXPECT_EQ(other.terms[0].sums.dither.squared_error, first.terms[0].sums.dither.squared_error);
}

// In 16 bits, in the form of few rows and in that of many. An engine that rounds entries first may round one between two numbers
// otherwise than the reference does. A handful of several hundred thousand then meets another draw.
class Dithered16 : public ::testing::TestWithParam<std::tuple<DataType, int64_t>> {};

INSTANTIATE_TEST_SUITE_P(All, Dithered16,
                         ::testing::Combine(::testing::Values(DataType::kBFloat16, DataType::kFloat16),
                                            ::testing::Values(kFewRows, int64_t{320})),
                         [](const auto& test) {
                           return std::string(DataTypeName(std::get<0>(test.param))) + "Rows" +
                                  std::to_string(std::get<1>(test.param));
                         });

TEST_P(Dithered16, MatchesFp64EntryByEntryAndRepeats) {
  const auto [type, rows] = GetParam();
  Problem problem = MakeIdentityProblem(
      {.head_type = type, .hidden_type = type, .bias = true, .softcap = 12, .ignored_share = 0.1, .token_weights = true}, rows);
  if (Suite().dither.rounds_entries) problem.terms[0].dithered_type = type;
  if (Suite().dither.rounds_units && type == DataType::kBFloat16) problem.terms[0].dither_unit_type = type;
  const Expected expected = ComputeExpected(problem);
  ComputeOptions options;
  options.token_outputs = false;  // which would take many rows out of their form
  LoadedHeads heads(problem.heads, {});
  const Outcome outcome = heads.Compute(problem, options);
  EXPECT_LE(CountOtherEntries(problem, outcome, expected, 1.2e-2), kMostOtherDraws);
  ExpectReportNear(outcome.terms[0].sums.dither, expected.result.terms[0].sums.dither, 1e-2);
  heads.ZeroGradients();
  EXPECT_TRUE(heads.Compute(problem, options).BitwiseEquals(outcome));
  ExpectSameButGradients(outcome, heads.Compute(WithoutResolution(problem), options));
}

double SquaredDifference(const std::vector<double>& a, const std::vector<double>& b, double factor) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] * factor - b[i]) * (a[i] * factor - b[i]);
  return sum;
}

void NormalizeRows(int64_t columns, std::vector<double>* values) {
  for (size_t start = 0; start < values->size(); start += static_cast<size_t>(columns)) {
    double sum = 0;
    for (size_t i = start; i < start + static_cast<size_t>(columns); ++i) sum += (*values)[i] * (*values)[i];
    for (size_t i = start; i < start + static_cast<size_t>(columns); ++i) (*values)[i] /= std::sqrt(sum);
  }
}

// Without a bias an engine may keep the entries of many rows as a list. Flat rows have too many at a fine resolution. It chooses
// by a sample of rows, which misleads where no other row has frequent columns. These may stay a matrix. More than 2048
// rows of a cross entropy come in several slices. With a bias, here of zeros, there is no list. An engine without lists gets a
// smaller problem.
struct ListCase {
  std::string name;
  double resolution;
  double logit_spread;
  bool jsd = false;
  int64_t rows = 1043;  // the width, too: grad_weight has padding
  int64_t vocab_size = 11001;
  bool mostly_flat = false;
  bool frequent = false;  // every eighth column is
};

class DitheredList : public ::testing::TestWithParam<ListCase> {};

INSTANTIATE_TEST_SUITE_P(
    All, DitheredList,
    ::testing::Values(
        ListCase{.name = "Flat", .resolution = 0x1p-10, .logit_spread = 0.05},
        ListCase{.name = "Frequent", .resolution = 0x1p-10, .logit_spread = 0.05, .vocab_size = 24001, .frequent = true},
        ListCase{.name = "MostlyFlat",
                 .resolution = 0x1p-10,
                 .logit_spread = 0.05,
                 .vocab_size = 24001,
                 .mostly_flat = true,
                 .frequent = true},
        ListCase{.name = "Divergence", .resolution = kTau, .logit_spread = 24, .jsd = true},
        ListCase{.name = "FrequentDivergence", .resolution = kTau, .logit_spread = 2, .jsd = true, .frequent = true},
        ListCase{.name = "Slices", .resolution = kTau, .logit_spread = 2, .rows = 2064, .vocab_size = 22001, .frequent = true}),
    [](const auto& test) { return test.param.name; });

TEST_P(DitheredList, HasTheEntriesOfTheMatrixRepeatsAndCommits) {
  const ListCase& of = GetParam();
  const bool may_list = Suite().dither.rounds_entries;
  const int64_t rows = may_list ? of.rows : 68;
  Problem problem = MakeIdentityProblem({.head_type = DataType::kBFloat16,
                                         .hidden_type = DataType::kBFloat16,
                                         .logit_spread = of.logit_spread,
                                         .ignored_share = 0,
                                         .token_weights = true,
                                         .jsd = of.jsd},
                                        rows, may_list ? of.vocab_size : 2001);
  for (int64_t row = 0; row < rows && of.mostly_flat; ++row) {
    const int64_t next_sample = (row * kSamples + rows - 1) / rows;
    if (next_sample * rows / kSamples != row) problem.hidden[static_cast<size_t>(row * (rows + 1))] = 0x1p-8;
  }
  for (TestHead& head : problem.heads) {
    const auto width = static_cast<size_t>(head.spec.hidden_size);
    for (size_t i = 0; i < head.weight.size() && of.frequent; ++i) head.weight[i] -= i / width % 8 == 0 ? 0 : 7;
  }
  if (of.frequent) RoundToStorage(&problem);
  for (float& weight : problem.terms[0].token_weights) weight = weight == 0 ? 1 : weight;  // such rows would not be computed
  problem.terms[0].gradient_resolution = of.resolution;
  Problem with_bias = problem;
  with_bias.heads[0].spec.has_bias = true;
  with_bias.heads[0].bias.assign(static_cast<size_t>(with_bias.heads[0].spec.vocab_size), 0);
  const ComputeOptions options = {.token_outputs = false};
  LoadedHeads heads(problem.heads, {}), other_heads(with_bias.heads, {});
  const Outcome outcome = heads.Compute(problem, options), other = other_heads.Compute(with_bias, options);
  EXPECT_TRUE(outcome.gradients[0].weight == other.gradients[0].weight);
  ASSERT_OK_AND_ASSIGN(const GradientStats stats, heads.head(0).ComputeGradientStats());
  const double norm = outcome.gradients[0].SquaredNorm();
  EXPECT_NEAR(stats.norm_squared, norm, 1e-6 * norm);
  EXPECT_EQ(outcome.terms[0].sums.dither.entry_count, other.terms[0].sums.dither.entry_count);
  EXPECT_EQ(outcome.terms[0].sums.dither.squared_error, other.terms[0].sums.dither.squared_error);
  EXPECT_EQ(outcome.terms[0].sums.loss_sum, other.terms[0].sums.loss_sum);
  const std::vector<double>& expected_hidden = other.grad_hidden;
  const double zero = SquaredDifference(expected_hidden, std::vector<double>(expected_hidden.size()), 1);
  EXPECT_LE(SquaredDifference(outcome.grad_hidden, expected_hidden, 1), 4e-3 * 4e-3 * zero);

  heads.ZeroGradients();
  EXPECT_TRUE(heads.Compute(problem, options).BitwiseEquals(outcome));
  heads.ZeroGradients();
  Outcome staged;
  auto contribution = heads.Stage(problem, options, &staged);
  ASSERT_TRUE(contribution->Commit(1).ok());
  if (Suite().keeps_staged_rows(rows, rows, 1)) {
    EXPECT_TRUE(heads.ReadGradient(0) == outcome.gradients[0]);
  }
  EXPECT_EQ(staged.grad_hidden_bytes, outcome.grad_hidden_bytes);
  // To a gradient that is there it is added.
  const std::vector<double> once = ToDoubles(outcome.gradients[0].weight);
  const std::vector<double> twice = ToDoubles(heads.Compute(problem, options).gradients[0].weight);
  EXPECT_LE(SquaredDifference(twice, once, 0.5), 1e-10 * SquaredDifference(once, std::vector<double>(once.size()), 1));
}

// Over 64 seeds. With hidden states and weights of norm 1 both gradients have the squared error of the entries.
class DitherError : public ::testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(All, DitherError, ::testing::Bool(), [](const auto& test) { return test.param ? "Jsd" : "CrossEntropy"; });

TEST_P(DitherError, MatchesTheReportAndFallsWithTheNumberOfSeeds) {
  constexpr int kSeeds = 64;
  const ProblemOptions options = {
      .rows = 48, .vocab_size = 700, .hidden_size = 32, .logit_scale = 15, .ignored_share = 0, .jsd = GetParam()};
  Problem problem = MakeProblem(options);
  for (TestHead& head : problem.heads) NormalizeRows(options.hidden_size, &head.weight);
  NormalizeRows(options.hidden_size, &problem.hidden);
  if (GetParam()) NormalizeRows(options.hidden_size, &problem.terms[0].teacher_hidden);
  RoundToStorage(&problem);
  LoadedHeads heads(problem.heads, {});
  const Outcome exact = heads.Compute(problem);
  const std::vector<double> exact_weight = ToDoubles(exact.gradients[0].weight);
  problem.terms[0].gradient_resolution = kTau;
  std::vector<double> hidden_sum(exact.grad_hidden.size()), weight_sum(exact_weight.size());
  double hidden_error = 0, weight_error = 0, reported = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    heads.ZeroGradients();
    problem.terms[0].dither_seed = static_cast<uint64_t>(seed);
    const Outcome outcome = heads.Compute(problem);
    const std::vector<double> weight = ToDoubles(outcome.gradients[0].weight);
    hidden_error += SquaredDifference(outcome.grad_hidden, exact.grad_hidden, 1);
    weight_error += SquaredDifference(weight, exact_weight, 1);
    for (size_t i = 0; i < weight.size(); ++i) weight_sum[i] += weight[i];
    for (size_t i = 0; i < hidden_sum.size(); ++i) hidden_sum[i] += outcome.grad_hidden[i];
    reported += outcome.terms[0].sums.dither.squared_error;
  }
  const double scale = options.logit_scale * options.logit_scale;
  EXPECT_NEAR(weight_error / (scale * reported), 1, 0.1);
  EXPECT_NEAR(hidden_error / (scale * reported), 1, 0.1);
  // The mean's, which a bias would keep up.
  EXPECT_NEAR(SquaredDifference(weight_sum, exact_weight, 1.0 / kSeeds) * kSeeds * kSeeds / (scale * reported), 1, 0.1);
  EXPECT_NEAR(SquaredDifference(hidden_sum, exact.grad_hidden, 1.0 / kSeeds) * kSeeds * kSeeds / (scale * reported), 1, 0.1);
}

// Where a row has no resolution: nothing beside the target, a loss that is not finite, a divergence of equal sides.
TEST(DitheredRows, WithoutAnythingBelowAreExact) {
  Problem problem = MakeIdentityProblem({.name = "OneColumn", .valid_vocab_size = 1, .ignored_share = 0});
  EXPECT_TRUE(RunOnce(problem).BitwiseEquals(RunOnce(WithoutResolution(problem))));
  problem = MakeIdentityProblem({.name = "EqualSides", .jsd = true});
  problem.heads[1].weight = problem.heads[0].weight;
  EXPECT_TRUE(RunOnce(problem).BitwiseEquals(RunOnce(WithoutResolution(problem))));
}

TEST(DitheredRows, OfADivergenceOverManyShardsAreMade) {
  const Problem problem = MakeIdentityProblem({.name = "Jsd", .jsd = true});
  LoadedHeads heads(problem.heads, {.shard_count = 65});
  ASSERT_OK_AND_ASSIGN(const MicroBatchResult result, heads.TryCompute(problem, {}));
  EXPECT_GT(result.terms[0].dither.entry_count, kFewRows * kDitheredColumns / 4);
}

}  // namespace
}  // namespace headwater::testing
