// Collectives of a group's GPUs: work on streams, between the ranks of a group that each have one GPU (NCCL).
//
// All ranks make the same calls of one communicator in the same order with equal counts. A call enqueues and returns; results are
// there when the stream has come so far. Sums have an order that depends on the group's size and the machine's links alone. Only
// joining and leaving wait for other ranks on the host, at most for kMeetingSeconds.
#ifndef HEADWATER_KERNELS_COMM_DEVICE_COMMUNICATOR_H_
#define HEADWATER_KERNELS_COMM_DEVICE_COMMUNICATOR_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace headwater {

class DeviceCommunicator {
 public:
  // Leaves the group; work that was enqueued is done.
  virtual ~DeviceCommunicator() = default;

  // Device memory of the rank's own GPU. kEngineFailed once the group is broken.

  // sums[i] becomes the sum over the ranks' data[i], on every rank; it may be `data`.
  virtual absl::Status AllReduceSum(const double* data, double* sums, int64_t count, cudaStream_t stream) = 0;
  // Rank 0's data[i] becomes the sum over the ranks' data[i]; the other ranks' `data` stays.
  virtual absl::Status ReduceSum(float* data, int64_t count, cudaStream_t stream) = 0;
  // data [world_size][bytes], of which this rank has filled its own part, becomes all ranks' parts.
  virtual absl::Status AllGather(void* data, int64_t bytes, cudaStream_t stream) = 0;

  // The next two work on the parts of a buffer that all ranks have: part r is [bounds[r], bounds[r + 1]). The world_size + 1 bounds
  // begin with 0, ascend and are the same on all ranks. Parts may be empty. With bounds in elements: data's part `rank` becomes the
  // sum over the ranks' data there; the other parts are then undefined.
  virtual absl::Status ReduceScatterSum(float* data, absl::Span<const int64_t> bounds, cudaStream_t stream) = 0;
  // With bounds in bytes: data's other parts become those that their ranks have.
  virtual absl::Status AllGatherParts(void* data, absl::Span<const int64_t> bounds, cudaStream_t stream) = 0;

  // The error so far: found on the device, or given to Abort(). Never waits; any thread.
  virtual absl::Status status() = 0;
  // Ends the enqueued work, without its results, so that no caller waits for it; every later call returns `reason`. Idempotent; any
  // thread.
  virtual void Abort(const absl::Status& reason) = 0;
};

// How long ranks wait for each other to join.
inline constexpr double kMeetingSeconds = 120;

// The bytes that identify a new group: made by one of its ranks and handed to the others. kFeatureNotBuilt, with the reason, where
// NCCL is missing.
absl::StatusOr<std::string> MakeDeviceGroupId();

// Joins a group with the calling thread's current GPU, which no other rank has. `most_blocks`: thread blocks that its work takes of
// a GPU at most. Waits until all ranks have come; `interrupted`, asked meanwhile, ends the wait with its error. kFeatureNotBuilt
// where NCCL is missing, kInvalidField for an invalid id, kEngineFailed where the ranks cannot meet.
absl::StatusOr<std::unique_ptr<DeviceCommunicator>> JoinDeviceGroup(int32_t rank, int32_t world_size, const std::string& id,
                                                                    int32_t most_blocks,
                                                                    const std::function<absl::Status()>& interrupted);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_COMM_DEVICE_COMMUNICATOR_H_
