// Shapes, shards, chunks and micro-batches: however the work is cut, the results are the same.
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/support/comparison.h"
#include "tests/kernels/support/kernel_suite.h"

namespace headwater::testing {
namespace {

ProblemOptions CrossEntropyCase() {
  ProblemOptions options = {.name = "CrossEntropy", .rows = 41};
  options.vocab_size = 211;  // prime: never even shards
  options.hidden_size = 37;
  options.bias = true;
  options.token_weights = true;
  options.label_smoothing = 0.1;
  options.z_loss = 1e-3;
  options.class_weights = true;
  return options;
}

ProblemOptions JsdCase() {
  ProblemOptions options = CrossEntropyCase();
  options.name = "Jsd";
  options.jsd = true;
  options.beta = 0.4;
  options.hard_loss_weight = 0.2;
  options.teacher_hidden_size = 23;
  return options;
}

class Partition : public ::testing::TestWithParam<ProblemOptions> {};

TEST_P(Partition, AnyNumberOfShardsAgrees) {
  const Problem problem = MakeProblem(GetParam());
  const Expected expected = ComputeExpected(problem);
  for (const auto& weights : std::vector<std::vector<int64_t>>{{1}, {1, 1}, {1, 1, 1}, {1, 1, 1, 1, 1, 1, 1}, {9, 1, 4}}) {
    SCOPED_TRACE("shards " + std::to_string(weights.size()));
    EngineOptions engine_options = {.shard_count = static_cast<int32_t>(weights.size())};
    if (weights.front() != 1) engine_options.shard_weights = weights;
    ExpectEngineMatches(problem, expected, engine_options);
  }
}

TEST_P(Partition, AnyChunkAgrees) {
  const Problem problem = MakeProblem(GetParam());
  const Expected expected = ComputeExpected(problem);
  for (const int64_t token_chunk_rows : {1, 17, 41, 1000}) {
    for (const int32_t shard_count : {1, 2}) {
      SCOPED_TRACE("chunk " + std::to_string(token_chunk_rows) + ", shards " + std::to_string(shard_count));
      ExpectEngineMatches(problem, expected, {.shard_count = shard_count, .token_chunk_rows = token_chunk_rows});
    }
  }
}

TEST_P(Partition, ASmallWorkspaceAgrees) {
  const Problem problem = MakeProblem(GetParam());
  ExpectEngineMatches(problem, {.workspace_bytes = Suite().small_workspace_bytes});
}

TEST_P(Partition, MicroBatchesEqualOneBatch) {
  const Problem problem = MakeProblem(GetParam());
  const Expected expected = ComputeExpected(problem);
  LoadedHeads heads(problem.heads, {});
  double loss_sum = 0;
  std::vector<double> grad_hidden;
  for (const auto& [row_start, row_count] : {std::pair<int64_t, int64_t>{0, 1}, {1, 20}, {21, 7}, {28, 13}}) {
    const Outcome outcome = heads.Compute(SliceRows(problem, row_start, row_count));
    loss_sum += outcome.terms[0].sums.loss_sum;
    grad_hidden.insert(grad_hidden.end(), outcome.grad_hidden.begin(), outcome.grad_hidden.end());
  }
  ExpectGradientNear(heads.ReadGradient(0), expected.gradient(0));
  ExpectTensorNear("grad_hidden", grad_hidden, expected.result.grad_hidden, nullptr);
  const double expected_sum = expected.result.terms[0].sums.loss_sum;
  EXPECT_LE(std::abs(loss_sum - expected_sum), kLossSumBound * std::abs(expected_sum));
}

void ExpectRepeats(const Problem& problem, const EngineOptions& engine_options, const ComputeOptions& options = {}) {
  SCOPED_TRACE("shards " + std::to_string(engine_options.shard_count) + ", chunk " +
               std::to_string(engine_options.token_chunk_rows));
  LoadedHeads heads(problem.heads, engine_options);
  const Outcome first = heads.Compute(problem, options);
  heads.ZeroGradients();
  EXPECT_TRUE(first.BitwiseEquals(heads.Compute(problem, options))) << "on the same engine";
  EXPECT_TRUE(first.BitwiseEquals(RunOnce(problem, engine_options, options))) << "on a new engine";
}

TEST_P(Partition, EveryConfigurationRepeatsBitwise) {
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
    SCOPED_TRACE(DataTypeName(type));
    const Problem problem = MakeProblem(WithType(GetParam(), type));
    for (const int32_t shard_count : {1, 2, 3, 7}) {
      for (const int64_t token_chunk_rows : {0, 1, 17}) {
        ExpectRepeats(problem, {.shard_count = shard_count, .token_chunk_rows = token_chunk_rows});
      }
    }
  }
  // The form of large training steps.
  const Problem many = MakeProblem(
      WithType({.rows = 390, .vocab_size = 301, .hidden_size = 52, .bias = true, .jsd = GetParam().jsd}, DataType::kBFloat16));
  for (const int32_t shard_count : {1, 3}) {
    for (const int64_t token_chunk_rows : {0, 300}) {
      ExpectRepeats(many, {.shard_count = shard_count, .token_chunk_rows = token_chunk_rows}, {.token_outputs = false});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Partition, ::testing::Values(CrossEntropyCase(), JsdCase()),
                         [](const auto& test) { return test.param.name; });

struct ShapeCase {
  const char* why;
  int64_t rows, vocab_size, hidden_size;
  int32_t shard_count;
};

// Every shape, for both losses.
void ExpectShapeMatches(const ShapeCase& shape) {
  for (const bool jsd : {false, true}) {
    SCOPED_TRACE(std::string(shape.why) + (jsd ? ", JSD" : ", cross entropy"));
    const ProblemOptions options = {.rows = shape.rows,
                                    .vocab_size = shape.vocab_size,
                                    .hidden_size = shape.hidden_size,
                                    .bias = true,
                                    .ignored_share = shape.rows > 1 ? 0.2 : 0.0,
                                    .jsd = jsd};
    ExpectEngineMatches(MakeProblem(options), {.shard_count = shape.shard_count});
  }
}

TEST(Shape, SmallOddAndPrimeSizes) {
  for (const ShapeCase& shape : std::vector<ShapeCase>{
           {"one token", 1, 101, 24, 1},
           {"one token on shards", 1, 101, 24, 3},
           {"one class", 5, 1, 8, 1},
           {"two classes", 5, 2, 8, 2},
           {"hidden size 1", 7, 33, 1, 1},
           {"all sizes 1", 1, 1, 1, 1},
           {"primes", 13, 97, 31, 2},
           {"odd", 15, 255, 63, 1},
           {"powers of two", 16, 256, 64, 4},
           {"one beyond powers of two", 17, 257, 65, 4},
           {"fewer classes than shards", 6, 3, 10, 7},
           {"more rows than classes", 301, 19, 11, 2},
       }) {
    ExpectShapeMatches(shape);
  }
}

// GPT-2's vocabulary: not divisible by anything that kernels like.
TEST(Shape, Gpt2Vocabulary) { ExpectShapeMatches({"V = 50257", 5, 50257, 7, 3}); }

TEST(Shape, WideHidden) { ExpectShapeMatches({"H = 1025", 19, 127, 1025, 2}); }

// No rows at all: sums are 0, the accumulator stays as it is.
TEST(Shape, NoRows) {
  const Problem problem = MakeProblem({.rows = 3});
  LoadedHeads heads(problem.heads, {});
  heads.Compute(problem);
  const Gradient before = heads.ReadGradient(0);
  const Outcome outcome = heads.Compute(SliceRows(problem, 1, 0));
  EXPECT_EQ(outcome.terms[0].sums.loss_sum, 0);
  EXPECT_EQ(outcome.terms[0].sums.valid_token_count, 0);
  EXPECT_EQ(outcome.terms[0].sums.token_weight_sum, 0);
  EXPECT_TRUE(heads.ReadGradient(0) == before);
}

// Rows, but none that counts: everything is written, as 0.
TEST(Shape, NoValidTokens) {
  for (const bool jsd : {false, true}) {
    for (const int32_t shard_count : {1, 3}) {
      Problem problem = MakeProblem({.jsd = jsd});
      for (int32_t& target : problem.terms[0].targets) target = kDefaultIgnoreIndex;
      const Outcome outcome = ExpectEngineMatches(problem, {.shard_count = shard_count});
      EXPECT_EQ(outcome.terms[0].sums.loss_sum, 0);
      EXPECT_EQ(outcome.terms[0].sums.valid_token_count, 0);
      ExpectGradientZero(outcome.gradients[0]);
    }
  }
}

// A term over some of the rows leaves grad_hidden of the others at 0.
TEST(Shape, TermOverAPartOfTheRows) {
  Problem problem = MakeProblem(ProblemOptions());
  TestTerm& term = problem.terms[0];
  term.row_start = 4;
  term.row_count = 5;
  term.targets.resize(5);
  ExpectEngineMatches(problem);
}

// Weight 0 in every row: outputs of the rows are still those of their logits.
TEST(Shape, RowsOfWeightZero) {
  Problem problem = MakeProblem(ProblemOptions());
  problem.terms[0].token_weights.assign(static_cast<size_t>(problem.rows), 0.0f);
  const Outcome outcome = ExpectEngineMatches(problem);
  EXPECT_EQ(outcome.terms[0].sums.loss_sum, 0);
  ExpectEngineMatches(problem, {}, {.token_outputs = false});
}

}  // namespace
}  // namespace headwater::testing
