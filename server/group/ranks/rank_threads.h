// RankThreads: a thread for each rank but the first, which runs on the caller's.
#ifndef HEADWATER_SERVER_GROUP_RANKS_RANK_THREADS_H_
#define HEADWATER_SERVER_GROUP_RANKS_RANK_THREADS_H_

#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace headwater::group {

class RankThreads {
 public:
  using Program = absl::FunctionRef<absl::Status(size_t rank)>;

  explicit RankThreads(size_t count) : statuses_(count) {
    for (size_t rank = 1; rank < count; ++rank) threads_.emplace_back([this, rank] { Main(rank); });
  }
  ~RankThreads() {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    for (std::thread& thread : threads_) thread.join();
  }

  // Runs program(rank) for every rank at the same time, and returns their answers when all have come. One call at a time.
  std::vector<absl::Status> Run(Program program) {
    {
      absl::MutexLock lock(&mutex_);
      program_ = &program;
      running_ = threads_.size();
      ++generation_;
    }
    absl::Status first = program(0);
    const auto done = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return running_ == 0; };
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&done));
    program_ = nullptr;
    statuses_[0] = std::move(first);
    return statuses_;
  }

 private:
  void Main(size_t rank) {
    uint64_t seen = 0;
    const auto called = [this, &seen]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopping_ || generation_ != seen; };
    while (true) {
      const Program* program = nullptr;
      {
        absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(&called));
        if (stopping_) return;
        seen = generation_;
        program = program_;
      }
      absl::Status status = (*program)(rank);
      absl::MutexLock lock(&mutex_);
      statuses_[rank] = std::move(status);
      --running_;
    }
  }

  absl::Mutex mutex_;
  const Program* program_ ABSL_GUARDED_BY(mutex_) = nullptr;
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t running_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<absl::Status> statuses_;  // each by its rank's thread while it runs
  std::vector<std::thread> threads_;
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_RANKS_RANK_THREADS_H_
