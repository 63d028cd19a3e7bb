// Rows grouped by target on the host, for LaunchAddTargetRows().
#ifndef HEADWATER_KERNELS_CUDA_COMPUTATION_TARGET_GROUPS_H_
#define HEADWATER_KERNELS_CUDA_COMPUTATION_TARGET_GROUPS_H_

#include <cstdint>
#include <vector>

namespace headwater::cuda {

struct GroupCounts {
  int32_t rows = 0;    // with a target
  int32_t groups = 0;  // different targets
};

// Rows that have a target, sorted by target and then by row.
class TargetOrder {
 public:
  // Adds rows [first_row, first_row + row_count), those whose target is >= 0. `first_row` is not less than any row before.
  void Add(const int32_t* targets, int64_t row_count, int64_t first_row);
  void Clear() { keys_.clear(); }
  // Writes the rows to order [rows], and where each group begins to starts [groups + 1], its end included.
  GroupCounts Write(int32_t* order, int32_t* starts) const;

 private:
  std::vector<uint64_t> keys_;  // target and row in one number: sorting plain numbers is several times faster than sorting pairs
};

// The order of rows [0, row_count) alone.
GroupCounts GroupByTarget(const int32_t* targets, int64_t row_count, int32_t* order, int32_t* starts);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_COMPUTATION_TARGET_GROUPS_H_
