// A row's gradient at a resolution, from the definitions (docs/math.md, "Gradient resolution"). Draws are those of core/dither.h.
#ifndef HEADWATER_KERNELS_REFERENCE_DITHERED_ROW_H_
#define HEADWATER_KERNELS_REFERENCE_DITHERED_ROW_H_

#include <cstdint>

#include "absl/types/span.h"
#include "headwater/kernels/engine.h"
#include "kernels/reference/row_losses.h"

namespace headwater::reference {

struct Resolution {
  double tau = 0;
  uint64_t seed = 0;
  int64_t row = 0;                           // in the micro-batch
  DataType entry_type = DataType::kFloat32;  // type of the rounding before, in units of the resolution; fp32: entries are not
                                             // rounded
  DataType unit_type = DataType::kFloat32;   // type to which the resolution times all factors is rounded; fp32: it is not
  double factor = 1;                         // of the row: token weight, loss scale and logit scale
};

// Changes `loss->gradient`, a cross entropy's of the logits u, and adds to *sums. `slopes`: derivatives of the softcap.
void DitherCrossEntropy(absl::Span<const Real> u, absl::Span<const Real> slopes, int64_t target, const Resolution& resolution,
                        RowLoss* loss, GradientDither* sums);

// Changes `loss->gradient`, a divergence's, and adds to *sums. `slopes`: derivatives of the student's softcap.
void DitherDivergence(absl::Span<const Real> slopes, const JsdOptions& options, const Resolution& resolution, RowLoss* loss,
                      GradientDither* sums);

}  // namespace headwater::reference

#endif  // HEADWATER_KERNELS_REFERENCE_DITHERED_ROW_H_
