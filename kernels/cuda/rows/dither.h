// Dithering of M, the gradient matrix of rows (row_passes.h), in place, once M is written. Entries below their row's resolution
// become 0 or the resolution (kernels/core/loss/dither.h).
//
// M is rounded before, so that the expected value is the exact mode's matrix. A cross entropy's rows are finished
// (LaunchFinishERows(), LaunchFinishRows()) with a scale in which the resolution is a power of two. A divergence's M has factors of
// its own. There the resolution is rounded to M's type, and the probabilities are taken from that.
#ifndef HEADWATER_KERNELS_CUDA_ROWS_DITHER_H_
#define HEADWATER_KERNELS_CUDA_ROWS_DITHER_H_

#include "kernels/core/loss/dither.h"
#include "kernels/cuda/launch_types.h"
#include "kernels/cuda/products/gradient_list.h"

namespace headwater::cuda {

// A row's resolution.
struct DitherRow {
  double unit_in_g = 0;     // in units of G, the gradient of the logits without factors
  double target_entry = 0;  // a cross entropy's |G| at the target
  float unit = 0;           // in M's units and of M's type; 0: the row stays as it is
};

// Columns of M, [row_count, stride], hold the vocabulary from vocab_start on, best an even one; row i begins at a multiple of 16
// bytes. Columns from matrix.columns to the next multiple of 8 become 0. `targets`: columns of the vocabulary that are 0 in M and
// no entries of their rows, a cross entropy's; null: none. sums[i], in units of the row's resolution, is written, or with `add`
// added to: of several shards of a row; null: they are there.
cudaError_t LaunchDither(const MutableMatrix& matrix, int64_t vocab_start, const int32_t* targets, const DitherRow* rows,
                         const DitherKey* keys, bool add, DitherSums* sums, cudaStream_t stream);

// A divergence's resolution: the largest power of two <= resolution * sum |G| / 2, where G = M * row_factor / factor.
struct DivergenceResolution {
  double resolution = 0;
  double factor = 1;                     // of every row: loss_scale, logit_scale and 1 / temperature
  const float* token_weights = nullptr;  // [row_count]
  const float* row_factor = nullptr;     // [row_count]
};
// A shard's part of that: one call for each shard of a row, in order. The last one writes rows[i]; before, unit_in_g has the sum of
// |M| so far.
cudaError_t LaunchDivergenceResolutions(const ConstMatrix& shard, const DivergenceResolution& of, bool is_first, bool is_last,
                                        DitherRow* rows, cudaStream_t stream);

// Appends to the list's pool the entries that LaunchDither() would leave and that are not 0. The dense columns go to the list's
// matrix of them, which is cleared before. M is left alone. It is bf16, and of a whole vocabulary. Sums, of all
// columns, have the same bits.
cudaError_t LaunchListDithered(const ConstMatrix& matrix, const int32_t* targets, const DitherRow* rows, const DitherKey* keys,
                               const EntryList& list, DitherSums* sums, cudaStream_t stream);

// *total = the rows' sums in units of G, the targets' entries included, in a fixed order.
cudaError_t LaunchSumDither(const DitherSums* sums, const DitherRow* rows, int64_t row_count, DitherSums* total,
                            cudaStream_t stream);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_ROWS_DITHER_H_
