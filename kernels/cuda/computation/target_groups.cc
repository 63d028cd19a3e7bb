#include "kernels/cuda/computation/target_groups.h"

#include <algorithm>
#include <cstddef>

namespace headwater::cuda {

void TargetOrder::Add(const int32_t* targets, int64_t row_count, int64_t first_row) {
  const auto before = static_cast<std::ptrdiff_t>(keys_.size());
  keys_.reserve(keys_.size() + static_cast<size_t>(row_count));
  for (int64_t i = 0; i < row_count; ++i) {
    if (targets[i] >= 0) keys_.push_back(static_cast<uint64_t>(targets[i]) << 32 | static_cast<uint64_t>(first_row + i));
  }
  std::sort(keys_.begin() + before, keys_.end());
  std::inplace_merge(keys_.begin(), keys_.begin() + before, keys_.end());
}

GroupCounts TargetOrder::Write(int32_t* order, int32_t* starts) const {
  GroupCounts counts;
  for (size_t i = 0; i < keys_.size(); ++i) {
    order[i] = static_cast<int32_t>(keys_[i] & 0xffffffffu);
    if (i == 0 || keys_[i] >> 32 != keys_[i - 1] >> 32) starts[counts.groups++] = static_cast<int32_t>(i);
  }
  counts.rows = static_cast<int32_t>(keys_.size());
  starts[counts.groups] = counts.rows;
  return counts;
}

GroupCounts GroupByTarget(const int32_t* targets, int64_t row_count, int32_t* order, int32_t* starts) {
  TargetOrder rows;
  rows.Add(targets, row_count, 0);
  return rows.Write(order, starts);
}

}  // namespace headwater::cuda
