// The narrow form: cross entropy of a chunk with fp32 logits.
//
// Numerics. The target's logit comes from a dot in fp64, and its column takes no part in any sum. The columns that matter most
// beside it are also recomputed in fp64 (logit_refinement.cc). A chunk with too many of those takes the wide form.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/rows/convert.h"
#include "kernels/cpu/shard_run.h"

namespace headwater::cpu {
namespace {

constexpr int64_t kLineFloats = 16;  // of a cache line

}  // namespace

absl::Status ShardRun::RunNarrow(Work* work, bool* needs_wide) {
  PlaceBuffers(work, work->shard.layout.logits);
  GatherHidden(work);
  ComputeNarrowLogits(work);
  absl::Status status = MergeRowStats(*work);
  if (!status.ok()) return status;
  status = RefineLogits(work, needs_wide);
  if (!status.ok() || *needs_wide) return status;
  FinishRows(work);
  RecordRows(work);
  if (!work->backward) return absl::OkStatus();
  BeginDither(*work);
  ComputeNarrowGradient(work);
  status = ReportDither(work);
  if (!status.ok()) return status;
  AddGradHidden(work);
  return absl::OkStatus();
}

bool ShardRun::TakesExactStats(const TermPlan& term) {
  return term.cross_entropy.inverse_temperature != 1 || (term.wants_spread() && term.head->spec().transform.softcap.has_value());
}

void ShardRun::MultiplyConverted(const Work& work, int64_t start, int64_t count, float* converted, Matrix<float> logits) {
  const HeadShard& shard = work.shard;
  const int64_t hidden_size = shard.hidden_size;
  const Matrix<const float> hidden = {work.hidden, hidden_size};
  if (shard.data_type == DataType::kFloat32) {
    MultiplyTransposed(work.row_count, count, hidden_size, hidden, {shard.weight.As<float>() + start * hidden_size, hidden_size},
                       logits);
    return;
  }
  for (int64_t done = 0; done < count; done += work.head_plan.converted_rows) {
    const int64_t rows = std::min(work.head_plan.converted_rows, count - done);
    ToFloat(shard.weight.As<uint16_t>() + (start + done) * hidden_size, shard.data_type, rows * hidden_size, converted);
    MultiplyTransposed(work.row_count, rows, hidden_size, hidden, {converted, hidden_size}, {logits.data + done, logits.stride});
  }
}

void ShardRun::ComputeNarrowLogits(Work* work) {
  const HeadShard& shard = work->shard;
  const TermPlan& term = work->term;
  const LogitTransform& transform = term.head->spec().transform;
  const int64_t rows = work->row_count;
  part_stats_.assign(static_cast<size_t>(rows * work->parts.count()), RowStats());
  panels_per_part_ = work->parts.MaxPanels(work->head_plan.panel_rows);
  panel_max_.assign(static_cast<size_t>(rows * work->parts.count() * panels_per_part_), 0.0f);
  context_.pool.Run(work->parts.count(), [&](int32_t part) {
    const RowKernels& kernels = GetRowKernels();
    float* converted = shard.Workspace<float>(shard.layout.converted + part * work->head_plan.converted_bytes);
    RowStats* stats = part_stats_.data() + part * rows;
    ComputeTargetLogits(*work, part, converted);
    float bias_panel[kMaxPanelRows];
    double exact_panel[kMaxPanelRows];
    float* panel_max = panel_max_.data() + part * panels_per_part_ * rows;  // a shard of padding has no panels
    work->parts.ForEachPanel(part, work->head_plan.panel_rows, [&](int64_t start, int64_t count) {
      const Matrix<float> logits = {work->gradient + start, work->stride};
      if (work->is_bfloat16) {
        MultiplyTransposed(rows, count, shard.hidden_size, {reinterpret_cast<const uint16_t*>(work->hidden), shard.hidden_size},
                           {shard.weight.As<uint16_t>() + start * shard.hidden_size, shard.hidden_size}, logits);
      } else {
        MultiplyConverted(*work, start, count, converted, logits);
      }
      if (shard.has_bias) {
        ToFloat(ElementAt(shard.bias.As<char>(), shard.data_type, start), shard.data_type, count, bias_panel);
      }
      const int64_t global_start = shard.rows.start + start;
      for (int64_t i = 0; i < rows; ++i) {
        float* a = work->gradient + i * work->stride + start;
        kernels.affine_float(a, shard.has_bias ? bias_panel : nullptr, static_cast<float>(transform.logit_scale), count);
        const int64_t target = work->rows[i].target;
        RowStats panel_stats;
        if (TakesExactStats(term)) {
          kernels.float_to_double(a, count, exact_panel);
          panel_stats = StatsOfColumns(term, exact_panel, count, global_start, target, stats[i].best);
        } else {
          panel_stats = StatsOfColumns(term, a, count, global_start, target, stats[i].best);
        }
        MergeStats(panel_stats, &stats[i]);
        panel_max[i] = static_cast<float>(panel_stats.others.max);
      }
      panel_max += rows;
    });
  });
  for (size_t i = 0; i < static_cast<size_t>(rows); ++i) {
    // Goes into the first part's statistics; the sum over parts is equal for any part.
    if (states_[i].owns_target) part_stats_[i].target_logit = TemperedLogit(term, states_[i].target_argument);
  }
}

void ShardRun::ComputeTargetLogits(const Work& work, int32_t part, float* converted) {
  const HeadShard& shard = work.shard;
  const RowRange range = SplitEvenly({0, work.row_count}, part, work.parts.count(), 1);
  for (int64_t i = range.start; i < range.end; ++i) {
    const int64_t target = work.rows[i].target;
    if (target < shard.rows.start || target >= shard.rows.end) continue;
    RowState& state = states_[static_cast<size_t>(i)];
    state.owns_target = true;
    state.target_argument = LogitArgument(work, i, target - shard.rows.start, converted);
  }
}

void ShardRun::ComputeNarrowGradient(Work* work) {
  const HeadShard& shard = work->shard;
  const TermPlan& term = work->term;
  const double cap = term.head->spec().transform.softcap.value_or(0);
  const double scale = GradientScale(term);
  const GradientTarget target = TargetOf(*work);
  BeginGradWeight(work);
  context_.pool.Run(work->parts.count(), [&](int32_t part) {
    const int64_t part_start = work->parts.part(part).start;
    size_t refined_count = 0;
    work->parts.ForEachPanel(part, work->head_plan.panel_rows, [&](int64_t start, int64_t count) {
      const int64_t global_start = shard.rows.start + start;
      const float* class_weights = term.cross_entropy.class_weights;
      // All of a row's columns at once, while they are in the nearest cache; the next row's are on their way there.
      for (int64_t i = 0; i < work->row_count; ++i) {
        const RowState& state = states_[static_cast<size_t>(i)];
        float* row = work->gradient + i * work->stride + start;
        for (int64_t column = 0; i + 1 < work->row_count && column < count; column += kLineFloats) {
          __builtin_prefetch(row + work->stride + column, 1);
        }
        GetRowKernels().gradient_float(row, count, cap, CoefficientsOf<float>(term, state),
                                       class_weights == nullptr ? nullptr : class_weights + global_start);
        ApplyRefinedGradient(*work, part, i, start + count, &refined_count);
        DitherColumns(*work, i, start, count, &dither_sums_[static_cast<size_t>(part)]);
        const int64_t column = work->rows[i].target - global_start;
        if (column >= 0 && column < count) {
          row[column] = static_cast<float>(scale * state.gradient.target * SoftcapDerivative(state.target_argument, cap));
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
