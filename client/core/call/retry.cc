#include "client/core/call/retry.h"

#include <algorithm>
#include <random>
#include <string>

#include "headwater/client/error.h"

namespace headwater::client::internal {
namespace {

// The longest pause between attempts to reach an absent server, as in gRPC. Attempts stop when only this time is left, so that the
// error says that no server answers and not that time is up.
constexpr std::chrono::seconds kLongestAwayBackoff{1};
constexpr std::chrono::milliseconds kShortestAwayAttempt{100};

// In [0.5, 1): trainers that were refused together must not come back together.
double Jitter() {
  thread_local std::minstd_rand generator{std::random_device{}()};
  return std::uniform_real_distribution<double>(0.5, 1.0)(generator);
}

// Whether the server has lost a rank or its device, with the content of its heads, and restarts.
bool IsRestarting(const absl::Status& status) { return ErrorMetadata(status).contains("serverRestarts"); }

// Whether no server answers, or soon none will. SHARD_NOT_READY is an answer.
bool IsAway(const absl::Status& status) {
  if (absl::IsCancelled(status) || IsRestarting(status)) return true;
  const std::string reason = ErrorReason(status);
  return absl::IsUnavailable(status) && (reason.empty() || reason == "DRAINING" || reason == "STARTING");
}

}  // namespace

bool RetryState::MayRepeat(const absl::Status& status) const {
  const std::string reason = ErrorReason(status);
  if (IsRestarting(status)) return awaits_server_ && repeat_ != Repeat::kIfNothingWasDone;
  // The server's own UNAVAILABLE says that nothing was done; the connection's says nothing.
  if (absl::IsUnavailable(status)) return repeat_ != Repeat::kIfNothingWasDone || !reason.empty();
  // A cancelled caller does not ask. The server cut the call off while shutting down, as if the connection had broken.
  if (absl::IsCancelled(status)) return repeat_ != Repeat::kIfNothingWasDone;
  if (absl::IsResourceExhausted(status)) {
    // A slot of this client's own session is not awaited, because only this client frees it. The server says which it is.
    if (reason == "STAGING_FULL") return RetryDelay(status).has_value();
    return reason == "QUEUE_FULL" || reason == "IN_FLIGHT_BYTES_EXCEEDED" || reason == "ORDERED_WINDOW_FULL";
  }
  // Only this attempt failed: connections of one micro-batch broke or did not meet, or memory must be registered again. If the
  // server added the micro-batch nevertheless, it answers the repeat as a replay.
  if (reason == "STRIPE_LOST" || reason == "TRANSFER_NOT_FOUND" || reason == "REGION_NOT_FOUND") return true;
  // Held up by this very call's earlier attempt, whose answer was lost: it ends by itself.
  return reason == "MICRO_BATCH_IN_PROGRESS" && answer_lost_ && repeat_ != Repeat::kIfNothingWasDone;
}

std::optional<std::chrono::nanoseconds> RetryState::AfterFailure(const absl::Status& status) {
  const bool away = awaits_server_ && IsAway(status);
  if (!away) ++failures_;
  away_count_ = away ? away_count_ + 1 : 0;
  if (failures_ >= policy_.max_attempts || !MayRepeat(status)) return std::nullopt;
  if (absl::IsUnavailable(status) || absl::IsCancelled(status)) answer_lost_ = true;
  std::chrono::nanoseconds& backoff = away ? away_backoff_ : backoff_;
  std::chrono::nanoseconds delay = std::chrono::duration_cast<std::chrono::nanoseconds>(backoff * Jitter());
  if (away) delay = std::min<std::chrono::nanoseconds>(delay, kLongestAwayBackoff);
  if (const auto asked_for = RetryDelay(status); asked_for.has_value()) delay = std::max(delay, *asked_for);
  backoff = std::min(backoff * 2, Bounded(policy_.max_backoff));
  if (!away) away_backoff_ = Bounded(policy_.initial_backoff);
  const std::chrono::nanoseconds least = away ? kShortestAwayAttempt : std::chrono::nanoseconds(0);
  if (std::chrono::system_clock::now() + delay >= deadline_ - least) return std::nullopt;
  return delay;
}

}  // namespace headwater::client::internal
