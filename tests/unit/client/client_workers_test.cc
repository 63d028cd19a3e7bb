// Threads for blocking work, where the system gives none: a task that was refused never runs.
#include <gtest/gtest.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "client/core/link/delayed_tasks.h"

namespace headwater::client::internal {
namespace {

constexpr int kMaxThreads = 4;

// A system that gives so many threads.
class ThreadSource {
 public:
  explicit ThreadSource(int left) : left_(left) {}
  void Set(int left) { left_ = left; }

  DelayedTasks::MakeThread maker() {
    return [this](std::function<void()> loop) {
      if (left_-- <= 0) throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
      return std::thread(std::move(loop));
    };
  }

 private:
  int left_;
};

// The tasks that have run, in order.
class Log {
 public:
  void Add(int value) {
    std::lock_guard<std::mutex> lock(mutex_);
    values_.push_back(value);
    changed_.notify_all();
  }
  // Waits for so many.
  std::vector<int> Await(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return values_.size() >= count; });
    return values_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int> values_;
};

TEST(DelayedTasks, TaskWithoutAThreadIsRefusedAndNeverRuns) {
  ThreadSource threads(0);
  Log log;
  {
    DelayedTasks workers(kMaxThreads, threads.maker());
    EXPECT_THROW(workers.Run(&log, [&log] { log.Add(1); }), std::system_error);
    EXPECT_FALSE(workers.Withdraw(&log));
    threads.Set(1);
    workers.Run(&log, [&log] { log.Add(2); });
    log.Await(1);
  }
  EXPECT_EQ(log.Await(1), std::vector<int>{2});
}

TEST(DelayedTasks, ExistingThreadsTakeTasksIfNoNewOneStarts) {
  ThreadSource threads(1);
  Log log;
  std::mutex held;
  {
    DelayedTasks workers(kMaxThreads, threads.maker());
    std::unique_lock<std::mutex> lock(held);
    workers.Run(&log, [&] {
      log.Add(1);
      std::lock_guard<std::mutex> wait(held);
    });
    log.Await(1);  // the only thread is busy
    workers.Run(&log, [&log] { log.Add(2); });
    workers.Run(&held, [&log] { log.Add(3); });
    EXPECT_TRUE(workers.Withdraw(&held));
    lock.unlock();
    log.Await(2);
  }
  EXPECT_EQ(log.Await(2), (std::vector<int>{1, 2}));
}

}  // namespace
}  // namespace headwater::client::internal
