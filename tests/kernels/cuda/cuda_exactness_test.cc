// Exactness of the CUDA engine in bf16 at real sizes, against fp64, in every regime of the logits; bitwise repeatability.
//
// Error of a gradient: of error_measure.h; a row or a column may have ten times the whole tensor's. The figures go to the file that
// HEADWATER_FIGURES names.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/cuda/cuda_problem.h"
#include "tests/kernels/cuda/cuda_reference.h"
#include "tests/kernels/cuda/cuda_test_environment.h"

namespace headwater::testing {
namespace {

const bool kSkipsWithoutGpu = SkipTestsWithoutGpu();

const ProblemShape kSmall = {"n512_h1024_v32000", 512, 1024, 32000};
const ProblemShape kLarge = {"n256_h4096_v128256", 256, 4096, 128256};
// Its logits come slice by slice, except in the form of exponentials.
const ProblemShape kManyRows = {"n4500_h1024_v8000", 4500, 1024, 8000};
// So narrow that a tile's main loop is over before its neighbour's results have left: writing limits the exponentials' product.
const ProblemShape kNarrow = {"n4500_h72_v20001", 4500, 72, 20001};

// No power of two, so that a scale that is rounded shows.
constexpr double kLossScale = 0.37;
// The required error of 16-bit gradients in any form of the engine.
constexpr double kAnyForm = 2.6e-3;
constexpr int64_t kWorkspaceBytes = int64_t{2} << 30;

struct GradientBounds {
  double grad_hidden = kAnyForm;
  double grad_weight = kAnyForm;
};

// The form for large micro-batches on Hopper keeps the targets' part out of every 16-bit matrix.
bool HasExponentialForm(const ProblemShape& shape, const EngineOptions& options) {
  return GpuCapability() == 90 && shape.rows > 256 && !options.portable_kernels;
}

// Whether nearly all probability is the targets'.
bool IsConfident(Regime regime) {
  return regime == Regime::kConfident || regime == Regime::kThreeNines || regime == Regime::kFiveNines ||
         regime == Regime::kNineNines;
}

GradientBounds CrossEntropyBounds(Regime regime, bool exponential_form) {
  if (!exponential_form || regime == Regime::kRealistic || regime == Regime::kNearlyEqual) return {};
  if (regime == Regime::kFlat) return {1.9e-3, 2e-4};
  if (regime == Regime::kWide) return {2.1e-3, 1.5e-3};
  return {1.9e-3, regime == Regime::kConfident ? kAnyForm : 3e-4};
}

GradientBounds DivergenceBounds(Regime regime) {
  if (regime == Regime::kFlat) return {2.2e-3, 2.2e-3};
  return regime == Regime::kWide || regime == Regime::kNearlyEqual ? GradientBounds{3.0e-3, 3.0e-3} : GradientBounds{};
}

BlasContext& Blas() {
  static BlasContext& context = *new BlasContext;  // never destroyed: CUDA may be gone by then
  return context;
}

double Mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// Keeps a figure, and fails the test if it exceeds its bound. NaN fails.
void ExpectFigure(const std::string& name, double value, const std::string& unit, double at_most) {
  RunFigures().Add({name, value, unit, at_most});
  std::printf("%-76s %10.3e  (at most %.1e)\n", name.c_str(), value, at_most);
  EXPECT_LE(value, at_most) << name;
}

// Less than kAnyForm is required of whole tensors only. A row of grad_weight that is no row's target has the error of M's rounding,
// however exact the others are.
void ExpectGradientFigure(const std::string& name, const TensorErrors& errors, double at_most) {
  ExpectFigure(name, errors.whole, "relative error", at_most);
  const double worst = 10 * std::max(at_most, kAnyForm);
  EXPECT_LE(errors.worst_row, worst) << name << ", worst row";
  EXPECT_LE(errors.worst_column, worst) << name << ", worst column";
}

// The mean of the rows' losses: to fp32's digits, and as far as the tensor cores sum logits exactly.
void ExpectLossFigure(const std::string& name, const DeviceOutcome& outcome, const RowResults& expected, int64_t width) {
  const double mean_loss = Mean(expected.loss);
  const double rows = static_cast<double>(expected.loss.size());
  RunFigures().Add({name + "_mean_loss", mean_loss, "nats", {}});
  EXPECT_EQ(outcome.sums.valid_token_count, static_cast<int64_t>(expected.loss.size()));
  EXPECT_EQ(outcome.sums.non_finite_row_count, 0);
  double token_sum = 0;
  for (const float loss : outcome.token_loss) token_sum += static_cast<double>(loss);
  EXPECT_LE(std::abs(token_sum - outcome.sums.loss_sum), 1e-6 * std::abs(token_sum)) << name;
  ExpectFigure(name + "_loss_error", std::abs(outcome.sums.loss_sum / rows - mean_loss), "nats",
               1e-6 * mean_loss + 1.5e-9 * static_cast<double>(width) * Mean(expected.largest_logit));
}

// "n512_h1024_v32000_flat_3shards": the name of a case, with the parts that are not the ordinary ones.
std::string NameOf(const ProblemShape& shape, const char* regime, int32_t shard_count, bool portable_kernels) {
  std::ostringstream name;
  name << shape.name << "_" << regime;
  if (shard_count != 1) name << "_" << shard_count << "shards";
  if (portable_kernels) name << "_portable";
  return name.str();
}

struct ExactnessCase {
  bool divergence = false;
  ProblemShape shape;
  Regime regime = Regime::kFlat;
  int32_t shard_count = 1;
  bool portable_kernels = false;
  std::string Name() const {
    return (divergence ? "jsd_" : "ce_") + NameOf(shape, RegimeName(regime), shard_count, portable_kernels);
  }
};

std::vector<ExactnessCase> Cases(bool divergence) {
  std::vector<ExactnessCase> cases;
  std::vector<Regime> regimes = {Regime::kFlat,       Regime::kRealistic, Regime::kWide,     Regime::kConfident,
                                 Regime::kThreeNines, Regime::kFiveNines, Regime::kNineNines};
  if (divergence) regimes = {Regime::kFlat, Regime::kWide, Regime::kConfident, Regime::kNearlyEqual};
  for (const Regime regime : regimes) {
    cases.push_back({divergence, kSmall, regime, 1, false});
    cases.push_back({divergence, kSmall, regime, 3, false});
    cases.push_back({divergence, kSmall, regime, 1, true});
    cases.push_back({divergence, kLarge, regime, 1, false});
  }
  for (const Regime regime : {Regime::kFlat, divergence ? Regime::kNearlyEqual : Regime::kRealistic}) {
    cases.push_back({divergence, kManyRows, regime, 1, !divergence});
    if (!divergence) cases.push_back({divergence, kNarrow, regime, 1, false});
  }
  return cases;
}

class Exactness : public ::testing::TestWithParam<ExactnessCase> {
 protected:
  // Every row's outputs: fp32's rounding, and the logits' as the tensor cores sum them.
  static void ExpectTokenOutputs(const DeviceReference& reference, const RowResults& expected, const DeviceOutcome& outcome,
                                 const DeviceOutcome& outputs) {
    const double per_logit = 2e-6 + 6e-9 * static_cast<double>(GetParam().shape.width);
    for (size_t i = 0; i < expected.loss.size(); ++i) {
      const double largest = std::max({1.0, expected.largest_logit[i], std::abs(expected.lse[i] - expected.loss[i])});
      const double bound = per_logit * largest;
      ASSERT_LE(std::abs(outputs.token_loss[i] - expected.loss[i]), bound) << "loss of row " << i;
      ASSERT_LE(std::abs(outputs.lse[i] - expected.lse[i]), bound) << "lse of row " << i;
      ASSERT_LE(std::abs(outputs.target_log_probability[i] + expected.loss[i]), bound) << "row " << i;
      ASSERT_LE(std::abs(outputs.entropy[i] - expected.entropy[i]), 2 * bound * std::max(1.0, expected.entropy[i]))
          << "entropy of row " << i;
      ASSERT_LE(std::abs(outcome.token_loss[i] - expected.loss[i]), bound) << "loss of row " << i << ", with gradients";
      ASSERT_LE(std::abs(outcome.lse[i] - expected.lse[i]), bound) << "lse of row " << i << ", with gradients";
      if (outputs.argmax[i] == expected.argmax[i]) continue;
      ASSERT_GE(outputs.argmax[i], 0);
      ASSERT_LT(outputs.argmax[i], GetParam().shape.vocab);
      const std::vector<double> logits = reference.ReadLogits(static_cast<int64_t>(i));
      ASSERT_LE(logits[static_cast<size_t>(expected.argmax[i])] - logits[static_cast<size_t>(outputs.argmax[i])], bound)
          << "argmax of row " << i;
    }
  }
};

TEST_P(Exactness, MatchesFp64) {
  const auto& [divergence, shape, regime, shard_count, portable_kernels] = GetParam();
  const EngineOptions options = {
      .shard_count = shard_count, .workspace_bytes = kWorkspaceBytes, .portable_kernels = portable_kernels};
  const DeviceProblem problem = divergence ? MakeDivergenceProblem(shape, regime) : MakeCrossEntropyProblem(shape, regime);
  DeviceReference reference(Blas(), shape.rows, shape.width, shape.vocab, problem.hidden, problem.weight);
  std::optional<DeviceReference> teacher;
  if (divergence) teacher.emplace(Blas(), shape.rows, shape.width, shape.vocab, problem.teacher_hidden, problem.teacher_weight);
  DeviceEngine engine(problem, options);
  const GradientBounds bounds =
      divergence ? DivergenceBounds(regime) : CrossEntropyBounds(regime, HasExponentialForm(shape, options));
  const std::vector<double> betas = divergence ? std::vector<double>{0, 0.1, 0.5, 0.9, 1} : std::vector<double>{0};
  for (const double beta : betas) {
    char beta_name[16] = "";
    if (divergence) std::snprintf(beta_name, sizeof(beta_name), "_beta%.1f", beta);
    const std::string name = "cuda_exactness_" + GetParam().Name() + beta_name;
    SCOPED_TRACE(name);
    const RowResults expected =
        divergence ? reference.Divergence(*teacher, beta, kLossScale) : reference.CrossEntropy(problem.targets, kLossScale);
    const DeviceLoss loss = {divergence, beta, kLossScale};
    const DeviceOutcome outcome = engine.Compute(loss);
    ExpectGradientFigure(name + "_grad_hidden", reference.GradHiddenErrors(outcome.grad_hidden.as<uint16_t>()), bounds.grad_hidden);
    ExpectGradientFigure(name + "_grad_weight", reference.GradWeightErrors(outcome.grad_weight.as<float>()), bounds.grad_weight);
    ExpectLossFigure(name, outcome, expected, shape.width);
    if (divergence) {
      for (const float of_row : outcome.token_loss) ASSERT_GE(of_row, -1e-7f) << "a divergence below 0";
      continue;
    }
    ExpectTokenOutputs(reference, expected, outcome, engine.ComputeTokenOutputs(loss));
    if (!IsConfident(regime)) continue;
    // Losses down to 1e-9, which are nothing but the other columns' share: a difference of large numbers would leave none of it.
    const double mean_loss = Mean(expected.loss);
    ExpectFigure(name + "_relative_loss_error",
                 std::abs(outcome.sums.loss_sum / static_cast<double>(shape.rows) - mean_loss) / mean_loss, "relative error", 1e-3);
  }
}

INSTANTIATE_TEST_SUITE_P(CrossEntropy, Exactness, ::testing::ValuesIn(Cases(/*divergence=*/false)),
                         [](const auto& test) { return test.param.Name(); });
INSTANTIATE_TEST_SUITE_P(Divergence, Exactness, ::testing::ValuesIn(Cases(/*divergence=*/true)),
                         [](const auto& test) { return test.param.Name(); });

// --- repeatability ---

struct RepeatCase {
  ProblemShape shape;
  bool divergence = false;
  int32_t shard_count = 1;
  bool portable_kernels = false;
  int rounds = 2;
  std::string Name() const { return NameOf(shape, divergence ? "jsd" : "ce", shard_count, portable_kernels); }
};

class Repeats : public ::testing::TestWithParam<RepeatCase> {};

// On one engine, on another one, and from host memory: the same bits.
TEST_P(Repeats, Bitwise) {
  const RepeatCase& param = GetParam();
  const DeviceProblem problem = param.divergence ? MakeDivergenceProblem(param.shape, Regime::kFlat)
                                                 : MakeCrossEntropyProblem(param.shape, Regime::kRealistic);
  const EngineOptions options = {
      .shard_count = param.shard_count, .workspace_bytes = kWorkspaceBytes, .portable_kernels = param.portable_kernels};
  const DeviceLoss loss = {param.divergence, 0.5, kLossScale};
  DeviceOutcome first;
  {
    DeviceEngine engine(problem, options);
    first = engine.Compute(loss);
    for (int round = 0; round < param.rounds; ++round) {
      ASSERT_TRUE(SameBits(first, engine.Compute(loss))) << "round " << round;
      ASSERT_TRUE(SameBits(first, engine.Compute(loss, MemorySpace::kHost))) << "rows in host memory, round " << round;
    }
    const DeviceOutcome outputs = engine.ComputeTokenOutputs(loss);
    EXPECT_TRUE(SameBits(outputs, engine.ComputeTokenOutputs(loss))) << "forward only";
  }
  DeviceEngine another(problem, options);
  EXPECT_TRUE(SameBits(first, another.Compute(loss))) << "on a new engine";
}

INSTANTIATE_TEST_SUITE_P(All, Repeats,
                         ::testing::Values(RepeatCase{kSmall, false, 1, false}, RepeatCase{kSmall, false, 3, false},
                                           RepeatCase{kSmall, false, 1, true}, RepeatCase{kSmall, true, 1, false},
                                           RepeatCase{kSmall, true, 3, false}, RepeatCase{kLarge, false, 1, false, 1},
                                           RepeatCase{kNarrow, false, 1, false, 40}),
                         [](const auto& test) { return test.param.Name(); });

}  // namespace
}  // namespace headwater::testing
