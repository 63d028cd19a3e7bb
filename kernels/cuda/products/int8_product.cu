#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "kernels/core/loss/dither.h"
#include "kernels/cuda/device/elements.cuh"
#include "kernels/cuda/device/row_block.cuh"
#include "kernels/cuda/device/sm90_launch.cuh"
#include "kernels/cuda/products/int8_product.h"

namespace headwater::cuda {

// It has external linkage because nothing uses it below sm_90a, where the product is not compiled.
struct Int8Epilogue {
  using Operands = sm90::Int8Operands;
  struct Params {
    const float* row_scales;     // [m]
    const float* column_scales;  // [n]
    float* out;                  // [m, stride]
    int64_t stride;
  };
  struct Rows {
    float scale[2];
  };
  static __device__ __forceinline__ Rows LoadRows(const Params& params, const sm90::EpiloguePosition& position) {
    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = position.row + position.lane / 4 + 8 * half;
      rows.scale[half] = row < position.m ? __ldg(params.row_scales + row) : 0.0f;
    }
    return rows;
  }
  // A quad stores 32 bytes of a row at once, unless a shard's first column is an odd one.
  static __device__ __forceinline__ void Run(int32_t (&accumulators)[sm90::kAccumulators], const Rows& rows, const Params& params,
                                             const sm90::EpiloguePosition& position) {
    const int32_t row = position.row + position.lane / 4;
    float* const out = params.out + static_cast<int64_t>(row) * params.stride;
    const bool aligned = reinterpret_cast<uintptr_t>(params.out) % sizeof(float2) == 0;
#pragma unroll
    for (int j = 0; j < sm90::kAccumulators / 4; ++j) {
      const int32_t column = position.column + 8 * j + 2 * (position.lane % 4);
      if (column >= position.n) continue;
      const float2 scale = __ldg(reinterpret_cast<const float2*>(params.column_scales + column));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row + 8 * half >= position.m) continue;
        const float x = static_cast<float>(accumulators[4 * j + 2 * half]) * rows.scale[half];
        const float y = static_cast<float>(accumulators[4 * j + 2 * half + 1]) * rows.scale[half];
        float* const to = out + 8 * half * params.stride + column;
        if (aligned && column + 1 < position.n) {
          *reinterpret_cast<float2*>(to) = {x * scale.x, y * scale.y};
        } else {
          to[0] = x * scale.x;
          if (column + 1 < position.n) to[1] = y * scale.y;
        }
      }
    }
  }
};

namespace {

constexpr int kThreads = 256;
constexpr int kMostSharedBytes = 128 << 10;  // fp32 rows of kMaxInt8HiddenSize

// One block a row, which it rotates in shared memory [k] by butterflies. A step reads and writes 8 k bytes of it, log2(block)
// steps: 55 us for 4096 rows of 4096.
template <class T>
__global__ void __launch_bounds__(kThreads)
    QuantizeKernel(const T* source, int64_t columns, int64_t stride, int32_t k, int32_t block, const Int8Rows out) {
  extern __shared__ float values[];
  const int64_t row = blockIdx.x;
  const T* const from = source + row * stride;
  for (int32_t i = threadIdx.x; i < k; i += kThreads) {
    const float x = i < columns ? elements::ValueOf<float>(from[i]) : 0.0f;
    values[i] = MixBits(static_cast<uint64_t>(i)) >> 63 != 0 ? -x : x;
  }
  for (int32_t half = 1; half < block; half *= 2) {
    __syncthreads();
    for (int32_t pair = threadIdx.x; pair < k / 2; pair += kThreads) {
      const int32_t first = pair / half * 2 * half + pair % half;
      const float a = values[first], b = values[first + half];
      values[first] = a + b;
      values[first + half] = a - b;
    }
  }
  __syncthreads();
  __shared__ float shared_largest[kThreads / 32];
  __shared__ double shared_sums[1][kThreads / 32];
  float largest = 0;
  double squares[1] = {};
  int bad = 0;
  for (int32_t i = threadIdx.x; i < k; i += kThreads) {
    const float x = values[i];
    if (!isfinite(x)) bad = 1;
    largest = fmaxf(largest, fabsf(x));
    squares[0] += static_cast<double>(x) * static_cast<double>(x);
  }
  bad = __syncthreads_or(bad);
  largest = row_block::BlockMax<kThreads>(largest, shared_largest);
  row_block::BlockSum<kThreads>(squares, shared_sums);
  const float inverse = bad == 0 && largest > 0 ? 127.0f / largest : 0.0f;
  auto* const words = reinterpret_cast<uint32_t*>(out.data + row * k);
  for (int32_t i = threadIdx.x; i < k / 4; i += kThreads) {
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int32_t q = __float2int_rn(values[4 * i + j] * inverse);
      word |= static_cast<uint32_t>(min(max(q, -127), 127) & 0xff) << (8 * j);
    }
    words[i] = word;
  }
  if (threadIdx.x != 0) return;
  out.scales[row] = bad != 0 ? NAN : largest / (127.0f * sqrtf(static_cast<float>(block)));
  out.norms[row] = static_cast<float>(squares[0] / block);
}

// One block.
__global__ void __launch_bounds__(kThreads) MeansKernel(const Int8Rows rows, double* means) {
  __shared__ double shared_sums[2][kThreads / 32];
  double sums[2] = {};  // of squared norms and scales
  for (int64_t i = threadIdx.x; i < rows.rows; i += kThreads) {
    sums[0] += static_cast<double>(rows.norms[i]);
    sums[1] += static_cast<double>(rows.scales[i]) * static_cast<double>(rows.scales[i]);
  }
  row_block::BlockSum<kThreads>(sums, shared_sums);
  if (threadIdx.x != 0) return;
  for (int i = 0; i < 2; ++i) means[i] = sums[i] / static_cast<double>(rows.rows);
}

// One thread a row.
__global__ void __launch_bounds__(kThreads) ErrorsKernel(const Int8Rows rows, const double* means, double factor, float* errors) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows.rows) return;
  const double scale = static_cast<double>(rows.scales[row]);
  errors[row] = static_cast<float>(factor / 12 * (scale * scale * means[0] + static_cast<double>(rows.norms[row]) * means[1]));
}

template <class T>
cudaError_t Quantize(const ConstMatrix& rows, const Int8Rows& out, cudaStream_t stream) {
  const int32_t k = static_cast<int32_t>(Int8Width(out.width));
  // One value for all widths: it belongs to the kernel, not to the launch.
  const cudaError_t error = cudaFuncSetAttribute(QuantizeKernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostSharedBytes);
  if (error != cudaSuccess) return error;
  QuantizeKernel<T><<<static_cast<unsigned>(out.rows), kThreads, static_cast<size_t>(k) * sizeof(float), stream>>>(
      static_cast<const T*>(rows.data), out.width, rows.stride, k, k & -k, out);
  return cudaGetLastError();
}

}  // namespace

int64_t Int8Bytes(int64_t rows, int64_t width) {
  return RoundUp(rows * Int8Width(width), 256) + 2 * RoundUp(rows * int64_t{sizeof(float)}, 256);
}

Int8Rows LayOutInt8(void* memory, int64_t rows, int64_t width) {
  char* const data = static_cast<char*>(memory);
  const int64_t scales = RoundUp(rows * Int8Width(width), 256);
  const int64_t norms = scales + RoundUp(rows * int64_t{sizeof(float)}, 256);
  return {reinterpret_cast<int8_t*>(data), reinterpret_cast<float*>(data + scales), reinterpret_cast<float*>(data + norms), rows,
          width};
}

cudaError_t LaunchQuantizeRows(const ConstMatrix& rows, const Int8Rows& out, cudaStream_t stream) {
  if (out.rows == 0) return cudaSuccess;
  if (out.width < 1 || out.rows > INT32_MAX) return cudaErrorInvalidValue;
  switch (rows.element) {
    case Element::kFloat32:
      return Quantize<float>(rows, out, stream);
    case Element::kBFloat16:
      return Quantize<__nv_bfloat16>(rows, out, stream);
    case Element::kFloat16:
      return Quantize<__half>(rows, out, stream);
    case Element::kFloat64:
      break;
  }
  return cudaErrorInvalidValue;
}

cudaError_t LaunchInt8Product(const Int8Rows& hidden, const Int8Rows& weight, float* out, int64_t stride, cudaStream_t stream) {
  if (hidden.rows == 0 || weight.rows == 0) return cudaSuccess;
  constexpr int64_t kLargest = int64_t{1} << 30;  // of the kernel's 32-bit indices
  if (hidden.rows > kLargest || weight.rows > kLargest || hidden.width != weight.width || stride % 2 != 0) {
    return cudaErrorInvalidValue;
  }
  const int64_t k = Int8Width(hidden.width);
  const Int8Epilogue::Params params = {hidden.scales, weight.scales, out, stride};
  return sm90::LaunchProduct<Int8Epilogue>({hidden.data, hidden.rows, k}, {weight.data, weight.rows, k}, k, {}, params, stream);
}

cudaError_t LaunchInt8Means(const Int8Rows& weight, double* means, cudaStream_t stream) {
  MeansKernel<<<1, kThreads, 0, stream>>>(weight, means);
  return cudaGetLastError();
}

cudaError_t LaunchInt8Errors(const Int8Rows& hidden, const double* means, double factor, float* errors, cudaStream_t stream) {
  if (hidden.rows == 0) return cudaSuccess;
  ErrorsKernel<<<static_cast<unsigned>((hidden.rows + kThreads - 1) / kThreads), kThreads, 0, stream>>>(hidden, means, factor,
                                                                                                        errors);
  return cudaGetLastError();
}

}  // namespace headwater::cuda
