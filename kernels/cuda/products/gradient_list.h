// A dithered gradient matrix as the list of its non-zero entries, and both gradients from that list.
//
// The pass that dithers M appends entries to a pool (LaunchListDithered(), dither.h) and leaves M alone. An entry is a key, column
// << row_bits | row, and a value in M's units. Two sorts put the pool's entries in the order of columns and of rows. The order of
// the appends differs between runs, but is gone then, and every sum below has one writer and one order.
//   M W                     a block a row and 256 of the width: a gather of W's rows
//   grad_weight += M^T x    a warp a chunk of a column's entries and 256 of the width: a gather of x's rows. A column of more than
//                           one chunk has their sums in scratch memory, and then the sum of these
// All work on 256 columns of the width precedes that on the next ones. The gathered part of W or x thus stays in the L2 cache.
//
// More entries than the pool has room for are counted and not stored. The caller reads the count, and dithers M in place instead.
// The entries are the same, but sums are those of a product then.
//
// The rows may come in slices. Each has its part of the pool and its own order of rows. The order of columns is that of all.
//
// Columns of many entries may stay dense (dense_columns.h). When all slices are listed M is not read any more. Its memory then has
// the sums of chunks. If the list is kept for later, it has the entries and the dense columns, too.
#ifndef HEADWATER_KERNELS_CUDA_PRODUCTS_GRADIENT_LIST_H_
#define HEADWATER_KERNELS_CUDA_PRODUCTS_GRADIENT_LIST_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/computation/workspace.h"
#include "kernels/cuda/launch_types.h"
#include "kernels/cuda/products/dense_columns.h"

namespace headwater::cuda {

// Where entries are appended.
struct EntryPool {
  uint32_t* keys = nullptr;   // [capacity]; all ones where there is no entry
  float* values = nullptr;    // [capacity]
  uint32_t* count = nullptr;  // one; may exceed the capacity
  uint32_t capacity = 0;
  int32_t row_bits = 0;
  int32_t first_row = 0;  // the number in keys of the pool's first row
};

// Up to 256 entries of one column: those sorted by column, from `first` on. partial is the place of their sum, or -1.
struct EntryChunk {
  int32_t column;
  int32_t first;
  int32_t count;
  int32_t partial;
};
// A column of several chunks, whose sums are in the places [first, first + count).
struct SplitColumn {
  int32_t column;
  int32_t first;
  int32_t count;
  int32_t reserved;
};
struct EntryCounts {
  uint32_t heavy;  // chunks from the front of the array
  uint32_t light;  // chunks from its end, backwards
  uint32_t splits;
  uint32_t partials;
};

// Entries a row that there is room for on average.
inline constexpr int64_t kEntriesPerRow = 512;

// Device memory.
struct EntryList {
  int32_t rows = 0;
  int32_t columns = 0;
  DenseColumns dense;               // no entries of these
  EntryPool pool;                   // of rows * kEntriesPerRow
  uint32_t* column_keys = nullptr;  // [capacity], by column and row
  float* column_values = nullptr;
  uint32_t* row_keys = nullptr;  // [capacity], by row and column
  float* row_values = nullptr;
  int32_t* row_first = nullptr;  // [rows + 1], in the order of rows
  EntryCounts* counts = nullptr;
  EntryChunk* chunks = nullptr;  // [max_chunks]; null: the order of columns is not wanted
  float* partials = nullptr;     // [places of sums, W's stride]
  int32_t max_chunks = 0;
  SplitColumn* splits = nullptr;
  void* sort_space = nullptr;
  size_t sort_bytes = 0;
};

// Whether keys of so many rows and columns have 32 bits.
bool EntryKeysFit(int64_t rows, int64_t columns);
// Takes the memory for a list of rows in so many slices from `workspace`, which may be too small (Workspace::fits()).
EntryList LayOutEntryList(int64_t rows, int64_t columns, int64_t slices, Workspace* workspace);
// Takes the memory for `count` dense columns, whose rows of W are `stride` elements.
void LayOutDense(int64_t count, int64_t stride, Workspace* workspace, EntryList* list);
// The list with its sums of chunks, and what is kept of it, in `matrix`, M's memory.
EntryList LayOutKept(const EntryList& list, int64_t stride, Workspace* matrix);
// Bytes that LaunchPlanKept() takes.
int64_t PlanBytes(const EntryList& list, int64_t stride);
// The list of rows [first, first + count) of `all`, its slice `number`.
EntryList SliceOf(const EntryList& all, int64_t first, int64_t count, int64_t number);

// Empties the pool.
cudaError_t LaunchClearEntries(const EntryList& list, cudaStream_t stream);
// A slice's order of rows, and with its tables the order of columns if the slice is all rows.
cudaError_t LaunchSortEntries(const EntryList& slice, cudaStream_t stream);
// The order of columns of several slices together.
cudaError_t LaunchSortSlices(const EntryList& all, cudaStream_t stream);
// out [rows, shard.stride] = M W, fp32, or with `adds` += it; without the dense columns. The shard is bf16.
cudaError_t LaunchEntriesTimesWeight(const EntryList& list, const ShardWeights& shard, bool adds, float* out, cudaStream_t stream);
// Copies the list's data for grad_weight to LayOutKept()'s memory.
cudaError_t LaunchKeepEntries(const EntryList& list, const EntryList& kept, cudaStream_t stream);
// The tables of a kept list, and the rows of its dense columns, in memory from `workspace`.
cudaError_t LaunchPlanKept(int64_t stride, Workspace* workspace, EntryList* kept, cudaStream_t stream);
// grad_weight [columns, scaled.stride] += factor * M^T scaled, without the dense columns. scaled: [rows, stride] bf16.
cudaError_t LaunchAddEntriesTimesRows(const EntryList& list, const ConstMatrix& scaled, float factor, float* grad_weight,
                                      cudaStream_t stream);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_PRODUCTS_GRADIENT_LIST_H_
