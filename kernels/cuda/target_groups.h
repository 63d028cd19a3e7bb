// Rows grouped by target on the host, for LaunchAddTargetRows().
#ifndef HEADWATER_KERNELS_CUDA_TARGET_GROUPS_H_
#define HEADWATER_KERNELS_CUDA_TARGET_GROUPS_H_

#include <cstdint>

namespace headwater::cuda {

struct GroupCounts {
  int32_t rows = 0;    // with a target
  int32_t groups = 0;  // different targets
};

// Writes the rows that have a target (>= 0) to order [row_count], by target and then by row, and where each group begins to starts
// [row_count + 1], its end included.
GroupCounts GroupByTarget(const int32_t* targets, int64_t row_count, int32_t* order, int32_t* starts);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_TARGET_GROUPS_H_
