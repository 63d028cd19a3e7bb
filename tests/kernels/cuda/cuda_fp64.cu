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

struct Add {
  __device__ double operator()(double a, double b) const { return a + b; }
};
struct Larger {
  __device__ double operator()(double a, double b) const { return a > b ? a : b; }
};

// The same value in every thread of the block, from one of each.
template <class Operation>
__device__ double BlockReduce(double value, Operation operation) {
  __shared__ double partial[kThreads / 32];
  for (int distance = 16; distance > 0; distance /= 2) value = operation(value, __shfl_xor_sync(0xffffffffu, value, distance));
  __syncthreads();  // the last call's values have been read
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  double result = partial[0];
  for (int i = 1; i < kThreads / 32; ++i) result = operation(result, partial[i]);
  return result;
}

// f(j) over the columns j of a row, combined.
template <class Operation, class Function>
__device__ double OverColumns(int64_t columns, double start, Operation operation, Function function) {
  double value = start;
  for (int64_t j = threadIdx.x; j < columns; j += kThreads) value = operation(value, function(j));
  return BlockReduce(value, operation);
}

__global__ void __launch_bounds__(kThreads)
    SetLogitsKernel(const uint16_t* hidden, const int32_t* columns, const double* logits, int64_t width, uint16_t* weight) {
  const int64_t row = blockIdx.x;
  const uint16_t* x = hidden + row * width;
  const double square = OverColumns(width, 0.0, Add(), [&](int64_t h) { return ToDouble(x[h]) * ToDouble(x[h]); });
  uint16_t* w = weight + columns[row] * width;
  for (int64_t h = threadIdx.x; h < width; h += kThreads) w[h] = ToBFloat16(logits[row] * ToDouble(x[h]) / square);
}

__global__ void __launch_bounds__(kThreads)
    CrossEntropyKernel(double* logits, int64_t vocab, const int32_t* targets, double loss_scale, RowValues out) {
  const int64_t row = blockIdx.x;
  double* z = logits + row * vocab;
  const int64_t target = targets[row];
  const double target_logit = z[target];
  const double largest = OverColumns(vocab, target_logit, Larger(), [&](int64_t j) { return z[j]; });
  const double others = OverColumns(vocab, 0.0, Add(), [&](int64_t j) { return j == target ? 0.0 : exp(z[j] - largest); });
  const double target_exponential = exp(target_logit - largest);
  const double total = others + target_exponential;
  const double lse = largest + log(total);
  // Where the target leads, target_exponential is 1 and the sum of the others keeps all its digits.
  const double loss = target_logit == largest ? log1p(others) : log(total) + (largest - target_logit);
  const double entropy = OverColumns(vocab, 0.0, Add(), [&](int64_t j) {
    return j == target ? target_exponential / total * loss : exp(z[j] - largest) / total * (lse - z[j]);
  });
  const double largest_other = OverColumns(vocab, 0.0, Larger(), [&](int64_t j) { return j == target ? 0.0 : fabs(z[j]); });
  const double argmax = -OverColumns(vocab, -static_cast<double>(vocab), Larger(),
                                     [&](int64_t j) { return -static_cast<double>(z[j] == largest ? j : vocab); });
  if (threadIdx.x == 0) {
    out.loss[row] = loss;
    out.lse[row] = lse;
    out.target_log_probability[row] = -loss;
    out.entropy[row] = entropy;
    out.argmax[row] = static_cast<int32_t>(argmax);
    out.largest_other[row] = largest_other;
  }
  if (loss_scale == 0.0) return;
  __syncthreads();  // every column is read as a logit before it becomes a gradient
  for (int64_t j = threadIdx.x; j < vocab; j += kThreads) {
    z[j] = loss_scale * (j == target ? -others / total : exp(z[j] - largest) / total);
  }
}

// ln(e^a + e^b).
__device__ double LogAddExp(double a, double b) { return (a > b ? a : b) + log1p(exp(-fabs(a - b))); }

__device__ double RowLse(const double* z, int64_t vocab) {
  const double largest = OverColumns(vocab, -INFINITY, Larger(), [&](int64_t j) { return z[j]; });
  return largest + log(OverColumns(vocab, 0.0, Add(), [&](int64_t j) { return exp(z[j] - largest); }));
}

__global__ void __launch_bounds__(kThreads) DivergenceKernel(const double* student, const double* teacher, double* gradient,
                                                             int64_t vocab, double beta, double loss_scale, RowValues out) {
  const int64_t row = blockIdx.x;
  const double* zq = student + row * vocab;
  const double* zp = teacher + row * vocab;
  const double lse_q = RowLse(zq, vocab);
  const double lse_p = RowLse(zp, vocab);
  // The logarithms ln q - ln m and ln p - ln m. By the definition of the two divergences at the ends, m is q for beta 0 and p for
  // beta 1. The former is relative to its value where p is 0. Rows whose sides share no columns have gradients of its remainder
  // alone. A constant times a sum of q that is not quite 1 would exceed them.
  const double constant = beta == 0 || beta == 1 ? 0 : -log1p(-beta);
  const auto log_ratios = [&](int64_t j, double* of_q, double* of_p) {
    const double log_q = zq[j] - lse_q;
    const double difference = zp[j] - lse_p - log_q;
    *of_q = beta == 0 ? 0 : beta == 1 ? -difference : -LogAddExp(difference + log(beta) - log1p(-beta), 0.0);
    *of_p = *of_q + constant + difference;
    return exp(log_q);
  };
  const double weight_p = beta == 0 ? 1 : beta == 1 ? 0 : beta;
  const double weight_q = beta == 0 ? 0 : beta == 1 ? 1 : 1 - beta;
  const double mean_q = OverColumns(vocab, 0.0, Add(), [&](int64_t j) {
    double of_q, of_p;
    const double q = log_ratios(j, &of_q, &of_p);
    return q * of_q;
  });
  const double divergence_p = OverColumns(vocab, 0.0, Add(), [&](int64_t j) {
    double of_q, of_p;
    log_ratios(j, &of_q, &of_p);
    return exp(zp[j] - lse_p) * of_p;
  });
  const double largest = OverColumns(vocab, 0.0, Larger(), [&](int64_t j) { return fmax(fabs(zq[j]), fabs(zp[j])); });
  if (threadIdx.x == 0) {
    out.loss[row] = weight_p * divergence_p + weight_q * (mean_q + constant);
    out.largest_other[row] = largest;
  }
  __syncthreads();  // the gradient may lie where the student's logits are
  double* g = gradient + row * vocab;
  for (int64_t j = threadIdx.x; j < vocab; j += kThreads) {
    double of_q, of_p;
    const double q = log_ratios(j, &of_q, &of_p);
    g[j] = loss_scale * (beta == 0 ? q - exp(zp[j] - lse_p) : weight_q * q * (of_q - mean_q));
  }
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
  const double sum = OverColumns(vocab, 0.0, Add(), [&](int64_t j) {
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
  const float sum_q = static_cast<float>(OverColumns(vocab, 0.0, Add(), [&](int64_t j) { return exp_of(zq[j]); }));
  const float sum_p = static_cast<float>(OverColumns(vocab, 0.0, Add(), [&](int64_t j) { return exp_of(zp[j]); }));
  const auto log_ratio = [&](int64_t j, float* q) {
    *q = exp_of(zq[j]) / sum_q;
    return logf(*q / (0.5f * (*q + exp_of(zp[j]) / sum_p)));
  };
  const float divergence = static_cast<float>(OverColumns(vocab, 0.0, Add(), [&](int64_t j) {
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

int CrossEntropyRows(double* logits, int64_t rows, int64_t vocab, const int32_t* targets, double loss_scale, const RowValues& out) {
  CrossEntropyKernel<<<static_cast<unsigned>(rows), kThreads>>>(logits, vocab, targets, loss_scale, out);
  return cudaGetLastError();
}

int DivergenceRows(const double* student, const double* teacher, double* gradient, int64_t rows, int64_t vocab, double beta,
                   double loss_scale, const RowValues& out) {
  DivergenceKernel<<<static_cast<unsigned>(rows), kThreads>>>(student, teacher, gradient, vocab, beta, loss_scale, out);
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
