// The gradient matrix M of rows, written over their products.
//
// Mapping   one block a row; a thread takes 16 bytes of products at a time and loads the next while it computes.
// Traffic   4 bytes read and 2 written for an element (fp64 products: 8 and 4); a divergence reads both sides.
// In place  an element of M is half of a product, and a row of M begins where its products begin. A step writes its columns only
//           after a barrier behind the reading of all of them; its bytes lie under products of this step's first half or of
//           earlier steps, never under products that are still to be read. Rows do not touch each other.
// Numerics  an element is fp32 (fp64) arithmetic, rounded once.
#include "kernels/cuda/device/row_block.cuh"
#include "kernels/cuda/device/row_math.cuh"
#include "kernels/cuda/row_passes.h"

namespace headwater::cuda {
namespace {

using row_block::kVector;
using row_block::LoadSide;
using row_block::LoadVectors;
using row_block::MakeRowView;
using row_block::MakeSideArray;
using row_block::RowView;
using row_block::SideArray;
using row_block::ToLogits;
using row_math::DivergenceForm;

constexpr int kThreads = 512;

// What a gradient is written with.
struct MatrixTarget {
  void* data;  // the products'
  Element element;
  int32_t columns;  // written ones: the padding too
};

template <typename T>
__device__ __forceinline__ uint2* MatrixRow(const MatrixTarget& target, int64_t stride, int64_t row) {
  return reinterpret_cast<uint2*>(static_cast<T*>(target.data) + row * stride);
}

// The hard loss of one row.
template <typename T>
struct HardRow {
  T max;
  T probability_factor;
  T class_factor;
  int32_t target;  // column of this shard; matches none if it lies elsewhere
};

template <typename T>
__device__ __forceinline__ HardRow<T> MakeHardRow(const RowCoefficients& row, const int32_t* targets, int64_t index,
                                                  int32_t vocab_start) {
  return {static_cast<T>(row.max), static_cast<T>(row.scale * row.probability_factor), static_cast<T>(row.scale * row.class_factor),
          targets == nullptr ? -1 : targets[index] - vocab_start};
}

// d(hard loss)/dz of the columns [j, j + kVector); 0 at the target.
template <bool kWantClasses, typename T>
__device__ __forceinline__ void HardGradient(const HardRow<T>& row, const SideArray& class_weights, int32_t j, int32_t columns,
                                             const T (&z)[kVector<T>], T (&gradient)[kVector<T>]) {
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) gradient[i] = row.probability_factor * row_math::Exp(z[i] - row.max);
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

template <typename T, bool kMayBias, bool kMayCap, bool kWantClasses>
__global__ void __launch_bounds__(kThreads, 2)
    CrossEntropyGradientKernel(const RowView<T> view, const int32_t* targets, const SideArray class_weights,
                               const RowCoefficients* coefficients, const MatrixTarget matrix) {
  constexpr int kVectors = sizeof(T) == 4 ? 4 : 2;
  constexpr int32_t kStep = kThreads * kVector<T>;
  const int64_t row = blockIdx.x;
  const T* products = view.products + row * view.stride;
  uint2* out = MatrixRow<T>(matrix, view.stride, row);
  const RowCoefficients& of_row = coefficients[row];
  if (of_row.scale == 0) {
    row_block::WriteZeroRow<T, kThreads>(out, matrix.columns);
    return;
  }
  const HardRow<T> hard = MakeHardRow<T>(of_row, targets, row, view.vocab_start);

  const int32_t thread_first = static_cast<int32_t>(threadIdx.x) * kVector<T>;
  T next[kVectors][kVector<T>] = {};
  LoadVectors<T, kVectors>(products, thread_first, kStep, view.columns, next);
  for (int32_t start = 0; start < matrix.columns; start += kStep * kVectors) {
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
      T derivative[kVector<T>], gradient[kVector<T>];
      ToLogits<kMayBias, kMayCap, kMayCap>(view, j, z[v], derivative);
      HardGradient<kWantClasses>(hard, class_weights, j, view.columns, z[v], gradient);
      if constexpr (kMayCap) {
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) gradient[i] *= derivative[i];
      }
      ClearPadding(j, view.columns, gradient);
      packed[v] = row_block::PackMatrix(gradient, matrix.element);
    }
    __syncthreads();  // everybody has read this step's products
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t j = first + v * kStep;
      if (j < matrix.columns) out[j / kVector<T>] = packed[v];
    }
  }
}

template <typename T, bool kMayBias, bool kMayCap, bool kWantClasses>
cudaError_t RunCrossEntropyGradient(const LogitsView& logits, const ChunkRows& rows, const CrossEntropyOptions& options,
                                    const RowCoefficients* coefficients, const MatrixTarget& matrix, cudaStream_t stream) {
  const float* class_weights = options.term.class_weights;
  if (class_weights != nullptr) class_weights += logits.vocab_start;
  CrossEntropyGradientKernel<T, kMayBias, kMayCap, kWantClasses><<<static_cast<unsigned>(rows.row_count), kThreads, 0, stream>>>(
      MakeRowView<T>(logits), rows.targets, MakeSideArray<T>(class_weights, Element::kFloat32), coefficients, matrix);
  return cudaGetLastError();
}

template <bool kMayBias, bool kMayCap>
cudaError_t RunCrossEntropyGradient(const LogitsView& logits, const ChunkRows& rows, const CrossEntropyOptions& options,
                                    const RowCoefficients* coefficients, const MatrixTarget& matrix, cudaStream_t stream) {
  if (options.term.label_smoothing > 0) {
    return RunCrossEntropyGradient<float, kMayBias, kMayCap, true>(logits, rows, options, coefficients, matrix, stream);
  }
  return RunCrossEntropyGradient<float, kMayBias, kMayCap, false>(logits, rows, options, coefficients, matrix, stream);
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
  uint2* out = MatrixRow<T>(params.matrix, view.stride, row);
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
  // The gradients over a row sum to 0: the top column's is what the others leave.
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
          HardGradient<true>(hard, params.class_weights, j, columns, z[v], gradient);
        } else {
          HardGradient<false>(hard, params.class_weights, j, columns, z[v], gradient);
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

MatrixTarget MakeMatrixTarget(const LogitsView& logits, Element element) {
  return {const_cast<void*>(logits.products), element, row_block::MatrixColumns(logits)};
}

}  // namespace

cudaError_t LaunchCrossEntropyGradient(const LogitsView& logits, const ChunkRows& rows, const CrossEntropyOptions& options,
                                       const RowCoefficients* coefficients, Element matrix_element, cudaStream_t stream) {
  if (!row_block::MatrixFits(logits.element, matrix_element)) return cudaErrorInvalidValue;
  if (rows.row_count == 0 || logits.columns == 0) return cudaSuccess;
  const MatrixTarget matrix = MakeMatrixTarget(logits, matrix_element);
  if (logits.element == Element::kFloat64) {
    return RunCrossEntropyGradient<double, true, true, true>(logits, rows, options, coefficients, matrix, stream);
  }
  if (logits.bias != nullptr) {
    if (logits.transform.softcap != 0) {
      return RunCrossEntropyGradient<true, true>(logits, rows, options, coefficients, matrix, stream);
    }
    return RunCrossEntropyGradient<true, false>(logits, rows, options, coefficients, matrix, stream);
  }
  if (logits.transform.softcap != 0) {
    return RunCrossEntropyGradient<false, true>(logits, rows, options, coefficients, matrix, stream);
  }
  return RunCrossEntropyGradient<false, false>(logits, rows, options, coefficients, matrix, stream);
}

cudaError_t LaunchDivergenceGradient(const LogitsView& student, const LogitsView& teacher, const ChunkRows& rows,
                                     const DivergenceTerm& term, const CrossEntropyOptions& options,
                                     const RowCoefficients* coefficients, Element matrix_element, cudaStream_t stream) {
  if (student.element != teacher.element || !row_block::MatrixFits(student.element, matrix_element)) return cudaErrorInvalidValue;
  if (rows.row_count == 0 || student.columns == 0) return cudaSuccess;
  const MatrixTarget matrix = MakeMatrixTarget(student, matrix_element);
  if (student.element == Element::kFloat64) {
    return RunDivergenceGradient<double>(student, teacher, rows, term, options, coefficients, matrix, stream);
  }
  return RunDivergenceGradient<float>(student, teacher, rows, term, options, coefficients, matrix, stream);
}

}  // namespace headwater::cuda
