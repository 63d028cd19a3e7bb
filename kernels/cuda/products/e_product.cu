#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "kernels/cuda/device/row_factors.cuh"
#include "kernels/cuda/device/sm90_launch.cuh"
#include "kernels/cuda/products/e_product.h"

namespace headwater::cuda {
namespace {

// The softmax's exponentials and sums of a tile of logits, which never leave the registers.
//
// With u = acc + bias: z = logit_scale * u, or softcap * tanh(logit_scale * u / softcap). Exponentials are taken in base 2 of
// z log2(e) - c log2(e).
//
// Cost. Per element one FFMA, one EX2, one FADD and half a conversion. Only the few 16 x 64 blocks that hold a target or the
// vocabulary's edge compare with the target. A row and tile takes two shuffles, because a row lies in one quad.
//
// Numerics. The factor that turns u (or tanh) into base-2 units is rounded to fp32 (relative 2^-25 at most). The offset is taken
// with that rounded factor, so its error is that of z - c, not of z. The offset itself is split into an fp32 number and a
// remainder, which the row's sum gets back as a factor. E keeps the remainder, a relative error of up to 2^-24 |c log2 e|. The rest
// of an exponential's relative error is 2^-22 of EX2, 2^-24 |z - c| of the fused multiply-add and 2^-25 |z - c| of the factor. With
// a softcap 2^-22 * softcap is added, tanh's absolute error.
template <bool kWithBias, bool kWithSoftcap>
struct EProductEpilogue {
  using Operands = sm90::Bf16Operands;
  struct Params {
    const double* offsets;      // [m]
    const int32_t* targets;     // [m], columns of the whole vocabulary
    const __nv_bfloat16* bias;  // [n], at a multiple of 4 bytes; null without kWithBias
    float* partial_sums;        // [column tiles, m] out
    double softcap;             // 0 without kWithSoftcap
    double offset_factor;       // c_i -> log2 units, with the rounded factor of the columns
    float column_factor;        // u -> log2 units; with a softcap u -> 2 log2(e) * logit_scale / softcap
    float softcap_log2;         // softcap log2(e); not read without kWithSoftcap
    int32_t vocab_start;
  };
  struct Rows {
    float offset[2];      // log2 units
    float correction[2];  // relative error of the row's exponentials that is due to the offset's rounding
    int32_t target[2];    // column within the tile; anything else if it is not there
  };

  static __device__ __forceinline__ Rows LoadRows(const Params& params, const sm90::EpiloguePosition& position) {
    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = position.row + position.lane / 4 + 8 * half;
      const bool valid = row < position.m;
      double c = valid ? params.offsets[row] : 0.0;
      if constexpr (kWithSoftcap) {
        // cap * tanh(c / cap), absolutely exact to 2^-52 cap, which is all that an offset needs.
        const double e = exp(-2.0 * fabs(c) / params.softcap);
        c = copysign(params.softcap * ((1.0 - e) / (1.0 + e)), c);
      }
      const double offset = c * params.offset_factor;
      rows.offset[half] = static_cast<float>(offset);
      rows.correction[half] = static_cast<float>((static_cast<double>(rows.offset[half]) - offset) * 0.6931471805599453);
      rows.target[half] = (valid ? params.targets[row] - params.vocab_start : -1) - position.column;
    }
    return rows;
  }

  // acc += bias for 64 columns from `first` on, ahead of the exponentials, which leave no registers. At the vocabulary's edge each
  // lane loads one pair of columns and hands it to the lanes that have them: sixteen guarded loads would spill.
  template <bool kMasked>
  static __device__ __forceinline__ void AddBias(float* accumulators, int first, const Params& params,
                                                 const sm90::EpiloguePosition& position) {
    const int32_t column = position.column + first + 2 * (position.lane % 4);
    const __nv_bfloat16* source = params.bias + column;
    uint32_t mine = 0;
    if constexpr (kMasked) {
      const int32_t own = position.column + first + 2 * position.lane;
      const auto* bits = reinterpret_cast<const uint16_t*>(params.bias);
      if (own < position.n) mine = __ldg(bits + own);
      if (own + 1 < position.n) mine |= static_cast<uint32_t>(__ldg(bits + own + 1)) << 16;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float2 bias = {0.0f, 0.0f};
      if constexpr (kMasked) {
        const uint32_t both = __shfl_sync(0xffffffffu, mine, 4 * j + position.lane % 4);
        bias.x = __uint_as_float(both << 16);
        bias.y = __uint_as_float(both & 0xffff0000u);
      } else {
        bias = __bfloat1622float2(__ldg(reinterpret_cast<const __nv_bfloat162*>(source + 8 * j)));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        accumulators[4 * j + 2 * half] += bias.x;
        accumulators[4 * j + 2 * half + 1] += bias.y;
      }
    }
  }

  // 64 columns from `first` on: exponentials into `packed`, sums into the running ones.
  template <bool kMasked>
  static __device__ __forceinline__ void Block(const float* accumulators, int first, const Rows& rows, const Params& params,
                                               const sm90::EpiloguePosition& position, uint32_t (&packed)[16], float (&sum)[2]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int32_t pair = first + 8 * j + 2 * (position.lane % 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float value[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float u = accumulators[4 * j + 2 * half + i];
          float exponent, derivative = 1.0f;
          if constexpr (kWithSoftcap) {
            // With e = e^{2 t}: tanh t = 1 - 2 / (1 + e), its derivative 4 e / (1 + e)^2, neither of which overflows below 2^60.
            const float argument = u * params.column_factor;
            const float e = sm90::Exp2(argument > 60.0f ? 60.0f : argument);  // a NaN stays one
            const float twice = 2.0f * sm90::ReciprocalApprox(1.0f + e);
            exponent = fmaf(1.0f - twice, params.softcap_log2, -rows.offset[half]);
            derivative = e * twice * twice;
          } else {
            exponent = fmaf(u, params.column_factor, -rows.offset[half]);
          }
          float exponential = sm90::Exp2(exponent);
          if constexpr (kMasked) {
            if (pair + i == rows.target[half] || position.column + pair + i >= position.n) exponential = 0.0f;
          }
          sum[half] += exponential;
          value[i] = kWithSoftcap ? exponential * derivative : exponential;
        }
        packed[2 * j + half] = sm90::PackBf16(value[0], value[1]);
      }
    }
  }

  static __device__ __forceinline__ void Run(float (&accumulators)[sm90::kAccumulators], const Rows& rows, const Params& params,
                                             const sm90::EpiloguePosition& position) {
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int block = 0; block < sm90::kAccumulators / 32; ++block) {
      const int first = 64 * block;
      const bool holds_target =
          static_cast<uint32_t>(rows.target[0] - first) < 64u || static_cast<uint32_t>(rows.target[1] - first) < 64u;
      uint32_t packed[16];
      if (__any_sync(0xffffffffu, holds_target || position.column + first + 64 > position.n)) {
        if constexpr (kWithBias) AddBias<true>(accumulators + 32 * block, first, params, position);
        Block<true>(accumulators + 32 * block, first, rows, params, position, packed, sum);
      } else {
        if constexpr (kWithBias) AddBias<false>(accumulators + 32 * block, first, params, position);
        Block<false>(accumulators + 32 * block, first, rows, params, position, packed, sum);
      }
      sm90::StoreBf16Block(position, block, packed);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
      const int32_t row = position.row + position.lane / 4 + 8 * half;
      if (position.lane % 4 == 0 && row < position.m) {
        params.partial_sums[static_cast<int64_t>(position.column_tile) * position.m + row] =
            fmaf(sum[half], rows.correction[half], sum[half]);
      }
    }
  }
};

// sums[i] = the partial sums of row i, [tiles, row_count]: 16 runs of tiles, each added in order, then the runs in order.
// Mapping: 32 rows a block, a warp a run; reads 4 * tiles * row_count bytes.
constexpr int kSumRuns = 16;
__global__ void __launch_bounds__(32 * kSumRuns)
    SumPartialsKernel(const float* partial_sums, int64_t row_count, int64_t tiles, double* sums) {
  __shared__ double runs[kSumRuns][32];
  const int lane = static_cast<int>(threadIdx.x) % 32, run = static_cast<int>(threadIdx.x) / 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  double sum = 0;
  if (row < row_count) {
    const int64_t end = tiles * (run + 1) / kSumRuns;
#pragma unroll 8
    for (int64_t tile = tiles * run / kSumRuns; tile < end; ++tile) {
      sum += static_cast<double>(__ldg(partial_sums + tile * row_count + row));
    }
  }
  runs[run][lane] = sum;
  __syncthreads();
  if (run != 0 || row >= row_count) return;
  for (int i = 1; i < kSumRuns; ++i) sum += runs[i][lane];
  sums[row] = sum;
}

// One thread a row.
constexpr double kSmallestUnit = 7.888609052210118e-31;  // 2^-100; smaller resolutions are not applied
__global__ void __launch_bounds__(128)
    EResolutionsKernel(const double* sums, int32_t shard_count, int64_t row_count, double resolution, DitherRow* rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 128 + threadIdx.x;
  if (row >= row_count) return;
  double sum = 0;
  for (int32_t shard = 0; shard < shard_count; ++shard) sum += sums[shard * row_count + row];
  const double bound = resolution * sum;
  DitherRow out;
  if (bound > kSmallestUnit && isfinite(bound)) {
    int exponent = 0;
    frexp(bound, &exponent);
    out.unit = static_cast<float>(ldexp(1.0, exponent - 1));
  }
  rows[row] = out;
}

// One thread a row. Entropy and its kin and the argmax are not to be had from S, and are never asked for in this form.
__global__ void __launch_bounds__(128)
    FinishERowsKernel(const double* sums, int32_t shard_count, const double* target_arguments, const double* offsets,
                      const ChunkRows rows, const FinishOptions options, RowReport* reports, float* row_factor,
                      float* target_factor, int32_t* overflow, DitherRow* dither) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 128 + threadIdx.x;
  if (row >= rows.row_count) return;
  double sum = 0;
  for (int32_t shard = 0; shard < shard_count; ++shard) sum += sums[shard * rows.row_count + row];
  const double argument = target_arguments[row];
  const double softcap = options.transform.softcap;
  // Not contracted: where the offset is the target's, their difference is 0.
  const auto logit = [softcap](double a) { return softcap == 0 ? a : __dmul_rn(softcap, tanh(a / softcap)); };
  if (!(sum <= kEFormLargestSum) || !isfinite(argument)) *overflow = 1;

  RowStats stats;
  stats.target_logit = logit(argument);
  stats.others = {logit(offsets[row]), sum, 0, 0, 0, 0, 0};
  const RowLoss loss = FinishRow(stats, rows.targets[row], options.cross_entropy.term);

  const row_factors::FactoredGradient factored = row_factors::FactoredGradientOf(loss, rows, options, row);
  const RowGradient& gradient = factored.gradient;
  const double scale = factored.factor * options.hard_weight;
  RowReport report;
  report.hard = loss.hard;
  report.z_loss = loss.z_loss;
  report.lse = loss.lse;
  report.target_log_probability = loss.target_log_probability;
  // No other column's exponential is larger than their sum.
  report.gradient_bound = fabs(scale) * fmax(fabs(gradient.probability_factor) * sum, fabs(gradient.target));
  reports[row] = report;
  row_factor[row] = static_cast<float>(scale * gradient.probability_factor);
  target_factor[row] = static_cast<float>(scale * gradient.target * SoftcapDerivative(argument, softcap));
  if (options.gradient_resolution == 0) return;
  if (dither[row].unit == 0.0f) return;
  dither[row].unit_in_g = static_cast<double>(dither[row].unit) * loss.inverse_sum;
  dither[row].target_entry = sum * loss.inverse_sum * SoftcapDerivative(argument, softcap);
}

// --- Launch ----------------------------------------------------------------------------------------------------------------------

constexpr double kLog2E = 1.4426950408889634;

template <bool kWithBias, bool kWithSoftcap>
cudaError_t Launch(const EProductParams& params, cudaStream_t stream) {
  using Epilogue = EProductEpilogue<kWithBias, kWithSoftcap>;
  const ShardWeights& shard = params.shard;
  const Transform& transform = params.transform;
  typename Epilogue::Params epilogue{};
  epilogue.offsets = params.offsets;
  epilogue.targets = params.targets;
  epilogue.bias = static_cast<const __nv_bfloat16*>(shard.bias);
  epilogue.partial_sums = params.partial_sums;
  epilogue.softcap = transform.softcap;
  epilogue.vocab_start = static_cast<int32_t>(shard.vocab_start);
  if (kWithSoftcap) {
    epilogue.column_factor = static_cast<float>(2 * kLog2E * transform.logit_scale / transform.softcap);
    epilogue.softcap_log2 = static_cast<float>(transform.softcap * kLog2E);
    epilogue.offset_factor = static_cast<double>(epilogue.softcap_log2) / transform.softcap;
  } else {
    epilogue.column_factor = static_cast<float>(transform.logit_scale * kLog2E);
    epilogue.offset_factor =
        transform.logit_scale == 0 ? kLog2E : static_cast<double>(epilogue.column_factor) / transform.logit_scale;
  }
  const sm90::Operand hidden = {params.hidden.data, params.hidden.rows, params.hidden.stride};
  const sm90::Operand weight = {shard.weight, shard.columns, shard.stride};
  const sm90::Operand exponentials = {params.exponentials, params.hidden.rows, params.e_stride};
  return sm90::LaunchProduct<Epilogue>(hidden, weight, shard.width, exponentials, epilogue, stream);
}

bool IsMultiple(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

}  // namespace

int64_t EProductPartialCount(int64_t row_count, int64_t columns) { return sm90::ColumnTiles(columns) * row_count; }

cudaError_t LaunchEProduct(const EProductParams& params, cudaStream_t stream) {
  const ShardWeights& shard = params.shard;
  if (params.hidden.rows == 0 || shard.columns == 0) return cudaSuccess;
  // The limit of the copy engine and of the kernel's 32-bit indices.
  constexpr int64_t kLargest = int64_t{1} << 30;
  if (params.hidden.element != Element::kBFloat16 || shard.element != Element::kBFloat16 || !IsMultiple(params.hidden.data, 16) ||
      !IsMultiple(shard.weight, 16) || !IsMultiple(params.exponentials, 16) || !IsMultiple(shard.bias, 4) ||
      params.hidden.stride % 8 != 0 || shard.stride % 8 != 0 || params.e_stride % 8 != 0 || params.e_stride < shard.columns ||
      params.hidden.rows > kLargest || shard.columns > kLargest || shard.width > kLargest || shard.width < 1) {
    return cudaErrorInvalidValue;
  }
  if (params.transform.softcap == 0) {
    return shard.bias == nullptr ? Launch<false, false>(params, stream) : Launch<true, false>(params, stream);
  }
  return shard.bias == nullptr ? Launch<false, true>(params, stream) : Launch<true, true>(params, stream);
}

cudaError_t LaunchSumPartials(const float* partial_sums, int64_t row_count, int64_t columns, double* sums, cudaStream_t stream) {
  if (row_count == 0) return cudaSuccess;
  SumPartialsKernel<<<static_cast<unsigned>((row_count + 31) / 32), 32 * kSumRuns, 0, stream>>>(partial_sums, row_count,
                                                                                                sm90::ColumnTiles(columns), sums);
  return cudaGetLastError();
}

cudaError_t LaunchEResolutions(const double* sums, int32_t shard_count, int64_t row_count, double resolution, DitherRow* rows,
                               cudaStream_t stream) {
  if (row_count == 0) return cudaSuccess;
  EResolutionsKernel<<<static_cast<unsigned>((row_count + 127) / 128), 128, 0, stream>>>(sums, shard_count, row_count, resolution,
                                                                                         rows);
  return cudaGetLastError();
}

cudaError_t LaunchFinishERows(const double* sums, int32_t shard_count, const double* target_arguments, const double* offsets,
                              const ChunkRows& rows, const FinishOptions& options, RowReport* reports, float* row_factor,
                              float* target_factor, int32_t* overflow, DitherRow* dither, cudaStream_t stream) {
  if (rows.row_count == 0) return cudaSuccess;
  FinishERowsKernel<<<static_cast<unsigned>((rows.row_count + 127) / 128), 128, 0, stream>>>(
      sums, shard_count, target_arguments, offsets, rows, options, reports, row_factor, target_factor, overflow, dither);
  return cudaGetLastError();
}

}  // namespace headwater::cuda
