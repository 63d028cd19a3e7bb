// A caller's own part of the gradient: added to the accumulator with a defined rounding, on any shards, in any range.
#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/error.h"
#include "tests/kernels/support/comparison.h"
#include "tests/kernels/support/extreme_values.h"
#include "tests/kernels/support/kernel_suite.h"

namespace headwater::testing {
namespace {

constexpr int64_t kVocabSize = 211;  // prime: never even shards
constexpr int64_t kHiddenSize = 37;

HeadSpec Spec(DataType type = DataType::kFloat32) {
  return {.vocab_size = kVocabSize,
          .hidden_size = kHiddenSize,
          .data_type = type,
          .has_bias = true,
          .transform = {.valid_vocab_size = kVocabSize},
          .trainable = true};
}

std::vector<EngineOptions> Shards() {
  std::vector<EngineOptions> all;
  for (const std::vector<int64_t>& weights :
       std::vector<std::vector<int64_t>>{{}, {1, 1}, {1, 1, 1}, {1, 1, 1, 1, 1, 1, 1}, {9, 1, 4}}) {
    EngineOptions options = {.shard_count = std::max<int32_t>(1, static_cast<int32_t>(weights.size()))};
    if (!weights.empty()) options.shard_weights = weights;
    options.thread_count = 4;  // several parts on one shard
    all.push_back(options);
  }
  return all;
}

std::vector<float> RandomFloats(std::mt19937_64& random, int64_t count) {
  const std::vector<double> values = RandomValues(random, count, 3, DataType::kFloat32);
  return {values.begin(), values.end()};
}

std::vector<float> ReadFloats(const EngineHead& head, HeadTensor tensor) {
  std::vector<float> values(static_cast<size_t>(head.ElementCount(tensor)));
  EXPECT_TRUE(head.ReadTensor(tensor, 0, head.ElementCount(tensor), values.data()).ok());
  return values;
}

// Without volatile the compiler may fuse the two.
void AddRounded(float factor, const std::vector<float>& in, float* out) {
  for (const float value : in) {
    const volatile float product = factor * value;
    const volatile float sum = *out + product;
    *out++ = sum;
  }
}

void ExpectSameBits(const std::vector<float>& actual, const std::vector<float>& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  EXPECT_EQ(std::memcmp(actual.data(), expected.data(), actual.size() * sizeof(float)), 0) << what;
}

// One product, one sum, each rounded to fp32: whatever the head's type, the shards, the range and the alignment.
TEST(AddToGradient, HasTheBitsOfTwoRoundings) {
  for (const EngineOptions& options : Shards()) {
    SCOPED_TRACE("shards " + std::to_string(options.shard_count));
    LoadedHeads own({{.spec = Spec(options.shard_count == 2 ? DataType::kBFloat16 : DataType::kFloat32)}}, options);
    std::mt19937_64 random(6);
    for (const HeadTensor tensor : {HeadTensor::kGradWeight, HeadTensor::kGradBias}) {
      const int64_t count = own.head(0).ElementCount(tensor);
      std::vector<float> mirror(static_cast<size_t>(count), 0.0f);
      for (int round = 0; round < 25; ++round) {
        const bool whole = round < 2;
        const int64_t start = whole ? 0 : std::uniform_int_distribution<int64_t>(0, count)(random);
        const int64_t length = whole ? count : std::uniform_int_distribution<int64_t>(0, count - start)(random);
        const std::vector<float> in = RandomFloats(random, length);
        const double factor = round == 0 ? 1.0 : std::uniform_real_distribution<double>(-2, 2)(random);
        const absl::Status status = own.head(0).AddToGradient(tensor, start, length, factor, in.data());
        ASSERT_TRUE(status.ok()) << status;
        AddRounded(static_cast<float>(factor), in, mirror.data() + start);
      }
      ExpectSameBits(ReadFloats(own.head(0), tensor), mirror, HeadTensorName(tensor));
    }
    for (const double value : ReadTensorValues(own.head(0), HeadTensor::kWeight)) ASSERT_EQ(value, 0.0);
  }
}

// It is added beside the micro-batches' parts.
TEST(AddToGradient, AddsToTheMicroBatchesSum) {
  const Problem problem = MakeProblem(ProblemOptions());
  LoadedHeads heads(problem.heads, {});
  heads.Compute(problem);
  Gradient expected = heads.ReadGradient(0);
  std::vector<float> in(expected.weight.size(), 0.125f);
  ASSERT_TRUE(heads.head(0).AddToGradient(HeadTensor::kGradWeight, 0, static_cast<int64_t>(in.size()), -2, in.data()).ok());
  AddRounded(-2, in, expected.weight.data());
  EXPECT_TRUE(heads.ReadGradient(0) == expected);
  in[5] = std::numeric_limits<float>::quiet_NaN();
  in[9] = std::numeric_limits<float>::infinity();
  ASSERT_TRUE(heads.head(0).AddToGradient(HeadTensor::kGradWeight, 0, static_cast<int64_t>(in.size()), 1, in.data()).ok());
  const absl::StatusOr<GradientStats> stats = heads.head(0).ComputeGradientStats();
  ASSERT_TRUE(stats.ok());
  EXPECT_EQ(stats->non_finite_count, 2);
}

TEST(AddToGradient, BadArgumentsChangeNothing) {
  LoadedHeads own({{.spec = Spec()}}, EngineOptions{.shard_count = 3});
  EngineHead& head = own.head(0);
  const std::vector<float> in(static_cast<size_t>(kVocabSize * kHiddenSize), 1.0f);
  const int64_t count = kVocabSize * kHiddenSize;
  ASSERT_TRUE(head.AddToGradient(HeadTensor::kGradWeight, 0, count, 1, in.data()).ok());
  const auto expect_refused = [&](HeadTensor tensor, int64_t start, int64_t length, double factor, ErrorReason reason) {
    const absl::Status status = head.AddToGradient(tensor, start, length, factor, in.data());
    EXPECT_TRUE(HasReason(status, reason)) << HeadTensorName(tensor) << " " << start << " " << length << " " << factor << ": "
                                           << status;
  };
  for (const auto& [start, length] :
       {std::pair<int64_t, int64_t>{-1, 1}, {count, 1}, {0, count + 1}, {0, -1}, {count - 1, 2}, {kMost, kMost}, {1, kMost}}) {
    expect_refused(HeadTensor::kGradWeight, start, length, 1, ErrorReason::kChunkOutOfRange);
  }
  expect_refused(HeadTensor::kGradBias, 0, kVocabSize + 1, 1, ErrorReason::kChunkOutOfRange);
  for (const double factor : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(), -1e39, 3.5e38}) {
    expect_refused(HeadTensor::kGradWeight, 0, 1, factor, ErrorReason::kInvalidField);
  }
  for (const HeadTensor tensor : {HeadTensor::kWeight, HeadTensor::kMasterBias, HeadTensor::kMoment1Weight}) {
    expect_refused(tensor, 0, 1, 1, ErrorReason::kInvalidField);
  }
  ExpectSameBits(ReadFloats(head, HeadTensor::kGradWeight), in, "grad_weight");
  for (const float value : ReadFloats(head, HeadTensor::kGradBias)) EXPECT_EQ(value, 0.0f);

  HeadSpec frozen = Spec();
  frozen.trainable = false;
  LoadedHeads teacher({{.spec = frozen}}, {});
  const absl::Status status = teacher.head(0).AddToGradient(HeadTensor::kGradWeight, 0, 1, 1, in.data());
  EXPECT_TRUE(HasReason(status, ErrorReason::kChunkOutOfRange)) << "a frozen head has no accumulator: " << status;
}

TEST(AddToGradient, NothingIsNothing) {
  LoadedHeads own({{.spec = Spec()}}, {});
  EXPECT_TRUE(own.head(0).AddToGradient(HeadTensor::kGradWeight, kVocabSize * kHiddenSize, 0, 1, nullptr).ok());
  EXPECT_TRUE(own.head(0).AddToGradient(HeadTensor::kGradBias, 0, 0, 5, nullptr).ok());
}

}  // namespace
}  // namespace headwater::testing
