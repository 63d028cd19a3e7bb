// The columns of a dithered matrix that have many entries. They stay a matrix, of these columns alone, and products take them. The
// list (gradient_list.h) has the entries of all others.
//
// Which columns they are follows from some rows of the micro-batch, and from how memory cuts it. It does not follow from other
// calls: a repeat chooses the same. Whether a vocabulary has its frequent ids in front does not matter.
//   M' = M's dense columns; it is written by the pass that dithers (dither.h)
//   M W           += M' W', W' = the dense rows of W, copied
//   grad_weight   += M'^T x, whose rows are added where they belong
#ifndef HEADWATER_KERNELS_CUDA_PRODUCTS_DENSE_COLUMNS_H_
#define HEADWATER_KERNELS_CUDA_PRODUCTS_DENSE_COLUMNS_H_

#include <cstdint>

#include "kernels/cuda/computation/workspace.h"
#include "kernels/cuda/launch_types.h"

namespace headwater::cuda {

struct DitherRow;

// The choice of a matrix's columns.
struct DenseChoice {
  uint64_t listed = 0;  // entries of the sample in all other columns, in units of 1 / kEntryUnits
  uint32_t dense = 0;   // columns; all of them: nothing else is written
};
inline constexpr double kEntryUnits = 65536;

// Device memory.
struct DenseColumns {
  int32_t count = 0;              // 0: none
  uint32_t* places = nullptr;     // by eight columns of M: the dense ones before them << 8 | a bit for each that is one
  int32_t* ids = nullptr;         // [count], rising; room for all columns
  uint32_t* entries = nullptr;    // [columns], of the sample, in units of 1 / kEntryUnits
  DenseChoice* choice = nullptr;  // one
  uint16_t* matrix = nullptr;     // M' [rows, count] bf16
  float* rows = nullptr;          // [count, W's stride]: W' as bf16, later M'^T x as fp32
};

// Numbers of dense columns are multiples of this: products of few shapes.
constexpr int64_t DenseGrain(int64_t columns) { return RoundUp(columns / 128 + 1, 256); }

// Memory for the choice.
DenseColumns LayOutDenseChoice(int64_t columns, Workspace* workspace);
// columns.entries = the entries that are expected of `samples` rows of the matrix, evenly spaced; at most 65535. `rows` has the
// resolutions of all its rows. The matrix is bf16.
cudaError_t LaunchCountEntries(const ConstMatrix& matrix, const DitherRow* rows, int32_t samples, const DenseColumns& columns,
                               cudaStream_t stream);
// Chooses the columns of at least `threshold` entries, and others that round their number up, best those of half as many. Writes
// choice, places and ids.
cudaError_t LaunchChooseDense(int64_t column_count, double threshold, const DenseColumns& columns, cudaStream_t stream);
// columns.rows = W'.
cudaError_t LaunchGatherDenseRows(const ShardWeights& shard, const DenseColumns& columns, cudaStream_t stream);
// grad_weight's dense rows = columns.rows, or with `adds` += them.
cudaError_t LaunchScatterDenseRows(const DenseColumns& columns, int64_t stride, bool adds, float* grad_weight, cudaStream_t stream);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_PRODUCTS_DENSE_COLUMNS_H_
