// Top-k teachers on products that lie in memory, R and wide form. The mathematics: kernels/core/loss/top_k.h.
//
// The columns that a teacher names are taken out of the products, where they then have a logit of -inf. The statistics and the
// gradient pass of a row without target see the other columns alone. M's named columns are written last: M has all of the gradient,
// and target_factor is 0, as for a divergence. A softcap has no logit of -inf: such heads are refused.
#ifndef HEADWATER_KERNELS_CUDA_ROWS_TOP_K_ROWS_H_
#define HEADWATER_KERNELS_CUDA_ROWS_TOP_K_ROWS_H_

#include "kernels/cuda/launch_types.h"
#include "kernels/cuda/rows/row_passes.h"

namespace headwater::cuda {

// Entries [row_count, k] of rows of a chunk. Device memory.
struct TopKRows {
  int64_t row_count = 0;
  int64_t k = 0;
  double least_rest_mass = 0;        // kLeastRestMass
  const int32_t* columns = nullptr;  // of the whole vocabulary; -1: not used
  const float* log_probs = nullptr;
  double* logits = nullptr;   // the student's, tempered; of entries that are not used: anything
  float* gradient = nullptr;  // their entries of M
};

// Sets `logits` of the shard's entries, and their products aside.
cudaError_t LaunchTakeTopK(const LogitsView& logits, const TopKRows& rows, cudaStream_t stream);

// In the place of LaunchFinishRows(), behind LaunchRowStats() without targets: writes every field, and `gradient`.
cudaError_t LaunchFinishTopK(const RowStats* stats, int32_t shard_count, const TopKRows& top_k, const ChunkRows& rows,
                             const FinishOptions& options, RowReport* reports, RowCoefficients* coefficients, float* row_factor,
                             float* target_factor, cudaStream_t stream);

// Writes `gradient` into the shard's M, behind LaunchCrossEntropyGradient().
cudaError_t LaunchPutTopK(const TopKRows& rows, int64_t vocab_start, const MutableMatrix& matrix, cudaStream_t stream);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_ROWS_TOP_K_ROWS_H_
