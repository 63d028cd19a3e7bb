// One row's loss out of its statistics, in fp64: cross entropy with all its options, and what the gradient needs. The same lines
// run in the CPU engine and in CUDA kernels (C++17; functions are __host__ __device__ under nvcc).
//
// The target's column is kept out of every sum. With m the maximum and S = sum_{v != y} e^{z_v - m} over the other columns and
// d = m - z_y, the loss of the target is log1p(S e^d), its missing probability S e^d / (1 + S e^d), for d > 0 in the mirrored form;
// neither ever subtracts nearly equal numbers, however confident the row is.
#ifndef HEADWATER_KERNELS_CORE_ROW_LOSS_H_
#define HEADWATER_KERNELS_CORE_ROW_LOSS_H_

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/core/piece_stats.h"

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
  PieceStats others = {-kRowInfinity, 0, 0, 0};  // all columns but the target's
  double best = -kRowInfinity;                   // largest logit, the target's included
  double best_column = -1;                       // its smallest column; a whole number
  double target_logit = 0;                       // 0 where the target is not in the piece
};
inline constexpr int64_t kRowStatsDoubles = sizeof(RowStats) / sizeof(double);
static_assert(kRowStatsDoubles == 7, "RowStats travels between shards as doubles");

// A term's cross entropy, with what does not depend on the row.
struct CrossEntropyTerm {
  double label_smoothing = 0;
  double z_loss = 0;
  const float* class_weights = nullptr;  // [valid_vocab_size] or null; device memory where a kernel reads it
  double class_weight_sum = 0;           // over the valid vocabulary
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
  double entropy = 0;
  // d(hard + z_loss)/dz_v = probability_factor * e^{z_v - max} - smooth mass * class_weight_v for v != target.
  double max = 0;
  double probability_factor = 0;
  double target_gradient = 0;  // d(hard + z_loss)/dz_target
};

// factor * value, where a factor of 0 wins over infinities but not over NaN.
HEADWATER_HOST_DEVICE inline double Weighted(double factor, double value) {
  return factor == 0 && !std::isnan(value) ? 0.0 : factor * value;
}

// `stats`, its exponentials taken relative to `max` instead of its own maximum, which is not larger.
HEADWATER_HOST_DEVICE inline PieceStats RelativeTo(double max, const PieceStats& stats) {
  const double shift = stats.max - max;
  const double factor = stats.max == -kRowInfinity ? 0.0 : std::exp(shift);
  return {max, Weighted(factor, stats.sum), factor == 0 ? 0.0 : factor * (stats.weighted + shift * stats.sum), stats.linear};
}

// Adds the statistics of the columns that follow. NaN in a sum stays.
HEADWATER_HOST_DEVICE inline void MergeStats(const PieceStats& next, PieceStats* stats) {
  const double max = stats->max < next.max ? next.max : stats->max;
  const PieceStats first = RelativeTo(max, *stats);
  const PieceStats second = RelativeTo(max, next);
  *stats = {max, first.sum + second.sum, first.weighted + second.weighted, first.linear + second.linear};
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

// `target` -1: no target; then only lse and entropy are meaningful.
HEADWATER_HOST_DEVICE inline RowLoss FinishRow(const RowStats& stats, int64_t target, const CrossEntropyTerm& term) {
  const PieceStats& others = stats.others;
  RowLoss row;
  row.max = others.max == -kRowInfinity ? 0 : others.max;
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

// d(logit)/d(argument) of the softcap at argument `a`; 1 without one (cap 0).
HEADWATER_HOST_DEVICE inline double SoftcapDerivative(double a, double cap) {
  if (cap == 0) return 1;
  const double e = std::exp(-2 * std::abs(a / cap));
  return 4 * e / ((1 + e) * (1 + e));
}

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_ROW_LOSS_H_
