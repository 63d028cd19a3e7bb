// Statistics of a piece of a row's logits. Alone in this header, without any function: files that are compiled for a particular
// instruction set include it.
#ifndef HEADWATER_KERNELS_CORE_LOSS_PIECE_STATS_H_
#define HEADWATER_KERNELS_CORE_LOSS_PIECE_STATS_H_

namespace headwater {

// Statistics of a piece of a row. m = max z (NaN skipped, -inf if empty); `sum` = sum e^{z - m} (NaN if any z is NaN). `weighted` =
// sum e^{z - m} (z - m); `linear` = sum class_weight z; `total` = sum z. `rest` and `squares` leave out one column at the maximum,
// whose 1 would swallow the others: sum = 1 + rest, sum e^{2 (z - m)} = 1 + squares. Fields from `weighted` on have no meaning
// unless they are asked for. With a temperature, z is the logit divided by it.
struct PieceStats {
  double max;
  double sum;
  double weighted;
  double linear;
  double rest = 0;
  double squares = 0;
  double total = 0;
};
inline constexpr int kPieceStatsDoubles = 7;
static_assert(sizeof(PieceStats) == kPieceStatsDoubles * sizeof(double), "PieceStats travels between shards as doubles");

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_LOSS_PIECE_STATS_H_
