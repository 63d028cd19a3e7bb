// How many rows of a large part are computed at once while others come in and gradients leave (computation.h). Arithmetic only.
#ifndef HEADWATER_KERNELS_CUDA_COMPUTATION_ROW_SLICES_H_
#define HEADWATER_KERNELS_CUDA_COMPUTATION_ROW_SLICES_H_

#include <cstdint>
#include <vector>

namespace headwater::cuda {

// Rows [first, first + count).
struct RowSlice {
  int64_t first = 0;
  int64_t count = 0;
};

struct SliceNeeds {
  bool comes_in = false;     // the rows come from the host
  bool leaves = false;       // their gradient leaves for the host
  bool ends_by_way = false;  // it does, and no product follows that the device has to do meanwhile
};

// Slices of `rows` (>= 1) rows in order, without gaps; one if nothing is needed. All but the last have a multiple of
// kFirstSliceRows rows, so that cutting adds no tile to a product. If there are several slices, each has at least that many rows.
// The last one has less than twice that if the gradient's way ends it, and less than twice kSliceRows if rows come in and leave.
// The caller has its answer when the last gradient is there, though the device still works.
std::vector<RowSlice> SliceRows(int64_t rows, const SliceNeeds& needs);

// The part that must be there before anything runs, and that is left to leave at the end. On one H200 with H = 4096 and V = 128256
// it is computed in 3.3 ms, and 8 MiB leave in 1 ms over gRPC. Half of it would fill half of the device.
inline constexpr int64_t kFirstSliceRows = 1024;
// From here on the products lose nothing by being cut.
inline constexpr int64_t kSliceRows = 2048;
// More of them would come for longer than those before are computed.
inline constexpr int64_t kMostSliceRows = 8192;

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_COMPUTATION_ROW_SLICES_H_
