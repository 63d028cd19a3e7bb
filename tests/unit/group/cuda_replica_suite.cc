// The replicas' suite on GPUs: the engine that a server with several of them drives. Skipped where there are fewer.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/engine.h"
#include "server/group/group_engine.h"
#include "tests/kernels/cuda/cuda_group.h"
#include "tests/kernels/cuda/cuda_group_heads.h"
#include "tests/kernels/cuda/cuda_support.h"
#include "tests/kernels/support/replica_suite.h"

namespace headwater::testing {
namespace {

std::vector<ReplicaCase> Cases() {
  std::vector<ReplicaCase> cases;
  for (const GroupCase& of_ranks : GroupCases()) {
    ReplicaCase of = {.name = of_ranks.name, .weights = of_ranks.weights, .other_weights = of_ranks.weights};
    std::reverse(of.other_weights.begin(), of.other_weights.end());
    of.last_weights = {2, 1};
    of.make_group = [](const std::vector<int64_t>& weights) {
      EngineOptions options = PlainOptions();
      options.shard_count = static_cast<int32_t>(weights.size());
      options.shard_weights = weights;
      auto group = group::CreateLocalCudaGroup(options);
      CheckStatus(group.status(), "CreateLocalCudaGroup");
      return *std::move(group);
    };
    of.make_one = [] { return MakeCudaEngine(PlainOptions()); };
    of.reason_to_skip = [ranks = of_ranks.world_size()] { return ReasonForNoGroup(ranks); };
    cases.push_back(std::move(of));
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Ranks, Replicas, ::testing::ValuesIn(Cases()), [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace headwater::testing
