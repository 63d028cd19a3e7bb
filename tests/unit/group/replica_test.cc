// Heads that every rank of a group has all of (Parallelism::kRows), on the CPU: the suite, and what only groups of these engines
// are asked.
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/communicator.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/product_rate.h"
#include "server/group/group_engine.h"
#include "tests/kernels/support/comparison.h"
#include "tests/kernels/support/engine_run.h"
#include "tests/kernels/support/problem.h"
#include "tests/kernels/support/replica_suite.h"
#include "tests/unit/expect_status.h"
#include "tests/unit/group/local_cpu_group.h"
#include "tests/unit/group/worker_threads.h"
#include "tests/unit/run_threads.h"

namespace headwater::testing {
namespace {

EngineOptions Alone() {
  return {.token_chunk_rows = 16,
          .thread_count = 1,
          .bfloat16_products = ChooseBfloat16Products(EngineOptions{.group = {.world_size = 2}})};
}

EngineOptions Ranks(int32_t count) {
  EngineOptions options = Alone();
  options.shard_count = count;
  const std::vector<int64_t> uneven = {3, 1, 2, 2};
  options.shard_weights.assign(uneven.begin(), uneven.begin() + count);
  return options;
}

// Each rank with one thread.
std::unique_ptr<LossEngine> MakeGroup(EngineOptions options, bool links) {
  if (links) return ThreadedGroup::Make(options);
  options.thread_count = options.shard_count;
  auto group = CreateLocalCpuGroup(options);
  EXPECT_OK(group);
  return group.ok() ? *std::move(group) : nullptr;
}

std::unique_ptr<LossEngine> MakeOne(const EngineOptions& options = Alone()) {
  auto engine = CreateCpuEngine(options);
  EXPECT_OK(engine);
  return *std::move(engine);
}

std::vector<ReplicaCase> Cases() {
  std::vector<ReplicaCase> cases;
  for (const auto& [ranks, links] : {std::pair(1, false), {2, false}, {3, false}, {4, false}, {2, true}, {3, true}, {4, true}}) {
    ReplicaCase of = {.name = std::to_string(ranks) + (links ? "Linked" : "Local"),
                      .weights = Ranks(ranks).shard_weights,
                      .other_weights = Ranks(3).shard_weights,
                      .last_weights = Ranks(2).shard_weights};
    of.make_group = [ranks = ranks, links = links](const std::vector<int64_t>& weights, bool deterministic) {
      EngineOptions options = Ranks(static_cast<int32_t>(weights.size()));
      options.deterministic = deterministic;
      return MakeGroup(options, links && options.shard_count == ranks);
    };
    of.make_one = [] { return MakeOne(); };
    cases.push_back(std::move(of));
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Ranks, Replicas, ::testing::ValuesIn(Cases()), [](const auto& test) { return test.param.name; });

TEST(ReplicaPlan, HasAllWeightsOnEachRankAndTheOptimizerStateOnce) {
  HeadSpec spec = MakeReplicaProblems(1, ReplicaOptions(/*jsd=*/false, DataType::kBFloat16))[0].heads[0].spec;
  spec.parallelism = Parallelism::kVocabulary;
  const int64_t elements = spec.vocab_size * spec.hidden_size;
  const auto one = MakeOne()->PlanHead(spec);
  const auto group = MakeGroup(Ranks(3), false);
  spec.parallelism = Parallelism::kRows;
  const auto plan = group->PlanHead(spec);
  ASSERT_TRUE(one.ok() && plan.ok()) << plan.status();
  for (size_t i = 0; i < plan->items.size(); ++i) {
    const MemoryPlan::Item& item = plan->items[i];
    ASSERT_EQ(item.purpose, one->items[i].purpose);
    const bool once = item.purpose == "master_weight" || item.purpose == "optimizer_state";
    const int64_t exchange = item.purpose == "workspace" ? 3 * 3 * kReduceScatterBytes : 0;
    EXPECT_EQ(item.bytes, (once ? 1 : 3) * one->items[i].bytes + exchange) << item.purpose;
  }
  EXPECT_EQ(plan->items[0].bytes, 3 * elements * 2);
  EXPECT_EQ(plan->token_chunk_rows, one->token_chunk_rows);
  // It does not fit where its shards would.
  EngineOptions small = Ranks(3);
  small.memory_budget_bytes = plan->total_bytes - 1;
  const auto small_group = MakeGroup(small, false);
  EXPECT_TRUE(HasReason(small_group->CreateHead(spec).status(), ErrorReason::kMemoryBudgetExceeded));
  EXPECT_EQ(small_group->planned_bytes(), 0);
  small.memory_budget_bytes = 2 * plan->total_bytes;
  EXPECT_TRUE(MakeGroup(small, false)->CreateHead(spec).ok());
}

// A worker goes while a micro-batch is in the middle of its computation on the leader's own rank: the group is lost to both.
TEST(ReplicaFailure, ARankThatIsGoneLosesTheGroupWhateverTheOthersCompute) {
  const std::vector<Problem> problems = MakeReplicaProblems(2, ReplicaOptions());
  const std::unique_ptr<ThreadedGroup> made = ThreadedGroup::Make(Ranks(2));
  ThreadedGroup& group = *made;
  LoadedHeads heads(group, problems[0].heads);
  // Both are computing when it goes.
  struct CuttingFlow final : RowFlow {
    CuttingFlow(Meeting& at, ThreadedGroup& of) : meeting(at), group(of) {}
    absl::Status AwaitRows(int64_t) override { return absl::OkStatus(); }
    absl::Status Decide(const DigestBuilder*) override {
      if (!meeting.Arrive()) return absl::DeadlineExceededError("not at the same time");
      group.Cut(1);
      return absl::OkStatus();
    }
    void GradHiddenReady(int64_t) override {}

    Meeting& meeting;
    ThreadedGroup& group;
  };
  Meeting meeting(2);
  std::vector<absl::Status> answers(2);
  RunThreads(2, [&](int64_t i) {
    CuttingFlow flow(meeting, group);
    answers[i] = heads.TryCompute(problems[i], {.flow = &flow}).status();
  });
  // The rank that is gone cannot have answered; the other one perhaps before anybody knew.
  EXPECT_TRUE(HasReason(answers[0], ErrorReason::kEngineFailed) || HasReason(answers[1], ErrorReason::kEngineFailed))
      << answers[0] << ", " << answers[1];
  EXPECT_TRUE(HasReason(group.health(), ErrorReason::kEngineFailed)) << group.health();
  for (const Problem& problem : problems) EXPECT_EQ(heads.TryCompute(problem, {}).status(), group.health());
  EXPECT_EQ(heads.head(0).ApplyOptimizer(ReplicaStep(1)), group.health());
  EXPECT_FALSE(group.AwaitEnd(1).ok());
}

TEST(RankLoads, GiveToWhoHasLeastAndTakes) {
  group::RankLoads loads(3);
  const auto any = [](size_t) { return true; };
  EXPECT_EQ(loads.Give(10, any), 0U);
  EXPECT_EQ(loads.Give(5, any), 1U);
  EXPECT_EQ(loads.Give(0, any), 2U);  // counts as one row
  EXPECT_EQ(loads.Give(1, any), 2U);
  std::vector<size_t> asked;
  const auto refuse = [&](size_t rank) {
    asked.push_back(rank);
    return false;
  };
  EXPECT_EQ(loads.Give(1, refuse), std::nullopt);
  EXPECT_EQ(asked, (std::vector<size_t>{2, 1, 0}));
  loads.Return(0, 10);
  EXPECT_EQ(loads.Give(1, any), 0U);
}

}  // namespace
}  // namespace headwater::testing
