// DelayedTasks: one thread that runs small tasks when they are due.
#ifndef HEADWATER_CLIENT_CORE_LINK_DELAYED_TASKS_H_
#define HEADWATER_CLIENT_CORE_LINK_DELAYED_TASKS_H_

#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <thread>

namespace headwater::client::internal {

// Thread-safe. The thread starts with the first task.
class DelayedTasks {
 public:
  using Clock = std::chrono::steady_clock;

  DelayedTasks() = default;
  // Waits for the task that is running; those that are waiting never run.
  ~DelayedTasks();
  DelayedTasks(const DelayedTasks&) = delete;
  DelayedTasks& operator=(const DelayedTasks&) = delete;

  // Runs `task` on this object's thread after `delay`; among those that are due, the one that was due first. `owner` names it for
  // Hurry(). A task may destroy its owner, but not this object.
  void Run(const void* owner, std::chrono::nanoseconds delay, std::function<void()> task);

  // What waits for `owner` is due now.
  void Hurry(const void* owner);

  // All that waits is due now.
  void HurryAll();

  // What waits for `owner` never runs.
  void Forget(const void* owner);

 private:
  struct Task {
    const void* owner;
    Clock::time_point due;
    std::function<void()> run;
  };

  void Loop();
  std::list<Task>::iterator NextTask();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Task> tasks_;                                  // as many as calls wait: few
  Clock::time_point wakes_at_ = Clock::time_point::max();  // the thread, unless it is told to before
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_LINK_DELAYED_TASKS_H_
