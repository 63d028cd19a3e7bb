// Going on after the server was started again.
#ifndef HEADWATER_CLIENT_CORE_REPLAY_RECOVERY_H_
#define HEADWATER_CLIENT_CORE_REPLAY_RECOVERY_H_

#include <string>

#include "absl/status/status.h"
#include "client/core/link/wait.h"
#include "client/core/replay/head_state.h"
#include "client/core/replay/replay_log.h"

namespace headwater::client::internal {

class Core;

// How often one call follows a server that goes down again and again.
constexpr int kMaxRecoveries = 8;

// Whether `status` may mean that the server was started again and the log helps: STEP_LOST, or EPOCH_FENCED where another trainer
// has taken the head already (Recover() finds out whether that is so).
bool MayRecover(const ReplayLog& log, const absl::Status& status);

// Takes the heads that a call with `heads` found lost (or joins the trainer of the same run that took them first) and repeats what
// this client had contributed to their open steps. OK: make the call again, at the new epochs. Otherwise `cause`, with what stood
// in the way: the server is the same process, another run has taken a head since, a head came back at a step that this log does not
// hold, or a repetition failed; then the heads keep their stale epochs, so that nothing is lost unnoticed.
//
// Blocks, no longer than `wait`: a recovery that ends with its call (EndedInRecovery()) opens the gate, and one of the calls that
// wait for it begins anew; what was repeated already adds nothing a second time. `gate` is open when this returns.
absl::Status Recover(Core& core, ReplayLog::Gate gate, const HeadUses& heads, const absl::Status& cause, const Wait& wait);

// Whether somebody else has recovered one of these heads since a call with them failed.
bool IsRecovered(const HeadUses& heads);

// `cause` with a sentence why it could not be helped, which its metadata have as `noReplay`; `trainerStep` is the step of `heads`,
// if they are at one.
absl::Status StillLost(const absl::Status& cause, const HeadUses& heads, const std::string& why);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_REPLAY_RECOVERY_H_
