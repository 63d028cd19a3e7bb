// The engine of a rank in another process, behind the link by which its worker has joined.
#ifndef HEADWATER_SERVER_GROUP_RANKS_REMOTE_ENGINE_H_
#define HEADWATER_SERVER_GROUP_RANKS_REMOTE_ENGINE_H_

#include <memory>

#include "absl/time/time.h"
#include "server/group/ranks/rank.h"
#include "server/group/ranks/rank_link.h"

namespace headwater::group {

// The rank of a worker that is ready. `options`: the worker's engine's. health() fails after `silence_timeout` without a message.
// Silence is counted in looks of at most a second each: a leader that was stopped for a while has not heard its workers either.
// `shares_rows`: rows of micro-batches that all ranks compute reach the worker by another rank of its process.
Rank MakeRemoteRank(EngineOptions options, EngineDevice device, std::shared_ptr<RankLink> link, absl::Duration silence_timeout,
                    bool shares_rows);

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_RANKS_REMOTE_ENGINE_H_
