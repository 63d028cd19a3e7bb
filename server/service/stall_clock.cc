#include "server/service/stall_clock.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/observability/logging.h"
#include "server/service/call/rpc_scope.h"

namespace headwater::service {

StallClock::StallClock(absl::Duration stall_timeout, std::function<absl::Time()> clock)
    : stall_timeout_(stall_timeout), clock_(std::move(clock)), last_look_(clock_()) {}

uint64_t StallClock::BeginCall(const char* name) {
  auto [method, request_id, head] = RpcScope::CurrentLabel();
  Call call{name, std::move(method), std::move(request_id), std::move(head)};
  absl::MutexLock lock(&mutex_);
  calls_.emplace(++next_call_, std::move(call));
  return next_call_;
}

void StallClock::EndCall(uint64_t call) {
  absl::MutexLock lock(&mutex_);
  calls_.erase(call);
  ++events_;
}

void StallClock::LeaveFlow() {
  absl::MutexLock lock(&mutex_);
  ++events_;
}

absl::Status StallClock::Check(int64_t progress) {
  absl::MutexLock lock(&mutex_);
  if (!stuck_.ok()) return stuck_;
  const absl::Time now = clock_();
  const absl::Duration look = std::min(now - last_look_, absl::Seconds(1));
  last_look_ = now;
  if (calls_.empty() || events_ != seen_events_ || progress != seen_progress_) {
    still_ = absl::ZeroDuration();
    seen_events_ = events_;
    seen_progress_ = progress;
    return stuck_;
  }
  still_ += look;
  if (still_ < stall_timeout_) return stuck_;
  const Call& oldest = calls_.begin()->second;
  observability::Log(observability::LogLevel::kError, "engine_stuck",
                     {{"work", oldest.work},
                      {"method", oldest.method},
                      {"request_id", oldest.request_id},
                      {"head", oldest.head},
                      {"calls", static_cast<int64_t>(calls_.size())},
                      {"stall_timeout_s", absl::ToDoubleSeconds(stall_timeout_)}});
  // No head here: the error goes to every client, of whatever tenant.
  stuck_ = MakeError(ErrorReason::kEngineFailed, absl::StrCat("the engine is stuck: ", oldest.work, " has got no further for ",
                                                              absl::FormatDuration(stall_timeout_), " (engine_stall_timeout)"));
  return stuck_;
}

}  // namespace headwater::service
