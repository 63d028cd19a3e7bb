#include "server/scheduler/work_queue.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"

namespace headwater::scheduler {
namespace {

// Bounds of the hint in kQueueFull.
constexpr absl::Duration kMinRetry = absl::Milliseconds(10);
constexpr absl::Duration kMaxRetry = absl::Seconds(5);
// Weight of the newest job in the average of job times.
constexpr double kNewestWeight = 0.2;

}  // namespace

// ---- one turn --------------------------------------------------------------------------------------------------------

WorkQueue::Turn::Turn(WorkQueue& queue, std::string client, JobSize size, absl::Time now, std::function<void()> wake)
    : queue_(queue), client_(std::move(client)), size_(size), wake_(std::move(wake)), since_(now) {
  absl::MutexLock lock(&queue_.mutex_);
  place_ = queue_.turns_.insert(queue_.turns_.end(), this);
}

WorkQueue::Turn::~Turn() {
  absl::MutexLock lock(&queue_.mutex_);
  queue_.LeaveLocked(this, absl::ZeroDuration());
  queue_.turns_.erase(place_);
  if (since_ != absl::InfinitePast()) queue_.WakeWatchers();  // one that came later may begin early now
}

absl::Time WorkQueue::Turn::EarlyStart(absl::Time now) {
  absl::MutexLock lock(&queue_.mutex_);
  absl::Time start = now;
  for (auto earlier = queue_.turns_.begin(); earlier != place_; ++earlier)
    start = std::max(start, (*earlier)->since_ + kPrecedence);
  if (queue_.load() > 0) start = absl::InfiniteFuture();
  if (start > now) watches_ = true;
  return start;
}

void WorkQueue::Turn::Yield() {
  absl::MutexLock lock(&queue_.mutex_);
  since_ = absl::InfinitePast();
  queue_.WakeWatchers();
}

absl::Status WorkQueue::Turn::Enter() {
  absl::MutexLock lock(&queue_.mutex_);
  if (queue_.draining_) return MakeError(ErrorReason::kDraining, "the server is shutting down and takes no new work");
  since_ = absl::InfinitePast();
  auto line = queue_.FindLine(client_);
  if (line == queue_.lines_.end()) line = queue_.lines_.insert(line, Line{client_, {}});
  line->turns.push_back(this);
  in_line_ = true;
  ++queue_.waiting_count_;
  queue_.Admit(this);
  queue_.LoadChanged();
  if (admitted() || queue_.waiting_count_ <= queue_.max_depth_) return absl::OkStatus();
  queue_.LeaveLocked(this, absl::ZeroDuration());
  const int64_t retry_ms = absl::ToInt64Milliseconds(queue_.RetryAfter());
  return MakeError(ErrorReason::kQueueFull,
                   absl::StrCat(queue_.waiting_count_, " micro-batches wait, the maximum is ", queue_.max_depth_, "; try again in ",
                                retry_ms, " ms"),
                   {{"limit", "max_queue_depth"},
                    {"maximum", absl::StrCat(queue_.max_depth_)},
                    {"actual", absl::StrCat(queue_.waiting_count_ + 1)},
                    {"retryAfterMs", absl::StrCat(retry_ms)}});
}

void WorkQueue::Turn::Leave(absl::Duration taken) {
  absl::MutexLock lock(&queue_.mutex_);
  queue_.LeaveLocked(this, taken);
}

bool WorkQueue::Turn::OthersWait() {
  absl::MutexLock lock(&queue_.mutex_);
  watches_ = true;
  return queue_.load() > 1;
}

// ---- the queue -------------------------------------------------------------------------------------------------------

WorkQueue::WorkQueue(int64_t max_depth, const QueueWidths& widths)
    : max_depth_(std::max<int64_t>(max_depth, 1)),
      widths_{std::max<int64_t>(widths.small, 1), std::max<int64_t>(widths.large, 1)} {}

absl::Duration WorkQueue::RetryAfter() const {
  // One finished job frees one place: refused clients that all came back at once would find the queue full again.
  return std::clamp(typical_job_time_ * static_cast<double>(max_depth_) / 2, kMinRetry, kMaxRetry);
}

WorkQueue::Lines::iterator WorkQueue::FindLine(const std::string& client) {
  return std::find_if(lines_.begin(), lines_.end(), [&client](const Line& line) { return line.client == client; });
}

void WorkQueue::Remove(Turn* turn) {
  const auto line = FindLine(turn->client_);
  const bool was_next = line->turns.front() == turn;
  std::erase(line->turns, turn);
  turn->in_line_ = false;
  --waiting_count_;
  if (line->turns.empty()) {
    lines_.erase(line);
  } else if (was_next) {
    Admit();  // the next job may be of the other size
  }
}

void WorkQueue::LeaveLocked(Turn* turn, absl::Duration taken) {
  if (turn->in_line_) {
    Remove(turn);
  } else if (turn->admitted_.exchange(false)) {
    if (taken > absl::ZeroDuration()) typical_job_time_ = (1 - kNewestWeight) * typical_job_time_ + kNewestWeight * taken;
    --running(turn->size_);
    Admit();
  }
  LoadChanged();
}

void WorkQueue::Admit(const Turn* self) {
  for (auto line = lines_.begin(); line != lines_.end();) {
    Turn* const turn = line->turns.front();
    int64_t& running_jobs = running(turn->size_);
    if (running_jobs >= widths_[static_cast<size_t>(turn->size_)]) {
      ++line;
      continue;
    }
    ++running_jobs;
    --waiting_count_;
    line->turns.pop_front();
    lines_.splice(lines_.end(), lines_, line);
    if (line->turns.empty()) lines_.erase(line);
    turn->in_line_ = false;
    turn->admitted_.store(true);
    if (turn != self) turn->wake_();
    line = lines_.begin();
  }
}

void WorkQueue::LoadChanged() {
  const int64_t known = std::exchange(known_load_, std::min<int64_t>(load(), 2));
  if (known != known_load_) WakeWatchers();
}

void WorkQueue::WakeWatchers() {
  for (Turn* const turn : turns_) {
    if (std::exchange(turn->watches_, false)) turn->wake_();
  }
}

void WorkQueue::WakeAll() {
  absl::MutexLock lock(&mutex_);
  for (Turn* const turn : turns_) turn->wake_();
}

void WorkQueue::Drain() {
  absl::MutexLock lock(&mutex_);
  draining_ = true;
  mutex_.Await(absl::Condition(
      +[](WorkQueue* queue) ABSL_NO_THREAD_SAFETY_ANALYSIS { return queue->load() == 0; }, this));
}

int64_t WorkQueue::depth() const {
  absl::MutexLock lock(&mutex_);
  return waiting_count_;
}

}  // namespace headwater::scheduler
