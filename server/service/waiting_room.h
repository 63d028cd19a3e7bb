// WaitingRoom: calls that came before their turn. A call for the step after the open one waits until that is open, a seal may
// wait for its micro-batches, and what is added in order for its turn: bounded in number and in time, and sent away as soon as the
// server drains. Thread-safe.
#ifndef HEADWATER_SERVER_SERVICE_WAITING_ROOM_H_
#define HEADWATER_SERVER_SERVICE_WAITING_ROOM_H_

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/heads/head.h"

namespace headwater::service {

class WaitingRoom {
 public:
  // At most `max_calls` (>= 0) wait, each for at most `max_wait`, whatever its deadline.
  WaitingRoom(int64_t max_calls, absl::Duration max_wait) : max_calls_(max_calls), max_wait_(max_wait) {}

  // Waits until the step is open if it is the head's open step + 1. `call` bounds the wait further. kQueueFull (with
  // `retryAfterMs`), kDraining, kCancelled, kDeadlineExceeded. OK as well when `max_wait` has passed, or when there is nothing to
  // wait for: the call itself then answers what there is to say about the step.
  absl::Status AwaitStep(heads::Head& head, const heads::StepKey& key, const heads::WaitLimits& call);

  // Waits until nothing is missing before the micro-batch, in deterministic mode (Head::AwaitTurn()). Likewise.
  absl::Status AwaitTurn(const heads::Head& head, const heads::StepKey& key, int64_t micro_batch, const heads::WaitLimits& call);

  // Head::Seal() that waits for micro-batches that are missing or undecided. Errors as above and Seal()'s; when `max_wait` has
  // passed, or shortly before the call's deadline (answer_time.h), what is still missing.
  absl::StatusOr<heads::SealReply> Seal(heads::Head& head, const heads::StepKey& key, const heads::ExpectedMicroBatches& expected,
                                        const heads::WaitLimits& call);

  // Sends away those that wait, and all that come later (kDraining).
  void Close() { closed_.store(true); }
  int64_t size() const { return waiting_.load(); }

 private:
  // Runs `wait(limits)` as one that waits, and returns its status unless the call's own deadline has passed or the server drains.
  template <typename Wait>
  absl::Status Run(const heads::WaitLimits& call, Wait&& wait);

  const int64_t max_calls_;
  const absl::Duration max_wait_;
  std::atomic<int64_t> waiting_{0};
  std::atomic<bool> closed_{false};
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_WAITING_ROOM_H_
