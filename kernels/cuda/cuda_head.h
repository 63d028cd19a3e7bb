// A head in the memory of the device: split into shards; in a group one shard of it, or all rows (Parallelism::kRows: a replica,
// cuda_replica.cc). Its calls take the engine's work lock, and leave nothing running.
//
// Rows of weight-shaped tensors are PaddedWidth(hidden_size) elements apart. The padding is 0 and stays 0, so that whole tensors
// can be worked on as flat arrays.
#ifndef HEADWATER_KERNELS_CUDA_CUDA_HEAD_H_
#define HEADWATER_KERNELS_CUDA_CUDA_HEAD_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "kernels/core/head_base.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/engine_core.h"
#include "kernels/cuda/head_plan.h"
#include "kernels/cuda/launch_types.h"
#include "kernels/cuda/products/int8_product.h"
#include "kernels/cuda/tensor_copy.h"

namespace headwater::cuda {

// A tensor's type as kernel launches know it.
constexpr Element ElementOf(DataType type) { return static_cast<Element>(type); }

// Where a shard's share of a gradient goes: the accumulator, or a staging slot.
struct WeightTarget {
  float* weight = nullptr;  // [shard rows, padded]
  float* bias = nullptr;    // [shard rows], or null
};

// The tensors of one shard, or of a replica: all rows, but masters and optimizer state of its rank's shard. Memory is empty where
// the head has no such tensor.
struct ShardStorage {
  RowRange rows;
  RowRange updated;            // those of masters and state, which this rank updates, counted from the first of `rows`
  DeviceMemory weight;         // [rows, padded], storage type
  DeviceMemory bias;           // [rows], storage type
  DeviceMemory int8_weight;    // with int8_teacher: the means [2] fp64 in 256 bytes, and the rows (products/int8_product.h)
  DeviceMemory master_weight;  // fp32; only if separate
  DeviceMemory master_bias;
  DeviceMemory grad_weight;  // fp32
  DeviceMemory grad_bias;
  DeviceMemory moment1_weight;
  DeviceMemory moment1_bias;
  DeviceMemory moment2_weight;
  DeviceMemory moment2_bias;
  DeviceMemory reference;             // on a rank: LaunchSumReference()'s sums, and the row and its bias in bf16
  std::vector<DeviceMemory> staging;  // by slot: [rows, padded] + [rows] (with a bias) fp32
};

class CudaHead final : public HeadBase {
 public:
  // Admits the plan with the core and allocates; everything is 0.
  static absl::StatusOr<std::unique_ptr<CudaHead>> Create(std::shared_ptr<EngineCore> core, const HeadSpec& spec, HeadPlan plan);
  ~CudaHead() override;

  absl::Status DoReadTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const override;
  absl::Status DoWriteTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in) override;
  absl::Status DoZeroGradient() override;
  absl::Status DoAddToGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, double factor,
                               const float* in) override;
  absl::Status DoReduceGradient() override;
  absl::Status DoResetOptimizerState() override;
  absl::StatusOr<GradientStats> DoComputeGradientStats() const override;
  absl::Status DoApplyOptimizer(const OptimizerStep& step) override;
  bool StagesConcurrently() const override { return is_replica(); }

  const EngineCore& core() const { return *core_; }
  // Parallelism::kRows in a group.
  bool is_replica() const { return core_->group() != nullptr && spec().parallelism == Parallelism::kRows; }
  // The group with which micro-batches of this head are computed: null for an engine that is alone, and for a replica.
  DeviceGroup* group() const { return is_replica() ? nullptr : core_->group(); }
  // Bytes for chunks in the workspace that this head plans; the engine's has them at least, unless it could not be allocated.
  int64_t chunk_bytes() const { return chunk_bytes_; }
  // Shards that are here, by which everything below is counted; without rows included.
  int32_t shard_count() const { return static_cast<int32_t>(storage_.size()); }
  // Shards whose rows' statistics are merged: those of the other ranks included.
  int32_t merged_shards() const { return is_replica() ? 1 : static_cast<int32_t>(shard_rows().size()); }
  // The operand of products: the shard's rows below valid_vocab_size.
  ShardWeights shard_weights(int32_t rank) const;
  // With int8_teacher: the int8 copy of those rows, with LaunchInt8Means()'s means, made by MakeInt8Weights(). That enqueues the
  // copy, unless the weights are as when it was last made. For the holder of the work lock.
  Int8Rows int8_weights(int32_t rank) const;
  const double* int8_means(int32_t rank) const { return storage_[static_cast<size_t>(rank)].int8_weight.As<double>(); }
  absl::Status MakeInt8Weights();
  // In a group, of a bf16 head: the reference row (rows/reference_row.h) as a shard of one column, made by MakeReference(). That
  // enqueues its sum over the ranks, unless the weights are as when it was last made. For the holder of the work lock.
  ShardWeights reference() const;
  absl::Status MakeReference();
  WeightTarget accumulator(int32_t rank) const;                          // null for a frozen head
  WeightTarget staging_slot(int32_t rank, int32_t slot) const;           // laid out as the accumulator
  const DeviceMemory& staging_memory(int32_t rank, int32_t slot) const;  // the whole slot
  // The accumulator may count as 0 without having been read: a contribution may overwrite it. TakeZeros() returns whether a
  // contribution may overwrite the accumulator. WriteZeros() enqueues the zeros that memory lacks, for a contribution that adds.
  // For the holder of the work lock, like the next methods. In deterministic mode the accumulator is always written and added to.
  bool TakeZeros() { return std::exchange(zeros_, Zeros::kNone) != Zeros::kNone; }
  absl::Status WriteZeros() const;
  // False once adding deferred products was left half-way, until ZeroGradient().
  bool gradient_known() const { return gradient_known_; }
  void set_gradient_known(bool known) { gradient_known_ = known; }

 private:
  CudaHead(std::shared_ptr<EngineCore> core, const HeadSpec& spec, HeadPlan plan);
  absl::Status Allocate();
  int32_t RankOf(int32_t index) const { return core_->first_shard() + index; }
  // Where a shard has a tensor. For a master that is not separate: the stored tensor.
  TensorPlace PlaceOf(int32_t rank, HeadTensor tensor) const;
  // The part of a range of elements that is here.
  Piece HeldPiece(int32_t rank, HeadTensor tensor, int64_t element_start, int64_t element_count) const;
  // The part of it that is updated here, of the accumulator.
  Piece UpdatedPiece(int32_t rank, HeadTensor tensor, int64_t element_start, int64_t element_count) const;
  absl::Status WritePiece(TensorCopy* copy, HeadTensor tensor, int32_t rank, const Piece& piece, const void* in);
  // A range of a replica. In cuda_replica.cc, as the next three.
  absl::Status WriteReplica(TensorCopy* copy, HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in);
  // Enqueues 0 over elements [first, first + count) of a tensor, and the padding between them.
  absl::Status ClearElements(const TensorPlace& place, int64_t first, int64_t count);
  // Enqueues the sum over ranks of a tensor of the accumulator.
  absl::Status ReduceTensor(const DeviceMemory& memory, int64_t row_stride);
  // Enqueues the exchange of the ranks' new weights.
  absl::Status GatherWeights();
  // Adds deferred products (deferred_grad_weight.h), where a call is about the accumulator.
  absl::Status FlushGradient(HeadTensor tensor) const;
  // Enqueues the update of a shard's weight, or of its bias.
  absl::Status UpdateParameters(const OptimizerStep& step, int32_t rank, bool is_weight);
  // State of grad_weight: any value; 0 in memory; counted as 0, whatever is in memory.
  enum class Zeros { kNone, kWritten, kCounted };
  // Sets the state, unless the mode is deterministic.
  void NoteZeros(Zeros zeros);
  // Enqueues zeros over rows of grad_weight that no product writes: those of no valid id.
  absl::Status ClearUnwrittenRows(int32_t rank);
  // Enqueues bytes of 0 over whole tensors.
  absl::Status Clear(const DeviceMemory& memory) const;

  const std::shared_ptr<EngineCore> core_;
  const int64_t own_bytes_;
  const int64_t chunk_bytes_;
  std::vector<ShardStorage> storage_;
  bool gradient_known_ = true;
  bool int8_is_made_ = false;
  bool reference_is_made_ = false;
  mutable Zeros zeros_ = Zeros::kNone;
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_CUDA_HEAD_H_
