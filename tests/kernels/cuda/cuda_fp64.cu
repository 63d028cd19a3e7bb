#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>

#include "tests/kernels/cuda/cuda_fp64.h"

namespace headwater::testing {
namespace {

// One block computes one row.
constexpr int kThreads = 512;

__device__ double ToDouble(uint16_t bits) { return static_cast<double>(__uint_as_float(static_cast<uint32_t>(bits) << 16)); }
__device__ double ToDouble(float value) { return static_cast<double>(value); }

// One rounding, to nearest even. The bits are those of a value that is not NaN.
__device__ uint16_t ToBFloat16(double value) { return __bfloat16_as_ushort(__double2bfloat16(value)); }

__device__ uint64_t Mix(uint64_t seed, uint64_t index) {
  uint64_t state = (index + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ull;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EBull;
  return state ^ (state >> 31);
}

// Box-Muller, with 24 bits for either uniform number.
__device__ float Normal(uint64_t seed, int64_t index) {
  const uint64_t bits = Mix(seed, static_cast<uint64_t>(index));
  const float u = (static_cast<float>(bits >> 40) + 0.5f) * (1.0f / 16777216.0f);
  const float v = static_cast<float>(bits & 0xffffff) * (1.0f / 16777216.0f);
  return sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
}

__device__ int64_t FirstIndex() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ int64_t IndexStride() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

__global__ void FillNormalKernel(const uint16_t* in, uint16_t* out, int64_t count, uint64_t seed, double deviation) {
  for (int64_t i = FirstIndex(); i < count; i += IndexStride()) {
    out[i] = ToBFloat16((in == nullptr ? 0.0 : ToDouble(in[i])) + deviation * static_cast<double>(Normal(seed, i)));
  }
}

__global__ void WidenKernel(const uint16_t* in, double* out, int64_t count) {
  for (int64_t i = FirstIndex(); i < count; i += IndexStride()) out[i] = ToDouble(in[i]);
}

// The sum of f(j) over the columns j of a row, in every thread of the block.
template <class Function>
__device__ double SumOverColumns(int64_t columns, Function f) {
  __shared__ double partial[kThreads / 32];
  double value = 0;
  for (int64_t j = threadIdx.x; j < columns; j += kThreads) value += f(j);
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  __syncthreads();  // the last call's values have been read
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0;
  for (const double part : partial) sum += part;
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    SetLogitsKernel(const uint16_t* hidden, const int32_t* columns, const double* logits, int64_t width, uint16_t* weight) {
  const int64_t row = blockIdx.x;
  const uint16_t* x = hidden + row * width;
  const double square = SumOverColumns(width, [&](int64_t h) { return ToDouble(x[h]) * ToDouble(x[h]); });
  uint16_t* w = weight + columns[row] * width;
  for (int64_t h = threadIdx.x; h < width; h += kThreads) w[h] = ToBFloat16(logits[row] * ToDouble(x[h]) / square);
}

// A thread takes a column, a block a slice of the rows.
constexpr int kDifferenceThreads = 256;
constexpr int kSlices = 64;

template <class T>
__global__ void __launch_bounds__(kDifferenceThreads)
    DifferenceKernel(const T* actual, const double* expected, int64_t rows, int64_t columns, DifferenceSums sums) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kDifferenceThreads + threadIdx.x;
  const int64_t per_slice = (rows + kSlices - 1) / kSlices;
  const int64_t start = blockIdx.y * per_slice;
  const int64_t end = start + per_slice < rows ? start + per_slice : rows;
  double column_difference = 0;
  double column_reference = 0;
  for (int64_t row = start; row < end; ++row) {
    double difference = 0;
    double reference = 0;
    if (column < columns) {
      reference = expected[row * columns + column];
      difference = ToDouble(actual[row * columns + column]) - reference;
    }
    difference *= difference;
    reference *= reference;
    column_difference += difference;
    column_reference += reference;
    for (int distance = 16; distance > 0; distance /= 2) {
      difference += __shfl_xor_sync(0xffffffffu, difference, distance);
      reference += __shfl_xor_sync(0xffffffffu, reference, distance);
    }
    if (threadIdx.x % 32 == 0) {
      atomicAdd(&sums.row_difference[row], difference);
      atomicAdd(&sums.row_reference[row], reference);
    }
  }
  if (column < columns) {
    atomicAdd(&sums.column_difference[column], column_difference);
    atomicAdd(&sums.column_reference[column], column_reference);
  }
}

template <class T>
int LaunchDifference(const T* actual, const double* expected, int64_t rows, int64_t columns, const DifferenceSums& sums) {
  const dim3 grid(static_cast<unsigned>((columns + kDifferenceThreads - 1) / kDifferenceThreads), kSlices);
  DifferenceKernel<<<grid, kDifferenceThreads>>>(actual, expected, rows, columns, sums);
  return cudaGetLastError();
}

__global__ void __launch_bounds__(kThreads)
    ExponentialOperandKernel(const uint16_t* logits, int64_t vocab, const int32_t* targets, uint16_t* out, const uint16_t* hidden,
                             int64_t width, double scale, uint16_t* scaled_hidden) {
  const int64_t row = blockIdx.x;
  const uint16_t* z = logits + row * vocab;
  const int64_t target = targets[row];
  const float offset = static_cast<float>(ToDouble(z[target]));
  const double sum = SumOverColumns(vocab, [&](int64_t j) {
    const float e = j == target ? 0.0f : expf(static_cast<float>(ToDouble(z[j])) - offset);
    out[row * vocab + j] = __bfloat16_as_ushort(__float2bfloat16(e));
    return static_cast<double>(e);
  });
  for (int64_t h = threadIdx.x; h < width; h += kThreads) {
    scaled_hidden[row * width + h] = ToBFloat16(scale * ToDouble(hidden[row * width + h]) / (1 + sum));
  }
}

__global__ void __launch_bounds__(kThreads)
    DivergenceOperandKernel(const uint16_t* student, const uint16_t* teacher, int64_t vocab, uint16_t* out) {
  const int64_t row = blockIdx.x;
  const uint16_t* zq = student + row * vocab;
  const uint16_t* zp = teacher + row * vocab;
  // Logits of a few nats: no maximum is needed.
  const auto exp_of = [](uint16_t z) { return expf(static_cast<float>(ToDouble(z))); };
  const float sum_q = static_cast<float>(SumOverColumns(vocab, [&](int64_t j) { return exp_of(zq[j]); }));
  const float sum_p = static_cast<float>(SumOverColumns(vocab, [&](int64_t j) { return exp_of(zp[j]); }));
  const auto log_ratio = [&](int64_t j, float* q) {
    *q = exp_of(zq[j]) / sum_q;
    return logf(*q / (0.5f * (*q + exp_of(zp[j]) / sum_p)));
  };
  const float divergence = static_cast<float>(SumOverColumns(vocab, [&](int64_t j) {
    float q;
    const float r = log_ratio(j, &q);
    return static_cast<double>(q * r);
  }));
  for (int64_t j = threadIdx.x; j < vocab; j += kThreads) {
    float q;
    const float r = log_ratio(j, &q);
    out[row * vocab + j] = __bfloat16_as_ushort(__float2bfloat16(0.5f * q * (r - divergence)));
  }
}

constexpr int kFillBlocks = 1056;

}  // namespace

int FillNormal(uint16_t* out, int64_t count, uint64_t seed, double deviation, const uint16_t* in) {
  FillNormalKernel<<<kFillBlocks, 256>>>(in, out, count, seed, deviation);
  return cudaGetLastError();
}

int SetLogits(const uint16_t* hidden, const int32_t* columns, const double* logits, int64_t rows, int64_t width, uint16_t* weight) {
  SetLogitsKernel<<<static_cast<unsigned>(rows), kThreads>>>(hidden, columns, logits, width, weight);
  return cudaGetLastError();
}

int Widen(const uint16_t* in, double* out, int64_t count) {
  WidenKernel<<<kFillBlocks, 256>>>(in, out, count);
  return cudaGetLastError();
}

int AddDifference(const uint16_t* actual, const double* expected, int64_t rows, int64_t columns, const DifferenceSums& sums) {
  return LaunchDifference(actual, expected, rows, columns, sums);
}

int AddDifference(const float* actual, const double* expected, int64_t rows, int64_t columns, const DifferenceSums& sums) {
  return LaunchDifference(actual, expected, rows, columns, sums);
}

int ExponentialOperand(const uint16_t* logits, int64_t rows, int64_t vocab, const int32_t* targets, uint16_t* out,
                       const uint16_t* hidden, int64_t width, double scale, uint16_t* scaled_hidden) {
  ExponentialOperandKernel<<<static_cast<unsigned>(rows), kThreads>>>(logits, vocab, targets, out, hidden, width, scale,
                                                                      scaled_hidden);
  return cudaGetLastError();
}

int DivergenceOperand(const uint16_t* student, const uint16_t* teacher, int64_t rows, int64_t vocab, uint16_t* out) {
  DivergenceOperandKernel<<<static_cast<unsigned>(rows), kThreads>>>(student, teacher, vocab, out);
  return cudaGetLastError();
}

}  // namespace headwater::testing
