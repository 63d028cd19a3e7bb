// Several GPUs of this process as one engine.
#ifndef HEADWATER_SERVER_GROUP_LOCAL_CUDA_GROUP_H_
#define HEADWATER_SERVER_GROUP_LOCAL_CUDA_GROUP_H_

#include <memory>

#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"

namespace headwater::group {

// A group of CUDA engines on threads of this process: options.shard_count (2 or more) ranks on consecutive GPUs from
// options.device_index. Each rank has the whole memory budget. Errors of CreateCudaEngine() and MakeCudaGroupId().
absl::StatusOr<std::unique_ptr<LossEngine>> CreateLocalCudaGroup(const EngineOptions& options);

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_LOCAL_CUDA_GROUP_H_
