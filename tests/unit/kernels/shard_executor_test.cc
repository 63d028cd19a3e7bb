#include "kernels/cpu/shard_executor.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/error.h"

namespace headwater::cpu {
namespace {

// With pauses between the runs and in some parts, so that threads that still look for work and sleeping ones take turns.
TEST(ThreadPool, EveryPartRunsOnceOnItsOwnThread) {
  ThreadPool pool(4);
  EXPECT_EQ(pool.thread_count(), 4);
  std::vector<std::thread::id> first(4);
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); };
  for (int round = 0; round < 2000; ++round) {
    if (round % 100 == 99) pause();
    const int32_t part_count = round % 4 + 1;
    std::vector<int> calls(4, 0);
    pool.Run(part_count, [&](int32_t part) {
      if (round % 50 == 7 * part) pause();
      calls[static_cast<size_t>(part)] += 1;
      std::thread::id& id = first[static_cast<size_t>(part)];
      if (id == std::thread::id()) id = std::this_thread::get_id();
      EXPECT_EQ(id, std::this_thread::get_id());
    });
    for (int32_t part = 0; part < 4; ++part) EXPECT_EQ(calls[static_cast<size_t>(part)], part < part_count ? 1 : 0);
  }
  EXPECT_EQ(first[0], std::this_thread::get_id());
}

// All ranks take part and meet.
void ExpectSumOfRanks(ShardExecutors& executors) {
  const int32_t count = executors.shard_count();
  const absl::Status status = executors.Run([&](const ShardContext& context) {
    double sum = context.rank + 1;
    absl::Status reduced = context.communicator.AllReduceSum(&sum, 1);
    // One shard's sum is its own.
    EXPECT_EQ(sum, count * (count + 1) / 2);
    return reduced;
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ShardExecutors, OneShardRunsOnTheCallersThread) {
  ShardExecutors executors(1, 3);
  EXPECT_EQ(executors.threads_per_shard(), 3);
  std::thread::id id;
  ASSERT_TRUE(executors
                  .Run([&](const ShardContext& context) {
                    id = std::this_thread::get_id();
                    double none = 0;
                    return context.communicator.AllReduceMax(&none, 1);
                  })
                  .ok());
  EXPECT_EQ(id, std::this_thread::get_id());
}

TEST(ShardExecutors, ShardsRunAtTheSameTime) {
  ShardExecutors executors(3, 2);
  EXPECT_EQ(executors.shard_count(), 3);
  EXPECT_EQ(executors.threads_per_shard(), 1);
  for (int round = 0; round < 50; ++round) ExpectSumOfRanks(executors);
}

// A shard that fails must not leave the others waiting, nor spoil later calls.
TEST(ShardExecutors, AFailureEndsAllShardsOfTheCall) {
  ShardExecutors executors(3, 3);
  for (const ErrorReason reason : {ErrorReason::kEngineFailed, ErrorReason::kInternal}) {
    const absl::Status status = executors.Run([&](const ShardContext& context) {
      double none = 0;
      return context.rank == 1 ? MakeError(reason, "it failed") : context.communicator.AllReduceMax(&none, 1);
    });
    EXPECT_TRUE(HasReason(status, ErrorReason::kEngineFailed)) << status;
    if (reason != ErrorReason::kEngineFailed) {
      EXPECT_EQ(GetErrorMetadata(status)["shard"], "1");
    }
    ExpectSumOfRanks(executors);
  }
}

TEST(ShardExecutors, OneThatIsNotReadyStopsAllBeforeTheyAct) {
  for (const int32_t shard_count : {1, 3, 7}) {
    ShardExecutors executors(shard_count, shard_count);
    for (int32_t failing = 0; failing < shard_count; ++failing) {
      std::atomic<int32_t> acted{0};
      const absl::Status status = executors.RunDecided(
          [&](const ShardContext& context) {
            return context.rank == failing ? MakeError(ErrorReason::kMemoryBudgetExceeded, "no room") : absl::OkStatus();
          },
          [&](const ShardContext&) {
            ++acted;
            return absl::OkStatus();
          });
      EXPECT_TRUE(HasReason(status, ErrorReason::kShardNotReady)) << status;
      EXPECT_EQ(GetErrorMetadata(status)["shard"], std::to_string(failing));
      EXPECT_EQ(acted, 0);
      ExpectSumOfRanks(executors);
    }
  }
}

}  // namespace
}  // namespace headwater::cpu
