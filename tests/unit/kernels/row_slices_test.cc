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

TEST(RowSlices, AreCutByWhatTheRowsNeed) {
  struct Case {
    const SliceNeeds* needs;
    int64_t rows;
    std::vector<int64_t> counts;
  };
  constexpr SliceNeeds kLeaves = {.leaves = true};
  for (const Case& of : std::vector<Case>{
           {&kNothing, 1, {1}},
           {&kNothing, 8192, {8192}},
           // The first rows are computed while the others come. If there are many rows, only the first are waited for.
           {&kComesIn, 8192, {1024, 2048, 5120}},
           {&kComesIn, 4096, {1024, 2048, 1024}},
           {&kComesIn, 4095, {1024, 3071}},
           {&kComesIn, 2048, {1024, 1024}},
           {&kComesIn, 2047, {2047}},
           {&kComesIn, 12287, {1024, 2048, 9215}},
           {&kComesIn, 12288, {1024, 2048, 8192, 1024}},
           {&kComesIn, 32768, {1024, 2048, 8192, 8192, 8192, 5120}},
           // The answer does not wait for many rows to leave.
           {&kComesAndLeaves, 8192, {1024, 2048, 3072, 2048}},
           {&kComesAndLeaves, 8191, {1024, 2048, 2048, 3071}},
           {&kComesAndLeaves, 7168, {1024, 2048, 2048, 2048}},
           {&kComesAndLeaves, 7167, {1024, 2048, 4095}},
           {&kComesAndLeaves, 4096, {1024, 2048, 1024}},
           {&kComesAndLeaves, 32768, {1024, 2048, 8192, 8192, 8192, 3072, 2048}},
           {&kLeaves, 8192, {8192}},
           // Little is left to leave at the end.
           {&kBoth, 8192, {1024, 2048, 2048, 2048, 1024}},
           {&kLeavesLast, 8192, {1024, 2048, 2048, 2048, 1024}},
           {&kBoth, 8191, {1024, 2048, 2048, 1024, 2047}},
           {&kBoth, 7168, {1024, 2048, 2048, 1024, 1024}},
           {&kBoth, 3072, {1024, 1024, 1024}},
           {&kBoth, 3071, {1024, 2047}},
           {&kBoth, 2047, {2047}},
       }) {
    std::vector<int64_t> counts;
    for (const RowSlice& slice : SliceRows(of.rows, *of.needs)) counts.push_back(slice.count);
    EXPECT_EQ(counts, of.counts) << of.rows;
  }
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
