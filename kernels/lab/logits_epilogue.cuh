// Logits in fp32 out of the accumulators of the product's own product (kernels/cuda/device/sm90_product.cuh), and of each row and
// tile of columns the exponentials' sum, so that nobody has to read the logits for their log-sum-exps. sm_90a only.
//
// Offset    A partial sum is relative to a whole power of two above a sample of the lane's own columns, so that no pass for a
// maximum
//           comes before the exponentials; where the sum does not fit it (a column 2^80 above the sample), it is taken again
//           relative to the largest.
// Edge      What the tile has beyond n counts nothing, and is not stored.
// Not finite  A NaN or +inf makes the row's partial sum NaN; -inf counts nothing.

#ifndef HEADWATER_KERNELS_LAB_LOGITS_EPILOGUE_CUH_
#define HEADWATER_KERNELS_LAB_LOGITS_EPILOGUE_CUH_

#include <cmath>

#include "kernels/cuda/device/sm90_product.cuh"
#include "sm90_host.cuh"

namespace headwater::lab {

// The exponentials' sum of one row over one tile of columns: 2^offset * sum, offset a whole number.
struct TileSum {
  float offset;
  float sum;
};
constexpr int kTileColumns = cuda::sm90::kTileN;

// How a tile leaves.
enum class LogitsStore {
  kSectors,  // straight from registers: a quad's pairs are one sector
  kBoxes,    // through the warp's staging memory by the copy engine, boxes of 16 rows by 32 columns
  kLines,    // through the warp's staging memory by itself, whole lines
};

template <LogitsStore kStore, bool kSums>
struct LogitsEpilogue {
  struct Params {
    float* logits;       // [m, stride] out, 16-byte aligned
    int64_t stride;      // elements, a multiple of 4
    TileSum* tile_sums;  // [column tiles, m] out
    float scale;         // > 0: from a logit to log2 of its exponential
  };
  struct Rows {};

  static __device__ __forceinline__ Rows LoadRows(const Params&, const cuda::sm90::EpiloguePosition&) { return {}; }

  static __device__ __forceinline__ void Run(float (&accumulators)[cuda::sm90::kAccumulators], const Rows&, const Params& params,
                                             const cuda::sm90::EpiloguePosition& position) {
    const bool has_edge = position.column + kTileColumns > position.n;
    // The copy engine clips by 16 bytes.
    const bool is_clipped = has_edge && position.n % 4 != 0;
    if (has_edge) {
      const int32_t room = position.n - position.column - 2 * (position.lane % 4);
#pragma unroll
      for (int e = 0; e < cuda::sm90::kAccumulators; ++e) {
        if (e / 4 * 8 + e % 2 >= room) accumulators[e] = kNothing;
      }
    }
    float offset[2], sum[2] = {0.0f, 0.0f};
    if constexpr (kSums) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = kNothing;
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = fmaxf(largest, accumulators[i / 2 * 4 + 2 * half + i % 2]);
        offset[half] = fmaxf(ceilf(largest * params.scale) + 40.0f, kLeastOffset);
      }
    }
#pragma unroll
    for (int block = 0; block < cuda::sm90::kAccumulators / 16; ++block) {
      const float* values = accumulators + 16 * block;
      if constexpr (kStore == LogitsStore::kLines) {
        StoreLines(values, block, has_edge, params, position);
      } else if (kStore == LogitsStore::kBoxes && !is_clipped) {
        StoreBox(values, block, position);
      } else {
        StoreSectors(values, block, has_edge, params, position);
      }
      if constexpr (kSums) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            sum[half] += cuda::sm90::Exp2(fmaf(values[i / 2 * 4 + 2 * half + i % 2], params.scale, -offset[half]));
          }
        }
      }
    }
    if constexpr (kSums) {
      const bool fits = sum[0] > 1e-20f && sum[0] < 1e36f && sum[1] > 1e-20f && sum[1] < 1e36f;
      if (__any_sync(0xffffffffu, !fits)) SumFromLargest(accumulators, params.scale, offset, sum);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float common = fmaxf(offset[half], __shfl_xor_sync(0xffffffffu, offset[half], 1));
        common = fmaxf(common, __shfl_xor_sync(0xffffffffu, common, 2));
        float merged = sum[half] * cuda::sm90::Exp2(offset[half] - common);
        merged += __shfl_xor_sync(0xffffffffu, merged, 1);
        merged += __shfl_xor_sync(0xffffffffu, merged, 2);
        const int32_t row = position.row + position.lane / 4 + 8 * half;
        if (position.lane % 4 == 0 && row < position.m) {
          params.tile_sums[static_cast<int64_t>(position.column_tile) * position.m + row] = {common, merged};
        }
      }
    }
  }

 private:
  static constexpr float kNothing = -1e30f;      // stands for a column that is not there
  static constexpr float kLeastOffset = -1e24f;  // so far above kNothing that no exponential is left of it

  static __device__ __forceinline__ void SumFromLargest(const float (&accumulators)[cuda::sm90::kAccumulators], float scale,
                                                        float (&offset)[2], float (&sum)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = kNothing;
#pragma unroll
      for (int i = 0; i < cuda::sm90::kAccumulators / 2; ++i) {
        largest = fmaxf(largest, accumulators[i / 2 * 4 + 2 * half + i % 2]);
      }
      offset[half] = fmaxf(ceilf(largest * scale), kLeastOffset);
      sum[half] = 0.0f;
#pragma unroll
      for (int i = 0; i < cuda::sm90::kAccumulators / 2; ++i) {
        sum[half] += cuda::sm90::Exp2(fmaf(accumulators[i / 2 * 4 + 2 * half + i % 2], scale, -offset[half]));
      }
    }
  }

  // Columns [32 block, 32 block + 32) of the warp's 16 rows, by any of the three ways; values[4 j + 2 h + i] is column 8 j + 2
  // (lane % 4) + i of row lane / 4 + 8 h.
  static __device__ __forceinline__ void StoreSectors(const float* values, int block, bool has_edge, const Params& params,
                                                      const cuda::sm90::EpiloguePosition& position) {
    const int32_t column = position.column + 32 * block + 2 * (position.lane % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = position.row + position.lane / 4 + 8 * half;
      if (row >= position.m) continue;
      float* const out = params.logits + row * params.stride + column;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float low = values[4 * j + 2 * half], high = values[4 * j + 2 * half + 1];
        if (!has_edge) {
          *reinterpret_cast<float2*>(out + 8 * j) = make_float2(low, high);
        } else {
          if (column + 8 * j < position.n) out[8 * j] = low;
          if (column + 8 * j + 1 < position.n) out[8 * j + 1] = high;
        }
      }
    }
  }

  // Into a box of 16 rows of 128 bytes, with chunks of 16 bytes where `place` puts them: (row of 8, chunk) -> chunk.
  template <class Place>
  static __device__ __forceinline__ void FillBox(const float* values, uint32_t box, int32_t lane, const Place& place) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t row = lane / 4;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t address = box + (row + 8 * half) * 128 + (place(row, 2 * j + lane % 4 / 2) << 4) + 8 * (lane % 2);
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(values[4 * j + 2 * half]),
                     "f"(values[4 * j + 2 * half + 1])
                     : "memory");
      }
    }
  }

  // Through the warp's two boxes in turn, so that one is filled while the copy engine reads the other.
  static __device__ __forceinline__ void StoreBox(const float* values, int block, const cuda::sm90::EpiloguePosition& position) {
    if (position.lane == 0) cuda::sm90::StoreWaitRead<1>();
    __syncwarp();
    const uint32_t box = position.staging + (block % 2) * (cuda::sm90::kStagingBytes / 2);
    FillBox(values, box, position.lane, [](uint32_t row, uint32_t chunk) { return chunk ^ row; });
    cuda::sm90::FenceProxyAsync();
    __syncwarp();
    if (position.lane == 0) {
      cuda::sm90::TensorStore(position.map_c, box, position.column + 32 * block, position.row, cuda::sm90::kEvictNormal);
      cuda::sm90::StoreCommit();
    }
  }

  // Through the warp's two boxes in turn, so that one __syncwarp() a block is enough. Chunks lie where neither the writes of a
  // quad's pairs nor the reads of a row meet in a bank.
  static __device__ __forceinline__ void StoreLines(const float* values, int block, bool has_edge, const Params& params,
                                                    const cuda::sm90::EpiloguePosition& position) {
    const int32_t lane = position.lane;
    const uint32_t box = position.staging + (block % 2) * (cuda::sm90::kStagingBytes / 2);
    FillBox(values, box, lane, [](uint32_t row, uint32_t chunk) { return chunk ^ 2 * (row % 4); });
    __syncwarp();
    const int32_t column = position.column + 32 * block + 4 * (lane % 8);
    const uint32_t source = box + lane / 8 * 128 + ((lane % 8 ^ 2 * (lane / 8)) << 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float4 v;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                   : "r"(source + 512 * i)
                   : "memory");
      const int32_t row = position.row + lane / 8 + 4 * i;
      if (row >= position.m) continue;
      float* const out = params.logits + row * params.stride + column;
      if (!has_edge || column + 4 <= position.n) {
        *reinterpret_cast<float4*>(out) = v;
      } else {
        if (column < position.n) out[0] = v.x;
        if (column + 1 < position.n) out[1] = v.y;
        if (column + 2 < position.n) out[2] = v.z;
      }
    }
  }
};

// logits [rows, columns] = hidden [rows, width] * weight [columns, width]^T, with their tiles' sums.
struct LogitsProduct {
  const __nv_bfloat16* hidden;
  const __nv_bfloat16* weight;
  int64_t rows, columns, width;  // width a multiple of 8
  float* logits;                 // [rows, stride]
  int64_t stride;
  float log2_scale;
  TileSum* tile_sums;

  int64_t tiles() const { return (columns + kTileColumns - 1) / kTileColumns; }

  template <LogitsStore kStore, bool kSums>
  void Enqueue(cudaStream_t stream) const {
    using Epilogue = LogitsEpilogue<kStore, kSums>;
    const auto kernel = cuda::sm90::ProductKernel<Epilogue>;
    static const int multiprocessors = [&] {
      int device = 0, count = 0;
      LAB_CUDA(cudaGetDevice(&device));
      LAB_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
      LAB_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, cuda::sm90::kProductSharedBytes));
      return count;
    }();
    const auto map = [](const void* data, CUtensorMapDataType type, int64_t inner, int64_t outer, int64_t stride_bytes,
                        int box_rows) {
      return sm90::MakeTensorMap(data, type, static_cast<uint64_t>(inner), static_cast<uint64_t>(outer),
                                 static_cast<uint64_t>(stride_bytes), 128, static_cast<uint32_t>(box_rows));
    };
    const int64_t cluster_rows =
        (rows + cuda::sm90::kTileM * cuda::sm90::kCluster - 1) / (cuda::sm90::kTileM * cuda::sm90::kCluster);
    const int64_t clusters = std::min<int64_t>(multiprocessors / cuda::sm90::kCluster, cluster_rows * tiles());
    const cuda::sm90::ProductShape shape{static_cast<int32_t>(rows), static_cast<int32_t>(columns), static_cast<int32_t>(width), 8};
    kernel<<<static_cast<unsigned>(clusters * cuda::sm90::kCluster), cuda::sm90::kProductThreads, cuda::sm90::kProductSharedBytes,
             stream>>>(map(hidden, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, width, rows, 2 * width, cuda::sm90::kBoxRowsA),
                       map(weight, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, width, columns, 2 * width, cuda::sm90::kBoxRowsB),
                       map(logits, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, columns, rows, 4 * stride, cuda::sm90::kBoxRowsC), shape,
                       {logits, stride, tile_sums, log2_scale});
    LAB_CUDA(cudaGetLastError());
  }
};

}  // namespace headwater::lab

#endif  // HEADWATER_KERNELS_LAB_LOGITS_EPILOGUE_CUH_
