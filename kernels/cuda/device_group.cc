#include "kernels/cuda/device_group.h"

#include <array>
#include <chrono>
#include <string>
#include <utility>

#include "headwater/kernels/error.h"
#include "kernels/cuda/status.h"

namespace headwater::cuda {
namespace {

// A merge is some kilobytes to a megabyte: latency counts. The sum of grad_hidden has the time of half a grad_weight product
// (ColumnsAtOnce()), whose thread blocks it displaces.
constexpr int32_t kMergeBlocks = 4;
constexpr int32_t kSumBlocks = 16;
// These have the device for themselves.
constexpr int32_t kBulkBlocks = 32;
constexpr auto kWatchTime = std::chrono::milliseconds(10);

int64_t NowMs() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

DeviceGroup::DeviceGroup(const EngineGroup& group) : rank_(group.rank), world_size_(group.world_size), host_(group.communicator) {}

absl::StatusOr<std::unique_ptr<DeviceGroup>> DeviceGroup::Join(const EngineGroup& group) {
  std::unique_ptr<DeviceGroup> joined(new DeviceGroup(group));
  absl::Status status = joined->Open(group);
  if (status.ok()) return joined;
  // The others must not wait for this one.
  group.communicator->Abort(status);
  return status;
}

absl::Status DeviceGroup::Open(const EngineGroup& group) {
  const auto join = [this](const std::string& id, int32_t most_blocks, std::unique_ptr<DeviceCommunicator>* joined) {
    auto communicator = JoinDeviceGroup(rank_, world_size_, id, most_blocks, [this] { return host_->status(); });
    if (!communicator.ok()) return communicator.status();
    *joined = *std::move(communicator);
    return absl::OkStatus();
  };
  HEADWATER_RETURN_IF_ERROR(join(group.device_group_id, kMergeBlocks, &merges_));
  // Rank 0 names the others, and the host's communicator passes the name to the other ranks, a byte in each number.
  const auto join_another = [&](int32_t most_blocks, std::unique_ptr<DeviceCommunicator>* joined) {
    std::string id(group.device_group_id.size(), '\0');
    if (is_first()) {
      absl::StatusOr<std::string> made = MakeDeviceGroupId();
      if (!made.ok()) return made.status();
      id = *std::move(made);
    }
    std::vector<double> mine(id.begin(), id.end());
    std::vector<double> all(mine.size() * static_cast<size_t>(world_size_));
    HEADWATER_RETURN_IF_ERROR(host_->AllGather(mine.data(), static_cast<int64_t>(mine.size()), all.data()));
    for (size_t i = 0; i < id.size(); ++i) id[i] = static_cast<char>(all[i]);
    return join(id, most_blocks, joined);
  };
  HEADWATER_RETURN_IF_ERROR(join_another(kSumBlocks, &sums_));
  HEADWATER_RETURN_IF_ERROR(join_another(kBulkBlocks, &bulk_));
  int lowest = 0, highest = 0;
  HEADWATER_RETURN_IF_ERROR(CudaStatus(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "asking for priorities"));
  for (cudaStream_t* stream : {&merge_stream_, &sum_stream_}) {
    HEADWATER_RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, highest), "making a stream"));
  }
  watcher_ = std::thread([this] { Watch(); });
  return absl::OkStatus();
}

DeviceGroup::~DeviceGroup() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    leaving_ = true;
  }
  changed_.notify_all();
  if (watcher_.joinable()) watcher_.join();
  for (const cudaStream_t stream : {merge_stream_, sum_stream_}) {
    if (stream != nullptr) static_cast<void>(cudaStreamDestroy(stream));
  }
}

absl::StatusOr<Exchanged> DeviceGroup::Exchange(bool can_go_on, absl::Span<const double> values) {
  std::vector<double> mine = {can_go_on ? 1.0 : 0.0};
  mine.insert(mine.end(), values.begin(), values.end());
  std::vector<double> all(mine.size() * static_cast<size_t>(world_size_));
  absl::Status met = host_->AllGather(mine.data(), static_cast<int64_t>(mine.size()), all.data());
  if (!met.ok()) {
    Abort(met);
    return status();
  }
  Exchanged exchanged;
  for (int32_t rank = 0; rank < world_size_; ++rank) {
    const auto begin = all.begin() + static_cast<int64_t>(mine.size()) * rank;
    if (*begin == 0 && exchanged.first_failed < 0) exchanged.first_failed = rank;
    exchanged.values.emplace_back(begin + 1, begin + static_cast<int64_t>(mine.size()));
  }
  return exchanged;
}

absl::Status DeviceGroup::Agree(const absl::Status& own) {
  const absl::StatusOr<Exchanged> exchanged = Exchange(own.ok());
  if (!exchanged.ok()) return exchanged.status();
  if (!own.ok() || exchanged->first_failed < 0) return own;
  const std::string shard = std::to_string(exchanged->first_failed);
  return MakeError(ErrorReason::kShardNotReady, "shard " + shard + " could not go on, and nothing was changed: it says why",
                   {{"shard", shard}});
}

absl::Status DeviceGroup::status() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

void DeviceGroup::Abort(const absl::Status& reason) {
  absl::Status broken;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!status_.ok()) return;
    status_ = HasReason(reason, ErrorReason::kEngineFailed)
                  ? reason
                  : MakeError(ErrorReason::kEngineFailed, "the group of GPUs is lost: " + std::string(reason.message()));
    broken = status_;
  }
  host_->Abort(broken);
  // At the same time: each may wait until the device is idle, which it is only when all have ended.
  const std::array<DeviceCommunicator*, 3> all = communicators();
  std::vector<std::thread> threads;
  for (DeviceCommunicator* const communicator : all) {
    threads.emplace_back([&broken, communicator] { communicator->Abort(broken); });
  }
  for (std::thread& thread : threads) thread.join();
}

void DeviceGroup::BeginWait() { waiting_since_ms_ = NowMs(); }

void DeviceGroup::Watch() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!changed_.wait_for(lock, kWatchTime, [this] { return leaving_ || !status_.ok(); })) {
    lock.unlock();
    absl::Status status = host_->status();
    for (DeviceCommunicator* const communicator : communicators()) {
      if (status.ok()) status = communicator->status();
    }
    const int64_t since = waiting_since_ms_;
    if (status.ok() && since > 0 && NowMs() - since > kStuckSeconds * 1000) {
      status = MakeError(ErrorReason::kEngineFailed,
                         "work of rank " + std::to_string(rank_) + " did not end within " + std::to_string(kStuckSeconds) + " s");
    }
    if (!status.ok()) Abort(status);
    lock.lock();
  }
}

}  // namespace headwater::cuda
