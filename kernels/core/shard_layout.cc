#include "kernels/core/shard_layout.h"

#include <algorithm>

namespace headwater {

std::vector<RowRange> SplitVocab(int64_t vocab_size, int32_t shard_count, const std::vector<int64_t>& weights) {
  std::vector<RowRange> ranges(static_cast<size_t>(shard_count));
  const int64_t used = std::min<int64_t>(shard_count, vocab_size);
  double total = 0;
  for (int64_t i = 0; i < used; ++i) total += weights.empty() ? 1.0 : static_cast<double>(weights[static_cast<size_t>(i)]);
  double before = 0;
  int64_t start = 0;
  for (int64_t i = 0; i < used; ++i) {
    before += weights.empty() ? 1.0 : static_cast<double>(weights[static_cast<size_t>(i)]);
    int64_t end = i + 1 == used ? vocab_size : static_cast<int64_t>(static_cast<double>(vocab_size) * (before / total));
    // One row at least for this shard and for each that follows.
    end = std::clamp(end, start + 1, vocab_size - (used - 1 - i));
    ranges[static_cast<size_t>(i)] = {start, end};
    start = end;
  }
  for (int64_t i = used; i < shard_count; ++i) ranges[static_cast<size_t>(i)] = {vocab_size, vocab_size};
  return ranges;
}

std::vector<SurplusColumns> SurplusOf(const std::vector<RowRange>& shards, const std::vector<RowRange>& others, int64_t common) {
  std::vector<SurplusColumns> surplus;
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto clipped = [common](RowRange of) { return RowRange{std::min(of.start, common), std::min(of.end, common)}; };
    const RowRange own = clipped(shards[i]), other = clipped(others[i]);
    // All of a shard that lies wholly before or behind the other one.
    const int64_t before_end = std::clamp(other.start, own.start, own.end);
    const int64_t behind_start = std::clamp(other.end, before_end, own.end);
    surplus.push_back({{own.start, before_end}, {behind_start, own.end}});
  }
  return surplus;
}

RowRange SplitEvenly(RowRange range, int64_t index, int64_t count, int64_t grain) {
  const int64_t grains = (range.size() + grain - 1) / grain;
  const auto boundary = [&](int64_t i) {
    const int64_t before = grains / count * i + std::min(i, grains % count);
    return std::min(range.start + before * grain, range.end);
  };
  return {boundary(index), boundary(index + 1)};
}

}  // namespace headwater
