#include "client/ctl/device_rows.h"

#include <dlfcn.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace headwater::ctl {
namespace {

// The driver's functions, with its types spelled out: CUresult and CUdevice are int, CUdeviceptr is 64 bits, CUcontext a pointer.
struct Driver {
  int (*init)(unsigned flags) = nullptr;
  int (*device_get)(int* device, int ordinal) = nullptr;
  int (*primary_context_retain)(void** context, int device) = nullptr;
  int (*primary_context_release)(int device) = nullptr;
  int (*context_push)(void* context) = nullptr;
  int (*context_pop)(void** context) = nullptr;
  int (*allocate)(uint64_t* pointer, size_t bytes) = nullptr;
  int (*free)(uint64_t pointer) = nullptr;
  int (*copy_in)(uint64_t to, const void* from, size_t bytes) = nullptr;
};

constexpr int kCudaErrorOutOfMemory = 2;

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

absl::StatusOr<Driver> LoadDriver() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW);  // stays for the life of the program
  if (library == nullptr) return absl::FailedPreconditionError("this machine has no NVIDIA driver");
  Driver driver;
  if (!Find(library, "cuInit", &driver.init) || !Find(library, "cuDeviceGet", &driver.device_get) ||
      !Find(library, "cuDevicePrimaryCtxRetain", &driver.primary_context_retain) ||
      !Find(library, "cuDevicePrimaryCtxRelease_v2", &driver.primary_context_release) ||
      !Find(library, "cuCtxPushCurrent_v2", &driver.context_push) || !Find(library, "cuCtxPopCurrent_v2", &driver.context_pop) ||
      !Find(library, "cuMemAlloc_v2", &driver.allocate) || !Find(library, "cuMemFree_v2", &driver.free) ||
      !Find(library, "cuMemcpyHtoD_v2", &driver.copy_in)) {
    return absl::FailedPreconditionError("the NVIDIA driver of this machine lacks functions that are needed");
  }
  return driver;
}

absl::Status Failed(const char* what, int error) {
  const std::string message = absl::StrCat(what, " failed with error ", error, " of the NVIDIA driver");
  return error == kCudaErrorOutOfMemory ? absl::ResourceExhaustedError(message) : absl::FailedPreconditionError(message);
}

class Allocation final : public DeviceRows {
 public:
  Allocation(const Driver& driver, int device, void* context, uint64_t pointer)
      : driver_(driver), device_(device), context_(context), pointer_(pointer) {}
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  ~Allocation() override {
    if (driver_.context_push(context_) == 0) {
      driver_.free(pointer_);
      driver_.context_pop(nullptr);
    }
    driver_.primary_context_release(device_);
  }

  void* data() const override { return reinterpret_cast<void*>(pointer_); }
  absl::Status Fill(const void* from, int64_t bytes) override {
    int error = driver_.context_push(context_);
    if (error != 0) return Failed("cuCtxPushCurrent", error);
    error = driver_.copy_in(pointer_, from, static_cast<size_t>(bytes));
    driver_.context_pop(nullptr);
    return error == 0 ? absl::OkStatus() : Failed("cuMemcpyHtoD", error);
  }

 private:
  const Driver driver_;
  const int device_;
  void* const context_;
  const uint64_t pointer_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceRows>> DeviceRows::Allocate(int64_t bytes) {
  static const absl::StatusOr<Driver>* const driver = new absl::StatusOr<Driver>(LoadDriver());
  if (!driver->ok()) return driver->status();
  int device = 0;
  void* context = nullptr;
  if (const int error = (*driver)->init(0); error != 0) return Failed("cuInit", error);
  if (const int error = (*driver)->device_get(&device, 0); error != 0)
    return absl::FailedPreconditionError("this machine has no GPU");
  if (const int error = (*driver)->primary_context_retain(&context, device); error != 0) {
    return Failed("cuDevicePrimaryCtxRetain", error);
  }
  uint64_t pointer = 0;
  int error = (*driver)->context_push(context);
  if (error == 0) {
    error = (*driver)->allocate(&pointer, static_cast<size_t>(bytes));
    (*driver)->context_pop(nullptr);
  }
  if (error != 0) {
    (*driver)->primary_context_release(device);
    return Failed("cuMemAlloc", error);
  }
  return std::make_unique<Allocation>(**driver, device, context, pointer);
}

}  // namespace headwater::ctl
