// One persistent matrix product for Hopper with a free epilogue: A [m, k] * B [n, k]^T, operands contiguous along k. They are bf16
// with fp32 accumulators, or int8 with int32 accumulators.
//
// Mapping   A tile is 128 rows by 320 columns: two consumer warpgroups of 64 rows (160 accumulators a thread), and a producer
//           warpgroup, one thread of which issues the copies. A cluster of two CTAs owns neighbouring row tiles of one column tile;
//           each CTA loads its own A and half of B, which the copy engine multicasts to both.
// Pipeline  kStages stages of 128 bytes of k. full[s]: the bytes of a stage have landed in this CTA. empty[s]: every consumer warp
// of both
//           CTAs has read stage s, so that the multicasts of the next round may overwrite it in both. Warpgroups are not
//           synchronised with each other otherwise, so that one's products fill the tensor cores during the other's epilogue.
// Raster    Tiles go in groups of `group` cluster rows, rows fastest: the CTAs at work together share few rows of A and of B, which
//           is what keeps both in L2.
// Order     One CTA computes each tile, in one fixed order of k: results are bitwise repeatable, whatever `group` is.
// Requires  sm_90a, m, n, k >= 1; base addresses 16-byte aligned; row strides multiples of 16 bytes. Edges are filled with zeros on
//           the way in and clipped on the way out by the copy engine.
//
// The epilogue is a type with
//   using Operands                     Bf16Operands or Int8Operands
//   struct Params                      passed by value to the kernel
//   struct Rows                        what a thread needs about its two rows, loaded before the main loop to hide the latency
//   static Rows LoadRows(params, position)
//   static void Run(accumulators, rows, params, position)
// EpiloguePosition describes its arguments. It may use kStagingBytes of shared memory per warp and map_c. A thread's accumulators
// belong to rows r = lane / 4 and r + 8 of its warp's 16. Element 4 j + 2 h + i is row r + 8 h, column 8 j + 2 (lane % 4) + i of
// the tile.
#ifndef HEADWATER_KERNELS_CUDA_DEVICE_SM90_PRODUCT_CUH_
#define HEADWATER_KERNELS_CUDA_DEVICE_SM90_PRODUCT_CUH_

#include "kernels/cuda/device/sm90_ptx.cuh"
#include "kernels/cuda/device/sm90_wgmma.cuh"

namespace headwater::cuda::sm90 {

inline constexpr int kTileM = 128;
inline constexpr int kTileN = 320;  // 192 + 128
inline constexpr int kSpan = 128;   // bytes of k of a stage in a row: one swizzle span
inline constexpr int kStages = 3;
inline constexpr int kCluster = 2;
inline constexpr int kConsumerGroups = 2;
inline constexpr int kConsumerWarps = 4 * kConsumerGroups;
inline constexpr int kProductThreads = 128 * (kConsumerGroups + 1);
inline constexpr int kAccumulators = kTileN / 2;
inline constexpr int kStagingBytes = 4096;  // a warp: two boxes of 16 rows by 128 bytes

inline constexpr int kBytesA = kTileM * kSpan;
inline constexpr int kBytesB = kTileN * kSpan;
inline constexpr int kChunkBytes = 64 * kSpan;  // 64 rows of an operand in one stage
inline constexpr int kBarrierBytes = 2 * kStages * 8;
// 1024 more than used: the base is aligned to the swizzle's period by hand.
inline constexpr int kProductSharedBytes = kStages * (kBytesA + kBytesB) + kConsumerWarps * kStagingBytes + kBarrierBytes + 1024;
static_assert(kProductSharedBytes <= 232448, "a CTA has 227 KiB of shared memory");

// Boxes of the tensor maps: kSpan bytes, swizzled, by so many rows.
inline constexpr int kBoxRowsA = kTileM;
inline constexpr int kBoxRowsB = kTileN / kCluster;
inline constexpr int kBoxRowsC = 16;  // a 16-bit result, stored by StoreBf16Block()

// A tile's products of 32 bytes of k. Descriptors of A's 64 rows and B's 320.
struct Bf16Operands {
  using Accumulator = float;
  static constexpr int kBytes = 2;  // of an element
  static __device__ __forceinline__ void Multiply(float* d, uint64_t a, uint64_t b, bool accumulate) {
    WgmmaM64N192K16<Major::kK, Major::kK>(d, a, b, accumulate);
    WgmmaM64N128K16<Major::kK, Major::kK>(d + 96, a, b + (3 * kChunkBytes >> 4), accumulate);
  }
};
struct Int8Operands {
  using Accumulator = int32_t;
  static constexpr int kBytes = 1;
  static __device__ __forceinline__ void Multiply(int32_t* d, uint64_t a, uint64_t b, bool accumulate) {
    WgmmaInt8M64N192K32(d, a, b, accumulate);
    WgmmaInt8M64N128K32(d + 96, a, b + (3 * kChunkBytes >> 4), accumulate);
  }
};

struct ProductShape {
  int32_t m;
  int32_t n;
  int32_t k;
  int32_t group;  // cluster rows per raster group, >= 1
};

struct EpiloguePosition {
  const CUtensorMap* map_c;
  uint32_t staging;  // this warp's shared memory, 1024-byte aligned
  int32_t lane;
  int32_t row;     // first of this warp's 16 rows; may lie beyond m
  int32_t column;  // first of the tile's columns; the tile may reach beyond n
  int32_t column_tile;
  int32_t m;
  int32_t n;
};

// Which of a warp's two boxes takes a tile's block number `block`, once the copy engine has read the former content. In turn, so
// that one is filled while the other is read. Before a tile's first block both boxes must have been read. A tile of an odd number
// of blocks ends with the box that the next one begins with.
__device__ __forceinline__ uint32_t TakeBox(const EpiloguePosition& position, int block) {
  if (position.lane == 0) {
    if (block == 0) {
      StoreWaitRead<0>();
    } else {
      StoreWaitRead<1>();
    }
  }
  __syncwarp();
  return position.staging + (block % 2) * (kStagingBytes / 2);
}

// Stores columns [64 block, 64 block + 64) of this warp's 16 rows as bf16. Word packed[2 j + h] holds columns 8 j + 2 (lane % 4) +
// {0, 1} of row lane / 4 + 8 h.
__device__ __forceinline__ void StoreBf16Block(const EpiloguePosition& position, int block, const uint32_t (&packed)[16]) {
  const uint32_t box = TakeBox(position, block);
  // Lane l stores row l % 8 of matrix l / 8. Matrices 0 and 2 hold rows 0-7, 1 and 3 rows 8-15; 2 and 3 the next eight columns.
  const int32_t row = position.lane % 8 + 8 * (position.lane / 8 % 2);
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const uint32_t address = box + row * 128 + (((j + position.lane / 16) ^ (row % 8)) << 4);
    StoreMatrix4(address, packed[2 * j], packed[2 * j + 1], packed[2 * j + 2], packed[2 * j + 3]);
  }
  FenceProxyAsync();
  __syncwarp();
  if (position.lane == 0) {
    TensorStore(position.map_c, box, position.column + 64 * block, position.row, kEvictNormal);
    StoreCommit();
  }
}

// Cluster tile number -> (cluster row, column tile), rows fastest within a group.
struct TileRaster {
  int32_t cluster_rows;
  int32_t column_tiles;
  int32_t group;
  __device__ __forceinline__ int32_t count() const { return cluster_rows * column_tiles; }
  __device__ __forceinline__ void Locate(int32_t tile, int32_t& cluster_row, int32_t& column_tile) const {
    const int32_t per_group = group * column_tiles;
    const int32_t first = tile / per_group * group;
    const int32_t rows = min(group, cluster_rows - first);
    const int32_t within = tile % per_group;
    cluster_row = first + within % rows;
    column_tile = within / rows;
  }
};

template <class Epilogue>
__global__ void HEADWATER_CLUSTER_DIMS(kCluster) __launch_bounds__(kProductThreads, 1)
    ProductKernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                  const __grid_constant__ CUtensorMap map_c, const ProductShape shape, const typename Epilogue::Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t raw_shared[];
  using Operands = typename Epilogue::Operands;
  constexpr int kDepth = kSpan / Operands::kBytes;                      // k of a stage
  const uint32_t shared = (SharedAddress(raw_shared) + 1023) & ~1023u;  // the swizzle pattern repeats every 1024 bytes of address
  const uint32_t shared_a = shared;
  const uint32_t shared_b = shared_a + kStages * kBytesA;
  const uint32_t shared_staging = shared_b + kStages * kBytesB;
  const uint32_t full = shared_staging + kConsumerWarps * kStagingBytes;
  const uint32_t empty = full + 8 * kStages;

  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const uint32_t cta_rank = ClusterCtaRank();

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      BarrierInit(full + 8 * stage, 1);
      BarrierInit(empty + 8 * stage, kCluster * kConsumerWarps);
    }
    FenceBarrierInit();
    PrefetchTensorMap(&map_a);
    PrefetchTensorMap(&map_b);
    PrefetchTensorMap(&map_c);
  }
  // No CTA may copy into, or arrive at, another one whose barriers are not initialised.
  ClusterSync();

  const TileRaster raster{(shape.m + kTileM * kCluster - 1) / (kTileM * kCluster), (shape.n + kTileN - 1) / kTileN, shape.group};
  const int32_t clusters = static_cast<int32_t>(gridDim.x) / kCluster;
  const int32_t cluster_id = static_cast<int32_t>(blockIdx.x) / kCluster;
  const int32_t k_blocks = (shape.k + kDepth - 1) / kDepth;

  if (warp < 4) {
    RegistersDecrease<40>();
    if (warp == 0 && lane == 0) {
      uint32_t stage = 0, phase = 0;
      for (int32_t tile = cluster_id; tile < raster.count(); tile += clusters) {
        int32_t cluster_row, column_tile;
        raster.Locate(tile, cluster_row, column_tile);
        const int32_t row = (cluster_row * kCluster + static_cast<int32_t>(cta_rank)) * kTileM;
        // This CTA's half of B goes to both.
        const int32_t first = static_cast<int32_t>(cta_rank) * kBoxRowsB;
        const int32_t column = column_tile * kTileN + first;
        for (int32_t block = 0; block < k_blocks; ++block) {
          const uint32_t barrier = full + 8 * stage;
          BarrierWait(empty + 8 * stage, phase ^ 1);
          BarrierArriveExpect(barrier, kBytesA + kBytesB);
          TensorLoad(shared_a + stage * kBytesA, &map_a, block * kDepth, row, barrier, kEvictNormal);
          TensorLoadMulticast(shared_b + stage * kBytesB + first * kSpan, &map_b, block * kDepth, column, barrier,
                              static_cast<uint16_t>((1 << kCluster) - 1), kEvictNormal);
          if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
          }
        }
      }
    }
  } else {
    RegistersIncrease<232>();
    constexpr uint32_t kStep = 32 >> 4;  // 32 bytes of k further, in descriptor units
    const int32_t consumer = warp - 4;
    const int32_t group_index = consumer / 4;
    const auto release = [&](uint32_t stage) {
      if (lane < kCluster) BarrierArriveCluster(empty + 8 * stage, static_cast<uint32_t>(lane));
    };
    EpiloguePosition position{&map_c, shared_staging + consumer * kStagingBytes, lane, 0, 0, 0, shape.m, shape.n};
    uint32_t stage = 0, phase = 0, previous = 0;
    for (int32_t tile = cluster_id; tile < raster.count(); tile += clusters) {
      int32_t cluster_row, column_tile;
      raster.Locate(tile, cluster_row, column_tile);
      position.row = (cluster_row * kCluster + static_cast<int32_t>(cta_rank)) * kTileM + consumer * 16;
      position.column = column_tile * kTileN;
      position.column_tile = column_tile;
      const typename Epilogue::Rows rows = Epilogue::LoadRows(params, position);
      typename Operands::Accumulator accumulators[kAccumulators];
      for (int32_t block = 0; block < k_blocks; ++block) {
        BarrierWait(full + 8 * stage, phase);
        const uint64_t a = WgmmaDescriptor<128>(shared_a + stage * kBytesA + group_index * kChunkBytes, kChunkBytes);
        const uint64_t b = WgmmaDescriptor<128>(shared_b + stage * kBytesB, kChunkBytes);
        AccumulatorFence(accumulators);
        WgmmaFence();
#pragma unroll
        for (int step = 0; step < kSpan / 32; ++step) {
          Operands::Multiply(accumulators, a + step * kStep, b + step * kStep, block > 0 || step > 0);
        }
        WgmmaCommit();
        AccumulatorFence(accumulators);
        // The products of the block before are done: its stage is free.
        WgmmaWait<1>();
        if (block > 0) release(previous);
        previous = stage;
        if (++stage == kStages) {
          stage = 0;
          phase ^= 1;
        }
      }
      WgmmaWait<0>();
      AccumulatorFence(accumulators);
      release(previous);
      Epilogue::Run(accumulators, rows, params, position);
    }
    if (lane == 0) StoreWaitAll();
  }
  __syncwarp();
  // No CTA leaves while the other one may still copy into it or arrive at its barriers.
  ClusterSync();
#else
  static_cast<void>(map_a), static_cast<void>(map_b), static_cast<void>(map_c), static_cast<void>(shape), static_cast<void>(params);
#endif
}

}  // namespace headwater::cuda::sm90

#endif  // HEADWATER_KERNELS_CUDA_DEVICE_SM90_PRODUCT_CUH_
