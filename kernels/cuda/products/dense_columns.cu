// Traffic   256 samples of V128256: 66 MB read. A dense row of H4096: 16 KB copied, and 48 KB where sums are added.
// Numerics  entries are counted in whole units, in any order.
#include <cuda_bf16.h>

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "kernels/cuda/products/dense_columns.h"
#include "kernels/cuda/rows/dither.h"

namespace headwater::cuda {
namespace {

constexpr int kCountThreads = 256;
constexpr int kCountGroups = 8;  // of samples
constexpr int kChooseThreads = 1024;
constexpr int kCopyThreads = 256;
constexpr int32_t kEight = 8;

// A thread has eight columns of some samples.
__global__ void __launch_bounds__(kCountThreads)
    CountEntriesKernel(const __nv_bfloat16* matrix, int64_t stride, int64_t row_count, int32_t columns, const DitherRow* rows,
                       int32_t samples, uint32_t* entries) {
  const int32_t column = static_cast<int32_t>(blockIdx.x * kCountThreads + threadIdx.x) * kEight;
  if (column >= columns) return;
  const auto group = static_cast<int32_t>(blockIdx.y);
  uint32_t counts[kEight] = {};
  for (int32_t sample = samples * group / kCountGroups; sample < samples * (group + 1) / kCountGroups; ++sample) {
    const int64_t row = row_count * sample / samples;
    const float inverse = 1.0f / rows[row].unit;
    const uint4 vector = __ldg(reinterpret_cast<const uint4*>(matrix + row * stride + column));
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      const float size = fabsf(__uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u));
      // Without a resolution all that are not 0 count.
      if (size != 0.0f) counts[i] += __float2uint_rn(fminf(size * inverse, 1.0f) * static_cast<float>(kEntryUnits));
    }
  }
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    if (column + i < columns && counts[i] > 0) atomicAdd(entries + column + i, counts[i]);
  }
}

// One block. Columns are many, above the threshold, or some, above its half, or few.
__global__ void __launch_bounds__(kChooseThreads)
    ChooseDenseKernel(const uint32_t* entries, int32_t columns, uint32_t threshold, int32_t grain, uint32_t* places, int32_t* ids,
                      DenseChoice* choice) {
  using Scan = cub::BlockScan<uint32_t, kChooseThreads>;
  using Reduce = cub::BlockReduce<unsigned long long, kChooseThreads>;
  __shared__ union {
    typename Scan::TempStorage scan;
    typename Reduce::TempStorage reduce;
  } shared;
  __shared__ uint32_t many_of_all, some_of_all;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread == 0) many_of_all = some_of_all = 0;
  __syncthreads();
  uint32_t many = 0, some = 0;
  for (int32_t column = thread; column < columns; column += kChooseThreads) {
    many += entries[column] >= threshold ? 1 : 0;
    some += entries[column] >= threshold / 2 && entries[column] < threshold ? 1 : 0;
  }
  atomicAdd(&many_of_all, many);
  atomicAdd(&some_of_all, some);
  __syncthreads();
  const auto wanted = static_cast<uint32_t>((static_cast<int32_t>(many_of_all) + grain - 1) / grain * grain);
  if (wanted >= static_cast<uint32_t>(columns)) {
    if (thread == 0) *choice = {0, static_cast<uint32_t>(columns)};
    return;
  }
  // How many of those that have some, and of those that have few, are dense too.
  const uint32_t wanted_some = min(some_of_all, wanted - many_of_all), wanted_few = wanted - many_of_all - wanted_some;
  uint32_t some_before = 0, few_before = 0, dense_before = 0;
  unsigned long long listed = 0;
  for (int32_t first = 0; first < columns; first += kChooseThreads * kEight) {
    const int32_t column = first + thread * kEight;
    uint32_t counts[kEight];
    uint32_t own = 0;  // that have some, and few << 16
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      counts[i] = column + i < columns ? entries[column + i] : 0xffffffffu;
      own += counts[i] >= threshold ? 0u : counts[i] >= threshold / 2 ? 1u : 1u << 16;
    }
    uint32_t before = 0, all = 0;
    Scan(shared.scan).ExclusiveSum(own, before, all);
    __syncthreads();
    uint32_t own_some = some_before + (before & 0xffffu), own_few = few_before + (before >> 16), mask = 0;
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      if (column + i >= columns) continue;
      bool dense = true;
      if (counts[i] < threshold) dense = counts[i] >= threshold / 2 ? own_some++ < wanted_some : own_few++ < wanted_few;
      mask |= dense ? 1u << i : 0u;
      listed += dense ? 0 : counts[i];
    }
    some_before += all & 0xffffu;
    few_before += all >> 16;
    Scan(shared.scan).ExclusiveSum(static_cast<uint32_t>(__popc(mask)), before, all);
    __syncthreads();
    before += dense_before;
    dense_before += all;
    if (column < columns) places[column / kEight] = before << 8 | mask;
    for (; mask != 0; mask &= mask - 1) ids[before++] = column + __ffs(static_cast<int>(mask)) - 1;
  }
  listed = Reduce(shared.reduce).Sum(listed);
  if (thread == 0) *choice = {listed, dense_before};
}

// A block a row; a thread copies 16 bytes at a time.
__global__ void __launch_bounds__(kCopyThreads)
    GatherDenseRowsKernel(const uint4* weight, const int32_t* ids, int32_t vectors, uint4* rows) {
  const uint4* const from = weight + static_cast<int64_t>(ids[blockIdx.x]) * vectors;
  uint4* const to = rows + static_cast<int64_t>(blockIdx.x) * vectors;
  for (auto i = static_cast<int32_t>(threadIdx.x); i < vectors; i += kCopyThreads) to[i] = __ldg(from + i);
}

template <bool kAdds>
__global__ void __launch_bounds__(kCopyThreads)
    ScatterDenseRowsKernel(const float4* rows, const int32_t* ids, int32_t vectors, float4* grad_weight) {
  const float4* const from = rows + static_cast<int64_t>(blockIdx.x) * vectors;
  float4* const to = grad_weight + static_cast<int64_t>(ids[blockIdx.x]) * vectors;
  for (auto i = static_cast<int32_t>(threadIdx.x); i < vectors; i += kCopyThreads) {
    float4 sum = __ldcs(from + i);
    if constexpr (kAdds) {
      const float4 old = to[i];
      sum = make_float4(old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w);
    }
    to[i] = sum;
  }
}

}  // namespace

DenseColumns LayOutDenseChoice(int64_t columns, Workspace* workspace) {
  DenseColumns dense;
  dense.places = workspace->Take<uint32_t>(RoundUp(columns, kEight) / kEight);
  dense.ids = workspace->Take<int32_t>(columns);
  dense.entries = workspace->Take<uint32_t>(columns);
  dense.choice = workspace->Take<DenseChoice>(1);
  return dense;
}

cudaError_t LaunchCountEntries(const ConstMatrix& matrix, const DitherRow* rows, int32_t samples, const DenseColumns& columns,
                               cudaStream_t stream) {
  if (matrix.element != Element::kBFloat16) return cudaErrorInvalidValue;
  const cudaError_t error = cudaMemsetAsync(columns.entries, 0, static_cast<size_t>(matrix.columns) * sizeof(uint32_t), stream);
  if (error != cudaSuccess) return error;
  const dim3 blocks(static_cast<unsigned>(RoundUp(matrix.columns, kCountThreads * kEight) / (kCountThreads * kEight)),
                    kCountGroups);
  CountEntriesKernel<<<blocks, kCountThreads, 0, stream>>>(static_cast<const __nv_bfloat16*>(matrix.data), matrix.stride,
                                                           matrix.rows, static_cast<int32_t>(matrix.columns), rows, samples,
                                                           columns.entries);
  return cudaGetLastError();
}

cudaError_t LaunchChooseDense(int64_t column_count, double threshold, const DenseColumns& columns, cudaStream_t stream) {
  ChooseDenseKernel<<<1, kChooseThreads, 0, stream>>>(
      columns.entries, static_cast<int32_t>(column_count), static_cast<uint32_t>(threshold * kEntryUnits),
      static_cast<int32_t>(DenseGrain(column_count)), columns.places, columns.ids, columns.choice);
  return cudaGetLastError();
}

cudaError_t LaunchGatherDenseRows(const ShardWeights& shard, const DenseColumns& columns, cudaStream_t stream) {
  GatherDenseRowsKernel<<<static_cast<unsigned>(columns.count), kCopyThreads, 0, stream>>>(
      static_cast<const uint4*>(shard.weight), columns.ids, static_cast<int32_t>(shard.stride / kEight),
      reinterpret_cast<uint4*>(columns.rows));
  return cudaGetLastError();
}

cudaError_t LaunchScatterDenseRows(const DenseColumns& columns, int64_t stride, bool adds, float* grad_weight,
                                   cudaStream_t stream) {
  const auto kernel = adds ? ScatterDenseRowsKernel<true> : ScatterDenseRowsKernel<false>;
  kernel<<<static_cast<unsigned>(columns.count), kCopyThreads, 0, stream>>>(reinterpret_cast<const float4*>(columns.rows),
                                                                            columns.ids, static_cast<int32_t>(stride / 4),
                                                                            reinterpret_cast<float4*>(grad_weight));
  return cudaGetLastError();
}

}  // namespace headwater::cuda
