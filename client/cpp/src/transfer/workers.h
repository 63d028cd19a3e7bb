// Workers: threads for what may block.
#ifndef HEADWATER_CLIENT_SRC_TRANSFER_WORKERS_H_
#define HEADWATER_CLIENT_SRC_TRANSFER_WORKERS_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace headwater::client::internal {

// Thread-safe. A thread is made when a task finds none idle, up to the maximum; they stay.
class Workers {
 public:
  explicit Workers(int max_threads) : max_threads_(max_threads) {}
  // Waits for the tasks that run or wait.
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // A task must not destroy this object. `owner` names it for Withdraw().
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
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  int idle_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_TRANSFER_WORKERS_H_
