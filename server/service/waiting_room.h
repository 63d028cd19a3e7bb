// WaitingRoom: calls that came before their turn. A call for the step after the open one waits until that is open, a seal may
// wait for its micro-batches, and what is added in order for its turn: bounded in number and in time, and sent away as soon as the
// server drains. Calls behind others that keep their head for long have places of their own. Thread-safe.
#ifndef HEADWATER_SERVER_SERVICE_WAITING_ROOM_H_
#define HEADWATER_SERVER_SERVICE_WAITING_ROOM_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/heads/head.h"
#include "server/scheduler/wait_limits.h"

namespace headwater::service {

// A bounded number of calls that keep a thread. Thread-safe.
class CallPlaces final : public scheduler::WaitPlaces {
 public:
  // `what` the calls do, `limit` that bounds them to `most`, and how that is said.
  CallPlaces(std::string what, int64_t most, std::string limit, std::string bound)
      : what_(std::move(what)), most_(most), limit_(std::move(limit)), bound_(std::move(bound)) {}

  // kQueueFull, with `limit` and `retryAfterMs`.
  absl::Status Take() override;
  void GiveBack() override { taken_.fetch_sub(1); }
  int64_t taken() const { return taken_.load(); }

 private:
  const std::string what_;
  const int64_t most_;
  const std::string limit_;
  const std::string bound_;
  std::atomic<int64_t> taken_{0};
};

class WaitingRoom {
 public:
  // At most `max_calls` (>= 0) wait, each for at most `max_wait`, whatever its deadline. By the steady clock, like the calls'
  // limits. As many wait behind files, for as long as those take, but at most a quarter of `max_threads`: each keeps one, and
  // others need some.
  WaitingRoom(int64_t max_calls, absl::Duration max_wait, int64_t max_threads);

  // Waits until the step is open if it is the head's open step + 1. `call` bounds the wait further. kQueueFull (with
  // `retryAfterMs`), kDraining, kCancelled, kDeadlineExceeded. OK as well when `max_wait` has passed, or when there is nothing to
  // wait for: the call itself then answers what there is to say about the step.
  absl::Status AwaitStep(heads::Head& head, const heads::StepKey& key, const scheduler::WaitLimits& call);

  // Waits until nothing is missing before the micro-batch, in deterministic mode (Head::AwaitTurn()). Likewise.
  absl::Status AwaitTurn(const heads::Head& head, const heads::StepKey& key, int64_t micro_batch,
                         const scheduler::WaitLimits& call);

  // Limits of a call on a head that may be being saved, set, created or deleted: those of `call`, and a place here while it waits
  // for that. However long it takes: it goes on when the server drains, as the call does that it waits for.
  scheduler::WaitLimits BehindFiles(scheduler::WaitLimits call);
  // Places for calls that read weights from files.
  CallPlaces& loads() { return loads_; }

  // Head::Seal() that waits for micro-batches that are missing or undecided, as long as the step takes some. Errors as above and
  // Seal()'s; when `max_wait` has passed, or shortly before the call's deadline (answer_time.h), what is still missing.
  absl::StatusOr<heads::SealReply> Seal(heads::Head& head, const heads::StepKey& key, const heads::ExpectedMicroBatches& expected,
                                        const scheduler::WaitLimits& call);

  // Sends away those that wait, and all that come later (kDraining).
  void Close() { closed_.store(true); }
  int64_t size() const { return waiting_.load() + behind_files_.taken(); }

 private:
  // Runs `wait(limits)` as one that waits, and returns its status unless the call's own deadline has passed or the server drains.
  template <typename Wait>
  absl::Status Run(const scheduler::WaitLimits& call, Wait&& wait);

  const int64_t max_calls_;
  const absl::Duration max_wait_;
  CallPlaces behind_files_;
  CallPlaces loads_;
  std::atomic<int64_t> waiting_{0};
  std::atomic<bool> closed_{false};
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_WAITING_ROOM_H_
