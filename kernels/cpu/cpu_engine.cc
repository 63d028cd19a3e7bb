// CpuEngine: heads in host memory, products by OpenBLAS, row work on the engine's own threads. See head_plan.h for memory,
// shard_run.h for the computation, core/row_loss.h and row_kernels.h for the numerics.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "headwater/kernels/engine.h"
#include "headwater/kernels/error.h"
#include "kernels/core/micro_batch_check.h"
#include "kernels/cpu/blas.h"
#include "kernels/cpu/cpu_head.h"
#include "kernels/cpu/memory_limit.h"
#include "kernels/cpu/micro_batch_plan.h"
#include "kernels/cpu/shard_run.h"

namespace headwater::cpu {
namespace {

// More executors than this are a mistake, not a plan.
constexpr int32_t kMaxShards = 256;
constexpr int32_t kMaxThreads = 1024;

// Frees the slots of a micro-batch unless they were handed on.
class SlotGuard {
 public:
  explicit SlotGuard(MicroBatchPlan* plan) : plan_(plan) {}
  ~SlotGuard() {
    for (const std::unique_ptr<StagedHead>& staged : plan_->staged) staged->head->FreeStagingSlot(staged->slot);
  }

 private:
  MicroBatchPlan* const plan_;
};

class CpuStagedContribution final : public StagedContribution {
 public:
  CpuStagedContribution(std::shared_ptr<EngineCore> core, std::vector<std::unique_ptr<StagedHead>> heads)
      : core_(std::move(core)), heads_(std::move(heads)) {}
  ~CpuStagedContribution() override { Release(); }

  absl::Status Commit(double factor) override {
    if (committed_) return MakeError(ErrorReason::kInternal, "the contribution was committed before");
    float alpha = 0;
    absl::Status status = ToFactor(factor, &alpha);
    if (!status.ok()) return status;
    {
      std::lock_guard<std::mutex> lock(core_->work_mutex);
      const SingleThreadedBlas blas;
      status = core_->executors.RunDecided([](const ShardContext&) { return absl::OkStatus(); },
                                           [&](const ShardContext& context) {
                                             for (const auto& head : heads_) AddOnShard(context, *head, alpha);
                                             return absl::OkStatus();
                                           });
    }
    if (HasReason(status, ErrorReason::kShardNotReady)) return status;
    committed_ = true;
    Release();
    return status;
  }

 private:
  static void AddOnShard(const ShardContext& context, const StagedHead& staged, float alpha) {
    const HeadShard& shard = staged.head->shard(context.rank);
    const HeadPlan& plan = staged.head->cpu_plan();
    const size_t index = static_cast<size_t>(context.rank);
    const ShardParts parts(shard, context.pool);
    const GradientTarget target = {shard.grad_weight.As<float>(), shard.grad_bias.As<float>(), alpha, false};
    if (staged.keeps_rows) {
      // Panel by panel, so that a panel of the accumulator is read once; the order in which an element's chunks are added is
      // theirs.
      context.pool.Run(parts.count(), [&](int32_t part) {
        parts.ForEachPanel(part, plan.panel_rows, [&](int64_t start, int64_t count) {
          for (const KeptRows& rows : staged.kept[index]) AddGradWeightPanel(shard, rows, start, count, target);
        });
      });
      return;
    }
    if (!staged.has_product[index]) return;
    const float* slot = shard.staging[static_cast<size_t>(staged.slot)].As<float>();
    context.pool.Run(parts.count(), [&](int32_t part) {
      const RowRange range = parts.part(part);
      GetRowKernels().add_scaled(slot + range.start * shard.hidden_size, range.size() * shard.hidden_size, alpha,
                                 target.grad_weight + range.start * shard.hidden_size);
      if (shard.has_bias) {
        GetRowKernels().add_scaled(slot + shard.rows.size() * shard.hidden_size + range.start, range.size(), alpha,
                                   target.grad_bias + range.start);
      }
    });
  }

  void Release() {
    for (const std::unique_ptr<StagedHead>& head : heads_) head->head->FreeStagingSlot(head->slot);
    heads_.clear();
  }

  const std::shared_ptr<EngineCore> core_;
  std::vector<std::unique_ptr<StagedHead>> heads_;
  bool committed_ = false;
};

class CpuEngine final : public LossEngine {
 public:
  explicit CpuEngine(std::shared_ptr<EngineCore> core) : core_(std::move(core)) {}

  std::string name() const override { return "cpu"; }
  std::vector<EngineDevice> devices() const override { return {{"cpu", ProcessorModel(), core_->options.memory_budget_bytes}}; }
  const EngineOptions& options() const override { return core_->options; }

  absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec) const override {
    absl::Status status = ValidateHeadSpec(spec);
    if (!status.ok()) return status;
    return Plan(spec).memory;
  }

  absl::StatusOr<std::unique_ptr<EngineHead>> CreateHead(const HeadSpec& spec) override {
    absl::Status status = ValidateHeadSpec(spec);
    if (!status.ok()) return status;
    HeadPlan plan = Plan(spec);
    {
      std::lock_guard<std::mutex> lock(core_->plan_mutex);
      const int64_t free_bytes = core_->options.memory_budget_bytes - core_->planned_bytes;
      if (plan.memory.total_bytes > free_bytes) {
        return MakeError(ErrorReason::kMemoryBudgetExceeded,
                         "the head needs " + plan.memory.ToString() + " (" + std::to_string(plan.memory.total_bytes) +
                             " bytes), and " + std::to_string(free_bytes) + " of " +
                             std::to_string(core_->options.memory_budget_bytes) + " bytes are free",
                         {{"requestedBytes", std::to_string(plan.memory.total_bytes)},
                          {"availableBytes", std::to_string(free_bytes)},
                          {"budgetBytes", std::to_string(core_->options.memory_budget_bytes)}});
      }
      core_->planned_bytes += plan.memory.total_bytes;  // given back by the head's destructor
    }
    absl::StatusOr<std::unique_ptr<CpuHead>> head = CpuHead::Create(core_, spec, std::move(plan));
    if (!head.ok()) return head.status();
    return std::unique_ptr<EngineHead>(*std::move(head));
  }

  int64_t planned_bytes() const override {
    std::lock_guard<std::mutex> lock(core_->plan_mutex);
    return core_->planned_bytes;
  }

  absl::StatusOr<MicroBatchResult> Compute(const MicroBatch& micro_batch) override {
    absl::Status status = CheckHeads(micro_batch);
    if (status.ok()) status = CheckMicroBatch(micro_batch);
    if (!status.ok()) return status;
    std::lock_guard<std::mutex> lock(core_->work_mutex);
    absl::StatusOr<MicroBatchPlan> plan = PlanMicroBatch(micro_batch, core_->options);
    if (!plan.ok()) return plan.status();
    SlotGuard slots(&*plan);
    ClearGradHidden(micro_batch, *plan);
    MicroBatchResult result;
    result.terms.reserve(plan->terms.size());  // nothing may fail once accumulators have changed
    std::vector<std::unique_ptr<ShardRun>> runs(static_cast<size_t>(core_->executors.shard_count()));
    {
      const SingleThreadedBlas blas;
      const auto run_of = [&runs](const ShardContext& context) -> std::unique_ptr<ShardRun>& {
        return runs[static_cast<size_t>(context.rank)];
      };
      status = core_->executors.RunDecided(
          [&](const ShardContext& context) {
            run_of(context) = std::make_unique<ShardRun>(context, &*plan);
            run_of(context)->Prepare();
            return absl::OkStatus();
          },
          [&](const ShardContext& context) { return run_of(context)->Run(); });
    }
    if (!status.ok()) return status;
    int64_t non_finite_rows = 0;
    for (TermPlan& term : plan->terms) {
      term.sums.non_finite_row_count = std::count(term.non_finite.begin(), term.non_finite.end(), 1);
      non_finite_rows += term.sums.non_finite_row_count;
      result.terms.push_back(term.sums);
    }
    if (micro_batch.refuse_non_finite && non_finite_rows > 0) {
      return MakeError(ErrorReason::kNonFiniteValues,
                       std::to_string(non_finite_rows) + " rows have a loss or a gradient that is not finite",
                       {{"nonFiniteRowCount", std::to_string(non_finite_rows)}});
    }
    if (!plan->staged.empty()) result.staged = std::make_unique<CpuStagedContribution>(core_, std::move(plan->staged));
    plan->staged.clear();
    return result;
  }

 private:
  HeadPlan Plan(const HeadSpec& spec) const { return PlanHeadOnCpu(spec, core_->options, core_->executors.threads_per_shard()); }

  absl::Status CheckHeads(const MicroBatch& micro_batch) const {
    for (size_t i = 0; i < micro_batch.terms.size(); ++i) {
      for (const EngineHead* head : {micro_batch.terms[i].head, micro_batch.terms[i].teacher_head}) {
        if (head == nullptr) continue;
        const auto* own = dynamic_cast<const CpuHead*>(head);
        if (own != nullptr && &own->core() == core_.get()) continue;
        const std::string field = "terms[" + std::to_string(i) + "]";
        return MakeError(ErrorReason::kInvalidField, field + " names a head of another engine", {{"field", field}});
      }
    }
    return absl::OkStatus();
  }

  // Rows that no chunk writes get 0.
  static void ClearGradHidden(const MicroBatch& micro_batch, const MicroBatchPlan& plan) {
    const MutableRowsView& out = micro_batch.grad_hidden;
    if (out.data == nullptr || out.row_count == 0) return;
    std::vector<bool> written(static_cast<size_t>(out.row_count), false);
    for (const Chunk& chunk : plan.chunks) {
      if (!chunk.backward) continue;
      for (const int64_t row : chunk.batch_rows) written[static_cast<size_t>(row)] = true;
    }
    const int64_t row_bytes = out.column_count * ElementBytes(out.data_type);
    for (int64_t row = 0; row < out.row_count; ++row) {
      if (!written[static_cast<size_t>(row)])
        std::memset(static_cast<char*>(out.data) + row * row_bytes, 0, static_cast<size_t>(row_bytes));
    }
  }

  const std::shared_ptr<EngineCore> core_;
};

absl::Status OptionError(const std::string& field, const std::string& expected, int64_t actual) {
  return MakeError(ErrorReason::kInvalidField, field + " must be " + expected + ", got " + std::to_string(actual),
                   {{"field", field}, {"expected", expected}, {"actual", std::to_string(actual)}});
}

}  // namespace
}  // namespace headwater::cpu

namespace headwater {

absl::StatusOr<std::unique_ptr<LossEngine>> CreateCpuEngine(const EngineOptions& options) {
  using cpu::OptionError;
  if (options.shard_count < 1 || options.shard_count > cpu::kMaxShards) {
    return OptionError("shard_count", "in [1, " + std::to_string(cpu::kMaxShards) + "]", options.shard_count);
  }
  if (!options.shard_weights.empty() && options.shard_weights.size() != static_cast<size_t>(options.shard_count)) {
    return OptionError("the number of shard_weights", "shard_count, " + std::to_string(options.shard_count),
                       static_cast<int64_t>(options.shard_weights.size()));
  }
  for (const int64_t weight : options.shard_weights) {
    if (weight < 1) return OptionError("shard_weights", ">= 1 each", weight);
  }
  if (options.memory_budget_bytes < 0) return OptionError("memory_budget_bytes", ">= 0", options.memory_budget_bytes);
  if (options.workspace_bytes < 0) return OptionError("workspace_bytes", ">= 0", options.workspace_bytes);
  if (options.token_chunk_rows < 0 || options.token_chunk_rows > INT32_MAX) {
    return OptionError("token_chunk_rows", "in [0, 2147483647]", options.token_chunk_rows);
  }
  if (options.thread_count < 0 || options.thread_count > cpu::kMaxThreads) {
    return OptionError("thread_count", "in [0, " + std::to_string(cpu::kMaxThreads) + "]", options.thread_count);
  }
  EngineOptions filled = options;
  if (filled.memory_budget_bytes == 0) filled.memory_budget_bytes = cpu::MemoryLimitBytes() / 5 * 4;
  if (filled.workspace_bytes == 0) filled.workspace_bytes = cpu::kDefaultWorkspaceBytes;
  if (filled.thread_count == 0) {
    // glibc counts the processors in this process's affinity mask.
    filled.thread_count = std::clamp<int32_t>(static_cast<int32_t>(std::thread::hardware_concurrency()), 1, cpu::kMaxThreads);
  }
  return std::unique_ptr<LossEngine>(std::make_unique<cpu::CpuEngine>(std::make_shared<cpu::EngineCore>(filled)));
}

}  // namespace headwater
