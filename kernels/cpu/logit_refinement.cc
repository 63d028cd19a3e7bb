// Exactness of the narrow form: the logits that decide a row are taken again, in fp64.
//
// An fp32 product leaves an error of about kRelativeError of a logit's size z, and with it the same relative error of e^z. It
// enters loss and gradient with the column's share of the probability that is not the target's. Errors of different columns are
// independent, so columns with shares below t add at most sqrt(t) * error. With t = (kAllowedError / error)^2 that is
// kAllowedError, and at most 1 / t columns of a row can have larger shares. Their terms are replaced: in the sums by their
// difference, in the gradient by their own value. For logits of ordinary size they are a handful a row. Where they are too many
// (large logits close together, as under a large common offset) the caller takes the wide form. The largest logits are replaced too
// when the argmax is asked for, so that rounding does not decide it. For an entropy, where the target is not the largest, columns
// count by their share of the remainder beside the largest one.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/rows/convert.h"
#include "kernels/cpu/shard_run.h"

namespace headwater::cpu {
namespace {

constexpr double kRelativeError = 4e-7;
constexpr double kAllowedError = 5e-7;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLastBits = 1e-14;  // of fp64
// Below it an entropy is 0 for every purpose.
constexpr double kSmallestRest = 1e-16;

// Logits of a shard that may be taken again.
size_t RefinedCapacity(size_t rows, int64_t shard_rows) {
  return rows * static_cast<size_t>(std::min(kRefinedLogitsPerRow, shard_rows));
}

}  // namespace

// Columns with a logit from here on are replaced; +infinity: none.
double ShardRun::RefinementCutoff(const Work& work, const RowStats& stats) const {
  const PieceStats& others = stats.others;
  if (!std::isfinite(others.max) || !(others.sum > 0)) return kInfinity;
  const double size = std::max({1.0, std::abs(others.max), std::abs(stats.target_logit)});
  const double error = kRelativeError * size;
  const double share = (kAllowedError / error) * (kAllowedError / error);
  double sum = others.sum;
  if (work.term.wants_spread()) {
    const double rest = others.rest + std::exp(stats.target_logit - others.max);
    if (rest > kSmallestRest) sum = std::min(sum, rest);
  }
  double cutoff = share < 1 ? others.max + std::log(sum * share) : kInfinity;
  if (work.term.wants_argmax) cutoff = std::min(cutoff, stats.best - 2 * error);
  return cutoff;
}

absl::Status ShardRun::RefineLogits(Work* work, bool* overflow) {
  const size_t rows = static_cast<size_t>(work->row_count);
  refined_.resize(std::max(refined_.size(), static_cast<size_t>(work->parts.count())));
  for (RefinedPart& part : refined_) part.logits.clear();
  cutoffs_.resize(rows);
  bool any = false;  // the same on every shard, because the merged statistics are
  for (size_t i = 0; i < rows; ++i) {
    const double cutoff = RefinementCutoff(*work, merged_stats_[i]);
    any = any || cutoff < kInfinity;
    cutoffs_[i] = static_cast<float>(cutoff);
  }
  if (!any) return absl::OkStatus();

  refined_count_ = 0;
  context_.pool.Run(work->parts.count(), [&](int32_t part) { RefinePart(*work, part); });
  // By row; the last one's `sum` counts parts with too many logits.
  std::vector<RowRefinement>& merged = refinements_;
  const auto add = [&merged](const RowRefinement* next) {
    for (RowRefinement& to : merged) {
      to.sum += next->sum;
      to.weighted += next->weighted;
      to.squares += next->squares;
      to.top = std::max(to.top, next->top);
      if (next->best > to.best) {
        to.best = next->best;
        to.best_column = next->best_column;
      }
      ++next;
    }
  };
  merged.assign(rows + 1, RowRefinement());
  for (int32_t part = 0; part < work->parts.count(); ++part) add(refined_[static_cast<size_t>(part)].rows.data());
  const int32_t world_size = context_.communicator.world_size();
  if (world_size > 1) {
    gathered_refinements_.resize(merged.size() * static_cast<size_t>(world_size));
    absl::Status status =
        context_.communicator.AllGather(reinterpret_cast<const double*>(merged.data()),
                                        static_cast<int64_t>(merged.size() * sizeof(RowRefinement) / sizeof(double)),
                                        reinterpret_cast<double*>(gathered_refinements_.data()));
    if (!status.ok()) return status;
    merged.assign(rows + 1, RowRefinement());
    for (int32_t shard = 0; shard < world_size; ++shard) {
      add(gathered_refinements_.data() + static_cast<size_t>(shard) * merged.size());
    }
  }
  *overflow = merged.back().sum > 0;
  if (*overflow) return absl::OkStatus();
  for (size_t i = 0; i < rows; ++i) {
    RowStats& stats = merged_stats_[i];
    AddRefinement(merged[i], work->term.wants_spread(), &stats.others);
    const double best = merged[i].best;
    const double column = merged[i].best_column;
    if (!work->term.wants_argmax || best == -kInfinity) continue;
    const double target = static_cast<double>(work->rows[i].target);
    const bool target_wins = stats.target_logit > best || (stats.target_logit == best && target < column);
    stats.best = target_wins ? stats.target_logit : best;
    stats.best_column = target_wins ? target : column;
  }
  return absl::OkStatus();
}

void ShardRun::AddRefinement(const RowRefinement& refinement, bool spread, PieceStats* others) {
  others->sum += refinement.sum;
  others->weighted += refinement.weighted;
  if (!spread) return;
  // The largest column stays out of the rest with its exact value, which is the offset from here on.
  const double top = refinement.top == -kInfinity ? 0.0 : refinement.top;
  const double rest = others->rest + refinement.sum - std::expm1(top);
  const double squares = others->squares + refinement.squares - std::expm1(2 * top);
  const double weighted = others->weighted - std::exp(top) * top;
  const double factor = std::exp(-top);
  others->max += top;
  others->rest = factor * rest;
  others->squares = factor * factor * squares;
  others->weighted = factor * (weighted - top * rest);
  others->sum = 1 + others->rest;
}

void ShardRun::RefinePart(const Work& work, int32_t part) {
  const HeadShard& shard = work.shard;
  const double cap = work.term.head->spec().transform.softcap.value_or(0);
  const double inverse_temperature = work.term.cross_entropy.inverse_temperature;
  const size_t rows = static_cast<size_t>(work.row_count);
  const size_t capacity = RefinedCapacity(rows, shard.rows.size());
  RefinedPart& refined = refined_[static_cast<size_t>(part)];
  refined.rows.assign(rows + 1, RowRefinement());
  std::vector<int32_t>& found = refined.found;
  found.resize(static_cast<size_t>(work.head_plan.panel_rows));
  float* converted = shard.Workspace<float>(shard.layout.converted + part * work.head_plan.converted_bytes);
  const float* panel_max = panel_max_.data() + static_cast<size_t>(part * panels_per_part_) * rows;
  work.parts.ForEachPanel(part, work.head_plan.panel_rows, [&](int64_t start, int64_t count) {
    for (size_t i = 0; i < rows; ++i) {
      if (!(panel_max[i] >= cutoffs_[i])) continue;
      const float* a = work.gradient + static_cast<int64_t>(i) * work.stride + start;
      // The softcap is monotonic: compare its arguments.
      double argument_cutoff = static_cast<double>(cutoffs_[i]) / inverse_temperature;
      if (cap > 0)
        argument_cutoff = argument_cutoff <= -cap ? -kInfinity : cap * std::atanh(std::min(argument_cutoff / cap, 1 - 1e-7));
      const int64_t hits = GetRowKernels().collect_at_least(a, count, static_cast<float>(argument_cutoff), count, found.data());
      if (refined_count_.fetch_add(static_cast<size_t>(hits)) + static_cast<size_t>(hits) > capacity) {
        refined.rows.back().sum = 1;
        return;
      }
      const double max = merged_stats_[i].others.max;
      RowRefinement& row = refined.rows[i];
      for (int64_t hit = 0; hit < hits; ++hit) {
        const int32_t local = found[static_cast<size_t>(hit)];
        const int64_t column = start + local;
        if (shard.rows.start + column == work.rows[i].target) continue;
        const double argument = LogitArgument(work, static_cast<int64_t>(i), column, converted);
        refined.logits.push_back({static_cast<int32_t>(i), static_cast<int32_t>(column), argument});
        const double logit = TemperedLogit(work.term, argument);
        // The column at the maximum, which another softcap may miss by its last bit, is not below it.
        double before = TemperedLogit(work.term, static_cast<double>(a[local])) - max;
        if (before > -kLastBits * std::max(1.0, std::abs(max))) before = 0;
        const double after = logit - max;
        row.sum += std::exp(before) * std::expm1(after - before);
        row.weighted += std::exp(after) * after - std::exp(before) * before;
        row.squares += std::exp(2 * before) * std::expm1(2 * (after - before));
        if (before == 0) row.top = std::max(row.top, after);
        if (logit > row.best) {
          row.best = logit;
          row.best_column = static_cast<double>(shard.rows.start + column);
        }
      }
    }
    panel_max += rows;
  });
}

void ShardRun::ApplyRefinedGradient(const Work& work, int32_t part, int64_t row, int64_t end, size_t* next) const {
  const std::vector<RefinedLogit>& logits = refined_[static_cast<size_t>(part)].logits;
  const double cap = work.term.head->spec().transform.softcap.value_or(0);
  const RowState& state = states_[static_cast<size_t>(row)];
  for (; *next < logits.size() && logits[*next].row == row && logits[*next].column < end; ++*next) {
    const RefinedLogit& logit = logits[*next];
    const RowGradient& gradient = WrittenOf(state);
    const double class_weight = work.term.cross_entropy.ClassWeight(work.shard.rows.start + logit.column);
    const double distance = gradient.max - TemperedLogit(work.term, logit.argument);
    const double g = std::exp(-distance) * (gradient.probability_factor + gradient.distance_factor * distance) -
                     gradient.class_factor * class_weight;
    work.gradient[logit.row * work.stride + logit.column] =
        static_cast<float>(WrittenScale(work.term, state) * g * SoftcapDerivative(logit.argument, cap));
  }
}

// The argument of the softcap of one logit, in fp64. `converted` has room for two rows.
double ShardRun::LogitArgument(const Work& work, int64_t row, int64_t column, float* converted) const {
  const HeadShard& shard = work.shard;
  const float* weight = shard.weight.As<float>() + column * shard.hidden_size;
  if (shard.data_type != DataType::kFloat32) {
    ToFloat(shard.weight.As<uint16_t>() + column * shard.hidden_size, shard.data_type, shard.hidden_size, converted);
    weight = converted;
  }
  float bias = 0;
  if (shard.has_bias) ToFloat(ElementAt(shard.bias.As<char>(), shard.data_type, column), shard.data_type, 1, &bias);
  const float* hidden = work.hidden + row * shard.hidden_size;
  if (work.is_bfloat16) {
    ToFloat(ElementAt(work.hidden, DataType::kBFloat16, row * shard.hidden_size), DataType::kBFloat16, shard.hidden_size,
            converted + shard.hidden_size);
    hidden = converted + shard.hidden_size;
  }
  const double dot = GetRowKernels().dot(hidden, weight, shard.hidden_size);
  return work.term.head->spec().transform.logit_scale * (dot + static_cast<double>(bias));
}

}  // namespace headwater::cpu
