// A top-k teacher's rows, in the wide form: fp64 logits, of which the columns that the teacher names are taken apart (top_k.h).
#include <algorithm>
#include <cmath>

#include "kernels/cpu/shard_run.h"

namespace headwater::cpu {

absl::Status ShardRun::RunTopKRows(Work* work, const double* student) {
  const TermPlan& term = work->term;
  const RowRange shard = work->shard.rows;
  const size_t rows = static_cast<size_t>(work->row_count);
  top_k_rows_.clear();
  top_k_starts_.assign(1, 0);
  for (size_t i = 0; i < rows; ++i) {
    top_k_rows_.push_back(TopKRowOf(*term.top_k, work->rows[i].term_row));
    top_k_starts_.push_back(top_k_starts_.back() + top_k_rows_.back().entries.size());
  }

  const PieceStats nothing = RowStats().others;
  student_parts_.assign(rows * static_cast<size_t>(work->parts.count()), nothing);
  top_k_logits_.assign(top_k_starts_.back(), 0.0);
  StatsOptions options;
  options.cap = term.head->spec().transform.softcap.value_or(0);
  options.inverse_temperature = term.cross_entropy.inverse_temperature;
  context_.pool.Run(work->parts.count(), [&](int32_t part) {
    const RowRange range = work->parts.part(part);
    for (size_t i = 0; i < rows; ++i) {
      const double* a = student + static_cast<int64_t>(i) * work->stride;
      PieceStats* stats = &student_parts_[static_cast<size_t>(part) * rows + i];
      int64_t start = range.start;
      const auto add_until = [&](int64_t end) {
        if (end > start) MergeStats(GetRowKernels().stats_double(a + start, end - start, options), stats);
      };
      for (size_t e = 0; e < top_k_rows_[i].entries.size(); ++e) {
        const int64_t column = top_k_rows_[i].entries[e].column - shard.start;
        if (column < range.start || column >= range.end) continue;
        add_until(column);
        start = column + 1;
        top_k_logits_[top_k_starts_[i] + e] = TemperedLogit(term, a[column]);
      }
      add_until(range.end);
    }
  });
  absl::Status status = MergePieceStats(*work, &student_parts_, &student_stats_);
  // Each logit is 0 on all shards but its own.
  if (status.ok()) {
    status = context_.communicator.AllReduceSum(top_k_logits_.data(), static_cast<int64_t>(top_k_logits_.size()));
  }
  if (!status.ok()) return status;

  for (size_t i = 0; i < rows; ++i) {
    const size_t entries = top_k_rows_[i].entries.size();
    const TopKLoss loss = FinishTopK(top_k_rows_[i], student_stats_[i], {top_k_logits_.data() + top_k_starts_[i], entries});
    const double weight = work->rows[i].token_weight;
    RowState& state = states_[i];
    state.divergence = loss.loss;
    state.student_lse = loss.lse;
    state.gradient.max = loss.max;
    state.gradient.probability_factor = Weighted(weight, loss.rest_factor);
  }
  RecordRows(work);
  if (!work->backward) return absl::OkStatus();
  ComputeTopKGradient(work, student);
  AddGradHidden(work);
  return absl::OkStatus();
}

void ShardRun::ComputeTopKGradient(Work* work, const double* student) {
  const HeadShard& shard = work->shard;
  const TermPlan& term = work->term;
  const double cap = term.head->spec().transform.softcap.value_or(0);
  const GradientTarget target = TargetOf(*work);
  BeginGradWeight(work);
  context_.pool.Run(work->parts.count(), [&](int32_t part) {
    const int64_t part_start = work->parts.part(part).start;
    work->parts.ForEachPanel(part, work->head_plan.panel_rows, [&](int64_t start, int64_t count) {
      for (int64_t i = 0; i < work->row_count; ++i) {
        const size_t index = static_cast<size_t>(i);
        const RowState& state = states_[index];
        const TopKRow& teacher = top_k_rows_[index];
        float* row = work->gradient + i * work->stride + start;
        const double* a = student + i * work->stride + start;
        GetRowKernels().gradient_double(a, count, cap, CoefficientsOf<double>(term, state), nullptr, row);
        const double factor = GradientScale(term) * work->rows[i].token_weight;
        for (size_t e = 0; e < teacher.entries.size(); ++e) {
          const int64_t column = teacher.entries[e].column - shard.rows.start - start;
          if (column < 0 || column >= count) continue;
          const double probability = std::exp(top_k_logits_[top_k_starts_[index] + e] - state.student_lse);
          row[column] = static_cast<float>(factor * (teacher.mass * probability - teacher.entries[e].probability) *
                                           SoftcapDerivative(a[column], cap));
        }
        RoundGradient(*work, i, part_start, start, count);
      }
      if (target.grad_weight != nullptr) {
        AddGradWeightPanel(shard, {work->gradient, work->hidden, work->row_count, work->is_bfloat16}, part_start, start, count,
                           target);
      }
    });
  });
}

}  // namespace headwater::cpu
