// How the rows of a head are split over shards; shared by all engines.
#ifndef HEADWATER_KERNELS_CORE_SHARD_LAYOUT_H_
#define HEADWATER_KERNELS_CORE_SHARD_LAYOUT_H_

#include <cstdint>
#include <vector>

namespace headwater {

// Rows [start, end).
struct RowRange {
  int64_t start = 0;
  int64_t end = 0;
  int64_t size() const { return end - start; }
  bool operator==(const RowRange&) const = default;
};

// Splits [0, vocab_size) over `shard_count` shards in proportion to `weights` (> 0 each; empty: evenly). A shard gets at least one
// row as long as there are rows; with fewer rows than shards the last shards are empty. The result has `shard_count` entries.
std::vector<RowRange> SplitVocab(int64_t vocab_size, int32_t shard_count, const std::vector<int64_t>& weights);

// The columns of one shard that lie before or behind another shard's.
struct SurplusColumns {
  RowRange before, behind;
  int64_t size() const { return before.size() + behind.size(); }
};

// By shard: which of the first `common` columns a shard of `shards` has, and the same shard of another head, in `others`, lacks.
// None anywhere: the two heads are cut alike up to that column.
std::vector<SurplusColumns> SurplusOf(const std::vector<RowRange>& shards, const std::vector<RowRange>& others, int64_t common);

// Part `index` of `count` nearly equal parts of `range` whose inner boundaries are multiples of `grain` from its start.
RowRange SplitEvenly(RowRange range, int64_t index, int64_t count, int64_t grain);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_SHARD_LAYOUT_H_
