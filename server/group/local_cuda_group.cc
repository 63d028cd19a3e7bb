#include "server/group/local_cuda_group.h"

#include <string>
#include <utility>
#include <vector>

#include "headwater/kernels/communicator.h"
#include "headwater/kernels/device_group_id.h"
#include "server/group/engines_together.h"
#include "server/group/group_engine.h"
#include "server/group/ranks/rank.h"

namespace headwater::group {

absl::StatusOr<std::unique_ptr<LossEngine>> CreateLocalCudaGroup(const EngineOptions& options) {
  const absl::StatusOr<std::string> id = MakeCudaGroupId();
  if (!id.ok()) return id.status();
  const size_t world_size = static_cast<size_t>(options.shard_count);
  auto communicators = MakeInProcessCommunicators(options.shard_count);
  std::vector<EngineOptions> options_of_ranks(world_size, options);
  for (size_t rank = 0; rank < world_size; ++rank) {
    EngineOptions& one = options_of_ranks[rank];
    one.device_index = options.device_index + static_cast<int32_t>(rank);
    one.group.rank = static_cast<int32_t>(rank);
    one.group.world_size = options.shard_count;
    one.group.communicator = std::move(communicators[rank]);
    one.group.device_group_id = *id;
    one.group.shared_views = true;
  }
  std::vector<std::unique_ptr<LossEngine>> engines;
  const FirstFailure failure = MakeEnginesTogether(
      options_of_ranks, CreateCudaEngine, [] { return false; }, &engines);
  if (!failure.status.ok()) return failure.status;
  EngineOptions filled = engines.front()->options();
  filled.group = EngineGroup();
  const std::string name = engines.front()->name();
  std::vector<Rank> ranks;
  for (std::unique_ptr<LossEngine>& engine : engines) ranks.push_back(MakeLocalRank(std::move(engine)));
  auto group = std::make_unique<GroupEngine>(name, filled);
  group->Form(std::move(ranks));
  return std::unique_ptr<LossEngine>(std::move(group));
}

}  // namespace headwater::group
