// The gradient matrix M of rows, written over their products or apart from them.
//
// Mapping   one block a row, or four rows with fp32 products beside which a bias or class weights are read; a thread takes 16 bytes
//           of products at a time and loads the next while it computes.
// Traffic   4 bytes read and 2 written for an element (fp64 products: 8 and 4); a divergence reads both sides.
// In place  an element of M is half of a product, and a row of M begins where its products begin. A step writes its columns only
//           after a barrier behind the reading of all of them; its bytes lie under products of this step's first half or of
//           earlier steps, never under products that are still to be read. Rows do not touch each other.
// Numerics  an element is fp32 (fp64) arithmetic, rounded once.
#include <type_traits>

#include "kernels/cuda/device/row_block.cuh"
#include "kernels/cuda/device/row_math.cuh"
#include "kernels/cuda/rows/row_passes.h"

namespace headwater::cuda {
namespace {

using row_block::Classes;
using row_block::kVector;
using row_block::LoadSide;
using row_block::LoadVectors;
using row_block::MakeRowView;
using row_block::MakeSideArray;
using row_block::RowView;
using row_block::SideArray;
using row_block::ToLogits;
using row_math::DivergenceForm;

// The destination of a gradient.
struct MatrixTarget {
  uint2* data;
  int64_t stride;  // of data
  Element element;
  int32_t columns;  // written ones: the padding too
};

// The hard loss of one row.
template <typename T>
struct HardRow {
  T max;
  T probability_factor;
  T distance_factor;
  T class_factor;
  int32_t target;  // column of this shard; matches none if it lies elsewhere
};

template <typename T>
__device__ __forceinline__ HardRow<T> MakeHardRow(const RowCoefficients& row, const int32_t* targets, int64_t index,
                                                  int32_t vocab_start) {
  return {static_cast<T>(row.max), static_cast<T>(row.scale * row.probability_factor),
          static_cast<T>(row.scale * row.distance_factor), static_cast<T>(row.scale * row.class_factor),
          targets == nullptr ? -1 : targets[index] - vocab_start};
}

// d(hard loss)/dz of the columns [j, j + kVector); 0 at the target. kWantDistance: with the entropy's share.
template <bool kWantClasses, bool kWantDistance, typename T>
__device__ __forceinline__ void HardGradient(const HardRow<T>& row, const SideArray& class_weights, int32_t j, int32_t columns,
                                             const T (&z)[kVector<T>], T (&gradient)[kVector<T>]) {
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) {
    if constexpr (kWantDistance) {
      // 0 at the maximum, to the bit: the neighbouring term may be far smaller than a rounding error of the logit.
      const T shifted = row_math::ClampExponent(row_block::RoundedDifference(z[i], row.max));
      gradient[i] = row_math::ExpClamped(shifted) * (row.probability_factor - row.distance_factor * shifted);
    } else {
      gradient[i] = row.probability_factor * row_math::Exp(z[i] - row.max);
    }
  }
  if constexpr (kWantClasses) {
    if (class_weights.data != nullptr) {
      T weights[kVector<T>];
      LoadSide(class_weights, j, columns, weights);
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) gradient[i] -= row.class_factor * weights[i];
    } else {
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) gradient[i] -= row.class_factor;
    }
  }
  if (static_cast<uint32_t>(row.target - j) < static_cast<uint32_t>(kVector<T>)) {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      if (j + i == row.target) gradient[i] = 0;
    }
  }
}

// Columns behind the last one become 0.
template <typename T>
__device__ __forceinline__ void ClearPadding(int32_t j, int32_t columns, T (&gradient)[kVector<T>]) {
  if (j + kVector<T> <= columns) return;
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) {
    if (j + i >= columns) gradient[i] = 0;
  }
}

template <typename T>
constexpr int kGeneralThreads = sizeof(T) == 4 ? 256 : 512;

// fp64 products, and fp32 ones where the entropy has a share. Any transform and class weights, distinguished at run time; kPlain:
// there is neither, only a scale.
template <typename T, bool kWantDistance, bool kPlain>
__global__ void __launch_bounds__(kGeneralThreads<T>, sizeof(T) == 4 ? 3 : 2)
    GeneralGradientKernel(const RowView<T> view, const int32_t* targets, const SideArray class_weights, bool want_classes,
                          const RowCoefficients* coefficients, const MatrixTarget matrix) {
  constexpr int kThreads = kGeneralThreads<T>;
  constexpr int kVectors = sizeof(T) == 4 ? 4 : 2;
  constexpr int32_t kStep = kThreads * kVector<T>;
  const int64_t row = blockIdx.x;
  const T* products = view.products + row * view.stride;
  uint2* out = matrix.data + row * matrix.stride;
  const RowCoefficients& of_row = coefficients[row];
  if (of_row.scale == 0) {
    row_block::WriteZeroRow<T, kThreads>(out, matrix.columns);
    return;
  }
  const HardRow<T> hard = MakeHardRow<T>(of_row, targets, row, view.vocab_start);

  const int32_t thread_first = static_cast<int32_t>(threadIdx.x) * kVector<T>;
  T next[kVectors][kVector<T>] = {};
  LoadVectors<T, kVectors>(products, thread_first, kStep, view.columns, next);
  int32_t step = 0;
  for (int32_t start = 0; start < matrix.columns; start += kStep * kVectors, ++step) {
    const int32_t first = start + thread_first;
    T z[kVectors][kVector<T>];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) z[v][i] = next[v][i];
    }
    LoadVectors<T, kVectors>(products, first + kStep * kVectors, kStep, view.columns, next);
    uint2 packed[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t j = first + v * kStep;
      T gradient[kVector<T>];
      if constexpr (kPlain) {
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) z[v][i] = row_block::RoundedProduct(z[v][i], view.logit_scale);
        HardGradient<false, kWantDistance>(hard, class_weights, j, view.columns, z[v], gradient);
      } else {
        T derivative[kVector<T>];
        row_block::ToGeneralLogits<true>(view, j, z[v], derivative);
        if (want_classes) {
          HardGradient<true, kWantDistance>(hard, class_weights, j, view.columns, z[v], gradient);
        } else {
          HardGradient<false, kWantDistance>(hard, class_weights, j, view.columns, z[v], gradient);
        }
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) gradient[i] *= derivative[i];
      }
      ClearPadding(j, view.columns, gradient);
      packed[v] = row_block::PackMatrix(gradient, matrix.element);
    }
    // Enough, as QuickGradientKernel says.
    if ((step & (step - 1)) == 0) __syncthreads();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t j = first + v * kStep;
      if (j < matrix.columns) out[j / kVector<T>] = packed[v];
    }
  }
}

template <typename T, bool kWantDistance, bool kPlain = false>
cudaError_t RunGeneralGradient(const LogitsView& logits, const float* class_weights, bool want_classes, const ChunkRows& rows,
                               const RowCoefficients* coefficients, const MatrixTarget& matrix, cudaStream_t stream) {
  GeneralGradientKernel<T, kWantDistance, kPlain><<<static_cast<unsigned>(rows.row_count), kGeneralThreads<T>, 0, stream>>>(
      MakeRowView<T>(logits), rows.targets, MakeSideArray<T>(class_weights, Element::kFloat32), want_classes, coefficients, matrix);
  return cudaGetLastError();
}

// --- fp32 products ---------------------------------------------------------------------------------------------------------------

template <int kRows>
constexpr int kQuickThreads = kRows == 1 ? 512 : 256;

// One row's factors; with a softcap, of a quarter of its derivative.
struct QuickRow {
  float k;                   // whole, near the exponent of the other columns' maximum
  float probability_factor;  // of e^z / 2^k
  float class_factor;
  int32_t target;  // column of this shard; matches none if it lies elsewhere
  bool zero;       // the gradient is 0 whatever the logits are
};

template <bool kHasCap>
__device__ __forceinline__ QuickRow MakeQuickRow(const RowCoefficients& row, const int32_t* targets, int64_t index,
                                                 int32_t vocab_start) {
  const float k = row_math::NearestExponent(static_cast<float>(row.max));
  const double scale = row.scale * (kHasCap ? 4 : 1);
  const double shift = static_cast<double>(k) * row_math::kLn2 - row.max;
  return {k, static_cast<float>(scale * row.probability_factor * exp(shift)), static_cast<float>(scale * row.class_factor),
          targets == nullptr ? -1 : targets[index] - vocab_start, row.scale == 0};
}

// kRows: of a block; the last block may have fewer.
template <bool kHasBias, bool kHasCap, Classes kClasses, int kRows>
__global__ void __launch_bounds__(kQuickThreads<kRows>, kHasBias || kClasses == Classes::kWeighted ? 512 / kQuickThreads<kRows> : 2)
    QuickGradientKernel(const RowView<float> view, const int32_t* targets, const SideArray class_weights,
                        const RowCoefficients* coefficients, int64_t row_count, const MatrixTarget matrix) {
  constexpr int kVectors = row_block::kQuickVectors / kRows;  // of a row at a time
  constexpr int32_t kStep = kQuickThreads<kRows> * 4;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kRows;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kRows), row_count - first_row));
  const int32_t columns = view.columns;
  const float* products = view.products + first_row * view.stride;
  uint2* const out = matrix.data + first_row * matrix.stride;

  // The first products travel while the rows' factors are made.
  const int32_t thread_first = static_cast<int32_t>(threadIdx.x) * 4;
  float next[kVectors][kRows][4];
  row_block::SideBits next_bias[kVectors], next_weights[kVectors];
  const auto load = [&](int32_t from) {
    row_block::LoadQuick<kVectors, kRows, kStep>(products, view.stride, rows, from, columns, next);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t j = from + v * kStep;
      if constexpr (kHasBias) next_bias[v] = row_block::LoadSideBits<false>(view.bias, j, columns);
      if constexpr (kClasses == Classes::kWeighted) next_weights[v] = row_block::LoadSideBits<true>(class_weights, j, columns);
    }
  };
  load(thread_first);
  __shared__ QuickRow shared_rows[kRows];
  if (static_cast<int>(threadIdx.x) < rows) {
    const int64_t index = first_row + threadIdx.x;
    shared_rows[threadIdx.x] = MakeQuickRow<kHasCap>(coefficients[index], targets, index, view.vocab_start);
  }
  __syncthreads();
  QuickRow row[kRows];
  bool zeros = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    row[r] = shared_rows[r < rows ? r : 0];
    zeros |= row[r].zero;
  }

  int32_t step = 0;
  for (int32_t start = 0; start < matrix.columns; start += kStep * kVectors, ++step) {
    const int32_t first = start + thread_first;
    float gradient[kVectors][kRows][4], bias[kVectors][4], weights[kVectors][4];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kHasBias) row_block::Convert<false>(next_bias[v], view.bias.element, bias[v]);
      if constexpr (kClasses == Classes::kWeighted) {
        row_block::Convert<true>(next_weights[v], Element::kFloat32, weights[v]);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) row_block::ToArguments<kHasBias>(view, bias[v], next[v][r], gradient[v][r]);
    }
    load(first + kStep * kVectors);
    bool rare = zeros;
    const auto to_gradients = [&](auto all_near) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float quarter[4];
          row_block::ToLogitsQuick<kHasCap, decltype(all_near)::value>(view, gradient[v][r], quarter);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float e = row_math::Exp2Approx(row_math::ExponentOver(gradient[v][r][i], row[r].k));
            // Rounded as it stands: the same bits whichever way the warp goes.
            float value = __fmul_rn(row[r].probability_factor, e);
            if constexpr (kClasses == Classes::kEqual) value = fmaf(row[r].probability_factor, e, -row[r].class_factor);
            if constexpr (kClasses == Classes::kWeighted) value = fmaf(-row[r].class_factor, weights[v][i], value);
            if constexpr (kHasCap) value *= quarter[i];
            gradient[v][r][i] = value;
          }
          rare |= row_block::HasExceptions(first + v * kStep, columns, row[r].target);
        }
      }
    };
    if (row_block::AllNear<kHasCap>(view, gradient)) {
      to_gradients(std::true_type());
    } else {
      to_gradients(std::false_type());
    }
    if (rare) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int32_t j = first + v * kStep;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (j + i >= columns || j + i == row[r].target || row[r].zero) gradient[v][r][i] = 0;
          }
        }
      }
    }
    uint2 packed[kVectors][kRows];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) packed[v][r] = row_block::PackMatrix(gradient[v][r], matrix.element);
    }
    // This step's bytes lie under the products of step floor(step / 2), of step 0 itself. With barriers in steps 0, 1, 2, 4, 8, ...
    // all threads have read those before any thread writes.
    if ((step & (step - 1)) == 0) __syncthreads();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const auto j = static_cast<uint32_t>(first + v * kStep);
      if (j < static_cast<uint32_t>(matrix.columns)) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (kRows == 1 || r < rows) out[r * matrix.stride + j / 4] = packed[v][r];
        }
      }
    }
  }
}

template <bool kHasBias, bool kHasCap, Classes kClasses>
cudaError_t RunQuickGradient(const RowView<float>& view, const SideArray& class_weights, const ChunkRows& rows,
                             const RowCoefficients* coefficients, const MatrixTarget& matrix, cudaStream_t stream) {
  if constexpr (kHasBias || kClasses == Classes::kWeighted) {
    constexpr int kRows = row_block::kQuickVectors;
    if (rows.row_count >= row_block::kSharingRows) {
      const auto blocks = static_cast<unsigned>((rows.row_count + kRows - 1) / kRows);
      QuickGradientKernel<kHasBias, kHasCap, kClasses, kRows>
          <<<blocks, kQuickThreads<kRows>, 0, stream>>>(view, rows.targets, class_weights, coefficients, rows.row_count, matrix);
      return cudaGetLastError();
    }
  }
  QuickGradientKernel<kHasBias, kHasCap, kClasses, 1><<<static_cast<unsigned>(rows.row_count), kQuickThreads<1>, 0, stream>>>(
      view, rows.targets, class_weights, coefficients, rows.row_count, matrix);
  return cudaGetLastError();
}

template <bool kHasBias, bool kHasCap>
cudaError_t RunQuickGradient(const RowView<float>& view, const SideArray& class_weights, bool want_classes, const ChunkRows& rows,
                             const RowCoefficients* coefficients, const MatrixTarget& matrix, cudaStream_t stream) {
  if (!want_classes) {
    return RunQuickGradient<kHasBias, kHasCap, Classes::kNone>(view, class_weights, rows, coefficients, matrix, stream);
  }
  if (class_weights.data == nullptr) {
    return RunQuickGradient<kHasBias, kHasCap, Classes::kEqual>(view, class_weights, rows, coefficients, matrix, stream);
  }
  return RunQuickGradient<kHasBias, kHasCap, Classes::kWeighted>(view, class_weights, rows, coefficients, matrix, stream);
}

// --- Divergence ------------------------------------------------------------------------------------------------------------------

constexpr int kDivergenceThreads = 256;

template <typename T>
struct DivergenceParams {
  row_block::DivergenceSides<T> sides;
  const int32_t* targets = nullptr;
  SideArray class_weights;
  bool want_classes = false;
  double beta = 0.5;
  const RowCoefficients* coefficients = nullptr;
  MatrixTarget matrix;
};

template <typename T, DivergenceForm kForm, bool kMayTransform>
__global__ void __launch_bounds__(kDivergenceThreads, 2) DivergenceGradientKernel(const DivergenceParams<T> params) {
  constexpr int kVectors = 2;
  constexpr int32_t kStep = kDivergenceThreads * kVector<T>;
  const int64_t row = blockIdx.x;
  const RowView<T>& view = params.sides.student;
  const T* student = view.products + row * view.stride;
  const T* teacher = params.sides.teacher.products + row * params.sides.teacher.stride;
  uint2* out = params.matrix.data + row * params.matrix.stride;
  const RowCoefficients& of_row = params.coefficients[row];
  if (of_row.scale == 0) {
    row_block::WriteZeroRow<T, kDivergenceThreads>(out, params.matrix.columns);
    return;
  }
  const int32_t columns = view.columns;
  const HardRow<T> hard = MakeHardRow<T>(of_row, params.targets, row, view.vocab_start);
  const bool has_hard = of_row.probability_factor != 0 || of_row.class_factor != 0;
  const row_block::SoftRow<T> soft = row_block::MakeSoftRow<T, kForm>(params.sides, of_row, params.beta);
  const int32_t common = of_row.soft_factor == 0 ? 0 : params.sides.columns;
  const T soft_factor = static_cast<T>(of_row.scale * of_row.soft_factor);
  const T mean = static_cast<T>(of_row.divergence_mean);
  // The gradients over a row sum to 0: the top column's is the remainder of the others.
  const T top_gradient = static_cast<T>(-of_row.scale * of_row.soft_factor * of_row.divergence_mean *
                                        (kForm == DivergenceForm::kForward ? 1.0 : exp(of_row.top_log_q)));

  const int32_t thread_first = static_cast<int32_t>(threadIdx.x) * kVector<T>;
  T next_student[kVectors][kVector<T>] = {}, next_teacher[kVectors][kVector<T>] = {};
  LoadVectors<T, kVectors>(student, thread_first, kStep, columns, next_student);
  LoadVectors<T, kVectors>(teacher, thread_first, kStep, common, next_teacher);
  for (int32_t start = 0; start < params.matrix.columns; start += kStep * kVectors) {
    const int32_t first = start + thread_first;
    T z[kVectors][kVector<T>], t[kVectors][kVector<T>];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) {
        z[v][i] = next_student[v][i];
        t[v][i] = next_teacher[v][i];
      }
    }
    LoadVectors<T, kVectors>(student, first + kStep * kVectors, kStep, columns, next_student);
    LoadVectors<T, kVectors>(teacher, first + kStep * kVectors, kStep, common, next_teacher);
    uint2 packed[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t j = first + v * kStep;
      T derivative[kVector<T>], unused[kVector<T>], gradient[kVector<T>];
      ToLogits<kMayTransform, kMayTransform, kMayTransform>(view, j, z[v], derivative);
      ToLogits<kMayTransform, kMayTransform, false>(params.sides.teacher, j, t[v], unused);
      if (has_hard) {
        if (params.want_classes) {
          HardGradient<true, false>(hard, params.class_weights, j, columns, z[v], gradient);
        } else {
          HardGradient<false, false>(hard, params.class_weights, j, columns, z[v], gradient);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) gradient[i] = 0;
      }
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) {
        const row_math::ColumnLogs<T> logs = row_block::LogsOf(params.sides, soft, z[v][i], t[v][i]);
        const T g = soft_factor *
                    row_math::DivergenceGradient<T, kForm>(logs, soft.beta, soft.one_minus_beta, soft.reference, mean, soft.shift);
        if (j + i < common) gradient[i] += j + i == soft.top_column ? top_gradient : g;
        if constexpr (kMayTransform) gradient[i] *= derivative[i];
      }
      ClearPadding(j, columns, gradient);
      packed[v] = row_block::PackMatrix(gradient, params.matrix.element);
    }
    __syncthreads();  // everybody has read this step's products
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t j = first + v * kStep;
      if (j < params.matrix.columns) out[j / kVector<T>] = packed[v];
    }
  }
}

template <typename T, DivergenceForm kForm>
cudaError_t RunDivergenceGradient(const DivergenceParams<T>& params, bool has_transform, int64_t row_count, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(row_count);
  if (has_transform) {
    DivergenceGradientKernel<T, kForm, true><<<blocks, kDivergenceThreads, 0, stream>>>(params);
  } else {
    DivergenceGradientKernel<T, kForm, false><<<blocks, kDivergenceThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

template <typename T>
cudaError_t RunDivergenceGradient(const LogitsView& student, const LogitsView& teacher, const ChunkRows& rows,
                                  const DivergenceTerm& term, const CrossEntropyOptions& options,
                                  const RowCoefficients* coefficients, const MatrixTarget& matrix, cudaStream_t stream) {
  DivergenceParams<T> params;
  params.sides = row_block::MakeDivergenceSides<T>(student, teacher, term);
  params.targets = rows.targets;
  const float* class_weights = options.term.class_weights;
  if (class_weights != nullptr) class_weights += student.vocab_start;
  params.class_weights = MakeSideArray<T>(class_weights, Element::kFloat32);
  params.want_classes = options.term.label_smoothing > 0;
  params.beta = term.beta;
  params.coefficients = coefficients;
  params.matrix = matrix;
  const bool has_transform = row_block::HasTransform(student) || row_block::HasTransform(teacher);
  if (term.beta == 0) return RunDivergenceGradient<T, DivergenceForm::kForward>(params, has_transform, rows.row_count, stream);
  if (term.beta == 1) return RunDivergenceGradient<T, DivergenceForm::kReverse>(params, has_transform, rows.row_count, stream);
  return RunDivergenceGradient<T, DivergenceForm::kMixture>(params, has_transform, rows.row_count, stream);
}

MatrixTarget MakeMatrixTarget(const LogitsView& logits, const MutableMatrix& matrix) {
  return {static_cast<uint2*>(matrix.data), matrix.stride * BytesOf(matrix.element) / 8, matrix.element,
          row_block::MatrixColumns(logits, matrix.stride)};
}

}  // namespace

cudaError_t LaunchCrossEntropyGradient(const LogitsView& logits, const ChunkRows& rows, const CrossEntropyOptions& options,
                                       const RowCoefficients* coefficients, const MutableMatrix& out, cudaStream_t stream) {
  if (!row_block::MatrixFits(logits.element, out)) return cudaErrorInvalidValue;
  if (rows.row_count == 0 || logits.columns == 0) return cudaSuccess;
  const MatrixTarget matrix = MakeMatrixTarget(logits, out);
  const bool want_classes = options.term.label_smoothing > 0;
  const float* class_weights = options.term.class_weights;
  if (class_weights != nullptr) class_weights += logits.vocab_start;
  if (logits.element == Element::kFloat64) {
    return options.want_distance
               ? RunGeneralGradient<double, true>(logits, class_weights, want_classes, rows, coefficients, matrix, stream)
               : RunGeneralGradient<double, false>(logits, class_weights, want_classes, rows, coefficients, matrix, stream);
  }
  if (options.want_distance) {
    return row_block::HasTransform(logits) || want_classes
               ? RunGeneralGradient<float, true>(logits, class_weights, want_classes, rows, coefficients, matrix, stream)
               : RunGeneralGradient<float, true, true>(logits, class_weights, want_classes, rows, coefficients, matrix, stream);
  }
  const RowView<float> view = MakeRowView<float>(logits);
  const SideArray side = MakeSideArray<float>(class_weights, Element::kFloat32);
  const bool has_cap = logits.transform.softcap != 0;
  if (logits.bias != nullptr) {
    return has_cap ? RunQuickGradient<true, true>(view, side, want_classes, rows, coefficients, matrix, stream)
                   : RunQuickGradient<true, false>(view, side, want_classes, rows, coefficients, matrix, stream);
  }
  return has_cap ? RunQuickGradient<false, true>(view, side, want_classes, rows, coefficients, matrix, stream)
                 : RunQuickGradient<false, false>(view, side, want_classes, rows, coefficients, matrix, stream);
}

cudaError_t LaunchDivergenceGradient(const LogitsView& student, const LogitsView& teacher, const ChunkRows& rows,
                                     const DivergenceTerm& term, const CrossEntropyOptions& options,
                                     const RowCoefficients* coefficients, const MutableMatrix& out, cudaStream_t stream) {
  if (student.element != teacher.element || !row_block::MatrixFits(student.element, out)) return cudaErrorInvalidValue;
  if (rows.row_count == 0 || student.columns == 0) return cudaSuccess;
  const MatrixTarget matrix = MakeMatrixTarget(student, out);
  if (student.element == Element::kFloat64) {
    return RunDivergenceGradient<double>(student, teacher, rows, term, options, coefficients, matrix, stream);
  }
  return RunDivergenceGradient<float>(student, teacher, rows, term, options, coefficients, matrix, stream);
}

}  // namespace headwater::cuda
