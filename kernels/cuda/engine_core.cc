#include "kernels/cuda/engine_core.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "headwater/kernels/error.h"
#include "kernels/core/saturating.h"
#include "kernels/cuda/computation/deferred_grad_weight.h"
#include "kernels/cuda/computation/row_digester.h"
#include "kernels/cuda/device_group.h"

namespace headwater::cuda {
namespace {

constexpr int kOldestCapability = 80;
constexpr int64_t kDefaultWorkspaceBytes = int64_t{4} << 30;
constexpr int64_t kZeroBytes = int64_t{64} << 10;

absl::Status NoDevice(const std::string& why) {
  return MakeError(ErrorReason::kFeatureNotBuilt, "the CUDA engine cannot be used here: " + why, {{"feature", "cuda_engine"}});
}

absl::Status ShardError(ErrorReason reason, int32_t rank, const char* what, const std::string& cause) {
  const std::string shard = std::to_string(rank);
  return MakeError(reason, "shard " + shard + what + cause, {{"shard", shard}});
}

}  // namespace

EngineCore::EngineCore(EngineOptions options)
    : options_(std::move(options)),
      deferred_(std::make_unique<DeferredGradWeight>(*this)),
      digester_(std::make_unique<RowDigester>(*this)) {}

absl::StatusOr<std::shared_ptr<EngineCore>> EngineCore::Create(EngineOptions options) {
  std::shared_ptr<EngineCore> core(new EngineCore(std::move(options)));
  absl::Status status = core->Open();
  if (!status.ok()) return status;
  return core;
}

absl::Status EngineCore::Open() {
  int device_count = 0;
  const cudaError_t error = cudaGetDeviceCount(&device_count);
  if (error == cudaErrorInsufficientDriver) return NoDevice("there is no NVIDIA driver, or one older than this build needs");
  if (error != cudaSuccess || device_count == 0) {
    return NoDevice(error == cudaErrorNoDevice || error == cudaSuccess ? "no NVIDIA GPU is visible"
                                                                       : std::string("CUDA says ") + cudaGetErrorString(error));
  }
  if (options_.device_index < 0 || options_.device_index >= device_count) {
    return MakeError(
        ErrorReason::kInvalidField,
        "device_index must be in [0, " + std::to_string(device_count) + "), got " + std::to_string(options_.device_index),
        {{"field", "device_index"}, {"actual", std::to_string(options_.device_index)}});
  }
  cudaDeviceProp properties;
  HEADWATER_RETURN_IF_ERROR(CudaStatus(cudaGetDeviceProperties(&properties, options_.device_index), "asking for the device"));
  device_model_ = properties.name;
  static_assert(sizeof(properties.uuid) == sizeof(device_uuid_));
  std::memcpy(device_uuid_.data(), &properties.uuid, sizeof(device_uuid_));
  const int capability = 10 * properties.major + properties.minor;
  if (capability < kOldestCapability) {
    return NoDevice(device_model_ + " has compute capability " + std::to_string(properties.major) + "." +
                    std::to_string(properties.minor) + ", and 8.0 is the oldest that is supported");
  }
  hopper_ = capability == 90 && !options_.portable_kernels;
  HEADWATER_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(options_.device_index), "choosing the device"));
  const int64_t device_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  if (options_.memory_budget_bytes > device_bytes) {
    return MakeError(
        ErrorReason::kMemoryBudgetExceeded,
        "memory_budget_bytes is " + std::to_string(options_.memory_budget_bytes) + ", and " + device_model_ + " has " +
            std::to_string(device_bytes) + " bytes",
        {{"budgetBytes", std::to_string(options_.memory_budget_bytes)}, {"availableBytes", std::to_string(device_bytes)}});
  }
  if (options_.memory_budget_bytes == 0) options_.memory_budget_bytes = device_bytes / 5 * 4;
  if (options_.workspace_bytes == 0) options_.workspace_bytes = kDefaultWorkspaceBytes;
  if (options_.thread_count == 0) options_.thread_count = 1;
  for (cudaStream_t* stream : {&stream_, &upload_stream_, &download_stream_}) {
    HEADWATER_RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "making a stream"));
  }
  for (cudaEvent_t* event : {&order_event_, &flag_event_, &sum_event_, &results_event_}) {
    HEADWATER_RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "making an event"));
  }
  absl::StatusOr<PinnedMemory> bounce = PinnedMemory::Allocate(kBounceBytes);
  if (!bounce.ok()) return bounce.status();
  bounce_ = *std::move(bounce);
  absl::StatusOr<DeviceMemory> zeros = DeviceMemory::Allocate(kZeroBytes);
  if (!zeros.ok()) return zeros.status();
  zeros_ = *std::move(zeros);
  HEADWATER_RETURN_IF_ERROR(digester_->Open());
  if (options_.group.world_size == 1) return absl::OkStatus();
  HEADWATER_RETURN_IF_ERROR(deferred_->Prepare());
  absl::StatusOr<std::unique_ptr<DeviceGroup>> group = DeviceGroup::Join(options_.group);
  if (!group.ok()) return group.status();
  group_ = *std::move(group);
  return CheckAlike();
}

absl::Status EngineCore::CheckAlike() const {
  const absl::StatusOr<Exchanged> ranks = group_->Exchange(/*can_go_on=*/true, {hopper_ ? 1.0 : 0.0});
  if (!ranks.ok()) return ranks.status();
  for (const std::vector<double>& rank : ranks->values) {
    if (rank != ranks->values.front()) {
      return MakeError(ErrorReason::kInvalidCombination,
                       "the ranks of a group must all use kernels for Hopper GPUs, or none; rank " +
                           std::to_string(group_->rank()) + ", an " + device_model_ + ", does" + (hopper_ ? "" : " not"));
    }
  }
  return absl::OkStatus();
}

EngineCore::~EngineCore() {
  if (stream_ != nullptr) MakeCurrent();
  group_.reset();
  for (const cudaEvent_t event : {order_event_, flag_event_, sum_event_, results_event_}) {
    if (event != nullptr) static_cast<void>(cudaEventDestroy(event));
  }
  for (const cudaStream_t stream : {stream_, upload_stream_, download_stream_}) {
    if (stream != nullptr) static_cast<void>(cudaStreamDestroy(stream));
  }
}

absl::Status EngineCore::Check(cudaError_t error, const char* what) const {
  if (error == cudaSuccess) return absl::OkStatus();
  absl::Status status = CudaStatus(error, what);
  static_cast<void>(cudaGetLastError());
  // An error that stays is one that the device does not recover from. Asked once: the stream may end its work meanwhile.
  const cudaError_t state = cudaStreamQuery(stream_);
  if (state == cudaSuccess || state == cudaErrorNotReady) return status;
  status = MakeError(ErrorReason::kEngineFailed, "the GPU is lost until this process starts anew: " + std::string(status.message()),
                     {{"cudaError", cudaGetErrorName(error)}});
  bool first = false;
  {
    std::lock_guard<std::mutex> lock(health_mutex_);
    first = health_.ok();
    if (first) health_ = status;
  }
  if (first && group_ != nullptr) group_->Abort(status);
  if (first && options_.on_device_lost) options_.on_device_lost(status);
  return status;
}

absl::Status EngineCore::SynchronizeAll(std::initializer_list<cudaStream_t> streams, const char* what) {
  absl::Status first;
  for (const cudaStream_t stream : streams) first.Update(Check(cudaStreamSynchronize(stream), what));
  return first;
}

absl::Status EngineCore::Synchronize(const char* what) {
  const DeviceGroup::Wait wait(group_.get());
  // All of them, whatever the first one says: their copies use callers' memory.
  absl::Status first = SynchronizeAll({upload_stream_, stream_, download_stream_}, what);
  if (group_ != nullptr) first.Update(SynchronizeAll({group_->merge_stream(), group_->sum_stream()}, what));
  work_goes_on_ = false;
  next_idle_ = {};
  return first.ok() && group_ != nullptr ? group_->status() : first;
}

absl::Status EngineCore::EndIfFailed(absl::Status status) {
  if (!status.ok()) static_cast<void>(Synchronize("work of a call that failed"));
  return status;
}

absl::Status EngineCore::CheckWorkspace() const {
  if (workspace_.bytes() > 0) return absl::OkStatus();
  return MakeError(ErrorReason::kMemoryBudgetExceeded,
                   "the engine has no workspace: others took the device's memory while it was made larger for another head");
}

absl::Status EngineCore::SynchronizeTransfers(const char* what) {
  const DeviceGroup::Wait wait(group_.get());
  absl::Status first = SynchronizeAll({upload_stream_, download_stream_}, what);
  if (group_ != nullptr) first.Update(SynchronizeAll({group_->sum_stream()}, what));
  return first.ok() && group_ != nullptr ? group_->status() : first;
}

absl::Status EngineCore::AwaitEvent(cudaEvent_t event, const char* what) {
  const DeviceGroup::Wait wait(group_.get());
  HEADWATER_RETURN_IF_ERROR(Check(cudaEventSynchronize(event), what));
  return group_ == nullptr ? absl::OkStatus() : group_->status();
}

absl::Status EngineCore::Order(cudaStream_t earlier, cudaStream_t later) {
  // A wait is for the event's record at the time when the wait was enqueued: one event serves all.
  HEADWATER_RETURN_IF_ERROR(Check(cudaEventRecord(order_event_, earlier), "recording an event"));
  return Check(cudaStreamWaitEvent(later, order_event_, 0), "ordering streams");
}

absl::Status EngineCore::OrderForWriting(absl::Span<const std::byte> memory, cudaStream_t later) {
  const bool is_idle =
      !memory.empty() && memory.data() >= idle_.data() && memory.data() + memory.size() <= idle_.data() + idle_.size();
  return is_idle ? Check(cudaStreamWaitEvent(later, results_event_, 0), "ordering streams") : Order(stream_, later);
}

absl::Status EngineCore::health() const {
  {
    std::lock_guard<std::mutex> lock(health_mutex_);
    if (!health_.ok()) return health_;
  }
  // Taken first: a call that ends meanwhile says so again.
  if (work_goes_on_.exchange(false)) {
    MakeCurrent();
    const cudaError_t error = cudaStreamQuery(stream_);
    if (error == cudaErrorNotReady) {
      work_goes_on_ = true;
    } else {
      HEADWATER_RETURN_IF_ERROR(Check(error, "work on the device"));
    }
  }
  return group_ == nullptr ? absl::OkStatus() : group_->status();
}

absl::Status EngineCore::CallProbe(ShardPhase phase, int32_t rank) const {
  return options_.shard_probe == nullptr ? absl::OkStatus() : options_.shard_probe(phase, rank);
}

absl::Status EngineCore::Prepare(absl::FunctionRef<absl::Status(int32_t rank)> prepare) {
  for (int32_t rank = first_shard(); rank < first_shard() + held_shards(); ++rank) {
    absl::Status status = CallProbe(ShardPhase::kPrepare, rank);
    if (status.ok()) status = prepare(rank);
    if (!status.ok()) {
      return ShardError(ErrorReason::kShardNotReady, rank,
                        " could not begin, and nothing was changed: ", std::string(status.message()));
    }
  }
  return absl::OkStatus();
}

absl::Status EngineCore::TryAct(absl::FunctionRef<absl::Status()> act) {
  for (int32_t rank = first_shard(); rank < first_shard() + held_shards(); ++rank) {
    const absl::Status status = CallProbe(ShardPhase::kAct, rank);
    if (!status.ok()) return ShardError(ErrorReason::kEngineFailed, rank, " failed: ", std::string(status.message()));
  }
  act_goes_on_ = false;
  idle_ = std::exchange(next_idle_, {});
  absl::Status status = act();
  if (status.ok() && act_goes_on_) {
    work_goes_on_ = true;
    return status;
  }
  // The others would wait for work that this rank has not enqueued.
  if (!status.ok() && group_ != nullptr) group_->Abort(status);
  const absl::Status finished = Synchronize("work on the device");
  if (status.ok()) status = finished;
  if (status.ok() || HasReason(status, ErrorReason::kEngineFailed)) return status;
  return MakeError(ErrorReason::kEngineFailed, std::string(status.message()), GetErrorMetadata(status));
}

absl::Status EngineCore::Act(absl::FunctionRef<absl::Status()> act) {
  absl::Status status = TryAct(act);
  if (!status.ok() && group_ != nullptr) group_->Abort(status);
  return status;
}

absl::Status EngineCore::RunDecided(absl::FunctionRef<absl::Status(int32_t rank)> prepare, absl::FunctionRef<absl::Status()> act) {
  HEADWATER_RETURN_IF_ERROR(health());
  absl::Status ready = Prepare(prepare);
  if (group_ != nullptr) ready = group_->Agree(ready);
  return ready.ok() ? Act(act) : ready;
}

absl::Status EngineCore::RunAlone(absl::FunctionRef<absl::Status()> act) {
  HEADWATER_RETURN_IF_ERROR(health());
  HEADWATER_RETURN_IF_ERROR(Prepare([](int32_t) { return absl::OkStatus(); }));
  return Act(act);
}

absl::Status EngineCore::RunDecidedByShard(absl::FunctionRef<absl::Status(int32_t index)> act) {
  return RunDecided([](int32_t) { return absl::OkStatus(); },
                    [&] {
                      for (int32_t index = 0; index < held_shards(); ++index) {
                        absl::Status status = act(index);
                        if (!status.ok()) return status;
                      }
                      return absl::OkStatus();
                    });
}

absl::Status EngineCore::Admit(int64_t own_bytes, int64_t workspace_bytes, const std::string& plan_text) {
  WorkLock work(*this);
  std::lock_guard<std::mutex> lock(plan_mutex_);
  const int64_t more_workspace = std::max<int64_t>(workspace_bytes - workspace_bytes_, 0);
  const int64_t requested = SaturatingAdd(own_bytes, more_workspace);
  const int64_t free_bytes = options_.memory_budget_bytes - own_bytes_ - workspace_bytes_;
  if (requested > free_bytes) {
    return MakeError(ErrorReason::kMemoryBudgetExceeded,
                     "the head needs " + plan_text + " (" + std::to_string(requested) + " bytes), and " +
                         std::to_string(free_bytes) + " of " + std::to_string(options_.memory_budget_bytes) + " bytes are free",
                     {{"requestedBytes", std::to_string(requested)},
                      {"availableBytes", std::to_string(free_bytes)},
                      {"budgetBytes", std::to_string(options_.memory_budget_bytes)}});
  }
  if (more_workspace > 0) HEADWATER_RETURN_IF_ERROR(ResizeWorkspace(workspace_bytes));
  own_bytes_ += own_bytes;
  ++head_count_;
  return absl::OkStatus();
}

absl::Status EngineCore::ResizeWorkspace(int64_t bytes) {
  HEADWATER_RETURN_IF_ERROR(deferred_->Flush());
  HEADWATER_RETURN_IF_ERROR(Synchronize("deferred products"));
  workspace_ = DeviceMemory();
  const int64_t before = std::exchange(workspace_bytes_, 0);
  if (bytes == 0) {
    products_.reset();
    products_workspace_ = DeviceMemory();
    return absl::OkStatus();
  }
  if (products_ == nullptr) {
    absl::StatusOr<DeviceMemory> memory = DeviceMemory::Allocate(Products::kWorkspaceBytes);
    if (!memory.ok()) return memory.status();
    absl::StatusOr<std::unique_ptr<Products>> products = Products::Create(memory->As<void>(), options_.algorithm_cache_path);
    if (!products.ok()) return products.status();
    products_workspace_ = *std::move(memory);
    products_ = *std::move(products);
  }
  const auto allocate = [this](int64_t all_bytes) {
    absl::StatusOr<DeviceMemory> memory = DeviceMemory::Allocate(all_bytes - Products::kWorkspaceBytes);
    if (!memory.ok()) return memory.status();
    workspace_ = *std::move(memory);
    workspace_bytes_ = all_bytes;
    return absl::OkStatus();
  };
  const absl::Status status = allocate(bytes);
  // Other programs have the device's memory: existing heads continue with the former workspace.
  if (!status.ok() && before > 0) HEADWATER_RETURN_IF_ERROR(allocate(before));
  return status;
}

void EngineCore::Release(int64_t own_bytes) {
  WorkLock work(*this);
  std::lock_guard<std::mutex> lock(plan_mutex_);
  own_bytes_ -= own_bytes;
  if (--head_count_ == 0) static_cast<void>(ResizeWorkspace(0));
}

void EngineCore::NoteForeign(const void* data, int64_t bytes) {
  std::lock_guard<std::mutex> lock(foreign_mutex_);
  Foreign& foreign = foreign_[reinterpret_cast<uintptr_t>(data)];
  foreign.bytes = std::max(foreign.bytes, bytes);
  ++foreign.openings;
}

void EngineCore::ForgetForeign(const void* data) {
  std::lock_guard<std::mutex> lock(foreign_mutex_);
  const auto found = foreign_.find(reinterpret_cast<uintptr_t>(data));
  if (found != foreign_.end() && --found->second.openings == 0) foreign_.erase(found);
}

bool EngineCore::IsForeign(const void* data) const {
  const auto address = reinterpret_cast<uintptr_t>(data);
  std::lock_guard<std::mutex> lock(foreign_mutex_);
  auto found = foreign_.upper_bound(address);
  if (found == foreign_.begin()) return false;
  --found;
  return address - found->first < static_cast<uint64_t>(found->second.bytes);
}

int64_t EngineCore::planned_bytes() const {
  std::lock_guard<std::mutex> lock(plan_mutex_);
  return own_bytes_ + workspace_bytes_;
}

}  // namespace headwater::cuda
