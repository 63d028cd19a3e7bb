// Heads that every GPU of a group has all of (Parallelism::kRows), on the engines themselves: each rank by calls of its own.
// Replicas (replica_suite.cc) has the rest. Skipped where there are fewer GPUs than ranks.
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/error.h"
#include "kernels/core/head_tensors.h"
#include "tests/kernels/cuda/cuda_group.h"
#include "tests/kernels/cuda/cuda_group_heads.h"
#include "tests/kernels/cuda/cuda_support.h"
#include "tests/kernels/support/comparison.h"
#include "tests/kernels/support/engine_run.h"
#include "tests/kernels/support/problem.h"
#include "tests/kernels/support/replica_suite.h"
#include "tests/unit/expect_status.h"
#include "tests/unit/run_threads.h"

namespace headwater::testing {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// The gradient where it is summed up: each rank's shard, outside of which the rank must have 0.
std::vector<float> GradientOf(const GroupHeads& heads, int32_t ranks, HeadTensor tensor) {
  std::vector<float> gradient;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    const EngineHead& head = heads.On(rank).head(0);
    const std::vector<float> own = ReadFloats(head, tensor);
    gradient.resize(own.size());
    const VocabShard& shard = head.shards()[static_cast<size_t>(rank)];
    const int64_t columns = IsWeightShaped(tensor) ? head.spec().hidden_size : 1;
    for (int64_t i = 0; i < static_cast<int64_t>(own.size()); ++i) {
      const float value = own[static_cast<size_t>(i)];
      if (i >= shard.vocab_start * columns && i < shard.vocab_end * columns) {
        gradient[static_cast<size_t>(i)] = value;
      } else if (value != 0) {
        ADD_FAILURE() << HeadTensorName(tensor) << "[" << i << "] of rank " << rank << " is " << value;
        return gradient;
      }
    }
  }
  return gradient;
}

class CudaReplicaTest : public CudaGroupCaseTest {
 protected:
  // A micro-batch for each rank.
  std::vector<Problem> Problems(const ProblemOptions& options = {}) const {
    return MakeReplicaProblems(static_cast<size_t>(ranks()), options);
  }
};

// Each rank by itself: its outcome and its accumulator.
TEST_P(Replicas, AccumulateTheBitsOfOneEngineOnEachRank) {
  EngineOptions of_ranks = PlainOptions();
  of_ranks.shard_weights = GetParam().weights;
  CudaGroup group(ranks(), of_ranks);
  for (const auto& [options, compute] : GetParam().forms) {
    SCOPED_TRACE(options.name + ", " + DataTypeName(options.head_type));
    const std::vector<Problem> problems = MakeReplicaProblems(count(), options);
    const GroupHeads heads(group, problems[0].heads);
    std::vector<Outcome> outcomes(count());
    group.Run([&](int32_t rank) { outcomes[rank] = heads.On(rank).Compute(problems[rank], compute); });
    LoadedHeads alone(problems[0].heads, PlainOptions());
    for (size_t rank = 0; rank < count(); ++rank) {
      EXPECT_TRUE(outcomes[rank].BitwiseEquals(alone.Compute(problems[rank], compute))) << rank;
      alone.ZeroGradients();
    }
  }
}

// As many as there are slots on each rank, from calls that come at once; one more is refused.
TEST_P(CudaReplicaTest, StageOnEachRankFromCallsAtOnce) {
  constexpr size_t kSlots = 2;
  const std::vector<Problem> problems = Problems({.bias = true, .staging_slots = kSlots});
  const std::unique_ptr<CudaGroup> group = Make();
  const GroupHeads heads(*group, problems[0].heads);
  group->Run([&](int32_t rank) {
    EngineHead& head = heads.On(rank).head(0);
    EXPECT_TRUE(head.StagesConcurrently());
    std::array<absl::StatusOr<MicroBatchResult>, kSlots + 1> results;
    RunThreads(static_cast<int64_t>(results.size()), [&](int64_t call) {
      results[call] = heads.On(rank).TryCompute(problems[rank], {.grad_weight = GradWeightMode::kStage});
    });
    EXPECT_EQ(head.FreeStagingSlots(), 0);
    std::vector<std::unique_ptr<StagedContribution>> staged;
    for (auto& result : results) {
      EXPECT_TRUE(result.ok() || HasReason(result.status(), ErrorReason::kStagingFull)) << result.status();
      if (result.ok()) staged.push_back(std::move(result->staged));
    }
    ASSERT_EQ(staged.size(), kSlots);
    for (const float value : ReadFloats(head, HeadTensor::kGradWeight)) ASSERT_EQ(value, 0);
    // One is committed, whatever the other ranks do, and one is dropped.
    staged.pop_back();
    CheckStatus(staged.back()->Commit(rank + 1), "Commit");
    staged.clear();
    EXPECT_EQ(head.FreeStagingSlots(), kSlots);
    // Twice is once.
    for (int i = 0; i < 2; ++i) CheckStatus(head.ReduceGradient(), "ReduceGradient");
  });
  std::vector<double> factors;
  for (int32_t rank = 0; rank < ranks(); ++rank) factors.push_back(rank + 1);
  ExpectSumOfGradients({GradientOf(heads, ranks(), HeadTensor::kGradWeight), GradientOf(heads, ranks(), HeadTensor::kGradBias)},
                       problems, factors);
}

// Small ones at once on each rank, which may compute them together and put their products off.
TEST_P(CudaReplicaTest, SmallMicroBatchesAtOnceOnEachRank) {
  constexpr size_t kThreads = 4;
  constexpr int kRounds = 5;
  const std::vector<Problem> problems = Problems(WithType({.rows = 64, .vocab_size = 301, .hidden_size = 72}, DataType::kBFloat16));
  const std::unique_ptr<CudaGroup> group = Make();
  const GroupHeads heads(*group, problems[0].heads);
  const ComputeOptions plain = {.token_outputs = false};
  LoadedHeads alone(problems[0].heads, PlainOptions());
  std::vector<double> losses;
  for (const Problem& problem : problems) {
    for (size_t i = 0; i < kThreads * kRounds; ++i) {
      const Outcome outcome = alone.Compute(problem, plain);
      if (i == 0) losses.push_back(outcome.terms[0].sums.loss_sum);
    }
  }
  group->Run([&](int32_t rank) {
    RunThreads(kThreads, [&](int64_t) {
      for (int round = 0; round < kRounds; ++round) {
        const absl::StatusOr<MicroBatchResult> result = heads.On(rank).TryCompute(problems[rank], plain);
        ASSERT_TRUE(result.ok()) << result.status();
        EXPECT_NEAR(result->terms[0].loss_sum, losses[rank], 1e-5 * std::abs(losses[rank]));
      }
    });
    CheckStatus(heads.On(rank).head(0).ReduceGradient(), "ReduceGradient");
  });
  EXPECT_LE(RelativeDifference(GradientOf(heads, ranks(), HeadTensor::kGradWeight), alone.ReadGradient(0).weight), 1e-4);
}

TEST_P(CudaReplicaTest, UnreadyRankDoesNotStopOthers) {
  const int32_t last = ranks() - 1;
  const std::vector<Problem> problems = Problems();
  const std::unique_ptr<CudaGroup> group = Make(FailingOptions(ShardPhase::kPrepare));
  const GroupHeads heads(*group, problems[0].heads);
  fails_ = true;
  group->Run([&](int32_t rank) {
    const absl::Status status = heads.On(rank).TryCompute(problems[rank], {}).status();
    EXPECT_EQ(HasReason(status, ErrorReason::kShardNotReady), rank == last) << status;
    EXPECT_EQ(status.ok(), rank != last) << status;
    // All of them are asked about this.
    EXPECT_TRUE(HasReason(heads.On(rank).head(0).ReduceGradient(), ErrorReason::kShardNotReady));
    EXPECT_TRUE(group->engine(rank).health().ok());
  });
  fails_ = false;
  group->Run([&](int32_t rank) { CheckStatus(heads.On(rank).head(0).ReduceGradient(), "ReduceGradient"); });
  std::vector<double> factors(problems.size(), 1);
  factors.back() = 0;
  ExpectSumOfGradients({GradientOf(heads, ranks(), HeadTensor::kGradWeight), {}}, problems, factors);
}

// A failure in a rank's own call costs all of them, who have taken no part in it.
TEST_P(CudaReplicaTest, FailedRankBreaksTheGroup) {
  const int32_t last = ranks() - 1;
  const std::vector<Problem> problems = Problems();
  const std::unique_ptr<CudaGroup> group = Make(FailingOptions(ShardPhase::kAct));
  const GroupHeads heads(*group, problems[0].heads);
  fails_ = true;
  group->Run([&](int32_t rank) {
    const auto compute = [&] { return heads.On(rank).TryCompute(problems[rank], {}); };
    if (rank == last) {
      EXPECT_REASON(compute(), kEngineFailed);
    }
    // The others wait here for the rank that does not come.
    EXPECT_REASON(heads.On(rank).head(0).ReduceGradient(), kEngineFailed);
    EXPECT_REASON(group->engine(rank).health(), kEngineFailed);
    EXPECT_REASON(compute(), kEngineFailed);
  });
}

TEST_P(CudaReplicaTest, MatchThePlan) {
  const HeadSpec spec = {.vocab_size = 64001,
                         .hidden_size = 1020,
                         .data_type = DataType::kBFloat16,
                         .has_bias = true,
                         .transform = {.valid_vocab_size = 64001},
                         .trainable = true,
                         .optimizer = AdamWSpec(),
                         .staging_slots = 1,
                         .parallelism = Parallelism::kRows};
  // The driver hands out memory in pieces of 2 MiB, of which each tensor may leave one unfilled.
  constexpr int64_t kGranularityBytes = 32 * kMiB;
  const std::unique_ptr<CudaGroup> group = Make();
  group->Run([&](int32_t rank) {
    const int64_t before = UsedBytes();
    const std::unique_ptr<EngineHead> head = MakeHeadOn(group->engine(rank), spec);
    EXPECT_LE(std::abs(UsedBytes() - before - head->plan().total_bytes), kGranularityBytes) << head->plan().ToString();
    EXPECT_EQ(group->engine(rank).planned_bytes(), head->plan().total_bytes);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaReplicaTest, ::testing::ValuesIn(GroupCases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace headwater::testing
