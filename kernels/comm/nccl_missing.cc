// Replaces nccl_communicator.cc in builds without NCCL's header.
#include "headwater/kernels/error.h"
#include "kernels/comm/device_communicator.h"

namespace headwater {
namespace {

absl::Status NotBuilt() {
  return MakeError(ErrorReason::kFeatureNotBuilt, "GPUs cannot work together here: this was built without NCCL",
                   {{"feature", "nccl"}});
}

}  // namespace

absl::StatusOr<std::string> MakeDeviceGroupId() { return NotBuilt(); }

absl::StatusOr<std::unique_ptr<DeviceCommunicator>> JoinDeviceGroup(int32_t, int32_t, const std::string&, int32_t,
                                                                    const std::function<absl::Status()>&) {
  return NotBuilt();
}

}  // namespace headwater
