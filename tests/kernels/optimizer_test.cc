// AdamW and SGD over many steps against fp64, masters and their rounding, gradient norms.
#include <cmath>
#include <limits>
#include <string>
#include <variant>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/error.h"
#include "kernels/reference/optimizer_reference.h"
#include "kernels/reference/storage.h"
#include "tests/kernels/support/comparison.h"

namespace headwater::testing {
namespace {

struct OptimizerCase {
  std::string name;
  OptimizerSpec spec;
  DataType type = DataType::kFloat32;
};

std::vector<OptimizerCase> OptimizerCases() {
  std::vector<OptimizerCase> cases;
  for (const auto& [suffix, type] : {std::pair{"Float32", DataType::kFloat32}, {"BFloat16", DataType::kBFloat16}}) {
    const auto add = [&, type_suffix = std::string(suffix), data_type = type](const char* name, OptimizerSpec spec) {
      cases.push_back({name + type_suffix, spec, data_type});
    };
    add("AdamW", AdamWSpec{0.9, 0.999, 1e-8, 0.01});
    add("AdamWFast", AdamWSpec{0.5, 0.8, 1e-5, 0.2});
    add("AdamWWithoutMoments", AdamWSpec{0, 0, 1e-8, 0});
    add("Sgd", SgdSpec{});
    add("SgdWeightDecay", SgdSpec{0, 0, false, 0.1});
    add("SgdMomentum", SgdSpec{0.9, 0.3, false, 0.01});
    add("SgdNesterov", SgdSpec{0.9, 0, true, 0.01});
  }
  return cases;
}

// Both tensors of a head under the fp64 optimizer.
class ReferenceHead {
 public:
  ReferenceHead(std::vector<double> weight, std::vector<double> bias)
      : states_{reference::OptimizerState(std::move(weight)), reference::OptimizerState(std::move(bias))} {}
  void Update(const OptimizerStep& step, const std::vector<double>& grad_weight, const std::vector<double>& grad_bias) {
    const std::vector<double>* gradients[] = {&grad_weight, &grad_bias};
    for (size_t i = 0; i < states_.size(); ++i) {
      std::vector<double> scaled = *gradients[i];
      for (double& value : scaled) value *= step.gradient_multiplier;
      if (const auto* adamw = std::get_if<AdamWSpec>(&step.settings)) {
        reference::AdamWUpdate(*adamw, step.learning_rate, step.update_count, scaled, &states_[i]);
      } else {
        reference::SgdUpdate(std::get<SgdSpec>(step.settings), step.learning_rate, step.update_count, scaled, &states_[i]);
      }
    }
  }
  const reference::OptimizerState& weight() const { return states_[0]; }
  const reference::OptimizerState& bias() const { return states_[1]; }

 private:
  std::vector<reference::OptimizerState> states_;
};

double RelativeError(const std::vector<double>& actual, const std::vector<double>& expected) {
  const reference::Matrix matrix(1, static_cast<int64_t>(expected.size()), expected);
  return actual.size() == expected.size() ? MeasureErrors(actual, matrix).whole : std::numeric_limits<double>::infinity();
}

class Optimizer : public ::testing::TestWithParam<OptimizerCase> {
 protected:
  static constexpr int64_t kVocab = 23;
  static constexpr int64_t kHidden = 9;

  Optimizer() {
    problem_ = MakeProblem(WithType({.vocab_size = kVocab, .hidden_size = kHidden, .bias = true}, GetParam().type));
    problem_.heads[0].spec.optimizer = GetParam().spec;
  }

  // Gradients of the size that training has, some of them 0.
  std::vector<double> RandomGradient(int64_t count) {
    std::vector<double> values = RandomValues(random_, count, 0.3, DataType::kFloat32);
    for (size_t i = 0; i < values.size(); i += 5) values[i] = 0;
    return values;
  }

  OptimizerStep Step(int64_t update_count) const {
    return {.learning_rate = 0.01 / static_cast<double>(1 + update_count % 3),
            .gradient_multiplier = update_count % 2 == 0 ? 0.5 : 1.0,
            .settings = GetParam().spec,
            .update_count = update_count};
  }

  std::mt19937_64 random_{3};
  Problem problem_;
};

TEST_P(Optimizer, FollowsFp64OverManySteps) {
  for (const int32_t shard_count : {1, 3}) {
    LoadedHeads heads(problem_.heads, EngineOptions{.shard_count = shard_count});
    EngineHead& head = heads.head(0);
    ReferenceHead expected(problem_.heads[0].weight, problem_.heads[0].bias);
    for (int64_t update = 1; update <= 40; ++update) {
      const std::vector<double> grad_weight = RandomGradient(kVocab * kHidden);
      const std::vector<double> grad_bias = RandomGradient(kVocab);
      WriteTensorValues(head, HeadTensor::kGradWeight, grad_weight);
      WriteTensorValues(head, HeadTensor::kGradBias, grad_bias);
      ASSERT_TRUE(head.ApplyOptimizer(Step(update)).ok());
      expected.Update(Step(update), grad_weight, grad_bias);
      ExpectGradientZero(heads.ReadGradient(0));
    }
    // Masters keep updates far below bf16's spacing.
    EXPECT_LE(RelativeError(ReadTensorValues(head, HeadTensor::kMasterWeight), expected.weight().value), 1e-6);
    EXPECT_LE(RelativeError(ReadTensorValues(head, HeadTensor::kMasterBias), expected.bias().value), 1e-6);
    const auto* sgd = std::get_if<SgdSpec>(&GetParam().spec);
    if (sgd == nullptr || sgd->momentum > 0) {
      EXPECT_LE(RelativeError(ReadTensorValues(head, HeadTensor::kMoment1Weight), expected.weight().moment1), 1e-6);
      EXPECT_LE(RelativeError(ReadTensorValues(head, HeadTensor::kMoment1Bias), expected.bias().moment1), 1e-6);
    } else {
      EXPECT_EQ(head.ElementCount(HeadTensor::kMoment1Weight), 0);
    }
    if (sgd == nullptr) {
      EXPECT_LE(RelativeError(ReadTensorValues(head, HeadTensor::kMoment2Weight), expected.weight().moment2), 1e-6);
      EXPECT_LE(RelativeError(ReadTensorValues(head, HeadTensor::kMoment2Bias), expected.bias().moment2), 1e-6);
    } else {
      EXPECT_EQ(head.ElementCount(HeadTensor::kMoment2Weight), 0);
    }
    // The stored tensors are the masters', rounded once.
    for (const auto& [stored, master] :
         {std::pair{HeadTensor::kWeight, HeadTensor::kMasterWeight}, {HeadTensor::kBias, HeadTensor::kMasterBias}}) {
      std::vector<double> rounded = ReadTensorValues(head, master);
      for (double& value : rounded) value = reference::RoundTo(GetParam().type, value);
      EXPECT_EQ(ReadTensorValues(head, stored), rounded) << HeadTensorName(stored);
    }
  }
}

TEST_P(Optimizer, ResettingTheStateStartsOver) {
  LoadedHeads heads(problem_.heads, {});
  EngineHead& head = heads.head(0);
  const std::vector<double> gradient = RandomGradient(kVocab * kHidden);
  const auto update = [&] {
    WriteTensorValues(head, HeadTensor::kWeight, problem_.heads[0].weight);
    WriteTensorValues(head, HeadTensor::kGradWeight, gradient);
    EXPECT_TRUE(head.ApplyOptimizer(Step(1)).ok());
    return ReadTensorValues(head, HeadTensor::kMasterWeight);
  };
  const std::vector<double> first = update();
  ASSERT_TRUE(head.ResetOptimizerState().ok());
  EXPECT_EQ(update(), first);
}

// State that was read and written back (a checkpoint) continues with the same bits.
TEST_P(Optimizer, StateSurvivesReadingAndWriting) {
  LoadedHeads original(problem_.heads, {});
  LoadedHeads restored(problem_.heads, {});
  const auto update = [&](LoadedHeads& heads, int64_t count, const std::vector<double>& gradient) {
    WriteTensorValues(heads.head(0), HeadTensor::kGradWeight, gradient);
    EXPECT_TRUE(heads.head(0).ApplyOptimizer(Step(count)).ok());
  };
  for (int64_t count = 1; count <= 3; ++count) update(original, count, RandomGradient(kVocab * kHidden));
  for (const HeadTensor tensor : {HeadTensor::kMasterWeight, HeadTensor::kMasterBias, HeadTensor::kMoment1Weight,
                                  HeadTensor::kMoment1Bias, HeadTensor::kMoment2Weight, HeadTensor::kMoment2Bias}) {
    if (original.head(0).ElementCount(tensor) == 0) continue;
    WriteTensorValues(restored.head(0), tensor, ReadTensorValues(original.head(0), tensor));
  }
  const std::vector<double> gradient = RandomGradient(kVocab * kHidden);
  update(original, 4, gradient);
  update(restored, 4, gradient);
  EXPECT_EQ(ReadTensorValues(restored.head(0), HeadTensor::kWeight), ReadTensorValues(original.head(0), HeadTensor::kWeight));
  EXPECT_EQ(ReadTensorValues(restored.head(0), HeadTensor::kMasterWeight),
            ReadTensorValues(original.head(0), HeadTensor::kMasterWeight));
}

INSTANTIATE_TEST_SUITE_P(All, Optimizer, ::testing::ValuesIn(OptimizerCases()), [](const auto& test) { return test.param.name; });

// A step's overrides count, not the settings of the head's creation.
TEST(OptimizerOverrides, AreUsed) {
  Problem problem = MakeProblem(ProblemOptions());
  problem.heads[0].spec.optimizer = AdamWSpec{0.9, 0.999, 1e-8, 0.01};
  LoadedHeads heads(problem.heads, {});
  ReferenceHead expected(problem.heads[0].weight, {});
  const std::vector<double> gradient(problem.heads[0].weight.size(), 0.5);
  OptimizerStep step{0.01, 1, AdamWSpec{0.5, 0.6, 1e-3, 0.3}, 1};
  WriteTensorValues(heads.head(0), HeadTensor::kGradWeight, gradient);
  ASSERT_TRUE(heads.head(0).ApplyOptimizer(step).ok());
  expected.Update(step, gradient, {});
  EXPECT_LE(RelativeError(ReadTensorValues(heads.head(0), HeadTensor::kWeight), expected.weight().value), 1e-6);
}

TEST(OptimizerErrors, LeaveTheHeadAsItIs) {
  Problem problem = MakeProblem(ProblemOptions());
  problem.heads.push_back(problem.heads[0]);
  problem.heads[1].spec.optimizer = SgdSpec{};
  LoadedHeads heads(problem.heads, {});
  for (const int index : {0, 1}) {
    EngineHead& head = heads.head(index);
    WriteTensorValues(head, HeadTensor::kGradWeight, std::vector<double>(problem.heads[0].weight.size(), 1.0));
    const absl::Status status = head.ApplyOptimizer({0.1, 1, AdamWSpec{}, 1});
    ASSERT_FALSE(status.ok());
    EXPECT_TRUE(HasReason(status, index == 0 ? ErrorReason::kOptimizerNotConfigured : ErrorReason::kInvalidCombination)) << status;
    EXPECT_EQ(ReadTensorValues(head, HeadTensor::kWeight), problem.heads[0].weight);
    EXPECT_EQ(heads.ReadGradient(index).weight.front(), 1.0f);
  }
  // Momentum needs a buffer that this head was not planned with.
  const absl::Status momentum = heads.head(1).ApplyOptimizer({0.1, 1, SgdSpec{0.9, 0, false, 0}, 1});
  EXPECT_TRUE(!momentum.ok() && HasReason(momentum, ErrorReason::kInvalidCombination)) << momentum;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const OptimizerStep& step : {OptimizerStep{nan, 1, SgdSpec{}, 1}, OptimizerStep{0.1, nan, SgdSpec{}, 1},
                                    OptimizerStep{0.1, 1, SgdSpec{0, 0, false, -1}, 1}, OptimizerStep{0.1, 1, SgdSpec{}, 0}}) {
    const absl::Status status = heads.head(1).ApplyOptimizer(step);
    EXPECT_TRUE(!status.ok() && HasReason(status, ErrorReason::kInvalidField)) << status;
    EXPECT_EQ(ReadTensorValues(heads.head(1), HeadTensor::kWeight), problem.heads[0].weight);
  }
}

TEST(GradientStats, NormAndNonFiniteCount) {
  for (const int32_t shard_count : {1, 4}) {
    const ProblemOptions options = {.bias = true};
    const Problem problem = MakeProblem(options);
    LoadedHeads heads(problem.heads, EngineOptions{.shard_count = shard_count});
    EngineHead& head = heads.head(0);
    absl::StatusOr<GradientStats> stats = head.ComputeGradientStats();
    ASSERT_TRUE(stats.ok());
    EXPECT_EQ(stats->norm_squared, 0);
    EXPECT_EQ(stats->non_finite_count, 0);

    std::mt19937_64 random(8);
    // Squares of these overflow fp32 in sum, and of the largest alone.
    std::vector<double> weight = RandomValues(random, options.vocab_size * options.hidden_size, 1e17, DataType::kFloat32);
    weight[7] = 1e25;
    const std::vector<double> bias = RandomValues(random, options.vocab_size, 1e16, DataType::kFloat32);
    double expected = 0;
    for (double& value : weight) value = reference::RoundTo(DataType::kFloat32, value);
    for (const double value : weight) expected += value * value;
    for (const double value : bias) expected += value * value;
    WriteTensorValues(head, HeadTensor::kGradWeight, weight);
    WriteTensorValues(head, HeadTensor::kGradBias, bias);
    stats = head.ComputeGradientStats();
    ASSERT_TRUE(stats.ok());
    EXPECT_LE(std::abs(stats->norm_squared - expected), 1e-12 * expected);
    EXPECT_EQ(stats->non_finite_count, 0);

    weight[0] = std::numeric_limits<double>::quiet_NaN();
    weight.back() = -std::numeric_limits<double>::infinity();
    WriteTensorValues(head, HeadTensor::kGradWeight, weight);
    stats = head.ComputeGradientStats();
    ASSERT_TRUE(stats.ok());
    EXPECT_EQ(stats->non_finite_count, 2);
    ASSERT_TRUE(head.ZeroGradient().ok());
    ExpectGradientZero(heads.ReadGradient(0));
  }
}

}  // namespace
}  // namespace headwater::testing
