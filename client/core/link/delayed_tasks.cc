#include "client/core/link/delayed_tasks.h"

#include <algorithm>
#include <utility>

namespace headwater::client::internal {

DelayedTasks::~DelayedTasks() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void DelayedTasks::Run(const void* owner, std::chrono::nanoseconds delay, std::function<void()> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Clock::time_point due = Clock::now() + delay;
  if (!thread_.joinable()) thread_ = std::thread([this] { Loop(); });
  tasks_.push_back({owner, due, std::move(task)});
  // Most tasks are for the case that something takes too long, and are forgotten again: the thread need not wake up for them.
  if (due < wakes_at_) changed_.notify_all();
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
    wakes_at_ = next == tasks_.end() ? Clock::time_point::max() : next->due;
    if (next == tasks_.end()) {
      changed_.wait(lock);
    } else if (next->due > Clock::now()) {
      changed_.wait_until(lock, Clock::time_point(wakes_at_));
    } else {
      const std::function<void()> run = std::move(next->run);
      tasks_.erase(next);
      lock.unlock();
      run();
      lock.lock();
    }
  }
}

}  // namespace headwater::client::internal
