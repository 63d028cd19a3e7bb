// RankThreads: a thread for each rank but the first, which runs on the caller's.
#ifndef HEADWATER_SERVER_GROUP_RANKS_RANK_THREADS_H_
#define HEADWATER_SERVER_GROUP_RANKS_RANK_THREADS_H_

#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace headwater::group {

class RankThreads {
 public:
  using Program = absl::FunctionRef<absl::Status(size_t rank)>;

  explicit RankThreads(size_t count);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  // Runs program(rank) for every rank at the same time, and returns their answers when all have come. One call at a time.
  std::vector<absl::Status> Run(Program program);

 private:
  void Main(size_t rank);

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
