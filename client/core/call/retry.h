// Whether, and when, a failed call is made again.
#ifndef HEADWATER_CLIENT_CORE_CALL_RETRY_H_
#define HEADWATER_CLIENT_CORE_CALL_RETRY_H_

#include <algorithm>
#include <chrono>
#include <optional>

#include "absl/status/status.h"
#include "client/core/link/channel.h"
#include "headwater/client/future.h"
#include "headwater/client/options.h"

namespace headwater::client::internal {

// The effect of executing a call a second time.
enum class Repeat {
  kSafe,              // none: reads, and calls that the server recognises
  kUntilSent,         // safe until the last byte is on its way
  kIfNothingWasDone,  // another effect: repeated only if the answer says that nothing was done
};

// The repetitions of one call. Not thread-safe.
class RetryState {
 public:
  // `awaits_server`: wait for an absent server until shortly before the deadline, at most a second at a time, by a separate
  // back-off. A server is absent if it cannot be reached, cuts the call off, says DRAINING or STARTING, or announces its restart.
  // The policy's attempts and waits are spent only on answers of the server.
  RetryState(const RetryPolicy& policy, Deadline deadline, Repeat repeat, bool awaits_server = false)
      : policy_(policy),
        deadline_(deadline),
        repeat_(repeat),
        awaits_server_(awaits_server),
        backoff_(Bounded(policy.initial_backoff)),
        away_backoff_(backoff_) {}

  // To be called after each failure: how long to wait before the next attempt, or nothing if the failure is final.
  std::optional<std::chrono::nanoseconds> AfterFailure(const absl::Status& status);

  Deadline deadline() const { return deadline_; }
  // How often the server was away since it last answered.
  int away_count() const { return away_count_; }

 private:
  bool MayRepeat(const absl::Status& status) const;
  // In nanoseconds, of which a long backoff has more than fit: no deadline is as far away as the longest time-out.
  static std::chrono::nanoseconds Bounded(std::chrono::milliseconds backoff) {
    return std::min<std::chrono::milliseconds>(backoff, kLongestTimeout);
  }

  const RetryPolicy policy_;
  const Deadline deadline_;
  const Repeat repeat_;
  const bool awaits_server_;
  int away_count_ = 0;
  int failures_ = 0;          // without those of an absent server that is waited for
  bool answer_lost_ = false;  // an attempt may still be running on the server
  std::chrono::nanoseconds backoff_, away_backoff_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_CALL_RETRY_H_
