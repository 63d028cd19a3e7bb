// Mapping   one block a row; a thread takes 16 bytes of M at a time.
// Traffic   M is read and written once, a divergence's read once more before: N4096 V128256 in 16 bits 2.1 and 3.2 GB.
// Work      about 21 instructions an element in bf16 (device/dither_chunk.cuh).
// Numerics  counts and sums are fp32 in a thread, fp64 over threads.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <type_traits>

#include "kernels/cuda/device/dither_chunk.cuh"
#include "kernels/cuda/dither.h"

namespace headwater::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kSums = 3;
// Smaller resolutions are not applied: their reciprocals come near fp32's range.
constexpr double kSmallestUnit = 7.888609052210118e-31;  // 2^-100

template <typename T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

template <typename T>
struct alignas(16) Vector {
  T values[kVector<T>];
};

__device__ __forceinline__ float ToFloat(float value) { return value; }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float ToFloat(__half value) { return __half2float(value); }
__device__ __forceinline__ void FromFloat(float value, float* out) { *out = value; }
__device__ __forceinline__ void FromFloat(float value, __nv_bfloat16* out) { *out = __float2bfloat16_rn(value); }
__device__ __forceinline__ void FromFloat(float value, __half* out) { *out = __float2half_rn(value); }

// A block's sums, on its first thread.
__device__ __forceinline__ void SumOverBlock(double (&own)[kSums]) {
  __shared__ double by_warp[kWarps][kSums];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) own[i] += __shfl_down_sync(0xffffffffu, own[i], offset);
  }
  if (threadIdx.x % 32 == 0) {
    for (int i = 0; i < kSums; ++i) by_warp[threadIdx.x / 32][i] = own[i];
  }
  __syncthreads();
  for (int warp = 1; threadIdx.x == 0 && warp < kWarps; ++warp) {
    for (int i = 0; i < kSums; ++i) own[i] += by_warp[warp][i];
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) MagnitudesKernel(const T* matrix, int64_t stride, int32_t columns, double* sums) {
  const int64_t row = blockIdx.x;
  const auto* const vectors = reinterpret_cast<const Vector<T>*>(matrix + row * stride);
  float own = 0.0f;
  for (int32_t j = static_cast<int32_t>(threadIdx.x) * kVector<T>; j < columns; j += kThreads * kVector<T>) {
    const Vector<T> vector = vectors[j / kVector<T>];
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) own += j + i < columns ? fabsf(ToFloat(vector.values[i])) : 0.0f;
  }
  double total[kSums] = {static_cast<double>(own), 0, 0};
  SumOverBlock(total);
  if (threadIdx.x == 0) sums[row] = total[0];
}

// The nearest number of M's type.
__device__ float Rounded(double value, Element element) {
  const auto single = static_cast<float>(value);
  if (element == Element::kBFloat16) return __bfloat162float(__float2bfloat16_rn(single));
  if (element == Element::kFloat16) return __half2float(__float2half_rn(single));
  return single;
}

__global__ void __launch_bounds__(128)
    DivergenceResolutionsKernel(const DivergenceResolution of, int64_t row_count, DitherRow* rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 128 + threadIdx.x;
  if (row >= row_count) return;
  double sum = 0;
  for (int32_t shard = 0; shard < of.shard_count; ++shard) sum += of.magnitudes[shard * row_count + row];
  const double to_g = fabs(static_cast<double>(of.row_factor[row]) / (of.factor * static_cast<double>(of.token_weights[row])));
  const double bound = of.resolution * sum * to_g / 2;
  DitherRow out;
  if (bound > kSmallestUnit && isfinite(bound)) {
    int exponent = 0;
    frexp(bound, &exponent);
    out.unit = Rounded(ldexp(1.0, exponent - 1) / to_g, of.element);
    out.unit_in_g = static_cast<double>(out.unit) * to_g;
  }
  rows[row] = out;
}

// What a thread has met of a row.
struct EntrySums {
  int32_t large = 0;  // entries that are not below the resolution
  float error = 0.0f;
  float norm = 0.0f;
};

// Entries of columns `column` to column + kVector<T> of the vocabulary.
template <typename T>
__device__ __forceinline__ Vector<T> Dithered(Vector<T> vector, uint32_t column, DitherKey key, float unit, float inverse_unit,
                                              EntrySums* sums) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    ChunkSums of_chunk{{}, sums->error, sums->norm};
    const uint4 dithered = DitherChunk<true>(reinterpret_cast<const uint4&>(vector), column, key, unit, inverse_unit, &of_chunk);
    sums->large += static_cast<int32_t>(__low2float(of_chunk.large) + __high2float(of_chunk.large));
    sums->error = of_chunk.error;
    sums->norm = of_chunk.norm;
    return reinterpret_cast<const Vector<T>&>(dithered);
  } else {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      const float ratio = ToFloat(vector.values[i]) * inverse_unit;
      const float size = fabsf(ratio);
      const bool below = size < 1.0f;  // a NaN stays one
      if (below) {
        const bool survives = DitherSurvives(size, key, column + static_cast<uint32_t>(i));
        FromFloat(survives ? copysignf(unit, ratio) : 0.0f, &vector.values[i]);
      }
      sums->large += below ? 0 : 1;
      sums->error += below ? size * (1.0f - size) : 0.0f;
      sums->norm = fmaf(size, size, sums->norm);
    }
    return vector;
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    DitherKernel(T* matrix, int64_t stride, int32_t columns, uint32_t vocab_start, const int32_t* targets, const DitherRow* rows,
                 const DitherKey* keys, bool add, DitherSums* sums) {
  const int64_t row = blockIdx.x;
  const DitherRow of_row = rows[row];
  if (!(of_row.unit > 0.0f)) {
    if (threadIdx.x == 0 && !add) sums[row] = DitherSums();
    return;
  }
  const DitherKey key = keys[row];
  const float inverse_unit = 1.0f / of_row.unit;
  auto* const vectors = reinterpret_cast<Vector<T>*>(matrix + row * stride);
  EntrySums own;
  for (int32_t j = static_cast<int32_t>(threadIdx.x) * kVector<T>; j < columns; j += kThreads * kVector<T>) {
    Vector<T> vector = vectors[j / kVector<T>];
    if (j + kVector < T >> columns) {
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) {
        if (j + i >= columns) FromFloat(0.0f, &vector.values[i]);
      }
    }
    vectors[j / kVector<T>] = Dithered(vector, vocab_start + static_cast<uint32_t>(j), key, of_row.unit, inverse_unit, &own);
  }
  double total[kSums] = {static_cast<double>(own.large), static_cast<double>(own.error), static_cast<double>(own.norm)};
  SumOverBlock(total);
  if (threadIdx.x != 0) return;
  const bool has_target = targets != nullptr && static_cast<uint32_t>(targets[row]) - vocab_start < static_cast<uint32_t>(columns);
  const double entries = columns - (has_target ? 1 : 0);
  const DitherSums before = add ? sums[row] : DitherSums();
  sums[row] = {before.entry_count + entries - total[0], before.squared_error + total[1], before.squared_norm + total[2]};
}

__global__ void __launch_bounds__(kThreads)
    SumDitherKernel(const DitherSums* sums, const DitherRow* rows, int64_t row_count, DitherSums* total) {
  double own[kSums] = {0, 0, 0};
  for (int64_t row = threadIdx.x; row < row_count; row += kThreads) {
    const double unit = rows[row].unit_in_g, target = rows[row].target_entry;
    own[0] += sums[row].entry_count;
    own[1] += unit * unit * sums[row].squared_error;
    own[2] += unit * unit * sums[row].squared_norm + target * target;
  }
  SumOverBlock(own);
  if (threadIdx.x == 0) *total = {own[0], own[1], own[2]};
}

// Calls launch(pointer to the first element).
template <typename Launch>
cudaError_t WithElements(const MutableMatrix& matrix, const Launch& launch) {
  if (matrix.rows == 0) return cudaSuccess;
  switch (matrix.element) {
    case Element::kFloat32:
      launch(static_cast<float*>(matrix.data));
      return cudaGetLastError();
    case Element::kBFloat16:
      launch(static_cast<__nv_bfloat16*>(matrix.data));
      return cudaGetLastError();
    case Element::kFloat16:
      launch(static_cast<__half*>(matrix.data));
      return cudaGetLastError();
    case Element::kFloat64:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t LaunchMagnitudes(const MutableMatrix& matrix, double* sums, cudaStream_t stream) {
  return WithElements(matrix, [&](const auto* elements) {
    MagnitudesKernel<<<static_cast<unsigned>(matrix.rows), kThreads, 0, stream>>>(elements, matrix.stride,
                                                                                  static_cast<int32_t>(matrix.columns), sums);
  });
}

cudaError_t LaunchDivergenceResolutions(const DivergenceResolution& of, int64_t row_count, DitherRow* rows, cudaStream_t stream) {
  if (row_count == 0) return cudaSuccess;
  DivergenceResolutionsKernel<<<static_cast<unsigned>((row_count + 127) / 128), 128, 0, stream>>>(of, row_count, rows);
  return cudaGetLastError();
}

cudaError_t LaunchDither(const MutableMatrix& matrix, int64_t vocab_start, const int32_t* targets, const DitherRow* rows,
                         const DitherKey* keys, bool add, DitherSums* sums, cudaStream_t stream) {
  if (vocab_start % 2 != 0) return cudaErrorInvalidValue;
  return WithElements(matrix, [&](auto* elements) {
    DitherKernel<<<static_cast<unsigned>(matrix.rows), kThreads, 0, stream>>>(
        elements, matrix.stride, static_cast<int32_t>(matrix.columns), static_cast<uint32_t>(vocab_start), targets, rows, keys, add,
        sums);
  });
}

cudaError_t LaunchSumDither(const DitherSums* sums, const DitherRow* rows, int64_t row_count, DitherSums* total,
                            cudaStream_t stream) {
  SumDitherKernel<<<1, kThreads, 0, stream>>>(sums, rows, row_count, total);
  return cudaGetLastError();
}

}  // namespace headwater::cuda
