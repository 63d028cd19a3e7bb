#include "kernels/cpu/thread_pool.h"

namespace headwater::cpu {

ThreadPool::ThreadPool(int32_t thread_count) {
  for (int32_t index = 1; index < thread_count; ++index) workers_.emplace_back([this, index] { WorkerMain(index); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  started_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::Run(int32_t part_count, absl::FunctionRef<void(int32_t)> work) {
  if (part_count > 1) {
    std::lock_guard<std::mutex> lock(mutex_);
    work_ = &work;
    part_count_ = part_count;
    running_ = part_count - 1;
    ++generation_;
    started_.notify_all();
  }
  work(0);
  if (part_count > 1) {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return running_ == 0; });
  }
  runs_.fetch_add(1, std::memory_order_relaxed);
}

void ThreadPool::WorkerMain(int32_t index) {
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    started_.wait(lock, [&] { return stopping_ || generation_ != seen; });
    if (stopping_) return;
    seen = generation_;
    if (index >= part_count_) continue;
    const absl::FunctionRef<void(int32_t)> work = *work_;
    lock.unlock();
    work(index);
    lock.lock();
    if (--running_ == 0) finished_.notify_one();
  }
}

}  // namespace headwater::cpu
