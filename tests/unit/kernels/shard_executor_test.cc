#include "kernels/cpu/shard_executor.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/error.h"

namespace headwater::cpu {
namespace {

TEST(ThreadPool, EveryPartRunsOnceOnItsOwnThread) {
  ThreadPool pool(4);
  EXPECT_EQ(pool.thread_count(), 4);
  std::vector<std::thread::id> first(4);
  for (int round = 0; round < 200; ++round) {
    const int32_t part_count = round % 4 + 1;
    std::vector<int> calls(4, 0);
    pool.Run(part_count, [&](int32_t part) {
      calls[static_cast<size_t>(part)] += 1;
      std::thread::id& id = first[static_cast<size_t>(part)];
      if (id == std::thread::id()) id = std::this_thread::get_id();
      EXPECT_EQ(id, std::this_thread::get_id());
    });
    for (int32_t part = 0; part < 4; ++part) EXPECT_EQ(calls[static_cast<size_t>(part)], part < part_count ? 1 : 0);
  }
  EXPECT_EQ(first[0], std::this_thread::get_id());
}

TEST(ShardExecutors, OneShardRunsOnTheCallersThread) {
  ShardExecutors executors(1, 3);
  EXPECT_EQ(executors.threads_per_shard(), 3);
  std::thread::id id;
  ASSERT_TRUE(executors
                  .Run([&](const ShardContext& context) {
                    id = std::this_thread::get_id();
                    return context.communicator.Barrier();
                  })
                  .ok());
  EXPECT_EQ(id, std::this_thread::get_id());
}

TEST(ShardExecutors, ShardsRunAtTheSameTime) {
  ShardExecutors executors(3, 2);
  EXPECT_EQ(executors.shard_count(), 3);
  EXPECT_EQ(executors.threads_per_shard(), 1);
  for (int round = 0; round < 50; ++round) {
    ASSERT_TRUE(executors
                    .Run([&](const ShardContext& context) {
                      double sum = context.rank + 1;
                      absl::Status status = context.communicator.AllReduceSum(&sum, 1);
                      EXPECT_EQ(sum, 6);
                      return status;
                    })
                    .ok());
  }
}

// A shard that fails must not leave the others waiting, and the engine must not go on with half a result.
TEST(ShardExecutors, AFailureEndsAllShardsForGood) {
  for (const bool throws : {false, true}) {
    ShardExecutors executors(3, 3);
    const absl::Status status = executors.Run([&](const ShardContext& context) -> absl::Status {
      if (context.rank == 1 && throws) throw std::runtime_error("no more memory");
      if (context.rank == 1) return MakeError(ErrorReason::kEngineFailed, "shard 1 failed");
      return context.communicator.Barrier();
    });
    EXPECT_TRUE(HasReason(status, ErrorReason::kEngineFailed)) << status;
    std::atomic<int> calls{0};
    const absl::Status later = executors.Run([&](const ShardContext&) {
      ++calls;
      return absl::OkStatus();
    });
    EXPECT_TRUE(HasReason(later, ErrorReason::kEngineFailed)) << later;
    EXPECT_EQ(calls, 0);
  }
}

}  // namespace
}  // namespace headwater::cpu
