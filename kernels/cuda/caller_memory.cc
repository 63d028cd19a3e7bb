#include "kernels/cuda/caller_memory.h"

#include <cuda_runtime_api.h>

#include <utility>

#include "headwater/kernels/error.h"
#include "kernels/cuda/held_memory.h"

namespace headwater::cuda {
namespace {

// A lost device is said to be lost; everything else is memory that cannot be had.
absl::Status NotLocked(EngineCore& core, cudaError_t error, const char* what, int64_t bytes) {
  const absl::Status status = core.Check(error, what);
  HEADWATER_RETURN_IF_ERROR(core.health());
  const std::string count = std::to_string(bytes);
  return MakeError(ErrorReason::kMemoryBudgetExceeded,
                   count + " bytes of host memory could not be page-locked: " + std::string(status.message()),
                   {{"requestedBytes", count}});
}

absl::Status Misplaced(const std::string& field, const char* expected, const char* actual) {
  const std::string name = field + ".memory";
  return MakeError(ErrorReason::kInvalidField, name + " says " + expected + ", and the memory is the " + actual + "'s",
                   {{"field", name}, {"expected", expected}, {"actual", actual}});
}

}  // namespace

absl::StatusOr<Place> PlaceOf(const void* data, MemorySpace memory, const EngineCore& core, const std::string& field) {
  const bool on_device = memory == MemorySpace::kDevice;
  if (data == nullptr) return on_device ? Place::kOwnDevice : Place::kPageable;
  if (core.IsForeign(data)) return on_device ? absl::StatusOr<Place>(Place::kForeignDevice) : Misplaced(field, "host", "device");
  cudaPointerAttributes attributes = {};
  if (cudaPointerGetAttributes(&attributes, data) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    attributes.type = cudaMemoryTypeUnregistered;
  }
  switch (attributes.type) {
    case cudaMemoryTypeManaged:
      return on_device ? Place::kOwnDevice : Place::kPageable;
    case cudaMemoryTypeDevice:
      if (!on_device) return Misplaced(field, "host", "device");
      return attributes.device == core.options().device_index ? Place::kOwnDevice : Place::kOtherDevice;
    case cudaMemoryTypeHost:
    case cudaMemoryTypeUnregistered:
      break;
  }
  if (on_device) return Misplaced(field, "device", "host");
  return attributes.type == cudaMemoryTypeHost ? Place::kPageLocked : Place::kPageable;
}

absl::Status CopyFromDevice(EngineCore& core, const RowsView& rows, void* out) {
  constexpr const char* kWhat = "copying rows from device memory";
  const absl::StatusOr<Place> place = PlaceOf(rows.data, rows.memory, core, "rows");
  if (!place.ok()) return place.status();
  const int64_t bytes = rows.row_count * rows.column_count * ElementBytes(rows.data_type);
  if (bytes == 0) return absl::OkStatus();
  cudaStream_t stream = nullptr;
  HEADWATER_RETURN_IF_ERROR(core.Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), kWhat));
  cudaError_t error = cudaMemcpyAsync(out, rows.data, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  static_cast<void>(cudaStreamDestroy(stream));
  return core.Check(error, kWhat);
}

absl::StatusOr<std::unique_ptr<HostMemory>> AllocatePageLocked(std::shared_ptr<EngineCore> core, int64_t bytes) {
  core->MakeCurrent();
  void* data = nullptr;
  const cudaError_t error = cudaHostAlloc(&data, static_cast<size_t>(bytes), cudaHostAllocPortable);
  if (error != cudaSuccess) return NotLocked(*core, error, "allocating page-locked memory", bytes);
  return std::unique_ptr<HostMemory>(std::make_unique<HeldMemory<HostMemory>>(std::move(core), data, bytes, &cudaFreeHost));
}

absl::StatusOr<std::unique_ptr<HostMemory>> RegisterPageLocked(std::shared_ptr<EngineCore> core, void* data, int64_t bytes) {
  core->MakeCurrent();
  const cudaError_t error = cudaHostRegister(data, static_cast<size_t>(bytes), cudaHostRegisterPortable);
  if (error != cudaSuccess) return NotLocked(*core, error, "page-locking memory", bytes);
  return std::unique_ptr<HostMemory>(std::make_unique<HeldMemory<HostMemory>>(std::move(core), data, bytes, &cudaHostUnregister));
}

}  // namespace headwater::cuda
