// One row's loss out of its statistics, in fp64: cross entropy with all its options, the per-token outputs, and the gradient's
// coefficients. The same lines run in the CPU engine and in CUDA kernels (C++17; functions are __host__ __device__ under nvcc). All
// logits are divided by the temperature before they come here.
//
// The target's column is kept out of every sum. Let m be the maximum, S = sum_{v != y} e^{z_v - m} over the other columns, and d =
// m - z_y. The loss of the target is log1p(S e^d), its missing probability S e^d / (1 + S e^d), for d > 0 in the mirrored form.
// Neither subtracts nearly equal numbers, however confident the row is. Entropy and log_sum_sq_probs are about all columns, and
// leave the largest one's 1 out of their sums in the same way.
#ifndef HEADWATER_KERNELS_CORE_LOSS_ROW_LOSS_H_
#define HEADWATER_KERNELS_CORE_LOSS_ROW_LOSS_H_

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/core/loss/piece_stats.h"

#ifdef __CUDACC__
#define HEADWATER_HOST_DEVICE __host__ __device__
#else
#define HEADWATER_HOST_DEVICE
#endif

namespace headwater {

// Variables, because CUDA kernels may not call numeric_limits' functions.
inline constexpr double kRowInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kRowNan = std::numeric_limits<double>::quiet_NaN();

// Statistics of a row or of a piece of it.
struct RowStats {
  PieceStats others = {-kRowInfinity, 0, 0, 0, 0, 0, 0};  // all columns but the target's
  double best = -kRowInfinity;                            // largest logit, the target's included
  double best_column = -1;                                // its smallest column; a whole number
  double target_logit = 0;                                // 0 where the target is not in the piece
};
inline constexpr int64_t kRowStatsDoubles = sizeof(RowStats) / sizeof(double);
static_assert(kRowStatsDoubles == kPieceStatsDoubles + 3, "RowStats travels between shards as doubles");

// A term's cross entropy, with the constants that do not depend on the row.
struct CrossEntropyTerm {
  double label_smoothing = 0;
  double z_loss = 0;
  double inverse_temperature = 1;
  bool token_scaling = false;
  const float* class_weights = nullptr;  // [valid_vocab_size] or null; device memory where a kernel reads it
  double class_weight_sum = 0;           // over the valid vocabulary
  double class_weight_bound = 0;         // sum of their absolute values
  int64_t valid_vocab_size = 0;

  HEADWATER_HOST_DEVICE double ClassWeight(int64_t column) const {
    return class_weights == nullptr ? 1.0 : static_cast<double>(class_weights[column]);
  }
  // Mass that smoothing puts on each column.
  HEADWATER_HOST_DEVICE double SmoothMass() const { return label_smoothing / static_cast<double>(valid_vocab_size); }
};

struct RowLoss {
  double hard = 0;    // without z-loss
  double z_loss = 0;  // z_loss * lse^2
  double lse = 0;
  double target_log_probability = 0;  // 0 without a target
  double entropy = 0;                 // this and the next if asked for
  double log_sum_sq_probs = 0;
  double mean_logits = 0;  // if asked for
  // d(hard + z_loss)/dz_v = probability_factor * e^{z_v - max} - class_factor * class_weight_v for v != target.
  double max = 0;
  double probability_factor = 0;  // loss_mass * inverse_sum
  double class_factor = 0;
  double target_gradient = 0;  // d(hard + z_loss)/dz_target
  // p_v = inverse_sum * e^{z_v - max} for v != target. dH/dz_v = p_v (max - z_v - mean_distance), if the entropy is asked for.
  double loss_mass = 0;
  double inverse_sum = 0;
  double target_probability = 0;
  double mean_distance = 0;            // sum_v p_v (max - z_v), over all columns
  double target_entropy_gradient = 0;  // dH/dz_target
};

// Factors of a row's loss, entropy and lse in the objective, besides loss_scale.
struct RowFactors {
  double loss = 1;
  double entropy = 0;
  double lse = 0;
};

// d(objective)/dz_v = e^{z_v - max} (probability_factor + distance_factor (max - z_v)) - class_factor * class_weight_v for
// v != target.
struct RowGradient {
  double max = 0;
  double probability_factor = 0;
  double distance_factor = 0;  // 0 without a factor of the entropy
  double class_factor = 0;
  double target = 0;  // d(objective)/dz_target
};

// factor * value, where a factor of 0 wins over infinities but not over NaN.
HEADWATER_HOST_DEVICE inline double Weighted(double factor, double value) {
  return factor == 0 && !std::isnan(value) ? 0.0 : factor * value;
}

// Adds the statistics of other columns. The exponentials of the piece with the smaller maximum are rescaled to the larger maximum;
// its own maximum then counts among the rest. NaN in a sum stays.
HEADWATER_HOST_DEVICE inline void MergeStats(const PieceStats& next, PieceStats* stats) {
  const bool replaces = stats->max < next.max;
  const PieceStats& top = replaces ? next : *stats;
  const PieceStats& low = replaces ? *stats : next;
  const double shift = low.max - top.max;
  const double factor = low.max == -kRowInfinity ? 0.0 : std::exp(shift);
  const double low_sum = Weighted(factor, low.sum);
  *stats = {top.max,
            top.sum + low_sum,
            top.weighted + (factor == 0 ? 0.0 : factor * (low.weighted + shift * low.sum)),
            top.linear + low.linear,
            top.rest + low_sum,
            top.squares + Weighted(factor * factor, 1 + low.squares),
            top.total + low.total};
}

HEADWATER_HOST_DEVICE inline void MergeStats(const RowStats& next, RowStats* stats) {
  MergeStats(next.others, &stats->others);
  if (next.best > stats->best) {
    stats->best = next.best;
    stats->best_column = next.best_column;
  }
  stats->target_logit += next.target_logit;
}

// ln sum e^z over all columns of the piece, the target not taken apart.
HEADWATER_HOST_DEVICE inline double LogSumExp(const PieceStats& stats) {
  return stats.max == -kRowInfinity ? -kRowInfinity + stats.sum : stats.max + std::log(stats.sum);
}

// Entropy, log_sum_sq_probs and mean_logits: `all` has the statistics of all columns.
HEADWATER_HOST_DEVICE inline void FinishDistribution(const PieceStats& all, int64_t valid_vocab_size, RowLoss* row) {
  const double log_sum = std::log1p(all.rest);
  row->entropy = log_sum - all.weighted / (1 + all.rest);
  row->log_sum_sq_probs = std::log1p(all.squares) - 2 * log_sum;
  row->mean_logits = all.total / static_cast<double>(valid_vocab_size);
}

// `target` -1: no target; then only lse, entropy, log_sum_sq_probs and mean_logits are meaningful.
HEADWATER_HOST_DEVICE inline RowLoss FinishRow(const RowStats& stats, int64_t target, const CrossEntropyTerm& term) {
  const PieceStats& others = stats.others;
  RowLoss row;
  row.max = others.max == -kRowInfinity ? 0 : others.max;
  if (target < 0) {
    row.lse = LogSumExp(others);
    FinishDistribution(others, term.valid_vocab_size, &row);
    return row;
  }

  const double z_y = stats.target_logit;
  const double d = others.max - z_y;
  double loss = 0;           // -ln p_y
  double rest = 0;           // 1 - p_y
  double others_factor = 0;  // e^{max - lse}
  if (z_y == kRowInfinity) {
    loss = rest = others_factor = kRowNan;
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
  row.inverse_sum = others_factor;
  row.target_probability = target_probability;

  PieceStats all = others;
  MergeStats({z_y, 1, 0, 0, 0, 0, z_y}, &all);
  FinishDistribution(all, term.valid_vocab_size, &row);
  const double distance = -all.weighted / (1 + all.rest);  // sum_v p_v (largest logit - z_v)
  row.mean_distance = distance - (all.max - row.max);
  row.target_entropy_gradient = target_probability == 0 ? 0.0 : target_probability * (all.max - z_y - distance);
  if (std::isnan(loss)) row.entropy = row.log_sum_sq_probs = row.mean_logits = loss;

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
  row.loss_mass = hard_mass + smooth_mass * term.class_weight_sum + z_slope;
  row.class_factor = smooth_mass;
  row.target_gradient =
      -hard_mass * rest + smooth_mass * (term.class_weight_sum * target_probability - target_weight) + z_slope * target_probability;
  if (term.token_scaling) {
    row.hard = Weighted(target_probability, row.hard);
    row.z_loss = Weighted(target_probability, row.z_loss);
    row.loss_mass = Weighted(target_probability, row.loss_mass);
    row.class_factor *= target_probability;
    row.target_gradient = Weighted(target_probability, row.target_gradient);
  }
  row.probability_factor = row.loss_mass * others_factor;
  return row;
}

// The gradient of the row's share of the objective. The factors of p are added before anything is multiplied: they may cancel.
HEADWATER_HOST_DEVICE inline RowGradient GradientOf(const RowLoss& row, const RowFactors& factors) {
  double mass = Weighted(factors.loss, row.loss_mass) + factors.lse;
  RowGradient gradient;
  gradient.max = row.max;
  gradient.class_factor = factors.loss * row.class_factor;
  gradient.target = Weighted(factors.loss, row.target_gradient) + factors.lse * row.target_probability;
  if (factors.entropy != 0) {
    mass -= factors.entropy * row.mean_distance;
    gradient.distance_factor = factors.entropy * row.inverse_sum;
    gradient.target += factors.entropy * row.target_entropy_gradient;
  }
  gradient.probability_factor = mass * row.inverse_sum;
  return gradient;
}

// d(logit)/d(argument) of the softcap at argument `a`; 1 without one (cap 0).
HEADWATER_HOST_DEVICE inline double SoftcapDerivative(double a, double cap) {
  if (cap == 0) return 1;
  const double e = std::exp(-2 * std::abs(a / cap));
  return 4 * e / ((1 + e) * (1 + e));
}

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_LOSS_ROW_LOSS_H_
