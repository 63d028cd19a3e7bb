#include "client/core/rows/memory/memory_paths.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "client/core/link/error.h"
#include "client/core/rows/memory/arena.h"
#include "client/core/rows/memory/copy_threads.h"
#include "client/core/rows/memory/device_memory.h"
#include "client/core/rows/memory/server_regions.h"
#include "client/core/rows/memory/shared_region.h"
#include "headwater/client/error.h"
#include "headwater/kernels/machine_limits.h"

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

const char* MemoryPathName(MemoryPath path) { return path == MemoryPath::kCudaIpc ? "cuda_ipc" : "shared_memory"; }

class MemoryPathsState {
 public:
  MemoryPathsState(const std::string& target, std::shared_ptr<grpc::Channel> channel, const ClientOptions& client_options,
                   const MemoryPathsOptions& options)
      : server(target, std::move(channel), client_options),
        copies(CopyThreadCount(options.copy_threads)),
        host(
            options.max_shared_bytes, kFirstSharedBytes,
            [this](int64_t bytes) -> absl::StatusOr<std::shared_ptr<const Backing>> {
              return SharedRegion::Make(bytes, server.PassesByName());
            },
            [this](Backings backings) { server.Drop(backings, std::nullopt); }),
        // Device memory must not be freed while another process has it open.
        device(options.max_device_bytes,
               [this](Backings backings) { server.Drop(backings, std::chrono::system_clock::now() + kAbandonTimeout); }) {}

  ServerRegions server;  // first: the others tell it of what they drop
  CopyThreads copies;
  Arena host;
  DeviceMemory device;
};

// One tensor of a placement.
struct PlacedTensor {
  RowsMemory mine;
  std::shared_ptr<const SharedRegion> region;  // one of the two
  std::shared_ptr<const DeviceBacking> device;
  std::shared_ptr<DeviceContext> context;  // of device memory, wherever it was placed
  std::shared_ptr<Arena::Block> block;     // null: in place
  PlacedRows rows;

  std::shared_ptr<const Backing> backing() const {
    if (region != nullptr) return region;
    return device;
  }
  MemoryPath path() const { return device != nullptr ? MemoryPath::kCudaIpc : MemoryPath::kSharedMemory; }
};

struct Placement::State {
  std::shared_ptr<MemoryPathsState> paths;
  std::string session_id;
  std::vector<PlacedTensor> reads;
  std::optional<PlacedTensor> write;
  std::vector<PlacedRows> read_rows;
  std::optional<PlacedRows> write_rows;
  std::string why_not_better;

  template <typename Visit>
  absl::Status ForEach(Visit&& visit) {
    for (PlacedTensor& tensor : reads) {
      if (absl::Status status = visit(tensor, false); !status.ok()) return status;
    }
    return write.has_value() ? visit(*write, true) : absl::OkStatus();
  }

  absl::Status Register(PlacedTensor* tensor, const Wait& wait) {
    auto id = tensor->region != nullptr ? paths->server.Register(session_id, *tensor->region, wait)
                                        : paths->server.Register(session_id, *tensor->device, wait);
    if (!id.ok()) return id.status();
    tensor->rows.region_id = *std::move(id);
    return absl::OkStatus();
  }
  void CollectRows() {
    read_rows.clear();
    for (const PlacedTensor& tensor : reads) read_rows.push_back(tensor.rows);
    if (write.has_value()) write_rows = write->rows;
  }

  // ---- where a tensor goes
  absl::Status PlaceInHostMemory(PlacedTensor* tensor, const Wait& wait) {
    bool named = false;
    if (absl::Status status = paths->server.HostMemoryWorks(wait, &named); !status.ok()) return status;
    if (!tensor->mine.on_device) {
      auto found = std::static_pointer_cast<const SharedRegion>(paths->host.Find(tensor->mine.data, tensor->mine.bytes));
      if (found != nullptr && found->name().empty() != named) {
        tensor->rows.offset_bytes = static_cast<uint8_t*>(tensor->mine.data) - found->data();
        tensor->region = std::move(found);
        return Register(tensor, wait);
      }
    }
    auto block = paths->host.Allocate(tensor->mine.bytes);
    if (!block.ok()) return TransportUnavailable(absl::StrCat("no shared memory is left for the rows: ", Sentence(block.status())));
    tensor->block = *std::move(block);
    tensor->region = std::static_pointer_cast<const SharedRegion>(tensor->block->backing());
    tensor->rows.offset_bytes = tensor->block->offset();
    return Register(tensor, wait);
  }
  absl::Status PlaceInDeviceMemory(PlacedTensor* tensor, const Wait& wait) {
    if (absl::Status status = paths->server.DeviceMemoryWorks(wait); !status.ok()) return status;
    const auto exported = paths->device.Export(tensor->mine.data, tensor->mine.bytes);
    if (exported.ok()) {
      tensor->device = *exported;
      tensor->rows.offset_bytes = static_cast<uint8_t*>(tensor->mine.data) - tensor->device->data();
      return Register(tensor, wait);
    }
    if (exported.status().code() == absl::StatusCode::kInvalidArgument) return exported.status();
    auto block = paths->device.Allocate(tensor->context, tensor->mine.bytes);
    if (!block.ok()) {
      return TransportUnavailable(
          absl::StrCat(Sentence(exported.status()), ", and no memory is left to copy them to: ", Sentence(block.status())));
    }
    why_not_better = absl::StrCat(Sentence(exported.status()), ", so they are copied on the device");
    tensor->block = *std::move(block);
    tensor->device = std::static_pointer_cast<const DeviceBacking>(tensor->block->backing());
    tensor->rows.offset_bytes = tensor->block->offset();
    return Register(tensor, wait);
  }
  absl::Status PlaceTensor(PlacedTensor* tensor, PathDemand demand, const Wait& wait) {
    if (!tensor->mine.on_device) {
      if (demand != PathDemand::kCudaIpc) return PlaceInHostMemory(tensor, wait);
      return TransportUnavailable("rows lie in host memory, which cuda_ipc does not share");
    }
    auto context = paths->device.ContextOf(tensor->mine.data, tensor->mine.bytes);
    if (!context.ok()) {
      return context.status().code() == absl::StatusCode::kInvalidArgument
                 ? MakeLocalError(v1::ERROR_REASON_INVALID_FIELD, absl::StatusCode::kInvalidArgument, Sentence(context.status()))
                 : TransportUnavailable(Sentence(context.status()));
    }
    tensor->context = *std::move(context);
    if (demand != PathDemand::kSharedMemory) {
      const absl::Status status = PlaceInDeviceMemory(tensor, wait);
      if (status.ok() || !PathFails(status) || demand == PathDemand::kCudaIpc) return status;
      why_not_better = absl::StrCat(Sentence(status), ", so device memory goes through the host");
      *tensor = {tensor->mine, nullptr, nullptr, std::move(tensor->context), nullptr, {}};
    }
    return PlaceInHostMemory(tensor, wait);
  }

  // ---- the rows' way into what was placed
  absl::Status CopyIn(CuStream stream) {
    std::vector<std::shared_ptr<DeviceContext>> contexts;
    bool through_host = false;
    absl::Status status = ForEach([&](PlacedTensor& tensor, bool is_write) -> absl::Status {
      if (tensor.context != nullptr && std::find(contexts.begin(), contexts.end(), tensor.context) == contexts.end()) {
        contexts.push_back(tensor.context);
      }
      if (tensor.block == nullptr || is_write) return absl::OkStatus();
      if (tensor.context == nullptr) {
        paths->copies.Copy(tensor.block->data(), tensor.mine.data, tensor.mine.bytes);
        return absl::OkStatus();
      }
      if (tensor.region != nullptr) {
        LockForDevice(*tensor.region, tensor.context);
        through_host = true;
      } else if (absl::Status ordered = tensor.context->Record(stream); !ordered.ok()) {
        // A call that ended early left the block while its own copy into it may still wait, on another stream: the event stands for
        // that copy, and this stream waits for what the event stood for.
        return ordered;
      }
      return tensor.context->CopyOn(stream, tensor.block->data(), tensor.mine.data, tensor.mine.bytes);
    });
    for (const auto& context : contexts) {
      if (status.ok()) status = context->Record(stream);
      if (status.ok() && through_host) status = context->Synchronize(stream);
    }
    if (status.ok()) return status;
    // What was placed is free for others from now on: no copy may be under way.
    for (const auto& context : contexts) static_cast<void>(context->Synchronize(stream));
    return status;
  }
};

Placement::Placement(std::unique_ptr<State> state) : state_(std::move(state)) {}
Placement::Placement(Placement&&) noexcept = default;
Placement& Placement::operator=(Placement&&) noexcept = default;
Placement::~Placement() = default;

MemoryPath Placement::path() const { return state_->reads.front().path(); }
const std::string& Placement::session_id() const { return state_->session_id; }
const std::vector<PlacedRows>& Placement::reads() const { return state_->read_rows; }
const std::optional<PlacedRows>& Placement::write() const { return state_->write_rows; }
const std::string& Placement::why_not_better() const { return state_->why_not_better; }

absl::Status Placement::Finish() {
  if (!state_->write.has_value() || state_->write->block == nullptr) return absl::OkStatus();
  PlacedTensor& tensor = *state_->write;
  if (tensor.context == nullptr) {
    state_->paths->copies.Copy(tensor.mine.data, tensor.block->data(), tensor.mine.bytes);
    return absl::OkStatus();
  }
  if (tensor.region != nullptr) LockForDevice(*tensor.region, tensor.context);
  absl::Status status = tensor.context->CopyAfterEvent(tensor.mine.data, tensor.block->data(), tensor.mine.bytes);
  return status.ok() ? tensor.context->AwaitCopies() : status;
}

absl::Status Placement::Renew(const std::string& session_id, const Wait& wait) {
  ServerRegions& server = state_->paths->server;
  const auto renew = [&]() -> absl::Status {
    auto session = server.SessionOr(session_id, wait);
    if (!session.ok()) return session.status();
    if (*session == state_->session_id) {
      static_cast<void>(state_->ForEach([&](PlacedTensor& tensor, bool) {
        server.Lost(state_->session_id, *tensor.backing(), tensor.rows.region_id);
        return absl::OkStatus();
      }));
    } else {
      server.Forget(state_->session_id);
      state_->session_id = *std::move(session);
    }
    return state_->ForEach([&](PlacedTensor& tensor, bool) { return state_->Register(&tensor, wait); });
  };
  absl::Status status = renew();
  if (session_id.empty() && ErrorReason(status) == "SESSION_NOT_FOUND") {  // it was the own session that is gone
    server.Forget(state_->session_id);
    status = renew();
  }
  state_->CollectRows();
  return status;
}

void Placement::Abandon() {
  const Deadline deadline = std::chrono::system_clock::now() + kAbandonTimeout;
  std::vector<std::shared_ptr<const Backing>> callers;
  static_cast<void>(state_->ForEach([&](PlacedTensor& tensor, bool) {
    // What was copied may be written to as long as the server likes, if nobody uses it again; the caller's own memory may not.
    if (tensor.block == nullptr) {
      callers.push_back(tensor.backing());
    } else if (tensor.region != nullptr) {
      state_->paths->host.Retire(*tensor.region);
    } else {
      state_->paths->device.Retire(*tensor.device);
    }
    return absl::OkStatus();
  }));
  if (!callers.empty()) state_->paths->server.Drop(callers, deadline);
}

SharedRowsBuffer::SharedRowsBuffer(SharedRowsBuffer&& other) noexcept
    : paths_(std::move(other.paths_)),
      block_(std::move(other.block_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      page_locked_(std::exchange(other.page_locked_, false)) {}

SharedRowsBuffer& SharedRowsBuffer::operator=(SharedRowsBuffer&& other) noexcept {
  if (this == &other) return *this;
  block_ = std::move(other.block_);
  paths_ = std::move(other.paths_);
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  page_locked_ = std::exchange(other.page_locked_, false);
  return *this;
}

SharedRowsBuffer::~SharedRowsBuffer() { block_.reset(); }

std::shared_ptr<MemoryPaths> MemoryPaths::Create(const std::string& target, std::shared_ptr<grpc::Channel> channel,
                                                 const ClientOptions& client_options, const MemoryPathsOptions& options) {
  return std::shared_ptr<MemoryPaths>(
      new MemoryPaths(std::make_shared<MemoryPathsState>(target, std::move(channel), client_options, options)));
}

MemoryPaths::MemoryPaths(std::shared_ptr<MemoryPathsState> state) : state_(std::move(state)) {}

MemoryPaths::~MemoryPaths() { Close(); }

void MemoryPaths::Close() { state_->server.CloseSession(); }

absl::StatusOr<Placement> MemoryPaths::Place(const CallRows& rows, const std::string& session_id, PathDemand demand,
                                             const Wait& wait) {
  auto placement = std::make_unique<Placement::State>();
  placement->paths = state_;
  for (const RowsMemory& memory : rows.reads) placement->reads.push_back({memory, nullptr, nullptr, nullptr, nullptr, {}});
  if (rows.write.has_value()) placement->write = PlacedTensor{*rows.write, nullptr, nullptr, nullptr, nullptr, {}};
  const auto on_device = [](const RowsMemory& memory) { return memory.on_device; };
  const bool any_on_device =
      std::any_of(rows.reads.begin(), rows.reads.end(), on_device) || (rows.write.has_value() && rows.write->on_device);
  const auto place = [&]() -> absl::Status {
    // Where there is no path no session is opened for it.
    if (any_on_device || demand != PathDemand::kCudaIpc) {
      bool named = false;
      absl::Status works = state_->server.HostMemoryWorks(wait, &named);
      if (!works.ok() && any_on_device) works = state_->server.DeviceMemoryWorks(wait);
      if (!works.ok()) return works;
    }
    auto session = state_->server.SessionOr(session_id, wait);
    if (!session.ok()) return session.status();
    placement->session_id = *std::move(session);
    return placement->ForEach([&](PlacedTensor& tensor, bool) {
      tensor = {tensor.mine, nullptr, nullptr, nullptr, nullptr, {}};
      return placement->PlaceTensor(&tensor, demand, wait);
    });
  };
  absl::Status status = place();
  if (session_id.empty() && ErrorReason(status) == "SESSION_NOT_FOUND") {  // the own one ended unnoticed
    state_->server.Forget(placement->session_id);
    status = place();
  }
  if (!status.ok()) return status;
  if (status = placement->CopyIn(static_cast<CuStream>(rows.stream)); !status.ok()) return status;
  placement->CollectRows();
  return Placement(std::move(placement));
}

absl::StatusOr<SharedRowsBuffer> MemoryPaths::AllocateRows(int64_t bytes) {
  auto block = state_->host.Allocate(bytes);
  if (!block.ok()) {
    if (block.status().code() != absl::StatusCode::kResourceExhausted) return TransportUnavailable(Sentence(block.status()));
    return MakeLocalError(v1::ERROR_REASON_MEMORY_BUDGET_EXCEEDED, absl::StatusCode::kResourceExhausted, Sentence(block.status()));
  }
  SharedRowsBuffer buffer;
  buffer.paths_ = state_;
  buffer.data_ = (*block)->data();
  buffer.bytes_ = bytes;
  buffer.block_ = *std::move(block);
  return buffer;
}

absl::StatusOr<SharedRowsBuffer> MemoryPaths::AllocateStaging(const void* device_data, int64_t bytes) {
  absl::StatusOr<SharedRowsBuffer> buffer = AllocateRows(bytes);
  if (!buffer.ok()) return buffer;
  const auto context = state_->device.ContextOf(device_data, bytes);
  if (context.ok()) {
    const auto* block = static_cast<const Arena::Block*>(buffer->block_.get());
    buffer->page_locked_ = LockForDevice(static_cast<const SharedRegion&>(*block->backing()), *context);
  }
  return buffer;
}

absl::StatusOr<std::unique_ptr<DeviceRead>> MemoryPaths::BeginCopyToHost(void* to, const void* device_data, int64_t bytes,
                                                                         void* stream) {
  auto context = state_->device.ContextOf(device_data, bytes);
  if (!context.ok()) return TransportUnavailable(Sentence(context.status()));
  return DeviceRead::Begin(*std::move(context), static_cast<CuStream>(stream), to, device_data, bytes);
}

absl::Status MemoryPaths::OrderCopies(const void* device_data, int64_t bytes, void* stream) {
  const auto context = state_->device.ContextOf(device_data, bytes);
  return context.ok() ? (*context)->Record(static_cast<CuStream>(stream)) : TransportUnavailable(Sentence(context.status()));
}

absl::Status MemoryPaths::CopyToDevice(void* device_data, const void* from, int64_t bytes) {
  const auto context = state_->device.ContextOf(device_data, bytes);
  if (!context.ok()) return TransportUnavailable(Sentence(context.status()));
  return (*context)->CopyAfterEvent(device_data, from, bytes);
}

absl::Status MemoryPaths::AwaitCopies(const void* device_data, int64_t bytes) {
  const auto context = state_->device.ContextOf(device_data, bytes);
  return context.ok() ? (*context)->AwaitCopies() : TransportUnavailable(Sentence(context.status()));
}

absl::Status MemoryPaths::CopyToHost(void* to, const void* device_data, int64_t bytes, void* stream) {
  const auto context = state_->device.ContextOf(device_data, bytes);
  if (!context.ok()) return TransportUnavailable(Sentence(context.status()));
  if (absl::Status status = (*context)->CopyOn(static_cast<CuStream>(stream), to, device_data, bytes); !status.ok()) return status;
  return (*context)->Synchronize(static_cast<CuStream>(stream));
}

void MemoryPaths::Forget(const std::string& session_id) { state_->server.Forget(session_id); }

}  // namespace headwater::client::internal
