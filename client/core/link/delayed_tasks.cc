#include "client/core/link/delayed_tasks.h"

#include <algorithm>
#include <utility>

namespace headwater::client::internal {

DelayedTasks::DelayedTasks(int max_threads, MakeThread make_thread)
    : max_threads_(static_cast<size_t>(max_threads)), make_thread_(std::move(make_thread)) {
  threads_.reserve(max_threads_);  // every thread that was made has a place
}

DelayedTasks::~DelayedTasks() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

void DelayedTasks::Run(const void* owner, std::chrono::nanoseconds delay, std::function<void()> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Clock::time_point due = Clock::now() + delay;
  tasks_.push_back({owner, due, std::move(task)});
  if (idle_ < tasks_.size() && threads_.size() < max_threads_) {
    try {
      threads_.push_back(make_thread_([this] { Loop(); }));
    } catch (...) {
      if (threads_.empty()) {
        tasks_.pop_back();
        throw;
      }
    }
  }
  // Most tasks are for the case that something takes too long, and are forgotten again: the thread need not wake up for them.
  if (due < wakes_at_ || max_threads_ > 1) changed_.notify_one();
}

std::function<void()> DelayedTasks::Withdraw(const void* owner) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(tasks_.begin(), tasks_.end(), [owner](const Task& task) { return task.owner == owner; });
  if (found == tasks_.end()) return nullptr;
  std::function<void()> run = std::move(found->run);
  tasks_.erase(found);
  return run;
}

void DelayedTasks::Forget(const void* owner) {
  std::list<Task> forgotten;  // destroyed outside the lock
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto task = tasks_.begin(); task != tasks_.end();) {
    const auto next = std::next(task);
    if (task->owner == owner) forgotten.splice(forgotten.end(), tasks_, task);
    task = next;
  }
}

void DelayedTasks::Hurry(const void* owner) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Task& task : tasks_) {
    if (task.owner == owner) task.due = Clock::now();
  }
  changed_.notify_all();
}

void DelayedTasks::HurryAll() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Task& task : tasks_) task.due = std::min(task.due, Clock::now());
  changed_.notify_all();
}

std::list<DelayedTasks::Task>::iterator DelayedTasks::NextTask() {
  return std::min_element(tasks_.begin(), tasks_.end(), [](const Task& a, const Task& b) { return a.due < b.due; });
}

void DelayedTasks::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    const auto next = NextTask();
    if (next != tasks_.end() && next->due <= Clock::now()) {
      std::function<void()> run = std::move(next->run);
      tasks_.erase(next);
      lock.unlock();
      run();
      run = nullptr;  // the objects that it held may call this object when they go
      lock.lock();
      continue;
    }
    ++idle_;
    wakes_at_ = next == tasks_.end() ? Clock::time_point::max() : next->due;
    if (next == tasks_.end()) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(lock, Clock::time_point(wakes_at_));
    }
    --idle_;
  }
}

}  // namespace headwater::client::internal
