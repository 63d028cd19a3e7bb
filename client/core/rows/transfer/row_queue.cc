#include "client/core/rows/transfer/row_queue.h"

#include <algorithm>

namespace headwater::client::internal {

std::optional<RowQueue::Chunk> RowQueue::Next(int64_t max_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t best = sources_.size();
  size_t with_rows = 0;
  for (size_t i = 0; i < sources_.size(); ++i) {
    if (next_[i] == sources_[i].row_count) continue;
    ++with_rows;
    if (best == sources_.size() || sources_[i].first_row + next_[i] < sources_[best].first_row + next_[best]) best = i;
  }
  if (best == sources_.size()) return std::nullopt;
  const OutgoingRows& source = sources_[best];
  const int64_t start = next_[best];
  const int64_t count = std::min(std::max<int64_t>(1, max_bytes / source.row_bytes), source.row_count - start);
  next_[best] += count;
  Chunk chunk;
  chunk.header = {source.role, source.term_index, start, count, {}, count * source.row_bytes};
  chunk.data = source.data + start * source.row_bytes;
  chunk.arrival = source.arrival;
  chunk.arrival_bytes = next_[best] * source.row_bytes;
  chunk.last = with_rows == 1 && next_[best] == source.row_count;
  return chunk;
}

bool RowCoverage::Take(int64_t start, int64_t count) {
  if (start < 0 || count < 1 || start > row_count_ || count > row_count_ - start) return false;
  int64_t end = start + count;
  std::lock_guard<std::mutex> lock(mutex_);
  auto next = ranges_.lower_bound(start);
  if (next != ranges_.end() && next->first < end) return false;
  if (next != ranges_.begin()) {
    const auto before = std::prev(next);
    if (before->second > start) return false;
    if (before->second == start) {
      start = before->first;
      ranges_.erase(before);
    }
  }
  if (next != ranges_.end() && next->first == end) {
    end = next->second;
    ranges_.erase(next);
  }
  ranges_.emplace(start, end);
  taken_ += count;
  return true;
}

int64_t RowCoverage::taken() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return taken_;
}

}  // namespace headwater::client::internal
