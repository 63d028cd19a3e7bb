#include "kernels/core/shard_layout.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/saturating.h"

namespace headwater {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

TEST(SplitVocab, CoversEveryRowOnce) {
  const std::vector<std::vector<int64_t>> weightings = {
      {}, {5, 1, 1, 1, 1, 1, 1}, {1, 1000000, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1, 99}};
  for (const int64_t vocab_size : {1, 2, 6, 7, 8, 101, 50257}) {
    for (const std::vector<int64_t>& weights : weightings) {
      const std::vector<RowRange> shards = SplitVocab(vocab_size, 7, weights);
      ASSERT_EQ(shards.size(), 7u);
      int64_t next = 0;
      for (size_t i = 0; i < shards.size(); ++i) {
        EXPECT_EQ(shards[i].start, next);
        EXPECT_EQ(shards[i].size() > 0, static_cast<int64_t>(i) < vocab_size) << "shard " << i << " of " << vocab_size;
        next = shards[i].end;
      }
      EXPECT_EQ(next, vocab_size);
    }
  }
}

TEST(SplitVocab, FollowsTheWeights) {
  const std::vector<RowRange> shards = SplitVocab(100, 3, {1, 2, 1});
  EXPECT_EQ(shards[0], (RowRange{0, 25}));
  EXPECT_EQ(shards[1], (RowRange{25, 75}));
  EXPECT_EQ(shards[2], (RowRange{75, 100}));
}

TEST(SurplusOf, IsWhatTheOtherHeadsShardLacks) {
  // Columns of [0, 10): shards [0, 3), [3, 4), [4, 12) beside [0, 5), [5, 9), [9, 10).
  const std::vector<SurplusColumns> surplus = SurplusOf({{0, 3}, {3, 4}, {4, 12}}, {{0, 5}, {5, 9}, {9, 10}}, 10);
  ASSERT_EQ(surplus.size(), 3u);
  EXPECT_EQ(surplus[0].size(), 0);
  EXPECT_EQ(surplus[1].before, (RowRange{3, 4}));
  EXPECT_EQ(surplus[1].behind.size(), 0);
  EXPECT_EQ(surplus[2].before, (RowRange{4, 9}));
  EXPECT_EQ(surplus[2].behind.size(), 0);
  // The other way round.
  const std::vector<SurplusColumns> back = SurplusOf({{0, 5}, {5, 9}, {9, 10}}, {{0, 3}, {3, 4}, {4, 12}}, 10);
  EXPECT_EQ(back[0].behind, (RowRange{3, 5}));
  EXPECT_EQ(back[1].behind, (RowRange{5, 9}));
  EXPECT_EQ(back[2].size(), 0);
}

// Every column that both heads have is in the own shard or in the surplus of exactly one.
TEST(SurplusOf, CompletesTheOtherHeadsShards) {
  for (const int64_t vocab_size : {1, 3, 8, 101}) {
    for (const int64_t other_size : {1, 3, 8, 90, 104, 333}) {
      for (const std::vector<int64_t>& weights : {std::vector<int64_t>{}, {9, 1, 4, 1}}) {
        const std::vector<RowRange> shards = SplitVocab(vocab_size, 4, weights), others = SplitVocab(other_size, 4, weights);
        const int64_t common = std::min(vocab_size, other_size);
        const std::vector<SurplusColumns> surplus = SurplusOf(shards, others, common);
        for (int64_t column = 0; column < common; ++column) {
          const auto has = [column](RowRange range) { return column >= range.start && column < range.end; };
          int in_place = 0, handed_out = 0;
          for (size_t i = 0; i < shards.size(); ++i) {
            in_place += has(shards[i]) && has(others[i]) ? 1 : 0;
            handed_out += has(surplus[i].before) || has(surplus[i].behind) ? 1 : 0;
            EXPECT_FALSE((has(surplus[i].before) || has(surplus[i].behind)) && has(others[i]));
          }
          EXPECT_EQ(in_place + handed_out, 1) << column << " of " << vocab_size << " and " << other_size;
        }
      }
    }
  }
}

TEST(SurplusOf, IsNothingWhereHeadsAreCutAlikeAsFarAsBothHaveColumns) {
  for (const SurplusColumns& of : SurplusOf({{0, 4}, {4, 8}, {8, 12}}, {{0, 4}, {4, 8}, {8, 10}}, 10)) EXPECT_EQ(of.size(), 0);
}

TEST(SplitEvenly, PartsAreAdjacentAlignedAndEven) {
  for (const int64_t size : {0, 1, 15, 16, 17, 1000, 32000}) {
    for (const int64_t count : {1, 2, 3, 7}) {
      const RowRange range = {5, 5 + size};
      int64_t next = range.start;
      for (int64_t i = 0; i < count; ++i) {
        const RowRange part = SplitEvenly(range, i, count, 16);
        EXPECT_EQ(part.start, next);
        EXPECT_TRUE((part.start - range.start) % 16 == 0 || part.start == range.end);
        EXPECT_LE(part.size(), (size / 16 + count) / count * 16 + 16);
        next = part.end;
      }
      EXPECT_EQ(next, range.end);
    }
  }
}

TEST(Saturating, StaysAtTheLargestValue) {
  EXPECT_EQ(SaturatingAdd(2, 3), 5);
  EXPECT_EQ(SaturatingAdd(kMost, 0), kMost);
  EXPECT_EQ(SaturatingAdd(kMost - 1, 2), kMost);
  EXPECT_EQ(SaturatingMultiply(1 << 20, 1 << 20), int64_t{1} << 40);
  EXPECT_EQ(SaturatingMultiply(int64_t{1} << 32, int64_t{1} << 31), kMost);
  EXPECT_EQ(SaturatingMultiply(kMost, 0), 0);
}

}  // namespace
}  // namespace headwater
