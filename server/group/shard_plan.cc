#include "server/group/shard_plan.h"

#include "kernels/core/shard_layout.h"

namespace headwater::group {

std::vector<VocabShard> PlanShards(const LossEngine& engine, int64_t vocab_size) {
  const std::vector<EngineDevice> devices = engine.devices();
  std::vector<VocabShard> shards;
  for (const RowRange& rows : SplitVocab(vocab_size, engine.options().shard_count, engine.options().shard_weights)) {
    // An engine has a device for each shard, or one for all.
    const size_t device = shards.size() < devices.size() ? shards.size() : 0;
    shards.push_back({rows.start, rows.end, devices.empty() ? "" : devices[device].name});
  }
  return shards;
}

}  // namespace headwater::group
