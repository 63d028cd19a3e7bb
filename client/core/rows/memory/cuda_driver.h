// CudaDriver: NVIDIA's driver, loaded by dlopen() of libcuda.so.1 and declared here. The client is built without CUDA, and runs
// without it.
#ifndef HEADWATER_CLIENT_CORE_ROWS_MEMORY_CUDA_DRIVER_H_
#define HEADWATER_CLIENT_CORE_ROWS_MEMORY_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>

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

// The functions that are needed: as they are named here, and in the library.
#define HEADWATER_CUDA_FUNCTIONS(F)                                                                                   \
  F(Init, "cuInit", (unsigned flags))                                                                                 \
  F(GetErrorName, "cuGetErrorName", (CuResult error, const char** name))                                              \
  F(CtxPushCurrent, "cuCtxPushCurrent_v2", (CuContext context))                                                       \
  F(CtxPopCurrent, "cuCtxPopCurrent_v2", (CuContext * context))                                                       \
  F(CtxGetDevice, "cuCtxGetDevice", (CuDevice * device))                                                              \
  F(DevicePrimaryCtxGetState, "cuDevicePrimaryCtxGetState", (CuDevice device, unsigned* flags, int* active))          \
  F(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CuContext * context, CuDevice device))                       \
  F(DevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (CuDevice device))                                       \
  F(PointerGetAttribute, "cuPointerGetAttribute", (void* data, int attribute, CuDevicePointer pointer))               \
  F(MemGetAddressRange, "cuMemGetAddressRange_v2", (CuDevicePointer * base, size_t * bytes, CuDevicePointer pointer)) \
  F(IpcGetMemHandle, "cuIpcGetMemHandle", (CuIpcHandle * handle, CuDevicePointer pointer))                            \
  F(IpcGetEventHandle, "cuIpcGetEventHandle", (CuIpcHandle * handle, CuEvent event))                                  \
  F(EventCreate, "cuEventCreate", (CuEvent * event, unsigned flags))                                                  \
  F(EventDestroy, "cuEventDestroy_v2", (CuEvent event))                                                               \
  F(EventRecord, "cuEventRecord", (CuEvent event, CuStream stream))                                                   \
  F(EventSynchronize, "cuEventSynchronize", (CuEvent event))                                                          \
  F(StreamWaitEvent, "cuStreamWaitEvent", (CuStream stream, CuEvent event, unsigned flags))                           \
  F(StreamCreate, "cuStreamCreate", (CuStream * stream, unsigned flags))                                              \
  F(StreamDestroy, "cuStreamDestroy_v2", (CuStream stream))                                                           \
  F(StreamSynchronize, "cuStreamSynchronize", (CuStream stream))                                                      \
  F(MemAlloc, "cuMemAlloc_v2", (CuDevicePointer * pointer, size_t bytes))                                             \
  F(MemFree, "cuMemFree_v2", (CuDevicePointer pointer))                                                               \
  F(MemcpyAsync, "cuMemcpyAsync", (CuDevicePointer to, CuDevicePointer from, size_t bytes, CuStream stream))          \
  F(MemHostRegister, "cuMemHostRegister_v2", (void* data, size_t bytes, unsigned flags))                              \
  F(MemHostUnregister, "cuMemHostUnregister", (void* data))

class CudaDriver {
 public:
  // Without any function: Get() has the real ones.
  CudaDriver() = default;
  // The driver of this process, initialized; loaded at the first call. FAILED_PRECONDITION, saying why, without one. Never goes.
  static absl::StatusOr<const CudaDriver*> Get();

  // OK, or INTERNAL with `what` and the driver's name of the error.
  absl::Status Check(CuResult result, const char* what) const;

  // The allocation that an address of device memory belongs to.
  struct Allocation {
    CuDevicePointer base = 0;
    int64_t bytes = 0;
    uint64_t buffer_id = 0;  // never the same for two allocations
    CuContext context = nullptr;
    bool exportable = false;  // by cuIpcGetMemHandle()
    const char* kind = "";    // if it cannot be exported: the kind of memory
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

#define HEADWATER_DECLARE(name, symbol, arguments) CuResult(*name) arguments = nullptr;
  HEADWATER_CUDA_FUNCTIONS(HEADWATER_DECLARE)
#undef HEADWATER_DECLARE

 private:
  // Fills the functions in. FAILED_PRECONDITION without the library, or if it lacks one.
  absl::Status Load();
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_MEMORY_CUDA_DRIVER_H_
