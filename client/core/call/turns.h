// Turns: how many micro-batches are under way at once. Other calls never wait for theirs.
#ifndef HEADWATER_CLIENT_CORE_CALL_TURNS_H_
#define HEADWATER_CLIENT_CORE_CALL_TURNS_H_

#include <algorithm>
#include <deque>
#include <mutex>

namespace headwater::client::internal {

// In the order in which they came. Thread-safe.
class Turns {
 public:
  explicit Turns(int count) : free_(count) {}

  // Whether the turn of `call` has come, which takes it then; otherwise it is in the queue.
  bool TryTake(const void* call) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::find(queue_.begin(), queue_.end(), call) == queue_.end()) queue_.push_back(call);
    if (!IsAmongFirst(call)) return false;
    std::erase(queue_, call);
    --free_;
    return true;
  }
  bool HasCome(const void* call) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return IsAmongFirst(call);
  }
  // The call ends; `had_turn`: it gives its turn up. Returns the call whose turn comes by that, or null.
  const void* End(const void* call, bool had_turn) {
    std::lock_guard<std::mutex> lock(mutex_);
    const bool had_come = had_turn || IsAmongFirst(call);
    std::erase(queue_, call);
    if (had_turn) ++free_;
    const bool has_next = had_come && free_ > 0 && static_cast<int>(queue_.size()) >= free_;
    return has_next ? queue_[static_cast<size_t>(free_ - 1)] : nullptr;
  }

 private:
  bool IsAmongFirst(const void* call) const {
    const auto place = std::find(queue_.begin(), queue_.end(), call);
    return place != queue_.end() && place - queue_.begin() < free_;
  }

  mutable std::mutex mutex_;
  int free_;
  std::deque<const void*> queue_;  // the first free_ of them may continue
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_CALL_TURNS_H_
