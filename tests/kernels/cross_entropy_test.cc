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

}  // namespace
}  // namespace headwater::testing
