// A row in the shared memory of a cluster: slices, the ring of pieces that the copy engine fills, and sums over the cluster.
// sm_90a: kernels that call these functions have their body inside #if defined(__CUDA_ARCH_FEAT_SM90_ALL).
//
// Mapping   A cluster of 1, 2, 4, 8 or 16 CTAs owns a row, each of them a slice of consecutive columns; clusters stride over rows.
// CTAs      Up to 16 compute warps, an even number, and service warps after them; one CTA a multiprocessor. A slice has one or two
//           parts, of kSlotColumns consecutive columns for each compute warp; a lane takes four consecutive columns of every 128.
// Ring      kSlots slots; a slot takes one part of both inputs: a row and half of the next.
// Service   What a row needs once, and not once a column, is the service warps': one fills the ring's slots as they come free,
//           others add up what the CTA's threads have summed, then what the cluster's CTAs have, and leave in shared memory what
//           follows from that. A compute warp stores its lanes' sums and goes on with other work: it takes part in no shuffle, no
//           exchange and no arithmetic of a row, chains of latency that all warps of a multiprocessor would wait out together.
//
// Why a refilled slot cannot be read too late. A warp arrives at a slot's barrier after its reads. Shared memory takes both in that
// order, whether or not the values have come by then. The copy is only issued when the arrival has been seen. So reads take no
// proxy fence here, as with any consumer of a ring that the copy engine fills. Writes to a slot do (FenceProxyAsync() by each
// writing lane before the arrival): otherwise they could reach shared memory after the copy's.
#ifndef HEADWATER_KERNELS_CUDA_DEVICE_CLUSTER_ROW_CUH_
#define HEADWATER_KERNELS_CUDA_DEVICE_CLUSTER_ROW_CUH_

#include <cstdint>

#include "kernels/cuda/device/sm90_ptx.cuh"

namespace headwater::cuda::cluster_row {

constexpr int kMaxWarps = 16;     // that compute
constexpr int kServiceWarps = 4;  // after them, from a multiple of four on
constexpr int kMaxThreads = 32 * (kMaxWarps + kServiceWarps);
constexpr int kMaxCluster = 16;
constexpr int kInputs = 2;
constexpr int kVectors = 8;          // of four columns that a lane has
constexpr int kVectorColumns = 128;  // a warp's
constexpr int kMaxWarpColumns = kVectors * kVectorColumns;
constexpr int kSlotVectors = 4;
constexpr int kSlotColumns = kSlotVectors * kVectorColumns;  // a warp's
constexpr int kParts = kVectors / kSlotVectors;              // slots that a row takes, at most
constexpr int kVectorBytes = 4 * kVectorColumns;
constexpr int kWarpBytes = 4 * kSlotColumns;  // of one input
constexpr int kInputBytes = kMaxWarps * kWarpBytes;
constexpr int kSlotBytes = kInputs * kInputBytes;
constexpr int kSlots = 3;
constexpr int kSliceAlignment = 64;  // columns a warp: whole lines of both fp32 and 16-bit rows

// This thread's number in its warp, read again each time. Addresses that are made of it are then not kept in registers over a loop,
// where registers are short.
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
__device__ __forceinline__ float LoadFloat(uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void LoadPair(uint32_t address, float& x, float& y) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(address) : "memory");
}
__device__ __forceinline__ void StoreVector(uint32_t address, const float4& v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
__device__ __forceinline__ void StorePair(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

struct Sum {
  static constexpr float kNothing = 0.0f;
  static __device__ __forceinline__ float Merge(float a, float b) { return a + b; }
};
// The larger of two values; of a NaN and a number, the number. Without values: 0 (Largest) or the lowest number (Maximum).
struct Largest {
  static constexpr float kNothing = 0.0f;
  static __device__ __forceinline__ float Merge(float a, float b) { return fmaxf(a, b); }
};
struct Maximum {
  static constexpr float kNothing = -3.0e38f;
  static __device__ __forceinline__ float Merge(float a, float b) { return fmaxf(a, b); }
};

// Merges kCount values (2 or 4) of a warp's lanes in five steps. Each step is a shuffle whose answer is waited for, so several
// merges run side by side (MergeTogether). Afterwards lanes [32 / kCount * i, 32 / kCount * (i + 1)) have value i over the warp in
// values[0]. All lanes have the same bits, because the operations commute.
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

// --- Sums over the cluster
//
// A few floats of every computing thread of a cluster, merged for all of its CTAs, always in the same order. Compute warps Give().
// A service warp takes its CTA's values and sends them to the cluster's CTAs by asynchronous stores that count on a barrier there.
// Then it merges what arrives. The result travels back in a Message.
//
// One buffer is enough for the threads' values: they give again only after the message that follows from it. Until they do, a
// thread may keep other values there. Between CTAs two buffers are enough. A service warp sends number k + 2 only when it has
// collected k + 1. By then every CTA has sent k + 1, and has loaded k before that.

// Exchanges kCount values (2 or 4) a thread, at `base` in shared memory (kBytes, at a multiple of 16).
template <int kCount>
struct Exchange {
  static_assert(kCount == 2 || kCount == 4);
  static constexpr int kArrived = 8;    // offset of the barriers of the cluster's values, after that of the threads' values
  static constexpr int kArrivals = 32;  // and of these values
  static constexpr int kGiven = kArrivals + 2 * kCount * 4 * kMaxCluster;
  static constexpr int kBytes = kGiven + 32 * kMaxWarps * kCount * 4;
  static constexpr uint32_t kLanes = 32 / kCount;

  uint32_t base;
  uint32_t count;  // of exchanges collected, in the copy that the service warp has

  // By one thread.
  __device__ __forceinline__ void Init(int warps) const {
    sm90::BarrierInit(base, static_cast<uint32_t>(warps));
    sm90::BarrierInit(base + kArrived, 1);
    sm90::BarrierInit(base + kArrived + 8, 1);
  }
  __device__ __forceinline__ uint32_t Given(uint32_t thread) const { return base + kGiven + 4 * kCount * thread; }

  // By a whole compute warp.
  __device__ __forceinline__ void Give(uint32_t thread, const float (&values)[kCount]) const {
    if constexpr (kCount == 4) {
      StoreVector(Given(thread), make_float4(values[0], values[1], values[2], values[3]));
    } else {
      StorePair(Given(thread), values[0], values[1]);
    }
    __syncwarp();
    if (thread % 32 == 0) sm90::BarrierArrive(base);
  }

  // These methods are called by one service warp of each CTA. Take(): the values of its CTA's `warps` compute warps, one share a
  // lane, still to be merged.
  template <class Operation>
  __device__ __forceinline__ void Take(WarpMerge<Operation, kCount>& merge, int warps) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) merge.values[i] = Operation::kNothing;
    sm90::BarrierWait(base, count & 1);
    const uint32_t own = base + kGiven + 16 * Lane();
    const auto add = [&](const float4& four) {
      if constexpr (kCount == 4) {
        merge.values[0] = Operation::Merge(merge.values[0], four.x);
        merge.values[1] = Operation::Merge(merge.values[1], four.y);
        merge.values[2] = Operation::Merge(merge.values[2], four.z);
        merge.values[3] = Operation::Merge(merge.values[3], four.w);
      } else {
        merge.values[0] = Operation::Merge(merge.values[0], Operation::Merge(four.x, four.z));
        merge.values[1] = Operation::Merge(merge.values[1], Operation::Merge(four.y, four.w));
      }
    };
    constexpr int kLoads = kMaxWarps * kCount / 4, kTogether = 4;  // of 512 bytes
    const int loads = warps * kCount / 4;
    if (loads == kLoads) {
#pragma unroll
      for (int first = 0; first < kLoads; first += kTogether) {
        float4 four[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) four[i] = LoadVector(own + 512 * (first + i));
#pragma unroll
        for (int i = 0; i < kTogether; ++i) add(four[i]);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < loads; ++i) add(LoadVector(own + 512 * i));
    }
  }
  // The merged ones to all CTAs.
  template <class Operation>
  __device__ __forceinline__ void Send(const WarpMerge<Operation, kCount>& merge, int cluster, int cta) const {
    const uint32_t lane = Lane(), target = lane % kLanes, ctas = static_cast<uint32_t>(cluster);
    if (lane == 0) sm90::BarrierArriveExpect(Arrived(), static_cast<uint32_t>(4 * kCount * cluster));
    const uint32_t place = Arrivals(lane / kLanes) + 4 * static_cast<uint32_t>(cta);
    if (target < ctas) {
      StoreFloatRemote(sm90::ClusterAddress(place, target), merge.values[0], sm90::ClusterAddress(Arrived(), target));
    }
    if (kLanes < kMaxCluster && kLanes + target < ctas) {
      StoreFloatRemote(sm90::ClusterAddress(place, kLanes + target), merge.values[0],
                       sm90::ClusterAddress(Arrived(), kLanes + target));
    }
  }
  // The same values in all lanes of all service warps.
  template <class Operation>
  __device__ __forceinline__ void Collect(float (&values)[kCount], int cluster) {
    // A wait that sees other CTAs' stores empties the L1 cache at each try: one, when it cannot fail any more.
    sm90::BarrierWait(Arrived(), (count >> 1) & 1);
    sm90::BarrierWaitCluster(Arrived(), (count >> 1) & 1);
    // Every lane merges all of them, which takes no shuffles.
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = Operation::kNothing;
    const auto add = [&](int first) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float4 four = LoadVector(Arrivals(i) + 4 * first);
        values[i] =
            Operation::Merge(values[i], Operation::Merge(Operation::Merge(four.x, four.y), Operation::Merge(four.z, four.w)));
      }
    };
    if (cluster >= 4) {
      add(0);
      if (cluster >= 8) add(4);
      if (cluster == 16) {
        add(8);
        add(12);
      }
    } else {
#pragma unroll 1
      for (int source = 0; source < cluster; ++source) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) values[i] = Operation::Merge(values[i], LoadFloat(Arrivals(i) + 4 * source));
      }
    }
    ++count;
  }
  template <class Operation>
  __device__ __forceinline__ void Run(float (&values)[kCount], int warps, int cluster, int cta) {
    WarpMerge<Operation, kCount> merge;
    Take(merge, warps);
    MergeTogether(merge);
    Send(merge, cluster, cta);
    Collect<Operation>(values, cluster);
  }

 private:
  __device__ __forceinline__ uint32_t Arrived() const { return base + kArrived + 8 * (count & 1); }
  __device__ __forceinline__ uint32_t Arrivals(uint32_t value) const {
    return base + kArrivals + ((count & 1) * kCount + value) * (4 * kMaxCluster);
  }
};

// Twelve floats from a service warp to its CTA's compute warps, at `base` in shared memory (kBytes, at a multiple of 16). The next
// message is put down when every warp has given something after it has read this one.
struct Message {
  static constexpr int kBytes = 64;
  uint32_t base;

  // By one thread.
  __device__ __forceinline__ void Init() const { sm90::BarrierInit(base, 1); }
  __device__ __forceinline__ void Put(const float4& first, const float4& second, const float4& third) const {
    StoreVector(base + 16, first);
    StoreVector(base + 32, second);
    StoreVector(base + 48, third);
    sm90::BarrierArrive(base);
  }
  // By whole compute warps. `parity`: of the number of messages before this one; it is turned.
  __device__ __forceinline__ void Wait(uint32_t& parity) const {
    sm90::BarrierWait(base, parity);
    parity ^= 1;
  }
  __device__ __forceinline__ float4 First() const { return LoadVector(base + 16); }
  __device__ __forceinline__ float4 Second() const { return LoadVector(base + 32); }
  __device__ __forceinline__ float4 Third() const { return LoadVector(base + 48); }
};

// --- The ring

struct Ring {
  static constexpr int kBytes = kSlots * (kSlotBytes + 16);

  uint32_t base;  // kBytes

  __device__ __forceinline__ uint32_t Slot(uint32_t slot) const { return base + slot * kSlotBytes; }
  __device__ __forceinline__ uint32_t Full(uint32_t slot) const { return base + kSlots * kSlotBytes + 8 * slot; }
  __device__ __forceinline__ uint32_t Empty(uint32_t slot) const { return base + kSlots * (kSlotBytes + 8) + 8 * slot; }
  // By one thread.
  __device__ __forceinline__ void Init(int warps) const {
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      sm90::BarrierInit(Full(slot), 1);
      sm90::BarrierInit(Empty(slot), static_cast<uint32_t>(warps));
    }
  }
  static __device__ __forceinline__ uint32_t Next(uint32_t slot) { return slot + 1 == kSlots ? 0 : slot + 1; }
};

// One CTA's slices of its cluster's rows, as the service warp puts them into the ring: part after part, row after row.
struct SliceSource {
  const float* slices[kInputs];  // of row 0
  int64_t strides[kInputs];
  int32_t row_count;
  int32_t row_step;
  int32_t part_columns;
  int32_t columns;  // of the slice, rounded up to whole 16 bytes, which the strides have
  int32_t parts;    // of a row, 1 or 2
  int32_t row;      // the next one
  int32_t part;

  __device__ __forceinline__ bool More() const { return row < row_count; }
  // The next part into a slot that is free.
  __device__ __forceinline__ void Load(const Ring& ring, uint32_t slot) {
    const int32_t first = part * part_columns;
    if (sm90::Elect()) {
      const auto bytes = static_cast<uint32_t>(4 * max(min(part_columns, columns - first), 0));
      sm90::BarrierArriveExpect(ring.Full(slot), kInputs * bytes);
      if (bytes > 0) {
#pragma unroll
        for (int i = 0; i < kInputs; ++i) {
          sm90::BulkLoad(ring.Slot(slot) + i * kInputBytes, slices[i] + row * strides[i] + first, bytes, ring.Full(slot),
                         sm90::kEvictFirst);
        }
      }
    }
    __syncwarp();
    if (++part == parts) {
      part = 0;
      row += row_step;
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
    // No more warps than it takes, because each works on whole slots: V = 151936 takes a fifth less by 10 warps than by 16.
    const int64_t needed = (columns + int64_t{kMaxWarpColumns} * cluster - 1) / (int64_t{kMaxWarpColumns} * cluster);
    const int64_t warps = cluster == 1 ? kMaxWarps : (needed + 1) / 2 * 2, slices = warps * cluster;
    const int64_t slice = (columns + slices - 1) / slices;
    return {cluster, static_cast<int>(warps), static_cast<int>((slice + kSliceAlignment - 1) / kSliceAlignment * kSliceAlignment)};
  }
  return {};
}

}  // namespace headwater::cuda::cluster_row

#endif  // HEADWATER_KERNELS_CUDA_DEVICE_CLUSTER_ROW_CUH_
