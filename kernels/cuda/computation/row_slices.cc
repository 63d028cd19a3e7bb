#include "kernels/cuda/computation/row_slices.h"

namespace headwater::cuda {

std::vector<RowSlice> SliceRows(int64_t rows, const SliceNeeds& needs) {
  std::vector<RowSlice> slices;
  int64_t first = 0;
  const auto take = [&](int64_t count) {
    if (rows - first < count + kFirstSliceRows) return false;
    slices.push_back({first, count});
    first += count;
    return true;
  };
  if ((needs.comes_in || needs.ends_by_way) && take(kFirstSliceRows) && take(kSliceRows)) {
    while (take(needs.ends_by_way ? kSliceRows : kMostSliceRows)) {
    }
  }
  if (needs.ends_by_way && rows - first >= 2 * kFirstSliceRows) {
    take(kFirstSliceRows);
  } else if (needs.comes_in && needs.leaves && rows - first >= 2 * kSliceRows) {
    take((rows - first - kSliceRows) / kFirstSliceRows * kFirstSliceRows);
  }
  slices.push_back({first, rows - first});
  return slices;
}

}  // namespace headwater::cuda
