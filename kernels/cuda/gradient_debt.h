// grad_weight products of small micro-batches, put off until there are enough rows for one product.
//
// A grad_weight product reads and writes the whole accumulator, however few rows it has: 4.2 GB at 128256 x 4096, 1 ms, against 0.5
// ms for everything else that a micro-batch of up to 256 rows needs. So their operands wait here, in order, as rows of one matrix,
// and are added by one product when the debt is full, when anybody asks for the accumulator, or when the workspace is needed whole.
// When that is depends on the calls alone, never on time: the accumulator's bits follow from the sequence of calls.
//
// One head at a time has a debt; it lies at the end of the workspace. For the holder of the work lock.
#ifndef HEADWATER_KERNELS_CUDA_GRADIENT_DEBT_H_
#define HEADWATER_KERNELS_CUDA_GRADIENT_DEBT_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cuda/cuda_head.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/engine_core.h"
#include "kernels/cuda/weight_contribution.h"
#include "kernels/cuda/workspace.h"

namespace headwater::cuda {

class GradientDebt {
 public:
  // Rows that one product is put together from at most, and of a micro-batch that may wait.
  static constexpr int64_t kMaxRows = 4096;
  static constexpr int64_t kMaxMicroBatchRows = 256;

  explicit GradientDebt(EngineCore& core) : core_(core) {}

  // Takes the page-locked memory that is needed, so that no work in a group takes it: that may wait for all GPUs of the process,
  // whose ranks wait for each other.
  absl::Status Prepare();
  // Whether operands of this kind can wait: bf16 on one shard (fp16 operands of different micro-batches have different scales), few
  // rows, and a workspace whose share holds them.
  bool Takes(const CudaHead& head, Element element, int64_t rows) const;
  // Takes over a contribution to `head`'s accumulator, for which Takes() is true; `host_targets` [rows] is copied. Settles first
  // what belongs to another head or leaves no room. The operands are copied by work on the stream.
  absl::Status Add(CudaHead* head, const WeightContribution& contribution, const int32_t* host_targets);
  // Enqueues the product, and owes nothing any more.
  absl::Status Settle();
  // The same, if the debt is `head`'s. kEngineFailed if the head's gradient is not known (CudaHead::gradient_known()).
  absl::Status SettleFor(const CudaHead& head);
  // Drops what is owed to `head`: its accumulator is set to 0, or goes away.
  void Forget(const CudaHead& head);

  // Bytes at the end of a workspace of `workspace_bytes` that the debt may take. Who needs them settles it first.
  static constexpr int64_t ShareOf(int64_t workspace_bytes) { return workspace_bytes / 10 * 3; }

 private:
  // Arrays at the end of the workspace.
  struct Layout {
    void* matrix;  // [capacity, stride] bf16
    void* hidden;  // [capacity, padded] bf16
    void* scaled;  // [capacity, padded] bf16
    float* row_factor;
    float* target_factor;
    int32_t* targets;
    int32_t* order;
    int32_t* starts;  // [capacity + 1]
    float* factor;
    void* bias_scratch;
  };
  static Layout LayOut(const CudaHead& head, int64_t capacity, Workspace* workspace);
  static int64_t BytesFor(const CudaHead& head, int64_t capacity);
  // As many rows as the debt's share of the workspace holds, up to kMaxRows; 0 for less than kMaxMicroBatchRows.
  int64_t Capacity(const CudaHead& head) const;
  absl::Status Open(CudaHead* head, int64_t rows);
  absl::Status Copy(void* to, const void* from, int64_t bytes);

  EngineCore& core_;
  CudaHead* head_ = nullptr;  // null: nothing is owed
  int64_t capacity_ = 0;
  int64_t rows_ = 0;
  Layout layout_{};
  std::vector<int32_t> targets_;  // [rows_]
  PinnedMemory upload_;           // order and starts on their way
  bool upload_in_use_ = false;
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_GRADIENT_DEBT_H_
