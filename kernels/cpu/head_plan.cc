#include "kernels/cpu/head_plan.h"

#include <algorithm>

#include "headwater/kernels/communicator.h"
#include "kernels/core/head_tensors.h"
#include "kernels/core/saturating.h"

namespace headwater::cpu {
namespace {

// Bytes of a weight panel in fp32 that stay in a core's cache beside the logits they make.
constexpr int64_t kPanelCacheBytes = int64_t{2} << 20;
// Bytes of all threads' converted weight rows: with many threads each converts fewer rows at once, which leaves memory to logits.
constexpr int64_t kConvertedBytes = int64_t{8} << 20;
constexpr int64_t kAlignment = 64;
// Row state outside of the mapped workspace: for each row, statistics of each thread and of each shard, and the row's own entry.
constexpr int64_t kStatisticsBytesPerRow = 240;
constexpr int64_t kRefinedLogitBytes = 16;

int64_t Aligned(int64_t bytes) { return SaturatingAdd(bytes, kAlignment - 1) / kAlignment * kAlignment; }

int64_t Product(int64_t a, int64_t b, int64_t c) { return SaturatingMultiply(SaturatingMultiply(a, b), c); }

int64_t PanelRows(int64_t bytes, int64_t hidden_size, int64_t element_bytes) {
  return std::clamp<int64_t>(bytes / (hidden_size * element_bytes) / 16 * 16, 16, kMaxPanelRows);
}

WorkspaceLayout LayOut(const HeadPlan& plan, const HeadSpec& spec, int64_t shard_rows, int32_t threads, int32_t shard_count) {
  WorkspaceLayout layout;
  int64_t next = 0;
  const auto place = [&next](int64_t bytes) {
    const int64_t offset = next;
    next = Aligned(SaturatingAdd(next, bytes));
    return offset;
  };
  const int64_t row_bytes = SaturatingMultiply(spec.hidden_size, 4);
  layout.hidden = place(SaturatingMultiply(plan.narrow_rows, row_bytes));
  layout.grad_hidden = place(SaturatingMultiply(plan.narrow_rows, row_bytes));
  layout.grad_hidden_term = place(SaturatingMultiply(plan.narrow_rows, row_bytes));
  layout.converted = place(SaturatingMultiply(threads, plan.converted_bytes));
  layout.logits = place(Product(plan.narrow_rows, shard_rows, 4));
  const int64_t narrow_end = next;
  next = layout.logits;
  layout.student_logits = place(Product(plan.wide_rows, shard_rows, 8));
  layout.teacher_logits = place(Product(plan.wide_rows, shard_rows, 8));
  layout.wide_gradient = place(Product(plan.wide_rows, shard_rows, 4));
  layout.wide_hidden = place(Product(plan.wide_rows, spec.hidden_size, 8));
  layout.teacher_hidden = place(Product(plan.wide_rows, spec.hidden_size, 8));
  layout.exchange = place(shard_count > 1 ? SaturatingMultiply(spec.vocab_size, 8) : 0);
  layout.mapped_bytes = std::max(next, narrow_end);
  // For each row: its statistics by thread and shard, and the panels' maxima and refined logits.
  const int64_t panel_maxima_bytes = SaturatingMultiply(shard_rows / plan.panel_rows + threads + 1, 4);
  const int64_t refined_bytes = SaturatingMultiply(std::min(kRefinedLogitsPerRow, shard_rows), kRefinedLogitBytes);
  const int64_t row_state = SaturatingAdd(SaturatingAdd(panel_maxima_bytes, refined_bytes),
                                          SaturatingMultiply(threads + shard_count + 2, kStatisticsBytesPerRow));
  layout.total_bytes = SaturatingAdd(layout.mapped_bytes, SaturatingMultiply(plan.narrow_rows, row_state));
  return layout;
}

// Bytes of all shards' workspaces, which share the budget. In a group, whose engines have one shard each, those of the largest
// shard, so that all ranks cut rows alike.
int64_t WorkspaceBytes(HeadPlan* plan, const HeadSpec& spec, int32_t threads, bool is_group) {
  int64_t total = 0;
  plan->layouts.clear();
  const int32_t shard_count = static_cast<int32_t>(plan->shards.size());
  for (const RowRange& shard : plan->shards) {
    plan->layouts.push_back(LayOut(*plan, spec, shard.size(), threads, shard_count));
    const int64_t bytes = plan->layouts.back().total_bytes;
    total = is_group ? std::max(total, bytes) : SaturatingAdd(total, bytes);
  }
  return total;
}

// The largest value in [low, kMaxRows] of *rows for which the workspace stays within `budget`, or `low`.
void LargestRows(int64_t low, int64_t budget, int64_t* rows, HeadPlan* plan, const HeadSpec& spec, int32_t threads, bool is_group) {
  int64_t fits = low;
  int64_t too_many = kMaxRows + 1;
  while (too_many - fits > 1) {
    *rows = fits + (too_many - fits) / 2;
    (WorkspaceBytes(plan, spec, threads, is_group) <= budget ? fits : too_many) = *rows;
  }
  *rows = fits;
}

// The plan of a single engine, except for the shards and their tensors.
HeadPlan PlanReplicaOnCpu(const HeadSpec& spec, const EngineOptions& options, int32_t threads) {
  EngineOptions alone = options;
  alone.group = EngineGroup();
  alone.shard_count = 1;
  alone.shard_weights.clear();
  HeadPlan plan = PlanHeadOnCpu(spec, alone, threads);
  plan.group_shards = SplitVocab(spec.vocab_size, options.shard_count, options.shard_weights);
  plan.memory = MemoryPlan();
  plan.memory.token_chunk_rows = plan.narrow_rows;
  AddReplicaItems(spec, spec.hidden_size, plan.group_shards[static_cast<size_t>(options.group.rank)].size(), &plan.memory);
  const int64_t exchange_bytes = SaturatingMultiply(spec.trainable ? options.group.world_size : 0, kReduceScatterBytes);
  AddPlanItem("workspace", SaturatingAdd(plan.layouts.front().total_bytes, exchange_bytes), &plan.memory);
  return plan;
}

}  // namespace

HeadPlan PlanHeadOnCpu(const HeadSpec& spec, const EngineOptions& options, int32_t threads_per_shard) {
  const bool is_group = options.group.world_size > 1;
  if (is_group && spec.parallelism == Parallelism::kRows) return PlanReplicaOnCpu(spec, options, threads_per_shard);
  HeadPlan plan;
  plan.shards = SplitVocab(spec.vocab_size, options.shard_count, options.shard_weights);
  const int64_t converted_bytes = std::min(kPanelCacheBytes, kConvertedBytes / threads_per_shard);
  plan.panel_rows = PanelRows(kPanelCacheBytes, spec.hidden_size, 4);
  plan.converted_rows = PanelRows(converted_bytes, spec.hidden_size, 4);
  plan.wide_panel_rows = PanelRows(converted_bytes, spec.hidden_size, 8);
  plan.converted_bytes =
      std::max(Product(plan.converted_rows, spec.hidden_size, 4), Product(plan.wide_panel_rows, spec.hidden_size, 8));
  if (options.token_chunk_rows > 0) {
    plan.narrow_rows = plan.wide_rows = options.token_chunk_rows;
  } else {
    const int64_t budget = options.workspace_bytes > 0 ? options.workspace_bytes : kDefaultWorkspaceBytes;
    plan.narrow_rows = kMinNarrowRows;
    plan.wide_rows = kMinWideRows;
    LargestRows(kMinNarrowRows, budget, &plan.narrow_rows, &plan, spec, threads_per_shard, is_group);
    LargestRows(kMinWideRows, budget, &plan.wide_rows, &plan, spec, threads_per_shard, is_group);
    plan.wide_rows = std::min(plan.wide_rows, plan.narrow_rows);
  }

  plan.memory.token_chunk_rows = plan.narrow_rows;
  int64_t workspace_bytes = WorkspaceBytes(&plan, spec, threads_per_shard, is_group);
  HeadSpec held = spec;
  if (is_group) {
    const size_t rank = static_cast<size_t>(options.group.rank);
    held.vocab_size = plan.shards[rank].size();
    workspace_bytes = plan.layouts[rank].total_bytes;
  }
  AddTensorItems(held, held.hidden_size, &plan.memory);
  AddPlanItem("workspace", workspace_bytes, &plan.memory);
  return plan;
}

}  // namespace headwater::cpu
