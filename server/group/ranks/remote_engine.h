// The engine of a rank in another process, behind the link by which its worker has joined.
#ifndef HEADWATER_SERVER_GROUP_RANKS_REMOTE_ENGINE_H_
#define HEADWATER_SERVER_GROUP_RANKS_REMOTE_ENGINE_H_

#include <memory>

#include "absl/time/time.h"
#include "server/group/ranks/rank.h"
#include "server/group/ranks/rank_link.h"

namespace headwater::group {

// The worker is ready. `options`: as the worker's engine has them. health() fails when nothing has come from the worker for
// `silence_timeout`, counted in looks of at most a second each: a leader that was stopped for a while has not heard its workers
// either. `shares_rows`: rows of micro-batches that all ranks compute come to the worker by another rank of its process.
Rank MakeRemoteRank(EngineOptions options, EngineDevice device, std::shared_ptr<RankLink> link, absl::Duration silence_timeout,
                    bool shares_rows);

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_RANKS_REMOTE_ENGINE_H_
