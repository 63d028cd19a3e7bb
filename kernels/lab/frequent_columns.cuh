// What a list's frequent columns take as a small dense product each way, instead of a gather an entry (gradient_lists.cuh).
//
// A column of more than `threshold` entries gets a slot, the first of them up to kSlots in the order of their numbers. Its entries
// whose values are bf16 go into a matrix [rows, kSlots] and are zero in the list from then on; a target's stays where it is. W's
// rows of these columns go into [kSlots, width]. Then
//   grad_hidden's sums begin with matrix * rows of W; grad_weight gets matrix^T * scaled hidden states, a row a slot
// An entry costs a gather of 2 * width bytes each way, a slot 4 * rows * width operations: as much as 30 to 40 entries.

#ifndef HEADWATER_KERNELS_LAB_FREQUENT_COLUMNS_CUH_
#define HEADWATER_KERNELS_LAB_FREQUENT_COLUMNS_CUH_

#include "gradient_lists.cuh"

namespace headwater::lab {

struct FrequentView {
  int32_t slots;
  int32_t threshold;
  uint32_t* frequent;     // [vocab] 1 for a frequent column
  int32_t* block_counts;  // [blocks of 256 columns]
  int32_t* slot_of;       // [vocab] or -1
  int32_t* column_of;     // [slots] or -1; -1 at launch
  __nv_bfloat16* matrix;  // [rows, slots], zero at launch
  __nv_bfloat16* weight;  // [slots, width]
};

static __global__ void __launch_bounds__(256) CountFrequentKernel(const ListView list, const FrequentView view) {
  const auto column = blockIdx.x * blockDim.x + threadIdx.x;
  const auto count = static_cast<int32_t>(*list.count);
  bool frequent = false;
  if (column < static_cast<uint32_t>(list.vocab)) {
    const int32_t first = Partition(list.column_keys, count, [&](uint32_t key) { return key >> list.row_bits < column; });
    // The entry that makes the column frequent, if there is one.
    const int32_t last = first + view.threshold;
    frequent = last < count && __ldg(list.column_keys + last) >> list.row_bits == column;
    view.frequent[column] = frequent ? 1 : 0;
  }
  const int block_count = __syncthreads_count(frequent);
  if (threadIdx.x == 0) view.block_counts[blockIdx.x] = block_count;
}

static __global__ void __launch_bounds__(256) AssignSlotsKernel(const ListView list, const FrequentView view) {
  __shared__ int32_t before_block;
  __shared__ int32_t warp_counts[8];
  const auto thread = static_cast<int32_t>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  if (thread == 0) before_block = 0;
  __syncthreads();
  int32_t mine = 0;
  for (int32_t i = thread; i < static_cast<int32_t>(blockIdx.x); i += 256) mine += view.block_counts[i];
  if (mine > 0) atomicAdd(&before_block, mine);
  const auto column = static_cast<int32_t>(blockIdx.x) * 256 + thread;
  const bool frequent = column < list.vocab && view.frequent[column] != 0;
  const uint32_t ballot = __ballot_sync(0xffffffffu, frequent);
  if (lane == 0) warp_counts[warp] = __popc(ballot);
  __syncthreads();
  int32_t slot = before_block + __popc(ballot & ((1u << lane) - 1));
  for (int i = 0; i < warp; ++i) slot += warp_counts[i];
  if (column >= list.vocab) return;
  const bool taken = frequent && slot < view.slots;
  view.slot_of[column] = taken ? slot : -1;
  if (taken) view.column_of[slot] = column;
}

static __global__ void __launch_bounds__(256) SpreadKernel(const ListView list, const FrequentView view, float* column_values) {
  const auto index = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (index >= static_cast<int32_t>(*list.count)) return;
  const uint32_t key = list.column_keys[index];
  const int32_t slot = __ldg(view.slot_of + (key >> list.row_bits));
  if (slot < 0) return;
  const float value = column_values[index];
  const __nv_bfloat16 rounded = __float2bfloat16(value);
  if (__bfloat162float(rounded) != value) return;
  view.matrix[static_cast<int64_t>(key & ((1u << list.row_bits) - 1)) * view.slots + slot] = rounded;
  column_values[index] = 0.0f;
}

// A block a slot.
static __global__ void __launch_bounds__(256)
    GatherWeightKernel(const FrequentView view, const __nv_bfloat16* weight, int32_t width) {
  const int32_t column = view.column_of[blockIdx.x];
  for (auto i = static_cast<int32_t>(threadIdx.x); i < width / 8; i += 256) {
    reinterpret_cast<uint4*>(view.weight + static_cast<int64_t>(blockIdx.x) * width)[i] =
        column < 0 ? uint4{} : __ldg(reinterpret_cast<const uint4*>(weight + static_cast<int64_t>(column) * width) + i);
  }
}

// A block a slot: grad_weight[its column] += sums[slot].
static __global__ void __launch_bounds__(256)
    AddFrequentKernel(const FrequentView view, const float* sums, int32_t width, float* grad_weight) {
  const int32_t column = view.column_of[blockIdx.x];
  if (column < 0) return;
  const auto* const from = reinterpret_cast<const float4*>(sums + static_cast<int64_t>(blockIdx.x) * width);
  auto* const to = reinterpret_cast<float4*>(grad_weight + static_cast<int64_t>(column) * width);
  for (auto i = static_cast<int32_t>(threadIdx.x); i < width / 4; i += 256) {
    const float4 sum = from[i], old = to[i];
    to[i] = make_float4(old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w);
  }
}

}  // namespace headwater::lab

#endif  // HEADWATER_KERNELS_LAB_FREQUENT_COLUMNS_CUH_
