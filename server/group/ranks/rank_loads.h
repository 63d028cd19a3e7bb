// RankLoads: chooses the rank of a group for a micro-batch that one of them computes alone.
#ifndef HEADWATER_SERVER_GROUP_RANKS_RANK_LOADS_H_
#define HEADWATER_SERVER_GROUP_RANKS_RANK_LOADS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"

namespace headwater::group {

// Counts the rows that each rank has to compute. Thread-safe.
class RankLoads {
 public:
  explicit RankLoads(size_t ranks) : rows_(ranks, 0) {}

  // Rows given to a rank, until this is destroyed, which must be before the loads.
  class Share {
   public:
    Share(RankLoads& loads, size_t rank, int64_t rows) : loads_(loads), rank_(rank), rows_(rows) {}
    ~Share() {
      absl::MutexLock lock(&loads_.mutex_);
      loads_.rows_[rank_] -= rows_;
    }
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;
    size_t rank() const { return rank_; }

   private:
    RankLoads& loads_;
    const size_t rank_;
    const int64_t rows_;
  };

  // Gives `rows` rows to the rank with the fewest, the first of equals, for which takes(rank) returns true. Each rank is asked at
  // most once, in that order. If all refuse, `share` stays empty.
  void Give(int64_t rows, absl::FunctionRef<bool(size_t rank)> takes, std::optional<Share>* share) {
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

 private:
  absl::Mutex mutex_;
  std::vector<int64_t> rows_ ABSL_GUARDED_BY(mutex_);  // by rank
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_RANKS_RANK_LOADS_H_
