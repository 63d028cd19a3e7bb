#include "client/core/link/wait.h"

#include <chrono>

#include "client/core/link/error.h"

namespace headwater::client::internal {

absl::Status Wait::Check() const {
  if (!cancel.stop_requested() && std::chrono::system_clock::now() < deadline) return absl::OkStatus();
  return Ended();
}

absl::Status Wait::Ended() const {
  if (cancel.stop_requested()) {
    return MakeLocalError(v1::ERROR_REASON_CANCELLED, absl::StatusCode::kCancelled, "the call was cancelled");
  }
  return MakeLocalError(v1::ERROR_REASON_DEADLINE_EXCEEDED, absl::StatusCode::kDeadlineExceeded,
                        "the deadline passed before the call could begin");
}

}  // namespace headwater::client::internal
