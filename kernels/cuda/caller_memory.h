// Memory that callers hand over: where it is, and the page-locked memory that they get from the engine.
#ifndef HEADWATER_KERNELS_CUDA_CALLER_MEMORY_H_
#define HEADWATER_KERNELS_CUDA_CALLER_MEMORY_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "kernels/cuda/engine_core.h"

namespace headwater::cuda {

// kForeignDevice: another process's, of a GPU that may be another one. Kernels read and write it. Products read an operand several
// times and get a copy, because the link may have a tenth of the memory's rate.
enum class Place { kPageable, kPageLocked, kOwnDevice, kForeignDevice, kOtherDevice };

// Where a tensor is. kInvalidField, with `field` in the metadata, if the memory is of another kind than `memory` says. A kernel
// that reads host memory as the device's own would cost the whole engine. The engine's device is current.
absl::StatusOr<Place> PlaceOf(const void* data, MemorySpace memory, const EngineCore& core, const std::string& field);

// Copies rows of device memory to host memory, on a stream of its own, and waits for it. The engine's device is current.
absl::Status CopyFromDevice(EngineCore& core, const RowsView& rows, void* out);

// LossEngine's methods. Any thread.
absl::StatusOr<std::unique_ptr<HostMemory>> AllocatePageLocked(std::shared_ptr<EngineCore> core, int64_t bytes);
absl::StatusOr<std::unique_ptr<HostMemory>> RegisterPageLocked(std::shared_ptr<EngineCore> core, void* data, int64_t bytes);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_CALLER_MEMORY_H_
