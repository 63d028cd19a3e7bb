// WorkQueue: the bounded, fair queue in front of the engine.
//
// Jobs of one client run in order; clients take turns, so one that submits much cannot starve another. One worker thread runs the
// jobs, because the engine computes one micro-batch at a time.
#ifndef HEADWATER_SERVER_SCHEDULER_WORK_QUEUE_H_
#define HEADWATER_SERVER_SCHEDULER_WORK_QUEUE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace headwater::scheduler {

class WorkQueue {
 public:
  // At most `max_depth` (>= 1) jobs wait.
  explicit WorkQueue(int64_t max_depth);
  // Runs what was accepted, then stops. Nothing may be submitted concurrently.
  ~WorkQueue();

  // Runs `job` on the worker thread and returns when it has run. `cancelled` is polled while it waits (every few milliseconds):
  // true takes it out of the queue and returns kCancelled; `deadline` likewise with kDeadlineExceeded. A job that has begun is
  // waited for. kQueueFull (with `retryAfterMs` in the metadata) if the queue is full, kDraining after Drain().
  absl::Status Run(const std::string& client, const std::function<void()>& job, const std::function<bool()>& cancelled,
                   absl::Time deadline);

  // Refuses new jobs from now on and waits until the accepted ones have run.
  void Drain();
  // Jobs that wait; the running one is not counted.
  int64_t depth() const;

 private:
  struct Job {
    enum class State { kWaiting, kRunning, kDone };
    const std::function<void()>* work;
    State state = State::kWaiting;  // guarded by mutex_
    absl::CondVar changed;
  };

  void RunWorker();
  // Takes a waiting job out of its client's line.
  void Remove(const std::string& client, const Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Duration RetryAfter() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t max_depth_;
  mutable absl::Mutex mutex_;
  // Each client's waiting jobs, in order of arrival; no empty lines. Jobs live on their submitters' stacks.
  std::map<std::string, std::deque<Job*>> lines_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> turns_ ABSL_GUARDED_BY(mutex_);  // the clients in `lines_`, the next one first
  int64_t waiting_count_ ABSL_GUARDED_BY(mutex_) = 0;
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Duration typical_job_time_ ABSL_GUARDED_BY(mutex_) = absl::Milliseconds(100);  // moving average, for RetryAfter()
  std::thread worker_;                                                                 // last: it uses the members above
};

}  // namespace headwater::scheduler

#endif  // HEADWATER_SERVER_SCHEDULER_WORK_QUEUE_H_
