// A head in the memory of the device, split into shards, or one shard of it in a group. Its calls take the engine's work lock, and
// leave nothing running.
//
// Rows of weight-shaped tensors are PaddedWidth(hidden_size) elements apart; the padding is 0 and stays 0, so that whole tensors
// can be worked on as flat arrays.
#ifndef HEADWATER_KERNELS_CUDA_CUDA_HEAD_H_
#define HEADWATER_KERNELS_CUDA_CUDA_HEAD_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "kernels/core/head_base.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/engine_core.h"
#include "kernels/cuda/head_plan.h"
#include "kernels/cuda/launch_types.h"
#include "kernels/cuda/tensor_copy.h"

namespace headwater::cuda {

// A tensor's type as kernel launches know it.
constexpr Element ElementOf(DataType type) { return static_cast<Element>(type); }

// Where a shard's share of a gradient goes: the accumulator, or a staging slot.
struct WeightTarget {
  float* weight = nullptr;  // [shard rows, padded]
  float* bias = nullptr;    // [shard rows], or null
};

// What one shard holds. Memory is empty where the head has no such tensor.
struct ShardStorage {
  RowRange rows;
  DeviceMemory weight;         // [rows, padded], storage type
  DeviceMemory bias;           // [rows], storage type
  DeviceMemory master_weight;  // fp32; only if separate
  DeviceMemory master_bias;
  DeviceMemory grad_weight;  // fp32
  DeviceMemory grad_bias;
  DeviceMemory moment1_weight;
  DeviceMemory moment1_bias;
  DeviceMemory moment2_weight;
  DeviceMemory moment2_bias;
  std::vector<DeviceMemory> staging;  // by slot: [rows, padded] + [rows] (with a bias) fp32
};

class CudaHead final : public HeadBase {
 public:
  // Admits the plan with the core and allocates; everything is 0.
  static absl::StatusOr<std::unique_ptr<CudaHead>> Create(std::shared_ptr<EngineCore> core, const HeadSpec& spec, HeadPlan plan);
  ~CudaHead() override;

  absl::Status ReadTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const override;
  absl::Status WriteTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in) override;
  absl::Status ZeroGradient() override;
  absl::Status AddToGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, double factor,
                             const float* in) override;
  absl::Status ResetOptimizerState() override;
  absl::StatusOr<GradientStats> ComputeGradientStats() const override;
  absl::Status ApplyOptimizer(const OptimizerStep& step) override;

  const EngineCore& core() const { return *core_; }
  // Shards that are here, by which everything below is counted; without rows included.
  int32_t shard_count() const { return static_cast<int32_t>(storage_.size()); }
  // Shards whose rows' statistics are merged: those of the other ranks included.
  int32_t merged_shards() const { return static_cast<int32_t>(shard_rows().size()); }
  // What products read: the shard's rows below valid_vocab_size.
  ShardWeights shard_weights(int32_t rank) const;
  WeightTarget accumulator(int32_t rank) const;                          // null for a frozen head
  WeightTarget staging_slot(int32_t rank, int32_t slot) const;           // laid out as the accumulator
  const DeviceMemory& staging_memory(int32_t rank, int32_t slot) const;  // the whole slot

 private:
  CudaHead(std::shared_ptr<EngineCore> core, const HeadSpec& spec, HeadPlan plan);
  absl::Status Allocate();
  int32_t RankOf(int32_t index) const { return core_->first_shard() + index; }
  // Where a shard has a tensor. For a master that is not separate: the stored tensor.
  TensorPlace PlaceOf(int32_t rank, HeadTensor tensor) const;
  absl::Status WritePiece(TensorCopy* copy, HeadTensor tensor, int32_t rank, const Piece& piece, const void* in);
  // Adds what is put off (gradient_debt.h), where a call is about the accumulator.
  absl::Status SettleGradient(HeadTensor tensor) const;
  // Enqueues the update of a shard's weight, or of its bias.
  absl::Status UpdateParameters(const OptimizerStep& step, int32_t rank, bool is_weight);
  // Enqueues bytes of 0 over whole tensors.
  absl::Status Clear(const DeviceMemory& memory);

  const std::shared_ptr<EngineCore> core_;
  const int64_t own_bytes_;
  std::vector<ShardStorage> storage_;
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_CUDA_HEAD_H_
