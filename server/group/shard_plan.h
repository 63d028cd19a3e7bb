// PlanShards: plans the shards of a head before it is created.
#ifndef HEADWATER_SERVER_GROUP_SHARD_PLAN_H_
#define HEADWATER_SERVER_GROUP_SHARD_PLAN_H_

#include <cstdint>
#include <vector>

#include "headwater/kernels/engine.h"

namespace headwater::group {

// The shards of a head of `vocab_size` (>= 1) rows on `engine`, in the order of the rows, each with its device.
std::vector<VocabShard> PlanShards(const LossEngine& engine, int64_t vocab_size);

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_SHARD_PLAN_H_
