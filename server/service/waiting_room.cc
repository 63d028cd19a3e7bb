#include "server/service/waiting_room.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/observability/monotonic_clock.h"
#include "server/service/retry_after.h"
#include "server/transport/answer_time.h"

namespace headwater::service {
namespace {

absl::Status SentAway() {
  return MakeError(ErrorReason::kDraining, "the server is shutting down: the call waited for its step, and nothing was changed",
                   {{kRetryAfterMsKey, "1000"}});
}

// To a step that is sealed, by another expectation perhaps, nothing comes any more.
bool MayStillCome(const heads::Head& head, const heads::StepKey& key, const absl::Status& seal) {
  return (HasReason(seal, ErrorReason::kMicroBatchMissing) || HasReason(seal, ErrorReason::kMicroBatchUncommitted)) &&
         head.TakesMicroBatches(key);
}

int64_t Quarter(int64_t max_threads) { return std::max<int64_t>(1, max_threads / 4); }

constexpr char kQuarter[] = "a quarter of max_threads";

CallPlaces BehindFilesPlaces(int64_t max_calls, int64_t max_threads) {
  const std::string what = "a call behind one that saves, sets, creates or deletes its head holds a thread";
  const int64_t most = Quarter(max_threads);
  if (max_calls < most) return CallPlaces(what, max_calls, "max_waiting_calls", "max_waiting_calls");
  return CallPlaces(what, most, "max_threads", kQuarter);
}

}  // namespace

absl::Status CallPlaces::Take() {
  if (taken_.fetch_add(1) < most_) return absl::OkStatus();
  taken_.fetch_sub(1);
  return MakeError(
      ErrorReason::kQueueFull,
      absl::StrCat(what_, ": expected at most ", most_, " at once (", bound_, "), and that many are in progress; try again"),
      {{"limit", limit_}, {"maximum", absl::StrCat(most_)}, {kRetryAfterMsKey, "2000"}});
}

WaitingRoom::WaitingRoom(int64_t max_calls, absl::Duration max_wait, int64_t max_threads)
    : max_calls_(max_calls),
      max_wait_(max_wait),
      behind_files_(BehindFilesPlaces(max_calls, max_threads)),
      loads_("reading weights from files holds a thread", Quarter(max_threads), "max_threads", kQuarter) {}

scheduler::WaitLimits WaitingRoom::BehindFiles(scheduler::WaitLimits call) {
  call.places = &behind_files_;
  return call;
}

template <typename Wait>
absl::Status WaitingRoom::Run(const scheduler::WaitLimits& call, Wait&& wait) {
  if (closed_.load()) return SentAway();
  struct Place {
    std::atomic<int64_t>& waiting;
    const int64_t taken = waiting.fetch_add(1);
    ~Place() { waiting.fetch_sub(1); }
  } place{waiting_};
  if (place.taken >= max_calls_) {
    return MakeError(ErrorReason::kQueueFull,
                     absl::StrCat("the call came before its step: expected at most ", max_calls_,
                                  " calls that wait for a step (max_waiting_calls), and that many do; try again"),
                     {{"limit", "max_waiting_calls"}, {"maximum", absl::StrCat(max_calls_)}, {kRetryAfterMsKey, "500"}});
  }
  const scheduler::WaitLimits limits = {std::min(call.deadline, observability::MonotonicNow() + max_wait_), [this, &call] {
                                          return closed_.load() || (call.cancelled != nullptr && call.cancelled());
                                        }};
  const absl::Status status = wait(limits);
  if (HasReason(status, ErrorReason::kCancelled) && closed_.load()) return SentAway();
  if (observability::MonotonicNow() < call.deadline) return status;
  return MakeError(ErrorReason::kDeadlineExceeded, "the call's deadline passed while it waited for its step; nothing was changed");
}

absl::Status WaitingRoom::AwaitStep(heads::Head& head, const heads::StepKey& key, const scheduler::WaitLimits& call) {
  const std::optional<int64_t> open_step = head.Describe().open_step;
  if (!open_step.has_value() || *open_step != key.step - 1) return absl::OkStatus();
  return Run(call, [&](const scheduler::WaitLimits& limits) { return head.AwaitStep(key, limits); });
}

absl::Status WaitingRoom::AwaitTurn(const heads::Head& head, const heads::StepKey& key, int64_t micro_batch,
                                    const scheduler::WaitLimits& call) {
  if (head.HasItsTurn(key, micro_batch)) return absl::OkStatus();
  return Run(call, [&](const scheduler::WaitLimits& limits) { return head.AwaitTurn(key, micro_batch, limits); });
}

absl::StatusOr<heads::SealReply> WaitingRoom::Seal(heads::Head& head, const heads::StepKey& key,
                                                   const heads::ExpectedMicroBatches& expected, const scheduler::WaitLimits& call) {
  const scheduler::WaitLimits behind_files = BehindFiles(call);
  absl::StatusOr<heads::SealReply> reply = head.Seal(key, expected, {}, behind_files);
  if (reply.ok() || !MayStillCome(head, key, reply.status())) return reply;
  const absl::Status waited = Run(call, [&](const scheduler::WaitLimits& limits) {
    const absl::Time end = std::min(limits.deadline, transport::WaitEnd(observability::MonotonicNow(), call.deadline));
    reply = head.Seal(key, expected, {end, limits.cancelled}, behind_files);
    return reply.status();
  });
  if (reply.ok()) return reply;
  return waited;
}

}  // namespace headwater::service
