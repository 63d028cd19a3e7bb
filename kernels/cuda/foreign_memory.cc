#include "kernels/cuda/foreign_memory.h"

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "headwater/kernels/error.h"
#include "kernels/cuda/driver_entry.h"
#include "kernels/cuda/held_memory.h"

namespace headwater::cuda {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kEventPatience(30);
// Work is mostly done, or nearly, when its event is named.
constexpr std::chrono::microseconds kBusyWait(200);
constexpr std::chrono::microseconds kPause(25);

class ForeignEvent final : public DeviceEvent {
 public:
  explicit ForeignEvent(std::shared_ptr<EngineCore> core) : core_(std::move(core)) {}
  ForeignEvent(const ForeignEvent&) = delete;
  ForeignEvent& operator=(const ForeignEvent&) = delete;
  ~ForeignEvent() override {
    core_->MakeCurrent();
    if (event_ != nullptr) static_cast<void>(cudaEventDestroy(event_));
    // Returns at once; pending work of the stream keeps it in being.
    if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
    static_cast<void>(cudaGetLastError());
  }

  cudaError_t Open(const cudaIpcEventHandle_t& handle) {
    const cudaError_t error = cudaIpcOpenEventHandle(&event_, handle);
    return error == cudaSuccess ? cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) : error;
  }

  const EngineCore* core() const { return core_.get(); }

  absl::Status Await() const {
    core_->MakeCurrent();
    // A copy of the event's present work: the other process may record it again, for later work, at any time.
    cudaEvent_t now = nullptr;
    HEADWATER_RETURN_IF_ERROR(core_->Check(cudaEventCreateWithFlags(&now, cudaEventDisableTiming), "making an event"));
    absl::Status status = core_->Check(cudaStreamWaitEvent(stream_, event_, 0), "waiting for another process's event");
    if (status.ok()) status = core_->Check(cudaEventRecord(now, stream_), "waiting for another process's event");
    if (status.ok()) status = AwaitLocal(now);
    static_cast<void>(cudaEventDestroy(now));
    return status;
  }

 private:
  absl::Status AwaitLocal(cudaEvent_t now) const {
    const Clock::time_point start = Clock::now();
    while (true) {
      const cudaError_t error = cudaEventQuery(now);
      if (error != cudaErrorNotReady) return core_->Check(error, "waiting for another process's event");
      const Clock::duration waited = Clock::now() - start;
      if (waited > kEventPatience) break;
      if (waited > kBusyWait) std::this_thread::sleep_for(kPause);
    }
    return MakeError(ErrorReason::kDeadlineExceeded,
                     "the work before the event did not end within " + std::to_string(kEventPatience.count()) + " s",
                     {{"field", "after"}});
  }

  const std::shared_ptr<EngineCore> core_;
  cudaEvent_t event_ = nullptr;
  cudaStream_t stream_ = nullptr;  // waits for the event, and for nothing else
};

class ForeignRegion final : public DeviceRegion {
 public:
  ForeignRegion(std::shared_ptr<EngineCore> core, void* data, int64_t bytes)
      : core_(core), memory_(std::move(core), data, bytes, &cudaIpcCloseMemHandle) {
    // The handle does not name the GPU of the memory; with a single GPU it is that one.
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) static_cast<void>(cudaGetLastError());
    is_noted_ = devices != 1;
    if (is_noted_) core_->NoteForeign(data, bytes);
  }
  ForeignRegion(const ForeignRegion&) = delete;
  ForeignRegion& operator=(const ForeignRegion&) = delete;
  ~ForeignRegion() override {
    if (is_noted_) core_->ForgetForeign(memory_.data());
  }
  void* data() const override { return memory_.data(); }
  int64_t bytes() const override { return memory_.bytes(); }

 private:
  const std::shared_ptr<EngineCore> core_;
  const HeldMemory<DeviceRegion> memory_;
  bool is_noted_ = false;
};

absl::Status CannotOpen(EngineCore& core, cudaError_t error, const char* field, const char* what) {
  static_cast<void>(core.Check(error, what));
  HEADWATER_RETURN_IF_ERROR(core.health());
  return MakeError(
      ErrorReason::kInvalidField,
      std::string(field) + " cannot be opened here (" + cudaGetErrorName(error) + ": " + cudaGetErrorString(error) +
          "); it must come from a living process on this host, of a GPU that this process sees too, and both must share "
          "their namespaces of processes",
      {{"field", field}, {"cudaError", cudaGetErrorName(error)}});
}

// Bytes from `data` to the end of its allocation; 0 if the driver does not say.
int64_t BytesBehind(const void* data) {
  using AddressRange = int (*)(unsigned long long* base, size_t* bytes, unsigned long long pointer);  // cuMemGetAddressRange_v2
  void* entry = nullptr;
  if (FindDriverEntry("cuMemGetAddressRange", &entry) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  unsigned long long base = 0;
  size_t bytes = 0;
  const auto address = static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(data));
  if (reinterpret_cast<AddressRange>(entry)(&base, &bytes, address) != 0) return 0;
  return static_cast<int64_t>(base + bytes - address);
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceRegion>> OpenForeignMemory(std::shared_ptr<EngineCore> core, const DeviceHandle& handle,
                                                                int64_t bytes) {
  HEADWATER_RETURN_IF_ERROR(core->health());
  core->MakeCurrent();
  cudaIpcMemHandle_t ipc;
  static_assert(sizeof(ipc) == sizeof(handle), "a handle of CUDA");
  std::memcpy(&ipc, handle.data(), sizeof(ipc));
  void* data = nullptr;
  const cudaError_t error = cudaIpcOpenMemHandle(&data, ipc, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) return CannotOpen(*core, error, "cuda_ipc_handle", "opening another process's memory");
  auto region = std::make_unique<ForeignRegion>(core, data, bytes);
  const int64_t there = BytesBehind(data);
  if (there < bytes) {
    return MakeError(ErrorReason::kInvalidField,
                     "the allocation behind cuda_ipc_handle has " + std::to_string(there) + " bytes, expected " +
                         std::to_string(bytes) + " at least",
                     {{"field", "cuda_ipc_handle"}, {"expected", std::to_string(bytes)}, {"actual", std::to_string(there)}});
  }
  return std::unique_ptr<DeviceRegion>(std::move(region));
}

absl::StatusOr<std::unique_ptr<DeviceEvent>> OpenForeignEvent(std::shared_ptr<EngineCore> core, const DeviceHandle& handle) {
  HEADWATER_RETURN_IF_ERROR(core->health());
  core->MakeCurrent();
  cudaIpcEventHandle_t ipc;
  static_assert(sizeof(ipc) == sizeof(handle), "a handle of CUDA");
  std::memcpy(&ipc, handle.data(), sizeof(ipc));
  auto event = std::make_unique<ForeignEvent>(core);
  const cudaError_t error = event->Open(ipc);
  if (error != cudaSuccess) return CannotOpen(*core, error, "cuda_event_handle", "opening another process's event");
  return std::unique_ptr<DeviceEvent>(std::move(event));
}

absl::Status AwaitEvent(const EngineCore& core, const DeviceEvent* event) {
  if (event == nullptr) return absl::OkStatus();
  const auto* own = dynamic_cast<const ForeignEvent*>(event);
  if (own == nullptr || own->core() != &core) {
    return MakeError(ErrorReason::kInvalidField, "after is an event of another engine", {{"field", "after"}});
  }
  return own->Await();
}

}  // namespace headwater::cuda
