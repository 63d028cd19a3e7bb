#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device/elements.cuh"
#include "kernels/cuda/rows/finish.h"

namespace headwater::cuda {
namespace {

using elements::IsAligned16;
using elements::Load8;
using elements::LoadUpTo8;
using elements::Rounded;
using elements::Store8;
using elements::ValueOf;
using elements::WarpSum;

// Where a sum of products is taken: fp32 will do for 16-bit factors, whose products are exact in it.
template <class A, class B>
using SumOf = std::conditional_t<sizeof(A) == 2 && sizeof(B) == 2, float, double>;

constexpr int kRowsPerBlock = 8;  // of the kernels that give a row to a warp

__device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ int64_t WarpRow() {
  return static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + static_cast<int64_t>(threadIdx.x) / 32;
}

// A matrix as kernels see it. `vectorised`: every row begins at a multiple of 16 bytes.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;
  bool vectorised;
  __device__ __forceinline__ const T* operator[](int64_t row) const { return data + row * stride; }
};

// The shard's weights, and which of its rows a target is.
template <class W>
struct Weights {
  Rows<W> rows;
  const W* bias;
  int64_t vocab_start;
  int64_t columns;
  // Row of `target` in this shard, or -1.
  __device__ __forceinline__ int64_t RowOf(int32_t target) const {
    const int64_t row = static_cast<int64_t>(target) - vocab_start;
    return target >= 0 && row >= 0 && row < columns ? row : -1;
  }
};

// --- Target arguments ------------------------------------------------------------------------------------------------------------

// One warp a row; eight partial sums a lane, then over the lanes, both in a fixed order. Reads the row and its target's weights.
template <class X, class W>
__global__ void __launch_bounds__(32 * kRowsPerBlock)
    TargetArgumentsKernel(const Rows<X> hidden, const Weights<W> weights, const int32_t* targets, int64_t row_count, int64_t width,
                          double logit_scale, double* arguments) {
  using Sum = SumOf<X, W>;
  const int64_t row = WarpRow();
  if (row >= row_count) return;
  const int64_t weight_row = targets == nullptr ? 0 : weights.RowOf(targets[row]);
  if (weight_row < 0) return;
  const X* x = hidden[row];
  const W* w = weights.rows[weight_row];
  Sum sums[8] = {};
  Sum a[8], b[8];
  int64_t first = 0;
  if (hidden.vectorised && weights.rows.vectorised) {
    const int64_t vector_end = width / 8 * 8;
#pragma unroll 4
    for (int64_t j = 8 * Lane(); j < vector_end; j += 256) {
      Load8(x + j, a);
      Load8(w + j, b);
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] += a[i] * b[i];
    }
    first = vector_end;
  }
  for (int64_t j = first + Lane(); j < width; j += 32) sums[0] += ValueOf<Sum>(x[j]) * ValueOf<Sum>(w[j]);
  double sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += static_cast<double>(sums[i]);
  sum = WarpSum(sum);
  if (Lane() == 0) {
    const double bias = weights.bias == nullptr ? 0.0 : ValueOf<double>(weights.bias[weight_row]);
    arguments[row] = logit_scale * (sum + bias);
  }
}

// --- Scaled rows -----------------------------------------------------------------------------------------------------------------

// *largest = max |hidden_ij * row_factor_i| over the finite values. The bits of non-negative floats compare as their values do, and
// a maximum is the same in any order. *largest is 0 at launch.
template <class X>
__global__ void __launch_bounds__(32 * kRowsPerBlock)
    LargestKernel(const Rows<X> hidden, const float* row_factor, int64_t row_count, int64_t width, float* largest) {
  const int64_t row = WarpRow();
  if (row >= row_count) return;
  const X* x = hidden[row];
  float largest_x = 0;
  float a[8];
  int64_t first = 0;
  if (hidden.vectorised) {
    first = width / 8 * 8;
#pragma unroll 4
    for (int64_t j = 8 * Lane(); j < first; j += 256) {
      Load8(x + j, a);
#pragma unroll
      for (int i = 0; i < 8; ++i) largest_x = isfinite(a[i]) ? fmaxf(largest_x, fabsf(a[i])) : largest_x;
    }
  }
  for (int64_t j = first + Lane(); j < width; j += 32) {
    const float value = ValueOf<float>(x[j]);
    largest_x = isfinite(value) ? fmaxf(largest_x, fabsf(value)) : largest_x;
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    largest_x = fmaxf(largest_x, __shfl_xor_sync(0xffffffffu, largest_x, distance));
  }
  const float value = largest_x * fabsf(row_factor[row]);
  if (Lane() == 0 && isfinite(value)) atomicMax(reinterpret_cast<unsigned*>(largest), __float_as_uint(value));
}

// From the largest value to the factor 2^exponent that brings it into [2^14, 2^15): all of fp16's range below is then in use.
__global__ void ExponentKernel(float* alpha) {
  const float largest = *alpha;
  const int exponent = largest > 0 ? ilogbf(largest) - 14 : 0;
  *alpha = ldexpf(1.0f, max(exponent, -126));
}

// scaled_i = hidden_i * row_factor_i / *alpha; for other elements than fp16 this sets *alpha = 1 instead. Columns from `width` to
// `scaled_stride` become 0. One warp a row.
template <class X, class Out>
__global__ void __launch_bounds__(32 * kRowsPerBlock)
    ScaleRowsKernel(const Rows<X> hidden, const float* row_factor, int64_t row_count, int64_t width, Out* scaled,
                    int64_t scaled_stride, bool vectorised, float* alpha) {
  // Products with the factor, exact in fp64 and rounded once if hidden is.
  using Value = std::conditional_t<sizeof(X) == 8, double, float>;
  float inverse = 1;
  if constexpr (std::is_same_v<Out, __half>) {
    inverse = 1 / *alpha;  // a power of two
  } else if (blockIdx.x == 0 && threadIdx.x == 0) {
    *alpha = 1;
  }
  const int64_t row = WarpRow();
  if (row >= row_count) return;
  const Value factor = row_factor[row];
  const X* x = hidden[row];
  Out* out = scaled + row * scaled_stride;
  const auto scale = [&](Value value) { return Rounded<Out>(static_cast<float>(value * factor) * inverse); };
  int64_t first = 0;
  if (vectorised) {
    first = width / 8 * 8;
#pragma unroll 4
    for (int64_t j = 8 * Lane(); j < first; j += 256) {
      Value a[8];
      Out b[8];
      Load8(x + j, a);
#pragma unroll
      for (int i = 0; i < 8; ++i) b[i] = scale(a[i]);
      Store8(out + j, b);
    }
  }
  for (int64_t j = first + Lane(); j < scaled_stride; j += 32) {
    out[j] = j < width ? scale(ValueOf<Value>(x[j])) : Rounded<Out>(0.0f);
  }
}

// --- grad_hidden -----------------------------------------------------------------------------------------------------------------

// row_factor_i * product_i + target_factor_i * w_{y_i}.
template <class W>
struct FinishedRow {
  Rows<float> product;
  const float* row_factor;
  const float* target_factor;  // null: no target's part
  const int32_t* targets;      // null: no target's part
  Weights<W> weights;

  const float* p;
  const W* w;
  float p_factor;
  float w_factor;
  __device__ __forceinline__ void Begin(int64_t row) {
    p = product[row];
    p_factor = row_factor[row];
    const int64_t weight_row = targets == nullptr || target_factor == nullptr ? -1 : weights.RowOf(targets[row]);
    w = weight_row < 0 ? nullptr : weights.rows[weight_row];
    w_factor = weight_row < 0 ? 0.0f : target_factor[row];
  }
  __device__ __forceinline__ bool vectorised() const { return product.vectorised && weights.rows.vectorised; }
  __device__ __forceinline__ void Values8(int64_t j, float (&out)[8]) const {
    Load8(p + j, out);
    float b[8] = {};
    if (w != nullptr) Load8(w + j, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = fmaf(w_factor, b[i], p_factor * out[i]);
  }
  __device__ __forceinline__ float ValueAt(int64_t j) const {
    return fmaf(w_factor, w == nullptr ? 0.0f : ValueOf<float>(w[j]), p_factor * p[j]);
  }
};

// Whether a row's factor can be left until the ranks have added it up: the target's share is divided by it.
__device__ __forceinline__ bool IsLate(float row_factor, float target_factor) {
  return fabsf(row_factor) > 1e-30f && fabsf(target_factor / row_factor) < 1e30f;
}

// A row as it is, or times its late factor.
struct SummedRow {
  Rows<float> sum;
  ShareFactors factors;

  const float* p;
  float factor;
  __device__ __forceinline__ void Begin(int64_t row) {
    p = sum[row];
    factor = 1.0f;
    if (factors.row_factor != nullptr && IsLate(factors.row_factor[row], factors.target_factor[row])) {
      factor = factors.row_factor[row];
    }
  }
  __device__ __forceinline__ bool vectorised() const { return sum.vectorised; }
  __device__ __forceinline__ void Values8(int64_t j, float (&out)[8]) const {
    Load8(p + j, out);
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] *= factor;
  }
  __device__ __forceinline__ float ValueAt(int64_t j) const { return factor * p[j]; }
};

// One warp a row.
template <class W>
__global__ void __launch_bounds__(32 * kRowsPerBlock)
    FinishShareKernel(float* product, int64_t stride, int64_t row_count, int64_t width, const float* row_factor,
                      const float* target_factor, const int32_t* targets, const Weights<W> weights) {
  const int64_t row = WarpRow();
  if (row >= row_count) return;
  float p_factor = row_factor[row], w_factor = target_factor[row];
  const int64_t weight_row = weights.RowOf(targets[row]);
  if (IsLate(p_factor, w_factor)) {
    if (weight_row < 0 || w_factor == 0.0f) return;
    w_factor /= p_factor;
    p_factor = 1.0f;
  }
  float* const out = product + row * stride;
  const W* const w = weight_row < 0 ? nullptr : weights.rows[weight_row];
  int64_t first = 0;
  if (weights.rows.vectorised && IsAligned16(out)) {
    first = width / 8 * 8;
#pragma unroll 2
    for (int64_t j = 8 * Lane(); j < first; j += 256) {
      float values[8], b[8] = {};
      // Not by Load8(), which is for memory that the kernel does not write.
      const float4 low = reinterpret_cast<const float4*>(out + j)[0], high = reinterpret_cast<const float4*>(out + j)[1];
      values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
      values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
      if (w != nullptr) Load8(w + j, b);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = fmaf(w_factor, b[i], p_factor * values[i]);
      Store8(out + j, values);
    }
  }
  for (int64_t j = first + Lane(); j < width; j += 32) {
    out[j] = fmaf(w_factor, w == nullptr ? 0.0f : ValueOf<float>(w[j]), p_factor * out[j]);
  }
}

// sum[map[i], :] += source row i. One warp a row.
template <class Source>
__global__ void __launch_bounds__(32 * kRowsPerBlock)
    AddRowsKernel(Source source, int64_t row_count, int64_t width, float* sum, int64_t sum_stride, const int32_t* map) {
  const int64_t row = WarpRow();
  if (row >= row_count) return;
  source.Begin(row);
  float* out = sum + (map == nullptr ? row : map[row]) * sum_stride;
  int64_t first = 0;
  if (source.vectorised() && IsAligned16(out)) {
    first = width / 8 * 8;
#pragma unroll 2
    for (int64_t j = 8 * Lane(); j < first; j += 256) {
      float values[8];
      source.Values8(j, values);
      float4* pair = reinterpret_cast<float4*>(out + j);
      float4 low = pair[0], high = pair[1];
      low = {low.x + values[0], low.y + values[1], low.z + values[2], low.w + values[3]};
      high = {high.x + values[4], high.y + values[5], high.z + values[6], high.w + values[7]};
      pair[0] = low;
      pair[1] = high;
    }
  }
  for (int64_t j = first + Lane(); j < width; j += 32) out[j] += source.ValueAt(j);
}

// out[map[i], :] = scale * source row i, rounded once. Rows of `out` begin anywhere. Rows at a multiple of 16 bytes are stored by
// vectors. The others are stored element by element, neighbouring lanes side by side, as the bus to host memory requires. One warp
// a row.
template <class Source, class Out>
__global__ void __launch_bounds__(32 * kRowsPerBlock)
    WriteRowsKernel(Source source, int64_t row_count, int64_t width, Out* out, int64_t out_stride, const int32_t* map, float scale,
                    uint8_t* non_finite) {
  const int64_t row = WarpRow();
  if (row >= row_count) return;
  source.Begin(row);
  Out* target = out + (map == nullptr ? row : map[row]) * out_stride;
  bool bad = false;
  const auto finish = [&](float value) {
    const Out rounded = Rounded<Out>(scale * value);
    bad |= !isfinite(ValueOf<float>(rounded));
    return rounded;
  };
  int64_t first = 0;
  if (source.vectorised() && IsAligned16(target)) {
    first = width / 8 * 8;
#pragma unroll 4
    for (int64_t j = 8 * Lane(); j < first; j += 256) {
      float values[8];
      Out rounded[8];
      source.Values8(j, values);
#pragma unroll
      for (int i = 0; i < 8; ++i) rounded[i] = finish(values[i]);
      Store8(target + j, rounded);
    }
  }
  for (int64_t j = first + Lane(); j < width; j += 32) target[j] = finish(source.ValueAt(j));
  bad = __any_sync(0xffffffffu, bad);
  if (bad && non_finite != nullptr && Lane() == 0) non_finite[row] = 1;
}

// --- The targets' rows of grad_weight --------------------------------------------------------------------------------------------

constexpr int kLargeGroup = 32;          // members from which on a group is shared among the warps of a block
constexpr int kSmallGroupThreads = 128;  // of eight columns each
constexpr int kSlices = 8;               // of a large group's members
constexpr int kPieceColumns = 256;       // of a block of the large groups' kernel
constexpr int kLargeGroupBlocks = 32;

template <class X>
struct TargetRowsParams {
  Rows<X> hidden;
  int64_t width;
  const float* target_factor;
  const int32_t* targets;
  TargetGroups groups;
  int64_t vocab_start;
  int64_t columns;
  float factor;
  float* grad_weight;
  int64_t grad_stride;
  float* grad_bias;

  __device__ __forceinline__ int32_t Size(int32_t group) const { return groups.starts[group + 1] - groups.starts[group]; }
  // The group's row of grad_weight, or -1 if it is not in this shard.
  __device__ __forceinline__ int64_t RowOf(int32_t group) const {
    const int64_t row = static_cast<int64_t>(targets[groups.order[groups.starts[group]]]) - vocab_start;
    return row >= 0 && row < columns ? row : -1;
  }
  // sums += target_factor * hidden[:, j..j + 8) over members [first, last), in order.
  template <class Sum>
  __device__ __forceinline__ void AddMembers(int64_t first, int64_t last, int64_t j, Sum (&sums)[8], Sum& bias) const {
#pragma unroll 4
    for (int64_t member = first; member < last; ++member) {
      const int64_t row = groups.order[member];
      const Sum member_factor = target_factor[row];
      Sum x[8];
      if (hidden.vectorised && j + 8 <= width) {
        Load8(hidden[row] + j, x);
      } else {
        LoadUpTo8(hidden[row] + j, width - j, x);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] += member_factor * x[i];
      bias += member_factor;
    }
  }
};

// Groups of few members: one block a group and 1024 columns; each thread goes through all members.
template <class X>
__global__ void __launch_bounds__(kSmallGroupThreads) SmallGroupsKernel(const TargetRowsParams<X> params) {
  using Sum = SumOf<X, X>;
  const auto group = static_cast<int32_t>(blockIdx.x);
  const int64_t first = params.groups.starts[group], last = params.groups.starts[group + 1];
  if (first == last || last - first >= kLargeGroup) return;
  const int64_t row = params.RowOf(group);
  const int64_t j = (static_cast<int64_t>(blockIdx.y) * kSmallGroupThreads + threadIdx.x) * 8;
  if (row < 0 || j >= params.width) return;
  Sum sums[8] = {};
  Sum bias = 0;
  params.AddMembers(first, last, j, sums, bias);
  float* out = params.grad_weight + row * params.grad_stride + j;
  if (j + 8 <= params.width && IsAligned16(out)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float4 value = reinterpret_cast<float4*>(out)[i];
      value.x += params.factor * static_cast<float>(sums[4 * i]);
      value.y += params.factor * static_cast<float>(sums[4 * i + 1]);
      value.z += params.factor * static_cast<float>(sums[4 * i + 2]);
      value.w += params.factor * static_cast<float>(sums[4 * i + 3]);
      reinterpret_cast<float4*>(out)[i] = value;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (j + i < params.width) out[i] += params.factor * static_cast<float>(sums[i]);
    }
  }
  if (j == 0 && params.grad_bias != nullptr) params.grad_bias[row] += params.factor * static_cast<float>(bias);
}

// Groups of many members, up to all rows. Block (x, y) takes the columns [256 y, 256 y + 256) of the large groups among x, x +
// gridDim.x, ... Each warp adds up a run of members; the runs are added in order.
template <class X>
__global__ void __launch_bounds__(32 * kSlices) LargeGroupsKernel(const TargetRowsParams<X> params) {
  using Sum = SumOf<X, X>;
  __shared__ int32_t found[32 * kSlices];
  __shared__ int32_t found_count;
  __shared__ Sum partial[kSlices][kPieceColumns];
  __shared__ Sum partial_bias[kSlices];
  const int slice = static_cast<int>(threadIdx.x) / 32;
  const int64_t piece = static_cast<int64_t>(blockIdx.y) * kPieceColumns;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t base = 0; base < params.groups.group_count; base += step) {
    // The order in which they are found does not matter: no two groups touch the same row.
    if (threadIdx.x == 0) found_count = 0;
    __syncthreads();
    const int64_t candidate = base + blockIdx.x + static_cast<int64_t>(gridDim.x) * threadIdx.x;
    if (candidate < params.groups.group_count && params.Size(static_cast<int32_t>(candidate)) >= kLargeGroup) {
      found[atomicAdd(&found_count, 1)] = static_cast<int32_t>(candidate);
    }
    __syncthreads();
    for (int32_t k = 0; k < found_count; ++k) {
      const int64_t row = params.RowOf(found[k]);
      if (row < 0) continue;
      const int64_t first = params.groups.starts[found[k]], size = params.Size(found[k]);
      Sum sums[8] = {};
      Sum bias = 0;
      if (piece + 8 * Lane() < params.width) {
        params.AddMembers(first + size * slice / kSlices, first + size * (slice + 1) / kSlices, piece + 8 * Lane(), sums, bias);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) partial[slice][8 * Lane() + i] = sums[i];
      if (Lane() == 0) partial_bias[slice] = bias;
      __syncthreads();
      const int column = static_cast<int>(threadIdx.x);
      if (piece + column < params.width) {
        Sum sum = 0;
#pragma unroll
        for (int i = 0; i < kSlices; ++i) sum += partial[i][column];
        params.grad_weight[row * params.grad_stride + piece + column] += params.factor * static_cast<float>(sum);
      }
      if (piece + column == 0 && params.grad_bias != nullptr) {
        Sum sum = 0;
        for (int i = 0; i < kSlices; ++i) sum += partial_bias[i];
        params.grad_bias[row] += params.factor * static_cast<float>(sum);
      }
      __syncthreads();
    }
    __syncthreads();
  }
}
static_assert(kPieceColumns == 32 * kSlices && kPieceColumns == 32 * 8, "a thread a column, and eight columns a lane");

// --- grad_bias -------------------------------------------------------------------------------------------------------------------

constexpr int kBiasSplits = 16;  // runs of rows
constexpr int kBiasThreads = 256;

// partial[run, v] = sum over the run's rows of row_factor_i * M_iv. A thread has eight columns; reads the matrix once.
template <class T>
__global__ void __launch_bounds__(kBiasThreads)
    BiasPartialsKernel(const Rows<T> matrix, int64_t row_count, int64_t columns, const float* row_factor, int64_t partial_stride,
                       double* partial) {
  using Sum = SumOf<T, T>;
  const int64_t j = (static_cast<int64_t>(blockIdx.x) * kBiasThreads + threadIdx.x) * 8;
  if (j >= columns) return;
  const int64_t first = row_count * blockIdx.y / kBiasSplits, last = row_count * (blockIdx.y + 1) / kBiasSplits;
  Sum sums[8] = {};
  const bool vectorised = matrix.vectorised && j + 8 <= columns;
#pragma unroll 8
  for (int64_t row = first; row < last; ++row) {
    const Sum factor = __ldg(row_factor + row);
    Sum values[8];
    if (vectorised) {
      Load8(matrix[row] + j, values);
    } else {
      LoadUpTo8(matrix[row] + j, columns - j, values);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] += factor * values[i];
  }
  double* out = partial + blockIdx.y * partial_stride + j;
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = static_cast<double>(sums[i]);
}

__global__ void __launch_bounds__(kBiasThreads)
    AddBiasPartialsKernel(const double* partial, int64_t partial_stride, int64_t columns, float factor, float* grad_bias) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kBiasThreads + threadIdx.x;
  if (column >= columns) return;
  double sum = 0;
#pragma unroll
  for (int run = 0; run < kBiasSplits; ++run) sum += partial[run * partial_stride + column];
  grad_bias[column] += static_cast<float>(static_cast<double>(factor) * sum);
}

// --- Launch ----------------------------------------------------------------------------------------------------------------------

template <class T>
struct TypeOf {
  using type = T;
};

// Calls `function` with the type of a stored element; cudaErrorInvalidValue for one that has no business here.
template <class Function>
cudaError_t WithStored(Element element, const Function& function) {
  switch (element) {
    case Element::kFloat32:
      return function(TypeOf<float>());
    case Element::kBFloat16:
      return function(TypeOf<__nv_bfloat16>());
    case Element::kFloat16:
      return function(TypeOf<__half>());
    case Element::kFloat64:
      break;
  }
  return cudaErrorInvalidValue;
}

// Calls a function for hidden states, which may be fp64.
template <class Function>
cudaError_t WithHidden(Element element, const Function& function) {
  return element == Element::kFloat64 ? function(TypeOf<double>()) : WithStored(element, function);
}

template <class T>
Rows<T> RowsOf(const void* data, int64_t stride) {
  const bool vectorised = reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * static_cast<int64_t>(sizeof(T)) % 16 == 0;
  return {static_cast<const T*>(data), stride, vectorised};
}

template <class W>
Weights<W> WeightsOf(const ShardWeights& shard) {
  return {RowsOf<W>(shard.weight, shard.stride), static_cast<const W*>(shard.bias), shard.vocab_start, shard.columns};
}

unsigned RowBlocks(int64_t rows) { return static_cast<unsigned>((rows + kRowsPerBlock - 1) / kRowsPerBlock); }
constexpr int kRowThreads = 32 * kRowsPerBlock;

template <class Source>
cudaError_t LaunchRows(const Source& source, int64_t rows, int64_t width, const GradHiddenTarget& target, cudaStream_t stream) {
  if (target.sum != nullptr) {
    AddRowsKernel<<<RowBlocks(rows), kRowThreads, 0, stream>>>(source, rows, width, target.sum, target.sum_stride, target.map);
    return cudaGetLastError();
  }
  return WithStored(target.out_element, [&](auto out) {
    using Out = typename decltype(out)::type;
    WriteRowsKernel<<<RowBlocks(rows), kRowThreads, 0, stream>>>(source, rows, width, static_cast<Out*>(target.out),
                                                                 target.out_stride, target.map, target.scale, target.non_finite);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t LaunchTargetArguments(const ConstMatrix& hidden, const ShardWeights& shard, const int32_t* targets, double logit_scale,
                                  double* arguments, cudaStream_t stream) {
  if (hidden.rows == 0 || shard.columns == 0) return cudaSuccess;
  return WithHidden(hidden.element, [&](auto x) {
    return WithStored(shard.element, [&](auto w) {
      using X = typename decltype(x)::type;
      using W = typename decltype(w)::type;
      TargetArgumentsKernel<<<RowBlocks(hidden.rows), kRowThreads, 0, stream>>>(
          RowsOf<X>(hidden.data, hidden.stride), WeightsOf<W>(shard), targets, hidden.rows, shard.width, logit_scale, arguments);
      return cudaGetLastError();
    });
  });
}

cudaError_t LaunchScaleRows(const ConstMatrix& hidden, const float* row_factor, const MutableMatrix& scaled, float* alpha,
                            cudaStream_t stream) {
  const bool with_exponent = scaled.element == Element::kFloat16;
  if (with_exponent) {
    const cudaError_t error = cudaMemsetAsync(alpha, 0, sizeof(float), stream);
    if (error != cudaSuccess) return error;
  }
  return WithHidden(hidden.element, [&](auto x) {
    return WithStored(scaled.element, [&](auto out) {
      using X = typename decltype(x)::type;
      using Out = typename decltype(out)::type;
      const Rows<X> rows = RowsOf<X>(hidden.data, hidden.stride);
      // At least one block, so that *alpha is set for no rows too.
      const unsigned blocks = std::max(RowBlocks(hidden.rows), 1u);
      if (with_exponent) {
        LargestKernel<<<blocks, kRowThreads, 0, stream>>>(rows, row_factor, hidden.rows, hidden.columns, alpha);
        ExponentKernel<<<1, 1, 0, stream>>>(alpha);
      }
      const bool vectorised = rows.vectorised && RowsOf<Out>(scaled.data, scaled.stride).vectorised;
      ScaleRowsKernel<<<blocks, kRowThreads, 0, stream>>>(rows, row_factor, hidden.rows, hidden.columns,
                                                          static_cast<Out*>(scaled.data), scaled.stride, vectorised, alpha);
      return cudaGetLastError();
    });
  });
}

cudaError_t LaunchFinishGradHidden(const ConstMatrix& product, const float* row_factor, const float* target_factor,
                                   const int32_t* targets, const ShardWeights& shard, const GradHiddenTarget& target,
                                   cudaStream_t stream) {
  if (product.element != Element::kFloat32) return cudaErrorInvalidValue;
  if (product.rows == 0) return cudaSuccess;
  return WithStored(shard.element, [&](auto w) {
    using W = typename decltype(w)::type;
    FinishedRow<W> source{};
    source.product = RowsOf<float>(product.data, product.stride);
    source.row_factor = row_factor;
    source.target_factor = target_factor;
    source.targets = targets;
    source.weights = WeightsOf<W>(shard);
    return LaunchRows(source, product.rows, shard.width, target, stream);
  });
}

cudaError_t LaunchFinishShare(const MutableMatrix& product, const float* row_factor, const float* target_factor,
                              const int32_t* targets, const ShardWeights& shard, cudaStream_t stream) {
  if (product.element != Element::kFloat32) return cudaErrorInvalidValue;
  if (product.rows == 0) return cudaSuccess;
  return WithStored(shard.element, [&](auto w) {
    using W = typename decltype(w)::type;
    FinishShareKernel<<<RowBlocks(product.rows), kRowThreads, 0, stream>>>(static_cast<float*>(product.data), product.stride,
                                                                           product.rows, product.columns, row_factor, target_factor,
                                                                           targets, WeightsOf<W>(shard));
    return cudaGetLastError();
  });
}

cudaError_t LaunchWriteGradHidden(const ConstMatrix& sum, const ShareFactors& factors, const GradHiddenTarget& target,
                                  cudaStream_t stream) {
  if (sum.element != Element::kFloat32) return cudaErrorInvalidValue;
  if (sum.rows == 0) return cudaSuccess;
  SummedRow source{};
  source.sum = RowsOf<float>(sum.data, sum.stride);
  source.factors = factors;
  return LaunchRows(source, sum.rows, sum.columns, target, stream);
}

cudaError_t LaunchAddTargetRows(const ConstMatrix& hidden, const float* target_factor, const int32_t* targets,
                                const TargetGroups& groups, const ShardWeights& shard, float factor, float* grad_weight,
                                float* grad_bias, cudaStream_t stream) {
  if (groups.group_count == 0 || shard.columns == 0) return cudaSuccess;
  return WithHidden(hidden.element, [&](auto x) {
    using X = typename decltype(x)::type;
    TargetRowsParams<X> params{};
    params.hidden = RowsOf<X>(hidden.data, hidden.stride);
    params.width = shard.width;
    params.target_factor = target_factor;
    params.targets = targets;
    params.groups = groups;
    params.vocab_start = shard.vocab_start;
    params.columns = shard.columns;
    params.factor = factor;
    params.grad_weight = grad_weight;
    params.grad_stride = shard.stride;
    params.grad_bias = grad_bias;
    constexpr int64_t kSmallColumns = 8 * kSmallGroupThreads;
    const dim3 small(static_cast<unsigned>(groups.group_count),
                     static_cast<unsigned>((shard.width + kSmallColumns - 1) / kSmallColumns));
    SmallGroupsKernel<<<small, kSmallGroupThreads, 0, stream>>>(params);
    if (hidden.rows >= kLargeGroup) {
      const dim3 large(static_cast<unsigned>(std::min(groups.group_count, kLargeGroupBlocks)),
                       static_cast<unsigned>((shard.width + kPieceColumns - 1) / kPieceColumns));
      LargeGroupsKernel<<<large, 32 * kSlices, 0, stream>>>(params);
    }
    return cudaGetLastError();
  });
}

int64_t GradBiasScratchBytes(int64_t columns) { return kBiasSplits * PaddedWidth(columns) * static_cast<int64_t>(sizeof(double)); }

cudaError_t LaunchAddGradBias(const ConstMatrix& matrix, const float* row_factor, float factor, void* scratch, float* grad_bias,
                              cudaStream_t stream) {
  if (matrix.rows == 0 || matrix.columns == 0) return cudaSuccess;
  return WithStored(matrix.element, [&](auto element) {
    using T = typename decltype(element)::type;
    auto* partial = static_cast<double*>(scratch);
    constexpr int64_t kBlockColumns = 8 * kBiasThreads;
    const dim3 blocks(static_cast<unsigned>((matrix.columns + kBlockColumns - 1) / kBlockColumns), kBiasSplits);
    BiasPartialsKernel<<<blocks, kBiasThreads, 0, stream>>>(RowsOf<T>(matrix.data, matrix.stride), matrix.rows, matrix.columns,
                                                            row_factor, PaddedWidth(matrix.columns), partial);
    AddBiasPartialsKernel<<<static_cast<unsigned>((matrix.columns + kBiasThreads - 1) / kBiasThreads), kBiasThreads, 0, stream>>>(
        partial, PaddedWidth(matrix.columns), matrix.columns, factor, grad_bias);
    return cudaGetLastError();
  });
}

}  // namespace headwater::cuda
