// CopyThreads: copies large pieces of host memory with several threads: one alone moves about 10 GB/s.
#ifndef HEADWATER_CLIENT_CORE_ROWS_MEMORY_COPY_THREADS_H_
#define HEADWATER_CLIENT_CORE_ROWS_MEMORY_COPY_THREADS_H_

#include <cstdint>

#include "client/core/link/delayed_tasks.h"

namespace headwater::client::internal {

// Thread-safe: copies of several callers share the threads.
class CopyThreads {
 public:
  // `threads` >= 1, the caller of Copy() included. They are started with the first copy that is worth it.
  explicit CopyThreads(int threads) : helper_count_(threads - 1), helpers_(threads - 1) {}

  // Like memcpy(). Returns when all is copied.
  void Copy(void* to, const void* from, int64_t bytes);

 private:
  const int helper_count_;
  DelayedTasks helpers_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_MEMORY_COPY_THREADS_H_
