// One row against a top-k teacher, in fp64: its loss and its gradient's factors.
//
// The columns that the teacher names stay out of the sum of exponentials, as a cross entropy's target does. With m and S the
// maximum and the sum over the others, M = sum_k p_k + r, and q_rest = S e^{m - lse}:
//
//     loss = sum_k p_k (log p_k - log q_k) + r (log r - log q_rest)
//     d(loss)/du_k = M q_k - p_k for a named column; e^{u_v - m} (M q_rest - r) / S for another one
//
// M is 1 unless the teacher's probabilities add up to a little more or less: their rounding, or kLeastRestMass.
#ifndef HEADWATER_KERNELS_CORE_LOSS_TOP_K_H_
#define HEADWATER_KERNELS_CORE_LOSS_TOP_K_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "headwater/kernels/types.h"
#include "kernels/core/loss/piece_stats.h"

namespace headwater {

struct TopKEntry {
  int64_t column = 0;
  double log_probability = 0;
  double probability = 0;
};

// A teacher's row.
struct TopKRow {
  std::vector<TopKEntry> entries;  // by column
  double rest = 0;                 // r
  double mass = 1;                 // M
};

// Row `row` of a spec that CheckTopKRows() passed.
TopKRow TopKRowOf(const TopKSpec& spec, int64_t row);

struct TopKLoss {
  double loss = 0;
  double lse = 0;          // of u
  double max = 0;          // m; 0 without other columns
  double rest_factor = 0;  // (M q_rest - r) / S
};

// `others`: max and sum over the columns that `row` does not name. `logits`: u of the entries.
TopKLoss FinishTopK(const TopKRow& row, const PieceStats& others, absl::Span<const double> logits);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_LOSS_TOP_K_H_
