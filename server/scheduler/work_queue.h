// WorkQueue: the bounded, fair queue in front of the engine.
//
// A job runs on the thread that submits it, when its turn has come. Clients take turns, so one that submits much cannot starve
// another; jobs of one client begin in order. Several jobs run at once, by size: a large one computes while the next one already
// stands at the engine's door, and many small ones reach the engine together, which may compute them as one.
#ifndef HEADWATER_SERVER_SCHEDULER_WORK_QUEUE_H_
#define HEADWATER_SERVER_SCHEDULER_WORK_QUEUE_H_

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace headwater::scheduler {

// What a job asks of the engine. Small: one of many that it computes together.
enum class JobSize { kSmall = 0, kLarge = 1 };

// Micro-batches of at most so many rows are small jobs.
inline constexpr int64_t kSmallJobRows = 1024;
inline JobSize JobSizeOf(int64_t row_count) { return row_count <= kSmallJobRows ? JobSize::kSmall : JobSize::kLarge; }

// Jobs of each size that run at once.
struct QueueWidths {
  int64_t small = 128;
  int64_t large = 2;
};

class WorkQueue {
 public:
  // At most `max_depth` (>= 1) jobs wait. The widths are at least 1.
  explicit WorkQueue(int64_t max_depth, const QueueWidths& widths = {});
  // No call may be in Run().
  ~WorkQueue() = default;
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  // Waits for the job's turn, runs it on this thread, and returns when it has run. `cancelled` (may be null) is polled while it
  // waits (every few milliseconds): true takes it out of the queue and returns kCancelled; `deadline` (of
  // observability::MonotonicNow()) likewise with kDeadlineExceeded; a job whose turn has come is run. kQueueFull (with
  // `retryAfterMs` in the metadata) if the queue is full, kDraining after Drain(). The job must not call Run().
  absl::Status Run(const std::string& client, JobSize size, const std::function<void()>& job,
                   const std::function<bool()>& cancelled, absl::Time deadline);
  // The same for a large one.
  absl::Status Run(const std::string& client, const std::function<void()>& job, const std::function<bool()>& cancelled,
                   absl::Time deadline) {
    return Run(client, JobSize::kLarge, job, cancelled, deadline);
  }

  // For a running job: whether another one waits, or runs and so may stand behind it at the engine.
  bool others_wait() const;
  // Nothing waits or runs.
  bool idle() const;

  // Refuses new jobs from now on and waits until the accepted ones have run.
  void Drain();
  // Jobs that wait; those that run are not counted.
  int64_t depth() const;

 private:
  struct Job {
    JobSize size = JobSize::kLarge;
    bool admitted = false;  // guarded by mutex_
    absl::CondVar changed;
  };
  using Lines = std::map<std::string, std::deque<Job*>>;

  int64_t& running(JobSize size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return running_[static_cast<size_t>(size)]; }
  // Lets jobs begin whose turn has come: that of the first client in turn whose next job there is room for, as often as there is
  // one.
  void Admit() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes a waiting job out of its client's line.
  void Remove(const std::string& client, const Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Duration RetryAfter() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t max_depth_;
  const std::array<int64_t, 2> widths_;  // by JobSize
  mutable absl::Mutex mutex_;
  // Each client's waiting jobs, in order of arrival; no empty lines. Jobs live on their submitters' stacks.
  Lines lines_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> turns_ ABSL_GUARDED_BY(mutex_);  // the clients in `lines_`, the next one first
  int64_t waiting_count_ ABSL_GUARDED_BY(mutex_) = 0;
  std::array<int64_t, 2> running_ ABSL_GUARDED_BY(mutex_) = {0, 0};  // by JobSize
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Duration typical_job_time_ ABSL_GUARDED_BY(mutex_) = absl::Milliseconds(100);  // moving average, for RetryAfter()
};

}  // namespace headwater::scheduler

#endif  // HEADWATER_SERVER_SCHEDULER_WORK_QUEUE_H_
