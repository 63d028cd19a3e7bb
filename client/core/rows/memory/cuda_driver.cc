#include "client/core/rows/memory/cuda_driver.h"

#include <dlfcn.h>

#include <string>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {
namespace {

// Values of CUpointer_attribute and CUmemorytype.
constexpr int kContextAttribute = 1;
constexpr int kMemoryTypeAttribute = 2;
constexpr int kBufferIdAttribute = 7;
constexpr int kIsManagedAttribute = 8;
constexpr int kDeviceOrdinalAttribute = 9;
constexpr int kIsLegacyIpcCapableAttribute = 10;
constexpr unsigned kDeviceMemoryType = 2;

}  // namespace

absl::StatusOr<const CudaDriver*> CudaDriver::Get() {
  struct Loaded {
    CudaDriver driver;
    absl::Status status;
  };
  static const Loaded* const loaded = [] {
    auto* const made = new Loaded;
    made->status = made->driver.Load();
    if (made->status.ok() && made->driver.Init(0) != 0) {
      made->status = absl::FailedPreconditionError("NVIDIA's driver finds no GPU that this process may use");
    }
    return made;
  }();
  if (!loaded->status.ok()) return loaded->status;
  return &loaded->driver;
}

absl::Status CudaDriver::Load() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return absl::FailedPreconditionError("NVIDIA's driver (libcuda.so.1) is not there");
  std::string missing;
  const auto find = [&](auto* function, const char* name) {
    void* const symbol = dlsym(library, name);
    if (symbol == nullptr) missing = name;
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(symbol);
  };
#define HEADWATER_FIND(name, symbol, arguments) find(&name, symbol);
  HEADWATER_CUDA_FUNCTIONS(HEADWATER_FIND)
#undef HEADWATER_FIND
  if (missing.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("NVIDIA's driver is too old: it has no ", missing));
}

absl::Status CudaDriver::Check(CuResult result, const char* what) const {
  if (result == 0) return absl::OkStatus();
  const char* name = nullptr;
  if (GetErrorName(result, &name) != 0 || name == nullptr) name = "an unknown error";
  return absl::InternalError(absl::StrCat(what, " failed: ", name));
}

absl::StatusOr<CudaDriver::Allocation> CudaDriver::Describe(const void* address) const {
  const CuDevicePointer pointer = ToDevice(address);
  unsigned type = 0;
  int device = 0;
  if (PointerGetAttribute(&type, kMemoryTypeAttribute, pointer) != 0 || type != kDeviceMemoryType ||
      PointerGetAttribute(&device, kDeviceOrdinalAttribute, pointer) != 0) {
    return absl::InvalidArgumentError("rows that are said to lie in device memory do not");
  }
  Allocation allocation;
  // Memory of a pool, and mapped memory, belongs to no context; work on it may use any context of its device.
  if (PointerGetAttribute(&allocation.context, kContextAttribute, pointer) != 0 || allocation.context == nullptr) {
    static_cast<void>(DevicePrimaryCtxRetain(&allocation.context, device));  // kept: nearly all programs use the primary one
  }
  unsigned managed = 0;
  unsigned capable = 0;
  static_cast<void>(PointerGetAttribute(&managed, kIsManagedAttribute, pointer));
  const bool told = PointerGetAttribute(&capable, kIsLegacyIpcCapableAttribute, pointer) == 0;
  static_cast<void>(PointerGetAttribute(&allocation.buffer_id, kBufferIdAttribute, pointer));
  const Scope scope(*this, allocation.context);
  if (!scope.status().ok()) return scope.status();
  size_t bytes = 0;
  HEADWATER_RETURN_IF_ERROR(Check(MemGetAddressRange(&allocation.base, &bytes, pointer), "cuMemGetAddressRange"));
  allocation.bytes = static_cast<int64_t>(bytes);
  allocation.exportable = managed == 0 && (!told || capable != 0);
  allocation.kind = managed != 0 ? "managed memory" : "mapped or pooled memory (expandable segments, cudaMallocAsync)";
  return allocation;
}

CudaDriver::Scope::Scope(const CudaDriver& driver, CuContext context)
    : driver_(driver), status_(driver.Check(driver.CtxPushCurrent(context), "cuCtxPushCurrent")) {}

CudaDriver::Scope::~Scope() {
  CuContext context = nullptr;
  if (status_.ok()) static_cast<void>(driver_.CtxPopCurrent(&context));
}

}  // namespace headwater::client::internal
