// DeviceCommunicator by NCCL.
//
// Communicators do not block: an unfinished call reports that, and is polled until it is done or the communicator is aborted. A
// mutex gives the communicator to one call at a time; only Abort() makes another call release it early.
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "kernels/comm/device_communicator.h"
#include "kernels/comm/nccl_library.h"

namespace headwater {
namespace {

using Clock = std::chrono::steady_clock;

// NCCL runs a nonblocking communicator's call on a new thread, within some tens of microseconds, and the caller cannot enqueue
// until then. So a call is polled without a pause for kBusyTime, then every kPollTime.
constexpr auto kBusyTime = std::chrono::milliseconds(1);
constexpr auto kPollTime = std::chrono::microseconds(50);
// For work without other ranks.
constexpr double kCallSeconds = 30;

ncclConfig_t ConfigOf(int32_t most_blocks) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.minCTAs = 1;
  config.maxCTAs = most_blocks;
  return config;
}

class NcclCommunicator final : public DeviceCommunicator {
 public:
  NcclCommunicator(const NcclLibrary& nccl, int32_t rank) : nccl_(nccl), rank_(rank) {}
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  ~NcclCommunicator() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (comm_ == nullptr) return;
    // Finalizing waits for the others, but not longer than they take to leave: a rank may be gone.
    if (Await(nccl_.CommFinalize(comm_), "leaving", kLeavingSeconds, nullptr).ok()) {
      static_cast<void>(nccl_.CommDestroy(comm_));
    } else if (comm_ != nullptr) {
      static_cast<void>(nccl_.CommAbort(comm_));
    }
  }

  absl::Status Join(int32_t world_size, const ncclUniqueId& id, int32_t most_blocks,
                    const std::function<absl::Status()>& interrupted) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ncclConfig_t config = ConfigOf(most_blocks);
    return Await(nccl_.CommInitRankConfig(&comm_, world_size, id, rank_, &config), "joining the group", kMeetingSeconds,
                 &interrupted);
  }

  absl::Status AllReduceSum(const double* data, double* sums, int64_t count, cudaStream_t stream) override {
    return Call("adding up over ranks",
                [&] { return nccl_.AllReduce(data, sums, static_cast<size_t>(count), ncclFloat64, ncclSum, comm_, stream); });
  }
  absl::Status ReduceSum(float* data, int64_t count, cudaStream_t stream) override {
    return Call("adding up over ranks",
                [&] { return nccl_.Reduce(data, data, static_cast<size_t>(count), ncclFloat32, ncclSum, 0, comm_, stream); });
  }
  absl::Status AllGather(void* data, int64_t bytes, cudaStream_t stream) override {
    return Call("collecting from ranks", [&] {
      return nccl_.AllGather(static_cast<const char*>(data) + rank_ * bytes, data, static_cast<size_t>(bytes), ncclInt8, comm_,
                             stream);
    });
  }

  absl::Status ReduceScatterSum(float* data, absl::Span<const int64_t> bounds, cudaStream_t stream) override {
    constexpr char kWhat[] = "adding up parts over ranks";
    if (const int64_t count = EqualParts(bounds); count > 0) {
      return Call(kWhat, [&] {
        return nccl_.ReduceScatter(data, data + rank_ * count, static_cast<size_t>(count), ncclFloat32, ncclSum, comm_, stream);
      });
    }
    return CallForParts(kWhat, bounds, [&](int32_t owner, int64_t start, size_t count) {
      return nccl_.Reduce(data + start, data + start, count, ncclFloat32, ncclSum, owner, comm_, stream);
    });
  }
  absl::Status AllGatherParts(void* data, absl::Span<const int64_t> bounds, cudaStream_t stream) override {
    if (const int64_t bytes = EqualParts(bounds); bytes > 0) return AllGather(data, bytes, stream);
    return CallForParts("collecting parts from ranks", bounds, [&](int32_t owner, int64_t start, size_t bytes) {
      char* const part = static_cast<char*>(data) + start;
      return nccl_.Broadcast(part, part, bytes, ncclInt8, owner, comm_, stream);
    });
  }

  absl::Status status() override {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return absl::OkStatus();  // the mutex's holder checks for itself
    HEADWATER_RETURN_IF_ERROR(reason());
    ncclResult_t state = ncclSuccess;
    const ncclResult_t result = nccl_.CommGetAsyncError(comm_, &state);
    if (result != ncclSuccess) state = result;
    return state == ncclSuccess || state == ncclInProgress ? absl::OkStatus() : Failure(state, "work of the group");
  }

  void Abort(const absl::Status& reason) override {
    abort_wanted_ = true;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (reason_.ok()) reason_ = reason;
    if (comm_ != nullptr) static_cast<void>(nccl_.CommAbort(std::exchange(comm_, nullptr)));
  }

 private:
  static constexpr double kLeavingSeconds = 2;

  // Requires the mutex, like everything below.
  absl::Status reason() const {
    if (!reason_.ok()) return reason_;
    if (abort_wanted_ || comm_ == nullptr) return MakeError(ErrorReason::kEngineFailed, "the group of GPUs has been given up");
    return absl::OkStatus();
  }

  absl::Status Failure(ncclResult_t result, const char* what) const {
    std::string text = std::string(what) + " failed: NCCL says " + nccl_.GetErrorString(result);
    const char* const last = nccl_.GetLastError(comm_);
    if (last != nullptr && last[0] != '\0') text += std::string(" (") + last + ")";
    return MakeError(ErrorReason::kEngineFailed, text, {{"ncclError", nccl_.GetErrorString(result)}});
  }

  // Waits until the call that returned `result` is finished.
  absl::Status Await(ncclResult_t result, const char* what, double seconds, const std::function<absl::Status()>* interrupted) {
    if (result == ncclInProgress) {
      const auto start = Clock::now();
      do {
        if (abort_wanted_) return reason();
        if (interrupted != nullptr && *interrupted) HEADWATER_RETURN_IF_ERROR((*interrupted)());
        const auto waited = Clock::now() - start;
        if (waited > std::chrono::duration<double>(seconds)) {
          return MakeError(ErrorReason::kEngineFailed,
                           std::string(what) + " took more than " + std::to_string(static_cast<int>(seconds)) + " s");
        }
        if (waited < kBusyTime) {
          std::this_thread::yield();
        } else {
          std::this_thread::sleep_for(kPollTime);
        }
        const ncclResult_t asked = nccl_.CommGetAsyncError(comm_, &result);
        if (asked != ncclSuccess) result = asked;
      } while (result == ncclInProgress);
    }
    return result == ncclSuccess ? absl::OkStatus() : Failure(result, what);
  }

  template <typename Function>
  absl::Status Call(const char* what, Function call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    HEADWATER_RETURN_IF_ERROR(reason());
    return Await(call(), what, kCallSeconds, nullptr);
  }

  // The common length of all parts; 0 if they differ.
  static int64_t EqualParts(absl::Span<const int64_t> bounds) {
    for (size_t part = 1; part + 1 < bounds.size(); ++part) {
      if (bounds[part + 1] - bounds[part] != bounds[1]) return 0;
    }
    return bounds[1];
  }

  // Calls call(rank of the part, start, count) for all parts that are not empty, as one piece of work.
  template <typename Function>
  absl::Status CallForParts(const char* what, absl::Span<const int64_t> bounds, Function call) {
    return Call(what, [&] {
      const auto is_well = [](ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; };
      ncclResult_t result = nccl_.GroupStart();
      if (result != ncclSuccess) return result;
      for (size_t part = 0; is_well(result) && part + 1 < bounds.size(); ++part) {
        const int64_t count = bounds[part + 1] - bounds[part];
        if (count > 0) result = call(static_cast<int32_t>(part), bounds[part], static_cast<size_t>(count));
      }
      // Ends the group even after a failure in it.
      const ncclResult_t ended = nccl_.GroupEnd();
      return is_well(result) ? ended : result;
    });
  }

  const NcclLibrary& nccl_;
  const int32_t rank_;
  std::atomic<bool> abort_wanted_{false};
  std::mutex mutex_;
  ncclComm_t comm_ = nullptr;
  absl::Status reason_;
};

}  // namespace

absl::StatusOr<std::string> MakeDeviceGroupId() {
  const absl::StatusOr<const NcclLibrary*> nccl = LoadNccl();
  if (!nccl.ok()) return nccl.status();
  ncclUniqueId id;
  const ncclResult_t result = (*nccl)->GetUniqueId(&id);
  if (result != ncclSuccess) {
    return MakeError(ErrorReason::kEngineFailed,
                     std::string("an id for a group of GPUs could not be made: NCCL says ") + (*nccl)->GetErrorString(result));
  }
  return std::string(id.internal, sizeof(id.internal));
}

absl::StatusOr<std::unique_ptr<DeviceCommunicator>> JoinDeviceGroup(int32_t rank, int32_t world_size, const std::string& id,
                                                                    int32_t most_blocks,
                                                                    const std::function<absl::Status()>& interrupted) {
  const absl::StatusOr<const NcclLibrary*> nccl = LoadNccl();
  if (!nccl.ok()) return nccl.status();
  ncclUniqueId unique;
  if (id.size() != sizeof(unique.internal)) {
    return MakeError(
        ErrorReason::kInvalidField,
        "group.device_group_id must have " + std::to_string(sizeof(unique.internal)) + " bytes, got " + std::to_string(id.size()),
        {{"field", "group.device_group_id"}, {"actual", std::to_string(id.size())}});
  }
  std::memcpy(unique.internal, id.data(), id.size());
  auto communicator = std::make_unique<NcclCommunicator>(**nccl, rank);
  HEADWATER_RETURN_IF_ERROR(communicator->Join(world_size, unique, most_blocks, interrupted));
  return std::unique_ptr<DeviceCommunicator>(std::move(communicator));
}

}  // namespace headwater
