// CudaDriver: what the client needs of NVIDIA's driver, by dlopen() of libcuda.so.1, with prototypes of its own: the client is
// built without CUDA, and runs without it.
#ifndef HEADWATER_CLIENT_CORE_ROWS_MEMORY_CUDA_DRIVER_H_
#define HEADWATER_CLIENT_CORE_ROWS_MEMORY_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace headwater::client::internal {

// As cuda.h declares them, on 64-bit systems.
using CuResult = int;  // 0: success
using CuDevice = int;
using CuDevicePointer = unsigned long long;  // NOLINT: the driver's own type
inline CuDevicePointer ToDevice(const void* address) { return reinterpret_cast<uintptr_t>(address); }
using CuContext = struct CuContextTag*;
using CuStream = struct CuStreamTag*;
using CuEvent = struct CuEventTag*;
inline constexpr unsigned kCuEventDisableTiming = 2;  // of CUevent_flags
struct CuIpcHandle {                                  // CUipcMemHandle, CUipcEventHandle
  char reserved[64];
};

class CudaDriver {
 public:
  // Without any function: Get() has the real ones.
  CudaDriver() = default;
  // The driver of this process, initialized; loaded at the first call. FAILED_PRECONDITION, saying why, without one. Never goes.
  static absl::StatusOr<const CudaDriver*> Get();

  // OK, or INTERNAL with `what` and the driver's name of the error.
  absl::Status Check(CuResult result, const char* what) const;

  // What an address of device memory belongs to.
  struct Allocation {
    CuDevicePointer base = 0;
    int64_t bytes = 0;
    uint64_t buffer_id = 0;  // never the same for two allocations
    CuContext context = nullptr;
    bool exportable = false;  // by cuIpcGetMemHandle()
    const char* kind = "";    // why not, if it is not: what it is
  };
  // INVALID_ARGUMENT if the address is no device memory.
  absl::StatusOr<Allocation> Describe(const void* address) const;

  // Makes `context` current until the end of its scope.
  class Scope {
   public:
    Scope(const CudaDriver& driver, CuContext context);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    const absl::Status& status() const { return status_; }

   private:
    const CudaDriver& driver_;
    absl::Status status_;
  };

  // The driver's functions, by their names.
  CuResult (*Init)(unsigned flags) = nullptr;
  CuResult (*GetErrorName)(CuResult error, const char** name) = nullptr;
  CuResult (*CtxPushCurrent)(CuContext context) = nullptr;
  CuResult (*CtxPopCurrent)(CuContext* context) = nullptr;
  CuResult (*CtxGetDevice)(CuDevice* device) = nullptr;
  CuResult (*DevicePrimaryCtxGetState)(CuDevice device, unsigned* flags, int* active) = nullptr;
  CuResult (*DevicePrimaryCtxRetain)(CuContext* context, CuDevice device) = nullptr;
  CuResult (*DevicePrimaryCtxRelease)(CuDevice device) = nullptr;
  CuResult (*PointerGetAttribute)(void* data, int attribute, CuDevicePointer pointer) = nullptr;
  CuResult (*MemGetAddressRange)(CuDevicePointer* base, size_t* bytes, CuDevicePointer pointer) = nullptr;
  CuResult (*IpcGetMemHandle)(CuIpcHandle* handle, CuDevicePointer pointer) = nullptr;
  CuResult (*IpcGetEventHandle)(CuIpcHandle* handle, CuEvent event) = nullptr;
  CuResult (*EventCreate)(CuEvent* event, unsigned flags) = nullptr;
  CuResult (*EventDestroy)(CuEvent event) = nullptr;
  CuResult (*EventRecord)(CuEvent event, CuStream stream) = nullptr;
  CuResult (*EventSynchronize)(CuEvent event) = nullptr;
  CuResult (*StreamWaitEvent)(CuStream stream, CuEvent event, unsigned flags) = nullptr;
  CuResult (*StreamCreate)(CuStream* stream, unsigned flags) = nullptr;
  CuResult (*StreamDestroy)(CuStream stream) = nullptr;
  CuResult (*StreamSynchronize)(CuStream stream) = nullptr;
  CuResult (*MemAlloc)(CuDevicePointer* pointer, size_t bytes) = nullptr;
  CuResult (*MemFree)(CuDevicePointer pointer) = nullptr;
  CuResult (*MemcpyAsync)(CuDevicePointer to, CuDevicePointer from, size_t bytes, CuStream stream) = nullptr;
  CuResult (*MemHostRegister)(void* data, size_t bytes, unsigned flags) = nullptr;
  CuResult (*MemHostUnregister)(void* data) = nullptr;

 private:
  // Fills the functions in. FAILED_PRECONDITION without the library, or if it lacks one.
  absl::Status Load();
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_MEMORY_CUDA_DRIVER_H_
