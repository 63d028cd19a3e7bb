// Traffic   N4096 H4096 V128256, 100 entries a row in 73 thousand columns: 3.4 GB gathered each way, mostly from the L2 cache, and
//           2.4 GB of grad_weight read and written.
// Numerics  sums are fp32 in a fixed order; a column's is added to grad_weight once.
#include <cuda_bf16.h>

#include <algorithm>
#include <cub/device/device_radix_sort.cuh>
#include <type_traits>

#include "kernels/cuda/products/gradient_list.h"

namespace headwater::cuda {
namespace {

constexpr int32_t kChunk = 256;
constexpr int32_t kHeavyChunk = 32;  // chunks of more entries are dealt first, evenly
// Columns of several chunks have fewer than twice their entries / kChunk.
constexpr int32_t kPartialsPerRow = 2 * kEntriesPerRow / kChunk;
constexpr int32_t kSlice = 256;  // of the width: eight columns a lane
constexpr int kGatherWarps = 4;
constexpr int kWeightThreads = 128;
constexpr int kWeightBlocks = 8;  // a multiprocessor
constexpr uint32_t kAllLanes = 0xffffffffu;

int BitsFor(int64_t values) {
  int bits = 0;
  while ((int64_t{1} << bits) < values) ++bits;
  return bits;
}

// Bits of a key. One more column than there are: where there is no entry the key is behind all others.
int KeyBits(const EntryList& list) { return list.pool.row_bits + BitsFor(int64_t{list.columns} + 1); }

// All keys where there is no count: those without an entry are behind all columns.
__device__ __forceinline__ int32_t EntryCount(const EntryPool& pool) {
  return static_cast<int32_t>(pool.count == nullptr ? pool.capacity : min(*pool.count, pool.capacity));
}

// Number of keys in [0, count) with below(key).
template <class Below>
__device__ __forceinline__ int32_t Partition(const uint32_t* keys, int32_t count, const Below& below) {
  int32_t first = 0;
  while (count > 0) {
    const int32_t half = count / 2;
    if (below(__ldg(keys + first + half))) {
      first += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return first;
}

// One thread a row and a column, whichever there are more of. Places of chunks and sums come from atomic additions; results do not
// depend on them.
__global__ void __launch_bounds__(256) PlanKernel(const EntryList list) {
  const auto index = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t count = EntryCount(list.pool), row_bits = list.pool.row_bits;
  const uint32_t row_mask = (1u << row_bits) - 1;
  if (list.row_first != nullptr && index <= list.rows) {
    list.row_first[index] = Partition(
        list.row_keys, count, [&](uint32_t key) { return (key & row_mask) < static_cast<uint32_t>(list.pool.first_row + index); });
  }
  int32_t first = 0, entries = 0;
  if (list.chunks != nullptr && index < list.columns) {
    const auto column = static_cast<uint32_t>(index);
    first = Partition(list.column_keys, count, [&](uint32_t key) { return key >> row_bits < column; });
    entries = Partition(list.column_keys + first, count - first, [&](uint32_t key) { return key >> row_bits <= column; });
  }
  if (entries > kChunk) {
    const int32_t chunks = (entries + kChunk - 1) / kChunk;
    const auto place = static_cast<int32_t>(atomicAdd(&list.counts->heavy, static_cast<uint32_t>(chunks)));
    const auto partial = static_cast<int32_t>(atomicAdd(&list.counts->partials, static_cast<uint32_t>(chunks)));
    list.splits[atomicAdd(&list.counts->splits, 1u)] = SplitColumn{index, partial, chunks, 0};
    for (int32_t i = 0; i < chunks; ++i) {
      list.chunks[place + i] = EntryChunk{index, first + i * kChunk, min(kChunk, entries - i * kChunk), partial + i};
    }
  }
  const bool heavy = entries > kHeavyChunk && entries <= kChunk, light = entries > 0 && entries <= kHeavyChunk;
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
    const bool mine = kind == 0 ? heavy : light;
    const uint32_t ballot = __ballot_sync(kAllLanes, mine);
    if (ballot == 0) continue;
    uint32_t base = 0;
    if (lane == 0) base = atomicAdd(kind == 0 ? &list.counts->heavy : &list.counts->light, static_cast<uint32_t>(__popc(ballot)));
    base = __shfl_sync(kAllLanes, base, 0);
    const auto place = static_cast<int32_t>(base + static_cast<uint32_t>(__popc(ballot & ((1u << lane) - 1))));
    if (mine) list.chunks[kind == 0 ? place : list.max_chunks - 1 - place] = EntryChunk{index, first, entries, -1};
  }
}

__device__ __forceinline__ uint4 LoadEight(const __nv_bfloat16* from) {
  uint4 data;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(data.x), "=r"(data.y), "=r"(data.z), "=r"(data.w)
               : "l"(from));
  return data;
}

__device__ __forceinline__ void AddEight(float (&sums)[8], const uint4& data, float factor) {
  const uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sums[2 * i] = fmaf(factor, __uint_as_float(words[i] << 16), sums[2 * i]);
    sums[2 * i + 1] = fmaf(factor, __uint_as_float(words[i] & 0xffff0000u), sums[2 * i + 1]);
  }
}

// A block a row and slice, rows fastest. Its warps take the row's entries in turn; their sums are added in the warps' order.
__global__ void __launch_bounds__(32 * kGatherWarps)
    TimesWeightKernel(const EntryList list, const __nv_bfloat16* weight, int32_t stride, bool adds, float* out) {
  constexpr int kUnroll = 8;
  __shared__ float4 shared[kGatherWarps][kSlice / 4];
  const auto warp = static_cast<int32_t>(threadIdx.x) / 32, lane = static_cast<int32_t>(threadIdx.x) % 32;
  const auto block = static_cast<int32_t>(blockIdx.x);
  const int32_t row = block % list.rows, slice = block / list.rows * kSlice;
  const int32_t first = __ldg(list.row_first + row), last = __ldg(list.row_first + row + 1);
  const bool inside = slice + lane * 8 < stride;
  const __nv_bfloat16* const base = weight + slice + lane * 8;
  float sums[8] = {};
  for (int32_t begin = first; begin < last; begin += 32 * kGatherWarps) {
    const int32_t index = begin + lane * kGatherWarps + warp;
    const uint32_t key = index < last ? __ldg(list.row_keys + index) : 0;
    const float value = index < last ? __ldg(list.row_values + index) : 0.0f;
    const int32_t mine = min(32, (last - begin - warp + kGatherWarps - 1) / kGatherWarps);
    for (int32_t step = 0; step < mine; step += kUnroll) {
      uint4 data[kUnroll];
      float factors[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const uint32_t column = __shfl_sync(kAllLanes, key, step + i) >> list.pool.row_bits;
        factors[i] = __shfl_sync(kAllLanes, value, step + i);
        data[i] = step + i < mine && inside ? LoadEight(base + static_cast<int64_t>(column) * stride) : uint4{};
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) AddEight(sums, data[i], factors[i]);
    }
  }
  shared[warp][2 * lane] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  shared[warp][2 * lane + 1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
  __syncthreads();
  const auto four = static_cast<int32_t>(threadIdx.x);
  if (four >= kSlice / 4 || slice + 4 * four >= stride) return;
  float4 sum = shared[0][four];
#pragma unroll
  for (int i = 1; i < kGatherWarps; ++i) {
    const float4 other = shared[i][four];
    sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
  }
  auto* const to = reinterpret_cast<float4*>(out + static_cast<int64_t>(row) * stride + slice + 4 * four);
  if (adds) {
    const float4 old = *to;
    sum = make_float4(old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w);
  }
  *to = sum;
}

// A lane's eight sums are eight neighbouring columns. Exchanged between the lanes of a pair they become two groups of four whose
// stores fill whole sectors. An even lane gets columns 0-3 and 8-11 of the pair's sixteen, an odd one 4-7 and 12-15.
__device__ __forceinline__ void ExchangeInPairs(float (&sums)[8], int32_t lane) {
  const bool odd = lane % 2 != 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float received = __shfl_xor_sync(kAllLanes, odd ? sums[i] : sums[4 + i], 1);
    if (odd) {
      sums[i] = received;
    } else {
      sums[4 + i] = received;
    }
  }
}

// Adds in the L2 cache where the GPU can. Each element has one writer.
__device__ __forceinline__ void AddFour(float* to, const float* sums) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(sums[0]), "f"(sums[1]), "f"(sums[2]),
               "f"(sums[3])
               : "memory");
#else
  for (int i = 0; i < 4; ++i) to[i] += sums[i];
#endif
}

// Persistent. A unit is a chunk and a slice, chunks fastest.
__global__ void __launch_bounds__(kWeightThreads, kWeightBlocks)
    TimesRowsKernel(const EntryList list, const __nv_bfloat16* rows, int32_t stride, float factor, float* grad_weight) {
  constexpr int kUnroll = 4;
  struct Unit {
    EntryChunk chunk;
    int32_t slice;
  };
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  const auto warps = static_cast<int32_t>(gridDim.x * blockDim.x / 32);
  const auto heavy = static_cast<int32_t>(list.counts->heavy), chunks = heavy + static_cast<int32_t>(list.counts->light);
  if (chunks == 0) return;
  const uint32_t row_mask = (1u << list.pool.row_bits) - 1;
  int32_t number = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x) / 32, slice = 0;
  const auto take = [&] {
    while (number >= chunks) {
      number -= chunks;
      slice += kSlice;
    }
    Unit unit{{}, slice};
    if (slice < stride) {
      const int32_t place = number < heavy ? number : list.max_chunks - 1 - (number - heavy);
      const int4 words = __ldg(reinterpret_cast<const int4*>(list.chunks + place));
      unit.chunk = EntryChunk{words.x, words.y, words.z, words.w};
    }
    number += warps;
    return unit;
  };
  // Two units ahead the chunk is on its way, one unit ahead its first entries.
  Unit unit = take(), next = take();
  uint32_t key = 0;
  float value = 0.0f;
  if (lane < unit.chunk.count) {
    key = __ldg(list.column_keys + unit.chunk.first + lane);
    value = __ldg(list.column_values + unit.chunk.first + lane);
  }
  while (unit.slice < stride) {
    const Unit after = take();
    uint32_t next_key = 0;
    float next_value = 0.0f;
    if (lane < next.chunk.count) {
      next_key = __ldg(list.column_keys + next.chunk.first + lane);
      next_value = __ldg(list.column_values + next.chunk.first + lane);
    }
    const EntryChunk chunk = unit.chunk;
    const bool inside = unit.slice + lane * 8 < stride;
    const __nv_bfloat16* const base = rows + unit.slice + lane * 8;
    float sums[8] = {};
    for (int32_t begin = 0; begin < chunk.count; begin += 32) {
      if (begin > 0) {
        const bool there = begin + lane < chunk.count;
        key = there ? __ldg(list.column_keys + chunk.first + begin + lane) : 0;
        value = there ? __ldg(list.column_values + chunk.first + begin + lane) : 0.0f;
      }
      const int32_t mine = min(32, chunk.count - begin);
      for (int32_t step = 0; step < mine; step += kUnroll) {
        uint4 data[kUnroll];
        float factors[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          const uint32_t row = __shfl_sync(kAllLanes, key, step + i) & row_mask;
          factors[i] = __shfl_sync(kAllLanes, value, step + i);
          data[i] = step + i < mine && inside ? LoadEight(base + static_cast<int64_t>(row) * stride) : uint4{};
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          if (step + i < mine) AddEight(sums, data[i], factors[i]);
        }
      }
    }
    const bool whole = chunk.partial < 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] *= whole ? factor : 1.0f;
    ExchangeInPairs(sums, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t column = unit.slice + lane / 2 * 16 + lane % 2 * 4 + 8 * half;
      const float* const sum = sums + 4 * half;
      if (column >= stride) continue;
      if (whole) {
        AddFour(grad_weight + static_cast<int64_t>(chunk.column) * stride + column, sum);
      } else {
        *reinterpret_cast<float4*>(list.partials + static_cast<int64_t>(chunk.partial) * stride + column) =
            make_float4(sum[0], sum[1], sum[2], sum[3]);
      }
    }
    unit = next;
    next = after;
    key = next_key;
    value = next_value;
  }
}

// Persistent. A unit is a split column and 128 of the width.
__global__ void __launch_bounds__(kWeightThreads)
    AddSplitsKernel(const EntryList list, int32_t stride, float factor, float* grad_weight) {
  constexpr int kUnroll = 8;
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  const auto warps = static_cast<int32_t>(gridDim.x * blockDim.x / 32);
  const int32_t slices = (stride + 127) / 128, units = static_cast<int32_t>(list.counts->splits) * slices;
  for (int32_t unit = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x) / 32; unit < units; unit += warps) {
    const SplitColumn split = list.splits[unit / slices];
    const int32_t column = unit % slices * 128 + lane * 4;
    if (column >= stride) continue;
    auto* const to = reinterpret_cast<float4*>(grad_weight + static_cast<int64_t>(split.column) * stride + column);
    float4 sum{};
    for (int32_t begin = 0; begin < split.count; begin += kUnroll) {
      float4 parts[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const bool there = begin + i < split.count;
        const float* const part = list.partials + static_cast<int64_t>(split.first + (there ? begin + i : 0)) * stride + column;
        parts[i] = there ? __ldcs(reinterpret_cast<const float4*>(part)) : float4{};
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        sum = make_float4(sum.x + parts[i].x, sum.y + parts[i].y, sum.z + parts[i].z, sum.w + parts[i].w);
      }
    }
    const float4 old = *to;
    *to =
        make_float4(fmaf(factor, sum.x, old.x), fmaf(factor, sum.y, old.y), fmaf(factor, sum.z, old.z), fmaf(factor, sum.w, old.w));
  }
}

// The pool by whole keys, and the result of that by row.
cudaError_t SortByColumn(const EntryList& list, void* space, size_t* bytes, cudaStream_t stream) {
  return cub::DeviceRadixSort::SortPairs(space, *bytes, list.pool.keys, list.column_keys, list.pool.values, list.column_values,
                                         static_cast<int>(list.pool.capacity), 0, KeyBits(list), stream);
}
cudaError_t SortByRow(const EntryList& list, void* space, size_t* bytes, cudaStream_t stream) {
  return cub::DeviceRadixSort::SortPairs(space, *bytes, list.column_keys, list.row_keys, list.column_values, list.row_values,
                                         static_cast<int>(list.pool.capacity), 0, std::max(list.pool.row_bits, 1), stream);
}

int64_t MostPartials(const EntryList& list) { return int64_t{list.rows} * kPartialsPerRow; }

// Memory for the tables of the order of columns.
void TakeTables(Workspace* workspace, EntryList* list) {
  const int64_t most_partials = MostPartials(*list);
  list->counts = workspace->Take<EntryCounts>(1);
  list->max_chunks = static_cast<int32_t>(list->columns + most_partials);
  list->chunks = workspace->Take<EntryChunk>(list->max_chunks);
  list->splits = workspace->Take<SplitColumn>(most_partials);
}

// The tables, and memory for the rows of the dense columns: what a kept list needs to be added.
void TakePlan(int64_t stride, Workspace* workspace, EntryList* list) {
  TakeTables(workspace, list);
  list->dense.rows = workspace->Take<float>(list->dense.count * stride);
}

// The tables of the sums, from both orders, or that of columns alone.
cudaError_t LaunchPlan(const EntryList& list, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(list.counts, 0, sizeof(EntryCounts), stream);
  if (error != cudaSuccess) return error;
  const int32_t threads = std::max(list.chunks == nullptr ? 0 : list.columns, list.rows + 1);
  PlanKernel<<<static_cast<unsigned>((threads + 255) / 256), 256, 0, stream>>>(list);
  return cudaGetLastError();
}

// Blocks that fill the current device.
cudaError_t PersistentBlocks(unsigned* blocks) {
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  *blocks = static_cast<unsigned>(multiprocessors * kWeightBlocks);
  return error;
}

}  // namespace

bool EntryKeysFit(int64_t rows, int64_t columns) { return BitsFor(rows) + BitsFor(columns + 1) <= 32; }

EntryList LayOutEntryList(int64_t rows, int64_t columns, int64_t slices, Workspace* workspace) {
  EntryList list;
  const int64_t capacity = rows * kEntriesPerRow;
  list.rows = static_cast<int32_t>(rows);
  list.columns = static_cast<int32_t>(columns);
  list.pool.capacity = static_cast<uint32_t>(capacity);
  list.pool.row_bits = BitsFor(rows);
  list.pool.keys = workspace->Take<uint32_t>(capacity);
  list.pool.values = workspace->Take<float>(capacity);
  list.pool.count = workspace->Take<uint32_t>(slices);
  list.row_keys = workspace->Take<uint32_t>(capacity);
  list.row_values = workspace->Take<float>(capacity);
  list.row_first = workspace->Take<int32_t>(rows + slices);
  list.column_keys = workspace->Take<uint32_t>(capacity);
  list.column_values = workspace->Take<float>(capacity);
  TakeTables(workspace, &list);
  list.dense = LayOutDenseChoice(columns, workspace);
  size_t by_row = 0;
  // Only sizes: an error here comes again when the list is sorted.
  static_cast<void>(SortByColumn(list, nullptr, &list.sort_bytes, nullptr));
  static_cast<void>(SortByRow(list, nullptr, &by_row, nullptr));
  list.sort_bytes = std::max(list.sort_bytes, by_row);
  list.sort_space = workspace->TakeBytes(static_cast<int64_t>(list.sort_bytes));
  return list;
}

void LayOutDense(int64_t count, int64_t stride, Workspace* workspace, EntryList* list) {
  DenseColumns& dense = list->dense;
  dense.count = static_cast<int32_t>(count);
  if (count == 0) return;
  dense.matrix = workspace->Take<uint16_t>(list->rows * count);
  dense.rows = workspace->Take<float>(count * stride);
}

EntryList LayOutKept(const EntryList& list, int64_t stride, Workspace* matrix) {
  EntryList kept = list;
  kept.partials = matrix->Take<float>(MostPartials(list) * stride);
  kept.column_keys = matrix->Take<uint32_t>(list.pool.capacity);
  kept.column_values = matrix->Take<float>(list.pool.capacity);
  kept.dense.ids = matrix->Take<int32_t>(list.dense.count);
  kept.dense.matrix = matrix->Take<uint16_t>(int64_t{list.rows} * list.dense.count);
  kept.row_first = nullptr;
  kept.pool.count = nullptr;
  return kept;
}

int64_t PlanBytes(const EntryList& list, int64_t stride) {
  Workspace workspace;
  EntryList planned = list;
  TakePlan(stride, &workspace, &planned);
  return workspace.used();
}

EntryList SliceOf(const EntryList& all, int64_t first, int64_t count, int64_t number) {
  EntryList slice = all;
  const int64_t entry = first * kEntriesPerRow;
  slice.rows = static_cast<int32_t>(count);
  slice.pool.capacity = static_cast<uint32_t>(count * kEntriesPerRow);
  slice.pool.first_row = static_cast<int32_t>(first);
  slice.pool.count += number;
  slice.row_first += first + number;
  for (uint32_t** keys : {&slice.pool.keys, &slice.column_keys, &slice.row_keys}) *keys += entry;
  for (float** values : {&slice.pool.values, &slice.column_values, &slice.row_values}) *values += entry;
  if (all.dense.count > 0) slice.dense.matrix += first * all.dense.count;
  if (slice.rows < all.rows) slice.chunks = nullptr;
  return slice;
}

cudaError_t LaunchClearEntries(const EntryList& list, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(list.pool.count, 0, sizeof(uint32_t), stream);
  if (error != cudaSuccess) return error;
  return cudaMemsetAsync(list.pool.keys, 0xff, list.pool.capacity * sizeof(uint32_t), stream);
}

cudaError_t LaunchSortEntries(const EntryList& slice, cudaStream_t stream) {
  size_t bytes = slice.sort_bytes;
  cudaError_t error = SortByColumn(slice, slice.sort_space, &bytes, stream);
  bytes = slice.sort_bytes;
  if (error == cudaSuccess) error = SortByRow(slice, slice.sort_space, &bytes, stream);
  return error != cudaSuccess ? error : LaunchPlan(slice, stream);
}

cudaError_t LaunchSortSlices(const EntryList& all, cudaStream_t stream) {
  EntryList list = all;
  list.row_first = nullptr;
  list.pool.count = nullptr;
  const cudaError_t error = SortByColumn(list, list.sort_space, &list.sort_bytes, stream);
  return error != cudaSuccess ? error : LaunchPlan(list, stream);
}

cudaError_t LaunchEntriesTimesWeight(const EntryList& list, const ShardWeights& shard, bool adds, float* out, cudaStream_t stream) {
  const int64_t blocks = list.rows * ((shard.stride + kSlice - 1) / kSlice);
  TimesWeightKernel<<<static_cast<unsigned>(blocks), 32 * kGatherWarps, 0, stream>>>(
      list, static_cast<const __nv_bfloat16*>(shard.weight), static_cast<int32_t>(shard.stride), adds, out);
  return cudaGetLastError();
}

cudaError_t LaunchKeepEntries(const EntryList& list, const EntryList& kept, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  const auto copy = [&](auto* to, const auto* from, int64_t count) {
    if (error != cudaSuccess || count == 0) return;
    error = cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(*from), cudaMemcpyDeviceToDevice, stream);
  };
  copy(kept.column_keys, list.column_keys, list.pool.capacity);
  copy(kept.column_values, list.column_values, list.pool.capacity);
  copy(kept.dense.ids, list.dense.ids, list.dense.count);
  copy(kept.dense.matrix, list.dense.matrix, int64_t{list.rows} * list.dense.count);
  return error;
}

cudaError_t LaunchPlanKept(int64_t stride, Workspace* workspace, EntryList* kept, cudaStream_t stream) {
  TakePlan(stride, workspace, kept);
  return workspace->fits() ? LaunchPlan(*kept, stream) : cudaErrorMemoryAllocation;
}

cudaError_t LaunchAddEntriesTimesRows(const EntryList& list, const ConstMatrix& scaled, float factor, float* grad_weight,
                                      cudaStream_t stream) {
  unsigned blocks = 0;
  const cudaError_t error = PersistentBlocks(&blocks);
  if (error != cudaSuccess) return error;
  const auto stride = static_cast<int32_t>(scaled.stride);
  TimesRowsKernel<<<blocks, kWeightThreads, 0, stream>>>(list, static_cast<const __nv_bfloat16*>(scaled.data), stride, factor,
                                                         grad_weight);
  AddSplitsKernel<<<blocks, kWeightThreads, 0, stream>>>(list, stride, factor, grad_weight);
  return cudaGetLastError();
}

}  // namespace headwater::cuda
