// Device memory and events of other processes, by CUDA's interprocess handles.
#ifndef HEADWATER_KERNELS_CUDA_FOREIGN_MEMORY_H_
#define HEADWATER_KERNELS_CUDA_FOREIGN_MEMORY_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "kernels/cuda/engine_core.h"

namespace headwater::cuda {

// LossEngine's methods. Any thread.
absl::StatusOr<std::unique_ptr<DeviceRegion>> OpenForeignMemory(std::shared_ptr<EngineCore> core, const DeviceHandle& handle,
                                                                int64_t bytes);
absl::StatusOr<std::unique_ptr<DeviceEvent>> OpenForeignEvent(std::shared_ptr<EngineCore> core, const DeviceHandle& handle);

// Waits on the host, before the device is taken, until the event's work at the time of this call is done. If the other process
// hangs, no other caller waits with it. kInvalidField for an event that is not of this engine; kDeadlineExceeded if the work does
// not end within half a minute. Null: nothing to wait for.
absl::Status AwaitEvent(const EngineCore& core, const DeviceEvent* event);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_FOREIGN_MEMORY_H_
