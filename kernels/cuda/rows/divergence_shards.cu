// The divergence's row passes on a rank (divergence_shards.h).
//
// Mapping   one block a row; a thread takes four columns of either side at a time, twice a step, and loads the next step's while it
//           computes. Loops are the same for all threads of a block: columns behind the last, and the top column where it is dealt
//           with apart, stand as columns of which no exponential is left.
// Traffic   both sides' products once in each pass; the gradient's pass writes 2 bytes a column.
// Digits    As in divergence_rows.cu, but that a warp decides for each four columns of its lanes. After the first that are far it
//           does not look any more. Sums and gradient see the same columns in the same order, so they decide alike.
// Top       The column with more than half of q is known before the sums: nobody has to look for it, and its own share of the loss
//           is taken once, in fp64. Sums leave it out, so a confident student keeps its digits.
// Numerics  fp32 over a thread's columns and over the block, in a fixed order; fp64 over the ranks, in their order.
// In place  As in row_gradient.cu: a step's bytes of M lie under products of step floor(step / 2), of step 0 itself, and barriers
//           in steps 0, 1, 2, 4, 8, ... are enough for everybody to have read those.
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device/divergence_terms.cuh"
#include "kernels/cuda/device/row_math.cuh"
#include "kernels/cuda/rows/divergence_params.h"
#include "kernels/cuda/rows/divergence_shards.h"

namespace headwater::cuda {
namespace {

using divergence_row::Form;
using divergence_row::FormOf;
using divergence_row::IsTransformed;
using divergence_row::KernelParams;
using divergence_row::kLn2;
using divergence_row::MakeKernelParams;
using row_math::DivergenceForm;

constexpr int kThreads = 256;
constexpr int kFinishThreads = 128;

struct PassParams {
  KernelParams row;
  int32_t vocab_start;
};

// The same form in row_math.cuh.
template <Form kForm>
constexpr DivergenceForm kMathForm = kForm == Form::kForward   ? DivergenceForm::kForward
                                     : kForm == Form::kReverse ? DivergenceForm::kReverse
                                                               : DivergenceForm::kMixture;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using divergence_row::FactorParts;
using divergence_row::FitHalf;
using divergence_row::MakeExact;
using divergence_row::Pack;
using divergence_row::PowerOfTwo;
using divergence_row::RowOffsets;
using divergence_row::RowTerms;
using divergence_row::SplitFactor;
using divergence_row::Terms;
using sm90::Exp2;

constexpr int kWarps = kThreads / 32;
constexpr int kVectors = 2;  // of four columns, of either side, that a thread has at a time
constexpr int32_t kVectorStep = 4 * kThreads;
constexpr int32_t kStep = kVectors * kVectorStep;
constexpr float kNoOffset = -3e38f;  // of no columns

// Four columns of either side, kVectors times: vector v of a thread begins at column start + v * kVectorStep + 4 * thread.
struct Columns {
  float student[kVectors][4];
  float teacher[kVectors][4];
};

__device__ __forceinline__ void LoadColumns(const float* student, const float* teacher, int32_t start, int32_t columns,
                                            Columns& to) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int32_t j = start + v * kVectorStep + 4 * static_cast<int32_t>(threadIdx.x);
    if (j >= columns) continue;
    const float4 s = *reinterpret_cast<const float4*>(student + j), t = *reinterpret_cast<const float4*>(teacher + j);
    to.student[v][0] = s.x, to.student[v][1] = s.y, to.student[v][2] = s.z, to.student[v][3] = s.w;
    to.teacher[v][0] = t.x, to.teacher[v][1] = t.y, to.teacher[v][2] = t.z, to.teacher[v][3] = t.w;
  }
}

// Calls visit(start of the step, its columns) for the steps that begin below `end`; `end` >= params.columns. All threads of the
// block go through all steps.
template <typename Function>
__device__ __forceinline__ void ForEachStep(const KernelParams& params, int64_t row, int32_t end, const Function& visit) {
  const float* const student = params.inputs[0] + row * params.strides[0];
  const float* const teacher = params.inputs[1] + row * params.strides[1];
  Columns next = {};
  LoadColumns(student, teacher, 0, params.columns, next);
  for (int32_t start = 0; start < end; start += kStep) {
    Columns columns = next;
    LoadColumns(student, teacher, start + kStep, params.columns, next);
    if (start + kStep > params.columns) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (start + v * kVectorStep + 4 * static_cast<int32_t>(threadIdx.x) + i < params.columns) continue;
          columns.student[v][i] = params.no_column[0];
          columns.teacher[v][i] = params.no_column[1];
        }
      }
    }
    visit(start, columns);
  }
}

struct Sum {
  static __device__ __forceinline__ float Merge(float a, float b) { return a + b; }
};
// NaN is skipped.
struct Largest {
  static __device__ __forceinline__ float Merge(float a, float b) { return fmaxf(a, b); }
};

// Over the block, to all threads, by the same tree every time. `shared` may be used again after the next barrier.
template <class Operation>
__device__ __forceinline__ float OverBlock(float value, float (&shared)[kWarps]) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = Operation::Merge(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) value = Operation::Merge(value, shared[warp]);
  return value;
}

__device__ __forceinline__ bool IsSum(float sum) { return sum > 1e-20f && sum < 1e36f; }

// sum 2^offset with the sum in [1, 2); 0 and values that are not finite stay.
__device__ __forceinline__ void Normalise(float& offset, float& sum) {
  if (!(sum > 0.0f && sum < INFINITY)) {
    if (sum == 0.0f) offset = kNoOffset;
    return;
  }
  const uint32_t bits = __float_as_uint(sum);
  offset += static_cast<float>(static_cast<int32_t>(bits >> 23) - 127);
  sum = __uint_as_float((bits & 0x7fffffu) | 0x3f800000u);
}

__global__ void __launch_bounds__(kThreads, 3) ShardSidesKernel(const __grid_constant__ PassParams pass, ShardSides* out) {
  const KernelParams& params = pass.row;
  const int64_t row = blockIdx.x;
  __shared__ float shared[6][kWarps];
  const float scales[2] = {params.log2_scales[0], params.log2_scales[1]};

  // Exponentials are relative to an offset guessed from the first 16 columns, and by 2^40 above those: a largest logit 2^80 above
  // them still fits. A row that the guess does not fit is summed again relative to its maxima.
  float offsets[2] = {0.0f, 0.0f}, sums[2] = {0.0f, 0.0f};
  if (params.columns > 0) {
    const int32_t side = static_cast<int32_t>(threadIdx.x) / 16 % 2,
                  column = min(static_cast<int32_t>(threadIdx.x) % 16, params.columns - 1);
    float largest = params.inputs[side][row * params.strides[side] + column] * scales[side];
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    largest = ceilf(largest) + 40.0f;
    offsets[0] = __shfl_sync(0xffffffffu, largest, 0);
    offsets[1] = __shfl_sync(0xffffffffu, largest, 16);
  }
  float top = -INFINITY;  // the thread's largest student's exponent
  int32_t top_vector = -1;
  for (int attempt = 0; attempt < 2; ++attempt) {
    sums[0] = sums[1] = 0.0f;
    top = -INFINITY;
    top_vector = -1;
    ForEachStep(params, row, params.columns, [&](int32_t start, const Columns& columns) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float x[4], y[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = fmaf(columns.student[v][i], scales[0], -offsets[0]);
          y[i] = fmaf(columns.teacher[v][i], scales[1], -offsets[1]);
        }
        const float largest = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
        const bool higher = largest > top;
        top = higher ? largest : top;
        top_vector = higher ? start + v * kVectorStep + 4 * static_cast<int32_t>(threadIdx.x) : top_vector;
        sums[0] += (Exp2(x[0]) + Exp2(x[1])) + (Exp2(x[2]) + Exp2(x[3]));
        sums[1] += (Exp2(y[0]) + Exp2(y[1])) + (Exp2(y[2]) + Exp2(y[3]));
      }
    });
    sums[0] = OverBlock<Sum>(sums[0], shared[0]);
    sums[1] = OverBlock<Sum>(sums[1], shared[1]);
    if (attempt > 0 || params.columns == 0 || (IsSum(sums[0]) && IsSum(sums[1]))) break;
    float largest[2] = {-INFINITY, -INFINITY};
    ForEachStep(params, row, params.columns, [&](int32_t, const Columns& columns) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          largest[0] = fmaxf(largest[0], columns.student[v][i] * scales[0]);
          largest[1] = fmaxf(largest[1], columns.teacher[v][i] * scales[1]);
        }
      }
    });
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const float of_row = ceilf(OverBlock<Largest>(largest[side], shared[2 + side]));
      offsets[side] = of_row > -INFINITY ? of_row : 0.0f;
    }
  }
  const float row_top = OverBlock<Largest>(top, shared[4]);
  // The first of those that have it; whole numbers up to 2^24 are exact, and more columns than that have vectors of four.
  const float first =
      OverBlock<Largest>(top_vector >= 0 && top == row_top ? -static_cast<float>(top_vector / 4) : -INFINITY, shared[5]);
  if (threadIdx.x != 0) return;
  ShardSides result = {{offsets[0], offsets[1]}, {sums[0], sums[1]}, {0.0f, 0.0f}, -1, 0};
  Normalise(result.offset[0], result.sum[0]);
  Normalise(result.offset[1], result.sum[1]);
  if (first > -INFINITY) {
    const int32_t vector = 4 * static_cast<int32_t>(-first);
    for (int32_t j = vector; j < vector + 4 && j < params.columns; ++j) {
      const float product = params.inputs[0][row * params.strides[0] + j];
      if (fmaf(product, scales[0], -offsets[0]) != row_top) continue;
      result.top_products[0] = product;
      result.top_products[1] = params.inputs[1][row * params.strides[1] + j];
      result.top_column = pass.vocab_start + j;
      break;
    }
  }
  out[row] = result;
}

// Turns a thread's columns of products into terms, as RowTerms keeps them. `student` becomes q (kForward: q - p), `teacher` L
// (kForward: q), both in M's units.
template <Form kForm, bool kHalf>
struct ThreadTerms {
  using Math = RowTerms<kForm, /*kTransformed=*/false, kHalf>;
  Terms terms;
  float q = 0.0f;                    // kMixture: of columns that are not far
  float far_q = 0.0f, far_p = 0.0f;  // kMixture: of far columns; p in true units
  bool looks = true;                 // a warp that has seen a far vector does not look any more

  __device__ __forceinline__ void Add(const KernelParams& params, const RowOffsets& offsets, float (&student)[4],
                                      float (&teacher)[4]) {
    if (looks) {
      const uint32_t near = Math::NearLanes(params, offsets, student, teacher);
      if (__popc(near) >= divergence_row::kMixedLanes) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (near == ~0u) {
            Math::Near(params, offsets, student[i], teacher[i], terms);
          } else {
            Math::Mixed(params, offsets, student[i], teacher[i], terms);
          }
          if constexpr (kForm == Form::kMixture) q += student[i];
        }
        return;
      }
      looks = false;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kForm == Form::kMixture) far_p += Exp2(Math::LogP(params, offsets, teacher[i]));
      Math::Far(params, offsets, student[i], teacher[i], terms);
      if constexpr (kForm == Form::kMixture) far_q += student[i];
    }
  }
};

__device__ __forceinline__ RowOffsets OffsetsOf(const ShardRow& row) {
  return {row.student_offset, row.teacher_offset, row.difference, row.ratio};
}

// The vector's column that is `column`, or -1.
__device__ __forceinline__ int IndexIn(int32_t vector, int32_t column) {
  const uint32_t index = static_cast<uint32_t>(column - vector);
  return index < 4u ? static_cast<int>(index) : -1;
}

// Column `index` of vector v becomes one of which no exponential is left.
__device__ __forceinline__ void LeaveOut(const KernelParams& params, int v, int index, Columns& columns) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i != index) continue;
    columns.student[v][i] = params.no_column[0];
    columns.teacher[v][i] = params.no_column[1];
  }
}

template <Form kForm, bool kHalf>
__global__ void __launch_bounds__(kThreads, 3)
    ShardSumsKernel(const __grid_constant__ PassParams pass, const ShardRow* rows, ShardSums* out) {
  const KernelParams& params = pass.row;
  const int64_t row = blockIdx.x;
  const RowOffsets offsets = OffsetsOf(rows[row]);
  const bool has_top = rows[row].top_column >= 0;
  const float top_slope = rows[row].top_slope;
  // A top column of another rank is none of these.
  const int32_t top_column = has_top ? rows[row].top_column - pass.vocab_start : -1;

  ThreadTerms<kForm, kHalf> mine;
  float q = 0.0f, bound = 0.0f, bound_q = 0.0f;
  ForEachStep(params, row, params.columns, [&](int32_t start, Columns columns) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int index = IndexIn(start + v * kVectorStep + 4 * static_cast<int32_t>(threadIdx.x), top_column);
      if (index >= 0) LeaveOut(params, v, index, columns);
      mine.Add(params, offsets, columns.student[v], columns.teacher[v]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kForm == Form::kReverse) q += columns.student[v][i];
        if (!has_top) continue;
        const float summand =
            kForm == Form::kForward ? columns.student[v][i] : columns.student[v][i] * (columns.teacher[v][i] - top_slope);
        if (!(fabsf(summand) > bound)) continue;
        const float own_q = kForm == Form::kForward ? columns.teacher[v][i] : columns.student[v][i];
        bound = fabsf(summand);
        bound_q = summand < 0.0f ? -own_q : own_q;
      }
    }
  });

  const Terms& terms = mine.terms;
  float loss = terms.loss, mean = terms.mean;
  if constexpr (kForm == Form::kMixture) {
    q = (mine.q + mine.far_q) * params.inverse_rest_unit;
    mean = terms.mean * params.inverse_rest_unit;
    loss = terms.loss * params.inverse_unit -
           fmaf(params.beta_log_beta, mine.far_p, params.rest_log_rest * (mine.far_q * params.inverse_rest_unit));
  }
  __shared__ float shared[8][kWarps];
  ShardSums result = {};
  result.loss = OverBlock<Sum>(loss, shared[0]);
  result.mean = OverBlock<Sum>(mean, shared[1]);
  result.q = OverBlock<Sum>(q, shared[2]);
  if constexpr (kHalf) {
    result.largest = OverBlock<Largest>(terms.largest, shared[3]);
    result.q_largest = OverBlock<Largest>(terms.q_largest, shared[4]);
  }
  if (has_top) {
    result.bound = OverBlock<Largest>(bound, shared[5]);
    // Among several such columns, one whose summand is positive, with the largest q.
    const float own = bound == result.bound ? bound_q : 0.0f;
    const float positive = OverBlock<Largest>(fmaxf(own, 0.0f), shared[6]);
    const float negative = OverBlock<Largest>(fmaxf(-own, 0.0f), shared[7]);
    result.bound_q = positive > 0.0f ? positive : -negative;
  }
  if (threadIdx.x == 0) out[row] = result;
}

template <Form kForm, bool kHalf>
__global__ void __launch_bounds__(kThreads, 3) ShardGradientKernel(const __grid_constant__ PassParams pass, const ShardRow* rows) {
  const KernelParams& params = pass.row;
  const int64_t row = blockIdx.x;
  uint16_t* const out = params.matrix + row * params.matrix_stride;
  if (rows[row].has_gradient == 0) {
    for (int32_t j = 4 * static_cast<int32_t>(threadIdx.x); j < params.zero_columns; j += kVectorStep) {
      *reinterpret_cast<uint2*>(out + j) = make_uint2(0, 0);
    }
    return;
  }
  const RowOffsets offsets = OffsetsOf(rows[row]);
  const int32_t top_column = rows[row].top_column >= 0 ? rows[row].top_column - pass.vocab_start : -1;
  const float factor = rows[row].factor, mean_factor = rows[row].mean_factor, top_entry = rows[row].top_entry;

  ThreadTerms<kForm, kHalf> mine;
  int32_t step = 0;
  ForEachStep(params, row, params.zero_columns, [&](int32_t start, Columns columns) {
    uint2 packed[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t vector = start + v * kVectorStep + 4 * static_cast<int32_t>(threadIdx.x);
      const int index = IndexIn(vector, top_column);
      if (index >= 0) LeaveOut(params, v, index, columns);
      mine.Add(params, offsets, columns.student[v], columns.teacher[v]);
      float entries[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        entries[i] = columns.student[v][i] * (kForm == Form::kForward ? factor : fmaf(-columns.teacher[v][i], factor, mean_factor));
      }
      if (index >= 0 || vector + 4 > params.columns) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i == index) entries[i] = top_entry;
          if (vector + i >= params.columns) entries[i] = 0.0f;
        }
      }
      packed[v] = make_uint2(Pack<kHalf>(entries[0], entries[1]), Pack<kHalf>(entries[2], entries[3]));
    }
    if ((step & (step - 1)) == 0) __syncthreads();
    ++step;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t vector = start + v * kVectorStep + 4 * static_cast<int32_t>(threadIdx.x);
      if (vector < params.zero_columns) *reinterpret_cast<uint2*>(out + vector) = packed[v];
    }
  });
}

// One warp a row.
template <Form kForm, bool kHalf>
__global__ void __launch_bounds__(kFinishThreads)
    FinishShardSumsKernel(const __grid_constant__ KernelParams params, const ShardSums* sums, int32_t shard_count, ShardRow* rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kFinishThreads / 32) + threadIdx.x / 32;
  if (row >= params.row_count) return;
  double loss = 0, mean_sum = 0, q_sum = 0;
  float bound = 0.0f, bound_q = 0.0f, largest = 0.0f, q_largest = 0.0f;
  for (int32_t shard = 0; shard < shard_count; ++shard) {
    const ShardSums& next = sums[static_cast<int64_t>(shard) * params.row_count + row];
    loss += static_cast<double>(next.loss);
    mean_sum += static_cast<double>(next.mean);
    q_sum += static_cast<double>(next.q);
    if (next.bound > bound) {
      bound = next.bound;
      bound_q = next.bound_q;
    }
    largest = fmaxf(largest, next.largest);
    q_largest = fmaxf(q_largest, next.q_largest);
  }
  const ShardRow known = rows[row];
  const bool has_top = known.top_column >= 0;
  const auto slope = static_cast<double>(known.top_slope);
  double mean = mean_sum, top_entry, other_entry;
  if constexpr (kForm == Form::kForward) {
    top_entry = -mean;
    other_entry = static_cast<double>(bound);
  } else {
    // Relative to the top column's L.
    const double relative = fma(-slope, q_sum, mean_sum);
    top_entry = (1 - q_sum) * relative;
    other_entry = fabs(static_cast<double>(bound_q)) * relative - static_cast<double>(bound_q < 0.0f ? -bound : bound);
    mean = has_top ? fma(slope, 1 - q_sum, mean_sum) : mean_sum / q_sum;
    if (!(fabs(loss) < kRowInfinity)) mean = kRowNan;  // nothing finite comes out of a row that is not
  }
  const double weight = params.token_weights == nullptr ? 1.0 : static_cast<double>(params.token_weights[row]);
  FactorParts factor = SplitFactor(params.matrix_factor * weight);
  const bool has_gradient = factor.rest != 0.0f;
  const auto top_size = static_cast<float>(fabs(top_entry)) * params.top_unit;
  if constexpr (kHalf) {
    const float most = fmaxf(kForm == Form::kForward ? largest : fmaf(q_largest, static_cast<float>(fabs(mean)), largest),
                             has_top ? top_size : 0.0f) *
                       fabsf(factor.rest);
    FitHalf(most, factor);
  }
  float row_power = PowerOfTwo(factor.exponent);
  if (has_top && params.want_gradient != 0) {
    // The most probable column's entry weighs as much as all others together; often one of them has most of that.
    const float size = fabsf(factor.rest);
    row_power *= MakeExact<kHalf>(top_size * size, static_cast<float>(fabs(other_entry)) * size, factor);
  }
  if (threadIdx.x % 32 != 0) return;
  RowReport report;
  report.soft = kLn2 * loss + known.top_loss;
  report.gradient_bound = fabs(params.gradient_scale * weight) * params.soft_weight;
  params.reports[row] = report;
  if (params.want_gradient == 0) return;
  params.row_factor[row] = has_gradient ? row_power : 0.0f;
  params.target_factor[row] = 0.0f;
  ShardRow& out = rows[row];
  out.factor = factor.rest;
  out.mean_factor = static_cast<float>(mean) * factor.rest;
  out.top_entry = static_cast<float>(top_entry) * params.top_unit * factor.rest;
  out.has_gradient = has_gradient ? 1 : 0;
}
#else
// Other architectures take the passes for any GPU (TermRun::shard_passes).
__global__ void ShardSidesKernel(const __grid_constant__ PassParams, ShardSides*) {}
template <Form kForm, bool kHalf>
__global__ void ShardSumsKernel(const __grid_constant__ PassParams, const ShardRow*, ShardSums*) {}
template <Form kForm, bool kHalf>
__global__ void ShardGradientKernel(const __grid_constant__ PassParams, const ShardRow*) {}
template <Form kForm, bool kHalf>
__global__ void FinishShardSumsKernel(const __grid_constant__ KernelParams, const ShardSums*, int32_t, ShardRow*) {}
#endif

// The slope L of a column relative to its least value, in units of log2, and the column's share of the loss in nats.
template <Form kForm>
__device__ void TopTerms(double log_q, double d, double beta, double* slope, double* loss) {
  constexpr DivergenceForm kMath = kMathForm<kForm>;
  const row_math::ColumnLogs<double> logs = {log_q + d, log_q, d};
  *loss = row_math::DivergenceTerms<double, kMath>(logs, beta, 1 - beta, 0.0).loss;
  if constexpr (kForm == Form::kForward) {
    *slope = 0;
  } else {
    row_math::SlopeShift<double> shift;
    shift.on = kForm == Form::kMixture;
    if (shift.on) shift.log_kappa = log(beta / (1 - beta));
    *slope = -row_math::Slope<double, kMath>(d, beta, 1 - beta, shift) / kLn2;
  }
}

__global__ void __launch_bounds__(kFinishThreads)
    FinishShardSidesKernel(const __grid_constant__ KernelParams params, Form form, double beta, const ShardSides* sides,
                           int32_t shard_count, ShardRow* rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kFinishThreads + threadIdx.x;
  if (row >= params.row_count) return;
  const double scales[2] = {static_cast<double>(params.log2_scales[0]), static_cast<double>(params.log2_scales[1])};
  double offsets[2] = {-kRowInfinity, -kRowInfinity}, totals[2] = {0, 0};
  double top = -kRowInfinity, top_products[2] = {0, 0};
  int32_t top_column = -1;
  for (int32_t shard = 0; shard < shard_count; ++shard) {
    const ShardSides& next = sides[static_cast<int64_t>(shard) * params.row_count + row];
    for (int side = 0; side < 2; ++side) offsets[side] = fmax(offsets[side], static_cast<double>(next.offset[side]));
    const double exponent = static_cast<double>(next.top_products[0]) * scales[0];
    if (next.top_column >= 0 && exponent > top) {
      top = exponent;
      top_column = next.top_column;
      top_products[0] = static_cast<double>(next.top_products[0]);
      top_products[1] = static_cast<double>(next.top_products[1]);
    }
  }
  for (int32_t shard = 0; shard < shard_count; ++shard) {
    const ShardSides& next = sides[static_cast<int64_t>(shard) * params.row_count + row];
    for (int side = 0; side < 2; ++side) {
      if (next.sum[side] == 0.0f) continue;
      totals[side] += static_cast<double>(next.sum[side]) * exp2(static_cast<double>(next.offset[side]) - offsets[side]);
    }
  }
  const double student = offsets[0] + log2(totals[0]), teacher = offsets[1] + log2(totals[1]);
  ShardRow out = {};
  out.student_offset = static_cast<float>(static_cast<double>(params.log_rest) + static_cast<double>(params.log_unit) - student);
  out.teacher_offset = static_cast<float>(-teacher);
  out.difference = static_cast<float>(student - teacher);
  out.ratio = static_cast<float>(student - teacher + (static_cast<double>(params.log_beta) - static_cast<double>(params.log_rest)));
  out.top_column = -1;
  const double log_q = top - student;
  if (top_column >= 0 && log_q > -1) {
    const double d = (top_products[1] - static_cast<double>(params.ratio) * top_products[0]) * scales[1] + (student - teacher);
    double slope = 0;
    if (form == Form::kForward) {
      TopTerms<Form::kForward>(kLn2 * log_q, kLn2 * d, beta, &slope, &out.top_loss);
    } else if (form == Form::kReverse) {
      TopTerms<Form::kReverse>(kLn2 * log_q, kLn2 * d, beta, &slope, &out.top_loss);
    } else {
      TopTerms<Form::kMixture>(kLn2 * log_q, kLn2 * d, beta, &slope, &out.top_loss);
    }
    out.top_column = top_column;
    out.top_slope = static_cast<float>(slope);
  }
  rows[row] = out;
}

int32_t CommonColumns(const LogitsView& student, const LogitsView& teacher, const DivergenceTerm& term) {
  int64_t columns = term.common_columns - student.vocab_start;
  columns = columns < student.columns ? columns : student.columns;
  columns = columns < teacher.columns ? columns : teacher.columns;
  return static_cast<int32_t>(columns < 0 ? 0 : columns);
}

PassParams MakePass(const LogitsView& student, const LogitsView& teacher, int64_t row_count, const DivergenceTerm& term) {
  PassParams pass{MakeKernelParams(student, teacher, term, 1), static_cast<int32_t>(student.vocab_start)};
  pass.row.row_count = static_cast<int32_t>(row_count);
  pass.row.columns = CommonColumns(student, teacher, term);
  pass.row.zero_columns = static_cast<int32_t>(RoundUp(student.columns, 8));
  return pass;
}

bool Fits(const LogitsView& student, const LogitsView& teacher, int64_t row_count) {
  const auto fits = [](const LogitsView& view) {
    return view.element == Element::kFloat32 && !IsTransformed(view) && view.stride % 4 == 0 && view.stride >= view.columns &&
           reinterpret_cast<uintptr_t>(view.products) % 16 == 0;
  };
  return fits(student) && fits(teacher) && row_count <= INT32_MAX / 2;
}

// Calls launch(form, half) with both as constants.
template <typename Launch>
void WithForm(const DivergenceTerm& term, Element matrix_element, const Launch& launch) {
  const auto with_half = [&](auto form) {
    if (matrix_element == Element::kFloat16) {
      launch(form, std::true_type());
    } else {
      launch(form, std::false_type());
    }
  };
  switch (FormOf(term)) {
    case Form::kForward:
      return with_half(std::integral_constant<Form, Form::kForward>());
    case Form::kMixture:
      return with_half(std::integral_constant<Form, Form::kMixture>());
    case Form::kReverse:
      break;
  }
  with_half(std::integral_constant<Form, Form::kReverse>());
}

unsigned BlocksOf(int64_t rows, int64_t of_block) { return static_cast<unsigned>((rows + of_block - 1) / of_block); }

}  // namespace

cudaError_t LaunchShardSides(const LogitsView& student, const LogitsView& teacher, int64_t row_count, const DivergenceTerm& term,
                             ShardSides* out, cudaStream_t stream) {
  if (row_count == 0) return cudaSuccess;
  if (!Fits(student, teacher, row_count)) return cudaErrorInvalidValue;
  ShardSidesKernel<<<BlocksOf(row_count, 1), kThreads, 0, stream>>>(MakePass(student, teacher, row_count, term), out);
  return cudaGetLastError();
}

cudaError_t LaunchFinishShardSides(const ShardSides* sides, int32_t shard_count, const LogitsView& student,
                                   const LogitsView& teacher, int64_t row_count, const DivergenceTerm& term, ShardRow* rows,
                                   cudaStream_t stream) {
  if (row_count == 0) return cudaSuccess;
  FinishShardSidesKernel<<<BlocksOf(row_count, kFinishThreads), kFinishThreads, 0, stream>>>(
      MakePass(student, teacher, row_count, term).row, FormOf(term), term.beta, sides, shard_count, rows);
  return cudaGetLastError();
}

cudaError_t LaunchShardSums(const LogitsView& student, const LogitsView& teacher, int64_t row_count, const DivergenceTerm& term,
                            Element matrix_element, const ShardRow* rows, ShardSums* out, cudaStream_t stream) {
  if (row_count == 0) return cudaSuccess;
  if (!Fits(student, teacher, row_count)) return cudaErrorInvalidValue;
  const PassParams pass = MakePass(student, teacher, row_count, term);
  WithForm(term, matrix_element, [&](auto form, auto half) {
    ShardSumsKernel<decltype(form)::value, decltype(half)::value><<<BlocksOf(row_count, 1), kThreads, 0, stream>>>(pass, rows, out);
  });
  return cudaGetLastError();
}

cudaError_t LaunchFinishShardSums(const ShardSums* sums, int32_t shard_count, const LogitsView& student, const LogitsView& teacher,
                                  const ChunkRows& rows, const DivergenceTerm& term, double loss_scale, Element matrix_element,
                                  bool want_gradient, ShardRow* shard_rows, RowReport* reports, float* row_factor,
                                  float* target_factor, cudaStream_t stream) {
  if (rows.row_count == 0) return cudaSuccess;
  KernelParams params = MakeKernelParams(student, teacher, term, loss_scale);
  params.row_count = static_cast<int32_t>(rows.row_count);
  params.token_weights = rows.token_weights;
  params.reports = reports;
  params.row_factor = row_factor;
  params.target_factor = target_factor;
  params.want_gradient = want_gradient ? 1 : 0;
  WithForm(term, matrix_element, [&](auto form, auto half) {
    FinishShardSumsKernel<decltype(form)::value, decltype(half)::value>
        <<<BlocksOf(rows.row_count, kFinishThreads / 32), kFinishThreads, 0, stream>>>(params, sums, shard_count, shard_rows);
  });
  return cudaGetLastError();
}

cudaError_t LaunchShardGradient(const LogitsView& student, const LogitsView& teacher, int64_t row_count, const DivergenceTerm& term,
                                const ShardRow* rows, const MutableMatrix& matrix, cudaStream_t stream) {
  if (row_count == 0 || student.columns == 0) return cudaSuccess;
  if (!Fits(student, teacher, row_count) || matrix.stride % 8 != 0 || reinterpret_cast<uintptr_t>(matrix.data) % 16 != 0) {
    return cudaErrorInvalidValue;
  }
  PassParams pass = MakePass(student, teacher, row_count, term);
  pass.row.matrix = static_cast<uint16_t*>(matrix.data);
  pass.row.matrix_stride = matrix.stride;
  WithForm(term, matrix.element, [&](auto form, auto half) {
    ShardGradientKernel<decltype(form)::value, decltype(half)::value><<<BlocksOf(row_count, 1), kThreads, 0, stream>>>(pass, rows);
  });
  return cudaGetLastError();
}

}  // namespace headwater::cuda
