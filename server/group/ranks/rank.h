// Rank: an engine of a group from the leader's view, in this process or in another one.
//
// headwater/kernels/engine.h, "Groups", defines calls on a rank and the ranges of tensors that it takes. The leader makes one call
// of a rank at a time, and calls on all ranks in the group's order.
#ifndef HEADWATER_SERVER_GROUP_RANKS_RANK_H_
#define HEADWATER_SERVER_GROUP_RANKS_RANK_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "headwater/kernels/engine.h"
#include "server/group/ranks/rank_link.h"

namespace headwater::group {

// A rank's times in calls so far. The first rank's waiting includes waiting for the caller's rows and decision; the others'
// includes waiting for the leader's.
struct RankTimes {
  absl::Duration computing;
  absl::Duration waiting;        // for other ranks to come to a collective, for rows, for a decision
  absl::Duration communicating;  // in collectives, once all ranks were there
};

struct Rank {
  std::unique_ptr<LossEngine> engine;
  bool is_remote = false;  // in another process: writes only its own memory, unless it computes alone
  // Makes the call in progress, and all later ones, fail. Idempotent. Any thread, like the next.
  std::function<void(const absl::Status& reason)> abort;
  // The times as known here; approximate while a call is in progress.
  std::function<RankTimes()> times;
};

// A rank of this process. `engine` was made with EngineOptions::group, and has no observer yet. Waiting for a device counts as
// computing: times are exact for engines whose ranks meet by the communicator alone.
Rank MakeLocalRank(std::unique_ptr<LossEngine> engine);

// The rank of a worker that is ready. `options`: the worker's engine's. health() fails after `silence_timeout` without a message.
// Silence is counted in looks of at most a second each: a leader that was stopped for a while has not heard its workers either.
// `shares_rows`: rows of micro-batches that all ranks compute reach the worker by another rank of its process.
Rank MakeRemoteRank(EngineOptions options, EngineDevice device, std::shared_ptr<RankLink> link, absl::Duration silence_timeout,
                    bool shares_rows);

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_RANKS_RANK_H_
