#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/transport/byte_budget.h"

namespace headwater::transport {
namespace {

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
