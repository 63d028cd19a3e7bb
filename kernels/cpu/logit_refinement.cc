// Exactness of the narrow form: the logits that decide a row are taken again, in fp64.
//
// An fp32 product leaves an error of about kRelativeError of a logit's size z, and with it the same relative error of e^z. It
// enters loss and gradient with the column's share of the probability that is not the target's. Errors of different columns are
// independent, so columns with shares below t add at most sqrt(t) * error; with t = (kAllowedError / error)^2 that is
// kAllowedError, and no more than 1 / t columns of a row can have larger shares. Those are replaced: in the sums by their
// difference, in the gradient by their own value. For logits of ordinary size they are a handful a row; where they are too many
// (large logits close together, as under a large common offset) the caller takes the wide form. The largest logits are replaced too
// when the argmax is asked for, so that rounding does not decide it.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/shard_run.h"

namespace headwater::cpu {
namespace {

constexpr double kRelativeError = 4e-7;
constexpr double kAllowedError = 5e-7;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Doubles a row that shards exchange: differences of the two sums, largest logit, its column.
constexpr size_t kExchanged = 4;

// Logits that a part may take again.
size_t RefinedCapacity(size_t rows, int64_t shard_rows) {
  return rows * static_cast<size_t>(std::min(kRefinedLogitsPerRow, shard_rows));
}

double Logit(double a, double cap) { return cap > 0 ? cap * std::tanh(a / cap) : a; }

}  // namespace

// Columns with a logit from here on are replaced; +infinity: none.
double ShardRun::RefinementCutoff(const Work& work, const RowStats& stats) const {
  const PieceStats& others = stats.others;
  if (!std::isfinite(others.max) || !(others.sum > 0)) return kInfinity;
  const double size = std::max({1.0, std::abs(others.max), std::abs(stats.target_logit)});
  const double error = kRelativeError * size;
  const double share = (kAllowedError / error) * (kAllowedError / error);
  double cutoff = share < 1 ? others.max + std::log(others.sum * share) : kInfinity;
  if (work.term.wants_argmax) cutoff = std::min(cutoff, stats.best - 2 * error);
  return cutoff;
}

absl::Status ShardRun::RefineLogits(Work* work, bool* overflow) {
  const size_t rows = static_cast<size_t>(work->row_count);
  refined_.resize(std::max(refined_.size(), static_cast<size_t>(work->parts.count())));
  for (RefinedPart& part : refined_) {
    part.logits.clear();
    part.panel_ends.clear();
  }
  cutoffs_.resize(rows);
  bool any = false;  // the same on every shard, because the merged statistics are
  for (size_t i = 0; i < rows; ++i) {
    const double cutoff = RefinementCutoff(*work, merged_stats_[i]);
    any = any || cutoff < kInfinity;
    cutoffs_[i] = static_cast<float>(cutoff);
  }
  if (!any) return absl::OkStatus();

  // [parts][kExchanged * rows + 1]; the last counts overflows.
  const size_t length = kExchanged * rows + 1;
  sums_by_part_.assign(length * static_cast<size_t>(work->parts.count()), 0.0);
  context_.pool.Run(work->parts.count(),
                    [&](int32_t part) { RefinePart(*work, part, &sums_by_part_[static_cast<size_t>(part) * length]); });
  std::vector<double>& merged = sums_;
  const auto merge = [&](const std::vector<double>& pieces) {
    merged.assign(length, 0.0);
    for (size_t i = 0; i < rows; ++i) merged[kExchanged * i + 2] = -kInfinity;
    for (size_t piece = 0; piece < pieces.size() / length; ++piece) {
      const double* next = &pieces[piece * length];
      for (size_t i = 0; i < rows; ++i) {
        double* to = &merged[kExchanged * i];
        to[0] += next[kExchanged * i];
        to[1] += next[kExchanged * i + 1];
        if (next[kExchanged * i + 2] > to[2]) std::copy_n(next + kExchanged * i + 2, 2, to + 2);
      }
      merged.back() += next[length - 1];
    }
  };
  merge(sums_by_part_);
  const int32_t world_size = context_.communicator.world_size();
  if (world_size > 1) {
    sums_by_shard_.resize(length * static_cast<size_t>(world_size));
    absl::Status status = context_.communicator.AllGather(merged.data(), static_cast<int64_t>(length), sums_by_shard_.data());
    if (!status.ok()) return status;
    merge(sums_by_shard_);
  }
  *overflow = merged.back() > 0;
  if (*overflow) return absl::OkStatus();
  for (size_t i = 0; i < rows; ++i) {
    RowStats& stats = merged_stats_[i];
    stats.others.sum += merged[kExchanged * i];
    stats.others.weighted += merged[kExchanged * i + 1];
    if (!work->term.wants_argmax || merged[kExchanged * i + 2] == -kInfinity) continue;
    const double target = static_cast<double>(work->rows[i].target);
    const double best = merged[kExchanged * i + 2];
    const double column = merged[kExchanged * i + 3];
    const bool target_wins = stats.target_logit > best || (stats.target_logit == best && target < column);
    stats.best = target_wins ? stats.target_logit : best;
    stats.best_column = target_wins ? target : column;
  }
  return absl::OkStatus();
}

void ShardRun::RefinePart(const Work& work, int32_t part, double* partial) {
  const HeadShard& shard = work.shard;
  const LogitTransform& transform = work.term.head->spec().transform;
  const double cap = transform.softcap.value_or(0);
  const size_t rows = static_cast<size_t>(work.row_count);
  const size_t capacity = RefinedCapacity(rows, shard.rows.size());
  for (size_t i = 0; i < rows; ++i) partial[kExchanged * i + 2] = -kInfinity;
  RefinedPart& refined = refined_[static_cast<size_t>(part)];
  std::vector<int32_t>& found = refined.found;
  found.resize(static_cast<size_t>(work.head_plan.panel_rows));
  float* converted = shard.Workspace<float>(shard.layout.panels + part * work.head_plan.panel_bytes);
  const float* panel_max = panel_max_.data() + static_cast<size_t>(part * panels_per_part_) * rows;
  work.parts.ForEachPanel(part, work.head_plan.panel_rows, [&](int64_t start, int64_t count) {
    for (size_t i = 0; i < rows; ++i) {
      if (!(panel_max[i] >= cutoffs_[i])) continue;
      const float* a = work.gradient + static_cast<int64_t>(i) * work.stride + start;
      // The softcap is monotonic: compare its arguments.
      double argument_cutoff = static_cast<double>(cutoffs_[i]);
      if (cap > 0)
        argument_cutoff = argument_cutoff <= -cap ? -kInfinity : cap * std::atanh(std::min(argument_cutoff / cap, 1 - 1e-7));
      const int64_t hits = GetRowKernels().collect_at_least(a, count, static_cast<float>(argument_cutoff), count, found.data());
      if (refined.logits.size() + static_cast<size_t>(hits) > capacity) {
        partial[kExchanged * rows] = 1;
        return;
      }
      const double max = merged_stats_[i].others.max;
      for (int64_t hit = 0; hit < hits; ++hit) {
        const int32_t local = found[static_cast<size_t>(hit)];
        const int64_t column = start + local;
        if (shard.rows.start + column == work.rows[i].target) continue;
        const double argument = LogitArgument(work, static_cast<int64_t>(i), column, converted);
        refined.logits.push_back({static_cast<int32_t>(i), static_cast<int32_t>(column), argument});
        const double before = Logit(static_cast<double>(a[local]), cap) - max;
        const double after = Logit(argument, cap) - max;
        double* sums = &partial[kExchanged * i];
        sums[0] += std::exp(after) - std::exp(before);
        sums[1] += std::exp(after) * after - std::exp(before) * before;
        if (after + max > sums[2]) {
          sums[2] = after + max;
          sums[3] = static_cast<double>(shard.rows.start + column);
        }
      }
    }
    panel_max += rows;
    refined.panel_ends.push_back(refined.logits.size());
  });
}

void ShardRun::ApplyRefinedGradient(const Work& work, int32_t part, int64_t panel_index) {
  const RefinedPart& refined = refined_[static_cast<size_t>(part)];
  if (refined.logits.empty()) return;
  const double cap = work.term.head->spec().transform.softcap.value_or(0);
  const double smooth_mass = work.term.cross_entropy.SmoothMass();
  const size_t panel = static_cast<size_t>(panel_index);
  for (size_t entry = panel == 0 ? 0 : refined.panel_ends[panel - 1]; entry < refined.panel_ends[panel]; ++entry) {
    const RefinedLogit& logit = refined.logits[entry];
    const RowState& state = states_[static_cast<size_t>(logit.row)];
    const double class_weight = work.term.cross_entropy.ClassWeight(work.shard.rows.start + logit.column);
    const double g =
        state.loss.probability_factor * std::exp(Logit(logit.argument, cap) - state.loss.max) - smooth_mass * class_weight;
    work.gradient[logit.row * work.stride + logit.column] =
        static_cast<float>(state.scale * g * SoftcapDerivative(logit.argument, cap));
  }
}

// The argument of the softcap of one logit, in fp64. `converted` has room for a weight row.
double ShardRun::LogitArgument(const Work& work, int64_t row, int64_t column, float* converted) const {
  const HeadShard& shard = work.shard;
  const float* weight = shard.weight.As<float>() + column * shard.hidden_size;
  if (shard.data_type != DataType::kFloat32) {
    ToFloat(shard.weight.As<uint16_t>() + column * shard.hidden_size, shard.data_type, shard.hidden_size, converted);
    weight = converted;
  }
  float bias = 0;
  if (shard.has_bias) ToFloat(ElementAt(shard.bias.As<char>(), shard.data_type, column), shard.data_type, 1, &bias);
  const double dot = GetRowKernels().dot(work.hidden + row * shard.hidden_size, weight, shard.hidden_size);
  return work.term.head->spec().transform.logit_scale * (dot + static_cast<double>(bias));
}

}  // namespace headwater::cpu
