#include "server/scheduler/work_queue.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::scheduler {

using observability::MonotonicNow;

namespace {

// How often a waiting job's cancellation is asked for.
constexpr absl::Duration kPollInterval = absl::Milliseconds(5);
// Bounds of the hint in kQueueFull.
constexpr absl::Duration kMinRetry = absl::Milliseconds(10);
constexpr absl::Duration kMaxRetry = absl::Seconds(5);
// Weight of the newest job in the average of job times.
constexpr double kNewestWeight = 0.2;

}  // namespace

WorkQueue::WorkQueue(int64_t max_depth, const QueueWidths& widths)
    : max_depth_(std::max<int64_t>(max_depth, 1)),
      widths_{std::max<int64_t>(widths.small, 1), std::max<int64_t>(widths.large, 1)} {}

absl::Duration WorkQueue::RetryAfter() const {
  // A place is free when one job has run; a crowd that comes back at once would find the queue full again.
  return std::clamp(typical_job_time_ * static_cast<double>(max_depth_) / 2, kMinRetry, kMaxRetry);
}

void WorkQueue::Remove(const std::string& client, const Job* job) {
  const auto line = lines_.find(client);
  const bool was_next = line->second.front() == job;
  line->second.erase(std::find(line->second.begin(), line->second.end(), job));
  --waiting_count_;
  if (line->second.empty()) {
    lines_.erase(line);
    turns_.erase(std::find(turns_.begin(), turns_.end(), client));
  } else if (was_next) {
    Admit();  // what stood behind it may be of the other size
  }
}

void WorkQueue::Admit() {
  for (auto turn = turns_.begin(); turn != turns_.end();) {
    const auto line = lines_.find(*turn);
    Job* const job = line->second.front();
    int64_t& running_jobs = running(job->size);
    if (running_jobs >= widths_[static_cast<size_t>(job->size)]) {
      ++turn;
      continue;
    }
    ++running_jobs;
    --waiting_count_;
    line->second.pop_front();
    turns_.erase(turn);
    if (line->second.empty()) {
      lines_.erase(line);
    } else {
      turns_.push_back(line->first);
    }
    job->admitted = true;
    job->changed.Signal();  // under the lock: the job is gone once its submitter has seen it
    turn = turns_.begin();
  }
}

absl::Status WorkQueue::Run(const std::string& client, JobSize size, const std::function<void()>& work,
                            const std::function<bool()>& cancelled, absl::Time deadline) {
  Job job;
  job.size = size;
  {
    absl::MutexLock lock(&mutex_);
    if (draining_) return MakeError(ErrorReason::kDraining, "the server is shutting down and takes no new work");
    std::deque<Job*>& line = lines_[client];
    if (line.empty()) turns_.push_back(client);
    line.push_back(&job);
    ++waiting_count_;
    if (MonotonicNow() < deadline) Admit();
    if (!job.admitted && waiting_count_ > max_depth_) {
      Remove(client, &job);
      const int64_t retry_ms = absl::ToInt64Milliseconds(RetryAfter());
      return MakeError(
          ErrorReason::kQueueFull,
          absl::StrCat(waiting_count_, " micro-batches wait, the maximum is ", max_depth_, "; try again in ", retry_ms, " ms"),
          {{"limit", "max_queue_depth"},
           {"maximum", absl::StrCat(max_depth_)},
           {"actual", absl::StrCat(waiting_count_ + 1)},
           {"retryAfterMs", absl::StrCat(retry_ms)}});
    }
    while (!job.admitted) {
      // `cancelled` is the caller's code: not under our lock.
      mutex_.Unlock();
      const bool is_cancelled = cancelled != nullptr && cancelled();
      mutex_.Lock();
      if (job.admitted) break;
      const absl::Duration left = deadline - MonotonicNow();
      if (is_cancelled) {
        Remove(client, &job);
        return MakeError(ErrorReason::kCancelled, "the call was cancelled while it waited in the queue; nothing was added");
      }
      if (left <= absl::ZeroDuration()) {
        Remove(client, &job);
        return MakeError(ErrorReason::kDeadlineExceeded,
                         "the deadline passed while the call waited in the queue; nothing was added");
      }
      job.changed.WaitWithTimeout(&mutex_, std::min(left, kPollInterval));
    }
  }
  const absl::Time start = MonotonicNow();
  work();
  const absl::Duration taken = MonotonicNow() - start;
  absl::MutexLock lock(&mutex_);
  typical_job_time_ = (1 - kNewestWeight) * typical_job_time_ + kNewestWeight * taken;
  --running(size);
  Admit();
  return absl::OkStatus();
}

bool WorkQueue::others_wait() const {
  absl::MutexLock lock(&mutex_);
  return waiting_count_ > 0 || running_[0] + running_[1] > 1;
}

bool WorkQueue::idle() const {
  absl::MutexLock lock(&mutex_);
  return waiting_count_ + running_[0] + running_[1] == 0;
}

void WorkQueue::Drain() {
  absl::MutexLock lock(&mutex_);
  draining_ = true;
  mutex_.Await(absl::Condition(
      +[](WorkQueue* queue) { return queue->waiting_count_ == 0 && queue->running_[0] + queue->running_[1] == 0; }, this));
}

int64_t WorkQueue::depth() const {
  absl::MutexLock lock(&mutex_);
  return waiting_count_;
}

}  // namespace headwater::scheduler
