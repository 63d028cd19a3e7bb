// A head in host memory, split into shards.
#ifndef HEADWATER_KERNELS_CPU_CPU_HEAD_H_
#define HEADWATER_KERNELS_CPU_CPU_HEAD_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/functional/function_ref.h"
#include "headwater/kernels/engine.h"
#include "kernels/core/head_base.h"
#include "kernels/cpu/head_plan.h"
#include "kernels/cpu/mapped_memory.h"
#include "kernels/cpu/shard_executor.h"

namespace headwater::cpu {

// State that the heads of an engine share: executors, the sum of the plans, and the lock that gives both to one call.
struct EngineCore {
  EngineCore(EngineOptions filled_options)
      : options(std::move(filled_options)),
        executors(options.shard_count, options.thread_count, options.shard_probe,
                  options.group.world_size > 1 ? options.group.communicator : nullptr),
        replica_executors(executors) {}

  const EngineOptions options;  // with defaults filled in
  std::mutex work_mutex;        // held while executors run
  ShardExecutors executors;
  ShardExecutors replica_executors;  // for work on replicas, on this rank of a group alone
  mutable std::mutex plan_mutex;
  int64_t planned_bytes = 0;  // guarded by plan_mutex
};

// The part of a head that one executor owns: its shard, or all rows of a replica. Tensors in fp32 are null where the head has none.
struct HeadShard {
  RowRange rows;       // of the head
  int64_t valid_rows;  // rows of the shard below valid_vocab_size: a prefix
  int64_t hidden_size;
  DataType data_type;
  bool has_bias;
  WorkspaceLayout layout;

  MappedMemory weight;         // [rows, hidden_size], storage type
  MappedMemory bias;           // [rows], storage type
  MappedMemory master_weight;  // fp32; only if separate. Masters and moments of a replica: of the rank's shard
  MappedMemory master_bias;
  MappedMemory grad_weight;  // [rows, hidden_size] fp32
  MappedMemory grad_bias;    // [rows] fp32
  MappedMemory moment1_weight;
  MappedMemory moment1_bias;
  MappedMemory moment2_weight;
  MappedMemory moment2_bias;
  std::vector<MappedMemory> staging;  // [rows, hidden_size] + [rows] fp32 each
  MappedMemory workspace;

  template <typename T>
  T* Workspace(int64_t offset) const {
    return reinterpret_cast<T*>(workspace.As<char>() + offset);
  }
};

class CpuHead final : public HeadBase {
 public:
  // `plan` is the spec's, admitted already.
  static absl::StatusOr<std::unique_ptr<CpuHead>> Create(std::shared_ptr<EngineCore> core, const HeadSpec& spec, HeadPlan plan);
  ~CpuHead() override;

  absl::Status DoReadTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const override;
  absl::Status DoWriteTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in) override;
  absl::Status DoZeroGradient() override;
  absl::Status DoAddToGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, double factor,
                               const float* in) override;
  absl::Status DoReduceGradient() override;
  absl::Status DoResetOptimizerState() override;
  absl::StatusOr<GradientStats> DoComputeGradientStats() const override;
  absl::Status DoApplyOptimizer(const OptimizerStep& step) override;

  const HeadPlan& cpu_plan() const { return plan_; }
  // Parallelism::kRows in a group: calls about one rank run on EngineCore::replica_executors.
  bool is_replica() const { return plan_.is_replica(); }
  // By executor's rank. Without memory if another rank of the group holds it.
  const HeadShard& shard(int32_t rank) const { return shards_[static_cast<size_t>(rank)]; }
  int32_t shard_count() const { return static_cast<int32_t>(shards_.size()); }
  const EngineCore& core() const { return *core_; }

 private:
  // A tensor's memory in one shard.
  struct Place {
    const MappedMemory* memory = nullptr;
    int64_t element_bytes = 4;
    bool is_weight = false;  // [rows, hidden_size], else [rows]
  };

  CpuHead(std::shared_ptr<EngineCore> core, const HeadSpec& spec, HeadPlan plan);
  absl::Status Allocate();
  // The part of the head that this rank's executor in EngineCore::executors holds.
  const HeadShard& Held(int32_t rank) const { return shard(is_replica() ? 0 : rank); }
  // The held rows that this rank updates, counted from its first one.
  RowRange UpdatedRows(int32_t rank) const;
  // The part of a range of elements that is held here.
  Piece HeldPiece(int32_t rank, HeadTensor tensor, int64_t element_start, int64_t element_count) const;
  // The shard's own memory for a tensor. For a master that is not separate: that of the storage tensor.
  Place PlaceOf(const HeadShard& shard, HeadTensor tensor) const;
  void WritePiece(const HeadShard& shard, HeadTensor tensor, const Piece& piece, const void* in);
  // A range of a replica. In cpu_replica.cc, as the next.
  void WriteReplica(int32_t rank, HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in);
  // Gets the other ranks' new weights.
  absl::Status GatherWeights(const ShardContext& context);
  // work(shard, rank, part, parts)
  using PartWork = absl::FunctionRef<void(const HeadShard&, int32_t, int32_t, int32_t)>;
  // Runs work that changes nothing on all threads of all shards.
  absl::Status RunOnParts(PartWork work) const;
  // Runs work that changes the head and cannot fail, decided once for all shards.
  absl::Status ChangeOnParts(PartWork work);

  const std::shared_ptr<EngineCore> core_;
  const HeadPlan plan_;
  std::vector<HeadShard> shards_;  // of the whole head
};

}  // namespace headwater::cpu

#endif  // HEADWATER_KERNELS_CPU_CPU_HEAD_H_
