#include "server/group/ranks/rank_threads.h"

#include <utility>

namespace headwater::group {

RankThreads::RankThreads(size_t count) : statuses_(count) {
  for (size_t rank = 1; rank < count; ++rank) threads_.emplace_back([this, rank] { Main(rank); });
}

RankThreads::~RankThreads() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

std::vector<absl::Status> RankThreads::Run(Program program) {
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

void RankThreads::Main(size_t rank) {
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

}  // namespace headwater::group
