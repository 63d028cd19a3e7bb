#include "server/transport/byte_budget.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/planned_bytes.h"

namespace headwater::transport {
namespace {

constexpr int64_t kMostBytes = std::numeric_limits<int64_t>::max();

TEST(PlannedBytes, AreRefusedWhereThereIsNoMemory) {
  for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{64}, int64_t{1} << 20}) {
    const absl::StatusOr<PlannedBytes> planned = AllocatePlanned(bytes);
    ASSERT_TRUE(planned.ok()) << planned.status();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(planned->get()) % 64, 0u);
    std::memset(planned->get(), 1, static_cast<size_t>(bytes));
  }
#if !defined(HEADWATER_SANITIZED)  // whose allocators end the process there
  for (const int64_t bytes : {int64_t{1} << 60, kMostBytes}) {
    const absl::Status refused = AllocatePlanned(bytes).status();
    EXPECT_TRUE(HasReason(refused, ErrorReason::kMemoryBudgetExceeded)) << refused;
    EXPECT_EQ(GetErrorMetadata(refused)["requestedBytes"], std::to_string(bytes));
  }
#endif
}

TEST(GrowingBuffer, AllocatesWithTheBytesThatCome) {
  GrowingBuffer buffer(int64_t{1} << 40);
  EXPECT_EQ(buffer.capacity(), 0);
  const std::string piece(1 << 20, 'p');
  for (int i = 1; i <= 20; ++i) {
    ASSERT_TRUE(buffer.Append(piece.data(), 1 << 20));
    EXPECT_EQ(buffer.size(), int64_t{i} << 20);
    EXPECT_LE(buffer.capacity(), std::max(GrowingBuffer::kFirstBytes, 2 * buffer.size()));
  }
  EXPECT_EQ(buffer.data()[(20 << 20) - 1], 'p');
}

TEST(GrowingBuffer, StopsAtItsLimit) {
  GrowingBuffer buffer(10);
  EXPECT_TRUE(buffer.Append("0123456789", 10));
  EXPECT_EQ(buffer.capacity(), 10);
  EXPECT_FALSE(buffer.Append("x", 1));
  EXPECT_FALSE(buffer.Append("x", kMostBytes));
  EXPECT_TRUE(buffer.Append("", 0));
  EXPECT_EQ(buffer.size(), 10);
}

TEST(ByteBudget, MayBeExceededOnPurpose) {
  ByteBudget budget(100);
  ByteBudget::Reservation first, second;
  budget.ReserveAnyway(150, &first);
  EXPECT_EQ(budget.reserved_bytes(), 150);
  EXPECT_EQ(budget.available_bytes(), 0);
  EXPECT_FALSE(budget.TryReserve(1, &second));
  first.reset();
  EXPECT_TRUE(budget.TryReserve(100, &second));
}

TEST(ByteBudget, GivesBackWhatWasReserved) {
  ByteBudget budget(100);
  ByteBudget::Reservation first;
  ASSERT_TRUE(budget.TryReserve(100, &first));
  ByteBudget::Reservation second;
  EXPECT_FALSE(budget.TryReserve(1, &second));
  EXPECT_FALSE(budget.TryReserve(kMostBytes, &second));
  EXPECT_TRUE(budget.TryReserve(0, &second));
  EXPECT_EQ(budget.available_bytes(), 0);
  {
    const ByteBudget::Reservation moved = std::move(first);
    EXPECT_EQ(moved.get_deleter().bytes, 100);
    EXPECT_EQ(budget.reserved_bytes(), 100);
  }
  EXPECT_EQ(budget.reserved_bytes(), 0);
  ASSERT_TRUE(budget.TryReserve(60, &second));
  EXPECT_EQ(budget.reserved_bytes(), 60);
}

using Reservation = ByteBudget::Reservation;

const absl::Time kNow = absl::UnixEpoch();

TEST(FairBudget, IsABudget) {
  FairBudget budget(100);
  Reservation a;
  Reservation b;
  EXPECT_TRUE(budget.TryReserve("a", 100, kNow, &a));
  EXPECT_EQ(budget.reserved_bytes(), 100);
  EXPECT_FALSE(budget.TryReserve("b", 1, kNow, &b));
  EXPECT_TRUE(budget.TryReserve("a", 0, kNow, &b));
  a.reset();
  EXPECT_EQ(budget.available_bytes(), 100);
  EXPECT_TRUE(budget.TryReserve("b", 100, kNow, &b));
}

TEST(FairBudget, KeepsRoomForWhoWasRefusedFirst) {
  FairBudget budget(100);
  Reservation a1;
  Reservation a2;
  Reservation b;
  Reservation c;
  ASSERT_TRUE(budget.TryReserve("a", 60, kNow, &a1));
  ASSERT_TRUE(budget.TryReserve("a", 30, kNow, &a2));
  EXPECT_FALSE(budget.TryReserve("b", 80, kNow, &b));
  a2.reset();
  // There is room for 40, but b needs it to come up to its 80.
  EXPECT_FALSE(budget.TryReserve("a", 30, kNow, &a2));
  EXPECT_FALSE(budget.TryReserve("c", 5, kNow, &c));
  a1.reset();
  EXPECT_FALSE(budget.TryReserve("a", 30, kNow, &a2));  // leaves 70
  EXPECT_TRUE(budget.TryReserve("b", 80, kNow, &b));
  // Next are those that were refused while b waited, in that order.
  EXPECT_FALSE(budget.TryReserve("c", 5, kNow, &c));  // of the 20 that are free a waits for 30
  b.reset();
  EXPECT_TRUE(budget.TryReserve("c", 5, kNow, &c));
  EXPECT_TRUE(budget.TryReserve("a", 30, kNow, &a2));
}

TEST(FairBudget, DoesNotWaitForWhoStaysAway) {
  FairBudget budget(100);
  Reservation a;
  Reservation b;
  ASSERT_TRUE(budget.TryReserve("a", 50, kNow, &a));
  EXPECT_FALSE(budget.TryReserve("b", 100, kNow, &b));
  Reservation c;
  const absl::Time later = kNow + FairBudget::kPatience;
  EXPECT_FALSE(budget.TryReserve("c", 10, later, &c));
  EXPECT_TRUE(budget.TryReserve("c", 10, later + absl::Milliseconds(1), &c));
}

TEST(FairBudget, StarvesNobody) {
  // One client that always has eight calls on the way, one with small calls, one with calls of nearly the whole budget.
  FairBudget budget(1000);
  std::mt19937 random(11);
  std::map<std::string, std::vector<Reservation>> held;
  std::map<std::string, int> served;
  const std::vector<std::pair<std::string, int64_t>> clients = {{"many", 120}, {"small", 3}, {"large", 950}};
  absl::Time now = kNow;
  for (int round = 0; round < 20000; ++round) {
    now += absl::Milliseconds(10);
    const auto& [client, bytes] = clients[std::uniform_int_distribution<size_t>(0, 2)(random)];
    std::vector<Reservation>& mine = held[client];
    if (mine.size() >= 8 || (!mine.empty() && random() % 3 == 0)) {
      mine.erase(mine.begin());
      continue;
    }
    Reservation reservation;
    if (!budget.TryReserve(client, bytes, now, &reservation)) {
      for (auto& [name, calls] : held) {  // time passes, and calls end
        if (!calls.empty() && random() % 2 == 0) calls.erase(calls.begin());
      }
      continue;
    }
    ++served[client];
    mine.push_back(std::move(reservation));
  }
  for (const auto& [client, bytes] : clients) EXPECT_GT(served[client], 500) << client;
}

}  // namespace
}  // namespace headwater::transport
