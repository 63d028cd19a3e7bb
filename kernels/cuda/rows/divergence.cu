// Sums over a row that the loss and the gradient of a divergence need.
//
// Mapping   one block a row; a thread takes 16 bytes of either side at a time and loads the next while it computes.
// Traffic   both sides' products are read once (8 or 16 bytes a column).
// Numerics  terms of the loss are non-negative by construction (device/row_math.cuh); fp32 over the 8 columns of one step, fp64
//           across steps, threads and warps, in a fixed order. fp64 products: all fp64.
#include "kernels/cuda/device/row_block.cuh"
#include "kernels/cuda/device/row_math.cuh"
#include "kernels/cuda/rows/row_passes.h"

namespace headwater::cuda {
namespace {

using row_block::BlockMax;
using row_block::BlockSum;
using row_block::DivergenceSides;
using row_block::kVector;
using row_block::LoadVectors;
using row_block::ToLogits;
using row_math::DivergenceForm;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

template <typename T, DivergenceForm kForm, bool kMayTransform>
__global__ void __launch_bounds__(kThreads, 2)
    DivergenceSumsKernel(const DivergenceSides<T> sides, double beta, const RowCoefficients* coefficients, DivergenceSums* out) {
  constexpr int kVectors = 2;
  constexpr int32_t kStep = kThreads * kVector<T>;
  const int64_t row = blockIdx.x;
  const T* student = sides.student.products + row * sides.student.stride;
  const T* teacher = sides.teacher.products + row * sides.teacher.stride;
  const int32_t columns = sides.columns;
  const row_block::SoftRow<T> soft = row_block::MakeSoftRow<T, kForm>(sides, coefficients[row], beta);

  double loss = 0, mean = 0;
  T bound = 0, q_max = 0, bound_q = 0;
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
    T step_loss = 0, step_mean = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t j = first + v * kStep;
      T unused[kVector<T>];
      ToLogits<kMayTransform, kMayTransform, false>(sides.student, j, s[v], unused);
      ToLogits<kMayTransform, kMayTransform, false>(sides.teacher, j, t[v], unused);
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) {
        const row_math::ColumnLogs<T> logs = row_block::LogsOf(sides, soft, s[v][i], t[v][i]);
        const row_math::ColumnTerms<T> terms =
            row_math::DivergenceTerms<T, kForm>(logs, soft.beta, soft.one_minus_beta, soft.reference, soft.shift);
        const bool inside = j + i < columns;
        const bool counts = inside && j + i != soft.top_column;
        step_loss += inside ? terms.loss : T(0);
        step_mean += counts ? terms.slope : T(0);
        if (counts && ::fabs(terms.slope) > bound) {
          bound = ::fabs(terms.slope);
          bound_q = terms.slope < T(0) ? -terms.q : terms.q;
        }
        q_max = ::max(q_max, counts ? terms.q : T(0));
      }
    }
    loss += static_cast<double>(step_loss);
    mean += static_cast<double>(step_mean);
  }

  __shared__ T shared_max[4][kWarps];
  __shared__ double shared_sums[2][kWarps];
  DivergenceSums result;
  const T largest = BlockMax<kThreads>(bound, shared_max[0]);
  result.bound = static_cast<double>(largest);
  result.q_max = static_cast<double>(BlockMax<kThreads>(q_max, shared_max[1]));
  // Among columns with the same summand, one whose summand is positive, with the largest q.
  const T positive = BlockMax<kThreads>(bound == largest && bound_q > T(0) ? bound_q : T(0), shared_max[2]);
  const T negative = BlockMax<kThreads>(bound == largest && bound_q < T(0) ? -bound_q : T(0), shared_max[3]);
  result.bound_q = static_cast<double>(positive > T(0) ? positive : -negative);
  double sums[2] = {loss, mean};
  BlockSum<kThreads>(sums, shared_sums);
  if (threadIdx.x != 0) return;
  result.loss = sums[0];
  result.mean = sums[1];
  out[row] = result;
}

template <typename T, DivergenceForm kForm>
void Run(const DivergenceSides<T>& sides, bool has_transform, int64_t row_count, double beta, const RowCoefficients* coefficients,
         DivergenceSums* out, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(row_count);
  if (has_transform) {
    DivergenceSumsKernel<T, kForm, true><<<blocks, kThreads, 0, stream>>>(sides, beta, coefficients, out);
  } else {
    DivergenceSumsKernel<T, kForm, false><<<blocks, kThreads, 0, stream>>>(sides, beta, coefficients, out);
  }
}

template <typename T>
cudaError_t Run(const LogitsView& student, const LogitsView& teacher, int64_t row_count, const DivergenceTerm& term,
                const RowCoefficients* coefficients, DivergenceSums* out, cudaStream_t stream) {
  const DivergenceSides<T> sides = row_block::MakeDivergenceSides<T>(student, teacher, term);
  const bool has_transform = row_block::HasTransform(student) || row_block::HasTransform(teacher);
  if (term.beta == 0) {
    Run<T, DivergenceForm::kForward>(sides, has_transform, row_count, term.beta, coefficients, out, stream);
  } else if (term.beta == 1) {
    Run<T, DivergenceForm::kReverse>(sides, has_transform, row_count, term.beta, coefficients, out, stream);
  } else {
    Run<T, DivergenceForm::kMixture>(sides, has_transform, row_count, term.beta, coefficients, out, stream);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchDivergenceSums(const LogitsView& student, const LogitsView& teacher, int64_t row_count,
                                 const DivergenceTerm& term, const RowCoefficients* coefficients, DivergenceSums* out,
                                 cudaStream_t stream) {
  if (row_count == 0) return cudaSuccess;
  if (student.element != teacher.element) return cudaErrorInvalidValue;
  if (student.element == Element::kFloat64) return Run<double>(student, teacher, row_count, term, coefficients, out, stream);
  if (student.element != Element::kFloat32) return cudaErrorInvalidValue;
  return Run<float>(student, teacher, row_count, term, coefficients, out, stream);
}

}  // namespace headwater::cuda
