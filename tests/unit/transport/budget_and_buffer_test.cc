#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "headwater/kernels/error.h"
#include "headwater/kernels/planned_bytes.h"
#include "server/transport/byte_budget.h"

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

}  // namespace
}  // namespace headwater::transport
