// LoggedCall: a call as the replay log keeps it, with everything that it needs to be made again.
#ifndef HEADWATER_CLIENT_CORE_REPLAY_LOGGED_CALL_H_
#define HEADWATER_CLIENT_CORE_REPLAY_LOGGED_CALL_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/core/call/exchange.h"
#include "client/core/link/wait.h"
#include "client/core/replay/head_state.h"

namespace headwater::client::internal {

class Core;

struct LoggedCall {
  const Method* method = nullptr;
  std::unique_ptr<google::protobuf::Message> message{};
  CallMemory memory{};
  std::vector<Bytes> copies{};  // of the rows that `memory` shows
  int64_t bytes = 0;            // of all of it
};

// The rows stay the caller's only until its call has ended. RESOURCE_EXHAUSTED, or why rows could not be copied from a device.
absl::StatusOr<std::shared_ptr<const LoggedCall>> CopyForLog(Core& core, const Method& method,
                                                             const google::protobuf::Message& message, const CallMemory& memory);

// Makes the call again, with the epochs of `heads`; blocks no longer than `wait`.
absl::Status CallAgain(Core& core, const LoggedCall& call, const HeadUses& heads, const Wait& wait);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_REPLAY_LOGGED_CALL_H_
