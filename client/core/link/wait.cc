#include "client/core/link/wait.h"

#include <chrono>
#include <condition_variable>
#include <mutex>

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

void Wait::Pause(std::chrono::nanoseconds delay) const {
  std::mutex mutex;
  std::condition_variable_any never;
  std::unique_lock<std::mutex> lock(mutex);
  never.wait_for(lock, cancel, delay, [] { return false; });
}

}  // namespace headwater::client::internal
