#include "kernels/cpu/micro_batch_plan.h"

#include <algorithm>
#include <utility>

namespace headwater::cpu {
namespace {

// Whether the gradient of the logits and the rows themselves fit into a slot, on every shard.
bool RowsFitSlot(const CpuHead& head, int64_t row_count) {
  const int64_t hidden_size = head.spec().hidden_size;
  for (int32_t rank = 0; rank < head.shard_count(); ++rank) {
    const int64_t rows = head.shard(rank).rows.size();
    const int64_t slot = rows * hidden_size + (head.spec().has_bias ? rows : 0);
    if (row_count > 0 && slot / row_count < rows + hidden_size) return false;
  }
  return true;
}

std::unique_ptr<StagedHead> Stage(PlannedSlot planned) {
  auto staged = std::make_unique<StagedHead>();
  staged->slot = std::move(planned.slot);
  staged->head = static_cast<CpuHead*>(staged->slot.head());
  const size_t shard_count = static_cast<size_t>(staged->head->shard_count());
  staged->kept.resize(shard_count);
  staged->used_elements.assign(shard_count, 0);
  staged->has_product.assign(shard_count, 0);
  staged->keeps_rows = RowsFitSlot(*staged->head, planned.row_count);
  return staged;
}

}  // namespace

absl::StatusOr<CpuMicroBatchPlan> PlanMicroBatch(const MicroBatch& micro_batch, const EngineOptions& options) {
  CpuMicroBatchPlan plan = {PlanTerms(micro_batch), {}};
  ChunkLimits limits;
  limits.exact = options.token_chunk_rows > 0;
  limits.max_rows = limits.exact ? options.token_chunk_rows : kMaxRows;
  if (!limits.exact) {
    for (const TermPlan& term : plan.terms) limits.max_rows = std::min(limits.max_rows, HeadOf(term).cpu_plan().narrow_rows);
  }
  PlanChunks(limits, &plan);
  absl::Status status = TakeSlots(&plan);
  if (!status.ok()) return status;
  plan.staged.reserve(plan.slots.size());
  for (PlannedSlot& planned : plan.slots) plan.staged.push_back(Stage(std::move(planned)));
  plan.slots.clear();
  BeginOutputs(&plan);
  return plan;
}

}  // namespace headwater::cpu
