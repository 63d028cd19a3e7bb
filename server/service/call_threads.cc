#include "server/service/call_threads.h"

#include <system_error>
#include <utility>

namespace headwater::service {

CallThreads::~CallThreads() {
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

bool CallThreads::Accept(std::function<void()> task) {
  const int64_t thread_count = static_cast<int64_t>(threads_.size());
  if (thread_count <= unfinished_ && thread_count < max_threads_) {
    try {
      threads_.emplace_back([this] { Work(); });
    } catch (const std::system_error&) {  // the process may have no more of them; those that are there go on
      if (threads_.empty()) return false;
    }
  }
  tasks_.push_back(std::move(task));
  ++unfinished_;
  return true;
}

bool CallThreads::TryRun(std::function<void()> task) {
  absl::MutexLock lock(&mutex_);
  return unfinished_ < max_threads_ && Accept(std::move(task));
}

void CallThreads::Post(std::function<void()> task) {
  {
    absl::MutexLock lock(&mutex_);
    if (Accept(task)) return;
  }
  task();
}

void CallThreads::Work() {
  absl::MutexLock lock(&mutex_);
  while (true) {
    mutex_.Await(absl::Condition(
        +[](CallThreads* self) { return self->stopping_ || !self->tasks_.empty(); }, this));
    if (tasks_.empty()) return;
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
