#include "server/transport/row_assembler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "headwater/kernels/error.h"
#include "server/transport/byte_budget.h"
#include "server/transport/growing_buffer.h"

namespace headwater::transport {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// `count` rows of 8 bytes that begin at row `start`; each byte tells its row.
std::string Rows(int64_t start, int64_t count) {
  std::string data;
  for (int64_t row = start; row < start + count; ++row) data += std::string(8, static_cast<char>(row));
  return data;
}

absl::Status Add(RowAssembler& rows, int64_t start, int64_t count) {
  std::string data = Rows(start, count);
  return rows.Add(start, count, &data, "chunk");
}

TEST(RowAssembler, TakesRowsInAnyOrder) {
  std::vector<std::pair<int64_t, int64_t>> chunks = {{0, 3}, {3, 1}, {4, 5}, {9, 1}, {10, 10}};
  std::mt19937 generator(3);
  for (int round = 0; round < 50; ++round) {
    std::shuffle(chunks.begin(), chunks.end(), generator);
    RowAssembler rows(20, 2, DataType::kFloat32);
    for (const auto& [start, count] : chunks) {
      EXPECT_TRUE(HasReason(rows.CheckComplete("hidden"), ErrorReason::kProtocolViolation));
      ASSERT_TRUE(Add(rows, start, count).ok());
    }
    ASSERT_TRUE(rows.CheckComplete("hidden").ok());
    EXPECT_EQ(std::string(static_cast<const char*>(rows.view().data), 160), Rows(0, 20));
    EXPECT_EQ(rows.view().row_count, 20);
  }
}

TEST(RowAssembler, RefusesOverlapsAndWhatLiesOutside) {
  RowAssembler rows(10, 2, DataType::kFloat32);
  ASSERT_TRUE(Add(rows, 0, 2).ok());
  ASSERT_TRUE(Add(rows, 5, 3).ok());
  for (const auto& [start, count] : std::vector<std::pair<int64_t, int64_t>>{{0, 1},
                                                                             {1, 2},
                                                                             {4, 2},
                                                                             {5, 3},
                                                                             {6, 1},
                                                                             {7, 2},
                                                                             {2, 8},
                                                                             {10, 1},
                                                                             {9, 2},
                                                                             {-1, 1},
                                                                             {3, 0},
                                                                             {3, -1},
                                                                             {kMost, 1},
                                                                             {3, kMost},
                                                                             {kMost, kMost}}) {
    std::string data = Rows(0, std::clamp<int64_t>(count, 0, 20));
    EXPECT_TRUE(HasReason(rows.Add(start, count, &data, "chunk"), ErrorReason::kChunkOutOfRange)) << start << " " << count;
  }
  EXPECT_EQ(rows.received_rows(), 5);
  std::string data = Rows(2, 3) + "x";
  EXPECT_TRUE(HasReason(rows.Add(2, 3, &data, "chunk"), ErrorReason::kDataLengthMismatch));
  const absl::Status missing = rows.CheckComplete("hidden");
  EXPECT_EQ(GetErrorMetadata(missing).at("firstMissingRow"), "2");
  ASSERT_TRUE(Add(rows, 2, 3).ok());
  ASSERT_TRUE(Add(rows, 8, 2).ok());
  ASSERT_TRUE(rows.CheckComplete("hidden").ok());
  EXPECT_EQ(std::memcmp(rows.view().data, Rows(0, 10).data(), 80), 0);
}

TEST(RowAssembler, WithoutRowsIsComplete) {
  RowAssembler rows(0, 4, DataType::kBFloat16);
  EXPECT_TRUE(rows.CheckComplete("hidden").ok());
  EXPECT_TRUE(HasReason(Add(rows, 0, 1), ErrorReason::kChunkOutOfRange));
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
  EXPECT_FALSE(buffer.Append("x", kMost));
  EXPECT_TRUE(buffer.Append("", 0));
  EXPECT_EQ(buffer.size(), 10);
}

TEST(ByteBudget, GivesBackWhatWasReserved) {
  ByteBudget budget(100);
  ByteBudget::Reservation first;
  ASSERT_TRUE(budget.TryReserve(100, &first));
  ByteBudget::Reservation second;
  EXPECT_FALSE(budget.TryReserve(1, &second));
  EXPECT_FALSE(budget.TryReserve(kMost, &second));
  EXPECT_TRUE(budget.TryReserve(0, &second));
  EXPECT_EQ(budget.available_bytes(), 0);
  {
    const ByteBudget::Reservation moved = std::move(first);
    EXPECT_EQ(moved.bytes(), 100);
    EXPECT_EQ(budget.reserved_bytes(), 100);
  }
  EXPECT_EQ(budget.reserved_bytes(), 0);
  ASSERT_TRUE(budget.TryReserve(60, &second));
  EXPECT_EQ(budget.reserved_bytes(), 60);
}

}  // namespace
}  // namespace headwater::transport
