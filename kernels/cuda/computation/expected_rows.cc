#include "kernels/cuda/computation/expected_rows.h"

#include <algorithm>

namespace headwater::cuda {

void ExpectedRows::Come(int64_t rows) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_ += rows;
  }
  came_.notify_one();
}

void ExpectedRows::Go(int64_t calls, int64_t rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  waiting_ -= rows;
  // A caller alone may come with fewer rows the next time.
  expected_ = calls < 2 && waiting_ == 0 ? 0 : std::min(rows + waiting_, most_);
}

void ExpectedRows::Await(absl::FunctionRef<bool()> is_busy) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (waiting_ < expected_ && is_busy()) came_.wait_for(lock, kAskEvery);
}

}  // namespace headwater::cuda
