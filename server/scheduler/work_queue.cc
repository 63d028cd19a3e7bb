#include "server/scheduler/work_queue.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "headwater/kernels/error.h"

namespace headwater::scheduler {
namespace {

// How often a waiting job's cancellation is asked for.
constexpr absl::Duration kPollInterval = absl::Milliseconds(5);
// Bounds of the hint in kQueueFull.
constexpr absl::Duration kMinRetry = absl::Milliseconds(10);
constexpr absl::Duration kMaxRetry = absl::Seconds(5);
// Weight of the newest job in the average of job times.
constexpr double kNewestWeight = 0.2;

}  // namespace

WorkQueue::WorkQueue(int64_t max_depth) : max_depth_(std::max<int64_t>(max_depth, 1)), worker_([this] { RunWorker(); }) {}

WorkQueue::~WorkQueue() {
  Drain();
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  worker_.join();
}

absl::Duration WorkQueue::RetryAfter() const {
  // A place is free when one job has run; a crowd that comes back at once would find the queue full again.
  return std::clamp(typical_job_time_ * static_cast<double>(max_depth_) / 2, kMinRetry, kMaxRetry);
}

void WorkQueue::Remove(const std::string& client, const Job* job) {
  const auto line = lines_.find(client);
  line->second.erase(std::find(line->second.begin(), line->second.end(), job));
  --waiting_count_;
  if (line->second.empty()) {
    lines_.erase(line);
    turns_.erase(std::find(turns_.begin(), turns_.end(), client));
  }
}

absl::Status WorkQueue::Run(const std::string& client, const std::function<void()>& work, const std::function<bool()>& cancelled,
                            absl::Time deadline) {
  Job job;
  job.work = &work;
  absl::MutexLock lock(&mutex_);
  if (draining_) return MakeError(ErrorReason::kDraining, "the server is shutting down and takes no new work");
  if (waiting_count_ >= max_depth_) {
    const int64_t retry_ms = absl::ToInt64Milliseconds(RetryAfter());
    return MakeError(
        ErrorReason::kQueueFull,
        absl::StrCat(waiting_count_, " micro-batches wait, the maximum is ", max_depth_, "; try again in ", retry_ms, " ms"),
        {{"limit", "max_queue_depth"},
         {"maximum", absl::StrCat(max_depth_)},
         {"actual", absl::StrCat(waiting_count_ + 1)},
         {"retryAfterMs", absl::StrCat(retry_ms)}});
  }
  std::deque<Job*>& line = lines_[client];
  if (line.empty()) turns_.push_back(client);
  line.push_back(&job);
  ++waiting_count_;

  while (job.state == Job::State::kWaiting) {
    // `cancelled` is the caller's code: not under our lock.
    mutex_.Unlock();
    const bool is_cancelled = cancelled != nullptr && cancelled();
    mutex_.Lock();
    if (job.state != Job::State::kWaiting) break;
    const absl::Time now = absl::Now();
    if (is_cancelled) {
      Remove(client, &job);
      return MakeError(ErrorReason::kCancelled, "the call was cancelled while it waited in the queue; nothing was added");
    }
    if (now >= deadline) {
      Remove(client, &job);
      return MakeError(ErrorReason::kDeadlineExceeded, "the deadline passed while the call waited in the queue; nothing was added");
    }
    job.changed.WaitWithDeadline(&mutex_, std::min(deadline, now + kPollInterval));
  }
  while (job.state != Job::State::kDone) job.changed.Wait(&mutex_);
  return absl::OkStatus();
}

void WorkQueue::RunWorker() {
  absl::MutexLock lock(&mutex_);
  while (true) {
    mutex_.Await(absl::Condition(
        +[](WorkQueue* queue) { return queue->stopping_ || queue->waiting_count_ > 0; }, this));
    if (waiting_count_ == 0) return;
    const std::string client = turns_.front();
    turns_.pop_front();
    const auto line = lines_.find(client);
    Job* job = line->second.front();
    line->second.pop_front();
    --waiting_count_;
    if (line->second.empty()) {
      lines_.erase(line);
    } else {
      turns_.push_back(client);
    }
    job->state = Job::State::kRunning;
    running_ = true;
    mutex_.Unlock();
    const absl::Time start = absl::Now();
    (*job->work)();
    const absl::Duration taken = std::max(absl::Now() - start, absl::ZeroDuration());
    mutex_.Lock();
    typical_job_time_ = (1 - kNewestWeight) * typical_job_time_ + kNewestWeight * taken;
    running_ = false;
    job->state = Job::State::kDone;
    job->changed.Signal();  // under the lock: the job is gone once its submitter has seen the state
  }
}

void WorkQueue::Drain() {
  absl::MutexLock lock(&mutex_);
  draining_ = true;
  mutex_.Await(absl::Condition(
      +[](WorkQueue* queue) { return queue->waiting_count_ == 0 && !queue->running_; }, this));
}

int64_t WorkQueue::depth() const {
  absl::MutexLock lock(&mutex_);
  return waiting_count_;
}

}  // namespace headwater::scheduler
