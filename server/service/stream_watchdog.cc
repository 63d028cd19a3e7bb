#include "server/service/stream_watchdog.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

namespace headwater::service {
namespace {

constexpr int64_t kNotWaiting = std::numeric_limits<int64_t>::max();

// Steady: a clock that jumps must not end streams.
int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

StreamWatchdog::StreamWatchdog(absl::Duration idle_timeout)
    : idle_timeout_(std::max(idle_timeout, absl::Milliseconds(4))), thread_([this] { Run(); }) {}

StreamWatchdog::~StreamWatchdog() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void StreamWatchdog::Run() {
  absl::MutexLock lock(&mutex_);
  while (!mutex_.AwaitWithTimeout(absl::Condition(&stopping_), idle_timeout_ / 4)) {
    const int64_t oldest_ns = NowNs() - absl::ToInt64Nanoseconds(idle_timeout_);
    for (Watch* const watch : watches_) {
      if (watch->begun_ns_.load() <= oldest_ns && !watch->expired_.exchange(true)) watch->on_idle_();
    }
  }
}

StreamWatchdog::Watch::Watch(StreamWatchdog* watchdog, std::function<void()> on_idle)
    : watchdog_(watchdog), on_idle_(std::move(on_idle)), begun_ns_(kNotWaiting) {
  absl::MutexLock lock(&watchdog_->mutex_);
  watchdog_->watches_.insert(this);
}

StreamWatchdog::Watch::~Watch() {
  absl::MutexLock lock(&watchdog_->mutex_);
  watchdog_->watches_.erase(this);
}

void StreamWatchdog::Watch::Begin() { begun_ns_.store(NowNs()); }

void StreamWatchdog::Watch::End() { begun_ns_.store(kNotWaiting); }

}  // namespace headwater::service
