// Statistics of rows of products: what the losses need of a row before its gradient.
//
// Mapping   one block a row; a thread takes 16 bytes at a time, several loads in flight, and loads the next while it computes.
// Traffic   every product is read once (4 or 8 bytes), nothing of that size is written.
// Numerics  a thread keeps a running maximum, and sums relative to it: fp32 over the 16 elements of one step, fp64 across steps,
//           threads and warps, in a fixed order. Rescaling by a new maximum is fp64 too. fp64 products: all fp64.
#include "kernels/cuda/device/row_block.cuh"
#include "kernels/cuda/device/row_math.cuh"
#include "kernels/cuda/row_passes.h"

namespace headwater::cuda {
namespace {

using row_block::BlockMax;
using row_block::BlockSum;
using row_block::DivergenceSides;
using row_block::kVector;
using row_block::LoadSide;
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

// Relative to `base` instead of `max`. NaN in `sum` stays.
template <typename T>
__device__ __forceinline__ void Rescale(T max, T base, double* sum, double* weighted) {
  const double factor = RescaleFactor(max, base);
  const double shift = static_cast<double>(max) - static_cast<double>(base);
  *weighted = factor == 0 ? 0.0 : factor * (*weighted + shift * *sum);
  *sum *= factor;
}

struct StatsTargets {
  const int32_t* targets;   // or null
  SideArray class_weights;  // of this shard's columns; data null: all 1
};

template <typename T, bool kMayBias, bool kMayCap, bool kWantLinear>
__global__ void __launch_bounds__(kThreads, 2) RowStatsKernel(const RowView<T> view, const StatsTargets side, RowStats* out) {
  constexpr int kVectors = sizeof(T) == 4 ? 4 : 2;
  constexpr int32_t kStep = kThreads * kVector<T>;
  const int64_t row = blockIdx.x;
  const T* products = view.products + row * view.stride;
  const int32_t columns = view.columns;
  // Matches no column if the row has no target or it lies elsewhere.
  const int32_t target = side.targets == nullptr ? -1 : side.targets[row] - view.vocab_start;

  T max = kLowest<T>;
  int32_t best_column = kNoColumn;
  double sum = 0, weighted = 0, linear = 0;
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

    T step_max = kLowest<T>;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t j = first + v * kStep;
      T unused[kVector<T>];
      ToLogits<kMayBias, kMayCap, false>(view, j, z[v], unused);
      // The columns that do not count: the target's, and those behind the last.
      if (j + kVector < T >> columns || static_cast<uint32_t>(target - j) < static_cast<uint32_t>(kVector<T>)) {
        if constexpr (kWantLinear) {
          T weights[kVector<T>] = {};
          if (side.class_weights.data != nullptr && j < columns) LoadSide(side.class_weights, j, columns, weights);
#pragma unroll
          for (int i = 0; i < kVector<T>; ++i) {
            const T weight = side.class_weights.data != nullptr ? weights[i] : T(1);
            if (j + i < columns && j + i != target && weight != T(0)) linear += static_cast<double>(weight * z[v][i]);
          }
        }
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) {
          if (j + i >= columns || j + i == target) z[v][i] = kLowest<T>;
        }
      } else if constexpr (kWantLinear) {
        T part = 0;
        if (side.class_weights.data != nullptr) {
          T weights[kVector<T>];
          LoadSide(side.class_weights, j, columns, weights);
#pragma unroll
          for (int i = 0; i < kVector<T>; ++i) part += weights[i] == T(0) ? T(0) : weights[i] * z[v][i];
        } else {
#pragma unroll
          for (int i = 0; i < kVector<T>; ++i) part += z[v][i];
        }
        linear += static_cast<double>(part);
      }
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) step_max = ::max(step_max, z[v][i]);
    }

    if (step_max > max) {
      Rescale(max, step_max, &sum, &weighted);
      max = step_max;
#pragma unroll
      for (int v = kVectors - 1; v >= 0; --v) {
#pragma unroll
        for (int i = kVector<T> - 1; i >= 0; --i) {
          if (z[v][i] == step_max) best_column = first + v * kStep + i;
        }
      }
    }
    // An infinite maximum must not be subtracted from itself where all is -inf: those terms are 0.
    const T offset = max == kLowest<T> ? T(0) : max;
    T step_sum = 0, step_weighted = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) {
        const T shifted = row_math::ClampExponent(z[v][i] - offset);
        const T e = row_math::ExpClamped(shifted);
        step_sum += e;
        step_weighted += e * shifted;
      }
    }
    sum += static_cast<double>(step_sum);
    weighted += static_cast<double>(step_weighted);
  }

  __shared__ T shared_max[kWarps];
  __shared__ int32_t shared_column[kWarps];
  __shared__ double shared_sums[3][kWarps];
  const T row_max = BlockMax<kThreads>(max, shared_max);
  Rescale(max, row_max, &sum, &weighted);
  // Smallest column of those with the maximum: the largest negative.
  const int32_t column = BlockMax<kThreads>(max == row_max ? -best_column : -kNoColumn, shared_column);
  double sums[3] = {sum, weighted, linear};
  BlockSum<kThreads>(sums, shared_sums);
  if (threadIdx.x != 0) return;
  RowStats stats;
  stats.others = {static_cast<double>(row_max), sums[0], sums[1], sums[2]};
  stats.best = static_cast<double>(row_max);
  stats.best_column = column == -kNoColumn ? -1.0 : static_cast<double>(view.vocab_start - column);
  out[row] = stats;
}

template <typename T, bool kMayBias, bool kMayCap, bool kWantLinear>
cudaError_t RunRowStats(const LogitsView& logits, const ChunkRows& rows, const CrossEntropyOptions& options, RowStats* out,
                        cudaStream_t stream) {
  const float* class_weights = options.term.class_weights;
  if (class_weights != nullptr) class_weights += logits.vocab_start;
  const StatsTargets side = {rows.targets, MakeSideArray<T>(class_weights, Element::kFloat32)};
  RowStatsKernel<T, kMayBias, kMayCap, kWantLinear>
      <<<static_cast<unsigned>(rows.row_count), kThreads, 0, stream>>>(MakeRowView<T>(logits), side, out);
  return cudaGetLastError();
}

template <bool kMayBias, bool kMayCap>
cudaError_t RunRowStats(const LogitsView& logits, const ChunkRows& rows, const CrossEntropyOptions& options, RowStats* out,
                        cudaStream_t stream) {
  if (options.term.label_smoothing > 0) return RunRowStats<float, kMayBias, kMayCap, true>(logits, rows, options, out, stream);
  return RunRowStats<float, kMayBias, kMayCap, false>(logits, rows, options, out, stream);
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
    MergeStats(PieceStats{s.max, s.sum, 0, 0}, &merged[0]);
    MergeStats(PieceStats{t.max, t.sum, 0, 0}, &merged[1]);
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
  if (logits.element == Element::kFloat64) return RunRowStats<double, true, true, true>(logits, rows, options, out, stream);
  if (logits.element != Element::kFloat32) return cudaErrorInvalidValue;
  if (logits.bias != nullptr) {
    if (logits.transform.softcap != 0) return RunRowStats<true, true>(logits, rows, options, out, stream);
    return RunRowStats<true, false>(logits, rows, options, out, stream);
  }
  if (logits.transform.softcap != 0) return RunRowStats<false, true>(logits, rows, options, out, stream);
  return RunRowStats<false, false>(logits, rows, options, out, stream);
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
