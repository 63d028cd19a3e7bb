// Every option of the cross entropy, alone and with all others, in every storage type, against fp64.
#include <string>

#include "gtest/gtest.h"
#include "tests/kernels/support/comparison.h"

namespace headwater::testing {
namespace {

class CrossEntropyOption : public ::testing::TestWithParam<ProblemOptions> {};

TEST_P(CrossEntropyOption, MatchesFp64) {
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    SCOPED_TRACE(DataTypeName(type));
    ExpectEngineMatches(MakeProblem(WithType(GetParam(), type)));
  }
}

TEST_P(CrossEntropyOption, MatchesFp64OnUnevenShardsInSmallChunks) {
  const EngineOptions engine_options = {.shard_count = 3, .shard_weights = {2, 5, 1}, .token_chunk_rows = 4};
  ExpectEngineMatches(MakeProblem(GetParam()), engine_options);
}

INSTANTIATE_TEST_SUITE_P(All, CrossEntropyOption, ::testing::ValuesIn(CrossEntropyOptionCases()),
                         [](const auto& test) { return test.param.name; });

// Rows need not have the head's type, nor grad_hidden that of the rows.
TEST(CrossEntropy, MixesStorageTypes) {
  for (const DataType head_type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    for (const DataType hidden_type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
      for (const DataType grad_type : {DataType::kFloat32, DataType::kBFloat16}) {
        SCOPED_TRACE(std::string(DataTypeName(head_type)) + " head, " + DataTypeName(hidden_type) + " rows, " +
                     DataTypeName(grad_type) + " gradient");
        Problem problem = MakeProblem({.head_type = head_type, .hidden_type = hidden_type});
        problem.grad_hidden_type = grad_type;
        ExpectEngineMatches(problem);
      }
    }
  }
}

// Adding a constant to every logit of a row (here through the bias) changes neither loss nor gradient. Each row of the gradient of
// the logits sums to 0, which grad_bias shows.
TEST(CrossEntropy, ConstantsInTheLogitsDoNotMatter) {
  Problem problem = MakeProblem({.bias = true});
  const Outcome before = RunOnce(problem);
  for (double& value : problem.heads[0].bias) value += 16;
  RoundToStorage(&problem);
  const Outcome after = ExpectEngineMatches(problem);
  EXPECT_LE(std::abs(after.terms[0].sums.loss_sum - before.terms[0].sums.loss_sum), 2e-5 * before.terms[0].sums.loss_sum);
  double sum = 0;
  double magnitude = 0;
  for (const float value : after.gradients[0].bias) {
    sum += value;
    magnitude += std::abs(value);
  }
  EXPECT_LE(std::abs(sum), 1e-5 * magnitude);
}

}  // namespace
}  // namespace headwater::testing
