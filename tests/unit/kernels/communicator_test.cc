#include "headwater/kernels/communicator.h"

#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/error.h"

namespace headwater {
namespace {

// Runs one thread a rank.
void RunRanks(int32_t world_size, const std::function<void(Communicator&)>& program) {
  std::vector<std::unique_ptr<Communicator>> communicators = MakeInProcessCommunicators(world_size);
  std::vector<std::thread> threads;
  for (const std::unique_ptr<Communicator>& communicator : communicators) {
    threads.emplace_back([&program, &communicator] { program(*communicator); });
  }
  for (std::thread& thread : threads) thread.join();
}

class InProcessCommunicator : public ::testing::TestWithParam<int32_t> {};

TEST_P(InProcessCommunicator, SumsInRankOrder) {
  const int32_t world_size = GetParam();
  // Counts around the grain in which ranks share the work, and fewer elements than ranks.
  for (const int64_t count : {1, 3, 63, 64, 65, 1000}) {
    // Terms whose sum depends on the order of adding.
    const auto term = [](int32_t rank, int64_t i) { return static_cast<float>(std::pow(10.0, (rank * 5 + i) % 9 - 4)) * 1.1f; };
    RunRanks(world_size, [&](Communicator& communicator) {
      ASSERT_EQ(communicator.world_size(), world_size);
      std::vector<float> data(static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) data[static_cast<size_t>(i)] = term(communicator.rank(), i);
      ASSERT_TRUE(communicator.AllReduceSum(data.data(), count).ok());
      for (int64_t i = 0; i < count; ++i) {
        float expected = term(0, i);
        for (int32_t rank = 1; rank < world_size; ++rank) expected += term(rank, i);
        ASSERT_EQ(data[static_cast<size_t>(i)], expected) << "element " << i << " of " << count;
      }
    });
  }
}

TEST_P(InProcessCommunicator, MaximumKeepsNan) {
  RunRanks(GetParam(), [](Communicator& communicator) {
    const int32_t last = communicator.world_size() - 1;
    double data[3] = {static_cast<double>(-communicator.rank()), static_cast<double>(communicator.rank()), 5.0};
    if (communicator.rank() == last) data[2] = std::numeric_limits<double>::quiet_NaN();
    ASSERT_TRUE(communicator.AllReduceMax(data, 3).ok());
    EXPECT_EQ(data[0], 0);
    EXPECT_EQ(data[1], last);
    EXPECT_TRUE(std::isnan(data[2]));
  });
}

TEST_P(InProcessCommunicator, GathersByRank) {
  RunRanks(GetParam(), [](Communicator& communicator) {
    const double data[2] = {communicator.rank() * 10.0, communicator.rank() + 0.5};
    std::vector<double> out(2 * static_cast<size_t>(communicator.world_size()));
    ASSERT_TRUE(communicator.AllGather(data, 2, out.data()).ok());
    for (size_t rank = 0; rank < out.size() / 2; ++rank) {
      EXPECT_EQ(out[2 * rank], static_cast<double>(rank) * 10.0);
      EXPECT_EQ(out[2 * rank + 1], static_cast<double>(rank) + 0.5);
    }
  });
}

// Calls one after another must not see each other's data, however the threads are scheduled.
TEST_P(InProcessCommunicator, ManyCallsInARow) {
  RunRanks(GetParam(), [](Communicator& communicator) {
    const int64_t ranks = communicator.world_size();
    for (int64_t round = 0; round < 300; ++round) {
      std::vector<double> data(65, static_cast<double>(round * ranks + communicator.rank()));
      ASSERT_TRUE(communicator.AllReduceSum(data.data(), 65).ok());
      const double expected = static_cast<double>(round * ranks * ranks + ranks * (ranks - 1) / 2);
      for (const double value : data) ASSERT_EQ(value, expected) << "round " << round;
      if (round % 7 == 0) {
        ASSERT_TRUE(communicator.Barrier().ok());
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, InProcessCommunicator, ::testing::Values(1, 2, 3, 7));

TEST(CommunicatorAbort, WakesWaitingRanksAndStays) {
  const absl::Status reason = MakeError(ErrorReason::kEngineFailed, "rank 0 gave up");
  RunRanks(3, [&](Communicator& communicator) {
    if (communicator.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      communicator.Abort(reason);
      communicator.Abort(MakeError(ErrorReason::kInternal, "a later reason does not count"));
    }
    double data = 1;
    EXPECT_EQ(communicator.AllReduceSum(&data, 1), reason);
    EXPECT_EQ(communicator.Barrier(), reason);
  });
}

TEST(CommunicatorAbort, DifferentCallsFailOnAllRanks) {
  RunRanks(2, [](Communicator& communicator) {
    double data[2] = {1, 2};
    const absl::Status status = communicator.AllReduceSum(data, communicator.rank() == 0 ? 1 : 2);
    EXPECT_TRUE(HasReason(status, ErrorReason::kInternal)) << status;
    EXPECT_FALSE(communicator.Barrier().ok());
  });
}

}  // namespace
}  // namespace headwater
