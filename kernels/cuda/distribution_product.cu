#include <cuda_bf16.h>

#include "kernels/cuda/device/row_math.cuh"
#include "kernels/cuda/device/sm90_launch.cuh"
#include "kernels/cuda/device/sm90_product.cuh"
#include "kernels/cuda/distribution_product.h"

namespace headwater::cuda {
namespace {

// What a tile tells of one of its rows, in planes [column tiles, rows] one after the other.
enum Plane : int { kMax, kRest, kWeighted, kSquares, kTotal, kBest, kPlanes };

// Statistics of a tile of logits out of its accumulators, of which a thread has 80 columns of two rows.
//
// Numerics  as row_distribution.cu, relative to the tile's own maximum: a first pass over the accumulators makes logits of them and
//           finds it, a second one adds up. Columns that have it are counted, and one of them is left out at the end. An
//           exponential is one multiply-add and one approximation, and off by 2^-24 of its exponent: less than the tensor cores'
//           truncation leaves of a logit.
// Cost      about 13 instructions an element, of which one EX2, and fourteen shuffles a row and tile: a row lies in one quad.
template <bool kWritesProducts>
struct DistributionEpilogue {
  struct Params {
    const int32_t* targets;     // [m], columns of the whole vocabulary
    const __nv_bfloat16* bias;  // [n], at a multiple of 4 bytes, or null
    float* planes;
    int64_t plane;  // floats of one
    float logit_scale;
    float cap;  // 0: none
    float cap_exponent;
    float half_inverse_cap;
    int32_t vocab_start;
  };
  struct Rows {
    int32_t target[2];  // column within the tile; anything else if it is not there
  };

  static __device__ __forceinline__ Rows LoadRows(const Params& params, const sm90::EpiloguePosition& position) {
    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = position.row + position.lane / 4 + 8 * half;
      rows.target[half] = (row < position.m ? params.targets[row] - params.vocab_start : -1) - position.column;
    }
    return rows;
  }

  // 64 columns from `first` on: accumulators to logits, -inf where there is no column or it is the target.
  template <bool kMasked>
  static __device__ __forceinline__ void ToLogits(float* accumulators, int first, const Rows& rows, const Params& params,
                                                  const sm90::EpiloguePosition& position, float (&max)[2], float (&total)[2]) {
    if (params.bias != nullptr) sm90::AddBias<kMasked>(accumulators, first, params.bias, position);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int32_t pair = first + 8 * j + 2 * (position.lane % 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& z = accumulators[4 * j + 2 * half + i];
          z = __fmul_rn(z, params.logit_scale);
          if (params.cap != 0.0f) {
            z = row_math::SoftcapQuick(z, __fmul_rn(z, params.cap_exponent), params.cap, params.half_inverse_cap).z;
          }
          if (kMasked && (pair + i == rows.target[half] || position.column + pair + i >= position.n)) {
            z = -INFINITY;
          } else {
            total[half] += z;
          }
          max[half] = fmaxf(max[half], z);
        }
      }
    }
  }

  template <class Merge>
  static __device__ __forceinline__ void MergeQuad(float& value, const Merge& merge) {
    value = merge(value, __shfl_xor_sync(0xffffffffu, value, 1));
    value = merge(value, __shfl_xor_sync(0xffffffffu, value, 2));
  }

  static __device__ __forceinline__ void Run(float (&accumulators)[sm90::kAccumulators], const Rows& rows, const Params& params,
                                             const sm90::EpiloguePosition& position) {
    float max[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int block = 0; block < sm90::kAccumulators / 32; ++block) {
      const int first = 64 * block;
      if constexpr (kWritesProducts) {
        sm90::StoreFloatBlock(position, 2 * block, accumulators + 32 * block);
        sm90::StoreFloatBlock(position, 2 * block + 1, accumulators + 32 * block + 16);
      }
      const bool holds_target =
          static_cast<uint32_t>(rows.target[0] - first) < 64u || static_cast<uint32_t>(rows.target[1] - first) < 64u;
      if (__any_sync(0xffffffffu, holds_target || position.column + first + 64 > position.n)) {
        ToLogits<true>(accumulators + 32 * block, first, rows, params, position, max, total);
      } else {
        ToLogits<false>(accumulators + 32 * block, first, rows, params, position, max, total);
      }
    }
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    const auto smaller = [](float a, float b) { return fminf(a, b); };
    const auto sum = [](float a, float b) { return a + b; };
    // In exponents of 2. What the rounding of the maximum's leaves is in every exponent, and is taken out of the sums.
    float offset[2], residual[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      MergeQuad(max[half], larger);
      // No column: an infinity must not be subtracted from itself.
      const float from = max[half] == -INFINITY ? 0.0f : max[half];
      offset[half] = __fmul_rn(from, row_math::kLog2E);
      residual[half] = fmaf(from, row_math::kLog2E, -offset[half]);
    }

    float rest[2] = {0.0f, 0.0f}, weighted[2] = {0.0f, 0.0f}, squares[2] = {0.0f, 0.0f}, tops[2] = {0.0f, 0.0f};
    float best[2] = {INFINITY, INFINITY};  // a column within the tile
#pragma unroll
    for (int block = 0; block < sm90::kAccumulators / 32; ++block) {
      const auto pair = static_cast<float>(64 * block + 2 * (position.lane % 4));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // fp32 sums of more terms lose digits.
        float block_rest = 0.0f, block_weighted = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float z = accumulators[32 * block + 4 * j + 2 * half + i];
            const float exponent = row_math::ExponentOver(z, offset[half]);
            float e = sm90::Exp2(exponent);
            if (z == max[half]) {
              e = 0.0f;
              tops[half] += 1.0f;
              best[half] = fminf(best[half], pair + static_cast<float>(8 * j + i));
            }
            block_rest += e;
            // 0 * -inf is not meant.
            block_weighted = fmaf(e, fmaxf(exponent, -150.0f), block_weighted);
            squares[half] = fmaf(e, e, squares[half]);
          }
        }
        rest[half] += block_rest;
        weighted[half] += block_weighted;
      }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      MergeQuad(rest[half], sum);
      MergeQuad(weighted[half], sum);
      MergeQuad(squares[half], sum);
      MergeQuad(total[half], sum);
      MergeQuad(tops[half], sum);
      MergeQuad(best[half], smaller);
      const int32_t row = position.row + position.lane / 4 + 8 * half;
      if (position.lane % 4 != 0 || row >= position.m) continue;
      constexpr auto kLn2 = static_cast<float>(row_math::kLn2);
      const float correction = residual[half] * kLn2;
      // Of the columns that have the maximum all but one.
      const float others = fmaxf(tops[half] - 1.0f, 0.0f);
      float* const out = params.planes + static_cast<int64_t>(position.column_tile) * position.m + row;
      out[kMax * params.plane] = max[half];
      out[kRest * params.plane] = fmaf(-correction, rest[half], rest[half]) + others;
      out[kWeighted * params.plane] = kLn2 * fmaf(-residual[half], rest[half], weighted[half]);
      out[kSquares * params.plane] = fmaf(-2.0f * correction, squares[half], squares[half]) + others;
      out[kTotal * params.plane] = total[half];
      out[kBest * params.plane] = best[half];
    }
  }
};

// out[i] = the tiles' statistics of row i, merged by the lines that merge shards': 16 runs of tiles, each in order, then the runs
// in order. Mapping: 32 rows a block, a warp a run.
constexpr int kRuns = 16;
__global__ void __launch_bounds__(32 * kRuns)
    MergeTilesKernel(const float* planes, int64_t plane, int64_t row_count, int64_t tiles, int32_t vocab_start, RowStats* out) {
  __shared__ double runs[kRuns][kRowStatsDoubles][32];
  const int lane = static_cast<int>(threadIdx.x) % 32, run = static_cast<int>(threadIdx.x) / 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  RowStats merged;
  if (row < row_count) {
    const int64_t end = tiles * (run + 1) / kRuns;
    for (int64_t tile = tiles * run / kRuns; tile < end; ++tile) {
      const float* const from = planes + tile * row_count + row;
      const auto value = [&](Plane which) { return static_cast<double>(__ldg(from + which * plane)); };
      RowStats next;
      next.best = value(kMax);
      next.best_column = next.best == -kRowInfinity ? -1.0 : static_cast<double>(vocab_start + tile * sm90::kTileN) + value(kBest);
      const double rest = value(kRest);
      next.others = {
          next.best,    next.best == -kRowInfinity ? rest : 1 + rest, value(kWeighted), value(kTotal), rest, value(kSquares),
          value(kTotal)};
      MergeStats(next, &merged);
    }
  }
#pragma unroll
  for (int64_t i = 0; i < kRowStatsDoubles; ++i) runs[run][i][lane] = reinterpret_cast<const double*>(&merged)[i];
  __syncthreads();
  if (run != 0 || row >= row_count) return;
  for (int other = 1; other < kRuns; ++other) {
    RowStats next;
#pragma unroll
    for (int64_t i = 0; i < kRowStatsDoubles; ++i) reinterpret_cast<double*>(&next)[i] = runs[other][i][lane];
    MergeStats(next, &merged);
  }
  out[row] = merged;
}

template <bool kWritesProducts>
cudaError_t LaunchProduct(const DistributionProductParams& params, cudaStream_t stream) {
  using Epilogue = DistributionEpilogue<kWritesProducts>;
  const ShardWeights& shard = params.shard;
  const double cap = params.transform.softcap;
  typename Epilogue::Params epilogue{};
  epilogue.targets = params.targets;
  epilogue.bias = static_cast<const __nv_bfloat16*>(shard.bias);
  epilogue.planes = static_cast<float*>(params.scratch);
  epilogue.plane = sm90::ColumnTiles(shard.columns) * params.hidden.rows;
  epilogue.logit_scale = static_cast<float>(params.transform.logit_scale);
  epilogue.cap = static_cast<float>(cap);
  epilogue.cap_exponent = cap == 0 ? 0.0f : static_cast<float>(row_math::SoftcapExponent(cap));
  epilogue.half_inverse_cap = cap == 0 ? 0.0f : static_cast<float>(0.5 / cap);
  epilogue.vocab_start = static_cast<int32_t>(shard.vocab_start);
  const ConstMatrix products = {params.products, params.hidden.rows, shard.columns, params.product_stride, Element::kFloat32};
  return sm90::LaunchProduct<Epilogue>(params.hidden, shard, products, epilogue, stream);
}

}  // namespace

int64_t DistributionScratchBytes(int64_t row_count, int64_t columns) {
  return kPlanes * sm90::ColumnTiles(columns) * row_count * static_cast<int64_t>(sizeof(float));
}

cudaError_t LaunchDistributionProduct(const DistributionProductParams& params, RowStats* out, cudaStream_t stream) {
  const int64_t rows = params.hidden.rows, tiles = sm90::ColumnTiles(params.shard.columns);
  if (rows == 0) return cudaSuccess;
  const auto* const planes = static_cast<const float*>(params.scratch);
  const auto vocab_start = static_cast<int32_t>(params.shard.vocab_start);
  if (tiles > 0) {
    const cudaError_t error =
        params.products == nullptr ? LaunchProduct<false>(params, stream) : LaunchProduct<true>(params, stream);
    if (error != cudaSuccess) return error;
  }
  MergeTilesKernel<<<static_cast<unsigned>((rows + 31) / 32), 32 * kRuns, 0, stream>>>(planes, tiles * rows, rows, tiles,
                                                                                       vocab_start, out);
  return cudaGetLastError();
}

}  // namespace headwater::cuda
