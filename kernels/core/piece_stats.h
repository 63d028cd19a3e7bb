// Statistics of a piece of a row's logits. Alone in this header, without any function: files that are compiled for a particular
// instruction set include it.
#ifndef HEADWATER_KERNELS_CORE_PIECE_STATS_H_
#define HEADWATER_KERNELS_CORE_PIECE_STATS_H_

namespace headwater {

// Over a piece of a row: m = max z (NaN skipped, -inf if empty); sum = sum e^{z - m} (NaN if any z is);
// weighted = sum e^{z - m} (z - m); linear = sum class_weight z. The last two only if asked for, else 0.
struct PieceStats {
  double max;
  double sum;
  double weighted;
  double linear;
};

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_PIECE_STATS_H_
