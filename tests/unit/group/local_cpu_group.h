// A group of CPU engines on threads of this process.
#ifndef HEADWATER_TESTS_UNIT_GROUP_LOCAL_CPU_GROUP_H_
#define HEADWATER_TESTS_UNIT_GROUP_LOCAL_CPU_GROUP_H_

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "headwater/kernels/communicator.h"
#include "headwater/kernels/machine_limits.h"
#include "server/group/group_engine.h"

namespace headwater::testing {

// options.shard_count ranks, which share the memory budget and the threads. Fails as CreateCpuEngine().
inline absl::StatusOr<std::unique_ptr<LossEngine>> CreateLocalCpuGroup(const EngineOptions& options) {
  const int32_t world_size = options.shard_count;
  if (world_size < 1) return CreateCpuEngine(options);  // which refuses it
  EngineOptions one = options;
  const int32_t threads = options.thread_count > 0 ? options.thread_count : ComputeThreads();
  if (options.thread_count >= 0) one.thread_count = std::max(1, threads / world_size);
  if (options.memory_budget_bytes > 0) one.memory_budget_bytes = std::max<int64_t>(options.memory_budget_bytes / world_size, 1);
  std::vector<group::Rank> ranks;
  auto communicators = MakeInProcessCommunicators(world_size);
  EngineOptions filled;
  for (int32_t rank = 0; rank < world_size; ++rank) {
    one.group.rank = rank;
    one.group.world_size = world_size;
    one.group.communicator = std::move(communicators[static_cast<size_t>(rank)]);
    one.group.shared_views = true;
    absl::StatusOr<std::unique_ptr<LossEngine>> engine = CreateCpuEngine(one);
    if (!engine.ok()) return engine.status();
    if (rank == 0) filled = (*engine)->options();
    ranks.push_back(group::MakeLocalRank(*std::move(engine)));
  }
  filled.group = EngineGroup();
  filled.thread_count = std::max(filled.thread_count * world_size, options.thread_count);
  auto engine = std::make_unique<group::GroupEngine>("cpu", filled);
  engine->Form(std::move(ranks));
  return std::unique_ptr<LossEngine>(std::move(engine));
}

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_UNIT_GROUP_LOCAL_CPU_GROUP_H_
