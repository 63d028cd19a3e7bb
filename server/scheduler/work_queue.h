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
  int64_t depth() const;
};

}  // namespace headwater::scheduler

#endif  // HEADWATER_SERVER_SCHEDULER_WORK_QUEUE_H_
