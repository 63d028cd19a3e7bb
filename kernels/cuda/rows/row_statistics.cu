// Statistics of rows of products, from which the losses are computed before the gradient.
//
// Mapping   one block a row, or four rows with fp32 products beside which a bias or class weights are read; a thread takes 16 bytes
//           at a time, several loads in flight, and loads the next while it computes.
// Traffic   every product is read once (4 or 8 bytes), nothing of that size is written. Where the largest logit stands is found by
//           loading its vector once more.
// Numerics  fp32 products: sums relative to a power of two near a thread's maximum, which moves by exact factors: fp32 over 16
//           elements, fp64 across those, threads and warps, in a fixed order that does not depend on the number of rows.
//           fp64 products: all fp64, relative to a running maximum. Entropy and its kin: fp32 or fp64, relative to a running
//           maximum whose own exponential is left out, so that a confident row's sums keep their digits.
#include "kernels/cuda/device/row_block.cuh"
#include "kernels/cuda/device/row_math.cuh"
#include "kernels/cuda/rows/row_passes.h"

namespace headwater::cuda {
namespace {

using row_block::BlockMax;
using row_block::BlockSum;
using row_block::Classes;
using row_block::DivergenceSides;
using row_block::kVector;
using row_block::LoadSide;
using row_block::LoadVector;
using row_block::LoadVectors;
using row_block::MakeRowView;
using row_block::MakeSideArray;
using row_block::RowView;
using row_block::SideArray;
using row_block::ToLogits;

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int32_t kNoColumn = INT32_MAX;

template <typename T>
constexpr T kLowest = -static_cast<T>(INFINITY);

// e^{max - base} as a factor of sums that were taken relative to `max`: 0 where there was nothing.
template <typename T>
__device__ __forceinline__ double RescaleFactor(T max, T base) {
  return max == -static_cast<T>(INFINITY) ? 0.0 : exp(static_cast<double>(max) - static_cast<double>(base));
}

struct StatsTargets {
  const int32_t* targets;   // or null
  SideArray class_weights;  // of this shard's columns; data null: all 1
};

// A thread's part of a row: sums relative to its running maximum. kWantRest: those of entropy and its kin too; else `sum` alone.
// The first column that has that maximum is left out of them until another one has it.
struct RowSums {
  double sum = 0;  // of all columns; with kWantRest of those but the maximum's
  double weighted = 0;
  double squares = 0;

  // Relative to `base`, not below `max`. `top`: 1 where the maximum's column enters, else 0. NaN stays.
  template <bool kWantRest>
  __device__ __forceinline__ void MoveTo(double max, double base, double top) {
    const double factor = RescaleFactor(max, base);
    if constexpr (kWantRest) {
      const double shift = max - base;
      sum += top;
      weighted = factor == 0 ? 0.0 : factor * (top == 0 ? weighted : weighted + shift * sum);
      squares = factor * factor * (squares + top);
    }
    sum *= factor;
  }
};

template <bool kWantRest>
__global__ void __launch_bounds__(kThreads, 2) WideStatsKernel(const RowView<double> view, const StatsTargets side, RowStats* out) {
  using T = double;
  constexpr int kVectors = 2;
  constexpr int32_t kStep = kThreads * kVector<T>;
  const int64_t row = blockIdx.x;
  const T* products = view.products + row * view.stride;
  const int32_t columns = view.columns;
  // Matches no column if the row has no target or it lies elsewhere.
  const int32_t target = side.targets == nullptr ? -1 : side.targets[row] - view.vocab_start;
  const bool has_weights = side.class_weights.data != nullptr;

  T max = kLowest<T>;
  int32_t best_column = kNoColumn;
  RowSums sums;
  double linear = 0, total = 0;
  int32_t first = static_cast<int32_t>(threadIdx.x) * kVector<T>;
  T next[kVectors][kVector<T>] = {};
  LoadVectors<T, kVectors>(products, first, kStep, columns, next);
  for (; first < columns; first += kStep * kVectors) {
    T z[kVectors][kVector<T>];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) z[v][i] = next[v][i];
    }
    LoadVectors<T, kVectors>(products, first + kStep * kVectors, kStep, columns, next);

    T step_max = kLowest<T>, step_linear = 0, step_total = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t j = first + v * kStep;
      T unused[kVector<T>];
      ToLogits<true, true, false>(view, j, z[v], unused);
      // The columns that do not count: the target's, and those behind the last.
      const bool rare = j + kVector<T> > columns || static_cast<uint32_t>(target - j) < static_cast<uint32_t>(kVector<T>);
      if (has_weights && j < columns) {
        T weights[kVector<T>];
        LoadSide(side.class_weights, j, columns, weights);
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) {
          // A weight of 0 wins over a logit that is not finite; behind the last column all are 0.
          if (weights[i] != T(0) && j + i != target) step_linear += weights[i] * z[v][i];
        }
      }
      if (kWantRest || !has_weights) {
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) {
          if (!rare || (j + i < columns && j + i != target)) step_total += z[v][i];
        }
      }
      if (rare) {
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) {
          if (j + i >= columns || j + i == target) z[v][i] = kLowest<T>;
        }
      }
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) step_max = ::max(step_max, z[v][i]);
    }

    if (step_max > max) {
      sums.MoveTo<kWantRest>(max, step_max, max == kLowest<T> ? 0.0 : 1.0);
      max = step_max;
#pragma unroll
      for (int v = kVectors - 1; v >= 0; --v) {
#pragma unroll
        for (int i = kVector<T> - 1; i >= 0; --i) {
          if (z[v][i] == step_max) best_column = first + v * kStep + i;
        }
      }
      if constexpr (kWantRest) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
          for (int i = 0; i < kVector<T>; ++i) {
            if (first + v * kStep + i == best_column) z[v][i] = kLowest<T>;
          }
        }
      }
    }
    // An infinite maximum must not be subtracted from itself where all is -inf: those terms are 0.
    const T offset = max == kLowest<T> ? T(0) : max;
    T step_sum = 0, step_weighted = 0, step_squares = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) {
        const T shifted = row_math::ClampExponent(row_block::RoundedDifference(z[v][i], offset));
        const T e = row_math::ExpClamped(shifted);
        step_sum += e;
        if constexpr (kWantRest) {
          step_weighted += e * shifted;
          step_squares += e * e;
        }
      }
    }
    linear += static_cast<double>(step_linear);
    total += static_cast<double>(step_total);
    sums.sum += static_cast<double>(step_sum);
    if constexpr (kWantRest) {
      sums.weighted += static_cast<double>(step_weighted);
      sums.squares += static_cast<double>(step_squares);
    }
  }

  __shared__ T shared_max[kWarps];
  __shared__ int32_t shared_column[kWarps];
  __shared__ double shared_sums[kWantRest ? 5 : 2][kWarps];
  const T row_max = BlockMax<kThreads>(max, shared_max);
  // Smallest column of those with the maximum: the largest negative.
  const int32_t column = BlockMax<kThreads>(max == row_max ? -best_column : -kNoColumn, shared_column);
  const bool has_top = max == row_max && best_column == -column;
  sums.MoveTo<kWantRest>(max, row_max, has_top ? 0.0 : 1.0);
  RowStats stats;
  stats.best = row_max;
  stats.best_column = column == -kNoColumn ? -1.0 : static_cast<double>(view.vocab_start - column);
  if constexpr (kWantRest) {
    double values[5] = {sums.sum, has_weights ? linear : total, sums.weighted, sums.squares, total};
    BlockSum<kThreads>(values, shared_sums);
    const double sum = row_max == kLowest<T> ? values[0] : values[0] + 1;
    stats.others = {row_max, sum, values[2], values[1], values[0], values[3], values[4]};
  } else {
    double values[2] = {sums.sum, has_weights ? linear : total};
    BlockSum<kThreads>(values, shared_sums);
    stats.others = {row_max, values[0], 0, values[1], 0, 0, 0};
  }
  if (threadIdx.x == 0) out[row] = stats;
}

// --- fp32 ------------------------------------------------------------------------------------------------------------------------

constexpr int kQuickThreads = 256;
constexpr int kQuickWarps = kQuickThreads / 32;
constexpr int32_t kQuickStep = kQuickThreads * kVector<float>;
// Finite, below the exponents of logits: e^-inf relative to it is still 0.
constexpr float kNoExponent = -3e38f;
// Sums move to a new k only where an exponential exceeds 2^(k + this), so that they rarely do. It costs nothing but the digits of
// an exponent of that size.
constexpr float kExponentSlack = 24.0f;

// A thread's part of a row. Exponentials are relative to 2^k.
struct QuickStats {
  float max = kLowest<float>;
  float k = kNoExponent;
  int32_t best = -1;                    // the vector that has `max`
  float step_sum = 0, step_linear = 0;  // of the vectors since Flush()
  double sum = 0, linear = 0;
};

template <bool kWantLinear>
__device__ __forceinline__ void Flush(QuickStats* stats) {
  stats->sum += static_cast<double>(stats->step_sum);
  stats->step_sum = 0;
  if constexpr (kWantLinear) {
    stats->linear += static_cast<double>(stats->step_linear);
    stats->step_linear = 0;
  }
}

// Sums relative to 2^k. NaN in `sum` stays.
__device__ __forceinline__ void MoveTo(float k, QuickStats* stats) {
  stats->sum *= row_math::PowerOfTwo(stats->k, k);
  stats->k = k;
}

// Adds the logits `z` of columns [j, j + 4) of kRows rows; `weights` are their class weights. The rare cases are in one branch.
template <Classes kClasses, int kRows>
__device__ __forceinline__ void AddVectors(float (&z)[kRows][4], const float (&weights)[4], int32_t j, int32_t columns,
                                           const int32_t (&target)[kRows], QuickStats (&stats)[kRows]) {
  constexpr bool kWantLinear = kClasses != Classes::kNone;
  float largest[kRows], linear[kRows];
  float any_nan = 0;
  bool rare = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    largest[r] = fmaxf(fmaxf(z[r][0], z[r][1]), fmaxf(z[r][2], z[r][3]));
    rare |= row_block::HasExceptions(j, columns, target[r]);
    rare |= row_math::ExponentOver(largest[r], stats[r].k) > kExponentSlack;
    if constexpr (kWantLinear) {
      linear[r] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        linear[r] = kClasses == Classes::kWeighted ? fmaf(weights[i], z[r][i], linear[r]) : linear[r] + z[r][i];
      }
      any_nan += linear[r];
    }
  }
  if (rare || isnan(any_nan)) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if constexpr (kWantLinear) linear[r] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool counts = j + i < columns && j + i != target[r];
        if constexpr (kWantLinear) {
          // A weight of 0 wins over a logit that is not finite.
          const float weight = kClasses == Classes::kWeighted ? weights[i] : 1.0f;
          if (counts && weight != 0.0f) linear[r] = fmaf(weight, z[r][i], linear[r]);
        }
        if (!counts) z[r][i] = kLowest<float>;
      }
      largest[r] = fmaxf(fmaxf(z[r][0], z[r][1]), fmaxf(z[r][2], z[r][3]));
      if (row_math::ExponentOver(largest[r], stats[r].k) > kExponentSlack) {
        Flush<kWantLinear>(&stats[r]);
        MoveTo(row_math::NearestExponent(largest[r]), &stats[r]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool higher = largest[r] > stats[r].max;
    stats[r].max = higher ? largest[r] : stats[r].max;
    stats[r].best = higher ? j : stats[r].best;
    float e[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) e[i] = row_math::Exp2Approx(row_math::ExponentOver(z[r][i], stats[r].k));
    stats[r].step_sum += (e[0] + e[1]) + (e[2] + e[3]);
    if constexpr (kWantLinear) stats[r].step_linear += linear[r];
  }
}

// kClasses: kNone has no linear sums. kRows: of a block, not more than there are; the last block takes rows of the block before it
// again, with the same results.
template <bool kHasBias, bool kHasCap, Classes kClasses, int kRows>
__global__ void __launch_bounds__(kQuickThreads, kHasBias || kClasses == Classes::kWeighted ? 2 : 3)
    QuickStatsKernel(const RowView<float> view, const StatsTargets side, int64_t row_count, RowStats* out) {
  constexpr int kVectors = row_block::kQuickVectors / kRows;  // of a row at a time
  constexpr bool kWantLinear = kClasses != Classes::kNone;
  const int64_t first_row = min(static_cast<int64_t>(blockIdx.x) * kRows, row_count - kRows);
  const float* products = view.products + first_row * view.stride;
  const int32_t columns = view.columns;
  int32_t target[kRows];  // matches no column if the row has none or it lies elsewhere
  QuickStats stats[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) target[r] = side.targets == nullptr ? -1 : side.targets[first_row + r] - view.vocab_start;

  auto first = static_cast<int32_t>(threadIdx.x) * 4;
  float next[kVectors][kRows][4];
  row_block::SideBits next_bias[kVectors], next_weights[kVectors];
  const auto load = [&](int32_t from) {
    row_block::LoadQuick<kVectors, kRows, kQuickStep>(products, view.stride, kRows, from, columns, next);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t j = from + v * kQuickStep;
      if constexpr (kHasBias) next_bias[v] = row_block::LoadSideBits<false>(view.bias, j, columns);
      if constexpr (kClasses == Classes::kWeighted) {
        next_weights[v] = row_block::LoadSideBits<true>(side.class_weights, j, columns);
      }
    }
  };
  if (columns > 0) load(first);
  for (int32_t count = kVectors; first < columns; first += kQuickStep * kVectors, count += kVectors) {
    float z[kVectors][kRows][4], bias[kVectors][4], weights[kVectors][4];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kHasBias) row_block::Convert<false>(next_bias[v], view.bias.element, bias[v]);
      if constexpr (kClasses == Classes::kWeighted) {
        row_block::Convert<true>(next_weights[v], Element::kFloat32, weights[v]);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) row_block::ToArguments<kHasBias>(view, bias[v], next[v][r], z[v][r]);
    }
    load(first + kQuickStep * kVectors);
    row_block::ToLogitsQuick<kHasCap>(view, z);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t j = first + v * kQuickStep;
      if (kVectors == 1 || j < columns) AddVectors<kClasses, kRows>(z[v], weights[v], j, columns, target, stats);
    }
    // The same sums however many rows a block has.
    if (count % row_block::kQuickVectors == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) Flush<kWantLinear>(&stats[r]);
    }
  }

  __shared__ float shared_max[kRows][kQuickWarps];
  __shared__ float shared_k[kRows][kQuickWarps];
  __shared__ int32_t shared_column[kRows][kQuickWarps];
  __shared__ double shared_sums[kRows][2][kQuickWarps];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float row_max = BlockMax<kQuickThreads>(stats[r].max, shared_max[r]);
    const float k = BlockMax<kQuickThreads>(stats[r].k, shared_k[r]);
    Flush<kWantLinear>(&stats[r]);
    MoveTo(k, &stats[r]);
    int32_t column = kNoColumn;
    if (stats[r].best >= 0 && stats[r].max == row_max) {
      // Its logits once more, to see which it was.
      const int32_t j = stats[r].best;
      float vector[4], again[4], bias[4] = {}, unused[4];
      LoadVector(products + r * view.stride + j, vector);
      if (kHasBias) LoadSide(view.bias, j, columns, bias);
      row_block::ToArguments<kHasBias>(view, bias, vector, again);
      row_block::ToLogitsQuick<kHasCap, false>(view, again, unused);
#pragma unroll
      for (int i = 3; i >= 0; --i) {
        if (j + i < columns && j + i != target[r] && again[i] == row_max) column = j + i;
      }
    }
    // Smallest column of those with the maximum: the largest negative.
    column = BlockMax<kQuickThreads>(-column, shared_column[r]);
    double sums[2] = {stats[r].sum, stats[r].linear};
    BlockSum<kQuickThreads>(sums, shared_sums[r]);
    if (threadIdx.x == 0) {
      const double shift = static_cast<double>(k) * row_math::kLn2 - static_cast<double>(row_max);
      const double factor = row_max == kLowest<float> ? 0.0 : exp(shift);
      RowStats result;
      result.others.max = static_cast<double>(row_max);
      result.others.sum = sums[0] * factor;
      result.others.linear = sums[1];
      result.best = static_cast<double>(row_max);
      result.best_column = column == -kNoColumn ? -1.0 : static_cast<double>(view.vocab_start - column);
      out[first_row + r] = result;
    }
  }
}

template <bool kHasBias, bool kHasCap, Classes kClasses>
cudaError_t RunQuickStats(const RowView<float>& view, const StatsTargets& side, int64_t row_count, RowStats* out,
                          cudaStream_t stream) {
  if constexpr (kHasBias || kClasses == Classes::kWeighted) {
    constexpr int kRows = row_block::kQuickVectors;
    if (row_count >= row_block::kSharingRows) {
      const auto blocks = static_cast<unsigned>((row_count + kRows - 1) / kRows);
      QuickStatsKernel<kHasBias, kHasCap, kClasses, kRows><<<blocks, kQuickThreads, 0, stream>>>(view, side, row_count, out);
      return cudaGetLastError();
    }
  }
  QuickStatsKernel<kHasBias, kHasCap, kClasses, 1>
      <<<static_cast<unsigned>(row_count), kQuickThreads, 0, stream>>>(view, side, row_count, out);
  return cudaGetLastError();
}

template <bool kHasBias, bool kHasCap>
cudaError_t RunQuickStats(const RowView<float>& view, const StatsTargets& side, bool want_linear, int64_t row_count, RowStats* out,
                          cudaStream_t stream) {
  if (!want_linear) return RunQuickStats<kHasBias, kHasCap, Classes::kNone>(view, side, row_count, out, stream);
  if (side.class_weights.data == nullptr) {
    return RunQuickStats<kHasBias, kHasCap, Classes::kEqual>(view, side, row_count, out, stream);
  }
  return RunQuickStats<kHasBias, kHasCap, Classes::kWeighted>(view, side, row_count, out, stream);
}

// The weights of this shard's columns; null: all 1, or not asked for.
const float* LinearWeights(const LogitsView& logits, const CrossEntropyOptions& options) {
  if (options.term.label_smoothing == 0 || options.term.class_weights == nullptr) return nullptr;
  return options.term.class_weights + logits.vocab_start;
}

template <typename T>
StatsTargets MakeStatsTargets(const LogitsView& logits, const ChunkRows& rows, const CrossEntropyOptions& options) {
  return {rows.targets, MakeSideArray<T>(LinearWeights(logits, options), Element::kFloat32)};
}

// --- Both sides of a divergence --------------------------------------------------------------------------------------------------

constexpr int kSoftThreads = 256;
constexpr int kSoftWarps = kSoftThreads / 32;

// Adds up one side's step; true if `max` has moved.
template <typename T, int kVectors>
__device__ __forceinline__ bool AddSoftStep(const T (&z)[kVectors][kVector<T>], T* max, double* sum) {
  T step_max = kLowest<T>;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) step_max = ::max(step_max, z[v][i]);
  }
  const bool moved = step_max > *max;
  if (moved) {
    *sum *= RescaleFactor(*max, step_max);
    *max = step_max;
  }
  const T offset = *max == kLowest<T> ? T(0) : *max;
  T step_sum = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) step_sum += row_math::Exp(z[v][i] - offset);
  }
  *sum += static_cast<double>(step_sum);
  return moved;
}

template <typename T, bool kMayTransform>
__global__ void __launch_bounds__(kSoftThreads, sizeof(T) == 4 ? 3 : 2)
    SoftStatsKernel(const DivergenceSides<T> params, SoftStats* out_student, SoftStats* out_teacher) {
  constexpr int kVectors = 2;
  constexpr int32_t kStep = kSoftThreads * kVector<T>;
  const int64_t row = blockIdx.x;
  const T* student = params.student.products + row * params.student.stride;
  const T* teacher = params.teacher.products + row * params.teacher.stride;
  const int32_t columns = params.columns;

  T student_max = kLowest<T>, teacher_max = kLowest<T>;
  T teacher_at_top = 0;  // the teacher's logit where the student's largest is
  int32_t top_column = kNoColumn;
  double student_sum = 0, teacher_sum = 0;
  int32_t first = static_cast<int32_t>(threadIdx.x) * kVector<T>;
  T next_student[kVectors][kVector<T>] = {}, next_teacher[kVectors][kVector<T>] = {};
  LoadVectors<T, kVectors>(student, first, kStep, columns, next_student);
  LoadVectors<T, kVectors>(teacher, first, kStep, columns, next_teacher);
  for (; first < columns; first += kStep * kVectors) {
    T s[kVectors][kVector<T>], t[kVectors][kVector<T>];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) {
        s[v][i] = next_student[v][i];
        t[v][i] = next_teacher[v][i];
      }
    }
    LoadVectors<T, kVectors>(student, first + kStep * kVectors, kStep, columns, next_student);
    LoadVectors<T, kVectors>(teacher, first + kStep * kVectors, kStep, columns, next_teacher);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t j = first + v * kStep;
      T unused[kVector<T>];
      ToLogits<kMayTransform, kMayTransform, false>(params.student, j, s[v], unused);
      ToLogits<kMayTransform, kMayTransform, false>(params.teacher, j, t[v], unused);
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) {
        const bool inside = j + i < columns;
        s[v][i] = inside ? s[v][i] * params.student_inverse_temperature : kLowest<T>;
        t[v][i] = inside ? t[v][i] * params.teacher_inverse_temperature : kLowest<T>;
      }
    }
    AddSoftStep(t, &teacher_max, &teacher_sum);
    if (AddSoftStep(s, &student_max, &student_sum)) {
#pragma unroll
      for (int v = kVectors - 1; v >= 0; --v) {
#pragma unroll
        for (int i = kVector<T> - 1; i >= 0; --i) {
          if (s[v][i] == student_max) {
            top_column = first + v * kStep + i;
            teacher_at_top = t[v][i];
          }
        }
      }
    }
  }

  __shared__ T shared_student[kSoftWarps];
  __shared__ T shared_teacher[kSoftWarps];
  __shared__ int32_t shared_column[kSoftWarps];
  __shared__ double shared_sums[2][kSoftWarps];
  __shared__ T shared_at_top;
  const T row_student = BlockMax<kSoftThreads>(student_max, shared_student);
  const T row_teacher = BlockMax<kSoftThreads>(teacher_max, shared_teacher);
  const int32_t column = BlockMax<kSoftThreads>(student_max == row_student ? -top_column : -kNoColumn, shared_column);
  double sums[2] = {student_sum * RescaleFactor(student_max, row_student), teacher_sum * RescaleFactor(teacher_max, row_teacher)};
  if (column != -kNoColumn && student_max == row_student && column == -top_column) shared_at_top = teacher_at_top;
  BlockSum<kSoftThreads>(sums, shared_sums);  // its barrier stands before shared_at_top is read
  if (threadIdx.x != 0) return;
  SoftStats result;
  result.max = static_cast<double>(row_student);
  result.sum = sums[0];
  if (column != -kNoColumn) {
    result.top_column = params.student.vocab_start - column;
    result.other_at_top = static_cast<double>(shared_at_top);
  }
  out_student[row] = result;
  result = SoftStats();
  result.max = static_cast<double>(row_teacher);
  result.sum = sums[1];
  out_teacher[row] = result;
}

template <typename T>
cudaError_t RunSoftStats(const LogitsView& student, const LogitsView& teacher, int64_t row_count, const DivergenceTerm& term,
                         SoftStats* out_student, SoftStats* out_teacher, cudaStream_t stream) {
  const DivergenceSides<T> params = row_block::MakeDivergenceSides<T>(student, teacher, term);
  const auto blocks = static_cast<unsigned>(row_count);
  if (row_block::HasTransform(student) || row_block::HasTransform(teacher)) {
    SoftStatsKernel<T, true><<<blocks, kSoftThreads, 0, stream>>>(params, out_student, out_teacher);
  } else {
    SoftStatsKernel<T, false><<<blocks, kSoftThreads, 0, stream>>>(params, out_student, out_teacher);
  }
  return cudaGetLastError();
}

__global__ void __launch_bounds__(128)
    FinishSoftStatsKernel(const SoftStats* student, const SoftStats* teacher, int32_t shard_count, int64_t row_count,
                          RowCoefficients* coefficients) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 128 + threadIdx.x;
  if (row >= row_count) return;
  PieceStats merged[2] = {RowStats().others, RowStats().others};
  double top = -kRowInfinity, other_at_top = 0;
  int32_t top_column = -1;
  for (int32_t shard = 0; shard < shard_count; ++shard) {
    const SoftStats s = student[shard * row_count + row];
    const SoftStats t = teacher[shard * row_count + row];
    MergeStats(PieceStats{s.max, s.sum, 0, 0, 0, 0, 0}, &merged[0]);
    MergeStats(PieceStats{t.max, t.sum, 0, 0, 0, 0, 0}, &merged[1]);
    if (s.top_column >= 0 && s.max > top) {
      top = s.max;
      top_column = s.top_column;
      other_at_top = s.other_at_top;
    }
  }
  RowCoefficients& out = coefficients[row];
  out.student_lse = LogSumExp(merged[0]);
  out.teacher_lse = LogSumExp(merged[1]);
  out.top_column = top_column;
  out.top_log_q = top_column < 0 ? 0 : top - out.student_lse;
  out.top_difference = top_column < 0 ? 0 : (other_at_top - top) - (out.teacher_lse - out.student_lse);
}

}  // namespace

cudaError_t LaunchRowStats(const LogitsView& logits, const ChunkRows& rows, const CrossEntropyOptions& options, RowStats* out,
                           cudaStream_t stream) {
  if (rows.row_count == 0) return cudaSuccess;
  if (logits.element == Element::kFloat64) {
    const RowView<double> view = MakeRowView<double>(logits);
    const StatsTargets side = MakeStatsTargets<double>(logits, rows, options);
    const auto blocks = static_cast<unsigned>(rows.row_count);
    if (options.want_rest) {
      WideStatsKernel<true><<<blocks, kThreads, 0, stream>>>(view, side, out);
    } else {
      WideStatsKernel<false><<<blocks, kThreads, 0, stream>>>(view, side, out);
    }
    return cudaGetLastError();
  }
  if (logits.element != Element::kFloat32) return cudaErrorInvalidValue;
  if (options.want_rest)
    return LaunchRowDistribution(logits, rows, LinearWeights(logits, options), options.want_squares, out, stream);
  const RowView<float> view = MakeRowView<float>(logits);
  const StatsTargets side = MakeStatsTargets<float>(logits, rows, options);
  const bool want_linear = options.term.label_smoothing > 0;
  if (logits.bias != nullptr) {
    return logits.transform.softcap != 0 ? RunQuickStats<true, true>(view, side, want_linear, rows.row_count, out, stream)
                                         : RunQuickStats<true, false>(view, side, want_linear, rows.row_count, out, stream);
  }
  return logits.transform.softcap != 0 ? RunQuickStats<false, true>(view, side, want_linear, rows.row_count, out, stream)
                                       : RunQuickStats<false, false>(view, side, want_linear, rows.row_count, out, stream);
}

cudaError_t LaunchSoftStats(const LogitsView& student, const LogitsView& teacher, int64_t row_count, const DivergenceTerm& term,
                            SoftStats* out_student, SoftStats* out_teacher, cudaStream_t stream) {
  if (row_count == 0) return cudaSuccess;
  if (student.element != teacher.element) return cudaErrorInvalidValue;
  if (student.element == Element::kFloat64) {
    return RunSoftStats<double>(student, teacher, row_count, term, out_student, out_teacher, stream);
  }
  if (student.element != Element::kFloat32) return cudaErrorInvalidValue;
  return RunSoftStats<float>(student, teacher, row_count, term, out_student, out_teacher, stream);
}

cudaError_t LaunchFinishSoftStats(const SoftStats* student, const SoftStats* teacher, int32_t shard_count, int64_t row_count,
                                  RowCoefficients* coefficients, cudaStream_t stream) {
  if (row_count == 0) return cudaSuccess;
  FinishSoftStatsKernel<<<static_cast<unsigned>((row_count + 127) / 128), 128, 0, stream>>>(student, teacher, shard_count,
                                                                                            row_count, coefficients);
  return cudaGetLastError();
}

}  // namespace headwater::cuda
