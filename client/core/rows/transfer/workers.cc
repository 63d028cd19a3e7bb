#include "client/core/rows/transfer/workers.h"

#include <algorithm>
#include <utility>

namespace headwater::client::internal {

Workers::Workers(int max_threads, MakeThread make_thread) : max_threads_(max_threads), make_thread_(std::move(make_thread)) {
  threads_.reserve(static_cast<size_t>(max_threads));  // no thread that was made finds no place
}

Workers::~Workers() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

void Workers::Run(const void* owner, std::function<void()> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back({owner, std::move(task)});
  if (static_cast<size_t>(idle_) < tasks_.size() && threads_.size() < static_cast<size_t>(max_threads_)) {
    try {
      threads_.push_back(make_thread_([this] { Loop(); }));
    } catch (...) {
      if (threads_.empty()) {
        tasks_.pop_back();
        throw;
      }
    }
  }
  changed_.notify_one();
}

std::function<void()> Workers::Withdraw(const void* owner) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(tasks_.begin(), tasks_.end(), [owner](const Task& task) { return task.owner == owner; });
  if (found == tasks_.end()) return nullptr;
  std::function<void()> run = std::move(found->run);
  tasks_.erase(found);
  return run;
}

void Workers::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    ++idle_;
    changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    --idle_;
    if (tasks_.empty()) return;
    std::function<void()> task = std::move(tasks_.front().run);
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // what it held may come back to this object when it goes
    lock.lock();
  }
}

}  // namespace headwater::client::internal
