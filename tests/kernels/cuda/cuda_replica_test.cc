// Heads that every GPU of a group has all of (Parallelism::kRows), on the engines themselves: each rank by calls of its own.
// Skipped where there are fewer GPUs than ranks.
#include <cuda_runtime_api.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
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
#include "tests/unit/run_threads.h"

namespace headwater::testing {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// A micro-batch for each rank, all for the first one's heads, of which each rank has all.
std::vector<Problem> ProblemsByRank(ProblemOptions options, int32_t count, const OptimizerSpec& optimizer = std::monostate()) {
  std::vector<Problem> problems;
  for (int32_t rank = 0; rank < count; ++rank) {
    options.seed = static_cast<uint64_t>(rank) + 1;
    Problem problem = MakeProblem(options);
    for (TestHead& head : problem.heads) {
      head.spec.parallelism = Parallelism::kRows;
      if (head.spec.trainable) head.spec.optimizer = optimizer;
    }
    if (rank > 0) problem.heads = problems.front().heads;
    problems.push_back(std::move(problem));
  }
  return problems;
}

// A rank's part of a tensor, in its place; 0 elsewhere. Into `bytes`, if that has a tensor of other ranks already.
void ReadBytes(const EngineHead& head, HeadTensor tensor, std::vector<char>* bytes) {
  const int64_t count = head.ElementCount(tensor);
  bytes->resize(static_cast<size_t>(count * ElementBytes(head.TensorDataType(tensor))));
  if (count > 0) CheckStatus(head.ReadTensor(tensor, 0, count, bytes->data()), "ReadTensor");
}

// The gradient where it is summed up: each rank's shard, outside of which the rank must have 0.
std::vector<float> GradientOf(const GroupHeads& heads, int32_t ranks, HeadTensor tensor) {
  std::vector<float> gradient;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    const EngineHead& head = *heads.On(rank)[0];
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

class CudaReplicaTest : public CudaGroupCaseTest {};

std::vector<std::pair<ProblemOptions, ComputeOptions>> EveryForm() {
  std::vector<std::pair<ProblemOptions, ComputeOptions>> cases;
  const ProblemOptions divergence = {.name = "Divergence",
                                     .bias = true,
                                     .jsd = true,
                                     .beta = 0.4,
                                     .hard_loss_weight = 0.3,
                                     .teacher_hidden_size = 23,
                                     .teacher_vocab_size = 90};
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    cases.emplace_back(WithType(CrossEntropyOptionCases().back(), type), ComputeOptions());
    cases.emplace_back(WithType(divergence, type), ComputeOptions());
  }
  const ComputeOptions plain = {.token_outputs = false};  // entropy and argmax are not had from exponentials
  for (const int64_t rows : {60, 400, 4500}) {
    const ProblemOptions exponentials = {
        .name = "Exponentials" + std::to_string(rows), .rows = rows, .vocab_size = 301, .hidden_size = 72, .bias = true};
    cases.emplace_back(WithType(exponentials, DataType::kBFloat16), plain);
  }
  return cases;
}

// Each rank for itself, at the same time, and each with the bits of one engine, in the accumulator too.
TEST_P(CudaReplicaTest, ComputeWithTheBitsOfOneEngine) {
  const std::unique_ptr<CudaGroup> group = Make();
  for (const auto& [options, compute] : EveryForm()) {
    SCOPED_TRACE(options.name + ", " + DataTypeName(options.head_type));
    const std::vector<Problem> problems = ProblemsByRank(options, ranks());
    const GroupHeads heads(*group, problems[0].heads);
    std::vector<Outcome> outcomes(problems.size());
    group->Run([&](int32_t rank) {
      const size_t index = static_cast<size_t>(rank);
      const PreparedMicroBatch prepared(problems[index], heads.On(rank), compute);
      const absl::StatusOr<MicroBatchResult> result = group->engine(rank).Compute(prepared.micro_batch);
      CheckStatus(result.status(), "Compute");
      prepared.Collect(*result, &outcomes[index]);
      for (const EngineHead* head : heads.On(rank)) {
        outcomes[index].gradients.push_back({ReadFloats(*head, HeadTensor::kGradWeight), ReadFloats(*head, HeadTensor::kGradBias)});
      }
    });
    LoadedHeads alone(problems[0].heads, PlainOptions());
    for (size_t rank = 0; rank < problems.size(); ++rank) {
      EXPECT_TRUE(outcomes[rank].BitwiseEquals(alone.Compute(problems[rank], compute))) << rank;
      alone.ZeroGradients();
    }
  }
}

OptimizerStep StepOf(const OptimizerSpec& optimizer, int64_t update_count) {
  return {.learning_rate = 0.01, .gradient_multiplier = 0.5, .settings = optimizer, .update_count = update_count};
}

// The sum is right, and the update of the same sum has the bits of one engine, on every rank.
TEST_P(CudaReplicaTest, UpdateTheWeightsTogether) {
  const std::unique_ptr<CudaGroup> group = Make();
  for (const OptimizerSpec& optimizer :
       {OptimizerSpec(AdamWSpec()), OptimizerSpec(SgdSpec{.momentum = 0.9}), OptimizerSpec(SgdSpec())}) {
    for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
      SCOPED_TRACE(std::string(DataTypeName(type)) + ", optimizer " + std::to_string(optimizer.index()));
      ProblemOptions options = {.rows = 53};
      options.hidden_size = 21;  // rows have padding
      options.bias = true;
      const std::vector<Problem> problems = ProblemsByRank(WithType(options, type), ranks(), optimizer);
      const GroupHeads heads(*group, problems[0].heads);
      LoadedHeads alone(problems[0].heads, PlainOptions());
      for (int64_t update = 1; update <= 3; ++update) {
        std::vector<GradientStats> stats(problems.size());
        group->Run([&](int32_t rank) {
          const size_t index = static_cast<size_t>(rank);
          const PreparedMicroBatch prepared(problems[index], heads.On(rank), {});
          CheckStatus(group->engine(rank).Compute(prepared.micro_batch).status(), "Compute");
          EngineHead& head = *heads.On(rank)[0];
          // Twice is once.
          for (int i = 0; i < 2; ++i) CheckStatus(head.ReduceGradient(), "ReduceGradient");
          const absl::StatusOr<GradientStats> own = head.ComputeGradientStats();
          CheckStatus(own.status(), "ComputeGradientStats");
          stats[index] = *own;
        });
        const Gradient sum = {GradientOf(heads, ranks(), HeadTensor::kGradWeight),
                              GradientOf(heads, ranks(), HeadTensor::kGradBias)};
        if (update == 1 && type == DataType::kFloat32) {
          ExpectSumOfGradients(sum, problems, std::vector<double>(problems.size(), 1));
        }
        double norm_squared = 0, expected_norm_squared = 0;
        for (const GradientStats& own : stats) {
          norm_squared += own.norm_squared;
          EXPECT_EQ(own.non_finite_count, 0);
        }
        for (const std::vector<float>* part : {&sum.weight, &sum.bias}) {
          for (const float value : *part) expected_norm_squared += static_cast<double>(value) * value;
        }
        EXPECT_NEAR(norm_squared, expected_norm_squared, 1e-9 * expected_norm_squared);
        for (const auto& [tensor, values] : {std::pair(HeadTensor::kGradWeight, &sum.weight), {HeadTensor::kGradBias, &sum.bias}}) {
          CheckStatus(alone.head(0).WriteTensor(tensor, 0, static_cast<int64_t>(values->size()), values->data()), "WriteTensor");
        }
        const OptimizerStep step = StepOf(optimizer, update);
        CheckStatus(alone.head(0).ApplyOptimizer(step), "ApplyOptimizer");
        group->Run([&](int32_t rank) { CheckStatus(heads.On(rank)[0]->ApplyOptimizer(step), "ApplyOptimizer"); });
        for (const HeadTensor tensor :
             {HeadTensor::kWeight, HeadTensor::kBias, HeadTensor::kMasterWeight, HeadTensor::kMasterBias,
              HeadTensor::kMoment1Weight, HeadTensor::kMoment1Bias, HeadTensor::kMoment2Weight, HeadTensor::kMoment2Bias}) {
          std::vector<char> expected, together;
          ReadBytes(alone.head(0), tensor, &expected);
          for (int32_t rank = 0; rank < ranks(); ++rank) {
            ReadBytes(*heads.On(rank)[0], tensor, &together);
            if (tensor != HeadTensor::kWeight && tensor != HeadTensor::kBias) continue;
            EXPECT_EQ(together, expected) << HeadTensorName(tensor) << " of rank " << rank;
            together.assign(together.size(), 0);
          }
          if (tensor == HeadTensor::kWeight || tensor == HeadTensor::kBias) continue;
          EXPECT_EQ(together, expected) << HeadTensorName(tensor);
        }
        for (const HeadTensor tensor : {HeadTensor::kGradWeight, HeadTensor::kGradBias}) {
          for (const float value : GradientOf(heads, ranks(), tensor)) ASSERT_EQ(value, 0);
        }
      }
    }
  }
}

// A written gradient replaces the sum, whatever the ranks had; ranges begin and end within rows and shards.
TEST_P(CudaReplicaTest, TakeAGradientFromOutside) {
  const std::vector<Problem> problems = ProblemsByRank(ProblemOptions{.hidden_size = 21, .bias = true}, ranks());
  const std::unique_ptr<CudaGroup> group = Make();
  const GroupHeads heads(*group, problems[0].heads);
  for (const HeadTensor tensor : {HeadTensor::kGradWeight, HeadTensor::kGradBias}) {
    const int64_t count = heads.On(0)[0]->ElementCount(tensor);
    const int64_t start = 10, part = count - 25;
    std::vector<float> all, written, added, expected;
    for (int64_t i = 0; i < count; ++i) {
      all.push_back(static_cast<float>(std::sin(static_cast<double>(i))));
      expected.push_back(all.back());
      if (i < start || i >= start + part) continue;
      written.push_back(static_cast<float>(std::cos(static_cast<double>(i))));
      added.push_back(static_cast<float>(std::sin(0.1 * static_cast<double>(i))));
      expected.back() = written.back() + 2 * added.back();
    }
    group->Run([&](int32_t rank) {
      const PreparedMicroBatch prepared(problems[static_cast<size_t>(rank)], heads.On(rank), {});
      CheckStatus(group->engine(rank).Compute(prepared.micro_batch).status(), "Compute");
      EngineHead& head = *heads.On(rank)[0];
      CheckStatus(head.WriteTensor(tensor, 0, count, all.data()), "WriteTensor");
      CheckStatus(head.WriteTensor(tensor, start, part, written.data()), "WriteTensor");
      CheckStatus(head.AddToGradient(tensor, start, part, 2, added.data()), "AddToGradient");
    });
    // On the shards' ranks, and 0 elsewhere, before anything is summed up too.
    EXPECT_EQ(GradientOf(heads, ranks(), tensor), expected) << HeadTensorName(tensor);
    group->Run([&](int32_t rank) { CheckStatus(heads.On(rank)[0]->ReduceGradient(), "ReduceGradient"); });
    EXPECT_EQ(GradientOf(heads, ranks(), tensor), expected) << HeadTensorName(tensor);
    group->Run([&](int32_t rank) { CheckStatus(heads.On(rank)[0]->ZeroGradient(), "ZeroGradient"); });
  }
}

// As many as there are slots on each rank, from calls that come at once; one more is refused.
TEST_P(CudaReplicaTest, StageOnEachRankFromCallsAtOnce) {
  constexpr size_t kSlots = 2;
  const std::vector<Problem> problems = ProblemsByRank(ProblemOptions{.bias = true, .staging_slots = kSlots}, ranks());
  const std::unique_ptr<CudaGroup> group = Make();
  const GroupHeads heads(*group, problems[0].heads);
  group->Run([&](int32_t rank) {
    EngineHead& head = *heads.On(rank)[0];
    EXPECT_TRUE(head.StagesConcurrently());
    std::array<absl::StatusOr<MicroBatchResult>, kSlots + 1> results;
    RunThreads(static_cast<int64_t>(results.size()), [&](int64_t call) {
      const PreparedMicroBatch prepared(problems[static_cast<size_t>(rank)], heads.On(rank),
                                        ComputeOptions{.grad_weight = GradWeightMode::kStage});
      results[static_cast<size_t>(call)] = group->engine(rank).Compute(prepared.micro_batch);
    });
    EXPECT_EQ(head.FreeStagingSlots(), 0);
    std::vector<std::unique_ptr<StagedContribution>> staged;
    for (auto& result : results) {
      if (result.ok()) {
        staged.push_back(std::move(result->staged));
      } else {
        EXPECT_TRUE(HasReason(result.status(), ErrorReason::kStagingFull)) << result.status();
      }
    }
    ASSERT_EQ(staged.size(), kSlots);
    for (const float value : ReadFloats(head, HeadTensor::kGradWeight)) ASSERT_EQ(value, 0);
    // One is committed, whatever the other ranks do, and one is dropped.
    staged.pop_back();
    CheckStatus(staged.back()->Commit(rank + 1), "Commit");
    staged.clear();
    EXPECT_EQ(head.FreeStagingSlots(), kSlots);
    CheckStatus(head.ReduceGradient(), "ReduceGradient");
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
  const std::vector<Problem> problems =
      ProblemsByRank(WithType({.rows = 64, .vocab_size = 301, .hidden_size = 72}, DataType::kBFloat16), ranks());
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
    const size_t index = static_cast<size_t>(rank);
    RunThreads(kThreads, [&](int64_t) {
      for (int round = 0; round < kRounds; ++round) {
        const PreparedMicroBatch prepared(problems[index], heads.On(rank), plain);
        const absl::StatusOr<MicroBatchResult> result = group->engine(rank).Compute(prepared.micro_batch);
        ASSERT_TRUE(result.ok()) << result.status();
        EXPECT_NEAR(result->terms[0].loss_sum, losses[index], 1e-5 * std::abs(losses[index]));
      }
    });
    CheckStatus(heads.On(rank)[0]->ReduceGradient(), "ReduceGradient");
  });
  EXPECT_LE(RelativeDifference(GradientOf(heads, ranks(), HeadTensor::kGradWeight), alone.ReadGradient(0).weight), 1e-4);
}

// Both kinds side by side: a rank's own calls between those of all, and work deferred for one kind when the other comes.
TEST_P(CudaReplicaTest, LiveBesideHeadsByVocabularyButNotInOneCall) {
  const ProblemOptions typed = WithType({.rows = 60, .jsd = true}, DataType::kBFloat16);
  const std::vector<Problem> problems = ProblemsByRank(typed, ranks());
  Problem split = problems[0];
  for (TestHead& head : split.heads) head.spec.parallelism = Parallelism::kVocabulary;
  const std::unique_ptr<CudaGroup> group = Make();
  const GroupHeads whole(*group, problems[0].heads);
  GroupHeads by_vocabulary(*group, split.heads);
  group->Run([&](int32_t rank) {
    const PreparedMicroBatch mixed(problems[0], {whole.On(rank)[0], by_vocabulary.On(rank)[1]}, {});
    const absl::Status status = group->engine(rank).Compute(mixed.micro_batch).status();
    EXPECT_TRUE(HasReason(status, ErrorReason::kInvalidCombination)) << status;
    mixed.ExpectOutputsUntouched();
  });
  const auto compute_own = [&] {
    group->Run([&](int32_t rank) {
      const PreparedMicroBatch prepared(problems[static_cast<size_t>(rank)], whole.On(rank), {});
      // Not as many calls on one rank as on another.
      for (int32_t i = 0; i <= rank; ++i) CheckStatus(group->engine(rank).Compute(prepared.micro_batch).status(), "Compute");
    });
  };
  compute_own();
  ExpectOutcomeMatches(split, ComputeExpected(split), by_vocabulary.Compute(split));
  compute_own();
  group->Run([&](int32_t rank) { CheckStatus(whole.On(rank)[0]->ReduceGradient(), "ReduceGradient"); });
  LoadedHeads alone(problems[0].heads, PlainOptions());
  for (int32_t rank = 0; rank < ranks(); ++rank) {
    for (int32_t i = 0; i < 2 * (rank + 1); ++i) alone.Compute(problems[static_cast<size_t>(rank)]);
  }
  EXPECT_LE(RelativeDifference(GradientOf(whole, ranks(), HeadTensor::kGradWeight), alone.ReadGradient(0).weight), 1e-4);
}

TEST_P(CudaReplicaTest, UnreadyRankDoesNotStopOthers) {
  const int32_t last = ranks() - 1;
  const std::vector<Problem> problems = ProblemsByRank(ProblemOptions(), ranks());
  const std::unique_ptr<CudaGroup> group = MakeFailing(ShardPhase::kPrepare);
  const GroupHeads heads(*group, problems[0].heads);
  fails_ = true;
  group->Run([&](int32_t rank) {
    const PreparedMicroBatch prepared(problems[static_cast<size_t>(rank)], heads.On(rank), {});
    const absl::Status status = group->engine(rank).Compute(prepared.micro_batch).status();
    EXPECT_EQ(HasReason(status, ErrorReason::kShardNotReady), rank == last) << status;
    EXPECT_EQ(status.ok(), rank != last) << status;
    // All of them are asked about this.
    EXPECT_TRUE(HasReason(heads.On(rank)[0]->ReduceGradient(), ErrorReason::kShardNotReady));
    EXPECT_TRUE(group->engine(rank).health().ok());
  });
  fails_ = false;
  group->Run([&](int32_t rank) { CheckStatus(heads.On(rank)[0]->ReduceGradient(), "ReduceGradient"); });
  std::vector<double> factors(problems.size(), 1);
  factors.back() = 0;
  ExpectSumOfGradients({GradientOf(heads, ranks(), HeadTensor::kGradWeight), {}}, problems, factors);
}

// A failure in a rank's own call costs all of them, who have taken no part in it.
TEST_P(CudaReplicaTest, FailedRankBreaksTheGroup) {
  const int32_t last = ranks() - 1;
  const std::vector<Problem> problems = ProblemsByRank(ProblemOptions(), ranks());
  const std::unique_ptr<CudaGroup> group = MakeFailing(ShardPhase::kAct);
  const GroupHeads heads(*group, problems[0].heads);
  fails_ = true;
  group->Run([&](int32_t rank) {
    EngineHead& head = *heads.On(rank)[0];
    if (rank == last) {
      const PreparedMicroBatch prepared(problems[static_cast<size_t>(rank)], heads.On(rank), {});
      const absl::Status status = group->engine(rank).Compute(prepared.micro_batch).status();
      EXPECT_TRUE(HasReason(status, ErrorReason::kEngineFailed)) << status;
    }
    // The others wait here for the rank that does not come.
    const absl::Status status = head.ReduceGradient();
    EXPECT_TRUE(HasReason(status, ErrorReason::kEngineFailed)) << status;
    EXPECT_TRUE(HasReason(group->engine(rank).health(), ErrorReason::kEngineFailed));
    const PreparedMicroBatch prepared(problems[static_cast<size_t>(rank)], heads.On(rank), {});
    EXPECT_TRUE(HasReason(group->engine(rank).Compute(prepared.micro_batch).status(), ErrorReason::kEngineFailed));
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

TEST_P(CudaReplicaTest, AreRefusedInDeterministicMode) {
  EngineOptions options = PlainOptions();
  options.deterministic = true;
  const std::unique_ptr<CudaGroup> group = Make(options);
  const HeadSpec spec = ProblemsByRank(ProblemOptions(), 1)[0].heads[0].spec;
  group->Run([&](int32_t rank) {
    EXPECT_TRUE(HasReason(group->engine(rank).PlanHead(spec).status(), ErrorReason::kInvalidCombination));
    EXPECT_TRUE(HasReason(group->engine(rank).CreateHead(spec).status(), ErrorReason::kInvalidCombination));
    EXPECT_TRUE(group->engine(rank).health().ok());
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaReplicaTest, ::testing::ValuesIn(GroupCases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace headwater::testing
