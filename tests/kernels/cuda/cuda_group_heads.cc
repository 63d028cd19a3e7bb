#include "tests/kernels/cuda/cuda_group_heads.h"

namespace headwater::testing {

EngineOptions PlainOptions() { return {.workspace_bytes = int64_t{256} << 20, .timed_search = false}; }

std::vector<GroupCase> GroupCases() {
  return {
      {"Two", {1, 1}}, {"TwoUneven", {5, 2}}, {"Three", {9, 1, 4}}, {"Four", {1, 1, 1, 1}}, {"Eight", {1, 1, 1, 1, 1, 1, 1, 1}}};
}

GroupHeads::GroupHeads(CudaGroup& group, const std::vector<TestHead>& heads) : ranks_(static_cast<size_t>(group.world_size())) {
  group.Run([&](int32_t rank) { ranks_[static_cast<size_t>(rank)] = std::make_unique<LoadedHeads>(group.engine(rank), heads); });
}

}  // namespace headwater::testing
