// The oracle against things that are not it: closed forms, finite differences, values that PyTorch computed.
#include <cmath>
#include <cstring>
#include <limits>

#include "gtest/gtest.h"
#include "kernels/reference/loss_reference.h"
#include "kernels/reference/optimizer_reference.h"
#include "kernels/reference/storage.h"
#include "tests/kernels/support/error_measure.h"
#include "tests/kernels/support/problem.h"

namespace headwater::testing {
namespace {

using reference::CrossEntropyOptions;
using reference::JsdOptions;
using reference::Real;

double Objective(const Problem& problem) {
  const Expected expected = ComputeExpected(problem);
  double objective = 0;
  for (size_t i = 0; i < problem.terms.size(); ++i) {
    const TestTerm& term = problem.terms[i];
    const reference::TermResult& result = expected.result.terms[i];
    double sum = result.sums.loss_sum;
    for (size_t row = 0; row < term.entropy_factors.size(); ++row) sum += term.entropy_factors[row] * result.entropy[row];
    for (size_t row = 0; row < term.lse_factors.size(); ++row) sum += term.lse_factors[row] * result.lse[row];
    objective += term.loss_scale * sum;
  }
  return objective;
}

// Central differences of the objective with respect to `values`, which belong to `problem`.
reference::Matrix Differences(Problem& problem, std::vector<double>& values) {
  constexpr double kStep = 1e-4;
  reference::Matrix differences(1, static_cast<int64_t>(values.size()));
  for (size_t i = 0; i < values.size(); ++i) {
    // Five points: the error is of order step^4.
    const double value = values[i];
    const auto at = [&](double offset) {
      values[i] = value + offset;
      return Objective(problem);
    };
    differences.data[i] = (8 * (at(kStep) - at(-kStep)) - (at(2 * kStep) - at(-2 * kStep))) / (12 * kStep);
    values[i] = value;
  }
  return differences;
}

void ExpectGradientsAreDifferences(const ProblemOptions& options) {
  SCOPED_TRACE(options.name);
  Problem problem = MakeProblem(options);
  const Expected expected = ComputeExpected(problem);
  constexpr double kBound = 1e-8;
  const reference::HeadGradient& gradient = expected.gradient(0);
  EXPECT_LE(MeasureErrors(gradient.weight.data, Differences(problem, problem.heads[0].weight)).whole, kBound);
  if (options.bias) {
    EXPECT_LE(MeasureErrors(gradient.bias, Differences(problem, problem.heads[0].bias)).whole, kBound);
  }
  reference::Matrix hidden = Differences(problem, problem.hidden);
  for (double& value : hidden.data) value *= options.grad_hidden_scale;
  EXPECT_LE(MeasureErrors(expected.result.grad_hidden.data, hidden).whole, kBound);
}

void ExpectRow(Real loss, const std::vector<Real>& gradient, double expected_loss, const std::vector<double>& expected,
               double bound) {
  EXPECT_LE(std::abs(static_cast<double>(loss) - expected_loss), bound);
  ASSERT_EQ(gradient.size(), expected.size());
  for (size_t v = 0; v < expected.size(); ++v) EXPECT_LE(std::abs(static_cast<double>(gradient[v]) - expected[v]), bound) << v;
}

ProblemOptions Small() {
  return {.rows = 5,
          .vocab_size = 7,
          .hidden_size = 3,
          .bias = true,
          .logit_spread = 1.5,
          .ignored_share = 0,
          .token_weights = true,
          .loss_scale = 0.7,
          .grad_hidden_scale = 0.5};
}

TEST(LossReference, CrossEntropyGradientsAreFiniteDifferences) {
  ProblemOptions options = Small();
  options.name = "plain";
  ExpectGradientsAreDifferences(options);
  options.name = "everything";
  options.softcap = 2.5;
  options.logit_scale = -0.8;
  options.class_weights = true;
  options.label_smoothing = 0.2;
  options.z_loss = 0.05;
  options.negative_class_weights = true;
  options.temperature = 0.6;
  options.entropy_factors = true;
  options.lse_factors = true;
  ExpectGradientsAreDifferences(options);
}

// The target's probability is a constant to the gradient: no difference shows it.
TEST(LossReference, TokenScalingMultipliesLossAndGradient) {
  const std::vector<Real> z = {0.3L, -1.2L, 2.0L, 0.7L, -0.4L};
  CrossEntropyOptions options = {.label_smoothing = 0.2, .z_loss = 0.1, .temperature = 1.5};
  const reference::RowLoss plain = reference::CrossEntropyRow(z, 3, options);
  options.token_scaling = true;
  const reference::RowLoss scaled = reference::CrossEntropyRow(z, 3, options);
  Real sum = 0;
  for (const Real value : z) sum += std::exp(value / 1.5L);
  const Real probability = std::exp(z[3] / 1.5L) / sum;
  EXPECT_LE(std::abs(scaled.hard - probability * plain.hard), 1e-18L);
  EXPECT_LE(std::abs(scaled.z_loss - probability * plain.z_loss), 1e-18L);
  for (size_t v = 0; v < 5; ++v) EXPECT_LE(std::abs(scaled.gradient[v] - probability * plain.gradient[v]), 1e-18L) << v;
}

// Against the definitions where these are exact, and against two columns' closed form where they are not.
TEST(LossReference, DistributionsOutputsAreTheirDefinitions) {
  const std::vector<Real> z = {0.3L, -1.2L, 2.0L, 0.7L, -0.4L};
  const Real lse = reference::LogSumExp(z);
  Real entropy = 0, squares = 0, mean = 0;
  for (const Real value : z) {
    entropy -= std::exp(value - lse) * (value - lse);
    squares += std::exp(2 * (value - lse));
    mean += value / 5;
  }
  EXPECT_LE(std::abs(reference::Entropy(z) - entropy), 1e-18L);
  EXPECT_LE(std::abs(reference::LogSumSqProbs(z) - std::log(squares)), 1e-18L);
  EXPECT_LE(std::abs(reference::MeanLogit(z) - mean), 1e-18L);
  for (const Real d : {20.0L, 40.0L, 300.0L}) {
    // p = (1 - q, q) with q = e^-d / (1 + e^-d): H = q (1 + d) + O(q^2), ln sum p^2 = -2 q + O(q^2).
    const std::vector<Real> confident = {1, 1 + d};
    const Real q = std::exp(-d);
    EXPECT_LE(std::abs(reference::Entropy(confident) - q * (1 + d)), (1 + d) * q * (2 * q + 1e-17L)) << static_cast<double>(d);
    EXPECT_LE(std::abs(reference::LogSumSqProbs(confident) + 2 * q), q * (8 * q + 1e-17L)) << static_cast<double>(d);
  }
}

TEST(LossReference, JsdGradientsAreFiniteDifferences) {
  for (const double beta : {0.0, 0.1, 0.5, 0.9, 1.0}) {
    for (const double hard_loss_weight : {0.0, 0.4}) {
      ProblemOptions options = Small();
      options.name = "beta " + std::to_string(beta) + " hard " + std::to_string(hard_loss_weight);
      options.jsd = true;
      options.beta = beta;
      options.student_temperature = 1.7;
      options.teacher_temperature = 0.6;
      options.hard_loss_weight = hard_loss_weight;
      options.label_smoothing = 0.1;
      options.softcap = 4;
      options.teacher_hidden_size = 4;
      options.teacher_vocab_size = 5;
      ExpectGradientsAreDifferences(options);
    }
  }
}

TEST(LossReference, TopKGradientsAreDifferences) {
  for (const int64_t k : {1, 3, 7}) {
    for (const double temperature : {1.0, 1.6}) {
      ProblemOptions options = Small();
      options.name = "top-k " + std::to_string(k) + ", temperature " + std::to_string(temperature);
      options.top_k = k;
      options.student_temperature = temperature;
      options.softcap = 3;
      ExpectGradientsAreDifferences(options);
    }
  }
}

// The divergence of the distributions whose other columns are one: P = (1/2, 1/8, rest 3/8), Q = (1/4, 1/4, rest 1/2).
TEST(LossReference, TopKIsTheDivergenceWithOneBucketForTheRest) {
  const std::vector<Real> z = {0, 0, 0, 0};
  const reference::TopKOptions teacher = {3, {2, -1, 0}, {std::log(0.5f), 0, std::log(0.125f)}};
  const reference::RowLoss row = reference::TopKRow(z, 0, teacher);
  const double expected = 0.5 * std::log(2.0) + 0.125 * std::log(0.5) + 0.375 * std::log(0.75);
  ExpectRow(row.soft, row.gradient, expected, {0.125, 0.0625, -0.25, 0.0625}, 1e-7);
}

// Two classes with logits (d, 0): the loss is log1p(e^-d), the gradient -+1 / (1 + e^d), however confident the row.
TEST(LossReference, ConfidentRowsAreExact) {
  for (const double d : {0.5, 5.0, 20.7, 40.0, 600.0}) {
    const std::vector<Real> z = {d, 0};
    const reference::RowLoss row = reference::CrossEntropyRow(z, 0, CrossEntropyOptions());
    const double loss = std::log1p(std::exp(-d));
    const double gradient = 1 / (1 + std::exp(d));
    EXPECT_LE(std::abs(static_cast<double>(row.hard) - loss), 1e-15 * loss) << d;
    EXPECT_LE(std::abs(static_cast<double>(row.gradient[0]) + gradient), 1e-15 * gradient) << d;
    EXPECT_LE(std::abs(static_cast<double>(row.gradient[1]) - gradient), 1e-15 * gradient) << d;
  }
}

TEST(LossReference, CrossEntropyMatchesPyTorch) {
  // z = torch.tensor([0.3, -1.2, 2.0, 0.7, -0.4], dtype=torch.float64, requires_grad=True)
  // c = torch.tensor([0.5, 1.5, 2.0, 0.25, 1.0], dtype=torch.float64)
  // F.cross_entropy(z[None], torch.tensor([3]), weight=c, label_smoothing=0.2, reduction="sum")
  const std::vector<Real> z = {0.3L, -1.2L, 2.0L, 0.7L, -0.4L};
  const reference::RowLoss row =
      reference::CrossEntropyRow(z, 3, CrossEntropyOptions{.label_smoothing = 0.2, .class_weights = {0.5, 1.5, 2.0, 0.25, 1.0}});
  ExpectRow(row.hard, row.gradient, 0.784277949561639,
            {0.027205179615257254, -0.049467100712612254, 0.17839866983095148, -0.139578147193367, -0.01655860154022942}, 1e-14);
}

TEST(LossReference, JsdMatchesPyTorch) {
  // lq = log_softmax(z / 1.5), lp = log_softmax(t / 0.8), m = logsumexp([lp + log(0.3), lq + log(0.7)]);
  // 0.3 * F.kl_div(m, lp, log_target=True, reduction="sum") + 0.7 * F.kl_div(m, lq, log_target=True, reduction="sum")
  const std::vector<Real> z = {0.3L, -1.2L, 2.0L, 0.7L, -0.4L};
  const std::vector<Real> t = {1.1L, 0.2L, -0.5L, 0.9L, 0.0L};
  const reference::RowLoss row =
      reference::JsdRow(z, t, 0, JsdOptions{.beta = 0.3, .student_temperature = 1.5, .teacher_temperature = 0.8});
  ExpectRow(row.soft, row.gradient, 0.11097550881023358,
            {-0.031047519495873158, -0.00971797556402002, 0.06102782483242964, -0.0179331891860485, -0.002329140586487961}, 1e-14);
}

// The limits of the definition: beta 0 is KL(P||Q), beta 1 KL(Q||P), each 0 for equal sides.
TEST(LossReference, BetaLimitsAreTheTwoKls) {
  const std::vector<Real> z = {0, std::log(3.0L)};  // Q = (1/4, 3/4)
  const std::vector<Real> t = {0, 0};               // P = (1/2, 1/2)
  const double forward = 0.5 * std::log(2.0) + 0.5 * std::log(2.0 / 3);
  const double reverse = 0.25 * std::log(0.5) + 0.75 * std::log(1.5);
  JsdOptions options = {.beta = 0};
  EXPECT_LE(std::abs(static_cast<double>(reference::JsdRow(z, t, 0, options).soft) - forward), 1e-15);
  options.beta = 1;
  EXPECT_LE(std::abs(static_cast<double>(reference::JsdRow(z, t, 0, options).soft) - reverse), 1e-15);
  for (const double beta : {0.0, 0.5, 1.0}) {
    options.beta = beta;
    EXPECT_LE(std::abs(static_cast<double>(reference::JsdRow(z, z, 0, options).soft)), 1e-18);
  }
}

// Unequal vocabularies: the divergence sees the common prefix, the hard part the student's whole vocabulary.
TEST(LossReference, TruncationLeavesTheHardLossWhole) {
  const std::vector<Real> z = {0.5L, -0.2L, 0.1L, 1.3L};
  const std::vector<Real> t = {0.1L, 0.9L};
  JsdOptions options = {.truncate_to_common = true};
  const reference::RowLoss soft = reference::JsdRow(z, t, 3, options);
  EXPECT_EQ(soft.gradient[2], 0);
  EXPECT_EQ(soft.gradient[3], 0);
  EXPECT_EQ(soft.soft, reference::JsdRow(absl::MakeConstSpan(z).first(2), t, 0, options).soft);
  options.hard_loss_weight = 1;
  const reference::RowLoss hard = reference::JsdRow(z, t, 3, options);
  EXPECT_EQ(hard.hard, reference::CrossEntropyRow(z, 3, CrossEntropyOptions()).hard);
}

// Twelve steps in float64 from {1, -2, 0.5, 3}, with gradients sin(i + 1.7 t) and a learning rate of 0.05. The optimizers are
// torch.optim.AdamW(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1) and torch.optim.SGD(momentum=0.9, weight_decay=0.1). The latter
// has dampening=0.3, then nesterov=True.
TEST(OptimizerReference, MatchesPyTorch) {
  const struct {
    OptimizerSpec spec;
    double expected[4];
  } cases[] = {{AdamWSpec{0.8, 0.95, 1e-6, 0.1}, {0.8657350910901895, -1.8973427474381523, 0.5838366711027798, 2.908512897084619}},
               {SgdSpec{0.9, 0.3, false, 0.1}, {0.6002005050497277, -1.6244520518693626, 0.5892447760503337, 2.6309432348010464}},
               {SgdSpec{0.9, 0, true, 0.1}, {0.546745909954762, -1.4242992245597712, 0.5326138895074791, 2.328615931559243}}};
  for (const auto& [spec, expected] : cases) {
    reference::OptimizerState state({1.0, -2.0, 0.5, 3.0});
    for (int64_t t = 1; t <= 12; ++t) {
      std::vector<double> gradient;
      for (int i = 0; i < 4; ++i) gradient.push_back(std::sin(i + 1.7 * static_cast<double>(t)));
      if (const auto* adamw = std::get_if<AdamWSpec>(&spec)) {
        reference::AdamWUpdate(*adamw, 0.05, t, gradient, &state);
      } else {
        reference::SgdUpdate(std::get<SgdSpec>(spec), 0.05, t, gradient, &state);
      }
    }
    for (size_t i = 0; i < 4; ++i) EXPECT_LE(std::abs(state.value[i] - expected[i]), 1e-12) << spec.index() << ", " << i;
  }
}

TEST(Storage, RoundsToNearestEven) {
  using reference::RoundTo;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(RoundTo(DataType::kBFloat16, 1 + 0x1p-8), 1.0);
  EXPECT_EQ(RoundTo(DataType::kBFloat16, 1 + 3 * 0x1p-8), 1 + 0x1p-6);
  EXPECT_EQ(RoundTo(DataType::kBFloat16, -(1 + 0x1.01p-8)), -(1 + 0x1p-7));
  EXPECT_EQ(RoundTo(DataType::kFloat16, 65519.0), 65504.0);
  EXPECT_EQ(RoundTo(DataType::kFloat16, 65520.0), kInfinity);
  EXPECT_EQ(RoundTo(DataType::kFloat16, 0x1.8p-24), 0x1p-23);
  EXPECT_EQ(RoundTo(DataType::kFloat16, 0x1p-25), 0.0);
  EXPECT_EQ(RoundTo(DataType::kFloat32, 1 + 0x1p-24), 1.0);
  EXPECT_EQ(RoundTo(DataType::kBFloat16, -kInfinity), -kInfinity);
}

TEST(Storage, EveryPatternOf16BitsSurvives) {
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const uint16_t element = static_cast<uint16_t>(bits);
      const double value = reference::Decode(type, &element, 1).front();
      const std::vector<uint8_t> encoded = reference::Encode(type, {value});
      uint16_t back = 0;
      std::memcpy(&back, encoded.data(), sizeof(back));
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(reference::Decode(type, &back, 1).front())) << bits;
      } else {
        ASSERT_EQ(back, element) << bits;
      }
    }
  }
  EXPECT_EQ(reference::Encode(DataType::kBFloat16, {1.0}), (std::vector<uint8_t>{0x80, 0x3F}));
  EXPECT_EQ(reference::Encode(DataType::kFloat16, {1.0}), (std::vector<uint8_t>{0x00, 0x3C}));
}

}  // namespace
}  // namespace headwater::testing
