// One persistent matrix product for Hopper with a free epilogue: C [m, n] = A [m, k] * B [n, k]^T, bf16 operands, fp32
// accumulators.
//
// Mapping   A tile is 64 * kGroups rows by 256 columns, one consumer warpgroup per 64 rows (128 accumulators a thread), and a
// producer
//           warpgroup, one thread of which issues the copies. A cluster of kCluster CTAs owns neighbouring row tiles of one column
//           tile; each CTA loads its own A and 1/kCluster of B, which the copy engine multicasts to the whole cluster.
// Pipeline  kStages stages of kDepth k. full[s]: the bytes of a stage have landed in this CTA. empty[s]: every consumer warp of
// every CTA
//           of the cluster has read stage s, so that the multicasts of the next round may overwrite it in all of them. Warpgroups
//           are not synchronised with each other otherwise, so that one's products fill the tensor cores during the other's
//           epilogue.
// Pace      What the card's power limit turns into time is energy, and much of that is DRAM traffic. Clusters that work on the same
// rows
//           or columns find each other's loads in L2 only while they are at about the same k; left alone they drift apart, and
//           three to eight times the necessary bytes come from DRAM. So each cluster counts the steps (pace_blocks k-blocks) it
//           begins, and begins a step only when all have begun the one `pace_slack` steps before. A pacer warp does the waiting
//           ahead of the producer. The wait is bounded: if some cluster is not resident, the others go on unpaced. Results do not
//           depend on it.
// Raster    Tiles go in groups of `group` cluster rows, rows fastest: the CTAs at work together share few rows of A and of B, which
//           is what keeps both in L2.
// Majors    Either operand may be contiguous along k, or along its own dimension (A^T or B stored row-major). TMA boxes are 64
//           contiguous elements (128 bytes, swizzled) by kDepth rows, or kDepth elements (2 kDepth bytes, swizzled) by 64 or 128
//           rows.
// Order     One CTA computes each tile, in one fixed order of k: results are bitwise repeatable, whatever `group` is.
// Requires  sm_90a, m, n, k >= 1; base addresses 16-byte aligned; row strides multiples of 16 bytes. Edges are filled with zeros on
// the
//           way in and clipped on the way out by the copy engine.
//
// The epilogue is a type with
//   struct Params                      passed by value to the kernel
//   struct Rows                        what a thread needs about its two rows, loaded before the main loop to hide the latency
//   static Rows LoadRows(params, position)
//   static void Run(accumulators, rows, params, position)
// See EpiloguePosition for what it is told. It may use kStagingBytes of shared memory per warp and map_c.

#ifndef HEADWATER_KERNELS_LAB_SM90_PRODUCT_CUH_
#define HEADWATER_KERNELS_LAB_SM90_PRODUCT_CUH_

#include "kernels/cuda/device/sm90_ptx.cuh"
#include "kernels/cuda/device/sm90_wgmma.cuh"

namespace headwater::sm90 {

using namespace headwater::cuda::sm90;

constexpr int kTileM = 128;
constexpr int kConsumerGroups = 2;
constexpr int kConsumerWarps = 4 * kConsumerGroups;
constexpr int kProductThreads = 128 * (kConsumerGroups + 1);
constexpr int kStagingBytes = 4096;  // a warp: two boxes of 16 rows by 128 bytes

// Tile width, pipeline and cluster of a product. A thread's accumulators: rows r and r + 8 of its warp's 16, columns
// 8 j + 2 (lane % 4) + {0, 1}; element 4 j + 2 h + i is row r + 8 h, column 8 j + 2 (lane % 4) + i.
template <int kTileNIn, int kDepthIn, int kStagesIn, int kClusterIn, int kPiecesIn = 1>
struct ProductConfig {
  static constexpr int kTileN = kTileNIn;  // 256, or 320 = 192 + 128: fewer bytes from L2 a product, shallower pipeline
  static constexpr int kDepth = kDepthIn;  // k of a stage: 32 or 64
  static constexpr int kStages = kStagesIn;
  static constexpr int kCluster = kClusterIn;  // 1 or 2
  static constexpr int kPieces = kPiecesIn;    // column pieces a 256-column product is issued in: 1 or 2
  static constexpr int kAccumulators = kTileN / 2;
  static constexpr int kBytesA = kTileM * kDepth * 2;
  static constexpr int kBytesB = kTileN * kDepth * 2;
  static constexpr int kChunkBytes =
      64 * kDepth * 2;  // 64 rows of a K-major operand, or 64 elements of an MN-major one, of one stage
  static constexpr int kSharedBytes = kStages * (kBytesA + kBytesB) + kConsumerWarps * kStagingBytes + 2 * kStages * 8 + 16 + 1024;
  static_assert(kSharedBytes <= 232448, "a CTA has 227 KiB of shared memory");
  static_assert(kTileN == 256 || kTileN == 320, "the main loop issues 256, or 192 and 128, columns");
};
using Tile256 = ProductConfig<256, 64, 4, 2>;
using Tile320 = ProductConfig<320, 64, 3, 2>;

struct ProductShape {
  int32_t m;
  int32_t n;
  int32_t k;
  int32_t group;  // cluster rows per raster group, >= 1
  uint64_t policy_a;
  uint64_t policy_b;
  uint64_t policy_c;
  uint32_t* pace;       // [waves * steps a tile], zero at launch; null: not paced
  int32_t pace_blocks;  // k-blocks a step, >= 1
  int32_t pace_slack;   // steps, >= 1
};

struct EpiloguePosition {
  const CUtensorMap* map_c;
  uint64_t policy_c;
  uint32_t staging;  // this warp's shared memory, 1024-byte aligned
  int32_t lane;
  int32_t row;     // first of this warp's 16 rows; may lie beyond m
  int32_t column;  // first of the tile's columns; the tile may reach beyond n
  int32_t column_tile;
  int32_t m;
  int32_t n;
};

// Which of a warp's two boxes takes a tile's block number `block`, once the copy engine has read what was stored from there last.
// In turn, so that one is filled while the other is read. Before a tile's first block both must have been: a tile of an odd number
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

// Stores columns [64 block, 64 block + 64) of this warp's 16 rows as bf16; packed[2 j + h] holds columns 8 j + 2 (lane % 4) + {0,
// 1} of row lane / 4 + 8 h.
__device__ __forceinline__ void StoreBf16Block(const EpiloguePosition& position, int block, const uint32_t (&packed)[16]) {
  const uint32_t box = TakeBox(position, block);
  // Lane l stores row l % 8 of matrix l / 8: matrices 0 and 2 hold rows 0-7, 1 and 3 rows 8-15; 2 and 3 the next eight columns.
  const int32_t row = position.lane % 8 + 8 * (position.lane / 8 % 2);
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const uint32_t address = box + row * 128 + (((j + position.lane / 16) ^ (row % 8)) << 4);
    StoreMatrix4(address, packed[2 * j], packed[2 * j + 1], packed[2 * j + 2], packed[2 * j + 3]);
  }
  FenceProxyAsync();
  __syncwarp();
  if (position.lane == 0) {
    TensorStore(position.map_c, box, position.column + 64 * block, position.row, position.policy_c);
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

template <Major kMajorA, Major kMajorB, class Epilogue, class Config>
__global__ void __cluster_dims__(Config::kCluster, 1, 1) __launch_bounds__(kProductThreads, 1)
    ProductKernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                  const __grid_constant__ CUtensorMap map_c, const ProductShape shape, const typename Epilogue::Params params) {
  constexpr int kStages = Config::kStages, kCluster = Config::kCluster, kDepth = Config::kDepth;
  constexpr int kBytesA = Config::kBytesA, kBytesB = Config::kBytesB, kChunkBytes = Config::kChunkBytes;
  constexpr int kTileN = Config::kTileN;
  extern __shared__ uint8_t raw_shared[];
  const uint32_t shared = (SharedAddress(raw_shared) + 1023) & ~1023u;  // the swizzle pattern repeats every 1024 bytes of address
  const uint32_t shared_a = shared;
  const uint32_t shared_b = shared_a + kStages * kBytesA;
  const uint32_t shared_staging = shared_b + kStages * kBytesB;
  const uint32_t full = shared_staging + kConsumerWarps * kStagingBytes;
  const uint32_t empty = full + 8 * kStages;
  const uint32_t allowed = empty + 8 * kStages;  // steps that the pacer has let pass

  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const uint32_t cta_rank = kCluster == 1 ? 0 : ClusterCtaRank();

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      BarrierInit(full + 8 * stage, 1);
      BarrierInit(empty + 8 * stage, kCluster * kConsumerWarps);
    }
    asm volatile("st.shared.u32 [%0], 0;" ::"r"(allowed) : "memory");
    FenceBarrierInit();
    PrefetchTensorMap(&map_a);
    PrefetchTensorMap(&map_b);
    PrefetchTensorMap(&map_c);
  }
  // No CTA may copy into, or arrive at, another one whose barriers are not initialised.
  if (kCluster == 1) {
    __syncthreads();
  } else {
    ClusterSync();
  }

  const TileRaster raster{(shape.m + kTileM * kCluster - 1) / (kTileM * kCluster), (shape.n + kTileN - 1) / kTileN, shape.group};
  const int32_t clusters = static_cast<int32_t>(gridDim.x) / kCluster;
  const int32_t cluster_id = static_cast<int32_t>(blockIdx.x) / kCluster;
  const int32_t k_blocks = (shape.k + kDepth - 1) / kDepth;

  const int32_t steps_per_tile = (k_blocks + shape.pace_blocks - 1) / shape.pace_blocks;
  // A cluster's CTAs wait for each other's loads anyway: its first one is paced.
  const bool paced = shape.pace != nullptr && cta_rank == 0;

  if (warp < 4) {
    RegistersDecrease<40>();
    if (warp == 0 && lane == 0) {
      uint32_t stage = 0, phase = 0, step = 0;
      for (int32_t tile = cluster_id; tile < raster.count(); tile += clusters) {
        int32_t cluster_row, column_tile;
        raster.Locate(tile, cluster_row, column_tile);
        const int32_t row = (cluster_row * kCluster + static_cast<int32_t>(cta_rank)) * kTileM;
        const int32_t column = column_tile * kTileN;
        for (int32_t block = 0; block < k_blocks; ++block) {
          if (paced && block % shape.pace_blocks == 0) {
            uint32_t passed;
            do {
              asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(passed) : "r"(allowed) : "memory");
            } while (passed <= step);
            asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(shape.pace + step) : "memory");
            ++step;
          }
          const uint32_t barrier = full + 8 * stage;
          BarrierWait(empty + 8 * stage, phase ^ 1);
          BarrierArriveExpect(barrier, kBytesA + kBytesB);
          const uint32_t a = shared_a + stage * kBytesA;
          const uint32_t b = shared_b + stage * kBytesB;
          const int32_t depth = block * kDepth;
          if constexpr (kMajorA == Major::kK) {
            TensorLoad(a, &map_a, depth, row, barrier, shape.policy_a);
          } else {
#pragma unroll
            for (int group = 0; group < kConsumerGroups; ++group) {
              TensorLoad(a + group * kChunkBytes, &map_a, row + 64 * group, depth, barrier, shape.policy_a);
            }
          }
          // This CTA's share of B, to every CTA of the cluster.
          constexpr int kBoxes = kMajorB == Major::kK ? 2 : kTileN / 64;
#pragma unroll
          for (int box = 0; box < kBoxes; ++box) {
            if (box % kCluster != static_cast<int>(cta_rank)) continue;
            const int32_t first = box * (kTileN / kBoxes);
            const uint32_t destination = b + first * kDepth * 2;
            const int32_t inner = kMajorB == Major::kK ? depth : column + first;
            const int32_t outer = kMajorB == Major::kK ? column + first : depth;
            if constexpr (kCluster == 1) {
              TensorLoad(destination, &map_b, inner, outer, barrier, shape.policy_b);
            } else {
              TensorLoadMulticast(destination, &map_b, inner, outer, barrier, static_cast<uint16_t>((1 << kCluster) - 1),
                                  shape.policy_b);
            }
          }
          if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
          }
        }
      }
    } else if (warp == 1 && lane == 0 && paced) {
      const int32_t waves = (raster.count() - cluster_id + clusters - 1) / clusters;
      bool give_up = false;
      for (int32_t step = 0; step < waves * steps_per_tile; ++step) {
        const int32_t before = step - shape.pace_slack;
        if (before >= 0 && !give_up) {
          const auto at_work = static_cast<uint32_t>(min(clusters, raster.count() - before / steps_per_tile * clusters));
          uint32_t begun;
          int polls = 0;
          while (true) {
            asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(begun) : "l"(shape.pace + before) : "memory");
            if (begun >= at_work) break;
            __nanosleep(50);
            give_up = ++polls == 8000;  // about a millisecond: some cluster is not running
            if (give_up) break;
          }
        }
        asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(allowed), "r"(step + 1) : "memory");
      }
    }
  } else {
    RegistersIncrease<232>();
    constexpr int kSwizzleA = kMajorA == Major::kK ? 2 * kDepth : 128;  // bytes
    constexpr int kSwizzleB = kMajorB == Major::kK ? 2 * kDepth : 128;
    constexpr uint32_t kStepA = kMajorA == Major::kK ? 32 >> 4 : 16 * 128 >> 4;  // 16 k further, in descriptor units
    constexpr uint32_t kStepB = kMajorB == Major::kK ? 32 >> 4 : 16 * 128 >> 4;
    const int32_t consumer = warp - 4;
    const int32_t group_index = consumer / 4;
    const auto release = [&](uint32_t stage) {
      if constexpr (kCluster == 1) {
        if (lane == 0) BarrierArrive(empty + 8 * stage);
      } else {
        if (lane < kCluster) BarrierArriveCluster(empty + 8 * stage, static_cast<uint32_t>(lane));
      }
    };
    EpiloguePosition position{&map_c, shape.policy_c, shared_staging + consumer * kStagingBytes, lane, 0, 0, 0, shape.m, shape.n};
    uint32_t stage = 0, phase = 0, previous = 0;
    for (int32_t tile = cluster_id; tile < raster.count(); tile += clusters) {
      int32_t cluster_row, column_tile;
      raster.Locate(tile, cluster_row, column_tile);
      position.row = (cluster_row * kCluster + static_cast<int32_t>(cta_rank)) * kTileM + consumer * 16;
      position.column = column_tile * kTileN;
      position.column_tile = column_tile;
      const typename Epilogue::Rows rows = Epilogue::LoadRows(params, position);
      float accumulators[Config::kAccumulators];
      for (int32_t block = 0; block < k_blocks; ++block) {
        BarrierWait(full + 8 * stage, phase);
        const uint64_t a = WgmmaDescriptor<kSwizzleA>(shared_a + stage * kBytesA + group_index * kChunkBytes, kChunkBytes);
        const uint64_t b = WgmmaDescriptor<kSwizzleB>(shared_b + stage * kBytesB, kChunkBytes);
        AccumulatorFence(accumulators);
        WgmmaFence();
#pragma unroll
        for (int step = 0; step < kDepth / 16; ++step) {
          const bool accumulate = block > 0 || step > 0;
          if constexpr (kTileN == 256 && Config::kPieces == 2) {
            WgmmaM64N128K16<kMajorA, kMajorB>(accumulators, a + step * kStepA, b + step * kStepB, accumulate);
            WgmmaM64N128K16<kMajorA, kMajorB>(accumulators + 64, a + step * kStepA, b + step * kStepB + (2 * kChunkBytes >> 4),
                                              accumulate);
          } else if constexpr (kTileN == 256) {
            WgmmaM64N256K16<kMajorA, kMajorB>(accumulators, a + step * kStepA, b + step * kStepB, accumulate);
          } else {
            WgmmaM64N192K16<kMajorA, kMajorB>(accumulators, a + step * kStepA, b + step * kStepB, accumulate);
            WgmmaM64N128K16<kMajorA, kMajorB>(accumulators + 96, a + step * kStepA, b + step * kStepB + (3 * kChunkBytes >> 4),
                                              accumulate);
          }
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
      Epilogue::template Run<Config::kAccumulators>(accumulators, rows, params, position);
    }
    if (lane == 0) StoreWaitAll();
  }
  // No CTA leaves while another one of the cluster may still copy into it or arrive at its barriers.
  if (kCluster > 1) ClusterSync();
}

}  // namespace headwater::sm90

#endif  // HEADWATER_KERNELS_LAB_SM90_PRODUCT_CUH_
