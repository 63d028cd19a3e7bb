#include "server/transport/row_ranges.h"

#include <iterator>

namespace headwater::transport {

bool RowRanges::Overlaps(int64_t start, int64_t count) const {
  const auto after = ends_.lower_bound(start);
  if (after != ends_.end() && after->first < start + count) return true;
  return after != ends_.begin() && std::prev(after)->second > start;
}

void RowRanges::Add(int64_t start, int64_t count) {
  row_count_ += count;
  int64_t end = start + count;
  auto after = ends_.lower_bound(start);
  if (after != ends_.end() && after->first == end) {
    end = after->second;
    after = ends_.erase(after);
  }
  if (after != ends_.begin() && std::prev(after)->second == start) {
    std::prev(after)->second = end;
  } else {
    ends_.emplace_hint(after, start, end);
  }
}

int64_t RowRanges::prefix() const { return !ends_.empty() && ends_.begin()->first == 0 ? ends_.begin()->second : 0; }

}  // namespace headwater::transport
