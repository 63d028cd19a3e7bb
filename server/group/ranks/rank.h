// Rank: an engine of a group as the leader holds it, in this process or in another one.
//
// headwater/kernels/engine.h, "Groups", says how calls differ on a rank, and which ranges of tensors it takes. The leader makes one
// call of a rank at a time; those that all ranks get, in the group's order.
#ifndef HEADWATER_SERVER_GROUP_RANKS_RANK_H_
#define HEADWATER_SERVER_GROUP_RANKS_RANK_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "headwater/kernels/engine.h"

namespace headwater::group {

// How a rank has spent its time in calls so far. The first rank's waiting includes that for the caller's rows and decision, that of
// the others the leader's.
struct RankTimes {
  absl::Duration computing;
  absl::Duration waiting;        // for other ranks to come to a collective, for rows, for a decision
  absl::Duration communicating;  // in collectives, once all ranks were there
};

struct Rank {
  std::unique_ptr<LossEngine> engine;
  bool is_remote = false;  // in another process: it writes to no memory of this one, unless it computes alone
  // Makes the call that is in progress, and all later ones, fail. Idempotent. Any thread, like the next.
  std::function<void(const absl::Status& reason)> abort;
  // As far as it is known here, give or take what passes while one looks.
  std::function<RankTimes()> times;
};

// A rank of this process. `engine` was made with EngineOptions::group, and has no observer yet. Waiting for a device counts as
// computing: times are exact for engines whose ranks meet by the communicator alone.
Rank MakeLocalRank(std::unique_ptr<LossEngine> engine);

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_RANKS_RANK_H_
