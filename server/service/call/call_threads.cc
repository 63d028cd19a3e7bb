#include "server/service/call/call_threads.h"

#include <system_error>

namespace headwater::service {

CallThreads::CallThreads(int64_t max_threads) : max_threads_(max_threads) {
  absl::MutexLock lock(&mutex_);
  AddThread();
}

CallThreads::~CallThreads() {
  Threads threads;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    threads.splice(threads.end(), threads_);
    threads.splice(threads.end(), ended_);
  }
  for (std::thread& thread : threads) thread.join();
}

void CallThreads::AddThread() {
  const auto self = threads_.emplace(threads_.end());
  *self = std::thread([this, self] { Work(self); });
}

void CallThreads::Accept(std::function<void()> task) {
  for (std::thread& thread : ended_) thread.join();
  ended_.clear();
  const int64_t thread_count = static_cast<int64_t>(threads_.size());
  if (thread_count <= unfinished_ && thread_count < max_threads_) {
    try {
      AddThread();
    } catch (const std::system_error&) {  // the process may have no more of them; the others continue
      threads_.pop_back();
    }
  }
  tasks_.push_back(std::move(task));
  ++unfinished_;
}

void CallThreads::Work(Threads::iterator self) {
  constexpr absl::Duration kIdle = absl::Seconds(5);
  absl::MutexLock lock(&mutex_);
  while (true) {
    mutex_.AwaitWithTimeout(absl::Condition(
                                +[](CallThreads* threads) { return threads->stopping_ || !threads->tasks_.empty(); }, this),
                            kIdle);
    if (stopping_ && tasks_.empty()) return;
    if (tasks_.empty()) {
      if (threads_.size() == 1) continue;
      ended_.splice(ended_.end(), threads_, self);
      return;
    }
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    mutex_.Unlock();
    task();
    task = nullptr;
    mutex_.Lock();
    --unfinished_;
  }
}

}  // namespace headwater::service
