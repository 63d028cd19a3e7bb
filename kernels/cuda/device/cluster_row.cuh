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
// Why a refilled slot cannot be read too late. The bulk copies into a slot are issued by lane 0 after a __syncwarp() that follows
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
// A channel carries kUnits pairs of floats from every CTA to every CTA: warps reduce, one warp reduces the CTA's and sends it to
// all CTAs by asynchronous stores, every thread adds up what came. Between Send() and Receive() a thread may do other work.
//
// Two buffers are enough. A CTA sends number k + 2 only when all its threads have received number k + 1, that is when every CTA has
// sent k + 1, and it did so after all its warps had received k: nobody reads buffer k any more. The same holds for the warps'
// results and for the named barrier: a warp arrives for k + 1 after it has received k, so after the reducing warp had passed it.

static_assert(kMaxWarps == 16 && kMaxCluster == 16, "sums over both are taken over 16 lanes");
constexpr int kUnitBytes = 16 * 8;
template <int kUnits>
constexpr int kChannelBytes = 2 * (8 + 2 * kUnits * kUnitBytes);

__device__ __forceinline__ void StoreFloat(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ float LoadFloat(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
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

// Over 16 neighbouring lanes; all of them get the same bits, because the operations commute.
template <class Operation>
__device__ __forceinline__ float MergeHalf(float value) {
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) {
    value = Operation::Merge(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}
// Over a warp: of x in lanes 0 to 15, of y in the others.
template <class Operation>
__device__ __forceinline__ float MergeWarp(float2 value) {
  const bool upper = (threadIdx.x & 16) != 0;
  const float given = __shfl_xor_sync(0xffffffffu, upper ? value.x : value.y, 16);
  return MergeHalf<Operation>(Operation::Merge(upper ? value.y : value.x, given));
}

// One channel, at `base` in shared memory (kChannelBytes). Same members in every thread.
template <int kUnits>
struct Channel {
  uint32_t base;
  uint32_t count;  // of exchanges received

  __device__ __forceinline__ uint32_t Barrier(uint32_t parity) const { return base + 8 * parity; }
  __device__ __forceinline__ uint32_t Partial(uint32_t parity, int unit, int cta) const {
    return base + 16 + static_cast<uint32_t>(parity * kUnits + unit) * kUnitBytes + 8 * cta;
  }
  __device__ __forceinline__ uint32_t WarpPartial(uint32_t parity, int unit, int warp) const {
    return base + 16 + static_cast<uint32_t>((2 + parity) * kUnits + unit) * kUnitBytes + 8 * warp;
  }
  __device__ __forceinline__ void Init() const {
    sm90::BarrierInit(Barrier(0), 1);
    sm90::BarrierInit(Barrier(1), 1);
  }

  // By all threads. `named_barrier` is the channel's own. The last unit is reduced by LastOperation, the others by Operation.
  template <class Operation, class LastOperation>
  __device__ __forceinline__ void Send(float2 (&values)[kUnits], uint32_t named_barrier, int cluster, int cta_rank) const {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int warps = static_cast<int>(blockDim.x) / 32;
    const uint32_t parity = count & 1;
    const int half = lane / 16, index = lane % 16;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const float merged = unit == kUnits - 1 ? MergeWarp<LastOperation>(values[unit]) : MergeWarp<Operation>(values[unit]);
      if (index == 0) StoreFloat(WarpPartial(parity, unit, warp) + 4 * half, merged);
    }
    __syncwarp();  // the named barrier is a whole warp's
    // The reducing warp changes, so that none falls behind.
    if (warp != static_cast<int>(count % warps)) {
      sm90::NamedBarrierArrive(named_barrier, blockDim.x);
      return;
    }
    sm90::NamedBarrierSync(named_barrier, blockDim.x);
    float own[kUnits];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      own[unit] = MergePartials<Operation, LastOperation>(unit, WarpPartial(parity, unit, 0), warps);
    }
    if (lane == 0) sm90::BarrierArriveExpect(Barrier(parity), static_cast<uint32_t>(8 * kUnits * cluster));
    if (index < cluster) {
      const uint32_t barrier = sm90::ClusterAddress(Barrier(parity), index);
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        StoreFloatRemote(sm90::ClusterAddress(Partial(parity, unit, cta_rank) + 4 * half, index), own[unit], barrier);
      }
    }
  }

  // By all threads, after Send(): the same values in every thread of the cluster.
  template <class Operation, class LastOperation>
  __device__ __forceinline__ void Receive(float2 (&values)[kUnits], int cluster) {
    const uint32_t parity = count & 1;
    const bool upper = (threadIdx.x & 16) != 0;
    // A wait that sees other CTAs' stores empties the L1 cache at each try: one, when it cannot fail any more.
    sm90::BarrierWait(Barrier(parity), (count >> 1) & 1);
    sm90::BarrierWaitCluster(Barrier(parity), (count >> 1) & 1);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const float own = MergePartials<Operation, LastOperation>(unit, Partial(parity, unit, 0), cluster);
      const float other = __shfl_xor_sync(0xffffffffu, own, 16);
      values[unit] = upper ? make_float2(other, own) : make_float2(own, other);
    }
    ++count;
  }

 private:
  // Of the `present` pairs at `address`: x in lanes 0 to 15, y in the others.
  template <class Operation, class LastOperation>
  static __device__ __forceinline__ float MergePartials(int unit, uint32_t address, int present) {
    const int lane = static_cast<int>(threadIdx.x) % 32, index = lane % 16;
    const float nothing = unit == kUnits - 1 ? LastOperation::kNothing : Operation::kNothing;
    const float value = index < present ? LoadFloat(address + 8 * index + 4 * (lane / 16)) : nothing;
    return unit == kUnits - 1 ? MergeHalf<LastOperation>(value) : MergeHalf<Operation>(value);
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

// Fills a ring with the slices of a cluster's rows, part by part. All members but the sources are the same in a cluster's warps.
struct RingFiller {
  const float* sources[kInputs];  // the slice's next part, at multiples of 16 bytes
  int64_t steps[kInputs];         // from a row's first part to the next row's, less `parts` parts
  int32_t rows;                   // still to be loaded, the current one included
  int32_t parts;                  // of a row
  int32_t part = 0;               // next
  uint32_t slot = 0;

  // By a whole warp. `length`: of its slice, rounded up to whole 16 bytes, which the stride has; a part beyond it is empty.
  __device__ __forceinline__ void LoadNext(const Ring& ring, int32_t length, int32_t lane) {
    if (rows <= 0) return;
    if (lane == 0) {
      const int32_t columns = min(kSlotColumns, max(0, length - part * kSlotColumns));
      sm90::BarrierArriveExpect(ring.Full(slot), static_cast<uint32_t>(4 * kInputs * columns));
      if (columns > 0) {
#pragma unroll
        for (int i = 0; i < kInputs; ++i) {
          sm90::BulkLoad(ring.Slot(slot) + i * kInputBytes, sources[i], static_cast<uint32_t>(4 * columns), ring.Full(slot),
                         sm90::kEvictFirst);
        }
      }
    }
    __syncwarp();
    slot = Ring::Next(slot);
    ++part;
    const bool row_ends = part == parts;
#pragma unroll
    for (int i = 0; i < kInputs; ++i) sources[i] += kSlotColumns + (row_ends ? steps[i] : 0);
    if (row_ends) {
      part = 0;
      --rows;
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
