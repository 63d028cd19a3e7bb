// Going on after the server was started again.
#ifndef HEADWATER_CLIENT_SRC_RECOVERY_H_
#define HEADWATER_CLIENT_SRC_RECOVERY_H_

#include <functional>

#include "absl/status/status.h"
#include "client/cpp/src/channel.h"
#include "client/cpp/src/head_state.h"
#include "client/cpp/src/replay_log.h"

namespace headwater::client::internal {

class Connection;

// A call gives up when it has lost its step so often.
constexpr int kMaxRecoveries = 3;

// Whether `status` may mean that the server was started again and the log helps: STEP_LOST, or EPOCH_FENCED where another trainer
// has taken the head already (Recover() finds out whether that is so).
bool MayRecover(const ReplayLog& log, const absl::Status& status);

// Takes the heads that a call with `heads` found lost (or joins the trainer that took them first) and repeats what this client had
// contributed to their open steps. OK: make the call again, at the new epochs. Otherwise `cause`, with what stood in the way: the
// server is the same process, a head came back at a step that this log does not hold, or a repetition failed; then the heads keep
// their stale epochs, so that nothing is lost unnoticed. Blocks; gives up early once `cancelled` says so. One recovery runs at a
// time.
absl::Status Recover(Connection& connection, const HeadUses& heads, const absl::Status& cause, Deadline deadline,
                     const std::function<bool()>& cancelled);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_RECOVERY_H_
