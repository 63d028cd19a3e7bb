#include "server/group/ranks/rank_loads.h"

#include <algorithm>
#include <numeric>

namespace headwater::group {

RankLoads::Share::~Share() {
  absl::MutexLock lock(&loads_->mutex_);
  loads_->rows_[rank_] -= rows_;
}

void RankLoads::Give(int64_t rows, absl::FunctionRef<bool(size_t rank)> takes, std::optional<Share>* share) {
  rows = std::max<int64_t>(rows, 1);  // a call without rows counts too
  absl::MutexLock lock(&mutex_);
  std::vector<size_t> order(rows_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [this](size_t a, size_t b) ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return rows_[a] < rows_[b]; });
  const auto found = std::find_if(order.begin(), order.end(), takes);
  if (found == order.end()) return;
  rows_[*found] += rows;
  share->emplace(*this, *found, rows);
}

}  // namespace headwater::group
