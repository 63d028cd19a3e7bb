#include "server/guard/stream_watchdog.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::guard {
namespace {

constexpr int64_t kNotWaiting = std::numeric_limits<int64_t>::max();

int64_t NowNs() { return absl::ToUnixNanos(observability::MonotonicNow()); }

constexpr absl::Duration kPatience = absl::Seconds(2);
constexpr absl::Duration kFirstTime = absl::Seconds(5);
constexpr double kLeastBytesPerSecond = 64 << 10;

}  // namespace

StreamWatchdog::StreamWatchdog(absl::Duration idle_timeout, absl::Duration max_time)
    : idle_timeout_(std::max(idle_timeout, absl::Milliseconds(4))),
      max_time_(std::max(max_time, absl::Milliseconds(4))),
      look_(std::min({idle_timeout_ / 4, max_time_ / 4, absl::Seconds(1)}), [this] { Look(); }) {}

absl::Status StreamWatchdog::Judge(const Watch& watch, int64_t now_ns) const {
  if (watch.begun_ns_.load() <= now_ns - absl::ToInt64Nanoseconds(idle_timeout_)) {
    return MakeError(ErrorReason::kCancelled, absl::StrCat("the client has neither sent nor taken anything for ",
                                                           absl::FormatDuration(idle_timeout_), " (stream_idle_timeout)"));
  }
  if (watch.created_ns_ <= now_ns - absl::ToInt64Nanoseconds(max_time_)) {
    return MakeError(ErrorReason::kDeadlineExceeded,
                     absl::StrCat("the stream was not over after ", absl::FormatDuration(max_time_), " (max_stream_time)"));
  }
  return watch.allowed_ ? watch.allowed_() : absl::OkStatus();
}

void StreamWatchdog::Look() {
  absl::MutexLock lock(&mutex_);
  const int64_t now_ns = NowNs();
  for (Watch* const watch : watches_) {
    if (!watch->why_.ok()) continue;
    watch->why_ = Judge(*watch, now_ns);
    if (!watch->why_.ok()) watch->end_(watch->why_);
  }
}

StreamWatchdog::Watch::Watch(StreamWatchdog* watchdog, std::function<void(const absl::Status&)> end)
    : watchdog_(watchdog), end_(std::move(end)), created_ns_(NowNs()), begun_ns_(kNotWaiting) {
  absl::MutexLock lock(&watchdog_->mutex_);
  watchdog_->watches_.insert(this);
}

StreamWatchdog::Watch::~Watch() {
  absl::MutexLock lock(&watchdog_->mutex_);
  watchdog_->watches_.erase(this);
}

void StreamWatchdog::Watch::Begin() { begun_ns_.store(NowNs()); }

void StreamWatchdog::Watch::End() { begun_ns_.store(kNotWaiting); }

void StreamWatchdog::Watch::Allow(std::function<absl::Status()> allowed) {
  absl::MutexLock lock(&watchdog_->mutex_);
  allowed_ = std::move(allowed);
}

absl::Status StreamWatchdog::Watch::why() const {
  absl::MutexLock lock(&watchdog_->mutex_);
  return why_;
}

bool SlowUploads::GiveWay(absl::Time now) {
  std::shared_ptr<transport::RowExchange> stillest;
  std::shared_ptr<transport::RowExchange> slowest;
  absl::Duration longest = kPatience;
  double least = kLeastBytesPerSecond;
  {
    absl::MutexLock lock(&mutex_);
    for (const Upload& upload : uploads_) {
      const transport::RowProgress rows = upload.rows->Look();
      if (rows.complete || !upload.rows->status().ok()) continue;
      // The client has sent its rows, and cannot bring the joined teacher's: that wait has its own limit (max_join_wait).
      if (rows.misses_only_others_rows) continue;
      if (const absl::Duration still = now - rows.last_row_time; still > longest) {
        longest = still;
        stillest = upload.rows;
      }
      const absl::Duration age = now - upload.begin;
      if (age < kFirstTime) continue;
      if (const double rate = static_cast<double>(rows.received_bytes) / absl::ToDoubleSeconds(age); rate < least) {
        least = rate;
        slowest = upload.rows;
      }
    }
  }
  const auto& ended = stillest != nullptr ? stillest : slowest;
  if (ended == nullptr) return false;
  return ended->BreakIfIncomplete(
      MakeError(ErrorReason::kQueueFull,
                "others wait for what this upload holds, and its rows have stopped coming, or come too slowly; nothing was "
                "added; try again",
                {{"retryAfterMs", "1000"}}));
}

}  // namespace headwater::guard
