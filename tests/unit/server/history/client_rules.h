// What a simulated trainer has of the real client: its rules of repetition and its replay log.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_CLIENT_RULES_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_CLIENT_RULES_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/core/call/retry.h"
#include "client/core/replay/replay_log.h"
#include "events.h"

namespace headwater::history {

using client::internal::RetryState;

// The repetitions of one call. `safe`: a second execution does the same as one.
RetryState RetriesOf(bool safe);
// What an attempt that failed with this reason tells them; empty: the connection broke.
absl::Status ToStatus(const std::string& reason);

// What a client repeats after the server's restart, of one head.
class ClientLog {
 public:
  explicit ClientLog(int64_t max_bytes) : log_(max_bytes, /*max_steps=*/0, /*on_open=*/[] {}) {}
  // A call of the head's step has succeeded.
  void Add(const Event& event);
  void StepIsOpen(int64_t step) { log_.StepIsOpen(head_, step); }
  void Forget();
  // What of the open step is to be made again, oldest first.
  std::vector<Event> Entries();
  // Nothing of this step was dropped for want of room.
  bool IsComplete(int64_t step) const { return head_->first_logged_step() <= step; }

 private:
  client::internal::ReplayLog log_;
  std::shared_ptr<client::internal::HeadState> head_ = std::make_shared<client::internal::HeadState>(v1::Head(), "");
  std::map<const client::internal::LoggedCall*, Event> events_;  // of what may be in the log
};

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_CLIENT_RULES_H_
