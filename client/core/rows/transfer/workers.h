// Workers: threads for what may block.
#ifndef HEADWATER_CLIENT_CORE_ROWS_TRANSFER_WORKERS_H_
#define HEADWATER_CLIENT_CORE_ROWS_TRANSFER_WORKERS_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace headwater::client::internal {

// Thread-safe. A thread is made when a task finds none idle, up to the maximum; they stay.
class Workers {
 public:
  // Makes a thread that runs the loop; std::system_error if the system gives none.
  using MakeThread = std::function<std::thread(std::function<void()> loop)>;

  explicit Workers(
      int max_threads, MakeThread make_thread = [](std::function<void()> loop) { return std::thread(std::move(loop)); });
  // Waits for the tasks that run or wait.
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // A task must not destroy this object. `owner` names it for Withdraw(). If the system gives no thread, those that there are take
  // the task; if there are none, this throws what the system says, and the task never runs.
  void Run(const void* owner, std::function<void()> task);
  // The task of `owner` that has not begun yet, which does not run any more; empty if there is none.
  std::function<void()> Withdraw(const void* owner);

 private:
  struct Task {
    const void* owner;
    std::function<void()> run;
  };

  void Loop();

  const int max_threads_;
  const MakeThread make_thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  int idle_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_TRANSFER_WORKERS_H_
