// Communicator: the only place where the shards of a head meet.
//
// Each executor (a thread with a shard, later a GPU or a process) holds one rank. All ranks make the same calls in the same order
// with equal counts; a call returns when this rank's result is there. Reductions add in rank order, so results do not depend on
// timing. Buffers are the caller's.
#ifndef HEADWATER_KERNELS_COMMUNICATOR_H_
#define HEADWATER_KERNELS_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"

namespace headwater {

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int32_t rank() const = 0;
  virtual int32_t world_size() const = 0;

  // data[i] becomes the sum (the maximum; NaN if any rank has NaN) over the ranks' data[i], on every rank.
  virtual absl::Status AllReduceSum(float* data, int64_t count) = 0;
  virtual absl::Status AllReduceSum(double* data, int64_t count) = 0;
  virtual absl::Status AllReduceMax(float* data, int64_t count) = 0;
  virtual absl::Status AllReduceMax(double* data, int64_t count) = 0;
  // out[r * count + i] becomes rank r's data[i].
  virtual absl::Status AllGather(const double* data, int64_t count, double* out) = 0;
  // Waits for all ranks.
  virtual absl::Status Barrier() = 0;
  // Makes every call of every rank, now waiting or later, return `reason` (an error). For failures; idempotent; any thread.
  virtual void Abort(const absl::Status& reason) = 0;
};

// One communicator for each of `world_size` threads of this process.
std::vector<std::unique_ptr<Communicator>> MakeInProcessCommunicators(int32_t world_size);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_COMMUNICATOR_H_
