#include "client/core/rows/memory/device_read.h"

#include <algorithm>
#include <utility>

namespace headwater::client::internal {

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
  // No event may stand behind what has been enqueued.
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
