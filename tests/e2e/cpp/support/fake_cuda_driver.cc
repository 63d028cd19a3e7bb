#include "tests/e2e/cpp/support/fake_cuda_driver.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace {

constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kLaunchFailed = 719;

using DevicePointer = unsigned long long;  // NOLINT: the driver's own type

// A copy, or nothing that is done, which comes after two others at most.
struct Work {
  void* to = nullptr;
  const void* from = nullptr;
  size_t bytes = 0;
  size_t previous = 0;  // of its stream
  size_t event = 0;     // what the event that its stream waits for stood for
  bool done = false;
};

struct Driver {
  std::mutex mutex;
  std::map<uintptr_t, size_t> memory;
  std::set<void*> allocated;
  std::vector<Work> work = {Work{.done = true}};  // the first one: nothing
  std::map<void*, size_t> last;                   // of each stream
  std::map<void*, size_t> recorded;               // by each event
  int copies_under_way = 0;
  int copies_until_failure = -1;
  uintptr_t next_handle = 0x1000;

  // All of these with the lock.
  // The allocation of an address, or the end.
  std::map<uintptr_t, size_t>::const_iterator Find(DevicePointer pointer) const {
    auto found = memory.upper_bound(pointer);
    if (found == memory.begin()) return memory.end();
    --found;
    return pointer < found->first + found->second ? found : memory.end();
  }
  void Enqueue(void* stream, Work next) {
    next.previous = last[stream];
    last[stream] = work.size();
    work.push_back(next);
    if (next.to != nullptr) ++copies_under_way;
  }
  void Run(size_t index) {
    Work& run = work[index];
    if (run.done) return;
    Run(run.previous);
    Run(run.event);
    run.done = true;
    if (run.to == nullptr) return;
    std::memcpy(run.to, run.from, run.bytes);
    --copies_under_way;
  }
};

Driver& TheDriver() {
  static Driver* const driver = new Driver;
  return *driver;
}

// The driver, with its lock.
class Locked {
 public:
  Driver* operator->() { return &driver_; }

 private:
  Driver& driver_ = TheDriver();
  const std::lock_guard<std::mutex> lock_{driver_.mutex};
};

int MakeHandle(void** handle) {
  Locked driver;
  *handle = reinterpret_cast<void*>(driver->next_handle++);
  return 0;
}

// Does what was enqueued on a stream, or before an event was recorded.
int RunUpTo(std::map<void*, size_t> Driver::*marks, void* handle) {
  Locked driver;
  driver->Run((TheDriver().*marks)[handle]);
  return 0;
}

}  // namespace

extern "C" {

void FakeCudaAddMemory(const void* data, size_t bytes, bool exportable) {
  Locked driver;
  driver->memory[reinterpret_cast<uintptr_t>(data)] = bytes;
  if (exportable) driver->allocated.insert(const_cast<void*>(data));
}
void FakeCudaFailCopyAfter(int count) {
  Locked driver;
  driver->copies_until_failure = count;
}
int FakeCudaCopiesUnderWay() {
  Locked driver;
  return driver->copies_under_way;
}
void FakeCudaRun(void* stream) { RunUpTo(&Driver::last, stream); }
const void* FakeCudaOpen(const void* handle) {
  const void* memory = nullptr;
  std::memcpy(&memory, handle, sizeof(memory));
  return memory;
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
  Locked driver;
  const auto found = driver->Find(pointer);
  if (found == driver->memory.end()) return kInvalidValue;
  switch (attribute) {
    case 1:  // CU_POINTER_ATTRIBUTE_CONTEXT
      *static_cast<void**>(data) = &TheDriver();
      return 0;
    case 2:  // CU_POINTER_ATTRIBUTE_MEMORY_TYPE: of the device
      *static_cast<unsigned*>(data) = 2;
      return 0;
    case 7:  // CU_POINTER_ATTRIBUTE_BUFFER_ID
      *static_cast<uint64_t*>(data) = found->first;
      return 0;
    case 10:  // CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
      *static_cast<unsigned*>(data) = driver->allocated.count(reinterpret_cast<void*>(found->first));  // NOLINT
      return 0;
    default:  // the device's ordinal, or whether it is managed
      *static_cast<unsigned*>(data) = 0;
      return 0;
  }
}
int cuMemGetAddressRange_v2(DevicePointer* base, size_t* bytes, DevicePointer pointer) {
  Locked driver;
  const auto found = driver->Find(pointer);
  if (found == driver->memory.end()) return kInvalidValue;
  *base = found->first;
  *bytes = found->second;
  return 0;
}
int cuIpcGetMemHandle(void* handle, DevicePointer pointer) {
  Locked driver;
  void* const memory = reinterpret_cast<void*>(pointer);  // NOLINT
  if (driver->allocated.count(memory) == 0) return kInvalidValue;
  std::memcpy(handle, &memory, sizeof(memory));
  return 0;
}
int cuIpcGetEventHandle(void*, void*) { return 0; }
int cuEventCreate(void** event, unsigned) { return MakeHandle(event); }
int cuEventDestroy_v2(void*) { return 0; }
int cuEventRecord(void* event, void* stream) {
  Locked driver;
  driver->recorded[event] = driver->last[stream];
  return 0;
}
int cuEventSynchronize(void* event) { return RunUpTo(&Driver::recorded, event); }
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  Locked driver;
  driver->Enqueue(stream, Work{.event = driver->recorded[event]});
  return 0;
}
int cuStreamCreate(void** stream, unsigned) { return MakeHandle(stream); }
int cuStreamDestroy_v2(void*) { return 0; }
int cuStreamSynchronize(void* stream) { return RunUpTo(&Driver::last, stream); }
int cuMemAlloc_v2(DevicePointer* pointer, size_t bytes) {
  Locked driver;
  void* const memory = std::malloc(bytes);
  if (memory == nullptr) return kOutOfMemory;
  driver->allocated.insert(memory);
  *pointer = reinterpret_cast<uintptr_t>(memory);
  return 0;
}
int cuMemFree_v2(DevicePointer pointer) {
  Locked driver;
  void* const memory = reinterpret_cast<void*>(pointer);  // NOLINT
  if (driver->allocated.erase(memory) == 0) return kInvalidValue;
  for (size_t i = 0; i < driver->work.size(); ++i) driver->Run(i);  // as the driver waits for all work
  std::free(memory);
  return 0;
}
int cuMemcpyAsync(DevicePointer to, DevicePointer from, size_t bytes, void* stream) {
  Locked driver;
  if (driver->copies_until_failure == 0) return kLaunchFailed;
  if (driver->copies_until_failure > 0) --driver->copies_until_failure;
  driver->Enqueue(stream, {reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes});  // NOLINT
  return 0;
}
int cuMemsetD32Async(DevicePointer to, unsigned value, size_t count, void*) {
  std::fill_n(reinterpret_cast<unsigned*>(to), count, value);
  return 0;
}
int cuMemHostRegister_v2(void*, size_t, unsigned) { return 0; }
int cuMemHostUnregister(void*) { return 0; }
}
