#include "client/core/rows/memory/memory_paths.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/core/link/error.h"
#include "headwater/client/error.h"
#include "headwater/kernels/machine_limits.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {
namespace {

constexpr int64_t kFirstSharedBytes = int64_t{8} << 20;
constexpr int kMostCopyThreads = 8;
constexpr std::chrono::seconds kAbandonTimeout{10};
constexpr unsigned kPortable = 1;  // CU_MEMHOSTREGISTER_PORTABLE

bool PathFails(const absl::Status& status) { return ErrorReason(status) == "TRANSPORT_UNAVAILABLE"; }

int CopyThreadCount(int wanted) {
  if (wanted > 0) return wanted;
  return std::clamp(ComputeThreads() / 2, 1, kMostCopyThreads);
}

// Page-locks a shared region for the copies of all devices, once; whether it is. If not, they are only slower.
bool LockForDevice(const SharedRegion& region, const std::shared_ptr<DeviceContext>& context) {
  return region.LockOnce([&]() -> std::function<void()> {
    const CudaDriver& driver = context->driver();
    const CudaDriver::Scope scope(driver, context->context());
    if (!scope.status().ok() || driver.MemHostRegister(region.data(), static_cast<size_t>(region.bytes()), kPortable) != 0) {
      return nullptr;
    }
    return [context, data = region.data()] {
      const CudaDriver::Scope end_scope(context->driver(), context->context());
      if (end_scope.status().ok()) static_cast<void>(context->driver().MemHostUnregister(data));
    };
  });
}

}  // namespace

std::shared_ptr<const Backing> PlacedTensor::backing() const {
  if (region != nullptr) return region;
  return device;
}

Placement::Placement(std::shared_ptr<MemoryPaths> paths, const CallMemory& memory) : paths_(std::move(paths)) {
  reads_.emplace_back(memory.rows);
  for (const RowsView& rows : memory.teachers) {
    if (HasRows(rows)) reads_.emplace_back(rows);
  }
  if (memory.result.data != nullptr) write_.emplace(memory.result);
}

template <typename Visit>
absl::Status Placement::ForEach(Visit&& visit) {
  for (PlacedTensor& tensor : reads_) {
    HEADWATER_RETURN_IF_ERROR(visit(tensor, false));
  }
  return write_.has_value() ? visit(*write_, true) : absl::OkStatus();
}

absl::Status Placement::Register(PlacedTensor* tensor, const Wait& wait) {
  const auto* const data = tensor->block != nullptr ? tensor->block->data() : static_cast<const uint8_t*>(tensor->mine.data);
  tensor->shared.set_offset_bytes(data - tensor->backing()->data());
  HEADWATER_ASSIGN_OR_RETURN(*tensor->shared.mutable_region_id(),
                             tensor->region != nullptr ? paths_->server_.Register(session_id_, *tensor->region, wait)
                                                       : paths_->server_.Register(session_id_, *tensor->device, wait));
  return absl::OkStatus();
}

absl::Status Placement::PlaceInHostMemory(PlacedTensor* tensor, const Wait& wait) {
  bool named = false;
  HEADWATER_RETURN_IF_ERROR(paths_->server_.HostMemoryWorks(wait, &named));
  if (tensor->mine.memory == Memory::kHost) {
    auto found = std::static_pointer_cast<const SharedRegion>(paths_->host_.Find(tensor->mine.data, tensor->mine.bytes()));
    if (found != nullptr && found->name().empty() != named) {
      tensor->region = std::move(found);
      return Register(tensor, wait);
    }
  }
  auto block = paths_->host_.Allocate(tensor->mine.bytes());
  if (!block.ok()) return TransportUnavailable(absl::StrCat("no shared memory is left for the rows: ", Sentence(block.status())));
  tensor->block = *std::move(block);
  tensor->region = std::static_pointer_cast<const SharedRegion>(tensor->block->backing());
  return Register(tensor, wait);
}

absl::Status Placement::PlaceInDeviceMemory(PlacedTensor* tensor, const Wait& wait) {
  HEADWATER_RETURN_IF_ERROR(paths_->server_.DeviceMemoryWorks(wait));
  std::string why_copied = "rows in private memory are copied on the device";
  if (tensor->mine.memory != Memory::kCudaPrivate) {
    const auto exported = paths_->device_.Export(tensor->mine.data, tensor->mine.bytes());
    if (exported.ok()) {
      tensor->device = *exported;
      return Register(tensor, wait);
    }
    if (exported.status().code() == absl::StatusCode::kInvalidArgument) return exported.status();
    why_copied = Sentence(exported.status());
  }
  auto block = paths_->device_.Allocate(tensor->context, tensor->mine.bytes());
  if (!block.ok()) {
    return TransportUnavailable(absl::StrCat(why_copied, ", and no memory is left to copy them to: ", Sentence(block.status())));
  }
  if (tensor->mine.memory != Memory::kCudaPrivate) why_not_better_ = absl::StrCat(why_copied, ", so they are copied on the device");
  tensor->block = *std::move(block);
  tensor->device = std::static_pointer_cast<const DeviceBacking>(tensor->block->backing());
  return Register(tensor, wait);
}

absl::Status Placement::Place(PlacedTensor* tensor, Transport demand, const Wait& wait) {
  if (tensor->mine.memory == Memory::kHost) {
    if (demand != Transport::kCudaIpc) return PlaceInHostMemory(tensor, wait);
    return TransportUnavailable("rows lie in host memory, which cuda_ipc does not share");
  }
  auto context = paths_->device_.ContextOf(tensor->mine.data);
  if (!context.ok()) {
    return context.status().code() == absl::StatusCode::kInvalidArgument
               ? MakeLocalError(v1::ERROR_REASON_INVALID_FIELD, absl::StatusCode::kInvalidArgument, Sentence(context.status()))
               : TransportUnavailable(Sentence(context.status()));
  }
  tensor->context = *std::move(context);
  if (demand != Transport::kSharedMemory) {
    const absl::Status status = PlaceInDeviceMemory(tensor, wait);
    if (status.ok() || !PathFails(status) || demand == Transport::kCudaIpc) return status;
    why_not_better_ = absl::StrCat(Sentence(status), ", so device memory goes through the host");
    PlacedTensor again(tensor->mine);
    again.context = std::move(tensor->context);
    *tensor = std::move(again);
  }
  return PlaceInHostMemory(tensor, wait);
}

absl::Status Placement::CopyIn(CuStream stream) {
  std::vector<std::shared_ptr<DeviceContext>> contexts;
  bool through_host = false;
  absl::Status status = ForEach([&](PlacedTensor& tensor, bool is_write) -> absl::Status {
    if (tensor.context != nullptr && std::find(contexts.begin(), contexts.end(), tensor.context) == contexts.end()) {
      contexts.push_back(tensor.context);
    }
    if (tensor.block == nullptr || is_write) return absl::OkStatus();
    if (tensor.context == nullptr) {
      paths_->copies_.Copy(tensor.block->data(), tensor.mine.data, tensor.mine.bytes());
      return absl::OkStatus();
    }
    if (tensor.region != nullptr) {
      LockForDevice(*tensor.region, tensor.context);
      through_host = true;
    } else if (absl::Status ordered = tensor.context->Record(stream); !ordered.ok()) {
      // A call that ended early left the block while its own copy into it may still wait, on another stream. The event stands for
      // that copy, and this stream waits for the event's former work.
      return ordered;
    }
    return tensor.context->CopyOn(stream, tensor.block->data(), tensor.mine.data, tensor.mine.bytes());
  });
  for (const auto& context : contexts) {
    if (status.ok()) status = context->Record(stream);
    if (status.ok() && through_host) status = context->Synchronize(stream);
  }
  if (status.ok()) return status;
  // The placed memory is free for others from now on: no copy may be under way.
  for (const auto& context : contexts) static_cast<void>(context->Synchronize(stream));
  return status;
}

absl::Status Placement::Finish() {
  if (!write_.has_value() || write_->block == nullptr) return absl::OkStatus();
  const PlacedTensor& tensor = *write_;
  void* const to = const_cast<void*>(tensor.mine.data);
  if (tensor.context == nullptr) {
    paths_->copies_.Copy(to, tensor.block->data(), tensor.mine.bytes());
    return absl::OkStatus();
  }
  if (tensor.region != nullptr) LockForDevice(*tensor.region, tensor.context);
  absl::Status status = tensor.context->CopyAfterEvent(to, tensor.block->data(), tensor.mine.bytes());
  return status.ok() ? tensor.context->AwaitCopies() : status;
}

absl::Status Placement::Renew(const std::string& session_id, const Wait& wait) {
  ServerRegions& server = paths_->server_;
  const auto renew = [&]() -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto session, server.SessionOr(session_id, wait));
    if (session == session_id_) {
      static_cast<void>(ForEach([&](PlacedTensor& tensor, bool) {
        server.Lost(session_id_, *tensor.backing(), tensor.shared.region_id());
        return absl::OkStatus();
      }));
    } else {
      server.Forget(session_id_);
      session_id_ = std::move(session);
    }
    return ForEach([&](PlacedTensor& tensor, bool) { return Register(&tensor, wait); });
  };
  absl::Status status = renew();
  if (session_id.empty() && ErrorReason(status) == "SESSION_NOT_FOUND") {  // it was the own session that is gone
    server.Forget(session_id_);
    status = renew();
  }
  return status;
}

void Placement::Abandon() {
  const Deadline deadline = std::chrono::system_clock::now() + kAbandonTimeout;
  std::vector<std::shared_ptr<const Backing>> callers;
  static_cast<void>(ForEach([&](PlacedTensor& tensor, bool) {
    // The server may write to copies as long as it likes, if they are not used again. It must not write to the caller's own memory.
    if (tensor.block == nullptr) {
      callers.push_back(tensor.backing());
    } else if (tensor.region != nullptr) {
      paths_->host_.Retire(*tensor.region);
    } else {
      paths_->device_.Retire(*tensor.device);
    }
    return absl::OkStatus();
  }));
  if (!callers.empty()) paths_->server_.Drop(callers, deadline);
}

std::shared_ptr<MemoryPaths> MemoryPaths::Create(const std::string& target, std::shared_ptr<grpc::Channel> channel,
                                                 const ClientOptions& client_options, const MemoryPathsOptions& options) {
  return std::shared_ptr<MemoryPaths>(new MemoryPaths(target, std::move(channel), client_options, options));
}

MemoryPaths::MemoryPaths(const std::string& target, std::shared_ptr<grpc::Channel> channel, const ClientOptions& client_options,
                         const MemoryPathsOptions& options)
    : server_(target, std::move(channel), client_options),
      copies_(CopyThreadCount(options.copy_threads)),
      host_(
          options.max_shared_bytes, kFirstSharedBytes,
          [this](int64_t bytes) -> absl::StatusOr<std::shared_ptr<const Backing>> {
            return SharedRegion::Make(bytes, server_.PassesByName());
          },
          [this](Backings backings) { server_.Drop(backings, std::nullopt); }),
      // Device memory must not be freed while another process has it open.
      device_(options.max_device_bytes,
              [this](Backings backings) { server_.Drop(backings, std::chrono::system_clock::now() + kAbandonTimeout); }) {}

absl::StatusOr<Placement> MemoryPaths::Place(const CallMemory& memory, const std::string& session_id, Transport demand,
                                             const Wait& wait) {
  Placement placement(shared_from_this(), memory);
  const bool on_device = memory.on_device();
  const auto place = [&]() -> absl::Status {
    // Where there is no path no session is opened for it.
    if (on_device || demand != Transport::kCudaIpc) {
      bool named = false;
      absl::Status works = server_.HostMemoryWorks(wait, &named);
      if (!works.ok() && on_device) works = server_.DeviceMemoryWorks(wait);
      if (!works.ok()) return works;
    }
    HEADWATER_ASSIGN_OR_RETURN(placement.session_id_, server_.SessionOr(session_id, wait));
    return placement.ForEach([&](PlacedTensor& tensor, bool) {
      tensor = PlacedTensor(tensor.mine);
      return placement.Place(&tensor, demand, wait);
    });
  };
  absl::Status status = place();
  if (session_id.empty() && ErrorReason(status) == "SESSION_NOT_FOUND") {  // the own one ended unnoticed
    server_.Forget(placement.session_id_);
    status = place();
  }
  if (status.ok()) status = placement.CopyIn(static_cast<CuStream>(memory.cuda_stream));
  if (!status.ok()) return status;
  return placement;
}

absl::StatusOr<RowMemory> AllocateOrdinaryRows(int64_t bytes) {
  const auto alignment = static_cast<size_t>(Arena::kAlignment);
  const size_t size = (static_cast<size_t>(bytes) + alignment) / alignment * alignment;
  auto* const data = static_cast<unsigned char*>(std::aligned_alloc(alignment, size));
  if (data == nullptr) return NoMemoryFor(bytes, "rows");
  return RowMemory{.owner = std::shared_ptr<void>(data, std::free), .data = data};
}

absl::StatusOr<RowMemory> MemoryPaths::AllocateRows(int64_t bytes) {
  auto block = host_.Allocate(bytes);
  if (!block.ok()) {
    if (block.status().code() != absl::StatusCode::kResourceExhausted) return TransportUnavailable(Sentence(block.status()));
    return MakeLocalError(v1::ERROR_REASON_MEMORY_BUDGET_EXCEEDED, absl::StatusCode::kResourceExhausted, Sentence(block.status()));
  }
  unsigned char* const data = (*block)->data();
  // The block goes first.
  auto owner = std::make_shared<std::pair<std::shared_ptr<MemoryPaths>, std::shared_ptr<Arena::Block>>>(shared_from_this(),
                                                                                                        *std::move(block));
  return RowMemory{.owner = std::move(owner), .data = data, .shared = true};
}

absl::StatusOr<RowMemory> MemoryPaths::AllocateStaging(const void* device_data, int64_t bytes) {
  absl::StatusOr<RowMemory> buffer = AllocateRows(bytes);
  if (!buffer.ok()) return buffer;
  if (const auto context = device_.ContextOf(device_data); context.ok()) {
    buffer->page_locked = LockForDevice(static_cast<const SharedRegion&>(*host_.Find(buffer->data, bytes)), *context);
  }
  return buffer;
}

absl::StatusOr<std::shared_ptr<DeviceContext>> MemoryPaths::ContextOf(const void* device_data) {
  auto context = device_.ContextOf(device_data);
  if (!context.ok()) return TransportUnavailable(Sentence(context.status()));
  return context;
}

}  // namespace headwater::client::internal
