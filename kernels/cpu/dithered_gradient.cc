// A gradient with a resolution (docs/math.md): the power of two that replaces a row's small entries, and the error of that.
//
// Cross entropy. In units of E_v = e^{z_v - z_target} the resolution is the largest power of two q <= tau sum_v E_v over the other
// columns. The gradient pass writes E_v / q, softcap's derivative included; dithering and the row's factors follow. The target's
// entry and the smoothing's share are exact.
// Divergence. With M = d(divergence)/d(logit's argument), of the tempered logit and without any factor, q is the largest power of
// two <= tau sum_v |M_v| / 2. The pass writes M first, for that sum.
// Products of bf16. The gradient is rounded to bf16 after dithering, and a row's surviving entries all in the same way. So q moves
// by at most 2^-9 of its value, before probabilities are taken from it, to where a surviving entry is a bf16 number.
#include <cmath>
#include <cstdlib>

#include "kernels/cpu/rows/convert.h"
#include "kernels/cpu/shard_run.h"

namespace headwater::cpu {
namespace {

constexpr double kLn2 = 0.693147180559945309417;
// Smaller resolutions are not applied: their reciprocals come near fp32's range.
constexpr double kSmallestUnit = 0x1p-100;

// Factor of a resolution that makes its surviving entries, `entry` before, bf16 numbers; 1 for entries out of bf16's range.
double ToBfloat16Number(double entry) {
  const float single = static_cast<float>(entry);
  uint16_t rounded = 0;
  FromFloat(&single, 1, DataType::kBFloat16, &rounded);
  double number = 0;
  ToDouble(&rounded, DataType::kBFloat16, 1, &number);
  const double factor = number / entry;
  return std::isfinite(factor) && factor > 0 ? factor : 1;
}

}  // namespace

void ShardRun::SetResolution(const Work& work, const ChunkRow& row, const RowStats& stats, RowState* state) {
  const TermPlan& term = work.term;
  const double distance = stats.others.max - stats.target_logit;
  const double exponent = std::floor(std::log2(term.term->gradient_resolution) + distance / kLn2 + std::log2(stats.others.sum));
  RowDither& dither = state->dither;
  dither.active = std::isfinite(exponent);
  if (!dither.active) return;
  double largest_ratio = std::exp(distance - exponent * kLn2);  // of a column at the maximum
  const double largest_entry = GradientScale(term) * state->gradient.probability_factor;
  if (work.is_bfloat16) largest_ratio /= ToBfloat16Number(largest_entry / largest_ratio);
  dither.ratio = RowGradient();
  dither.ratio.max = state->gradient.max;
  dither.ratio.probability_factor = largest_ratio;
  dither.options = {MakeDitherKey(term.term->dither_seed, row.batch_row), 1, largest_entry / largest_ratio,
                    GradientScale(term) * state->gradient.class_factor};
  dither.unit = state->loss.inverse_sum / largest_ratio;
  dither.target_entry = stats.others.sum * state->loss.inverse_sum;
}

absl::Status ShardRun::SetDivergenceResolutions(Work* work) {
  const TermPlan& term = work->term;
  const size_t rows = static_cast<size_t>(work->row_count);
  sums_.assign(rows, 0.0);
  for (size_t entry = 0; entry < sums_by_part_.size(); ++entry) sums_[entry % rows] += sums_by_part_[entry];
  absl::Status status = context_.communicator.AllReduceSum(sums_.data(), work->row_count);
  if (!status.ok()) return status;
  for (size_t i = 0; i < rows; ++i) {
    RowDither& dither = states_[i].dither;
    const ChunkRow& row = work->rows[i];
    const double bound = term.term->gradient_resolution * sums_[i] / 2;
    dither.active = bound > kSmallestUnit && std::isfinite(bound);
    dither.unit = dither.active ? std::exp2(std::floor(std::log2(bound))) : 1;
    const double factor = GradientScale(term) * row.token_weight * term.soft_weight / term.jsd->student_temperature;
    if (dither.active && work->is_bfloat16) dither.unit *= ToBfloat16Number(factor * dither.unit);
    dither.options = {MakeDitherKey(term.term->dither_seed, row.batch_row), 1 / dither.unit, factor * dither.unit, 0};
  }
  return absl::OkStatus();
}

void ShardRun::DitherColumns(const Work& work, int64_t row, int64_t start, int64_t count, DitherSums* sums) const {
  const TermPlan& term = work.term;
  if (!term.dithers) return;
  const RowState& state = states_[static_cast<size_t>(row)];
  const RowDither& dither = state.dither;
  float* gradient = work.gradient + row * work.stride + start;
  if (!dither.active) {
    if (term.jsd != nullptr) GetRowKernels().scale(gradient, count, static_cast<float>(dither.options.factor), gradient);
    return;
  }
  const int64_t global_start = work.shard.rows.start + start;
  const int64_t target = term.jsd == nullptr ? work.rows[row].target - global_start : -1;
  const bool inside = target >= 0 && target < count;
  const RowRange pieces[2] = {{0, inside ? target : count}, {inside ? target + 1 : count, count}};
  DitherSums own;
  for (const RowRange& piece : pieces) {
    const int64_t column = global_start + piece.start;
    const float* class_weights = term.cross_entropy.class_weights == nullptr ? nullptr : term.cross_entropy.class_weights + column;
    GetRowKernels().dither(gradient + piece.start, piece.size(), column, dither.options, class_weights, &own);
  }
  const double unit_squared = dither.unit * dither.unit;
  sums->entry_count += own.entry_count;
  sums->squared_error += unit_squared * own.squared_error;
  sums->squared_norm += unit_squared * own.squared_norm;
  if (!inside) return;
  const double cap = term.head->spec().transform.softcap.value_or(0);
  const double entry = dither.target_entry * SoftcapDerivative(state.target_argument, cap);
  sums->squared_norm += entry * entry;
}

absl::Status ShardRun::ReportDither(Work* work) {
  if (!work->term.dithers) return absl::OkStatus();
  double total[kDitherSumsDoubles] = {};
  for (const DitherSums& part : dither_sums_) {
    total[0] += part.entry_count;
    total[1] += part.squared_error;
    total[2] += part.squared_norm;
  }
  absl::Status status = context_.communicator.AllReduceSum(total, kDitherSumsDoubles);
  if (!status.ok() || rank() != 0) return status;
  GradientDither& dither = work->term.sums.dither;
  dither.entry_count += static_cast<int64_t>(total[0]);
  dither.squared_error += total[1];
  dither.squared_norm += total[2];
  return absl::OkStatus();
}

}  // namespace headwater::cpu
