#include "kernels/cpu/micro_batch_plan.h"

#include <algorithm>
#include <string>
#include <utility>
#include <variant>

#include "headwater/kernels/error.h"

namespace headwater::cpu {
namespace {

TermPlan MakeTermPlan(const LossTerm& term) {
  TermPlan plan;
  plan.term = &term;
  plan.head = static_cast<CpuHead*>(term.head);
  plan.teacher = static_cast<CpuHead*>(term.teacher_head);
  plan.jsd = std::get_if<JsdSpec>(&term.loss);
  if (plan.jsd != nullptr) {
    plan.hard_weight = plan.jsd->hard_loss_weight;
    plan.soft_weight = 1 - plan.jsd->hard_loss_weight;
  }
  const CrossEntropySpec& spec = plan.jsd != nullptr ? plan.jsd->hard_loss : std::get<CrossEntropySpec>(term.loss);
  // Options of a hard loss that has no weight mean nothing.
  plan.cross_entropy =
      MakeCrossEntropyTerm(plan.hard_weight > 0 ? spec : CrossEntropySpec(), plan.head->spec().transform.valid_vocab_size);
  plan.wants_weighted = term.entropy != nullptr;
  plan.wants_argmax = term.argmax != nullptr;
  plan.wants_cross_entropy = plan.hard_weight > 0 || term.lse != nullptr || term.target_log_probability != nullptr ||
                             plan.wants_weighted || plan.wants_argmax;
  plan.has_token_outputs = term.token_loss != nullptr || term.lse != nullptr || term.target_log_probability != nullptr ||
                           plan.wants_weighted || plan.wants_argmax;
  plan.non_finite.assign(static_cast<size_t>(term.row_count), 0);
  return plan;
}

// Counts the valid rows, and clears the outputs: ignored rows, and rows of weight 0 that nothing is computed for, keep them.
void CountRows(TermPlan* plan) {
  const LossTerm& term = *plan->term;
  for (int64_t i = 0; i < term.row_count; ++i) {
    if (term.token_loss != nullptr) term.token_loss[i] = 0;
    if (term.lse != nullptr) term.lse[i] = 0;
    if (term.target_log_probability != nullptr) term.target_log_probability[i] = 0;
    if (term.entropy != nullptr) term.entropy[i] = 0;
    if (term.argmax != nullptr) term.argmax[i] = -1;
    const size_t row = static_cast<size_t>(i);
    if (!term.targets.empty() && term.targets[row] == term.ignore_index) continue;
    const double weight = term.token_weights.empty() ? 1.0 : static_cast<double>(term.token_weights[row]);
    plan->sums.valid_token_count += 1;
    plan->sums.token_weight_sum += weight;
    plan->sums.target_weight_sum += weight * (term.targets.empty() ? 1.0 : plan->cross_entropy.ClassWeight(term.targets[row]));
  }
}

// The rows of `plan` that take part: those with weight (`passive` false), or those of weight 0 whose outputs are asked for.
std::vector<ChunkRow> ActiveRows(const TermPlan& plan, bool passive) {
  std::vector<ChunkRow> rows;
  const LossTerm& term = *plan.term;
  if (passive && !plan.has_token_outputs) return rows;
  for (int64_t i = 0; i < term.row_count; ++i) {
    const size_t row = static_cast<size_t>(i);
    if (!term.targets.empty() && term.targets[row] == term.ignore_index) continue;
    const double weight = term.token_weights.empty() ? 1.0 : static_cast<double>(term.token_weights[row]);
    if ((weight == 0) != passive) continue;
    ChunkRow chunk_row;
    chunk_row.term_row = i;
    chunk_row.batch_row = term.row_start + i;
    chunk_row.target = term.targets.empty() ? -1 : term.targets[row];
    chunk_row.token_weight = weight;
    rows.push_back(chunk_row);
  }
  return rows;
}

void AddChunks(bool passive, int64_t max_rows, bool exact_rows, MicroBatchPlan* plan) {
  std::vector<std::vector<ChunkRow>> by_term;
  std::vector<int64_t> all_rows;
  for (const TermPlan& term : plan->terms) {
    by_term.push_back(ActiveRows(term, passive));
    for (const ChunkRow& row : by_term.back()) all_rows.push_back(row.batch_row);
  }
  std::sort(all_rows.begin(), all_rows.end());
  all_rows.erase(std::unique(all_rows.begin(), all_rows.end()), all_rows.end());
  const int64_t count = static_cast<int64_t>(all_rows.size());
  if (count == 0) return;
  // Even chunks: the last one would else be small, and starve the products.
  const int64_t chunk_count = (count + max_rows - 1) / max_rows;
  const int64_t rows_per_chunk = exact_rows ? max_rows : (count + chunk_count - 1) / chunk_count;
  std::vector<size_t> next(by_term.size(), 0);
  for (int64_t start = 0; start < count; start += rows_per_chunk) {
    const int64_t end = std::min(count, start + rows_per_chunk);
    Chunk chunk;
    chunk.backward = plan->micro_batch->backward && !passive;
    chunk.batch_rows.assign(all_rows.begin() + start, all_rows.begin() + end);
    for (size_t t = 0; t < by_term.size(); ++t) {
      TermChunk part;
      part.term = t;
      for (size_t& i = next[t]; i < by_term[t].size() && by_term[t][i].batch_row <= chunk.batch_rows.back(); ++i) {
        part.rows.push_back(by_term[t][i]);
        part.rows.back().chunk_row =
            std::lower_bound(chunk.batch_rows.begin(), chunk.batch_rows.end(), part.rows.back().batch_row) -
            chunk.batch_rows.begin();
      }
      if (!part.rows.empty()) chunk.terms.push_back(std::move(part));
    }
    plan->chunks.push_back(std::move(chunk));
  }
}

// Whether the gradient of the logits and the rows themselves fit into a slot, on every shard.
bool RowsFitSlot(const CpuHead& head, int64_t row_count) {
  const int64_t hidden_size = head.spec().hidden_size;
  for (const RowRange& shard : head.cpu_plan().shards) {
    const int64_t slot = shard.size() * hidden_size + (head.spec().has_bias ? shard.size() : 0);
    if (row_count > 0 && slot / row_count < shard.size() + hidden_size) return false;
  }
  return true;
}

void ReleaseSlots(MicroBatchPlan* plan) {
  for (const std::unique_ptr<StagedHead>& staged : plan->staged) staged->head->FreeStagingSlot(staged->slot);
  plan->staged.clear();
}

absl::Status Stage(MicroBatchPlan* plan) {
  for (TermPlan& term : plan->terms) {
    if (term.grad_weight != GradWeightMode::kStage) continue;
    for (const std::unique_ptr<StagedHead>& staged : plan->staged) {
      if (staged->head == term.head) term.staged = staged.get();
    }
    if (term.staged != nullptr) continue;
    const int32_t slot = term.head->TakeStagingSlot();
    if (slot < 0) {
      ReleaseSlots(plan);
      return MakeError(ErrorReason::kStagingFull,
                       "all " + std::to_string(term.head->spec().staging_slots) + " staging slots of the head are taken",
                       {{"stagingSlots", std::to_string(term.head->spec().staging_slots)}});
    }
    auto staged = std::make_unique<StagedHead>();
    staged->head = term.head;
    staged->slot = slot;
    const size_t shard_count = term.head->cpu_plan().shards.size();
    staged->kept.resize(shard_count);
    staged->used_elements.assign(shard_count, 0);
    staged->has_product.assign(shard_count, 0);
    term.staged = staged.get();
    plan->staged.push_back(std::move(staged));
  }
  for (const std::unique_ptr<StagedHead>& staged : plan->staged) {
    int64_t rows = 0;
    for (const Chunk& chunk : plan->chunks) {
      if (!chunk.backward) continue;
      for (const TermChunk& part : chunk.terms) {
        if (plan->terms[part.term].head == staged->head) rows += static_cast<int64_t>(part.rows.size());
      }
    }
    staged->keeps_rows = RowsFitSlot(*staged->head, rows);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<MicroBatchPlan> PlanMicroBatch(const MicroBatch& micro_batch, const EngineOptions& options) {
  MicroBatchPlan plan;
  plan.micro_batch = &micro_batch;
  int64_t max_rows = kMaxRows;
  for (const LossTerm& term : micro_batch.terms) {
    plan.terms.push_back(MakeTermPlan(term));
    TermPlan& term_plan = plan.terms.back();
    if (term_plan.head->spec().trainable) term_plan.grad_weight = micro_batch.grad_weight;
    max_rows = std::min(max_rows, term_plan.head->cpu_plan().narrow_rows);
  }
  if (options.token_chunk_rows > 0) max_rows = options.token_chunk_rows;
  AddChunks(/*passive=*/false, max_rows, options.token_chunk_rows > 0, &plan);
  AddChunks(/*passive=*/true, max_rows, options.token_chunk_rows > 0, &plan);
  absl::Status status = Stage(&plan);
  if (!status.ok()) return status;
  for (TermPlan& term : plan.terms) CountRows(&term);
  return plan;
}

}  // namespace headwater::cpu
