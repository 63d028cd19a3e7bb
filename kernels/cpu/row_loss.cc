#include "kernels/cpu/row_loss.h"

#include <algorithm>
#include <cmath>

namespace headwater::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// factor * value, where a factor of 0 wins over infinities but not over NaN.
double Weighted(double factor, double value) { return factor == 0 && !std::isnan(value) ? 0.0 : factor * value; }

}  // namespace

void MergeStats(const PieceStats& next, PieceStats* stats) {
  const double max = std::max(stats->max, next.max);
  const auto rescale = [max](const PieceStats& piece, double* sum, double* weighted) {
    const double shift = piece.max - max;
    const double factor = piece.max == -kInfinity ? 0.0 : std::exp(shift);
    *sum = Weighted(factor, piece.sum);
    *weighted = factor == 0 ? 0.0 : factor * (piece.weighted + shift * piece.sum);
  };
  double sum = 0, weighted = 0, next_sum = 0, next_weighted = 0;
  rescale(*stats, &sum, &weighted);
  rescale(next, &next_sum, &next_weighted);
  *stats = {max, sum + next_sum, weighted + next_weighted, stats->linear + next.linear};
}

void MergeStats(const RowStats& next, RowStats* stats) {
  MergeStats(next.others, &stats->others);
  if (next.best > stats->best) {
    stats->best = next.best;
    stats->best_column = next.best_column;
  }
  stats->target_logit += next.target_logit;
}

double LogSumExp(const PieceStats& stats) {
  return stats.max == -kInfinity ? -kInfinity + stats.sum : stats.max + std::log(stats.sum);
}

CrossEntropyTerm MakeCrossEntropyTerm(const CrossEntropySpec& spec, int64_t valid_vocab_size) {
  CrossEntropyTerm term;
  term.label_smoothing = spec.label_smoothing;
  term.z_loss = spec.z_loss;
  term.valid_vocab_size = valid_vocab_size;
  term.class_weight_sum = static_cast<double>(valid_vocab_size);
  if (!spec.class_weights.empty()) {
    term.class_weights = spec.class_weights.data();
    term.class_weight_sum = 0;
    for (int64_t v = 0; v < valid_vocab_size; ++v) term.class_weight_sum += term.ClassWeight(v);
  }
  return term;
}

RowLoss FinishRow(const RowStats& stats, int64_t target, const CrossEntropyTerm& term) {
  const PieceStats& others = stats.others;
  RowLoss row;
  row.max = others.max == -kInfinity ? 0 : others.max;
  if (target < 0) {
    row.lse = LogSumExp(others);
    // sum p (lse - z) with p = e^{z - m} / S.
    row.entropy = (row.lse - row.max) - others.weighted / others.sum;
    return row;
  }

  const double z_y = stats.target_logit;
  const double d = others.max - z_y;
  double loss = 0;           // -ln p_y
  double rest = 0;           // 1 - p_y
  double others_factor = 0;  // e^{max - lse}
  if (z_y == kInfinity) {
    loss = rest = others_factor = std::numeric_limits<double>::quiet_NaN();
  } else if (d <= 0) {
    const double e = std::exp(d);
    const double ratio = others.sum * e;
    loss = std::log1p(ratio);
    rest = ratio / (1 + ratio);
    others_factor = e / (1 + ratio);
    row.lse = z_y + loss;
  } else {
    const double e = std::exp(-d);
    loss = d + std::log(others.sum + e);
    rest = others.sum / (others.sum + e);
    others_factor = 1 / (others.sum + e);
    row.lse = others.max + std::log(others.sum + e);
  }
  // A NaN in the sum must not be lost where e^d is 0.
  if (std::isnan(others.sum)) loss = rest = others_factor = others.sum;
  if (std::isnan(loss)) row.lse = loss;
  const double target_probability = std::exp(-loss);
  row.target_log_probability = -loss;
  row.entropy = Weighted(others_factor, (row.lse - row.max) * others.sum - others.weighted) +
                (target_probability == 0 ? 0.0 : target_probability * loss);

  const double target_weight = term.ClassWeight(target);
  const double hard_mass = (1 - term.label_smoothing) * target_weight;
  const double smooth_mass = term.SmoothMass();
  row.hard = hard_mass == 0 && !std::isnan(loss) ? 0.0 : hard_mass * loss;
  if (smooth_mass > 0) {
    const double linear = others.linear + (target_weight == 0 ? 0.0 : target_weight * z_y);
    row.hard += smooth_mass * (term.class_weight_sum * row.lse - linear);
  }
  if (term.z_loss > 0) row.z_loss = term.z_loss * row.lse * row.lse;
  const double z_slope = term.z_loss > 0 ? 2 * term.z_loss * row.lse : 0.0;
  row.probability_factor = (hard_mass + smooth_mass * term.class_weight_sum + z_slope) * others_factor;
  row.target_gradient =
      -hard_mass * rest + smooth_mass * (term.class_weight_sum * target_probability - target_weight) + z_slope * target_probability;
  return row;
}

double SoftcapDerivative(double a, double cap) {
  if (cap == 0) return 1;
  const double e = std::exp(-2 * std::abs(a / cap));
  return 4 * e / ((1 + e) * (1 + e));
}

}  // namespace headwater::cpu
