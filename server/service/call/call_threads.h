// CallThreads: threads for work that may wait, of calls that come by gRPC's callbacks, whose own threads must never wait.
#ifndef HEADWATER_SERVER_SERVICE_CALL_CALL_THREADS_H_
#define HEADWATER_SERVER_SERVICE_CALL_CALL_THREADS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace headwater::service {

// Thread-safe. Threads are made as they are needed; one without a task for some seconds ends, except the last.
class CallThreads {
 public:
  // At most `max_threads` (>= 1) of them. Makes the first one: a posted task never runs on its caller's thread. That thread may
  // hold locks. std::system_error if the process may have no more threads.
  explicit CallThreads(int64_t max_threads);
  // Runs what was accepted, then ends. Nothing may be submitted concurrently.
  ~CallThreads();

  // Runs `task` on a thread of its own; false, and nothing happens, if all are busy.
  bool TryRun(std::function<void()> task) {
    absl::MutexLock lock(&mutex_);
    if (unfinished_ >= max_threads_) return false;
    Accept(std::move(task));
    return true;
  }
  // Runs `task` as soon as a thread is free. For tasks that do not wait.
  void Post(std::function<void()> task) {
    absl::MutexLock lock(&mutex_);
    Accept(std::move(task));
  }

 private:
  using Threads = std::list<std::thread>;
  void Work(Threads::iterator self);
  void AddThread() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Accept(std::function<void()> task) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t max_threads_;
  absl::Mutex mutex_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  int64_t unfinished_ ABSL_GUARDED_BY(mutex_) = 0;  // tasks that wait or run
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Threads threads_ ABSL_GUARDED_BY(mutex_);
  Threads ended_ ABSL_GUARDED_BY(mutex_);  // to be joined
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_CALL_CALL_THREADS_H_
