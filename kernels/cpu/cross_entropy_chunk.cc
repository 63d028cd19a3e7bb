// The narrow form: cross entropy of a chunk with fp32 logits.
//
// Numerics. The target's logit comes from a dot in fp64, and its column takes no part in any sum; the columns that matter most
// beside it are taken again in fp64 too (logit_refinement.cc). A chunk with too many of those takes the wide form.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/shard_run.h"

namespace headwater::cpu {
absl::Status ShardRun::RunNarrow(Work* work, bool* needs_wide) {
  PlaceBuffers(work, work->shard.layout.logits);
  GatherHidden(work);
  ComputeNarrowLogits(work);
  ComputeTargetLogits(work);
  absl::Status status = MergeRowStats(*work);
  if (!status.ok()) return status;
  status = RefineLogits(work, needs_wide);
  if (!status.ok() || *needs_wide) return status;
  FinishRows(work);
  RecordRows(work);
  if (!work->backward) return absl::OkStatus();
  ComputeNarrowGradient(work);
  AddGradHidden(work);
  return absl::OkStatus();
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
    float* panel = shard.Workspace<float>(shard.layout.panels + part * work->head_plan.panel_bytes);
    RowStats* stats = part_stats_.data() + part * rows;
    float bias_panel[512];
    float* panel_max = panel_max_.data() + part * panels_per_part_ * rows;  // a shard of padding has no panels
    work->parts.ForEachPanel(part, work->head_plan.panel_rows, [&](int64_t start, int64_t count) {
      const float* weight = shard.weight.As<float>() + start * shard.hidden_size;
      if (shard.data_type != DataType::kFloat32) {
        ToFloat(shard.weight.As<uint16_t>() + start * shard.hidden_size, shard.data_type, count * shard.hidden_size, panel);
        weight = panel;
      }
      MultiplyTransposed(rows, count, shard.hidden_size, {work->hidden, shard.hidden_size}, {weight, shard.hidden_size},
                         {work->gradient + start, work->stride});
      if (shard.has_bias) {
        ToFloat(ElementAt(shard.bias.As<char>(), shard.data_type, start), shard.data_type, count, bias_panel);
      }
      StatsOptions options;
      options.cap = transform.softcap.value_or(0);
      options.want_weighted = term.wants_weighted;
      options.want_linear = term.cross_entropy.label_smoothing > 0;
      const int64_t global_start = shard.rows.start + start;
      const float* class_weights = term.cross_entropy.class_weights;
      for (int64_t i = 0; i < rows; ++i) {
        float* a = work->gradient + i * work->stride + start;
        kernels.affine_float(a, shard.has_bias ? bias_panel : nullptr, static_cast<float>(transform.logit_scale), count);
        RowStats panel_stats;
        // The pieces before and behind the target, which takes no part.
        const int64_t target = std::clamp<int64_t>(work->rows[i].target - global_start, -1, count);
        const bool inside = target >= 0 && target < count;
        const RowRange pieces[2] = {{0, inside ? target : count}, {inside ? target + 1 : count, count}};
        for (const RowRange& piece : pieces) {
          if (piece.size() == 0) continue;
          if (class_weights != nullptr) options.class_weights = class_weights + global_start + piece.start;
          MergeStats(kernels.stats_float(a + piece.start, piece.size(), options), &panel_stats.others);
        }
        if (term.wants_argmax) {
          // Over all columns: the target's too.
          panel_stats.best = panel_stats.others.max;
          if (inside) panel_stats.best = std::max(panel_stats.best, kernels.stats_float(a + target, 1, options).max);
          if (panel_stats.best > stats[i].best) {
            panel_stats.best_column =
                static_cast<double>(global_start + kernels.first_at_least_float(a, count, options.cap, 1, panel_stats.best));
          }
        }
        MergeStats(panel_stats, &stats[i]);
        panel_max[i] = static_cast<float>(panel_stats.others.max);
      }
      panel_max += rows;
    });
  });
}

void ShardRun::ComputeTargetLogits(Work* work) {
  const HeadShard& shard = work->shard;
  const LogitTransform& transform = work->term.head->spec().transform;
  const int32_t threads = context_.pool.thread_count();
  context_.pool.Run(threads, [&](int32_t part) {
    const RowRange range = SplitEvenly({0, work->row_count}, part, threads, 1);
    float* converted = shard.Workspace<float>(shard.layout.panels + part * work->head_plan.panel_bytes);
    for (int64_t i = range.start; i < range.end; ++i) {
      const int64_t target = work->rows[i].target;
      if (target < shard.rows.start || target >= shard.rows.end) continue;
      const double a = LogitArgument(*work, i, target - shard.rows.start, converted);
      RowState& state = states_[static_cast<size_t>(i)];
      state.owns_target = true;
      state.target_argument = a;
      // Of the first part's statistics: which part is the same to the sum over all.
      part_stats_[static_cast<size_t>(i)].target_logit =
          transform.softcap.has_value() ? *transform.softcap * std::tanh(a / *transform.softcap) : a;
    }
  });
}

void ShardRun::ComputeNarrowGradient(Work* work) {
  const HeadShard& shard = work->shard;
  const TermPlan& term = work->term;
  const double cap = term.head->spec().transform.softcap.value_or(0);
  const double smooth_mass = term.cross_entropy.SmoothMass();
  const GradientTarget target = TargetOf(*work);
  BeginGradWeight(work);
  context_.pool.Run(work->parts.count(), [&](int32_t part) {
    int64_t panel_index = 0;
    work->parts.ForEachPanel(part, work->head_plan.panel_rows, [&](int64_t start, int64_t count) {
      const int64_t global_start = shard.rows.start + start;
      const float* class_weights = term.cross_entropy.class_weights;
      for (int64_t i = 0; i < work->row_count; ++i) {
        const RowState& state = states_[static_cast<size_t>(i)];
        float* row = work->gradient + i * work->stride + start;
        const GradientCoefficients coefficients = {state.loss.max, state.scale * state.loss.probability_factor,
                                                   state.scale * smooth_mass};
        GetRowKernels().gradient_float(row, count, cap, coefficients,
                                       class_weights == nullptr ? nullptr : class_weights + global_start);
        const int64_t column = work->rows[i].target - global_start;
        if (column >= 0 && column < count) {
          row[column] =
              static_cast<float>(state.scale * state.loss.target_gradient * SoftcapDerivative(state.target_argument, cap));
        }
      }
      ApplyRefinedGradient(*work, part, panel_index++);
      if (target.grad_weight != nullptr) {
        AddGradWeightPanel(shard, {work->gradient, work->hidden, work->row_count}, start, count, target);
      }
    });
  });
}

}  // namespace headwater::cpu
