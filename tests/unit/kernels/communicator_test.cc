#include "headwater/kernels/communicator.h"

#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/error.h"
#include "tests/unit/run_threads.h"

namespace headwater {
namespace {

enum class Kind { kInProcess, kTcp };

constexpr std::chrono::seconds kPatience(60);

std::string TestSecret() { return "0123456789abcdefFEDCBA9876543210"; }

// Ranks that have met over the loopback interface.
std::vector<std::unique_ptr<Communicator>> MeetOverTcp(int32_t world_size) {
  std::vector<std::unique_ptr<TcpMeeting>> meetings;
  std::vector<std::string> addresses;
  const size_t ranks = static_cast<size_t>(world_size);
  for (size_t rank = 0; rank < ranks; ++rank) {
    absl::StatusOr<std::unique_ptr<TcpMeeting>> meeting = TcpMeeting::Listen("127.0.0.1");
    EXPECT_TRUE(meeting.ok()) << meeting.status();
    addresses.push_back("127.0.0.1:" + std::to_string((*meeting)->port()));
    meetings.push_back(*std::move(meeting));
  }
  std::vector<std::unique_ptr<Communicator>> communicators(ranks);
  headwater::testing::RunThreads(ranks, [&](int64_t rank) {
    auto communicator = meetings[rank]->Meet(static_cast<int32_t>(rank), addresses, TestSecret(), kPatience);
    ASSERT_TRUE(communicator.ok()) << communicator.status();
    communicators[rank] = *std::move(communicator);
  });
  return communicators;
}

std::vector<std::unique_ptr<Communicator>> MakeCommunicators(Kind kind, int32_t world_size) {
  if (kind == Kind::kInProcess) return MakeInProcessCommunicators(world_size);
  return MeetOverTcp(world_size);
}

// Waits for all ranks.
absl::Status Meet(Communicator& communicator) {
  double none = 0;
  return communicator.AllReduceMax(&none, 1);
}

// Runs one thread a rank.
void RunRanks(Kind kind, int32_t world_size, const std::function<void(Communicator&)>& program) {
  const std::vector<std::unique_ptr<Communicator>> communicators = MakeCommunicators(kind, world_size);
  headwater::testing::RunThreads(world_size, [&](int64_t rank) { program(*communicators[rank]); });
}

class Communicators : public ::testing::TestWithParam<std::tuple<Kind, int32_t>> {};

TEST_P(Communicators, SumsInRankOrder) {
  const auto [kind, world_size] = GetParam();
  // Counts around the grain in which ranks share the work, and fewer elements than ranks.
  for (const int64_t count : {1, 3, 63, 64, 65, 1000, 5001}) {
    // Terms whose sum depends on the order of adding.
    const auto term = [](int32_t rank, int64_t i) { return static_cast<float>(std::pow(10.0, (rank * 5 + i) % 9 - 4)) * 1.1f; };
    RunRanks(kind, world_size, [&, ranks = world_size](Communicator& communicator) {
      ASSERT_EQ(communicator.world_size(), ranks);
      std::vector<float> data(static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) data[static_cast<size_t>(i)] = term(communicator.rank(), i);
      ASSERT_TRUE(communicator.AllReduceSum(data.data(), count).ok());
      for (int64_t i = 0; i < count; ++i) {
        float expected = term(0, i);
        for (int32_t rank = 1; rank < ranks; ++rank) expected += term(rank, i);
        ASSERT_EQ(data[static_cast<size_t>(i)], expected) << "element " << i << " of " << count;
      }
    });
  }
}

TEST_P(Communicators, MaximumKeepsNan) {
  RunRanks(std::get<0>(GetParam()), std::get<1>(GetParam()), [](Communicator& communicator) {
    const int32_t last = communicator.world_size() - 1;
    double data[3] = {static_cast<double>(-communicator.rank()), static_cast<double>(communicator.rank()), 5.0};
    if (communicator.rank() == last) data[2] = std::numeric_limits<double>::quiet_NaN();
    ASSERT_TRUE(communicator.AllReduceMax(data, 3).ok());
    EXPECT_EQ(data[0], 0);
    EXPECT_EQ(data[1], last);
    EXPECT_TRUE(std::isnan(data[2]));
  });
}

TEST_P(Communicators, GathersByRank) {
  RunRanks(std::get<0>(GetParam()), std::get<1>(GetParam()), [](Communicator& communicator) {
    const double data[2] = {communicator.rank() * 10.0, communicator.rank() + 0.5};
    std::vector<double> out(2 * static_cast<size_t>(communicator.world_size()));
    ASSERT_TRUE(communicator.AllGather(data, 2, out.data()).ok());
    for (size_t rank = 0; rank < out.size() / 2; ++rank) {
      EXPECT_EQ(out[2 * rank], static_cast<double>(rank) * 10.0);
      EXPECT_EQ(out[2 * rank + 1], static_cast<double>(rank) + 0.5);
    }
  });
}

// Parts of [0, count) of unequal size, one of them empty if there are three ranks or more.
std::vector<int64_t> UnevenBounds(int64_t count, int32_t world_size) {
  std::vector<int64_t> bounds = {0};
  for (int64_t rank = 1; rank < world_size; ++rank) bounds.push_back(rank == 2 ? bounds.back() : count * rank / (world_size + 1));
  bounds.push_back(count);
  return bounds;
}

TEST_P(Communicators, ScattersSumsInRankOrder) {
  const auto [kind, world_size] = GetParam();
  const auto term = [](int32_t rank, int64_t i) { return static_cast<float>(std::pow(10.0, (rank * 5 + i) % 9 - 4)) * 1.1f; };
  // The last count takes several pieces of the exchange.
  for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{100}, 3 * kReduceScatterBytes / 4 + 7}) {
    const std::vector<int64_t> bounds = UnevenBounds(count, world_size);
    RunRanks(kind, world_size, [&, ranks = world_size](Communicator& communicator) {
      const int32_t own = communicator.rank();
      std::vector<float> data(static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) data[static_cast<size_t>(i)] = term(own, i);
      ASSERT_TRUE(communicator.ReduceScatterSum(data.data(), bounds).ok());
      for (int64_t i = 0; i < count; ++i) {
        float expected = term(own, i);
        if (i >= bounds[static_cast<size_t>(own)] && i < bounds[static_cast<size_t>(own) + 1]) {
          expected = term(0, i);
          for (int32_t rank = 1; rank < ranks; ++rank) expected += term(rank, i);
        }
        ASSERT_EQ(data[static_cast<size_t>(i)], expected) << "element " << i << " of " << count << " on rank " << own;
      }
    });
  }
}

TEST_P(Communicators, GathersParts) {
  const auto [kind, world_size] = GetParam();
  const auto byte = [](size_t rank, int64_t i) { return static_cast<char>(static_cast<int64_t>(rank) * 31 + i % 97); };
  for (const int64_t count : {int64_t{0}, int64_t{5}, int64_t{300'001}}) {
    const std::vector<int64_t> bounds = UnevenBounds(count, world_size);
    RunRanks(kind, world_size, [&](Communicator& communicator) {
      std::vector<char> data(static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) data[static_cast<size_t>(i)] = byte(static_cast<size_t>(communicator.rank()), i);
      ASSERT_TRUE(communicator.AllGatherParts(data.data(), bounds).ok());
      for (size_t rank = 0; rank + 1 < bounds.size(); ++rank) {
        for (int64_t i = bounds[rank]; i < bounds[rank + 1]; ++i) ASSERT_EQ(data[static_cast<size_t>(i)], byte(rank, i)) << i;
      }
    });
  }
}

// Calls one after another must not see each other's data, however the threads are scheduled.
TEST_P(Communicators, ManyCallsInARow) {
  RunRanks(std::get<0>(GetParam()), std::get<1>(GetParam()), [](Communicator& communicator) {
    const int64_t ranks = communicator.world_size();
    for (int64_t round = 0; round < 300; ++round) {
      std::vector<double> data(65, static_cast<double>(round * ranks + communicator.rank()));
      ASSERT_TRUE(communicator.AllReduceSum(data.data(), 65).ok());
      const double expected = static_cast<double>(round * ranks * ranks + ranks * (ranks - 1) / 2);
      for (const double value : data) ASSERT_EQ(value, expected) << "round " << round;
      if (round % 7 == 0) {
        ASSERT_TRUE(Meet(communicator).ok());
      }
    }
  });
}

// Early ranks wait and late ones do not; time between calls is neither waiting nor communicating.
TEST_P(Communicators, TellHowLongTheyWaitedAndCommunicated) {
  const auto [kind, world_size] = GetParam();
  if (world_size == 1) {  // a single rank waits for none
    RunRanks(Kind::kInProcess, 1, [](Communicator& communicator) {
      ASSERT_TRUE(Meet(communicator).ok());
      EXPECT_EQ(communicator.times().waiting.count(), 0);
      EXPECT_EQ(communicator.times().communicating.count(), 0);
    });
    return;
  }
  const std::vector<std::unique_ptr<Communicator>> communicators = MakeCommunicators(kind, world_size);
  const Communicator& early = *communicators[0];
  const Communicator& late = *communicators.back();
  static constexpr std::chrono::milliseconds kWait(20);
  headwater::testing::RunThreads(world_size, [&](int64_t rank) {
    // Seen in the middle of the call, too.
    while (communicators[rank].get() == &late && early.times().waiting < kWait) std::this_thread::yield();
    std::vector<float> data(300000, 1);
    ASSERT_TRUE(communicators[rank]->AllReduceSum(data.data(), 300000).ok());
  });
  EXPECT_GE(early.times().waiting, kWait);
  for (const std::unique_ptr<Communicator>& communicator : communicators) {
    const CommunicatorTimes times = communicator->times();
    EXPECT_GT(times.communicating.count(), 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(communicator->times().waiting, times.waiting);
    EXPECT_EQ(communicator->times().communicating, times.communicating);
  }
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, Communicators,
                         ::testing::Combine(::testing::Values(Kind::kInProcess, Kind::kTcp), ::testing::Values(1, 2, 3, 7)));

class CommunicatorAbort : public ::testing::TestWithParam<Kind> {};

TEST_P(CommunicatorAbort, WakesWaitingRanksAndStays) {
  const absl::Status reason = MakeError(ErrorReason::kEngineFailed, "rank 0 gave up");
  const bool tcp = GetParam() == Kind::kTcp;
  RunRanks(GetParam(), 3, [&](Communicator& communicator) {
    if (communicator.rank() == 0) {
      EXPECT_TRUE(communicator.status().ok());
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      communicator.Abort(reason);
      communicator.Abort(MakeError(ErrorReason::kInternal, "a later reason does not count"));
    }
    double data = 1;
    const absl::Status first = communicator.AllReduceSum(&data, 1);
    const absl::Status second = Meet(communicator);
    EXPECT_EQ(first, second);
    EXPECT_EQ(communicator.status(), first);
    if (!tcp || communicator.rank() == 0) {
      EXPECT_EQ(first, reason);
    } else {  // all that the others see is that the connection is gone
      EXPECT_TRUE(HasReason(first, ErrorReason::kEngineFailed)) << first;
    }
  });
}

TEST_P(CommunicatorAbort, DifferentCallsFailOnAllRanks) {
  RunRanks(GetParam(), 2, [](Communicator& communicator) {
    double data[2] = {1, 2};
    EXPECT_FALSE(communicator.AllReduceSum(data, communicator.rank() == 0 ? 1 : 2).ok());
    EXPECT_FALSE(Meet(communicator).ok());
  });
}

INSTANTIATE_TEST_SUITE_P(Kinds, CommunicatorAbort, ::testing::Values(Kind::kInProcess, Kind::kTcp));

// A rank whose process dies closes its connections.
TEST(TcpCommunicator, ALostRankFailsTheOthers) {
  auto communicators = MeetOverTcp(3);
  communicators[2].reset();
  headwater::testing::RunThreads(2, [&communicators](int64_t rank) {
    std::vector<float> data(100000, 1);  // more than sockets take by themselves
    const absl::Status status = communicators[rank]->AllReduceSum(data.data(), 100000);
    EXPECT_TRUE(HasReason(status, ErrorReason::kEngineFailed)) << status;
    EXPECT_EQ(Meet(*communicators[rank]), status);
  });
}

}  // namespace
}  // namespace headwater
