// Every option of the cross entropy, alone and with all others, in every storage type, against fp64.
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/comparison.h"

namespace headwater::testing {
namespace {

std::vector<ProblemOptions> OptionCases() {
  std::vector<ProblemOptions> cases;
  const auto add = [&](const char* name, auto set) {
    ProblemOptions options;
    options.name = name;
    set(options);
    cases.push_back(options);
  };
  add("Plain", [](ProblemOptions&) {});
  add("Bias", [](ProblemOptions& o) { o.bias = true; });
  add("Softcap", [](ProblemOptions& o) {
    o.softcap = 5;
    o.logit_spread = 6;
  });
  add("LogitScale", [](ProblemOptions& o) { o.logit_scale = 0.37; });
  add("NegativeLogitScale", [](ProblemOptions& o) { o.logit_scale = -1.3; });
  add("ValidVocab", [](ProblemOptions& o) { o.valid_vocab_size = 90; });
  add("TokenWeights", [](ProblemOptions& o) { o.token_weights = true; });
  add("LabelSmoothing", [](ProblemOptions& o) { o.label_smoothing = 0.1; });
  add("ClassWeights", [](ProblemOptions& o) { o.class_weights = true; });
  add("SmoothedClassWeights", [](ProblemOptions& o) {
    o.class_weights = true;
    o.label_smoothing = 0.3;
  });
  add("ZLoss", [](ProblemOptions& o) { o.z_loss = 1e-2; });
  add("IgnoredValidId", [](ProblemOptions& o) {
    o.ignore_index = 7;
    o.ignored_share = 0.4;
  });
  add("LossScale", [](ProblemOptions& o) { o.loss_scale = 1.0 / 13; });
  add("GradHiddenScale", [](ProblemOptions& o) { o.grad_hidden_scale = -0.5; });
  add("Everything", [](ProblemOptions& o) {
    o.bias = true;
    o.softcap = 12;
    o.logit_scale = 0.9;
    o.valid_vocab_size = 97;
    o.token_weights = true;
    o.label_smoothing = 0.1;
    o.class_weights = true;
    o.z_loss = 1e-3;
    o.ignore_index = 7;
    o.loss_scale = 3;
    o.grad_hidden_scale = 0.25;
  });
  return cases;
}

class CrossEntropyOption : public ::testing::TestWithParam<ProblemOptions> {};

TEST_P(CrossEntropyOption, MatchesFp64) {
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    SCOPED_TRACE(DataTypeName(type));
    ExpectEngineMatches(MakeProblem(WithType(GetParam(), type)));
  }
}

TEST_P(CrossEntropyOption, MatchesFp64OnUnevenShardsInSmallChunks) {
  EngineOptions engine_options;
  engine_options.shard_count = 3;
  engine_options.shard_weights = {2, 5, 1};
  engine_options.token_chunk_rows = 4;
  ExpectEngineMatches(MakeProblem(GetParam()), engine_options);
}

INSTANTIATE_TEST_SUITE_P(All, CrossEntropyOption, ::testing::ValuesIn(OptionCases()),
                         [](const auto& test) { return test.param.name; });

// Rows need not have the head's type, nor grad_hidden that of the rows.
TEST(CrossEntropy, MixesStorageTypes) {
  for (const DataType head_type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    for (const DataType hidden_type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
      for (const DataType grad_type : {DataType::kFloat32, DataType::kBFloat16}) {
        SCOPED_TRACE(std::string(DataTypeName(head_type)) + " head, " + DataTypeName(hidden_type) + " rows, " +
                     DataTypeName(grad_type) + " gradient");
        ProblemOptions options;
        options.head_type = head_type;
        options.hidden_type = hidden_type;
        Problem problem = MakeProblem(options);
        problem.grad_hidden_type = grad_type;
        ExpectEngineMatches(problem);
      }
    }
  }
}

// Adding a constant to every logit of a row (here through the bias) changes neither loss nor gradient, and each row of the gradient
// of the logits sums to 0, which grad_bias shows.
TEST(CrossEntropy, ConstantsInTheLogitsDoNotMatter) {
  ProblemOptions options;
  options.bias = true;
  Problem problem = MakeProblem(options);
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
