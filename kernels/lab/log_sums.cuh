// Rows' log-sum-exps: out of the sums that the tiles of a product's epilogue give (logits_epilogue.cuh), and in fp64 out of logits
// in memory, which is what those have to be.

#ifndef HEADWATER_KERNELS_LAB_LOG_SUMS_CUH_
#define HEADWATER_KERNELS_LAB_LOG_SUMS_CUH_

#include "bench.cuh"
#include "logits_epilogue.cuh"

namespace headwater::lab {

// One side of a row, in units of log2.
struct LogSum {
  double log2_sum;
  int32_t
      top_column;  // a column of more than half of all is among the kTileColumns from here on, if there is one; -1: there is none
  int32_t reserved;
};

// What the row pass takes of a row: 16 bytes, one load.
struct RowLogSums {
  float student;
  float teacher;
  float difference;  // the student's less the teacher's, rounded by itself
  int32_t top_column;
};

// 2^offset * sum, and of the largest tile in it 2^offset * top.
struct MergedTiles {
  float offset = -INFINITY;
  double sum = 0, top = 0;
  int32_t tile = -1;

  // A tile without a share leaves everything as it is; one that is not a number does not.
  __device__ __forceinline__ void Add(float other_offset, double other_sum, double other_top, int32_t other_tile) {
    if (other_sum == 0) return;
    if (other_offset > offset) {
      const double factor = static_cast<double>(exp2f(offset - other_offset));
      sum *= factor;
      top *= factor;
      offset = other_offset;
    } else {
      const double factor = static_cast<double>(exp2f(other_offset - offset));
      other_sum *= factor;
      other_top *= factor;
    }
    sum += other_sum;
    if (other_top > top) {
      top = other_top;
      tile = other_tile;
    }
  }
};

// 16 runs of tiles, each merged in order, then the runs in order. 32 rows a block, a warp a run. With a student's sums: joins the
// two.
constexpr int kMergeRuns = 16;
static __global__ void __launch_bounds__(32 * kMergeRuns)
    MergeTileSumsKernel(const TileSum* tile_sums, int64_t rows, int32_t tiles, const LogSum* student, LogSum* out,
                        RowLogSums* joined) {
  __shared__ MergedTiles runs[kMergeRuns][32];
  const int lane = static_cast<int>(threadIdx.x) % 32, run = static_cast<int>(threadIdx.x) / 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  MergedTiles merged;
  if (row < rows) {
    const int32_t end = tiles * (run + 1) / kMergeRuns;
#pragma unroll 4
    for (int32_t tile = tiles * run / kMergeRuns; tile < end; ++tile) {
      const TileSum one = tile_sums[tile * rows + row];
      merged.Add(one.offset, static_cast<double>(one.sum), static_cast<double>(one.sum), tile);
    }
  }
  runs[run][lane] = merged;
  __syncthreads();
  if (run != 0 || row >= rows) return;
  for (int i = 1; i < kMergeRuns; ++i) {
    const MergedTiles& other = runs[i][lane];
    merged.Add(other.offset, other.sum, other.top, other.tile);
  }
  const double log2_sum = static_cast<double>(merged.offset) + log2(merged.sum);
  if (student == nullptr) {
    // A column of more than half of all makes its tile have that; roundings aside.
    out[row] = {log2_sum, merged.top > 0.49 * merged.sum ? merged.tile * kTileColumns : -1, 0};
    return;
  }
  const LogSum side = student[row];
  joined[row] = {static_cast<float>(side.log2_sum), static_cast<float>(log2_sum), static_cast<float>(side.log2_sum - log2_sum),
                 side.top_column};
}

inline void EnqueueMergeStudent(const TileSum* tile_sums, int64_t rows, int64_t tiles, LogSum* out, cudaStream_t stream) {
  MergeTileSumsKernel<<<static_cast<int>((rows + 31) / 32), 32 * kMergeRuns, 0, stream>>>(
      tile_sums, rows, static_cast<int32_t>(tiles), nullptr, out, nullptr);
  LAB_CUDA(cudaGetLastError());
}
inline void EnqueueMergeTeacher(const TileSum* tile_sums, int64_t rows, int64_t tiles, const LogSum* student, RowLogSums* joined,
                                cudaStream_t stream) {
  MergeTileSumsKernel<<<static_cast<int>((rows + 31) / 32), 32 * kMergeRuns, 0, stream>>>(
      tile_sums, rows, static_cast<int32_t>(tiles), student, nullptr, joined);
  LAB_CUDA(cudaGetLastError());
}

// --- The slow way ----------------------------------------------------------------------------------------------------------------

struct LogSumSide {
  const float* logits;
  int64_t stride;
  float log2_scale;  // as it is rounded
};

// One block of 256 threads; log2 of the sum over `columns` of 2^(scale z), the column of the largest and its share.
static __device__ double Log2Sum(const LogSumSide& side, int64_t row, int32_t columns, int32_t* top, double* top_share) {
  __shared__ double values[256];
  __shared__ int32_t places[256];
  const int thread = static_cast<int>(threadIdx.x);
  const float* z = side.logits + row * side.stride;
  double largest = -INFINITY;
  int32_t place = 0;
  for (int32_t j = thread; j < columns; j += 256) {
    const double x = static_cast<double>(z[j]) * static_cast<double>(side.log2_scale);
    if (x > largest) {
      largest = x;
      place = j;
    }
  }
  values[thread] = largest;
  places[thread] = place;
  __syncthreads();
  for (int i = 0; i < 256; ++i) {
    if (values[i] > largest) {
      largest = values[i];
      place = places[i];
    }
  }
  __syncthreads();
  double sum = 0;
  for (int32_t j = thread; j < columns; j += 256) {
    sum += exp2(static_cast<double>(z[j]) * static_cast<double>(side.log2_scale) - largest);
  }
  values[thread] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < 256; ++i) sum += values[i];
  __syncthreads();
  *top = place;
  *top_share = 1 / sum;
  return largest + log2(sum);
}

static __global__ void RowLogSumsKernel(LogSumSide student, LogSumSide teacher, int32_t columns, RowLogSums* out) {
  const int64_t row = blockIdx.x;
  int32_t top = 0, unused = 0;
  double share = 0, unused_share = 0;
  const double q = Log2Sum(student, row, columns, &top, &share), p = Log2Sum(teacher, row, columns, &unused, &unused_share);
  if (threadIdx.x != 0) return;
  out[row] = {static_cast<float>(q), static_cast<float>(p), static_cast<float>(q - p),
              share > 0.49 ? top / kTileColumns * kTileColumns : -1};
}

inline void ComputeLogSums(const LogSumSide& student, const LogSumSide& teacher, int64_t rows, int64_t columns, RowLogSums* out) {
  RowLogSumsKernel<<<static_cast<int>(rows), 256>>>(student, teacher, static_cast<int32_t>(columns), out);
  LAB_CUDA(cudaGetLastError());
}

}  // namespace headwater::lab

#endif  // HEADWATER_KERNELS_LAB_LOG_SUMS_CUH_
