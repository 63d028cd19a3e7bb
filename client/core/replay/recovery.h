// Recovery: continuing after the server restarted.
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

// Whether `status` may mean that the server restarted and the log helps. That is STEP_LOST, or EPOCH_FENCED where another trainer
// has taken the head already (Recover() finds out).
bool MayRecover(const ReplayLog& log, const absl::Status& status);

// Takes the heads that a call with `heads` found lost and repeats this client's contributions to their open steps. If a trainer of
// the same run took them first, joins that trainer. OK: make the call again, at the new epochs. Otherwise returns `cause`, with the
// obstacle: the server is the same process, another run has since taken a head, or a repetition failed. A head that came back at a
// step that this log does not hold is an obstacle, too. The heads then keep their stale epochs, so that no loss goes unnoticed.
//
// Blocks at most for `wait`. A recovery that ends with its call (EndedInRecovery()) opens the gate, and one of the calls that wait
// for it restarts the recovery. Repeated contributions add nothing. `gate` is open when this returns.
absl::Status Recover(Core& core, ReplayLog::Gate gate, const HeadUses& heads, const absl::Status& cause, const Wait& wait);

// Whether another call has recovered one of these heads since a call with them failed.
bool IsRecovered(const HeadUses& heads);

// `cause` with a sentence why recovery failed, which its metadata hold as `noReplay`. `trainerStep` is the step of `heads`, if they
// share one.
absl::Status StillLost(const absl::Status& cause, const HeadUses& heads, const std::string& why);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_REPLAY_RECOVERY_H_
