// Many small micro-batches in 16 bits. An engine may defer their products and add them together, but never visibly.
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/support/comparison.h"
#include "tests/kernels/support/plain_computation.h"
#include "tests/unit/expect_status.h"

namespace headwater::testing {
namespace {

ProblemOptions Options(DataType type, uint64_t seed) {
  return WithType({.rows = 60, .vocab_size = 97, .hidden_size = 40, .bias = true, .token_weights = true, .seed = seed}, type);
}

// Slices of 1 to 17 rows that cover 60.
const std::vector<std::pair<int64_t, int64_t>>& Slices() {
  static const std::vector<std::pair<int64_t, int64_t>> slices = {{0, 1}, {1, 17}, {18, 5}, {23, 16}, {39, 2}, {41, 12}, {53, 7}};
  return slices;
}

// Both problems' heads on one engine, the second as head 1.
std::vector<TestHead> HeadsOf(const Problem& first, Problem* second) {
  second->terms[0].head = 1;
  std::vector<TestHead> heads = {first.heads[0], second->heads[0]};
  return heads;
}

void ExpectGradientOf(const Problem& problem, const Gradient& actual, const std::string& what) {
  SCOPED_TRACE(what);
  const PlainResult plain = ComputePlain(problem);
  ExpectGradientNear(actual, ComputeExpected(problem).gradient(0), &plain);
}

class SmallBatches : public ::testing::TestWithParam<DataType> {};

TEST_P(SmallBatches, OfTwoHeadsInTurnEqualOneBatchEach) {
  for (const bool jsd : {false, true}) {
    for (const int32_t shard_count : {1, 3}) {
      SCOPED_TRACE((jsd ? "JSD, shards " : "cross entropy, shards ") + std::to_string(shard_count));
      ProblemOptions options = Options(GetParam(), 1);
      const Problem first = MakeProblem(options);
      options.seed = 2;
      options.jsd = jsd;
      Problem second = MakeProblem(options);
      const Problem second_alone = second;
      std::vector<TestHead> all_heads = HeadsOf(first, &second);
      if (jsd) {
        all_heads.push_back(second.heads[1]);
        second.terms[0].teacher = 2;
        second.heads = all_heads;
      }
      LoadedHeads heads(all_heads, EngineOptions{.shard_count = shard_count});
      // SliceRows() looks at the problem's own heads.
      const auto slice = [&](const Problem& problem, std::pair<int64_t, int64_t> rows) {
        Problem with_heads = problem;
        with_heads.heads = all_heads;
        return SliceRows(with_heads, rows.first, rows.second);
      };
      for (const auto& rows : Slices()) {
        heads.Compute(slice(first, rows));
        heads.Compute(slice(second, rows));
      }
      ExpectGradientOf(first, heads.ReadGradient(0), "the first head");
      ExpectGradientOf(second_alone, heads.ReadGradient(1), "the second head");
    }
  }
}

// As a training step asks for it whose hidden states need no gradient. The accumulator is not read, whereas LoadedHeads::Compute()
// reads it after every call.
void ComputeUnread(LoadedHeads& heads, const Problem& problem) {
  EXPECT_OK(heads.TryCompute(problem, {.grad_hidden = false, .token_outputs = false}));
}

TEST_P(SmallBatches, AreInTheFinalAccumulator) {
  const std::vector<std::pair<int64_t, int64_t>> large = {{0, 300}, {300, 1024}, {1324, 2048}, {3372, 28}};
  for (const auto& slices : {Slices(), large}) {
    ProblemOptions options = Options(GetParam(), 3);
    options.rows = slices.back().first + slices.back().second;
    // Rows of no valid id have no product.
    options.valid_vocab_size = 90;
    const Problem problem = MakeProblem(options);
    // The second engine has done the same before: nothing is left over from one step to the next.
    for (const int steps_before : {0, 1}) {
      LoadedHeads heads(problem.heads, {});
      for (int step = 0; step < steps_before; ++step) {
        for (const auto& [start, count] : slices) ComputeUnread(heads, SliceRows(problem, start, count));
        WriteTensorValues(heads.head(0), HeadTensor::kGradWeight, std::vector<double>(problem.heads[0].weight.size(), 3.0));
        ASSERT_TRUE(heads.head(0).ZeroGradient().ok());
      }
      for (const auto& [start, count] : slices) ComputeUnread(heads, SliceRows(problem, start, count));
      ExpectGradientOf(problem, heads.ReadGradient(0), "after " + std::to_string(steps_before) + " steps");
    }
  }
}

// Whether or not the zeros were read in between.
TEST_P(SmallBatches, StartFromZeroAfterAnUpdate) {
  for (const int64_t rows : {20, 1500}) {
    ProblemOptions options = Options(GetParam(), 10);
    options.rows = rows;
    Problem problem = MakeProblem(options);
    problem.heads[0].spec.optimizer = SgdSpec{};
    const OptimizerStep step = {.learning_rate = 0, .settings = SgdSpec{}};
    std::vector<Gradient> gradients;
    for (const bool looks : {false, true}) {
      LoadedHeads heads(problem.heads, {});
      ComputeUnread(heads, problem);
      ASSERT_TRUE(heads.head(0).ApplyOptimizer(step).ok());
      if (looks) ExpectGradientZero(heads.ReadGradient(0));
      ComputeUnread(heads, problem);
      gradients.push_back(heads.ReadGradient(0));
      ExpectGradientOf(problem, gradients.back(), "after an update");
    }
    EXPECT_EQ(gradients[0].weight, gradients[1].weight);
    EXPECT_EQ(gradients[0].bias, gradients[1].bias);
  }
}

// A step without micro-batches.
TEST_P(SmallBatches, LeaveNothingInAClearedAccumulator) {
  const Problem problem = MakeProblem(Options(GetParam(), 9));
  LoadedHeads heads(problem.heads, {});
  ComputeUnread(heads, problem);
  ASSERT_TRUE(heads.head(0).ZeroGradient().ok());
  ExpectGradientZero(heads.ReadGradient(0));
}

// More rows than can wait at once. A power of two fills the room for those that wait exactly; the others leave too little.
TEST_P(SmallBatches, ManyMoreThanCanWait) {
  ProblemOptions options = Options(GetParam(), 4);
  options.token_weights = false;
  for (const int64_t rows : {1024, 1000, 256, 250}) {
    const int64_t rounds = rows >= 1000 ? 16 : 64;
    options.rows = rows;
    options.loss_scale = 1.0 / static_cast<double>(rounds);
    const Problem problem = MakeProblem(options);
    LoadedHeads heads(problem.heads, {});
    for (int64_t round = 0; round < rounds; ++round) ComputeUnread(heads, problem);
    Problem sum = problem;
    sum.terms[0].loss_scale = 1;
    ExpectGradientOf(sum, heads.ReadGradient(0), std::to_string(rounds) + " times the same rows");
  }
}

// `early_rows` wait when something looks at the accumulator.
void ExpectSeenByEverything(DataType type, int64_t early_rows, int64_t late_rows) {
  ProblemOptions options = Options(type, 5);
  options.staging_slots = 1;
  options.rows = early_rows + late_rows;
  Problem problem = MakeProblem(options);
  problem.heads[0].spec.optimizer = SgdSpec{};
  const Problem early = SliceRows(problem, 0, early_rows);
  const Problem late = SliceRows(problem, early_rows, late_rows);
  const auto engine_after = [&](const Problem& rows) {
    auto heads = std::make_unique<LoadedHeads>(problem.heads, EngineOptions());
    ComputeUnread(*heads, rows);
    return heads;
  };
  const Gradient alone = engine_after(early)->ReadGradient(0);

  ASSERT_OK_AND_ASSIGN(const GradientStats stats, engine_after(early)->head(0).ComputeGradientStats());
  EXPECT_LE(std::abs(stats.norm_squared - alone.SquaredNorm()), 1e-12 * alone.SquaredNorm());

  // An update.
  const OptimizerStep step = {.learning_rate = 0.5, .settings = SgdSpec{}};
  const auto watched = engine_after(early);
  EXPECT_TRUE(watched->ReadGradient(0) == alone);
  const auto updated = engine_after(early);
  for (LoadedHeads* heads : {watched.get(), updated.get()}) {
    ASSERT_TRUE(heads->head(0).ApplyOptimizer(step).ok());
    ExpectGradientZero(heads->ReadGradient(0));
  }
  EXPECT_EQ(ReadTensorValues(updated->head(0), HeadTensor::kMasterWeight),
            ReadTensorValues(watched->head(0), HeadTensor::kMasterWeight));
  EXPECT_NE(ReadTensorValues(updated->head(0), HeadTensor::kMasterWeight), problem.heads[0].weight);

  // A caller's own part, and a contribution that is committed, come after earlier work.
  const std::vector<float> in(alone.weight.size(), 0.125f);
  Gradient expected = alone;
  for (float& value : expected.weight) value += 0.25f;
  const auto added = engine_after(early);
  ASSERT_TRUE(added->head(0).AddToGradient(HeadTensor::kGradWeight, 0, static_cast<int64_t>(in.size()), 2, in.data()).ok());
  EXPECT_TRUE(added->ReadGradient(0) == expected);
  const auto committed = engine_after(early);
  ASSERT_TRUE(committed->Stage(late)->Commit(1).ok());
  ExpectGradientOf(problem, committed->ReadGradient(0), "committed after rows that waited");

  // A value that is written counts, and nothing that came before it.
  const auto written = engine_after(early);
  WriteTensorValues(written->head(0), HeadTensor::kGradWeight, std::vector<double>(alone.weight.size(), 3.0));
  for (const float value : written->ReadGradient(0).weight) ASSERT_EQ(value, 3.0f);
}

TEST_P(SmallBatches, AreVisibleToEveryReaderOfTheAccumulator) {
  ExpectSeenByEverything(GetParam(), 9, 11);
  ExpectSeenByEverything(GetParam(), 1024, 500);
}

// New weights do not change results computed with the old ones.
TEST_P(SmallBatches, KeepTheirWeights) {
  const Problem problem = MakeProblem(Options(GetParam(), 6));
  LoadedHeads heads(problem.heads, {});
  ComputeUnread(heads, SliceRows(problem, 0, 30));
  WriteTensorValues(heads.head(0), HeadTensor::kWeight, std::vector<double>(problem.heads[0].weight.size(), 0.0));
  ExpectGradientOf(SliceRows(problem, 0, 30), heads.ReadGradient(0), "after new weights");
}

// A destroyed head drops its deferred work.
TEST_P(SmallBatches, OfADestroyedHeadDisturbNoOthers) {
  const Problem problem = MakeProblem(Options(GetParam(), 7));
  Problem other = MakeProblem(Options(GetParam(), 8));
  const Problem other_alone = other;
  LoadedHeads heads(HeadsOf(problem, &other), {});
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<EngineHead> leaving, heads.engine().CreateHead(problem.heads[0].spec));
  WriteTensorValues(*leaving, HeadTensor::kWeight, problem.heads[0].weight);
  WriteTensorValues(*leaving, HeadTensor::kBias, problem.heads[0].bias);
  other.heads = {problem.heads[0], other_alone.heads[0]};
  ComputeUnread(heads, SliceRows(other, 0, 20));
  {
    const PreparedMicroBatch prepared(problem, {leaving.get()}, ComputeOptions());
    ASSERT_TRUE(heads.engine().Compute(prepared.micro_batch).ok());
  }
  leaving.reset();
  ComputeUnread(heads, SliceRows(other, 20, 40));
  ExpectGradientOf(other_alone, heads.ReadGradient(1), "the head that stays");
  ExpectGradientZero(heads.ReadGradient(0));
}

INSTANTIATE_TEST_SUITE_P(All, SmallBatches, ::testing::Values(DataType::kBFloat16, DataType::kFloat16),
                         [](const auto& test) { return test.param == DataType::kBFloat16 ? "BFloat16" : "Float16"; });

}  // namespace
}  // namespace headwater::testing
