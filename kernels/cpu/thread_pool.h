// A few threads that work on parts with fixed numbers, so that what a part computes never depends on timing.
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

// The caller of Run() is one of the threads. One Run() at a time. Waiting threads sleep.
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
  std::mutex mutex_;
  std::condition_variable started_;
  std::condition_variable finished_;
  uint64_t generation_ = 0;
  const absl::FunctionRef<void(int32_t)>* work_ = nullptr;
  int32_t part_count_ = 0;
  int32_t running_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace headwater::cpu

#endif  // HEADWATER_KERNELS_CPU_THREAD_POOL_H_
