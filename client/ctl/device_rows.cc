#include "client/ctl/device_rows.h"

#include <dlfcn.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::ctl {
namespace {

constexpr int kCudaErrorOutOfMemory = 2;

// Calls a function of the driver, whose types are spelled out: CUresult and CUdevice are int, CUdeviceptr is 64 bits, CUcontext a
// pointer.
template <typename... Arguments>
absl::Status Call(const char* name, Arguments... arguments) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);  // stays for the life of the program
  if (library == nullptr) return absl::FailedPreconditionError("this machine has no NVIDIA driver");
  const auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name));
  if (function == nullptr) return absl::FailedPreconditionError(absl::StrCat("the NVIDIA driver of this machine lacks ", name));
  const int error = function(arguments...);
  if (error == 0) return absl::OkStatus();
  const std::string message = absl::StrCat(name, " failed with error ", error, " of the NVIDIA driver");
  return error == kCudaErrorOutOfMemory ? absl::ResourceExhaustedError(message) : absl::FailedPreconditionError(message);
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceRows>> DeviceRows::Allocate(int64_t bytes) {
  int device = 0;
  HEADWATER_RETURN_IF_ERROR(Call("cuInit", 0U));
  if (!Call("cuDeviceGet", &device, 0).ok()) return absl::FailedPreconditionError("this machine has no GPU");
  std::unique_ptr<DeviceRows> rows(new DeviceRows);
  // Kept to the program's end: it is the one that everybody uses.
  HEADWATER_RETURN_IF_ERROR(Call("cuDevicePrimaryCtxRetain", &rows->context_, device));
  HEADWATER_RETURN_IF_ERROR(Call("cuCtxSetCurrent", rows->context_));
  HEADWATER_RETURN_IF_ERROR(Call("cuMemAlloc_v2", &rows->pointer_, static_cast<size_t>(bytes)));
  return rows;
}

DeviceRows::~DeviceRows() {
  if (pointer_ != 0 && Call("cuCtxSetCurrent", context_).ok()) Call("cuMemFree_v2", pointer_).IgnoreError();
}

absl::Status DeviceRows::Fill(const void* from, int64_t bytes) {
  HEADWATER_RETURN_IF_ERROR(Call("cuCtxSetCurrent", context_));
  return Call("cuMemcpyHtoD_v2", pointer_, from, static_cast<size_t>(bytes));
}

}  // namespace headwater::ctl
