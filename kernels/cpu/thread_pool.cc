#include "kernels/cpu/thread_pool.h"

namespace headwater::cpu {
namespace {

constexpr int kLooks = 1000;

// Whether a condition came true within some tens of microseconds.
template <typename Condition>
bool LookFor(const Condition& is_true) {
  for (int i = 0; i < kLooks; ++i) {
    if (is_true()) return true;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  return false;
}

}  // namespace

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
    work_ = &work;
    running_ = part_count - 1;
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t number = (job_.load() >> kPartBits) + 1;
    job_ = number << kPartBits | static_cast<uint64_t>(part_count);
    if (sleeping_ > 0) started_.notify_all();
  }
  work(0);
  if (part_count > 1) {
    const auto is_finished = [this] { return running_.load() == 0; };
    if (!LookFor(is_finished)) {
      std::unique_lock<std::mutex> lock(mutex_);
      finished_.wait(lock, is_finished);
    }
  }
  runs_.fetch_add(1, std::memory_order_relaxed);
}

void ThreadPool::WorkerMain(int32_t index) {
  uint64_t seen = 0;
  const auto is_started = [&] { return job_.load() != seen; };
  while (true) {
    if (!LookFor(is_started)) {
      std::unique_lock<std::mutex> lock(mutex_);
      ++sleeping_;
      started_.wait(lock, [&] { return stopping_ || is_started(); });
      --sleeping_;
      if (stopping_) return;
    }
    seen = job_.load();
    if (static_cast<uint64_t>(index) >= (seen & ((uint64_t{1} << kPartBits) - 1))) continue;
    (*work_)(index);
    if (running_.fetch_sub(1) > 1) continue;
    std::lock_guard<std::mutex> lock(mutex_);
    finished_.notify_one();
  }
}

}  // namespace headwater::cpu
