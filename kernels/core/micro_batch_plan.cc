#include "kernels/core/micro_batch_plan.h"

#include <algorithm>
#include <string>
#include <utility>
#include <variant>

#include "headwater/kernels/error.h"
#include "kernels/core/micro_batch_check.h"

namespace headwater {
namespace {

TermPlan MakeTermPlan(const LossTerm& term) {
  TermPlan plan;
  plan.term = &term;
  plan.head = static_cast<HeadBase*>(term.head);
  plan.teacher = static_cast<HeadBase*>(term.teacher_head);
  plan.jsd = std::get_if<JsdSpec>(&term.loss);
  if (plan.jsd != nullptr) {
    plan.hard_weight = plan.jsd->hard_loss_weight;
    plan.soft_weight = 1 - plan.jsd->hard_loss_weight;
  }
  plan.top_k = std::get_if<TopKSpec>(&term.loss);
  if (plan.top_k != nullptr) {
    plan.hard_weight = 0;
    plan.soft_weight = 1;
  }
  const CrossEntropySpec* cross_entropy = plan.jsd != nullptr ? &plan.jsd->hard_loss : std::get_if<CrossEntropySpec>(&term.loss);
  // Options of a hard loss that has no weight mean nothing.
  plan.cross_entropy = MakeCrossEntropyTerm(plan.hard_weight > 0 ? *cross_entropy : CrossEntropySpec(),
                                            plan.head->spec().transform.valid_vocab_size);
  if (plan.top_k != nullptr) plan.cross_entropy.inverse_temperature = 1 / plan.top_k->student_temperature;
  const auto is_not_zero = [](float factor) { return factor != 0; };
  plan.has_entropy_factors = std::any_of(term.entropy_factors.begin(), term.entropy_factors.end(), is_not_zero);
  plan.has_lse_factors = std::any_of(term.lse_factors.begin(), term.lse_factors.end(), is_not_zero);
  plan.dithers = term.gradient_resolution > 0;
  plan.wants_weighted = term.entropy != nullptr || plan.has_entropy_factors;
  plan.wants_squares = term.log_sum_sq_probs != nullptr;
  plan.wants_total = term.mean_logits != nullptr;
  plan.wants_argmax = term.argmax != nullptr;
  plan.wants_cross_entropy = plan.hard_weight > 0 || WantsLogitOutputs(term);
  plan.has_token_outputs = term.token_loss != nullptr || WantsLogitOutputs(term);
  plan.non_finite.assign(static_cast<size_t>(term.row_count), 0);
  return plan;
}

bool IsIgnored(const LossTerm& term, size_t row) { return !term.targets.empty() && term.targets[row] == term.ignore_index; }

double ValueOf(absl::Span<const float> values, size_t row, double if_empty) {
  return values.empty() ? if_empty : static_cast<double>(values[row]);
}

double TokenWeight(const LossTerm& term, size_t row) { return ValueOf(term.token_weights, row, 1); }

// The rows of a term that take part: those with a gradient (`passive` false), or the others if their outputs are asked for.
std::vector<ChunkRow> RowsOf(const TermPlan& plan, bool passive) {
  std::vector<ChunkRow> rows;
  const LossTerm& term = *plan.term;
  if (passive && (!plan.has_token_outputs || term.token_weights.empty())) return rows;
  if (!passive) rows.reserve(static_cast<size_t>(term.row_count));
  for (int64_t i = 0; i < term.row_count; ++i) {
    const size_t row = static_cast<size_t>(i);
    if (IsIgnored(term, row)) continue;
    const ChunkRow chunk_row = {i,
                                term.row_start + i,
                                0,
                                term.targets.empty() ? -1 : term.targets[row],
                                TokenWeight(term, row),
                                ValueOf(term.entropy_factors, row, 0),
                                ValueOf(term.lse_factors, row, 0)};
    if (chunk_row.has_gradient() != passive) rows.push_back(chunk_row);
  }
  return rows;
}

// Numbers the rows that any term has, and returns them: chunk_row becomes the number for now.
std::vector<int64_t> NumberRows(int64_t batch_row_count, std::vector<std::vector<ChunkRow>>* by_term) {
  std::vector<int64_t> rows;
  const auto is_used = [](const std::vector<ChunkRow>& term) { return !term.empty(); };
  const auto first = std::find_if(by_term->begin(), by_term->end(), is_used);
  if (first == by_term->end()) return rows;
  if (std::find_if(first + 1, by_term->end(), is_used) == by_term->end()) {
    rows.resize(first->size());
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i] = (*first)[i].batch_row;
      (*first)[i].chunk_row = static_cast<int64_t>(i);
    }
    return rows;
  }
  std::vector<int64_t> numbers(static_cast<size_t>(batch_row_count), -1);
  for (const std::vector<ChunkRow>& term : *by_term) {
    for (const ChunkRow& row : term) numbers[static_cast<size_t>(row.batch_row)] = 0;
  }
  for (size_t row = 0; row < numbers.size(); ++row) {
    if (numbers[row] < 0) continue;
    numbers[row] = static_cast<int64_t>(rows.size());
    rows.push_back(static_cast<int64_t>(row));
  }
  for (std::vector<ChunkRow>& term : *by_term) {
    for (ChunkRow& row : term) row.chunk_row = numbers[static_cast<size_t>(row.batch_row)];
  }
  return rows;
}

int64_t RowsPerChunk(int64_t row_count, const ChunkLimits& limits) {
  if (limits.exact) return limits.max_rows;
  const int64_t chunk_count = (row_count + limits.max_rows - 1) / limits.max_rows;
  const int64_t even = (row_count + chunk_count - 1) / chunk_count;
  return std::min(limits.max_rows, (even + limits.grain - 1) / limits.grain * limits.grain);
}

// Rows of `rows` from *next on whose number is below `end`, with their chunk rows counted from `start`.
std::vector<ChunkRow> TakeRows(int64_t start, int64_t end, std::vector<ChunkRow>* rows, size_t* next) {
  const size_t first = *next;
  if (first >= rows->size()) return {};
  if (first == 0 && rows->back().chunk_row < end) {
    *next = rows->size();
    if (start == 0) return std::move(*rows);
  } else {
    while (*next < rows->size() && (*rows)[*next].chunk_row < end) ++*next;
  }
  std::vector<ChunkRow> taken(rows->begin() + static_cast<int64_t>(first), rows->begin() + static_cast<int64_t>(*next));
  for (ChunkRow& row : taken) row.chunk_row -= start;
  return taken;
}

void AddChunks(bool passive, const ChunkLimits& limits, MicroBatchPlan* plan) {
  std::vector<std::vector<ChunkRow>> by_term;
  by_term.reserve(plan->terms.size());
  for (const TermPlan& term : plan->terms) by_term.push_back(RowsOf(term, passive));
  std::vector<int64_t> rows = NumberRows(plan->micro_batch->hidden.row_count, &by_term);
  const int64_t count = static_cast<int64_t>(rows.size());
  if (count == 0) return;
  const int64_t rows_per_chunk = RowsPerChunk(count, limits);
  std::vector<size_t> next(by_term.size(), 0);
  for (int64_t start = 0; start < count; start += rows_per_chunk) {
    const int64_t end = std::min(count, start + rows_per_chunk);
    Chunk chunk;
    chunk.backward = plan->micro_batch->backward && !passive;
    if (end - start == count) {
      chunk.batch_rows = std::move(rows);
    } else {
      chunk.batch_rows.assign(rows.begin() + start, rows.begin() + end);
    }
    for (size_t t = 0; t < by_term.size(); ++t) {
      TermChunk part = {t, TakeRows(start, end, &by_term[t], &next[t])};
      if (!part.rows.empty()) chunk.terms.push_back(std::move(part));
    }
    plan->chunks.push_back(std::move(chunk));
  }
}

}  // namespace

std::vector<RowsView> StreamsOf(const MicroBatch& micro_batch) {
  std::vector<RowsView> streams = {micro_batch.hidden};
  for (const LossTerm& term : micro_batch.terms) streams.push_back(term.teacher_hidden);
  return streams;
}

MicroBatchPlan PlanTerms(const MicroBatch& micro_batch) {
  MicroBatchPlan plan;
  plan.micro_batch = &micro_batch;
  plan.terms.reserve(micro_batch.terms.size());
  for (const LossTerm& term : micro_batch.terms) {
    plan.terms.push_back(MakeTermPlan(term));
    if (plan.terms.back().head->spec().trainable) plan.terms.back().grad_weight = micro_batch.grad_weight;
  }
  return plan;
}

void PlanChunks(const ChunkLimits& limits, MicroBatchPlan* plan) {
  AddChunks(/*passive=*/false, limits, plan);
  AddChunks(/*passive=*/true, limits, plan);
}

absl::Status TakeSlots(MicroBatchPlan* plan) {
  for (TermPlan& term : plan->terms) {
    if (term.grad_weight != GradWeightMode::kStage) continue;
    for (size_t i = 0; i < plan->slots.size(); ++i) {
      if (plan->slots[i].slot.head() == term.head) term.slot = static_cast<int32_t>(i);
    }
    if (term.slot >= 0) continue;
    StagingSlot slot(term.head);
    if (!slot.taken()) {
      for (TermPlan& other : plan->terms) other.slot = -1;
      plan->slots.clear();
      const std::string slot_count = std::to_string(term.head->spec().staging_slots);
      return MakeError(ErrorReason::kStagingFull, "all " + slot_count + " staging slots of the head are taken",
                       {{"stagingSlots", slot_count}});
    }
    term.slot = static_cast<int32_t>(plan->slots.size());
    plan->slots.push_back({std::move(slot), 0});
  }
  for (const Chunk& chunk : plan->chunks) {
    if (!chunk.backward) continue;
    for (const TermChunk& part : chunk.terms) {
      const int32_t slot = plan->terms[part.term].slot;
      if (slot >= 0) plan->slots[static_cast<size_t>(slot)].row_count += static_cast<int64_t>(part.rows.size());
    }
  }
  return absl::OkStatus();
}

void BeginOutputs(MicroBatchPlan* plan) {
  for (TermPlan& term_plan : plan->terms) {
    const LossTerm& term = *term_plan.term;
    LossSums sums;
    for (size_t row = 0; row < static_cast<size_t>(term.row_count); ++row) {
      if (term_plan.has_token_outputs) WriteOutputs(term, static_cast<int64_t>(row), 0, {});
      if (IsIgnored(term, row)) continue;
      const double weight = TokenWeight(term, row);
      sums.valid_token_count += 1;
      sums.token_weight_sum += weight;
      sums.target_weight_sum += weight * (term.targets.empty() ? 1.0 : term_plan.cross_entropy.ClassWeight(term.targets[row]));
    }
    term_plan.sums = sums;
  }
}

void ForEachRowWithoutGradient(const MicroBatchPlan& plan, absl::FunctionRef<void(int64_t, int64_t)> visit) {
  int64_t next = 0;
  const auto skip_to = [&](int64_t row) {
    if (row > next) visit(next, row - next);
  };
  for (const Chunk& chunk : plan.chunks) {
    if (!chunk.backward) continue;
    if (chunk.ContiguousInBatch()) {
      skip_to(chunk.batch_rows.front());
    } else {
      for (const int64_t row : chunk.batch_rows) {
        skip_to(row);
        next = row + 1;
      }
    }
    next = chunk.batch_rows.back() + 1;
  }
  skip_to(plan.micro_batch->hidden.row_count);
}

int64_t FinalRowsAfter(const MicroBatchPlan& plan, size_t chunk) {
  const bool is_last = chunk + 1 == plan.chunks.size() || !plan.chunks[chunk + 1].backward;
  return is_last ? plan.micro_batch->hidden.row_count : plan.chunks[chunk + 1].batch_rows.front();
}

bool HasGradient(const MicroBatchPlan& plan) { return !plan.chunks.empty() && plan.chunks.front().backward; }

absl::Status FinishTerms(MicroBatchPlan* plan, std::vector<LossSums>* sums) {
  int64_t non_finite_rows = 0;
  for (TermPlan& term : plan->terms) {
    term.sums.non_finite_row_count = std::count(term.non_finite.begin(), term.non_finite.end(), 1);
    non_finite_rows += term.sums.non_finite_row_count;
    if (term.teacher_error_rows > 0) term.sums.teacher_mean_square_error /= static_cast<double>(term.teacher_error_rows);
    sums->push_back(term.sums);
  }
  if (!plan->micro_batch->refuse_non_finite || non_finite_rows == 0) return absl::OkStatus();
  return MakeError(ErrorReason::kNonFiniteValues,
                   std::to_string(non_finite_rows) + " rows have a loss or a gradient that is not finite",
                   {{"nonFiniteRowCount", std::to_string(non_finite_rows)}});
}

}  // namespace headwater
