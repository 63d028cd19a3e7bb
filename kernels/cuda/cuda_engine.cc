#include "kernels/cuda/cuda_engine.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "headwater/kernels/error.h"
#include "kernels/core/engine_options_check.h"
#include "kernels/core/micro_batch_check.h"
#include "kernels/core/micro_batch_plan.h"
#include "kernels/cuda/algorithm_search.h"
#include "kernels/cuda/computation.h"
#include "kernels/cuda/cuda_head.h"
#include "kernels/cuda/engine_core.h"
#include "kernels/cuda/gradient_debt.h"
#include "kernels/cuda/head_plan.h"
#include "kernels/cuda/staged_contribution.h"
#include "kernels/cuda/term_form.h"

namespace headwater::cuda {
namespace {

// Bytes of a slot that a term's part of a chunk takes: see Computation::RunTerm().
int64_t KeptBytes(const TermRun& term, int64_t rows) {
  const Form form = term.FormOf(rows);
  const int64_t padded = PaddedWidth(term.head->spec().hidden_size);
  const int64_t element_bytes = BytesOf(term.MatrixElement());
  const int64_t product_bytes = form == Form::kExponentials ? 2 : BytesOf(term.ProductElement(form));
  Workspace workspace;
  workspace.TakeBytes(rows * ProductStride(term.head->shard_weights(0).columns) * product_bytes);
  for (int i = 0; i < 2; ++i) workspace.TakeBytes(rows * padded * element_bytes);
  for (int i = 0; i < 4; ++i) workspace.TakeBytes(rows * 4);
  workspace.TakeBytes((rows + 1) * 4);
  workspace.TakeBytes(8);
  return workspace.used();
}

class CudaEngine final : public LossEngine {
 public:
  explicit CudaEngine(std::shared_ptr<EngineCore> core) : core_(std::move(core)) {}

  std::string name() const override { return "cuda"; }
  std::vector<EngineDevice> devices() const override {
    return {{"cuda:" + std::to_string(core_->options().device_index), core_->device_model(), core_->options().memory_budget_bytes}};
  }
  const EngineOptions& options() const override { return core_->options(); }
  int64_t planned_bytes() const override { return core_->planned_bytes(); }
  absl::Status health() const override { return core_->health(); }

  absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec) const override {
    absl::Status status = ValidateHeadSpec(spec);
    if (!status.ok()) return status;
    return PlanHeadOnCuda(spec, core_->options()).memory;
  }

  absl::StatusOr<std::unique_ptr<EngineHead>> CreateHead(const HeadSpec& spec) override {
    absl::Status status = ValidateHeadSpec(spec);
    if (!status.ok()) return status;
    HEADWATER_RETURN_IF_ERROR(core_->health());
    absl::StatusOr<std::unique_ptr<CudaHead>> head = CudaHead::Create(core_, spec, PlanHeadOnCuda(spec, core_->options()));
    if (!head.ok()) return head.status();
    {
      WorkLock lock(*core_);
      HEADWATER_RETURN_IF_ERROR(SearchAlgorithms(*core_, **head));
    }
    return std::unique_ptr<EngineHead>(*std::move(head));
  }

  absl::StatusOr<MicroBatchResult> Compute(const MicroBatch& micro_batch) override {
    HEADWATER_RETURN_IF_ERROR(CheckHeads(micro_batch, [this](const EngineHead& head) {
      const auto* own = dynamic_cast<const CudaHead*>(&head);
      return own != nullptr && &own->core() == core_.get();
    }));
    HEADWATER_RETURN_IF_ERROR(CheckMicroBatch(micro_batch, /*has_device=*/true));
    MicroBatchPlan plan = PlanTerms(micro_batch);
    std::vector<TermRun> terms;
    terms.reserve(plan.terms.size());
    for (TermPlan& term : plan.terms) terms.push_back(MakeTermRun(micro_batch, &term, core_->hopper()));

    MicroBatchResult result;
    result.terms.reserve(plan.terms.size());  // nothing may fail once accumulators have changed
    WorkLock lock(*core_);
    HEADWATER_RETURN_IF_ERROR(core_->health());
    absl::StatusOr<bool> needs_all = CutIntoChunks(micro_batch, terms, &plan);
    if (!needs_all.ok()) return needs_all.status();
    HEADWATER_RETURN_IF_ERROR(TakeSlots(&plan));
    std::vector<std::unique_ptr<StagedHead>> staged = Stage(&plan, terms);
    BeginOutputs(&plan);
    HEADWATER_RETURN_IF_ERROR(core_->RunDecided([](int32_t) { return absl::OkStatus(); },
                                                [&] {
                                                  if (*needs_all) HEADWATER_RETURN_IF_ERROR(core_->debt().Settle());
                                                  HEADWATER_RETURN_IF_ERROR(ClearSlots(staged));
                                                  return Computation(*core_, micro_batch, &plan, &terms, staged, *needs_all).Run();
                                                }));
    HEADWATER_RETURN_IF_ERROR(FinishTerms(&plan, &result.terms));
    if (!staged.empty()) result.staged = std::make_unique<CudaStagedContribution>(core_, std::move(staged));
    return result;
  }

 private:
  // Returns whether the chunks need the whole workspace, and not only what the debt leaves.
  absl::StatusOr<bool> CutIntoChunks(const MicroBatch& micro_batch, const std::vector<TermRun>& terms, MicroBatchPlan* plan) const {
    const int64_t bytes = core_->workspace().bytes();
    ChunkLimits limits;
    limits.grain = kRowGrain;
    limits.max_rows = RowsThatFit(terms, micro_batch, bytes);
    limits.exact = core_->options().token_chunk_rows > 0;
    const int64_t batch_rows = std::max<int64_t>(micro_batch.hidden.row_count, 1);
    if (limits.exact) {
      limits.max_rows = core_->options().token_chunk_rows;
      if (ChunkBytes(terms, micro_batch, std::min(limits.max_rows, batch_rows)) > bytes) limits.max_rows = 0;
    }
    if (limits.max_rows == 0) {
      const int64_t needed = ChunkBytes(terms, micro_batch, limits.exact ? core_->options().token_chunk_rows : 1);
      return MakeError(ErrorReason::kMemoryBudgetExceeded,
                       "the workspace has " + std::to_string(bytes) + " bytes, and a chunk of this micro-batch needs " +
                           std::to_string(needed) + "; give the engine a larger workspace",
                       {{"requestedBytes", std::to_string(needed)}, {"availableBytes", std::to_string(bytes)}});
    }
    PlanChunks(limits, plan);
    int64_t rows = 0;
    for (const Chunk& chunk : plan->chunks) rows = std::max(rows, static_cast<int64_t>(chunk.batch_rows.size()));
    return ChunkBytes(terms, micro_batch, rows) > bytes - GradientDebt::ShareOf(bytes);
  }

  // One entry for each slot of the plan, which gives its slots away.
  static std::vector<std::unique_ptr<StagedHead>> Stage(MicroBatchPlan* plan, const std::vector<TermRun>& terms) {
    std::vector<std::unique_ptr<StagedHead>> staged;
    for (PlannedSlot& planned : plan->slots) {
      auto head = std::make_unique<StagedHead>();
      head->head = static_cast<CudaHead*>(planned.slot.head());
      head->slot = std::move(planned.slot);
      int64_t kept_bytes = 0;
      for (const Chunk& chunk : plan->chunks) {
        for (const TermChunk& part : chunk.terms) {
          const TermRun& term = terms[part.term];
          if (chunk.backward && term.head == head->head) kept_bytes += KeptBytes(term, static_cast<int64_t>(part.rows.size()));
        }
      }
      const DeviceMemory& memory = head->head->staging_memory(0, head->slot.index());
      head->keeps_rows = head->head->shard_count() == 1 && kept_bytes <= memory.bytes();
      if (head->keeps_rows) head->space = Workspace(memory.As<void>(), memory.bytes());
      staged.push_back(std::move(head));
    }
    return staged;
  }

  // A slot that gets products is added to from 0 on.
  absl::Status ClearSlots(const std::vector<std::unique_ptr<StagedHead>>& staged) {
    for (const auto& head : staged) {
      if (head->keeps_rows) continue;
      for (int32_t rank = 0; rank < head->head->shard_count(); ++rank) {
        const DeviceMemory& memory = head->head->staging_memory(rank, head->slot.index());
        if (memory.bytes() == 0) continue;
        HEADWATER_RETURN_IF_ERROR(
            core_->Check(cudaMemsetAsync(memory.As<void>(), 0, static_cast<size_t>(memory.bytes()), core_->stream()),
                         "clearing a staging slot"));
      }
    }
    return absl::OkStatus();
  }

  const std::shared_ptr<EngineCore> core_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<LossEngine>> CreateEngine(const EngineOptions& options) {
  HEADWATER_RETURN_IF_ERROR(CheckEngineOptions(options));
  absl::StatusOr<std::shared_ptr<EngineCore>> core = EngineCore::Create(options);
  if (!core.ok()) return core.status();
  return std::unique_ptr<LossEngine>(std::make_unique<CudaEngine>(*std::move(core)));
}

}  // namespace headwater::cuda
