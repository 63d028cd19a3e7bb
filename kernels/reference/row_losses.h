// The losses of one row and their derivatives, from the definitions, in 80-bit arithmetic.
//
// Everything is a plain loop over the vocabulary. The range of long double (up to e^11356) makes the textbook formulas safe for
// logits up to +-5000 without any shift. Its 64-bit mantissa leaves more digits than fp64 has after every cancellation in these
// formulas.
#ifndef HEADWATER_KERNELS_REFERENCE_ROW_LOSSES_H_
#define HEADWATER_KERNELS_REFERENCE_ROW_LOSSES_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "headwater/kernels/types.h"

namespace headwater::reference {

using Real = long double;

// Logits of a row over the valid vocabulary, with the derivatives of the chain rule back to x . weight^T + bias.
struct RowLogits {
  std::vector<Real> z;           // [valid_vocab_size]
  std::vector<Real> derivative;  // [valid_vocab_size]: dz / d(x . weight^T + bias)
};

// Applies logit_scale and softcap to x . weight^T + bias.
RowLogits TransformLogits(absl::Span<const double> products, const LogitTransform& transform);

// ln sum_v exp(z_v).
Real LogSumExp(absl::Span<const Real> z);

// z / temperature.
std::vector<Real> Tempered(absl::Span<const Real> z, double temperature);

// -sum_v p_v ln p_v, in a form without differences: relatively exact however confident the row is.
Real Entropy(absl::Span<const Real> z);
// d(entropy)/dz and d(lse)/dz.
std::vector<Real> EntropyGradient(absl::Span<const Real> z);
std::vector<Real> LseGradient(absl::Span<const Real> z);

// ln sum_v p_v^2, relatively exact.
Real LogSumSqProbs(absl::Span<const Real> z);

// sum_v z_v / number of columns.
Real MeanLogit(absl::Span<const Real> z);

// ln p_target, exact even where p_target is 1 - 1e-18: the target is kept out of the sum.
Real TargetLogProbability(absl::Span<const Real> z, int64_t target);

// Options of the cross entropy; class_weights empty: all 1.
struct CrossEntropyOptions {
  double label_smoothing = 0;
  double z_loss = 0;
  std::vector<double> class_weights;  // [valid_vocab_size]
  double temperature = 1;
  bool token_scaling = false;  // loss and gradient times p_target, a constant
};

// Options of the Jensen-Shannon divergence. With hard_loss_weight > 0 the hard part is the cross entropy over the student's whole
// valid vocabulary. It ignores truncate_to_common, which restricts the divergence to the common columns.
struct JsdOptions {
  double beta = 0.5;
  double student_temperature = 1;
  double teacher_temperature = 1;
  double hard_loss_weight = 0;
  CrossEntropyOptions hard_loss;
  bool truncate_to_common = false;
};

// A teacher of k columns a row, and of a mass on all others together.
struct TopKOptions {
  int64_t k = 0;
  std::vector<int32_t> ids;      // [rows, k]; -1: not used
  std::vector<float> log_probs;  // [rows, k]
  double student_temperature = 1;
};

// A row's loss in nats and its derivative with respect to z.
struct RowLoss {
  Real soft = 0;               // (1 - a) * JSD, or the divergence from a top-k teacher
  Real hard = 0;               // cross entropy without z-loss, times a for JSD
  Real z_loss = 0;             // z-loss, times a for JSD
  std::vector<Real> gradient;  // [valid_vocab_size]: d(soft + hard + z_loss) / dz
  Real probability_mass = 0;   // cross entropy: factor of a column's probability in its `gradient`, the target's aside
};

// (1 - e) c_y (lse - u_y) + e / V sum_v c_v (lse - u_v) + z_loss lse^2 of u = z / temperature, as
// torch.nn.functional.cross_entropy(reduction="sum").
RowLoss CrossEntropyRow(absl::Span<const Real> z, int64_t target, const CrossEntropyOptions& options);

// (1 - a) JSD(teacher, student) + a CE. `target` is looked at only if a > 0. The divergence is over the first
// min(student_z.size(), teacher_z.size()) columns.
RowLoss JsdRow(absl::Span<const Real> student_z, absl::Span<const Real> teacher_z, int64_t target, const JsdOptions& options);

// The divergence of row `row` from a top-k teacher, as TopKSpec defines it.
RowLoss TopKRow(absl::Span<const Real> student_z, int64_t row, const TopKOptions& options);

}  // namespace headwater::reference

#endif  // HEADWATER_KERNELS_REFERENCE_ROW_LOSSES_H_
