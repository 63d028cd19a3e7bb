// CpuEngine: heads in host memory, products by OpenBLAS and oneDNN, row work on the engine's own threads. See head_plan.h for
// memory, shard_run.h for the computation, core/row_loss.h and row_kernels.h for the numerics.
#include <algorithm>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "headwater/kernels/digest.h"
#include "headwater/kernels/engine.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/machine_limits.h"
#include "headwater/kernels/product_rate.h"
#include "headwater/kernels/return_if_error.h"
#include "kernels/core/engine_options_check.h"
#include "kernels/core/micro_batch_check.h"
#include "kernels/cpu/cpu_head.h"
#include "kernels/cpu/micro_batch_plan.h"
#include "kernels/cpu/products/bfloat16_products.h"
#include "kernels/cpu/products/blas.h"
#include "kernels/cpu/shard_run.h"

namespace headwater::cpu {
namespace {

// "Intel(R) Xeon(R) Processor"; "unknown" if the system does not say.
std::string ProcessorModel() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

class CpuStagedContribution final : public StagedContribution {
 public:
  // `executors`: those that computed it.
  CpuStagedContribution(std::shared_ptr<EngineCore> core, ShardExecutors& executors, std::vector<std::unique_ptr<StagedHead>> heads)
      : core_(std::move(core)), executors_(executors), heads_(std::move(heads)) {}

  absl::Status DoCommit(double factor) override {
    if (committed_) return MakeError(ErrorReason::kInternal, "the contribution was committed before");
    float alpha = 0;
    absl::Status status = ToFactor(factor, &alpha);
    if (!status.ok()) return status;
    {
      std::lock_guard<std::mutex> lock(core_->work_mutex);
      const SingleThreadedBlas blas;
      status = executors_.RunDecided([](const ShardContext&) { return absl::OkStatus(); },
                                     [&](const ShardContext& context) {
                                       for (const auto& head : heads_) AddOnShard(context, *head, alpha);
                                       return absl::OkStatus();
                                     });
    }
    if (HasReason(status, ErrorReason::kShardNotReady)) return status;
    committed_ = true;
    heads_.clear();  // frees the slots
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
        const int64_t part_start = parts.part(part).start;
        parts.ForEachPanel(part, plan.panel_rows, [&](int64_t start, int64_t count) {
          for (const KeptRows& rows : staged.kept[index]) AddGradWeightPanel(shard, rows, part_start, start, count, target);
        });
      });
      return;
    }
    if (!staged.has_product[index]) return;
    const float* slot = staged.SlotOf(shard);
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

  const std::shared_ptr<EngineCore> core_;
  ShardExecutors& executors_;
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
    HEADWATER_RETURN_IF_ERROR(CheckHeadSpec(spec, core_->options, /*has_int8=*/false));
    return Plan(spec).memory;
  }

  absl::StatusOr<std::unique_ptr<EngineHead>> DoCreateHead(const HeadSpec& spec) override {
    HEADWATER_RETURN_IF_ERROR(CheckHeadSpec(spec, core_->options, /*has_int8=*/false));
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

  absl::Status DoHealth() const override { return core_->executors.health(); }
  int64_t progress() const override { return core_->executors.progress(); }

  absl::StatusOr<MicroBatchResult> DoCompute(const MicroBatch& micro_batch) override {
    absl::Status status = CheckHeads(micro_batch, [this](const EngineHead& head) {
      const auto* own = dynamic_cast<const CpuHead*>(&head);
      return own != nullptr && &own->core() == core_.get();
    });
    if (status.ok()) status = CheckMicroBatch(micro_batch, /*has_device=*/false);
    if (!status.ok()) return status;
    ShardExecutors* executors = &core_->executors;
    if (executors->is_group()) {
      const absl::StatusOr<Parallelism> parallelism = ParallelismOf(micro_batch);
      if (!parallelism.ok()) return parallelism.status();
      if (*parallelism == Parallelism::kRows) executors = &core_->replica_executors;
    }
    // All rows before anything else, and before the processors are taken: there is no copying that could be hidden under products.
    DigestBuilder row_sum;
    if (micro_batch.flow != nullptr) {
      status = micro_batch.flow->AwaitRows(micro_batch.hidden.row_count);
      if (!status.ok()) return status;
      if (micro_batch.digest_rows) status = DoDigestRows(StreamsOf(micro_batch), nullptr, &row_sum);
      if (!status.ok()) return status;
    }
    std::lock_guard<std::mutex> lock(core_->work_mutex);
    absl::StatusOr<CpuMicroBatchPlan> plan = PlanMicroBatch(micro_batch, core_->options);
    if (!plan.ok()) return plan.status();
    const bool is_first = executors->holds(0);
    if (is_first) ClearGradHidden(micro_batch, *plan);
    MicroBatchResult result;
    absl::Status decision;
    {
      const SingleThreadedBlas blas;
      status = executors->RunDecided([](const ShardContext&) { return absl::OkStatus(); },
                                     [&](const ShardContext& context) {
                                       if (micro_batch.flow != nullptr) {
                                         // The first rank runs on this thread, and asks for all of them; in a group each rank is
                                         // answered alike.
                                         double refused = 0;
                                         if (context.rank == 0 || executors->is_group()) {
                                           decision = micro_batch.flow->Decide(micro_batch.digest_rows ? &row_sum : nullptr);
                                           refused = decision.ok() ? 0 : 1;
                                         }
                                         absl::Status told;
                                         if (!executors->is_group()) told = context.communicator.AllReduceMax(&refused, 1);
                                         if (!told.ok() || refused > 0) return told;
                                       }
                                       return ShardRun(context, &*plan).Run();
                                     });
    }
    if (status.ok()) status = decision;
    if (!status.ok()) return status;
    const MutableRowsView& out = micro_batch.grad_hidden;
    if (micro_batch.flow != nullptr && is_first && out.data != nullptr && out.row_count > 0 && !HasGradient(*plan)) {
      micro_batch.flow->GradHiddenReady(out.row_count);  // every row is 0
    }
    status = FinishTerms(&*plan, &result.terms);
    if (!status.ok()) return status;
    if (!plan->staged.empty()) result.staged = std::make_unique<CpuStagedContribution>(core_, *executors, std::move(plan->staged));
    return result;
  }

 private:
  HeadPlan Plan(const HeadSpec& spec) const { return PlanHeadOnCpu(spec, core_->options, core_->executors.threads_per_shard()); }

  // Rows that no chunk writes get 0.
  static void ClearGradHidden(const MicroBatch& micro_batch, const MicroBatchPlan& plan) {
    const MutableRowsView& out = micro_batch.grad_hidden;
    if (out.data == nullptr) return;
    const int64_t row_bytes = out.column_count * ElementBytes(out.data_type);
    ForEachRowWithoutGradient(plan, [&](int64_t row, int64_t count) {
      std::memset(static_cast<char*>(out.data) + row * row_bytes, 0, static_cast<size_t>(count * row_bytes));
    });
  }

  const std::shared_ptr<EngineCore> core_;
};

}  // namespace
}  // namespace headwater::cpu

namespace headwater {

absl::StatusOr<std::unique_ptr<LossEngine>> CreateCpuEngine(const EngineOptions& options) {
  absl::Status status = CheckEngineOptions(options);
  if (!status.ok()) return status;
  EngineOptions filled = options;
  if (filled.memory_budget_bytes == 0) filled.memory_budget_bytes = MemoryLimitBytes() / 5 * 4;
  if (filled.workspace_bytes == 0) filled.workspace_bytes = cpu::kDefaultWorkspaceBytes;
  if (filled.thread_count == 0) filled.thread_count = std::min(ComputeThreads(), kMaxThreads);
  if (filled.bfloat16_products == Bfloat16Products::kOneDnn && !cpu::GetBfloat16Library().is_usable) {
    return MakeError(ErrorReason::kFeatureNotBuilt, "bfloat16_products: " + cpu::GetBfloat16Library().why_not);
  }
  filled.bfloat16_products = ChooseBfloat16Products(options);
  return std::unique_ptr<LossEngine>(std::make_unique<cpu::CpuEngine>(std::make_shared<cpu::EngineCore>(filled)));
}

}  // namespace headwater
