// The replicas' suite on GPUs: the engine that a server with several of them drives. Skipped where there are fewer, unless ranks
// share one (cuda_group.h).
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "gtest/gtest.h"
#include "headwater/kernels/engine.h"
#include "server/group/engines_together.h"
#include "server/group/group_engine.h"
#include "server/group/ranks/rank.h"
#include "tests/kernels/cuda/cuda_group.h"
#include "tests/kernels/cuda/cuda_group_heads.h"
#include "tests/kernels/cuda/cuda_support.h"
#include "tests/kernels/support/replica_suite.h"

namespace headwater::testing {
namespace {

// CreateLocalCudaGroup(), but for its GPUs: all ranks are on the first.
std::unique_ptr<LossEngine> MakeGroupOnOneGpu(const EngineOptions& options) {
  absl::Mutex mutex;
  group::EnginesTogether made = group::MakeEnginesTogether(OptionsOfRanks(options, /*shared_views=*/true), nullptr,
                                                           CreateCudaEngine, {mutex, [] { return false; }});
  CheckStatus(made.failure.status, "MakeEnginesTogether");
  EngineOptions filled = made.engines.front()->options();
  filled.group = EngineGroup();
  auto group = std::make_unique<group::GroupEngine>(made.engines.front()->name(), filled);
  std::vector<group::Rank> ranks;
  for (std::unique_ptr<LossEngine>& engine : made.engines) ranks.push_back(group::MakeLocalRank(std::move(engine)));
  group->Form(std::move(ranks));
  return group;
}

std::unique_ptr<LossEngine> MakeGroup(const std::vector<int64_t>& weights, bool deterministic) {
  EngineOptions options = PlainOptions();
  options.shard_count = static_cast<int32_t>(weights.size());
  options.shard_weights = weights;
  options.deterministic = deterministic;
  return MakeCudaGroupEngine(options);
}

std::vector<ReplicaForm> EveryForm() {
  std::vector<ReplicaForm> forms;
  const ProblemOptions divergence = {.name = "Divergence",
                                     .bias = true,
                                     .jsd = true,
                                     .beta = 0.4,
                                     .hard_loss_weight = 0.3,
                                     .teacher_hidden_size = 23,
                                     .teacher_vocab_size = 90};
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    forms.emplace_back(WithType(CrossEntropyOptionCases().back(), type), ComputeOptions());
    forms.emplace_back(WithType(divergence, type), ComputeOptions());
  }
  const ComputeOptions plain = {.token_outputs = false};  // entropy and argmax are not had from exponentials
  for (const int64_t rows : {60, 400, 4500}) {
    const ProblemOptions exponentials = {
        .name = "Exponentials" + std::to_string(rows), .rows = rows, .vocab_size = 301, .hidden_size = 72, .bias = true};
    forms.emplace_back(WithType(exponentials, DataType::kBFloat16), plain);
  }
  return forms;
}

std::vector<ReplicaCase> Cases() {
  std::vector<ReplicaCase> cases;
  for (const GroupCase& of_ranks : GroupCases()) {
    ReplicaCase of = {.name = of_ranks.name, .weights = of_ranks.weights, .other_weights = of_ranks.weights};
    std::reverse(of.other_weights.begin(), of.other_weights.end());
    of.last_weights = {2, 1};
    of.make_group = MakeGroup;
    of.make_one = [] { return MakeCudaEngine(PlainOptions()); };
    of.reason_to_skip = [ranks = of_ranks.world_size()] { return ReasonForNoGroup(ranks); };
    of.forms = EveryForm();
    cases.push_back(std::move(of));
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Ranks, Replicas, ::testing::ValuesIn(Cases()), [](const auto& test) { return test.param.name; });

}  // namespace

std::unique_ptr<LossEngine> MakeCudaGroupEngine(const EngineOptions& options) {
  if (RanksShareGpu()) return MakeGroupOnOneGpu(options);
  auto group = group::CreateLocalCudaGroup(options);
  CheckStatus(group.status(), "CreateLocalCudaGroup");
  return *std::move(group);
}

}  // namespace headwater::testing
