// One row's loss out of its statistics, in fp64: cross entropy with all its options, and what the gradient needs.
//
// The target's column is kept out of every sum. With m the maximum and S = sum_{v != y} e^{z_v - m} over the other columns and
// d = m - z_y, the loss of the target is log1p(S e^d), its missing probability S e^d / (1 + S e^d), for d > 0 in the mirrored form;
// neither ever subtracts nearly equal numbers, however confident the row is.
#ifndef HEADWATER_KERNELS_CPU_ROW_LOSS_H_
#define HEADWATER_KERNELS_CPU_ROW_LOSS_H_

#include <cstdint>
#include <limits>

#include "headwater/kernels/types.h"
#include "kernels/cpu/row_kernels.h"

namespace headwater::cpu {

// Statistics of a row or of a piece of it.
struct RowStats {
  PieceStats others = {-std::numeric_limits<double>::infinity(), 0, 0, 0};  // all columns but the target's
  double best = -std::numeric_limits<double>::infinity();                   // largest logit, the target's included
  double best_column = -1;                                                  // its smallest column; a whole number
  double target_logit = 0;                                                  // 0 where the target is not in the piece
};
inline constexpr int64_t kRowStatsDoubles = sizeof(RowStats) / sizeof(double);
static_assert(kRowStatsDoubles == 7, "RowStats travels between shards as doubles");

// Adds the statistics of the columns that follow. NaN in a sum stays.
void MergeStats(const PieceStats& next, PieceStats* stats);
void MergeStats(const RowStats& next, RowStats* stats);

// ln sum e^z over all columns of the piece, the target not taken apart.
double LogSumExp(const PieceStats& stats);

// A term's cross entropy, with what does not depend on the row.
struct CrossEntropyTerm {
  double label_smoothing = 0;
  double z_loss = 0;
  const float* class_weights = nullptr;  // [valid_vocab_size] or null
  double class_weight_sum = 0;           // over the valid vocabulary
  int64_t valid_vocab_size = 0;

  double ClassWeight(int64_t column) const { return class_weights == nullptr ? 1.0 : static_cast<double>(class_weights[column]); }
  // Mass that smoothing puts on each column.
  double SmoothMass() const { return label_smoothing / static_cast<double>(valid_vocab_size); }
};

CrossEntropyTerm MakeCrossEntropyTerm(const CrossEntropySpec& spec, int64_t valid_vocab_size);

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

// `target` -1: no target; then only lse and entropy are meaningful.
RowLoss FinishRow(const RowStats& stats, int64_t target, const CrossEntropyTerm& term);

// d(logit)/d(argument) of the softcap at argument `a`; 1 without one (cap 0).
double SoftcapDerivative(double a, double cap);

}  // namespace headwater::cpu

#endif  // HEADWATER_KERNELS_CPU_ROW_LOSS_H_
