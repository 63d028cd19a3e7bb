// DelayedTasks: threads that run tasks when they are due.
#ifndef HEADWATER_CLIENT_CORE_LINK_DELAYED_TASKS_H_
#define HEADWATER_CLIENT_CORE_LINK_DELAYED_TASKS_H_

#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace headwater::client::internal {

// Thread-safe. A thread is made when a task finds none idle, up to the maximum; they stay.
class DelayedTasks {
 public:
  using Clock = std::chrono::steady_clock;
  // Makes a thread that runs the loop; std::system_error if the system gives none.
  using MakeThread = std::function<std::thread(std::function<void()> loop)>;

  explicit DelayedTasks(
      int max_threads = 1, MakeThread make_thread = [](std::function<void()> loop) { return std::thread(std::move(loop)); });
  // Waits for the tasks that are running; those that are waiting never run.
  ~DelayedTasks();
  DelayedTasks(const DelayedTasks&) = delete;
  DelayedTasks& operator=(const DelayedTasks&) = delete;

  // Runs `task` on a thread of this object after `delay`; among those that are due, the one that was due first. `owner` names it
  // for Hurry(). A task may destroy its owner, but not this object. If the system gives no thread, the existing threads take the
  // task. If there are none, this throws the system's error, and the task never runs.
  void Run(const void* owner, std::chrono::nanoseconds delay, std::function<void()> task);
  // Runs `task` at once.
  void Run(const void* owner, std::function<void()> task) { Run(owner, std::chrono::nanoseconds(0), std::move(task)); }

  // Makes the waiting tasks of `owner` due now.
  void Hurry(const void* owner);

  // All that waits is due now.
  void HurryAll();

  // Drops the waiting tasks of `owner`.
  void Forget(const void* owner);
  // Takes out a waiting task of `owner`, which then never runs; empty if there is none.
  std::function<void()> Withdraw(const void* owner);

 private:
  struct Task {
    const void* owner;
    Clock::time_point due;
    std::function<void()> run;
  };

  void Loop();
  std::list<Task>::iterator NextTask();

  const size_t max_threads_;
  const MakeThread make_thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Task> tasks_;                                  // as many as calls wait: few
  Clock::time_point wakes_at_ = Clock::time_point::max();  // a thread that waits, unless it is notified before
  size_t idle_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_LINK_DELAYED_TASKS_H_
