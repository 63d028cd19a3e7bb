// Row work on logits that lie in memory: the R form (fp32 logits of 16-bit operands) and the wide form (fp64 logits). Any GPU from
// sm_80 on, any number of shards.
//
// A chunk goes through products, statistics (one per shard), and FinishRows, which merges the shards, one thread a row, in fp64, by
// kernels/core/loss/row_loss.h. A divergence then has its sums, one per shard, and FinishDivergence. The gradient comes last, in
// place or apart.
//
// The gradient's matrix M and the two factors that stand beside it, for every form (the E form's too):
//   grad_hidden_i  = row_factor_i * (M W)_i + target_factor_i * w_{y_i}
//   grad_weight   += M^T (row_factor . x) + sum_i target_factor_i * e_{y_i} x_i^T        (grad_bias likewise, x = 1)
// M_{i, y_i} = 0 wherever the row has a target and its loss a cross entropy: the target's share never enters a 16-bit matrix.
// d(loss)/d(logit argument) of row i is row_factor_i * M_i, with everything in it: loss_scale, token weight, logit_scale. In the
// forms of this file row_factor_i is a power of two and M_i has the product's rest, or M_i's largest entry is one. A row's share of
// grad_weight is then rounded to 16 bits once, as M or as row_factor . x. Where M is fp16 the power of two also keeps it well
// inside fp16's range.
#ifndef HEADWATER_KERNELS_CUDA_ROWS_ROW_PASSES_H_
#define HEADWATER_KERNELS_CUDA_ROWS_ROW_PASSES_H_

#include <cmath>

#include "kernels/core/loss/row_loss.h"
#include "kernels/core/loss/row_report.h"
#include "kernels/cuda/launch_types.h"
#include "kernels/cuda/rows/dither.h"

namespace headwater::cuda {

// Products x . w of a chunk with one shard, without bias, scale and softcap.
struct LogitsView {
  const void* products = nullptr;  // [row_count, stride] fp32 or fp64
  Element element = Element::kFloat32;
  int64_t stride = 0;   // elements; row starts are multiples of 16 bytes
  int64_t columns = 0;  // of this shard
  int64_t vocab_start = 0;
  const void* bias = nullptr;  // [columns], or null
  Element bias_element = Element::kFloat32;
  Transform transform;
};

// M over the products: half of the bytes of each row of them.
inline MutableMatrix InPlaceMatrix(const LogitsView& logits, int64_t rows, Element element) {
  const int64_t stride = logits.stride * BytesOf(logits.element) / BytesOf(element);
  return {const_cast<void*>(logits.products), rows, logits.columns, stride, element};
}

// Options that do not depend on the row.
struct CrossEntropyOptions {
  CrossEntropyTerm term;      // class_weights: device memory [valid_vocab_size], or null
  bool want_rest = false;     // entropy and its kin: `rest` and the fields beside it in PieceStats
  bool want_squares = false;  // log_sum_sq_probs; want_rest then
  bool want_argmax = false;
  bool want_distance = false;  // the entropy has a share of the gradient; want_rest then
};

// The rows of a chunk that one term has.
struct ChunkRows {
  int64_t row_count = 0;
  const int32_t* targets = nullptr;      // [row_count] column of the vocabulary, or -1
  const float* token_weights = nullptr;  // [row_count], or null: all 1
  // Factors of the row's entropy and log-sum-exp in the objective: [row_count], or null: all 0.
  const float* entropy_factors = nullptr;
  const float* lse_factors = nullptr;
};

// One row's results; copied to the host, which adds them up in row order.
using headwater::RowReport;

// A row's values for the gradient pass.
struct RowCoefficients {
  double max = 0;  // of the other columns: the offset of the exponentials
  // The hard loss's gradient, with hard_weight, and the token weight in rows with factors of entropy or log-sum-exp:
  //     d/dz_v = e^{z_v - max} (probability_factor + distance_factor * (max - z_v)) - class_factor * class_weight_v
  double probability_factor = 0;
  double distance_factor = 0;
  double class_factor = 0;
  double student_lse = 0;  // tempered, over the common columns
  double teacher_lse = 0;
  // The student's most probable common column b, whose divergence gradient is the remainder of the others': log q_b, and d_b = log
  // p_b - log q_b. Everything that is averaged over q is taken relative to its value there.
  double top_log_q = 0;
  double top_difference = 0;
  double divergence_mean = 0;  // DivergenceSums::mean of all shards
  double soft_factor = 0;      // soft_weight * (1 - beta) / student_temperature (beta as the formulas have it)
  // M_i = scale * d(loss)/dz * dz/da, and row_factor_i = loss_scale * token weight * logit_scale / scale, without the token weight
  // in rows with factors. 0: a row whose gradient is 0, because that product is; its M is 0 even if its logits are not finite.
  double scale = 1;
  int32_t top_column = -1;  // b, a column of the vocabulary; -1 where nothing is comparable (NaN)
  int32_t reserved = 0;
};

// out[i] = statistics of row i's columns in this shard, the target's left out as RowStats says; target_logit 0.
// `targets` may be null: no row has one. Reads every logit once.
cudaError_t LaunchRowStats(const LogitsView& logits, const ChunkRows& rows, const CrossEntropyOptions& options, RowStats* out,
                           cudaStream_t stream);

// Row statistics with CrossEntropyOptions::want_rest, of fp32 products. `class_weights` of this shard's columns, for `linear`;
// `squares` is 0 without `want_squares`.
cudaError_t LaunchRowDistribution(const LogitsView& logits, const ChunkRows& rows, const float* class_weights, bool want_squares,
                                  RowStats* out, cudaStream_t stream);

// The arguments of FinishRows besides the statistics.
struct FinishOptions {
  CrossEntropyOptions cross_entropy;
  double hard_weight = 1;  // 0: only outputs (lse, entropy, argmax, target_log_probability) come from the cross entropy
  double loss_scale = 1;
  Transform transform;
  Element matrix_element = Element::kBFloat16;  // of M: fp16 gets a power-of-two scale
  // True where a divergence follows: `row_factor` and the scale are then left to FinishDivergence().
  bool divergence_follows = false;
  double gradient_resolution = 0;  // 0: exact
};

// Merges `shard_count` statistics [shard_count, row_count] in order. It takes the target's logit from target_arguments [row_count]
// (the softcap's argument in fp64; see finish.h). It writes reports, coefficients, row_factor and target_factor [row_count], and
// with a resolution `dither` [row_count], for which M gets a scale of its own.
cudaError_t LaunchFinishRows(const RowStats* stats, int32_t shard_count, const double* target_arguments, const ChunkRows& rows,
                             const FinishOptions& options, RowReport* reports, RowCoefficients* coefficients, float* row_factor,
                             float* target_factor, DitherRow* dither, cudaStream_t stream);

// Row i of M begins at matrix.data + i * matrix.stride elements, at a multiple of 16 bytes. It lies where the row's products begin
// (InPlaceMatrix()), or in memory that holds no products of this launch. matrix.element is half of the products' size; matrix.rows
// and matrix.columns are not looked at. Columns from `columns` to RoundUp(columns, 8) become 0.
cudaError_t LaunchCrossEntropyGradient(const LogitsView& logits, const ChunkRows& rows, const CrossEntropyOptions& options,
                                       const RowCoefficients* coefficients, const MutableMatrix& matrix, cudaStream_t stream);

// --- Divergence ------------------------------------------------------------------------------------------------------------------

struct DivergenceTerm {
  double beta = 0.5;
  double student_temperature = 1;
  double teacher_temperature = 1;
  double soft_weight = 1;      // 1 - hard_loss_weight
  int64_t common_columns = 0;  // of the whole vocabulary that both have
};

// Whether the row passes of sm_90a can compute a side with its `logit_scale` over its temperature. They mark absent columns by
// finite logits (kNoColumn), which must neither come near real ones nor become infinite when they are multiplied by that ratio.
inline bool IsOrdinaryScale(double logit_scale, double temperature) {
  const double scale = std::abs(logit_scale) / temperature;
  return scale >= 1e-6 && scale <= 1e6;
}

// Whether the row passes of sm_90a have the loss's digits. Towards the reverse divergence they subtract more and more of their
// sums: at 0.9 the loss is right to 1e-6, at 0.999 to 1e-4.
inline bool HasDigitsInOnePass(double beta) { return beta <= 0.9 || beta >= 1; }

// Tempered statistics of one row and side: max of z / T, sum of e^{z / T - max} over the shard's common columns.
struct SoftStats {
  double max = 0;  // -inf for no columns
  double sum = 0;
  // The student's only: its first column that has the maximum, and the teacher's z / T there.
  double other_at_top = 0;
  int32_t top_column = -1;  // of the vocabulary; -1 if max is -inf
  int32_t reserved = 0;
};

// Sums of one row over a shard's common columns. The student's most probable column is in `loss` only.
struct DivergenceSums {
  double loss = 0;   // of the divergence, from non-negative terms
  double mean = 0;   // sum q (r - r_b) with r = log(q/m); beta 1: r = log q - log p; beta 0: sum q - p
  double bound = 0;  // largest |summand of mean|
  double q_max = 0;
  double bound_q = 0;  // q of the column that has `bound`; negative where the summand is
};

// Both sides' statistics in one pass over both logits. `student` and `teacher` describe the same shard's columns (the teacher's
// logits are re-cut to the student's shards before), products of one element. out_* [row_count].
cudaError_t LaunchSoftStats(const LogitsView& student, const LogitsView& teacher, int64_t row_count, const DivergenceTerm& term,
                            SoftStats* out_student, SoftStats* out_teacher, cudaStream_t stream);
// Merges [shard_count, row_count] of each into coefficients[i].student_lse and teacher_lse; sets the fields that LaunchFinishRows
// did not.
cudaError_t LaunchFinishSoftStats(const SoftStats* student, const SoftStats* teacher, int32_t shard_count, int64_t row_count,
                                  RowCoefficients* coefficients, cudaStream_t stream);
cudaError_t LaunchDivergenceSums(const LogitsView& student, const LogitsView& teacher, int64_t row_count,
                                 const DivergenceTerm& term, const RowCoefficients* coefficients, DivergenceSums* out,
                                 cudaStream_t stream);
// Merges [shard_count, row_count] sums; completes reports, coefficients, row_factor and, for the power-of-two scale,
// target_factor. `has_cross_entropy`: LaunchFinishRows ran before; else this writes every field.
cudaError_t LaunchFinishDivergence(const DivergenceSums* sums, int32_t shard_count, const ChunkRows& rows,
                                   const DivergenceTerm& term, const FinishOptions& options, bool has_cross_entropy,
                                   RowReport* reports, RowCoefficients* coefficients, float* row_factor, float* target_factor,
                                   cudaStream_t stream);
// M as LaunchCrossEntropyGradient writes it, in place of the student's products or apart; the hard loss's share is added if
// coefficients have one.
cudaError_t LaunchDivergenceGradient(const LogitsView& student, const LogitsView& teacher, const ChunkRows& rows,
                                     const DivergenceTerm& term, const CrossEntropyOptions& options,
                                     const RowCoefficients* coefficients, const MutableMatrix& matrix, cudaStream_t stream);

// --- Divergence on Hopper, one shard, one read -----------------------------------------------------------------------------------

// True if LaunchDivergenceRows() takes this case: sm_90, fp32 products of one shard, no hard loss, strides multiples of 4 elements.
// A row of both sides must fit a cluster's shared memory.
bool DivergenceRowsFit(const LogitsView& student, const LogitsView& teacher, const DivergenceTerm& term, Element matrix_element);
// Everything from LaunchSoftStats to LaunchDivergenceGradient in one pass that reads each product once. M is written in place of
// the student's products or apart. `want_gradient` false: reports only.
cudaError_t LaunchDivergenceRows(const LogitsView& student, const LogitsView& teacher, const ChunkRows& rows,
                                 const DivergenceTerm& term, double loss_scale, const MutableMatrix& matrix, bool want_gradient,
                                 RowReport* reports, float* row_factor, float* target_factor, cudaStream_t stream);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_ROWS_ROW_PASSES_H_
