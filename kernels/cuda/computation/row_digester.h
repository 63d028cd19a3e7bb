// Sums rows up for digests, beside the engine's computation: on the device where rows lie there, else on the caller's thread.
#ifndef HEADWATER_KERNELS_CUDA_COMPUTATION_ROW_DIGESTER_H_
#define HEADWATER_KERNELS_CUDA_COMPUTATION_ROW_DIGESTER_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/digest.h"
#include "headwater/kernels/engine.h"
#include "kernels/cuda/caller_memory.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/engine_core.h"

namespace headwater::cuda {

// Thread-safe. The engine's device is current in every call.
class RowDigester {
 public:
  explicit RowDigester(EngineCore& core) : core_(core) {}
  RowDigester(const RowDigester&) = delete;
  RowDigester& operator=(const RowDigester&) = delete;
  ~RowDigester();
  // Takes its resources: a stream, some bytes of both memories.
  absl::Status Open();

  // Adds rows [first, first + count) of `rows`, which is stream `stream_index` of the digest and lies at `place`.
  absl::Status Add(const RowsView& rows, Place place, int64_t first, int64_t count, int32_t stream_index, DigestBuilder* digest);

 private:
  absl::Status AddFromDevice(const char* rows, int64_t row_bytes, int64_t first, int64_t count, int32_t stream_index,
                             DigestBuilder* digest);
  absl::Status AddFromOtherDevice(const char* rows, int64_t row_bytes, int64_t first, int64_t count, int32_t stream_index,
                                  DigestBuilder* digest);

  EngineCore& core_;
  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  DeviceMemory sum_;         // [2] uint64
  PinnedMemory host_sum_;    // [2] uint64
  PinnedMemory other_rows_;  // rows of another device on their way; taken when there are any
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_COMPUTATION_ROW_DIGESTER_H_
