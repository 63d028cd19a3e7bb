#include "client/core/rows/memory/device_memory.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/core/link/error.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {
namespace {

// Values of CUevent_flags and CUstream_flags.
constexpr unsigned kInterprocess = 4;
constexpr unsigned kNonBlockingStream = 1;

// Allocations of the caller that are kept registered; a session has room for twice as many.
constexpr size_t kMaxKnown = 32;
constexpr int64_t kFirstStagingBytes = int64_t{32} << 20;

}  // namespace

absl::StatusOr<std::shared_ptr<DeviceContext>> DeviceContext::Make(const CudaDriver& driver, CuContext context) {
  std::shared_ptr<DeviceContext> made(new DeviceContext(driver, context));
  const CudaDriver::Scope scope(driver, context);
  if (!scope.status().ok()) return scope.status();
  HEADWATER_RETURN_IF_ERROR(made->Hold());
  for (const absl::Status& status :
       {driver.Check(driver.EventCreate(&made->event_, kCuEventDisableTiming | kInterprocess), "cuEventCreate"),
        made->event_ == nullptr ? absl::OkStatus()
                                : driver.Check(driver.IpcGetEventHandle(&made->event_handle_, made->event_), "cuIpcGetEventHandle"),
        driver.Check(driver.StreamCreate(&made->own_stream_, kNonBlockingStream), "cuStreamCreate")}) {
    if (!status.ok()) return status;
  }
  return made;
}

absl::Status DeviceContext::Hold() {
  CuDevice device = 0;
  HEADWATER_RETURN_IF_ERROR(driver_.Check(driver_.CtxGetDevice(&device), "cuCtxGetDevice"));
  unsigned flags = 0;
  int active = 0;
  absl::Status status = driver_.Check(driver_.DevicePrimaryCtxGetState(device, &flags, &active), "cuDevicePrimaryCtxGetState");
  if (!status.ok() || active == 0) return status;  // one that is not active would be made now
  CuContext primary = nullptr;
  status = driver_.Check(driver_.DevicePrimaryCtxRetain(&primary, device), "cuDevicePrimaryCtxRetain");
  if (!status.ok()) return status;
  if (primary == context_) {
    held_ = device;
  } else {
    static_cast<void>(driver_.DevicePrimaryCtxRelease(device));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<DeviceContext>> DeviceContext::OfFirstGpu() {
  HEADWATER_ASSIGN_OR_RETURN(const CudaDriver* const driver, CudaDriver::Get());
  CuContext primary = nullptr;
  HEADWATER_RETURN_IF_ERROR(driver->Check(driver->DevicePrimaryCtxRetain(&primary, 0), "cuDevicePrimaryCtxRetain"));
  return Make(*driver, primary);
}

DeviceContext::~DeviceContext() {
  {
    const CudaDriver::Scope scope(driver_, context_);
    if (!scope.status().ok()) return;  // the driver is being unloaded, and frees everything itself
    if (own_stream_ != nullptr) static_cast<void>(driver_.StreamDestroy(own_stream_));
    if (event_ != nullptr) static_cast<void>(driver_.EventDestroy(event_));
  }
  if (held_.has_value()) static_cast<void>(driver_.DevicePrimaryCtxRelease(*held_));
}

absl::Status DeviceContext::Record(CuStream stream) {
  const CudaDriver::Scope scope(driver_, context_);
  if (!scope.status().ok()) return scope.status();
  std::lock_guard<std::mutex> lock(mutex_);
  HEADWATER_RETURN_IF_ERROR(driver_.Check(driver_.StreamWaitEvent(stream, event_, 0), "cuStreamWaitEvent"));
  return driver_.Check(driver_.EventRecord(event_, stream), "cuEventRecord");
}

absl::Status DeviceContext::CopyOn(CuStream stream, void* to, const void* from, int64_t bytes) {
  const CudaDriver::Scope scope(driver_, context_);
  if (!scope.status().ok()) return scope.status();
  return driver_.Check(driver_.MemcpyAsync(ToDevice(to), ToDevice(from), static_cast<size_t>(bytes), stream), "cuMemcpyAsync");
}

absl::Status DeviceContext::Synchronize(CuStream stream) {
  const CudaDriver::Scope scope(driver_, context_);
  if (!scope.status().ok()) return scope.status();
  return driver_.Check(driver_.StreamSynchronize(stream), "cuStreamSynchronize");
}

absl::Status DeviceContext::CopyNow(CuStream stream, void* to, const void* from, int64_t bytes) {
  absl::Status status = CopyOn(stream, to, from, bytes);
  return status.ok() ? Synchronize(stream) : status;
}

absl::Status DeviceContext::CopyAfterEvent(void* to, const void* from, int64_t bytes) {
  const CudaDriver::Scope scope(driver_, context_);
  if (!scope.status().ok()) return scope.status();
  std::lock_guard<std::mutex> lock(mutex_);
  HEADWATER_RETURN_IF_ERROR(driver_.Check(driver_.StreamWaitEvent(own_stream_, event_, 0), "cuStreamWaitEvent"));
  return CopyOn(own_stream_, to, from, bytes);
}

absl::Status DeviceContext::AwaitCopies() { return Synchronize(own_stream_); }

absl::StatusOr<std::shared_ptr<const DeviceBacking>> DeviceBacking::Allocate(const std::shared_ptr<DeviceContext>& context,
                                                                             int64_t bytes) {
  const CudaDriver& driver = context->driver();
  const CudaDriver::Scope scope(driver, context->context());
  if (!scope.status().ok()) return scope.status();
  CuDevicePointer base = 0;
  if (driver.MemAlloc(&base, static_cast<size_t>(bytes)) != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("the GPU has no ", bytes, " bytes left"));
  }
  CuIpcHandle handle{};
  if (absl::Status status = driver.Check(driver.IpcGetMemHandle(&handle, base), "cuIpcGetMemHandle"); !status.ok()) {
    static_cast<void>(driver.MemFree(base));
    return status;
  }
  return std::make_shared<DeviceBacking>(context, base, bytes, handle, /*owned=*/true);
}

DeviceBacking::~DeviceBacking() {
  if (!owned_) return;
  const CudaDriver& driver = context_->driver();
  const CudaDriver::Scope scope(driver, context_->context());
  if (scope.status().ok()) static_cast<void>(driver.MemFree(base_));
}

DeviceMemory::DeviceMemory(int64_t max_bytes, Arena::Drop drop) : max_bytes_(max_bytes), drop_(std::move(drop)) {}

DeviceMemory::~DeviceMemory() {
  std::vector<std::shared_ptr<const Backing>> dropped;
  for (Known& known : known_) dropped.push_back(std::move(known.backing));
  if (!dropped.empty()) drop_(dropped);
}

absl::StatusOr<std::shared_ptr<DeviceContext>> DeviceMemory::ContextFor(const CudaDriver& driver, CuContext context) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<DeviceContext>& known = contexts_[context];
  if (known == nullptr) {
    HEADWATER_ASSIGN_OR_RETURN(known, DeviceContext::Make(driver, context));
  }
  return known;
}

absl::StatusOr<std::shared_ptr<DeviceContext>> DeviceMemory::ContextOf(const void* data) {
  HEADWATER_ASSIGN_OR_RETURN(auto driver, CudaDriver::Get());
  HEADWATER_ASSIGN_OR_RETURN(auto allocation, driver->Describe(data));
  return ContextFor(*driver, allocation.context);
}

absl::StatusOr<std::shared_ptr<const DeviceBacking>> DeviceMemory::Export(const void* data, int64_t bytes) {
  HEADWATER_ASSIGN_OR_RETURN(auto driver, CudaDriver::Get());
  HEADWATER_ASSIGN_OR_RETURN(const auto allocation, driver->Describe(data));
  if (!allocation.exportable) {
    return absl::FailedPreconditionError(absl::StrCat("rows in ", allocation.kind, " cannot be exported by CUDA IPC"));
  }
  const CuDevicePointer offset = ToDevice(data) - allocation.base;
  if (bytes > allocation.bytes || offset > static_cast<CuDevicePointer>(allocation.bytes - bytes)) {
    return absl::InvalidArgumentError("rows that are said to lie in device memory reach beyond their allocation");
  }
  std::vector<std::shared_ptr<const Backing>> dropped;  // passed to drop without the lock
  std::shared_ptr<const DeviceBacking> found;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto known = known_.begin(); known != known_.end();) {
      if (known->base != allocation.base) {
        ++known;
      } else if (known->buffer_id == allocation.buffer_id && known->backing->bytes() == allocation.bytes) {
        found = known->backing;
        known_.splice(known_.begin(), known_, known);
        break;
      } else {
        dropped.push_back(std::move(known->backing));  // freed, and another made at its address
        known = known_.erase(known);
      }
    }
  }
  if (!dropped.empty()) drop_(dropped);
  if (found != nullptr) return found;

  HEADWATER_ASSIGN_OR_RETURN(auto context, ContextFor(*driver, allocation.context));
  CuIpcHandle handle{};
  {
    const CudaDriver::Scope scope(*driver, allocation.context);
    if (!scope.status().ok()) return scope.status();
    const absl::Status status = driver->Check(driver->IpcGetMemHandle(&handle, allocation.base), "cuIpcGetMemHandle");
    if (!status.ok()) {
      return absl::FailedPreconditionError(absl::StrCat("the rows' device memory cannot be exported: ", Sentence(status)));
    }
  }
  found = std::make_shared<DeviceBacking>(context, allocation.base, allocation.bytes, handle, /*owned=*/false);
  dropped.clear();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    known_.push_front({allocation.base, allocation.buffer_id, found});
    for (auto known = std::prev(known_.end()); known_.size() > kMaxKnown && known != known_.begin();) {
      const auto before = std::prev(known);
      if (known->backing.use_count() == 1) {  // no placement uses it
        dropped.push_back(std::move(known->backing));
        known_.erase(known);
      }
      known = before;
    }
  }
  if (!dropped.empty()) drop_(dropped);
  return found;
}

absl::StatusOr<std::shared_ptr<Arena::Block>> DeviceMemory::Allocate(const std::shared_ptr<DeviceContext>& context, int64_t bytes) {
  Arena* arena = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<Arena>& made = arenas_[context->context()];
    if (made == nullptr) {
      made = std::make_unique<Arena>(
          max_bytes_, kFirstStagingBytes, [context](int64_t size) { return DeviceBacking::Allocate(context, size); }, drop_);
    }
    arena = made.get();
  }
  return arena->Allocate(bytes);
}

void DeviceMemory::Retire(const Backing& backing) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [context, arena] : arenas_) arena->Retire(backing);
}

absl::StatusOr<std::unique_ptr<DeviceRead>> DeviceRead::Begin(std::shared_ptr<DeviceContext> context, CuStream stream, void* to,
                                                              const void* from, int64_t bytes) {
  const CudaDriver& driver = context->driver();
  const CudaDriver::Scope scope(driver, context->context());
  if (!scope.status().ok()) return scope.status();
  std::unique_ptr<DeviceRead> read(new DeviceRead(std::move(context)));
  const auto begin = [&]() -> absl::Status {
    for (int64_t first = 0; first < bytes; first += kPieceBytes) {
      CuEvent event = nullptr;
      absl::Status status = driver.Check(driver.EventCreate(&event, kCuEventDisableTiming), "cuEventCreate");
      if (!status.ok()) return status;
      read->events_.push_back(event);
      status = read->context_->CopyOn(stream, static_cast<char*>(to) + first, static_cast<const char*>(from) + first,
                                      std::min(kPieceBytes, bytes - first));
      if (status.ok()) status = driver.Check(driver.EventRecord(event, stream), "cuEventRecord");
      if (!status.ok()) return status;
    }
    return read->Await(1);
  };
  absl::Status status = begin();
  if (status.ok()) return read;
  // Enqueued work may lack an event behind it.
  static_cast<void>(read->context_->Synchronize(stream));
  return status;
}

DeviceRead::~DeviceRead() {
  const CudaDriver& driver = context_->driver();
  const CudaDriver::Scope scope(driver, context_->context());
  if (!scope.status().ok()) return;  // the driver is being unloaded
  if (!events_.empty()) static_cast<void>(AwaitAll());
  for (const CuEvent event : events_) static_cast<void>(driver.EventDestroy(event));
}

absl::Status DeviceRead::Await(int64_t bytes) const { return AwaitPiece(static_cast<size_t>((bytes - 1) / kPieceBytes)); }

absl::Status DeviceRead::AwaitAll() const { return AwaitPiece(events_.size() - 1); }

absl::Status DeviceRead::AwaitPiece(size_t piece) const {
  const CudaDriver& driver = context_->driver();
  const CudaDriver::Scope scope(driver, context_->context());
  if (!scope.status().ok()) return scope.status();
  return driver.Check(driver.EventSynchronize(events_[piece]), "cuEventSynchronize");
}

}  // namespace headwater::client::internal
