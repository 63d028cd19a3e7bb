// A micro-batch's plan with the CPU engine's additions: the places where contributions are held until they are decided.
#ifndef HEADWATER_KERNELS_CPU_MICRO_BATCH_PLAN_H_
#define HEADWATER_KERNELS_CPU_MICRO_BATCH_PLAN_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "headwater/kernels/engine.h"
#include "kernels/core/micro_batch_plan.h"
#include "kernels/cpu/cpu_head.h"

namespace headwater::cpu {

// A contribution's rows on one shard: a chunk's gradient of the logits and its hidden states, kept for the grad_weight product.
struct KeptRows {
  const float* gradient;  // [row_count, shard rows]; columns from the shard's valid rows on are not set
  const float* hidden;    // [row_count, hidden_size]
  int64_t row_count;
  bool is_bfloat16;  // both hold bf16, as ShardRun::Work says
};

// An undecided contribution's data for one head.
struct StagedHead {
  StagingSlot slot;
  CpuHead* head = nullptr;
  bool keeps_rows = false;                  // else the slot holds the finished product
  std::vector<std::vector<KeptRows>> kept;  // by shard
  std::vector<int64_t> used_elements;       // by shard: floats of the slot taken by kept rows
  std::vector<uint8_t> has_product;         // by shard: whether the slot holds a product yet

  float* SlotOf(const HeadShard& shard) const { return shard.staging[static_cast<size_t>(slot.index())].As<float>(); }
};

struct CpuMicroBatchPlan : MicroBatchPlan {
  std::vector<std::unique_ptr<StagedHead>> staged;  // one for each of `slots`, which it takes over

  // Null if the term has no contribution.
  StagedHead* StagedOf(const TermPlan& term) const {
    return term.slot < 0 ? nullptr : staged[static_cast<size_t>(term.slot)].get();
  }
};

inline CpuHead& HeadOf(const TermPlan& term) { return static_cast<CpuHead&>(*term.head); }
inline CpuHead& TeacherOf(const TermPlan& term) { return static_cast<CpuHead&>(*term.teacher); }

// Plans a micro-batch that CheckMicroBatch() passed and whose heads are CpuHeads. Takes staging slots; kStagingFull (and no slot
// taken) if one is missing.
absl::StatusOr<CpuMicroBatchPlan> PlanMicroBatch(const MicroBatch& micro_batch, const EngineOptions& options);

}  // namespace headwater::cpu

#endif  // HEADWATER_KERNELS_CPU_MICRO_BATCH_PLAN_H_
