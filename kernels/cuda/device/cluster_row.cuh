// A row in the shared memory of a cluster: slices, the rings of pieces that the copy engine fills, and sums over the cluster.
// sm_90a: kernels that call these functions have their body inside #if defined(__CUDA_ARCH_FEAT_SM90_ALL).
//
// Mapping   A cluster of 1, 2, 4, 8 or 16 CTAs owns a row, each of its warps a slice of at most kMaxWarpColumns consecutive
// columns; clusters stride over rows. A lane takes four consecutive columns of every 128.
// CTAs      16 warps, one CTA a multiprocessor.
// Rings     Every warp has its own, of kSlots slots; a slot takes kSlotColumns columns of both inputs: a row and half of the next.
// The warp fills it itself, in order, as it frees it in order: nobody waits for another warp, no warp is spent on copying, and 128
// registers are left for each thread.
//
// Why a refilled slot cannot be read too late. The bulk copies into a slot are issued by one lane after a __syncwarp() that follows
// the reads of all lanes. Reads need no proxy fence: they have returned their values when they are ordered so. Writes to a slot do
// (FenceProxyAsync() by each writing lane before the __syncwarp()): otherwise they could reach shared memory after the copy's.
#ifndef HEADWATER_KERNELS_CUDA_DEVICE_CLUSTER_ROW_CUH_
#define HEADWATER_KERNELS_CUDA_DEVICE_CLUSTER_ROW_CUH_

#include <cstdint>

#include "kernels/cuda/device/sm90_ptx.cuh"

namespace headwater::cuda::cluster_row {

constexpr int kMaxWarps = 16;
constexpr int kMaxThreads = 32 * kMaxWarps;
constexpr int kMaxCluster = 16;
constexpr int kInputs = 2;
constexpr int kVectors = 8;          // of four columns that a lane has
constexpr int kVectorColumns = 128;  // a warp's
constexpr int kMaxWarpColumns = kVectors * kVectorColumns;
constexpr int kSlotVectors = 4;
constexpr int kSlotColumns = kSlotVectors * kVectorColumns;
constexpr int kParts = kVectors / kSlotVectors;  // slots that a row takes, at most
constexpr int kVectorBytes = 4 * kVectorColumns;
constexpr int kInputBytes = 4 * kSlotColumns;
constexpr int kSlotBytes = kInputs * kInputBytes;
constexpr int kSlots = 3;
constexpr int kSliceAlignment = 64;                    // columns: whole lines of both fp32 and 16-bit rows
constexpr int kRingBytes = kSlots * (kSlotBytes + 8);  // one warp's

// --- Sums over the cluster
//
// A channel carries a few floats from every warp of a cluster to all of its CTAs, by asynchronous stores that count on a barrier
// there; every warp adds up what came, in the same order. The parts of an exchange are apart, because most of one is waiting, for
// shuffles and for the slowest warp: WarpMerge's steps go beside another's, and work goes between Post() and Wait(). Nobody waits
// for the other warps of its CTA first: that and one warp's reducing for all are two more chains in each exchange.
//
// Two buffers are enough. A warp posts number k + 2 only when it has collected k + 1, that is when every warp has posted k + 1, and
// each did so after it had loaded k: nobody reads buffer k any more.

constexpr int kMaxSlices = kMaxWarps * kMaxCluster;

// This thread's number in its warp, looked at anew each time: addresses that are made of it are not kept in registers over a loop,
// where there are none to spare.
__device__ __forceinline__ uint32_t Lane() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
// Into another CTA's shared memory; its four bytes complete on that CTA's barrier.
__device__ __forceinline__ void StoreFloatRemote(uint32_t remote_address, float value, uint32_t remote_barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote_address),
               "r"(__float_as_uint(value)), "r"(remote_barrier)
               : "memory");
}
__device__ __forceinline__ float4 LoadVector(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void StoreVector(uint32_t address, const float4& v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

struct Sum {
  static constexpr float kNothing = 0.0f;
  static __device__ __forceinline__ float Merge(float a, float b) { return a + b; }
};
// The larger; the other one of a NaN. Of no values: 0 (Largest) or the lowest number (Maximum).
struct Largest {
  static constexpr float kNothing = 0.0f;
  static __device__ __forceinline__ float Merge(float a, float b) { return fmaxf(a, b); }
};
struct Maximum {
  static constexpr float kNothing = -3.0e38f;
  static __device__ __forceinline__ float Merge(float a, float b) { return fmaxf(a, b); }
};

// kCount values (2 or 4) that a warp's lanes reduce in five steps, each of them a shuffle whose answer is waited for: several of
// these go side by side (MergeTogether). Then lanes [32 / kCount * i, 32 / kCount * (i + 1)) have value i over the warp
// in values[0], all of them the same bits, because the operations commute.
template <class Operation, int kCount>
struct WarpMerge {
  float values[kCount];

  template <int kStep>
  __device__ __forceinline__ void Step() {
    static_assert(kCount == 2 || kCount == 4);
    if constexpr ((kCount >> kStep) >= 2) {
      // Half of the values for each half of the lanes.
      constexpr int kKept = kCount >> (kStep + 1);
      const bool upper = (Lane() & (16 >> kStep)) != 0;
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const float given = __shfl_xor_sync(0xffffffffu, upper ? values[i] : values[kKept + i], 16 >> kStep);
        values[i] = Operation::Merge(upper ? values[kKept + i] : values[i], given);
      }
    } else {
      values[0] = Operation::Merge(values[0], __shfl_xor_sync(0xffffffffu, values[0], 16 >> kStep));
    }
  }
};
// One value of the lower half of the lanes and one of the upper.
template <class Operation>
struct HalfWarpMerge {
  float value;
  template <int kStep>
  __device__ __forceinline__ void Step() {
    if constexpr (kStep > 0) value = Operation::Merge(value, __shfl_xor_sync(0xffffffffu, value, 16 >> kStep));
  }
};
template <class... Merges>
__device__ __forceinline__ void MergeTogether(Merges&... merges) {
  (merges.template Step<0>(), ...);
  (merges.template Step<1>(), ...);
  (merges.template Step<2>(), ...);
  (merges.template Step<3>(), ...);
  (merges.template Step<4>(), ...);
}

// One channel of kCount values (2 or 4), at `base` in shared memory (kBytes, at a multiple of 16). Same members in every thread.
template <int kCount>
struct Channel {
  static constexpr int kBytes = 2 * (8 + kCount * 4 * kMaxSlices);

  uint32_t base;
  uint32_t count;  // of exchanges collected

  __device__ __forceinline__ uint32_t Barrier() const { return base + 8 * (count & 1); }
  // Of slice 0; the others follow, four bytes each.
  __device__ __forceinline__ uint32_t Values(int value) const {
    return base + 16 + ((count & 1) * kCount + static_cast<uint32_t>(value)) * (4 * kMaxSlices);
  }
  // By all threads.
  __device__ __forceinline__ void Init() const {
    if (threadIdx.x == 0) {
      sm90::BarrierInit(base, 1);
      sm90::BarrierInit(base + 8, 1);
    }
    for (uint32_t offset = 16 + 16 * threadIdx.x; offset < kBytes; offset += 16 * blockDim.x) StoreVector(base + offset, {});
  }

  // Each of these by whole warps, all of the cluster's. `slices`: its warps; `slice`: this one's number. `merge`: after its steps.
  template <class Operation>
  __device__ __forceinline__ void Post(const WarpMerge<Operation, kCount>& merge, int cluster, int slices, int slice) const {
    if (threadIdx.x == 0) sm90::BarrierArriveExpect(Barrier(), static_cast<uint32_t>(4 * kCount * slices));
    constexpr uint32_t kLanes = 32 / kCount;
    const uint32_t lane = Lane(), target = lane % kLanes, ctas = static_cast<uint32_t>(cluster);
    const uint32_t own = Values(0) + lane / kLanes * (4 * kMaxSlices) + 4 * static_cast<uint32_t>(slice);
    if (target < ctas) {
      StoreFloatRemote(sm90::ClusterAddress(own, target), merge.values[0], sm90::ClusterAddress(Barrier(), target));
    }
    if (kLanes < kMaxCluster && kLanes + target < ctas) {
      StoreFloatRemote(sm90::ClusterAddress(own, kLanes + target), merge.values[0],
                       sm90::ClusterAddress(Barrier(), kLanes + target));
    }
  }
  __device__ __forceinline__ void Wait() const {
    // A wait that sees other CTAs' stores empties the L1 cache at each try: one, when it cannot fail any more.
    sm90::BarrierWait(Barrier(), (count >> 1) & 1);
    sm90::BarrierWaitCluster(Barrier(), (count >> 1) & 1);
  }
  // After Wait(): this lane's share of what came, still to be merged.
  template <class Operation>
  __device__ __forceinline__ void Load(WarpMerge<Operation, kCount>& merge, int slices) const {
    constexpr float kNothing = Operation::kNothing;
    const auto lane = static_cast<int>(Lane());
#pragma unroll
    for (int i = 0; i < kCount; ++i) merge.values[i] = kNothing;
    const auto add = [&](int first) {  // four slices a lane
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int slice = first + 4 * lane;
        float4 four = LoadVector(Values(i) + static_cast<uint32_t>(4 * slice));
        // What is not there is 0 (Init), which is nothing to most.
        if constexpr (kNothing != 0.0f) {
          if (slice >= slices) four.x = four.y = kNothing;
          if (slice + 2 >= slices) four.z = four.w = kNothing;  // they are even in number
        }
        merge.values[i] =
            Operation::Merge(merge.values[i], Operation::Merge(Operation::Merge(four.x, four.y), Operation::Merge(four.z, four.w)));
      }
    };
    if (slices > kMaxSlices / 2) add(kMaxSlices / 2);
    add(0);
  }
  // After the steps: the same values in every thread of the cluster.
  template <class Operation>
  __device__ __forceinline__ void Collect(const WarpMerge<Operation, kCount>& merge, float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = __shfl_sync(0xffffffffu, merge.values[0], 32 / kCount * i);
    ++count;
  }

  template <class Operation>
  __device__ __forceinline__ void Exchange(float (&values)[kCount], int cluster, int slices, int slice) {
    WarpMerge<Operation, kCount> merge;
#pragma unroll
    for (int i = 0; i < kCount; ++i) merge.values[i] = values[i];
    MergeTogether(merge);
    Post(merge, cluster, slices, slice);
    Wait();
    Load(merge, slices);
    MergeTogether(merge);
    Collect(merge, values);
  }
};

// --- A warp's ring

struct Ring {
  uint32_t base;      // kSlots * kSlotBytes
  uint32_t barriers;  // 8 * kSlots bytes

  __device__ __forceinline__ uint32_t Slot(uint32_t slot) const { return base + slot * kSlotBytes; }
  __device__ __forceinline__ uint32_t Full(uint32_t slot) const { return barriers + 8 * slot; }
  __device__ __forceinline__ void Init() const {
    for (uint32_t slot = 0; slot < kSlots; ++slot) sm90::BarrierInit(Full(slot), 1);
  }
  static __device__ __forceinline__ uint32_t Next(uint32_t slot) { return slot + 1 == kSlots ? 0 : slot + 1; }
};

// One warp's slices of its cluster's rows, as they go through its ring. All members are the same in a warp's lanes.
struct SliceSource {
  const float* slices[kInputs];  // of row 0
  int64_t strides[kInputs];
  int32_t row_count;
  int32_t row_step;
  int32_t columns[kParts];  // of each part of the slice, rounded up to whole 16 bytes, which the strides have
  int32_t parts;            // of a row, 1 to kParts

  // By a whole warp. Loads piece `piece`, counted from the first part of `row`, into a slot; nothing, if there is no such row.
  __device__ __forceinline__ void Load(const Ring& ring, uint32_t slot, int32_t row, int piece) const {
    static_assert(kParts == 2);
    const bool whole = parts == 1;
    const int32_t first = whole ? 0 : piece % 2 * kSlotColumns;
    row += row_step * (whole ? piece : piece / 2);
    if (row >= row_count) return;
    if (sm90::Elect()) {
      const auto bytes = static_cast<uint32_t>(4 * (whole ? columns[0] : columns[piece % 2]));
      sm90::BarrierArriveExpect(ring.Full(slot), kInputs * bytes);
      if (bytes > 0) {
#pragma unroll
        for (int i = 0; i < kInputs; ++i) {
          sm90::BulkLoad(ring.Slot(slot) + i * kInputBytes, slices[i] + row * strides[i] + first, bytes, ring.Full(slot),
                         sm90::kEvictFirst);
        }
      }
    }
  }
};

// How a row of so many columns is spread.
struct Layout {
  int cluster = 0;       // CTAs; 0: does not fit
  int warps = 0;         // of a CTA
  int warp_columns = 0;  // of a slice
};

inline Layout LayoutFor(int64_t columns) {
  for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
    if (columns > int64_t{kMaxWarpColumns} * kMaxWarps * cluster) continue;
    // No more warps than it takes, because each works on whole slots: V = 151936 takes 2.98 ms by 10 warps, 3.34 by 12, 3.78 by 16.
    const int64_t needed = (columns + int64_t{kMaxWarpColumns} * cluster - 1) / (int64_t{kMaxWarpColumns} * cluster);
    const int64_t warps = cluster == 1 ? kMaxWarps : (needed + 1) / 2 * 2, slices = warps * cluster;
    const int64_t slice = (columns + slices - 1) / slices;
    return {cluster, static_cast<int>(warps), static_cast<int>((slice + kSliceAlignment - 1) / kSliceAlignment * kSliceAlignment)};
  }
  return {};
}

}  // namespace headwater::cuda::cluster_row

#endif  // HEADWATER_KERNELS_CUDA_DEVICE_CLUSTER_ROW_CUH_
