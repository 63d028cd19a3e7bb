// The suite's engine: GroupEngine over CPU ranks, on threads of this process, or behind links as in other processes if the
// environment has HEADWATER_GROUP_LINKS. Where a test does not say how many shards it wants, there are two. With
// HEADWATER_GROUP_ROWS all heads are replicas (Parallelism::kRows).
#include <cstdlib>

#include "headwater/kernels/product_rate.h"
#include "tests/kernels/support/kernel_suite.h"
#include "tests/unit/group/local_cpu_group.h"
#include "tests/unit/group/replica_engine.h"
#include "tests/unit/group/worker_threads.h"

namespace headwater::testing {
namespace {

absl::StatusOr<std::unique_ptr<LossEngine>> MakeGroup(const EngineOptions& options) {
  const bool links = std::getenv("HEADWATER_GROUP_LINKS") != nullptr && options.shard_count > 1;
  if (!links || options.shard_probe != nullptr) return CreateLocalCpuGroup(options);  // a probe goes into no other process
  auto group = ThreadedGroup::Create(options);
  if (!group.ok()) return group.status();
  return std::unique_ptr<LossEngine>(*std::move(group));
}

}  // namespace

const SuiteEngine& Suite() {
  static const SuiteEngine engine = {
      .make = [](EngineOptions options) -> absl::StatusOr<std::unique_ptr<LossEngine>> {
        if (options.shard_count == 1 && options.shard_probe == nullptr && options.shard_weights.empty()) options.shard_count = 2;
        auto group = MakeGroup(options);
        if (!group.ok() || std::getenv("HEADWATER_GROUP_ROWS") == nullptr) return group;
        return std::unique_ptr<LossEngine>(std::make_unique<ReplicaEngine>(*std::move(group)));
      },
      .dither = {.rounds_units = ChooseBfloat16Products(EngineOptions{.group = {.world_size = 2}}) == Bfloat16Products::kOneDnn}};
  return engine;
}

}  // namespace headwater::testing
