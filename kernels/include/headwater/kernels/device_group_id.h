// The name of a new group of GPUs.
#ifndef HEADWATER_KERNELS_DEVICE_GROUP_ID_H_
#define HEADWATER_KERNELS_DEVICE_GROUP_ID_H_

#include <string>

#include "absl/status/statusor.h"

namespace headwater {

// A new EngineGroup::device_group_id, out of the module that CreateCudaEngine() loads: for one process, which hands it to all ranks
// of the group. Making the group's engines is collective then: each is made on a thread of its own, and waits for the others.
// kFeatureNotBuilt, saying why, if the module or NCCL is not there.
absl::StatusOr<std::string> MakeCudaGroupId();

}  // namespace headwater

#endif  // HEADWATER_KERNELS_DEVICE_GROUP_ID_H_
