// A row in the shared memory of a cluster: slices, the ring of chunks that the copy engine fills, and sums over the cluster.
// sm_90a: kernels that call these functions have their body inside #if defined(__CUDA_ARCH_FEAT_SM90_ALL).
//
// Mapping   A cluster of 1, 2, 4, 8 or 16 CTAs owns a row, each CTA a slice of at most kMaxSlice columns; clusters stride over
// rows. Threads   kConsumers of them compute, one warp more fills the ring. A consumer takes four consecutive columns of a chunk.
// Ring      kSlots chunks of two inputs: a row and three quarters of the next. Filled in order, freed in order.
//
// Why a refilled slot cannot be read too late. The bulk copy into a slot is issued by a thread that has waited for the slot's
// `empty` barrier, which completes when one lane of every consumer warp has arrived. A lane's last reads of the slot come before
// its
// __syncwarp() in program order; __syncwarp() orders them before the arrival of lane 0, which is a release at CTA scope, and the
// wait is an acquire: every read happens before the copy is issued. Reads need no proxy fence: they have returned their values when
// they are ordered so. Writes to a slot do (FenceProxyAsync() by each writing lane before the __syncwarp()): otherwise they could
// reach shared memory after the copy's. A checker that follows threads one by one sees the arrival of lane 0 only, not the warp
// barrier before it, and may report the other 31 lanes' reads.
#ifndef HEADWATER_KERNELS_CUDA_DEVICE_CLUSTER_ROW_CUH_
#define HEADWATER_KERNELS_CUDA_DEVICE_CLUSTER_ROW_CUH_

#include <cstdint>

#include "kernels/cuda/device/sm90_ptx.cuh"

namespace headwater::cuda::cluster_row {

constexpr int kConsumers = 512;
constexpr int kConsumerWarps = kConsumers / 32;
constexpr int kThreads = kConsumers + 32;
constexpr int kVectors = 8;                   // chunks of a slice: a consumer keeps four columns of each
constexpr int kChunk = 4 * kConsumers;        // columns
constexpr int kMaxSlice = kVectors * kChunk;  // columns
constexpr int kMaxCluster = 16;
constexpr int kInputs = 2;
constexpr int kSlotBytes = kInputs * kChunk * 4;
constexpr int kSlots = 14;

// --- Sums over the cluster
//
// A channel carries kUnits pairs of floats from every CTA to every CTA: warps reduce, one warp reduces the CTA's and sends it to
// all CTAs by asynchronous stores, every thread adds up what came. Between Send() and Receive() a thread may do other work.
//
// Two buffers are enough. A CTA sends number k + 2 only when all its threads have received number k + 1, that is when every CTA has
// sent k + 1, and it did so after all its warps had received k: nobody reads buffer k any more. The same holds for the warps'
// results and for the named barrier: a warp arrives for k + 1 after it has received k, so after the reducing warp had passed it.

constexpr int kUnitBytes = kMaxCluster * 8;
template <int kUnits>
constexpr int kChannelBytes = 2 * (8 + kUnits * (kUnitBytes + kConsumerWarps * 8));

__device__ __forceinline__ void StorePair(uint32_t address, float2 value) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(value.x), "f"(value.y) : "memory");
}
__device__ __forceinline__ float2 LoadPair(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
  return value;
}
// Into another CTA's shared memory; its eight bytes complete on that CTA's barrier.
__device__ __forceinline__ void StorePairRemote(uint32_t remote_address, float2 value, uint32_t remote_barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(remote_address),
               "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)), "r"(remote_barrier)
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

// Over `width` neighbouring lanes; every lane gets the same bits, because the operations commute.
template <class Operation>
__device__ __forceinline__ float2 MergeLanes(float2 value, int width) {
  for (int distance = width / 2; distance > 0; distance /= 2) {
    value.x = Operation::Merge(value.x, __shfl_xor_sync(0xffffffffu, value.x, distance));
    value.y = Operation::Merge(value.y, __shfl_xor_sync(0xffffffffu, value.y, distance));
  }
  return value;
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
    return base + 16 + 2 * kUnits * kUnitBytes + ((parity * kUnits + unit) * kConsumerWarps + warp) * 8;
  }
  __device__ __forceinline__ void Init() const {
    sm90::BarrierInit(Barrier(0), 1);
    sm90::BarrierInit(Barrier(1), 1);
  }

  // By all consumers. `named_barrier` is the channel's own. The last unit is reduced by LastOperation, the others by Operation.
  template <class Operation, class LastOperation>
  __device__ __forceinline__ void Send(float2 (&values)[kUnits], uint32_t named_barrier, int cluster, int cta_rank) const {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t parity = count & 1;
    Reduce<Operation, LastOperation>(values, 32);
    if (lane == 0) {
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) StorePair(WarpPartial(parity, unit, warp), values[unit]);
    }
    __syncwarp();  // the named barrier is a whole warp's
    // The reducing warp changes, so that none falls behind.
    if (warp != static_cast<int>(count % kConsumerWarps)) {
      sm90::NamedBarrierArrive(named_barrier, kConsumers);
      return;
    }
    sm90::NamedBarrierSync(named_barrier, kConsumers);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) values[unit] = LoadPair(WarpPartial(parity, unit, lane % kConsumerWarps));
    Reduce<Operation, LastOperation>(values, kConsumerWarps);
    if (lane == 0) sm90::BarrierArriveExpect(Barrier(parity), static_cast<uint32_t>(8 * kUnits * cluster));
    if (lane < cluster) {
      const uint32_t barrier = sm90::ClusterAddress(Barrier(parity), lane);
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        StorePairRemote(sm90::ClusterAddress(Partial(parity, unit, cta_rank), lane), values[unit], barrier);
      }
    }
  }

  // By all consumers, after Send(): the same values in every thread of the cluster.
  template <class Operation, class LastOperation>
  __device__ __forceinline__ void Receive(float2 (&values)[kUnits], int cluster) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t parity = count & 1;
    sm90::BarrierWaitCluster(Barrier(parity), (count >> 1) & 1);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) values[unit] = LoadPair(Partial(parity, unit, lane & (cluster - 1)));
    Reduce<Operation, LastOperation>(values, cluster);
    ++count;
  }

 private:
  template <class Operation, class LastOperation>
  static __device__ __forceinline__ void Reduce(float2 (&values)[kUnits], int width) {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      values[unit] =
          unit == kUnits - 1 ? MergeLanes<LastOperation>(values[unit], width) : MergeLanes<Operation>(values[unit], width);
    }
  }
};

// --- The ring

struct Ring {
  uint32_t base;      // kSlots * kSlotBytes
  uint32_t barriers;  // 16 * kSlots bytes

  __device__ __forceinline__ uint32_t Slot(uint32_t slot) const { return base + slot * kSlotBytes; }
  __device__ __forceinline__ uint32_t Full(uint32_t slot) const { return barriers + 16 * slot; }
  __device__ __forceinline__ uint32_t Empty(uint32_t slot) const { return barriers + 16 * slot + 8; }
  __device__ __forceinline__ void Init() const {
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      sm90::BarrierInit(Full(slot), 1);
      sm90::BarrierInit(Empty(slot), kConsumerWarps);
    }
  }
};

// Fills the ring with the slices of rows first_row, first_row + row_step, ...; by one thread. `inputs` point to the slice's first
// column of row 0 and lie at multiples of 16 bytes, as strides do; a chunk's last copy is rounded up to 16 bytes, inside the
// stride.
__device__ __forceinline__ void FillRing(const Ring& ring, const float* const (&inputs)[kInputs], const int64_t (&strides)[kInputs],
                                         int32_t length, int32_t first_row, int32_t row_step, int32_t row_count) {
  uint32_t slot = 0, phase = 0;
  for (int32_t row = first_row; row < row_count; row += row_step) {
    for (int32_t first = 0; first < length; first += kChunk) {
      const auto bytes = static_cast<uint32_t>((min(kChunk, length - first) + 3) / 4 * 16);
      sm90::BarrierWait(ring.Empty(slot), phase ^ 1);
      sm90::BarrierArriveExpect(ring.Full(slot), bytes * kInputs);
#pragma unroll
      for (int input = 0; input < kInputs; ++input) {
        sm90::BulkLoad(ring.Slot(slot) + input * kChunk * 4, inputs[input] + row * strides[input] + first, bytes, ring.Full(slot),
                       sm90::kEvictFirst);
      }
      if (++slot == kSlots) {
        slot = 0;
        phase ^= 1;
      }
    }
  }
}

// 1, 2, 4, 8 or 16 CTAs for a row of `columns`; 0 if it does not fit.
inline int ClusterFor(int64_t columns) {
  for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
    if (columns <= int64_t{kMaxSlice} * cluster) return cluster;
  }
  return 0;
}

}  // namespace headwater::cuda::cluster_row

#endif  // HEADWATER_KERNELS_CUDA_DEVICE_CLUSTER_ROW_CUH_
