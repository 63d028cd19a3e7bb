// Thin wrappers round the Hopper instructions that CUDA C++ has no name for: transaction barriers, the bulk tensor copy engine
// (TMA), clusters, warpgroup matrix products. One function, one instruction; the protocol between them is the caller's.
//
// Most of them exist for sm_90a only. Kernels that call them have their body inside #if defined(__CUDA_ARCH_FEAT_SM90_ALL), so that
// the same file compiles for other architectures too. Addresses of shared memory are 32-bit, as SharedAddress() gives them.
#ifndef HEADWATER_KERNELS_CUDA_DEVICE_SM90_PTX_CUH_
#define HEADWATER_KERNELS_CUDA_DEVICE_SM90_PTX_CUH_

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

// Cluster size of a kernel; other architectures' compilers refuse the attribute.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define HEADWATER_CLUSTER_DIMS(size) __cluster_dims__(size, 1, 1)
#else
#define HEADWATER_CLUSTER_DIMS(size)
#endif

namespace headwater::cuda::sm90 {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- Barriers in shared memory -------------------------------------------------------------------------------------------------

__device__ __forceinline__ void BarrierInit(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Makes initialised barriers visible to the copy engine and to the other CTAs of the cluster.
__device__ __forceinline__ void FenceBarrierInit() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void BarrierArriveExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void BarrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the barrier at the same offset in CTA `cta_rank` of the cluster (the own one is allowed). Says "I have read", and does
// not publish writes. With .release.cluster the compiler puts a full memory fence before it, a quarter of a product's time.
__device__ __forceinline__ void BarrierArriveCluster(uint32_t barrier, uint32_t cta_rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(barrier),
      "r"(cta_rank)
      : "memory");
}
// Waits until the phase of parity `parity` has completed.
__device__ __forceinline__ void BarrierWait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// As BarrierWait(), and also sees writes of the cluster's other CTAs before they arrived.
__device__ __forceinline__ void BarrierWaitCluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// True in one lane of a whole warp; the compiler then knows that its instructions are issued once.
__device__ __forceinline__ bool Elect() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, one;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

// Hardware barrier `id` (1..15) among `threads` threads of the CTA.
__device__ __forceinline__ void NamedBarrierSync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- Clusters ------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t ClusterCtaRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void ClusterArrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void ClusterWait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void ClusterSync() {
  ClusterArrive();
  ClusterWait();
}
// Address of `shared_address` in the shared memory of CTA `cta_rank` of the cluster.
__device__ __forceinline__ uint32_t ClusterAddress(uint32_t shared_address, uint32_t cta_rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address), "r"(cta_rank));
  return remote;
}

// --- Copy engine ---------------------------------------------------------------------------------------------------------------

// L2 eviction policies as the copy engine takes them (the encodings createpolicy returns for a fraction of 1).
constexpr uint64_t kEvictNormal = 0x1000000000000000ull;
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
constexpr uint64_t kEvictLast = 0x14F0000000000000ull;

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}
// Box at (inner, outer) of a rank-2 tensor into shared memory; its bytes complete on `barrier`.
__device__ __forceinline__ void TensorLoad(uint32_t destination, const CUtensorMap* map, int32_t inner, int32_t outer,
                                           uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], "
      "%5;" ::"r"(destination),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(inner), "r"(outer), "r"(barrier), "l"(policy)
      : "memory");
}
// The same box into the same offset of every CTA in `cta_mask`; completes on each one's barrier at the same offset.
__device__ __forceinline__ void TensorLoadMulticast(uint32_t destination, const CUtensorMap* map, int32_t inner, int32_t outer,
                                                    uint32_t barrier, uint16_t cta_mask, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, "
      "{%2, %3}], [%4], %5, "
      "%6;" ::"r"(destination),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(inner), "r"(outer), "r"(barrier), "h"(cta_mask), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void TensorStore(const CUtensorMap* map, uint32_t source, int32_t inner, int32_t outer,
                                            uint64_t policy) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%1, %2}], [%3], %4;" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(inner), "r"(outer), "r"(source), "l"(policy)
               : "memory");
}
// Adds the box to memory, element by element, in L2.
__device__ __forceinline__ void TensorReduceAdd(const CUtensorMap* map, uint32_t source, int32_t inner, int32_t outer,
                                                uint64_t policy) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group.L2::cache_hint [%0, {%1, %2}], [%3], %4;" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(inner), "r"(outer), "r"(source), "l"(policy)
               : "memory");
}
// `bytes` (a multiple of 16) of contiguous memory into shared memory.
__device__ __forceinline__ void BulkLoad(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier,
                                         uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                   destination),
               "l"(reinterpret_cast<uint64_t>(source)), "r"(bytes), "r"(barrier), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void StoreCommit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's store groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void StoreWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until this thread's stores are complete in memory.
__device__ __forceinline__ void StoreWaitAll() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Orders this thread's ordinary shared-memory accesses before the copy engine's or the tensor cores'.
__device__ __forceinline__ void FenceProxyAsync() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- Warpgroup matrix products -------------------------------------------------------------------------------------------------

__device__ __forceinline__ void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void WgmmaCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accumulator accesses across asynchronous products.
template <int kCount>
__device__ __forceinline__ void AccumulatorFence(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void AccumulatorFence(int32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Descriptor of an operand tile with the 128- or 64-byte swizzle, at a 1024-byte aligned base. Groups of eight rows of that many
// bytes follow each other. `leading_bytes` is the stride between 64-element chunks of an MN-major operand; a K-major one does not
// use it.
template <int kSwizzleBytes>
__device__ __forceinline__ uint64_t WgmmaDescriptor(uint32_t shared_address, uint32_t leading_bytes) {
  static_assert(kSwizzleBytes == 128 || kSwizzleBytes == 64, "other swizzles have other layouts");
  return static_cast<uint64_t>((shared_address & 0x3ffff) >> 4) | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(8 * kSwizzleBytes >> 4) << 32 | static_cast<uint64_t>(kSwizzleBytes == 128 ? 1 : 2) << 62;
}

template <int kRegisters>
__device__ __forceinline__ void RegistersDecrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void RegistersIncrease() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Four 8x8 matrices of 16-bit elements from accumulator layout to shared memory; lane l gives the address of row l%8 of matrix l/8.
__device__ __forceinline__ void StoreMatrix4(uint32_t row_address, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(m0), "r"(m1), "r"(m2),
               "r"(m3)
               : "memory");
}

// --- Arithmetic ----------------------------------------------------------------------------------------------------------------

// 2^x, relative error 2^-22.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float ReciprocalApprox(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// (low, high) rounded to nearest even, low in the low half.
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

constexpr float kLog2E = 1.4426950408889634f;

}  // namespace headwater::cuda::sm90

#endif  // HEADWATER_KERNELS_CUDA_DEVICE_SM90_PTX_CUH_
