// A few threads that work on parts with fixed numbers, so that a part's result never depends on timing.
#ifndef HEADWATER_KERNELS_CPU_THREAD_POOL_H_
#define HEADWATER_KERNELS_CPU_THREAD_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace headwater::cpu {

// The caller of Run() is one of the threads. One Run() at a time. A thread that waits looks again for some tens of microseconds,
// which is less than a sleeping one takes to wake up, and sleeps then.
class ThreadPool {
 public:
  // `thread_count` >= 1, the caller included.
  explicit ThreadPool(int32_t thread_count);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int32_t thread_count() const { return static_cast<int32_t>(workers_.size()) + 1; }
  // Calls work(0) ... work(part_count - 1), part i on thread i, and returns when all are done. part_count in
  // [1, thread_count()]. `work` must not throw. Allocates nothing.
  void Run(int32_t part_count, absl::FunctionRef<void(int32_t)> work);
  // How often Run() has ended. Any thread.
  int64_t runs() const { return runs_.load(std::memory_order_relaxed); }

 private:
  void WorkerMain(int32_t index);

  std::atomic<int64_t> runs_{0};
  // The number of Run() in the upper bits, its part count in the lower kPartBits. They share one word so that a thread without a
  // part need not read the next Run()'s fields.
  static constexpr int kPartBits = 16;
  std::atomic<uint64_t> job_{0};
  std::atomic<int32_t> running_{0};  // parts that have not ended, the caller's not counted
  const absl::FunctionRef<void(int32_t)>* work_ = nullptr;
  // For threads that sleep.
  std::mutex mutex_;
  std::condition_variable started_;
  std::condition_variable finished_;
  int32_t sleeping_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace headwater::cpu

#endif  // HEADWATER_KERNELS_CPU_THREAD_POOL_H_
