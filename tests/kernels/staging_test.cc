// Contributions beside the accumulator: commit with a factor, discard, slots.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/error.h"
#include "tests/kernels/support/comparison.h"
#include "tests/kernels/support/kernel_suite.h"
#include "tests/unit/expect_status.h"

namespace headwater::testing {
namespace {

// Few rows: a slot keeps the rows and the gradient of the logits. Many rows: the finished product.
ProblemOptions FewRows() {
  return {.name = "FewRows", .rows = 9, .hidden_size = 40, .bias = true, .token_weights = true, .staging_slots = 2};
}

ProblemOptions ManyRows() {
  ProblemOptions options = FewRows();
  options.name = "ManyRows";
  options.rows = 150;
  options.hidden_size = 12;
  return options;
}

ProblemOptions FewRowsJsd() {
  ProblemOptions options = FewRows();
  options.name = "FewRowsJsd";
  options.jsd = true;
  options.hard_loss_weight = 0.3;
  return options;
}

class Staging : public ::testing::TestWithParam<std::tuple<ProblemOptions, int32_t>> {
 protected:
  Staging() : options_(std::get<0>(GetParam())), problem_(MakeProblem(options_)) {
    engine_options_.shard_count = std::get<1>(GetParam());
    ProblemOptions other = options_;
    other.seed = 99;
    before_ = MakeProblem(other);
    before_.heads = problem_.heads;
  }

  const ProblemOptions options_;
  const Problem problem_;
  Problem before_;  // other rows for the same heads: the accumulator's former content
  EngineOptions engine_options_;
};

TEST_P(Staging, CommitAddsTheContributionTimesTheFactor) {
  const Expected expected = ComputeExpected(problem_);
  const Expected expected_before = ComputeExpected(before_);
  for (const double factor : {0.5, -2.0, 0.0, 1.0}) {
    SCOPED_TRACE("factor " + std::to_string(factor));
    LoadedHeads heads(problem_.heads, engine_options_);
    heads.Compute(before_);
    const Gradient before = heads.ReadGradient(0);
    Outcome outcome;
    std::unique_ptr<StagedContribution> staged = heads.Stage(problem_, {}, &outcome);
    EXPECT_TRUE(heads.ReadGradient(0) == before) << "staging changed the accumulator";
    outcome.gradients.clear();
    ExpectOutcomeMatches(problem_, expected, outcome);
    ASSERT_TRUE(staged->Commit(factor).ok());
    ExpectGradientNear(heads.ReadGradient(0), Combine(expected_before.gradient(0), 1, expected.gradient(0), factor));
    if (factor == 0) {
      EXPECT_TRUE(heads.ReadGradient(0) == before);
    }
  }
}

// A staged answer is that of a direct one, and where the rows are kept, so is the committed accumulator, bit for bit.
TEST_P(Staging, FactorOfOneGivesTheDirectBits) {
  LoadedHeads direct(problem_.heads, engine_options_);
  direct.Compute(before_);
  const Outcome direct_outcome = direct.Compute(problem_);
  LoadedHeads heads(problem_.heads, engine_options_);
  heads.Compute(before_);
  Outcome outcome;
  std::unique_ptr<StagedContribution> staged = heads.Stage(problem_, {}, &outcome);
  ASSERT_TRUE(staged->Commit(1).ok());
  outcome.gradients = heads.ReadGradients();
  if (!Suite().keeps_staged_rows(options_.rows, options_.hidden_size, engine_options_.shard_count)) {
    outcome.gradients = direct_outcome.gradients;
  }
  EXPECT_TRUE(outcome.BitwiseEquals(direct_outcome));
}

TEST_P(Staging, DiscardLeavesTheAccumulatorBitwise) {
  LoadedHeads heads(problem_.heads, engine_options_);
  heads.Compute(before_);
  const Gradient before = heads.ReadGradient(0);
  heads.Stage(problem_).reset();
  EXPECT_TRUE(heads.ReadGradient(0) == before);
  EXPECT_EQ(heads.head(0).FreeStagingSlots(), 2);
}

TEST_P(Staging, SlotsAreTakenAndFreed) {
  LoadedHeads heads(problem_.heads, engine_options_);
  EXPECT_EQ(heads.head(0).FreeStagingSlots(), 2);
  std::unique_ptr<StagedContribution> first = heads.Stage(problem_);
  EXPECT_EQ(heads.head(0).FreeStagingSlots(), 1);
  std::unique_ptr<StagedContribution> second = heads.Stage(problem_);
  EXPECT_EQ(heads.head(0).FreeStagingSlots(), 0);

  const Gradient before = heads.ReadGradient(0);
  const auto refused = heads.TryCompute(problem_, ComputeOptions{.grad_weight = GradWeightMode::kStage});
  EXPECT_REASON(refused, kStagingFull);
  EXPECT_TRUE(heads.ReadGradient(0) == before);
  heads.Compute(problem_);  // DIRECT needs no slot

  ASSERT_TRUE(first->Commit(1).ok());
  EXPECT_EQ(heads.head(0).FreeStagingSlots(), 1);
  second.reset();
  EXPECT_EQ(heads.head(0).FreeStagingSlots(), 2);
  first.reset();
  EXPECT_EQ(heads.head(0).FreeStagingSlots(), 2) << "a slot was freed twice";
}

// Contributions are independent of each other, of later work and of the caller's memory, and may be committed in any order.
TEST_P(Staging, CommitsInAnyOrder) {
  const Expected expected = ComputeExpected(problem_);
  const Expected expected_before = ComputeExpected(before_);
  LoadedHeads heads(problem_.heads, engine_options_);
  std::unique_ptr<StagedContribution> first = heads.Stage(problem_);
  std::unique_ptr<StagedContribution> second = heads.Stage(before_);
  heads.Compute(before_);
  ASSERT_TRUE(second->Commit(2).ok());
  ASSERT_TRUE(first->Commit(-1).ok());
  ExpectGradientNear(heads.ReadGradient(0), Combine(expected_before.gradient(0), 3, expected.gradient(0), -1));
}

INSTANTIATE_TEST_SUITE_P(All, Staging,
                         ::testing::Combine(::testing::Values(FewRows(), ManyRows(), FewRowsJsd()), ::testing::Values(1, 3)),
                         [](const auto& test) {
                           return std::get<0>(test.param).name + std::to_string(std::get<1>(test.param)) + "Shards";
                         });

// The one thing that may happen beside other calls on a head: a session that ends drops its contributions at any time.
TEST(StagingThreads, DestructionOverlapsOtherCallsOnTheHead) {
  constexpr int32_t kSlots = 6;
  constexpr int kRounds = 12;
  for (const int32_t shard_count : {1, 3}) {
    ProblemOptions options = FewRows();
    options.staging_slots = kSlots;
    const Problem problem = MakeProblem(options);
    const EngineOptions engine_options = {.shard_count = shard_count};
    LoadedHeads undisturbed(problem.heads, engine_options);
    LoadedHeads heads(problem.heads, engine_options);
    for (int round = 0; round < kRounds; ++round) {
      std::vector<std::unique_ptr<StagedContribution>> dropped;
      for (int32_t slot = 0; slot < kSlots / 2; ++slot) dropped.push_back(heads.Stage(problem));
      std::thread dropper([&dropped] {
        while (!dropped.empty()) dropped.pop_back();
      });
      heads.Compute(problem);
      std::unique_ptr<StagedContribution> kept = heads.Stage(problem);
      EXPECT_LE(heads.head(0).FreeStagingSlots(), kSlots - 1);
      EXPECT_TRUE(kept->Commit(2).ok());
      dropper.join();
      EXPECT_EQ(heads.head(0).FreeStagingSlots(), kSlots);
      undisturbed.Compute(problem);
      EXPECT_TRUE(undisturbed.Stage(problem)->Commit(2).ok());
    }
    EXPECT_TRUE(heads.ReadGradient(0) == undisturbed.ReadGradient(0));
  }
}

// All rows ignored: there is still something to commit, and it adds nothing.
TEST(StagingOfNothing, CommitsToNothing) {
  Problem problem = MakeProblem(FewRows());
  for (int32_t& target : problem.terms[0].targets) target = kDefaultIgnoreIndex;
  LoadedHeads heads(problem.heads, {});
  std::unique_ptr<StagedContribution> staged = heads.Stage(problem);
  ASSERT_TRUE(staged->Commit(3).ok());
  ExpectGradientZero(heads.ReadGradient(0));
}

TEST(StagingWithoutSlots, IsRefused) {
  ProblemOptions options = FewRows();
  options.staging_slots = 0;
  const Problem problem = MakeProblem(options);
  LoadedHeads heads(problem.heads, {});
  const auto refused = heads.TryCompute(problem, ComputeOptions{.grad_weight = GradWeightMode::kStage});
  EXPECT_REASON(refused, kStagingFull);
}

}  // namespace
}  // namespace headwater::testing
