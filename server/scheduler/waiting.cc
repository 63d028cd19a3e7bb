#include "server/scheduler/waiting.h"

#include <mutex>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::scheduler {

using observability::MonotonicNow;

namespace {

constexpr char kParkedUrl[] = "headwater/parked";
// How often a thread that waits asks whether its call has been cancelled.
constexpr absl::Duration kAskInterval = absl::Milliseconds(10);
// The longest single wait: its end, counted in nanoseconds, stays in range.
constexpr absl::Duration kLongest = absl::Hours(1);

// The mutex of all waits of the process: held for moments, after every other lock. The standard library's, because its waits end by
// the steady clock.
std::mutex& AllWaits() {
  static std::mutex* const mutex = new std::mutex;
  return *mutex;
}

void WaitFor(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, absl::Duration duration) {
  changed.wait_for(lock, absl::ToChronoNanoseconds(std::min(duration, kLongest)));
}

const absl::Status& Parked() {
  static const absl::Status* const parked = [] {
    auto* const status = new absl::Status(MakeError(ErrorReason::kCancelled, "the call waits"));
    status->SetPayload(kParkedUrl, absl::Cord("1"));
    return status;
  }();
  return *parked;
}

absl::Status EndedError(bool is_late, absl::string_view what) {
  return MakeError(is_late ? ErrorReason::kDeadlineExceeded : ErrorReason::kCancelled,
                   absl::StrCat(is_late ? "the deadline passed while the call " : "the call was cancelled while it ", what,
                                "; it was not done"));
}

}  // namespace

bool IsParked(const absl::Status& status) { return !status.ok() && status.GetPayload(kParkedUrl).has_value(); }

absl::Status CheckInTime(const WaitLimits& limits, absl::string_view what) {
  const bool is_late = MonotonicNow() >= limits.deadline;
  return is_late || (limits.waiter != nullptr && limits.waiter->cancelled()) ? EndedError(is_late, what) : absl::OkStatus();
}

absl::Status Wait(WaitList& list, absl::Mutex& mutex, const WaitLimits& limits, absl::string_view what) {
  HEADWATER_RETURN_IF_ERROR(CheckInTime(limits, what));
  if (limits.waiter != nullptr) return limits.waiter->DoWait(list, mutex, limits, what);
  ThreadWaiter thread;
  return static_cast<Waiter&>(thread).DoWait(list, mutex, limits, what);
}

void WaitList::WakeAll() {
  const std::lock_guard<std::mutex> lock(AllWaits());
  while (!waiters_.empty()) (*waiters_.begin())->End();
}

// ---- one operation ---------------------------------------------------------------------------------------------------

Waiter::~Waiter() { RunAtEnd(); }

void Waiter::Cancel() {
  const std::lock_guard<std::mutex> lock(AllWaits());
  cancelled_ = true;
  if (list_ != nullptr) End();
}

bool Waiter::cancelled() { return cancelled_.load() || (calls_ != nullptr && calls_->cancelled_.load()); }

absl::Status Waiter::Enter(WaitList& list, const WaitLimits& limits, absl::string_view what) {
  if (Waiter::cancelled()) return EndedError(/*is_late=*/false, what);
  if (calls_ != nullptr) {
    if (calls_->closed_ && limits.until_drain) {
      return MakeError(ErrorReason::kDraining, absl::StrCat("the server is shutting down: the call ", what, ", and was not done"),
                       {{"retryAfterMs", "1000"}});
    }
    if (!has_waited_) {
      HEADWATER_RETURN_IF_ERROR(calls_->CheckRoom(is_thread_));
      calls_->call_count_ += !is_thread_;
    }
    calls_->thread_count_ += is_thread_;
    place_ = calls_->parked_.emplace(limits.deadline, this);
    if (place_ == calls_->parked_.begin()) calls_->earlier_.notify_one();
  }
  has_waited_ = true;
  list_ = &list;
  list.waiters_.insert(this);
  return absl::OkStatus();
}

void Waiter::Leave() {
  list_->waiters_.erase(this);
  list_ = nullptr;
  if (calls_ == nullptr) return;
  calls_->thread_count_ -= is_thread_;
  calls_->parked_.erase(place_);
}

void Waiter::End() {
  Leave();
  ended_ = !suspended_;
  if (!suspended_) return;
  suspended_ = false;
  Resume();
}

absl::Status Waiter::DoWait(WaitList& list, absl::Mutex&, const WaitLimits& limits, absl::string_view what) {
  const std::lock_guard<std::mutex> lock(AllWaits());
  absl::Status status = Enter(list, limits, what);
  return status.ok() ? Parked() : status;
}

bool Waiter::StaysParked() {
  const std::lock_guard<std::mutex> lock(AllWaits());
  suspended_ = !ended_;
  ended_ = false;
  return suspended_;
}

void Waiter::RunAtEnd() {
  {
    const std::lock_guard<std::mutex> lock(AllWaits());
    if (list_ != nullptr) Leave();  // left by a try that ended with another result; the list may go with an action
    if (calls_ != nullptr && std::exchange(has_waited_, false)) calls_->call_count_ -= !is_thread_;
  }
  for (const std::function<void()>& action : std::exchange(at_end_, {})) action();
}

absl::Status ThreadWaiter::DoWait(WaitList& list, absl::Mutex& mutex, const WaitLimits& limits, absl::string_view what) {
  {
    std::unique_lock<std::mutex> lock(AllWaits());
    HEADWATER_RETURN_IF_ERROR(Enter(list, limits, what));
    mutex.Unlock();
    suspended_ = true;
    for (absl::Duration left; list_ != nullptr && (left = limits.deadline - MonotonicNow()) > absl::ZeroDuration();) {
      WaitFor(changed_, lock, asks_ == nullptr ? left : std::min(left, kAskInterval));
      if (list_ == nullptr || asks_ == nullptr) continue;
      lock.unlock();
      const bool is_gone = asks_();
      lock.lock();
      if (is_gone) break;
    }
    if (list_ != nullptr) Leave();
  }
  mutex.Lock();
  return absl::OkStatus();
}

// ---- all of a server -------------------------------------------------------------------------------------------------

WaitingCalls::WaitingCalls(int64_t max_calls, int64_t max_threads)
    : max_calls_(max_calls), max_threads_(std::max<int64_t>(1, max_threads / 4)), timer_([this] { EndLateWaits(); }) {}

absl::Status WaitingCalls::CheckRoom(bool is_thread) const {
  const bool is_full = call_count_ + thread_count_ >= max_calls_;
  if (!is_full && (!is_thread || thread_count_ < max_threads_)) return absl::OkStatus();
  const int64_t most = is_full ? max_calls_ : max_threads_;
  return MakeError(
      ErrorReason::kQueueFull,
      absl::StrCat("the call would have to wait: expected at most ", most, " calls that do (",
                   is_full ? "max_waiting_calls" : "streams, each of which holds a thread: a quarter of max_threads",
                   "), and that many are there; try again"),
      {{"limit", is_full ? "max_waiting_calls" : "max_threads"}, {"maximum", absl::StrCat(most)}, {"retryAfterMs", "500"}});
}

WaitingCalls::~WaitingCalls() {
  {
    const std::lock_guard<std::mutex> lock(AllWaits());
    ending_ = true;
    earlier_.notify_one();
  }
  timer_.join();
}

void WaitingCalls::Close() {
  const std::lock_guard<std::mutex> lock(AllWaits());
  closed_ = true;
  while (!parked_.empty()) parked_.begin()->second->End();  // they look again: some stay
}

void WaitingCalls::CancelAll() {
  {
    const std::lock_guard<std::mutex> lock(AllWaits());
    cancelled_ = true;
  }
  Close();
}

int64_t WaitingCalls::size() const {
  const std::lock_guard<std::mutex> lock(AllWaits());
  return static_cast<int64_t>(parked_.size());
}

void WaitingCalls::EndLateWaits() {
  std::unique_lock<std::mutex> lock(AllWaits());
  while (!ending_) {
    const absl::Duration left = parked_.empty() ? kLongest : parked_.begin()->first - MonotonicNow();
    if (left > absl::ZeroDuration()) {
      WaitFor(earlier_, lock, left);
    } else {
      parked_.begin()->second->End();
    }
  }
}

}  // namespace headwater::scheduler
