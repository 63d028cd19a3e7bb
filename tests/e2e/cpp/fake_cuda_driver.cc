#include "tests/e2e/cpp/fake_cuda_driver.h"

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace {

constexpr int kInvalidValue = 1;
constexpr int kLaunchFailed = 719;
// Of CUpointer_attribute and CUmemorytype.
constexpr int kContextAttribute = 1;
constexpr int kMemoryTypeAttribute = 2;
constexpr int kBufferIdAttribute = 7;
constexpr int kDeviceOrdinalAttribute = 9;
constexpr unsigned kDeviceMemoryType = 2;

using DevicePointer = unsigned long long;  // NOLINT: the driver's own type

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

struct Driver {
  std::mutex mutex;
  std::map<uintptr_t, size_t> memory;
  std::vector<Copy> under_way;
  int copies_until_failure = -1;
  uintptr_t next_handle = 0x1000;
};

Driver& TheDriver() {
  static Driver* const driver = new Driver;
  return *driver;
}

// The allocation of an address, or the end. With the lock.
std::map<uintptr_t, size_t>::const_iterator Find(DevicePointer pointer) {
  const Driver& driver = TheDriver();
  auto found = driver.memory.upper_bound(pointer);
  if (found == driver.memory.begin()) return driver.memory.end();
  --found;
  return pointer < found->first + found->second ? found : driver.memory.end();
}

int MakeHandle(void** handle) {
  Driver& driver = TheDriver();
  std::lock_guard<std::mutex> lock(driver.mutex);
  *handle = reinterpret_cast<void*>(driver.next_handle++);
  return 0;
}

int RunCopies() {
  Driver& driver = TheDriver();
  std::lock_guard<std::mutex> lock(driver.mutex);
  for (const Copy& copy : driver.under_way) std::memcpy(copy.to, copy.from, copy.bytes);
  driver.under_way.clear();
  return 0;
}

}  // namespace

extern "C" {

void FakeCudaAddMemory(const void* data, size_t bytes) {
  Driver& driver = TheDriver();
  std::lock_guard<std::mutex> lock(driver.mutex);
  driver.memory[reinterpret_cast<uintptr_t>(data)] = bytes;
}
void FakeCudaFailCopyAfter(int count) {
  Driver& driver = TheDriver();
  std::lock_guard<std::mutex> lock(driver.mutex);
  driver.copies_until_failure = count;
}
int FakeCudaCopiesUnderWay() {
  Driver& driver = TheDriver();
  std::lock_guard<std::mutex> lock(driver.mutex);
  return static_cast<int>(driver.under_way.size());
}

// ---- what CudaDriver asks for
int cuInit(unsigned) { return 0; }
int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_LAUNCH_FAILED";
  return 0;
}
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuCtxPopCurrent_v2(void**) { return 0; }
int cuCtxGetDevice(int* device) {
  *device = 0;
  return 0;
}
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 0;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &TheDriver();
  return 0;
}
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuPointerGetAttribute(void* data, int attribute, DevicePointer pointer) {
  Driver& driver = TheDriver();
  std::lock_guard<std::mutex> lock(driver.mutex);
  if (Find(pointer) == driver.memory.end()) return kInvalidValue;
  switch (attribute) {
    case kContextAttribute:
      *static_cast<void**>(data) = &driver;
      return 0;
    case kMemoryTypeAttribute:
      *static_cast<unsigned*>(data) = kDeviceMemoryType;
      return 0;
    case kDeviceOrdinalAttribute:
      *static_cast<int*>(data) = 0;
      return 0;
    case kBufferIdAttribute:
      *static_cast<uint64_t*>(data) = Find(pointer)->first;
      return 0;
    default:  // whether it is managed, whether it can be exported
      *static_cast<unsigned*>(data) = 0;
      return 0;
  }
}
int cuMemGetAddressRange_v2(DevicePointer* base, size_t* bytes, DevicePointer pointer) {
  Driver& driver = TheDriver();
  std::lock_guard<std::mutex> lock(driver.mutex);
  const auto found = Find(pointer);
  if (found == driver.memory.end()) return kInvalidValue;
  *base = found->first;
  *bytes = found->second;
  return 0;
}
int cuIpcGetMemHandle(void*, DevicePointer) { return kInvalidValue; }
int cuIpcGetEventHandle(void*, void*) { return 0; }
int cuEventCreate(void** event, unsigned) { return MakeHandle(event); }
int cuEventDestroy_v2(void*) { return 0; }
int cuEventRecord(void*, void*) { return 0; }
int cuEventSynchronize(void*) { return RunCopies(); }
int cuStreamWaitEvent(void*, void*, unsigned) { return 0; }
int cuStreamCreate(void** stream, unsigned) { return MakeHandle(stream); }
int cuStreamDestroy_v2(void*) { return 0; }
int cuStreamSynchronize(void*) { return RunCopies(); }
int cuMemAlloc_v2(DevicePointer*, size_t) { return kInvalidValue; }
int cuMemFree_v2(DevicePointer) { return kInvalidValue; }
int cuMemcpyAsync(DevicePointer to, DevicePointer from, size_t bytes, void*) {
  Driver& driver = TheDriver();
  std::lock_guard<std::mutex> lock(driver.mutex);
  if (driver.copies_until_failure == 0) return kLaunchFailed;
  if (driver.copies_until_failure > 0) --driver.copies_until_failure;
  driver.under_way.push_back({reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes});  // NOLINT
  return 0;
}
int cuMemHostRegister_v2(void*, size_t, unsigned) { return 0; }
int cuMemHostUnregister(void*) { return 0; }
}
