// grad_weight products of small micro-batches, deferred until one product has many rows.
//
// A grad_weight product reads and writes the whole accumulator, however few rows it has: 4.2 GB at 128256 x 4096. On an H100, 4096
// rows take 10.8 ms in products of 1024 rows, and 6.6 ms in products of 8192. So the operands of micro-batches wait as rows of one
// matrix, in order. The passes that compute the operands write them where they wait. One product adds all of them when the next
// micro-batch has no room, a call is about the accumulator, or the whole workspace is needed. The moment depends on the calls
// alone, never on time: the accumulator's bits follow from the sequence of calls.
//
// The rows of one head wait at a time, at the end of the workspace. For the holder of the work lock.
#ifndef HEADWATER_KERNELS_CUDA_COMPUTATION_DEFERRED_GRAD_WEIGHT_H_
#define HEADWATER_KERNELS_CUDA_COMPUTATION_DEFERRED_GRAD_WEIGHT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/computation/target_groups.h"
#include "kernels/cuda/computation/weight_contribution.h"
#include "kernels/cuda/computation/workspace.h"
#include "kernels/cuda/cuda_head.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/engine_core.h"

namespace headwater::cuda {

class DeferredGradWeight {
 public:
  // Rows that one product has at most, and that a micro-batch has at most whose product is deferred.
  static constexpr int64_t kMaxRows = 8192;
  static constexpr int64_t kMaxMicroBatchRows = 2048;
  // The second limit where a product of more rows overlaps other work, and is not deferred. Such work is the copy of grad_hidden to
  // the host, its sum over ranks, or the return of callers that were computed together.
  static constexpr int64_t kMaxOverlappedRows = 256;

  // The place where the operands of a micro-batch wait: WeightContribution has these names, too.
  struct Operands {
    void* matrix = nullptr;  // [rows, ProductStride()] bf16
    void* hidden = nullptr;  // [rows, padded] bf16, as the next
    void* scaled = nullptr;
    float* row_factor = nullptr;  // [rows], as the next two
    float* target_factor = nullptr;
    int32_t* targets = nullptr;
  };

  explicit DeferredGradWeight(EngineCore& core) : core_(core) {}

  // Allocates the page-locked memory in advance, so that no work in a group allocates it. Such an allocation may wait for all GPUs
  // of the process, whose ranks wait for each other.
  absl::Status Prepare();
  // Whether operands of this kind can wait: bf16 on one shard, few rows, and a workspace whose share holds twice as many. Operands
  // in fp16 have different scales in different micro-batches.
  bool Takes(const CudaHead& head, Element element, int64_t rows) const;
  // A place for `rows` rows of `head`, for which Takes() is true. Flushes first the rows of another head, or that leave no room.
  // Until Add() the rows do not wait: the next Reserve() gives the same place away.
  absl::StatusOr<Operands> Reserve(CudaHead* head, int64_t rows);
  // Lets the rows of the last Reserve() wait for their product. The operands are in place by work on the stream. `host_targets`
  // [rows] is read; null: the rows have no target's share, and neither `hidden` nor `target_factor` is read.
  void Add(int64_t rows, const int32_t* host_targets);
  // Enqueues the product; nothing waits any more.
  absl::Status Flush();
  // Brings `head`'s accumulator up to date with all calls: flushes its rows, or writes its zeros (CudaHead::WriteZeros()).
  // kEngineFailed if the head's gradient is not known (CudaHead::gradient_known()).
  absl::Status FlushFor(const CudaHead& head);
  // Flushes `head`'s rows before another contribution. Returns whether the contribution overwrites the accumulator, which counts as
  // 0.
  absl::StatusOr<bool> FlushBefore(CudaHead* head);
  // Drops the rows of `head`: its accumulator is set to 0, or goes away.
  void Discard(const CudaHead& head);

  // Bytes at the end of a workspace of `workspace_bytes` in which rows may wait. Work that needs them flushes first. A 4 GiB
  // workspace holds 8192 such rows at a vocabulary of 128256, and a chunk of 4096 rows beside them.
  static constexpr int64_t ShareOf(int64_t workspace_bytes) { return workspace_bytes / 5 * 3; }

 private:
  // Arrays at the end of the workspace.
  struct Layout {
    Operands operands;  // of `capacity` rows
    int32_t* order;
    int32_t* starts;  // [capacity + 1]
    float* factor;
    void* bias_scratch;
  };
  static Layout LayOut(const CudaHead& head, int64_t capacity, Workspace* workspace);
  static int64_t BytesFor(const CudaHead& head, int64_t capacity);
  // Rows that the share of the workspace holds: kMaxRows, or its half, quarter, ... if need be. Fixed while the workspace is:
  // memory decides when heads are loaded.
  int64_t Capacity(const CudaHead& head) const;
  Operands OperandsOf(int64_t row) const;

  EngineCore& core_;
  CudaHead* head_ = nullptr;  // null: nothing waits, and no place is reserved
  int64_t capacity_ = 0;
  int64_t rows_ = 0;  // that wait
  Layout layout_{};
  TargetOrder targets_;  // of those with a target's share
  PinnedMemory upload_;  // order and starts on their way
  bool upload_in_use_ = false;
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_COMPUTATION_DEFERRED_GRAD_WEIGHT_H_
