// A rank's side of a group of GPUs (EngineOptions::group). It communicates with the other ranks, on host and device, and escapes
// when a rank is lost.
//
// Three communicators on the device. Most micro-batches take two, because their work must not wait for each other's. Merges are
// small and in the way of the products; the sum of grad_hidden is large and runs beside them, on few thread blocks. Large work
// without other work beside it takes as many blocks as the links can feed. That is gigabytes at a step of a replicated head, and a
// teacher's logits where they are cut at other columns than the student's.
//
// A collective that another rank never joins would run forever. A thread of the group looks at the communicators and at the host's
// every few milliseconds, and aborts all of them when any has failed. Waiting calls then return, and status() has the reason.
#ifndef HEADWATER_KERNELS_CUDA_DEVICE_GROUP_H_
#define HEADWATER_KERNELS_CUDA_DEVICE_GROUP_H_

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "headwater/kernels/communicator.h"
#include "headwater/kernels/engine.h"
#include "kernels/comm/device_communicator.h"

namespace headwater::cuda {

// The ranks' contributions to an exchange.
struct Exchanged {
  int32_t first_failed = -1;                // the first rank that cannot continue; -1: none
  std::vector<std::vector<double>> values;  // by rank
};

class DeviceGroup {
 public:
  // Joins, with the current device. Waits for the other ranks. Errors are JoinDeviceGroup()'s, or the reason for which the host's
  // communicator was aborted.
  static absl::StatusOr<std::unique_ptr<DeviceGroup>> Join(const EngineGroup& group);
  ~DeviceGroup();
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  int32_t rank() const { return rank_; }
  int32_t world_size() const { return world_size_; }
  // Rank 0 has the results.
  bool is_first() const { return rank_ == 0; }

  // Host: every rank says whether it can continue, and a few numbers, as many as the others. An error only if the group is broken.
  absl::StatusOr<Exchanged> Exchange(bool can_go_on, absl::Span<const double> values = {});
  // Exchanges a decision: `own` if it is an error, kShardNotReady with the first failed rank if another has one.
  absl::Status Agree(const absl::Status& own);

  // Device. Work of `merges` and `bulk` is enqueued where its results are needed; work of `sums` on sum_stream().
  DeviceCommunicator& merges() { return *merges_; }
  DeviceCommunicator& sums() { return *sums_; }
  DeviceCommunicator& bulk() { return *bulk_; }
  // The stream for results of other ranks that come while a product runs.
  cudaStream_t merge_stream() const { return merge_stream_; }
  cudaStream_t sum_stream() const { return sum_stream_; }

  // Why the group is broken. Any thread.
  absl::Status status() const;
  // Breaks it, for all ranks. Any thread.
  void Abort(const absl::Status& reason);

  // While the device is waited for: a rank that waits for longer than kStuckSeconds breaks the group.
  class Wait {
   public:
    explicit Wait(DeviceGroup* group) : group_(group) {
      if (group_ != nullptr) group_->BeginWait();
    }
    ~Wait() {
      if (group_ != nullptr) group_->waiting_since_ms_ = 0;
    }
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    DeviceGroup* const group_;
  };
  // A micro-batch takes seconds at most, and the group's leader gives up earlier.
  static constexpr int64_t kStuckSeconds = 60;

 private:
  explicit DeviceGroup(const EngineGroup& group);
  absl::Status Open(const EngineGroup& group);
  std::array<DeviceCommunicator*, 3> communicators() const { return {merges_.get(), sums_.get(), bulk_.get()}; }
  void BeginWait();
  void Watch();

  const int32_t rank_;
  const int32_t world_size_;
  const std::shared_ptr<Communicator> host_;
  std::unique_ptr<DeviceCommunicator> merges_, sums_, bulk_;
  cudaStream_t merge_stream_ = nullptr;
  cudaStream_t sum_stream_ = nullptr;

  std::atomic<int64_t> waiting_since_ms_{0};  // by the steady clock; 0: nothing is waited for
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  absl::Status status_;
  bool leaving_ = false;
  std::thread watcher_;
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_DEVICE_GROUP_H_
