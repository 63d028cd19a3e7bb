// Both gradients of a loss head from a list of the logits' gradient's non-zero entries, instead of from a dense matrix E.
//
// An entry is (row, column, value): its key is column << row_bits | row, its value fp32 in E's units. A row's target is an entry
// as well, of value -S (below-the-floor has the rest: G = factor_row * value, factor = g / (1 + S)). Product 1 would append entries
// to one pool in any order; unused keys are kNoEntry.
//   SortLists         keys sorted by (column, row), and stably by row: two orders that do not depend on the order of the appends
//   PlanKernel        where each row begins; what each touched column is for grad_weight: a chunk, or several and a sum of them
//   GradHiddenKernel  grad_hidden[i] = factor_i * sum of value * W[column], bf16: a block a row and slice of the width
//   GradWeightKernel  grad_weight[j] += sum of value * factor_row * X[row], fp32: a warp a chunk and slice of the width
//   GradWeightSplitKernel  the same for columns of more than kChunk entries, whose chunks' sums the kernel before left in `partial`
//
// Slices    All units of one slice run before those of the next, so that a slice of W (or X) is what the L2 cache holds meanwhile.
// Order     Every sum has one writer and one order, given by the keys: results are repeatable to the bit. Only places in scratch
//           memory come from atomic additions.
// Requires  width a multiple of 512; keys of fewer than 32 bits; arrays 16-byte aligned; a key at most once.

#ifndef HEADWATER_KERNELS_LAB_GRADIENT_LISTS_CUH_
#define HEADWATER_KERNELS_LAB_GRADIENT_LISTS_CUH_

#include <cub/device/device_radix_sort.cuh>

#include "bench.cuh"

namespace headwater::lab {

constexpr uint32_t kNoEntry = 0xffffffffu;
constexpr int kChunk = 128;      // entries that one warp adds up
constexpr int kHeavyChunk = 32;  // chunks of more entries are dealt first, evenly

// Up to kChunk entries of one column. partial: -1, or the row of `partial` that takes their sum.
struct Chunk {
  int32_t column;
  int32_t first;
  int32_t count;
  int32_t partial;
};

// A column of several chunks; their sums are rows [first, first + count) of `partial`.
struct SplitColumn {
  int32_t column;
  int32_t first;
  int32_t count;
  int32_t unused;
};

struct PlanCounts {
  uint32_t heavy;     // chunks from the front of the array
  uint32_t light;     // chunks from its end, backwards
  uint32_t split;     // columns
  uint32_t partials;  // rows
};

// What a micro-batch's list is. All pointers are device memory.
struct ListView {
  int32_t rows;
  int32_t vocab;
  int32_t width;
  int32_t row_bits;
  int32_t capacity;             // entries the arrays have room for
  const uint32_t* count;        // entries
  const float* factor;          // [rows]
  const uint32_t* column_keys;  // [capacity] by (column, row)
  const float* column_values;
  const uint32_t* row_keys;  // [capacity] by (row, column)
  const float* row_values;
};

struct PlanView {
  int32_t* row_first;  // [rows + 1]
  float* weights;      // [capacity] column_values times their rows' factors
  PlanCounts* counts;  // zero at launch
  Chunk* chunks;       // [max_chunks]
  SplitColumn* splits;
  int32_t max_chunks;
};

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

// One thread an entry, a row and a column, whichever there are most of.
static __global__ void __launch_bounds__(256) PlanKernel(const ListView list, const PlanView plan) {
  const int32_t index = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const auto count = static_cast<int32_t>(*list.count);
  const uint32_t row_mask = (1u << list.row_bits) - 1;
  if (index < count) plan.weights[index] = list.column_values[index] * __ldg(list.factor + (list.column_keys[index] & row_mask));
  if (index <= list.rows) {
    plan.row_first[index] =
        Partition(list.row_keys, count, [&](uint32_t key) { return (key & row_mask) < static_cast<uint32_t>(index); });
  }
  int32_t first = 0, entries = 0;
  if (index < list.vocab) {
    const auto column = static_cast<uint32_t>(index);
    first = Partition(list.column_keys, count, [&](uint32_t key) { return key >> list.row_bits < column; });
    entries = Partition(list.column_keys + first, count - first, [&](uint32_t key) { return key >> list.row_bits <= column; });
  }
  // Columns of several chunks: few, each by itself.
  if (entries > kChunk) {
    const int32_t chunks = (entries + kChunk - 1) / kChunk;
    const auto place = static_cast<int32_t>(atomicAdd(&plan.counts->heavy, static_cast<uint32_t>(chunks)));
    const auto partial = static_cast<int32_t>(atomicAdd(&plan.counts->partials, static_cast<uint32_t>(chunks)));
    plan.splits[atomicAdd(&plan.counts->split, 1u)] = SplitColumn{index, partial, chunks, 0};
    for (int32_t i = 0; i < chunks; ++i) {
      plan.chunks[place + i] = Chunk{index, first + i * kChunk, min(kChunk, entries - i * kChunk), partial + i};
    }
  }
  const bool heavy = entries > kHeavyChunk && entries <= kChunk, light = entries > 0 && entries <= kHeavyChunk;
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
    const bool mine = kind == 0 ? heavy : light;
    const uint32_t ballot = __ballot_sync(0xffffffffu, mine);
    if (ballot == 0) continue;
    uint32_t base = 0;
    if (lane == 0) base = atomicAdd(kind == 0 ? &plan.counts->heavy : &plan.counts->light, static_cast<uint32_t>(__popc(ballot)));
    base = __shfl_sync(0xffffffffu, base, 0);
    const auto place = static_cast<int32_t>(base + static_cast<uint32_t>(__popc(ballot & ((1u << lane) - 1))));
    if (mine) plan.chunks[kind == 0 ? place : plan.max_chunks - 1 - place] = Chunk{index, first, entries, -1};
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

// kLanes lanes take an entry's eight columns each: a slice is 8 kLanes columns, and a block's parts of a row's entries are
// 32 / kLanes a warp. dense_sums [rows, width]: what the sums begin with, or null. `together` slices of a row run side by side,
// before the next row's.
template <int kLanes, int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
    GradHiddenKernel(const ListView list, const int32_t* row_first, const __nv_bfloat16* weight, __nv_bfloat16* grad_hidden,
                     const float* dense_sums, int32_t together) {
  constexpr int kPerWarp = 32 / kLanes, kParts = kWarps * kPerWarp, kColumns = 8 * kLanes, kUnroll = 8;
  static_assert(kLanes % kUnroll == 0, "a warp's 32 entries are a whole number of rounds");
  __shared__ float shared[kParts * kColumns];
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32, lane = static_cast<int32_t>(threadIdx.x) % 32;
  const auto block = static_cast<int32_t>(blockIdx.x);
  const int32_t within = block % (list.rows * together);
  const int32_t row = within / together, slice = block / (list.rows * together) * together + within % together;
  const int32_t first = __ldg(row_first + row), last = __ldg(row_first + row + 1);
  const __nv_bfloat16* const base = weight + slice * kColumns + lane % kLanes * 8;
  float sums[8] = {};
  for (int32_t begin = first; begin < last; begin += 32 * kWarps) {
    const int32_t index = begin + lane * kWarps + warp;
    const uint32_t key = index < last ? __ldg(list.row_keys + index) : 0;
    const float value = index < last ? __ldg(list.row_values + index) : 0.0f;
    const int32_t mine = min(32, (last - begin - warp + kWarps - 1) / kWarps);
    for (int32_t step = 0; step * kPerWarp < mine; step += kUnroll) {
      uint4 data[kUnroll];
      float factors[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int32_t entry = (step + i) * kPerWarp + lane / kLanes;
        const uint32_t column = __shfl_sync(0xffffffffu, key, entry) >> list.row_bits;
        factors[i] = __shfl_sync(0xffffffffu, value, entry);
        data[i] = entry < mine && factors[i] != 0.0f ? LoadEight(base + static_cast<int64_t>(column) * list.width) : uint4{};
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) AddEight(sums, data[i], factors[i]);
    }
  }
  auto* const stored = reinterpret_cast<float4*>(shared + (warp * kPerWarp + lane / kLanes) * kColumns + lane % kLanes * 8);
  stored[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  stored[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
  __syncthreads();
  const float factor = __ldg(list.factor + row);
  for (int32_t pair = static_cast<int32_t>(threadIdx.x); pair < kColumns / 2; pair += 32 * kWarps) {
    const int64_t at = static_cast<int64_t>(row) * list.width + slice * kColumns + 2 * pair;
    float x = 0.0f, y = 0.0f;
    if (dense_sums != nullptr) {
      const float2 sum = __ldcs(reinterpret_cast<const float2*>(dense_sums + at));
      x = sum.x;
      y = sum.y;
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float2 sum = reinterpret_cast<const float2*>(shared + part * kColumns)[pair];
      x += sum.x;
      y += sum.y;
    }
    *reinterpret_cast<__nv_bfloat162*>(grad_hidden + at) = __floats2bfloat162_rn(factor * x, factor * y);
  }
}

// A lane's eight sums are eight neighbouring columns. Exchanged between the lanes of a pair they become two groups of four whose
// stores fill whole sectors: of the pair's sixteen columns an even lane gets 0-3 and 8-11, an odd one 4-7 and 12-15.
__device__ __forceinline__ void ExchangeInPairs(float (&sums)[8], int32_t lane) {
  const bool odd = lane % 2 != 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float received = __shfl_xor_sync(0xffffffffu, odd ? sums[i] : sums[4 + i], 1);
    if (odd) {
      sums[i] = received;
    } else {
      sums[4 + i] = received;
    }
  }
}

// How a sum comes into grad_weight: read and written by the warp, the same after a prefetch into L2 two units before, or added by
// L2. A column has one writer in any case.
enum class Update { kReadWrite, kPrefetch, kReduce };

__device__ __forceinline__ void ReduceAdd(float* to, const float* sums) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(sums[0]), "f"(sums[1]), "f"(sums[2]),
               "f"(sums[3])
               : "memory");
}

// Persistent, kBlocks blocks a multiprocessor. A unit is a chunk and a slice of 256 kVectors columns.
template <int kVectors, Update kUpdate, int kBlocks>
__global__ void __launch_bounds__(128, kBlocks)
    GradWeightKernel(const ListView list, const PlanView plan, const __nv_bfloat16* hidden, float* grad_weight, float* partial) {
  constexpr int kUnroll = 4, kSlice = 256 * kVectors;
  struct Unit {
    Chunk chunk;
    int32_t slice;
  };
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const auto warps = static_cast<int32_t>(gridDim.x * blockDim.x / 32);
  const auto heavy = static_cast<int32_t>(plan.counts->heavy), chunks = heavy + static_cast<int32_t>(plan.counts->light);
  if (chunks == 0) return;
  const uint32_t row_mask = (1u << list.row_bits) - 1;
  int32_t number = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x) / 32, slice = 0;
  const auto take = [&] {
    while (number >= chunks) {
      number -= chunks;
      slice += kSlice;
    }
    Unit unit{{}, slice};
    if (slice < list.width) {
      const int32_t place = number < heavy ? number : plan.max_chunks - 1 - (number - heavy);
      const int4 words = __ldg(reinterpret_cast<const int4*>(plan.chunks + place));
      unit.chunk = Chunk{words.x, words.y, words.z, words.w};
    }
    number += warps;
    return unit;
  };
  const auto row_of = [&](const Unit& unit) {
    return (unit.chunk.partial < 0 ? grad_weight + static_cast<int64_t>(unit.chunk.column) * list.width
                                   : partial + static_cast<int64_t>(unit.chunk.partial) * list.width) +
           unit.slice;
  };
  // Two units ahead the chunk is on its way, one unit ahead its first entries.
  Unit unit = take(), next = take();
  uint32_t key = 0;
  float weight = 0.0f;
  if (lane < unit.chunk.count) {
    key = __ldg(list.column_keys + unit.chunk.first + lane);
    weight = __ldg(plan.weights + unit.chunk.first + lane);
  }
  while (unit.slice < list.width) {
    const Unit after = take();
    uint32_t next_key = 0;
    float next_weight = 0.0f;
    if (lane < next.chunk.count) {
      next_key = __ldg(list.column_keys + next.chunk.first + lane);
      next_weight = __ldg(plan.weights + next.chunk.first + lane);
    }
    if constexpr (kUpdate == Update::kPrefetch) {
      if (next.chunk.count > 0 && next.chunk.partial < 0 && lane < kSlice / 32) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row_of(next) + lane * 32));
      }
    }
    const Chunk chunk = unit.chunk;
    const bool whole = chunk.partial < 0;
    float* const to = row_of(unit) + lane / 2 * 16 + lane % 2 * 4;
    float4 before[2 * kVectors];
    if constexpr (kUpdate != Update::kReduce) {
#pragma unroll
      for (int i = 0; i < 2 * kVectors; ++i) {
        before[i] = whole ? __ldcs(reinterpret_cast<const float4*>(to + i / 2 * 256 + i % 2 * 8)) : float4{};
      }
    }
    float sums[kVectors][8] = {};
    const __nv_bfloat16* const base = hidden + unit.slice + lane * 8;
    for (int32_t begin = 0; begin < chunk.count; begin += 32) {
      if (begin > 0) {
        const bool there = begin + lane < chunk.count;
        key = there ? __ldg(list.column_keys + chunk.first + begin + lane) : 0;
        weight = there ? __ldg(plan.weights + chunk.first + begin + lane) : 0.0f;
      }
      const int32_t mine = min(32, chunk.count - begin);
      for (int32_t step = 0; step < mine; step += kUnroll) {
        uint4 data[kUnroll][kVectors];
        float factors[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          const uint32_t row = __shfl_sync(0xffffffffu, key, step + i) & row_mask;
          factors[i] = __shfl_sync(0xffffffffu, weight, step + i);
#pragma unroll
          for (int vector = 0; vector < kVectors; ++vector) {
            if (factors[i] != 0.0f) data[i][vector] = LoadEight(base + static_cast<int64_t>(row) * list.width + 256 * vector);
          }
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          if (factors[i] == 0.0f) continue;
#pragma unroll
          for (int vector = 0; vector < kVectors; ++vector) AddEight(sums[vector], data[i][vector], factors[i]);
        }
      }
    }
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      ExchangeInPairs(sums[vector], lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const sum = sums[vector] + 4 * half;
        float* const out = to + 256 * vector + 8 * half;
        if constexpr (kUpdate == Update::kReduce) {
          if (whole) {
            ReduceAdd(out, sum);
          } else {
            *reinterpret_cast<float4*>(out) = make_float4(sum[0], sum[1], sum[2], sum[3]);
          }
        } else {
          const float4 old = before[2 * vector + half];
          __stcs(reinterpret_cast<float4*>(out), make_float4(old.x + sum[0], old.y + sum[1], old.z + sum[2], old.w + sum[3]));
        }
      }
    }
    unit = next;
    next = after;
    key = next_key;
    weight = next_weight;
  }
}

// Persistent. A unit is a split column and 128 of its width.
static __global__ void __launch_bounds__(128)
    GradWeightSplitKernel(const ListView list, const PlanView plan, const float* partial, float* grad_weight) {
  constexpr int kUnroll = 8;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const auto warps = static_cast<int32_t>(gridDim.x * blockDim.x / 32);
  const int32_t slices = list.width / 128, units = static_cast<int32_t>(plan.counts->split) * slices;
  for (int32_t unit = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x) / 32; unit < units; unit += warps) {
    const SplitColumn split = plan.splits[unit / slices];
    const int32_t column = unit % slices * 128 + lane * 4;
    auto* const to = reinterpret_cast<float4*>(grad_weight + static_cast<int64_t>(split.column) * list.width + column);
    const float4 old = *to;
    float4 sum{};
    for (int32_t begin = 0; begin < split.count; begin += kUnroll) {
      float4 parts[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t at = static_cast<int64_t>(split.first + begin + i) * list.width + column;
        parts[i] = begin + i < split.count ? __ldcs(reinterpret_cast<const float4*>(partial + at)) : float4{};
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        sum = make_float4(sum.x + parts[i].x, sum.y + parts[i].y, sum.z + parts[i].z, sum.w + parts[i].w);
      }
    }
    *to = make_float4(old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w);
  }
}

}  // namespace headwater::lab

#endif  // HEADWATER_KERNELS_LAB_GRADIENT_LISTS_CUH_
