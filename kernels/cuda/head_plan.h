// What a head takes on the device.
#ifndef HEADWATER_KERNELS_CUDA_HEAD_PLAN_H_
#define HEADWATER_KERNELS_CUDA_HEAD_PLAN_H_

#include <cstdint>
#include <vector>

#include "headwater/kernels/engine.h"
#include "kernels/core/shard_layout.h"

namespace headwater::cuda {

struct HeadPlan {
  MemoryPlan memory;             // "workspace" is the engine's, shared by its heads
  std::vector<RowRange> shards;  // one for each of the engine's shards; may be empty
  int64_t own_bytes = 0;         // memory.total_bytes without the workspace
  int64_t workspace_bytes = 0;   // cuBLASLt's part included
};

// `options` with all defaults filled in; `spec` valid. Saturates.
HeadPlan PlanHeadOnCuda(const HeadSpec& spec, const EngineOptions& options);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_HEAD_PLAN_H_
