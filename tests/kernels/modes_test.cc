// Modes of computation: forward only, frozen heads, single gradients; calls on different heads at once.
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/support/comparison.h"
#include "tests/unit/run_threads.h"

namespace headwater::testing {
namespace {

ProblemOptions Options(bool jsd) { return {.bias = true, .jsd = jsd, .hard_loss_weight = jsd ? 0.3 : 0.0}; }

class Mode : public ::testing::TestWithParam<bool> {};

TEST_P(Mode, OnePartAlone) {
  constexpr GradWeightMode kNone = GradWeightMode::kNone;
  const Problem problem = MakeProblem(Options(GetParam()));
  for (const ComputeOptions& options :
       {ComputeOptions{.backward = false, .grad_hidden = false, .grad_weight = kNone},
        ComputeOptions{.backward = false, .grad_hidden = false, .token_outputs = false, .grad_weight = kNone},
        ComputeOptions{.grad_weight = kNone}, ComputeOptions{.grad_hidden = false}}) {
    SCOPED_TRACE(std::string(options.backward ? "backward" : "forward") + (options.grad_hidden ? ", grad_hidden" : "") +
                 (options.token_outputs ? ", outputs" : ""));
    ExpectEngineMatches(problem, {}, options);
  }
}

// A frozen head has no accumulator at all, whatever the mode.
TEST_P(Mode, FrozenHead) {
  ProblemOptions problem_options = Options(GetParam());
  problem_options.trainable = false;
  const Problem problem = MakeProblem(problem_options);
  const Outcome outcome = ExpectEngineMatches(problem);
  EXPECT_TRUE(outcome.gradients[0].weight.empty());
  LoadedHeads heads(problem.heads, {});
  for (const HeadTensor tensor : {HeadTensor::kGradWeight, HeadTensor::kGradBias, HeadTensor::kMoment1Weight}) {
    EXPECT_EQ(heads.head(0).ElementCount(tensor), 0) << HeadTensorName(tensor);
  }
  const auto result = heads.TryCompute(problem, ComputeOptions{.grad_weight = GradWeightMode::kStage});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->staged, nullptr);
}

INSTANTIATE_TEST_SUITE_P(All, Mode, ::testing::Bool(), [](const auto& test) { return test.param ? "Jsd" : "CrossEntropy"; });

// Calls on different heads may overlap: each gets the result that it gets alone, bit for bit.
TEST(Concurrency, DifferentHeadsOverlap) {
  constexpr int kThreads = 3;
  constexpr int kRounds = 8;
  std::vector<Problem> problems;
  std::vector<TestHead> all_heads;
  std::vector<Outcome> alone;
  const EngineOptions engine_options = {.shard_count = 2};
  for (int i = 0; i < kThreads; ++i) {
    const ProblemOptions options = {.rows = 11 + 6 * i, .vocab_size = 90 + 17 * i, .seed = static_cast<uint64_t>(20 + i)};
    problems.push_back(MakeProblem(options));
    alone.push_back(RunOnce(problems.back(), engine_options));
    all_heads.push_back(problems.back().heads[0]);
    problems.back().terms[0].head = i;
  }
  LoadedHeads heads(all_heads, engine_options);
  std::vector<int> equal_count(kThreads, 0);
  RunThreads(kThreads, [&](int64_t thread) {
    const int i = static_cast<int>(thread);
    for (int round = 0; round < kRounds; ++round) {
      Outcome outcome;
      if (!heads.TryCompute(problems[static_cast<size_t>(i)], {.read_gradients = false}, &outcome).ok()) continue;
      outcome.gradients = {heads.ReadGradient(i)};
      if (!heads.head(i).ZeroGradient().ok()) continue;
      equal_count[static_cast<size_t>(i)] += outcome.BitwiseEquals(alone[static_cast<size_t>(i)]) ? 1 : 0;
    }
  });
  EXPECT_EQ(equal_count, std::vector<int>(kThreads, kRounds));
}

}  // namespace
}  // namespace headwater::testing
