// The divergence's row passes where a row's columns lie on several ranks, on Hopper. They take fp32 products of 16-bit operands, no
// bias, no softcap, no hard loss. Formulas and digits are those of the pass over a whole row (divergence_rows.cu).
//
//   on each rank, sides: both sides' exponentials are added up, and its most probable column of the student is found
//   the ranks' sides are collected, and finished alike on each, so that all know the log-sum-exps and the row's top column
//   on each rank, sums: what its columns add to the loss and to the mean
//   the ranks' sums are collected, and finished alike
//   on each rank, gradient: M of its columns
//
// Every pass reads both products once: 26 bytes a column in all. Keeping data for the next pass would write as many bytes as that
// pass reads again.
#ifndef HEADWATER_KERNELS_CUDA_ROWS_DIVERGENCE_SHARDS_H_
#define HEADWATER_KERNELS_CUDA_ROWS_DIVERGENCE_SHARDS_H_

#include "kernels/cuda/rows/row_passes.h"

namespace headwater::cuda {

// A rank's part of a row's two sides (0: student, 1: teacher). Sums of 2^x over its columns, x = log2(e) z / T, are sum 2^offset.
struct ShardSides {
  float offset[2];  // whole; lower than any other where there are no columns
  float sum[2];     // in [1, 2); 0 without columns, NaN if a product is not finite
  // The student's first most probable column here: both products there, and its place in the vocabulary; -1: there is none.
  float top_products[2];
  int32_t top_column;
  int32_t reserved;
};

// A rank's contribution to a row's sums, without the row's top column (ShardRow). In the units of divergence_terms.cuh.
struct ShardSums {
  float loss;     // in units of ln2
  float mean;     // of q L; beta 0: of q - p
  float q;        // of q; beta 0: 0
  float bound;    // in a row with a top column, the largest |q (L - top's L)|, of beta 0 |q - p|, in M's units; else 0
  float bound_q;  // that column's q in M's units, negative where the summand is
  float largest;  // fp16: the largest |q L| (|q - p|) and q in M's units; else 0
  float q_largest;
  float reserved;
};

// The values of a row that all ranks have.
struct ShardRow {
  // After the sides (RowOffsets).
  float student_offset, teacher_offset, difference, ratio;
  int32_t top_column;  // the column that has more than half of q, in the vocabulary; -1: none has
  float top_slope;     // its L; 0 without, and of beta 0
  double top_loss;     // its share of the loss, in nats
  // After the sums: an entry of M is q (mean_factor - factor L), of beta 0 factor (q - p).
  float factor;
  float mean_factor;
  float top_entry;       // of M
  int32_t has_gradient;  // 0: M is 0, whatever the row holds
};

// `student` and `teacher`: a rank's views of the same columns, strides multiples of 4 elements.

// out [row_count].
cudaError_t LaunchShardSides(const LogitsView& student, const LogitsView& teacher, int64_t row_count, const DivergenceTerm& term,
                             ShardSides* out, cudaStream_t stream);
// Merges sides [shard_count, row_count] in order into rows [row_count].
cudaError_t LaunchFinishShardSides(const ShardSides* sides, int32_t shard_count, const LogitsView& student,
                                   const LogitsView& teacher, int64_t row_count, const DivergenceTerm& term, ShardRow* rows,
                                   cudaStream_t stream);
// out [row_count].
cudaError_t LaunchShardSums(const LogitsView& student, const LogitsView& teacher, int64_t row_count, const DivergenceTerm& term,
                            Element matrix_element, const ShardRow* rows, ShardSums* out, cudaStream_t stream);
// Merges sums [shard_count, row_count] in order; completes shard_rows and writes all fields of reports, and with `want_gradient`
// row_factor and target_factor [row_count].
cudaError_t LaunchFinishShardSums(const ShardSums* sums, int32_t shard_count, const LogitsView& student, const LogitsView& teacher,
                                  const ChunkRows& rows, const DivergenceTerm& term, double loss_scale, Element matrix_element,
                                  bool want_gradient, ShardRow* shard_rows, RowReport* reports, float* row_factor,
                                  float* target_factor, cudaStream_t stream);
// M as LaunchDivergenceGradient() writes it, in place of the student's products or apart.
cudaError_t LaunchShardGradient(const LogitsView& student, const LogitsView& teacher, int64_t row_count, const DivergenceTerm& term,
                                const ShardRow* rows, const MutableMatrix& matrix, cudaStream_t stream);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_ROWS_DIVERGENCE_SHARDS_H_
