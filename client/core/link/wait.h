// Wait: how long a step of a call may block.
#ifndef HEADWATER_CLIENT_CORE_LINK_WAIT_H_
#define HEADWATER_CLIENT_CORE_LINK_WAIT_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <stop_token>
#include <utility>

#include "absl/status/status.h"
#include "client/core/link/channel.h"

namespace headwater::client::internal {

// Until `deadline`, and no longer than until `cancel` is requested.
struct Wait {
  // Implicit, for steps that cannot be cancelled.
  Wait(Deadline until, std::stop_token cancelled_by = {}) : deadline(until), cancel(std::move(cancelled_by)) {}

  // Whether a step may begin: CANCELLED, DEADLINE_EXCEEDED.
  absl::Status Check() const;
  // The error of a wait that ended without its object: CANCELLED or DEADLINE_EXCEEDED.
  absl::Status Ended() const;

  Deadline deadline;
  std::stop_token cancel;
  bool is_background = false;  // Core::StopWaiting() ends it where a server is away
};

// The context of one blocking call that changes nothing on the server, or that may be made again: a cancelled wait cancels the
// call. (Where the server makes something, the call must continue without its waiters, because its answer describes the new
// object.)
class WaitingContext {
 public:
  explicit WaitingContext(const Wait& wait) : on_cancel_(wait.cancel, [this] { context_.TryCancel(); }) {
    context_.set_deadline(wait.deadline);
  }
  WaitingContext(const WaitingContext&) = delete;
  WaitingContext& operator=(const WaitingContext&) = delete;

  grpc::ClientContext* get() { return &context_; }

 private:
  grpc::ClientContext context_;
  const std::stop_callback<std::function<void()>> on_cancel_;  // goes first, and waits for its end
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_LINK_WAIT_H_
