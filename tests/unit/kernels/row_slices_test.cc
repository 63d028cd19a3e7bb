#include "kernels/cuda/computation/row_slices.h"

#include <gtest/gtest.h>

#include <vector>

namespace headwater::cuda {
namespace {

constexpr SliceNeeds kNothing;
constexpr SliceNeeds kComesIn = {true, false, false};
constexpr SliceNeeds kComesAndLeaves = {true, true, false};
constexpr SliceNeeds kLeavesLast = {false, true, true};
constexpr SliceNeeds kBoth = {true, true, true};

std::vector<int64_t> Counts(int64_t rows, const SliceNeeds& needs) {
  std::vector<int64_t> counts;
  for (const RowSlice& slice : SliceRows(rows, needs)) counts.push_back(slice.count);
  return counts;
}

using Rows = std::vector<int64_t>;

TEST(RowSlices, RowsThatAreThereAndStayAreNotCut) {
  EXPECT_EQ(Counts(1, kNothing), Rows({1}));
  EXPECT_EQ(Counts(8192, kNothing), Rows({8192}));
}

TEST(RowSlices, TheFirstRowsAreComputedWhileTheOthersCome) {
  EXPECT_EQ(Counts(8192, kComesIn), Rows({1024, 2048, 5120}));
  EXPECT_EQ(Counts(4096, kComesIn), Rows({1024, 2048, 1024}));
  EXPECT_EQ(Counts(4095, kComesIn), Rows({1024, 3071}));
  EXPECT_EQ(Counts(2048, kComesIn), Rows({1024, 1024}));
  EXPECT_EQ(Counts(2047, kComesIn), Rows({2047}));
  // If there are many rows, only the first are waited for.
  EXPECT_EQ(Counts(12287, kComesIn), Rows({1024, 2048, 9215}));
  EXPECT_EQ(Counts(12288, kComesIn), Rows({1024, 2048, 8192, 1024}));
  EXPECT_EQ(Counts(32768, kComesIn), Rows({1024, 2048, 8192, 8192, 8192, 5120}));
}

TEST(RowSlices, TheAnswerDoesNotWaitForManyRowsToLeave) {
  EXPECT_EQ(Counts(8192, kComesAndLeaves), Rows({1024, 2048, 3072, 2048}));
  EXPECT_EQ(Counts(8191, kComesAndLeaves), Rows({1024, 2048, 2048, 3071}));
  EXPECT_EQ(Counts(7168, kComesAndLeaves), Rows({1024, 2048, 2048, 2048}));
  EXPECT_EQ(Counts(7167, kComesAndLeaves), Rows({1024, 2048, 4095}));
  EXPECT_EQ(Counts(4096, kComesAndLeaves), Rows({1024, 2048, 1024}));
  EXPECT_EQ(Counts(32768, kComesAndLeaves), Rows({1024, 2048, 8192, 8192, 8192, 3072, 2048}));
  EXPECT_EQ(Counts(8192, SliceNeeds{.leaves = true}), Rows({8192}));
}

TEST(RowSlices, LittleIsLeftToLeaveAtTheEnd) {
  EXPECT_EQ(Counts(8192, kBoth), Rows({1024, 2048, 2048, 2048, 1024}));
  EXPECT_EQ(Counts(8192, kLeavesLast), Rows({1024, 2048, 2048, 2048, 1024}));
  EXPECT_EQ(Counts(8191, kBoth), Rows({1024, 2048, 2048, 1024, 2047}));
  EXPECT_EQ(Counts(7168, kBoth), Rows({1024, 2048, 2048, 1024, 1024}));
  EXPECT_EQ(Counts(3072, kBoth), Rows({1024, 1024, 1024}));
  EXPECT_EQ(Counts(3071, kBoth), Rows({1024, 2047}));
  EXPECT_EQ(Counts(2047, kBoth), Rows({2047}));
}

TEST(RowSlices, CoverAllRowsInOrderAndCutBetweenTiles) {
  for (const SliceNeeds& needs : {kNothing, kComesIn, kComesAndLeaves, kLeavesLast, kBoth}) {
    for (int64_t rows = 1; rows <= 32768; rows += rows < 8192 ? 1 : 127) {
      const std::vector<RowSlice> slices = SliceRows(rows, needs);
      int64_t next = 0;
      for (const RowSlice& slice : slices) {
        ASSERT_EQ(slice.first, next) << rows;
        ASSERT_EQ(slice.first % kFirstSliceRows, 0) << rows;
        ASSERT_GE(slice.count, slices.size() > 1 ? kFirstSliceRows : 1) << rows;
        next += slice.count;
      }
      ASSERT_EQ(next, rows);
      const int64_t limit = needs.ends_by_way ? 2 * kFirstSliceRows
                            : needs.leaves    ? 2 * kSliceRows
                            : needs.comes_in  ? kMostSliceRows + kFirstSliceRows
                                              : rows + 1;
      ASSERT_LT(slices.back().count, limit) << rows;
    }
  }
}

}  // namespace
}  // namespace headwater::cuda
