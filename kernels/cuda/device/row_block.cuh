// Parts that the row passes' kernels share: a block's view of a row, loads of 16 bytes a thread, transformed logits, fixed-order
// reductions.
#ifndef HEADWATER_KERNELS_CUDA_DEVICE_ROW_BLOCK_CUH_
#define HEADWATER_KERNELS_CUDA_DEVICE_ROW_BLOCK_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device/row_math.cuh"
#include "kernels/cuda/rows/row_passes.h"

namespace headwater::cuda::row_block {

// Elements of a 16-byte load.
template <typename T>
inline constexpr int32_t kVector = 16 / sizeof(T);

// A value for each column: the bias, or class weights.
struct SideArray {
  const void* data = nullptr;
  Element element = Element::kFloat32;
  bool vectors = false;  // aligned for loads of a whole vector's columns
};

template <typename T>
SideArray MakeSideArray(const void* data, Element element) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return {data, element, address % static_cast<uintptr_t>(kVector<T> * BytesOf(element)) == 0};
}

template <typename T>
struct RowView {
  const T* products = nullptr;
  int64_t stride = 0;
  int32_t columns = 0;
  int32_t vocab_start = 0;
  SideArray bias;
  T logit_scale = 1;
  T cap = 0;
  T inverse_cap = 0;
  T cap_exponent = 0;  // of SoftcapQuick()
  T half_inverse_cap = 0;
};

template <typename T>
RowView<T> MakeRowView(const LogitsView& logits) {
  RowView<T> view;
  view.products = static_cast<const T*>(logits.products);
  view.stride = logits.stride;
  view.columns = static_cast<int32_t>(logits.columns);
  view.vocab_start = static_cast<int32_t>(logits.vocab_start);
  view.bias = MakeSideArray<T>(logits.bias, logits.bias_element);
  view.logit_scale = static_cast<T>(logits.transform.logit_scale);
  view.cap = static_cast<T>(logits.transform.softcap);
  view.inverse_cap = logits.transform.softcap == 0 ? T(0) : static_cast<T>(1 / logits.transform.softcap);
  view.cap_exponent = logits.transform.softcap == 0 ? T(0) : static_cast<T>(row_math::SoftcapExponent(logits.transform.softcap));
  view.half_inverse_cap = logits.transform.softcap == 0 ? T(0) : static_cast<T>(0.5 / logits.transform.softcap);
  return view;
}

// Whether products are more than multiplied with a scale.
inline bool HasTransform(const LogitsView& logits) { return logits.bias != nullptr || logits.transform.softcap != 0; }

// The shard's columns that both sides of a divergence have.
inline int32_t CommonColumns(const LogitsView& student, const LogitsView& teacher, const DivergenceTerm& term) {
  int64_t columns = term.common_columns - student.vocab_start;
  columns = columns < student.columns ? columns : student.columns;
  columns = columns < teacher.columns ? columns : teacher.columns;
  return static_cast<int32_t>(columns < 0 ? 0 : columns);
}

__device__ __forceinline__ void LoadVector(const float* from, float (&to)[4]) {
  const float4 v = *reinterpret_cast<const float4*>(from);
  to[0] = v.x;
  to[1] = v.y;
  to[2] = v.z;
  to[3] = v.w;
}
__device__ __forceinline__ void LoadVector(const double* from, double (&to)[2]) {
  const double2 v = *reinterpret_cast<const double2*>(from);
  to[0] = v.x;
  to[1] = v.y;
}

// Vectors first, first + step, ... of a row; those that begin at `columns` or behind are left as they are. A last vector may reach
// behind `columns`: rows are padded to whole vectors.
template <typename T, int kVectors>
__device__ __forceinline__ void LoadVectors(const T* row, int32_t first, int32_t step, int32_t columns,
                                            T (&to)[kVectors][kVector<T>]) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int32_t j = first + v * step;
    if (j < columns) LoadVector(row + j, to[v]);
  }
}

__device__ __forceinline__ float From16Bit(uint16_t bits, Element element) {
  return element == Element::kBFloat16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : __half2float(__ushort_as_half(bits));
}

// Elements [j, j + kVector) of `side`, as far as they are below `columns`; else 0.
template <typename T>
__device__ __forceinline__ void LoadSide(const SideArray& side, int32_t j, int32_t columns, T (&to)[kVector<T>]) {
  constexpr int32_t kCount = kVector<T>;
  if (side.element == Element::kFloat32) {
    const float* from = static_cast<const float*>(side.data) + j;
    if (side.vectors && j + kCount <= columns) {
      if constexpr (kCount == 4) {
        LoadVector(from, to);
      } else {
        const float2 v = *reinterpret_cast<const float2*>(from);
        to[0] = v.x;
        to[1] = v.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) to[i] = j + i < columns ? from[i] : 0.0f;
    }
    return;
  }
  const uint16_t* from = static_cast<const uint16_t*>(side.data) + j;
  if constexpr (kCount == 4) {
    if (side.vectors && j + kCount <= columns) {
      const uint2 bits = __ldg(reinterpret_cast<const uint2*>(from));
      if (side.element == Element::kBFloat16) {
        to[0] = __uint_as_float(bits.x << 16);
        to[1] = __uint_as_float(bits.x & 0xffff0000u);
        to[2] = __uint_as_float(bits.y << 16);
        to[3] = __uint_as_float(bits.y & 0xffff0000u);
      } else {
        const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&bits.x));
        const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&bits.y));
        to[0] = low.x;
        to[1] = low.y;
        to[2] = high.x;
        to[3] = high.y;
      }
      return;
    }
  }
  uint16_t bits[kCount] = {};
  if (side.vectors && j + kCount <= columns) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      // Two at a time: 4-byte loads are aligned for both vector lengths.
      const uint32_t pair = *reinterpret_cast<const uint32_t*>(from + i);
      bits[i] = static_cast<uint16_t>(pair & 0xffffu);
      bits[i + 1] = static_cast<uint16_t>(pair >> 16);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) bits[i] = j + i < columns ? from[i] : uint16_t{0};
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = From16Bit(bits[i], side.element);
}

// Rounded as they stand: never a part of a fused multiply-add.
__device__ __forceinline__ float RoundedProduct(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double RoundedProduct(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float RoundedDifference(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ double RoundedDifference(double a, double b) { return __dsub_rn(a, b); }

// Products to logits, in place, and d(logit)/d(argument). kMayBias and kMayCap: whether `view` may have them.
template <bool kMayBias, bool kMayCap, bool kWantDerivative, typename T>
__device__ __forceinline__ void ToLogits(const RowView<T>& view, int32_t j, T (&values)[kVector<T>], T (&derivative)[kVector<T>]) {
  if constexpr (kMayBias) {
    if (view.bias.data != nullptr) {
      T bias[kVector<T>];
      LoadSide(view.bias, j, view.columns, bias);
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) values[i] += bias[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) values[i] *= view.logit_scale;
  if constexpr (kWantDerivative) {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) derivative[i] = 1;
  }
  if constexpr (kMayCap) {
    if (view.cap != T(0)) {
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) {
        const row_math::CappedLogit<T> capped = row_math::Softcap(values[i], view.cap, view.inverse_cap);
        values[i] = capped.z;
        if constexpr (kWantDerivative) derivative[i] = capped.derivative;
      }
    }
  }
}

// --- The cross entropy's fp32 rows -----------------------------------------------------------------------------------------------
//
// A block has one row, or several where a bias or class weights are read. Bias and class weights come out of the L2 cache, at 2 to
// 8 bytes a column. They would cost more than the products if every row read them again. A thread holds kQuickVectors vectors at a
// time: of one row, or of as many rows.

inline constexpr int kQuickVectors = 4;

// Whether a kernel has the smoothing's sums (statistics) and shares (gradient), and whether with class weights.
enum class Classes : int32_t { kNone, kEqual, kWeighted };

// Fewer rows fill the GPU better one at a time.
inline constexpr int64_t kSharingRows = 1024;

// Vectors first, first + kStep, ... of rows of `stride` from `products`. Vectors behind the last column, or of rows behind the
// last, load the last one again. An unconditional load needs no copy of the former registers. `columns` > 0.
template <int kVectors, int kRows, int32_t kStep>
__device__ __forceinline__ void LoadQuick(const float* products, int64_t stride, int rows, int32_t first, int32_t columns,
                                          float (&to)[kVectors][kRows][4]) {
  const int32_t last = (columns - 1) / 4 * 4;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const auto j = static_cast<uint32_t>(min(first + v * kStep, last));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      LoadVector(products + min(r, rows - 1) * stride + j, to[v][r]);
    }
  }
}

// Four columns of a side array as they are stored, to be loaded early and converted late.
struct SideBits {
  uint32_t word[4];
};

// Columns from `columns` on are 0. kFloat32: the array's element, known to the compiler.
template <bool kFloat32>
__device__ __forceinline__ SideBits LoadSideBits(const SideArray& side, int32_t j, int32_t columns) {
  const bool is_float32 = kFloat32 || side.element == Element::kFloat32;
  SideBits bits = {};
  if (side.vectors && j + 4 <= columns) {
    if (is_float32) {
      const uint4 words = __ldg(reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(side.data) + j));
      bits = {{words.x, words.y, words.z, words.w}};
    } else {
      const uint2 words = __ldg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(side.data) + j));
      bits.word[0] = words.x;
      bits.word[1] = words.y;
    }
    return bits;
  }
#pragma unroll 1
  for (int i = 0; i < 4 && j + i < columns; ++i) {
    if (is_float32) {
      const uint32_t value = static_cast<const uint32_t*>(side.data)[j + i];
#pragma unroll
      for (int w = 0; w < 4; ++w) bits.word[w] = i == w ? value : bits.word[w];
    } else {
      const uint32_t value = static_cast<uint32_t>(static_cast<const uint16_t*>(side.data)[j + i]) << (i % 2 * 16);
      bits.word[0] |= i < 2 ? value : 0u;
      bits.word[1] |= i < 2 ? 0u : value;
    }
  }
  return bits;
}

template <bool kFloat32>
__device__ __forceinline__ void Convert(const SideBits& bits, Element element, float (&to)[4]) {
  if (kFloat32 || element == Element::kFloat32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = __uint_as_float(bits.word[i]);
  } else if (element == Element::kBFloat16) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      to[i] = __uint_as_float(bits.word[i / 2] << 16);
      to[i + 1] = __uint_as_float(bits.word[i / 2] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&bits.word[i / 2]));
      to[i] = pair.x;
      to[i + 1] = pair.y;
    }
  }
}

// Products to the softcap's arguments, and those to logits, in place, and a quarter of d(logit)/d(argument) (1 without a cap).
// Every operation is rounded as it stands: the same product gives the same logit wherever this is called.
template <bool kHasBias>
__device__ __forceinline__ void ToArguments(const RowView<float>& view, const float (&bias)[4], const float (&products)[4],
                                            float (&arguments)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    arguments[i] = __fmul_rn(kHasBias ? __fadd_rn(products[i], bias[i]) : products[i], view.logit_scale);
  }
}
// kAllNear: by AllNear(); it changes no bits.
template <bool kHasCap, bool kAllNear>
__device__ __forceinline__ void ToLogitsQuick(const RowView<float>& view, float (&values)[4], float (&quarter)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    quarter[i] = 1;
    if constexpr (kHasCap) {
      const float exponent = __fmul_rn(values[i], view.cap_exponent);
      const row_math::QuickCappedLogit capped = kAllNear
                                                    ? row_math::SoftcapNear(values[i], exponent, view.half_inverse_cap)
                                                    : row_math::SoftcapQuick(values[i], exponent, view.cap, view.half_inverse_cap);
      values[i] = capped.z;
      quarter[i] = capped.quarter_derivative;
    }
  }
}

// Whether the softcap's arguments that the warp's threads have here are all near: most logits of a model are, and need half of the
// instructions. NaN counts as near: it stays NaN. Rounding is monotonic, so the largest stands for all.
template <bool kHasCap, int kVectors, int kRows>
__device__ __forceinline__ bool AllNear(const RowView<float>& view, const float (&arguments)[kVectors][kRows][4]) {
  if constexpr (kHasCap) {
    float largest = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fabsf(arguments[v][r][i]));
      }
    }
    // The lanes of the warp that are active at this point.
    return __all_sync(__activemask(), row_math::IsNearSoftcap(__fmul_rn(largest, view.cap_exponent))) != 0;
  } else {
    return true;
  }
}

// Turns several vectors of arguments into logits, in place, without their derivatives.
template <bool kHasCap, int kVectors, int kRows>
__device__ __forceinline__ void ToLogitsQuick(const RowView<float>& view, float (&z)[kVectors][kRows][4]) {
  const auto to_logits = [&](auto all_near) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float unused[4];
        ToLogitsQuick<kHasCap, decltype(all_near)::value>(view, z[v][r], unused);
      }
    }
  };
  if (AllNear<kHasCap>(view, z)) {
    to_logits(std::true_type());
  } else {
    to_logits(std::false_type());
  }
}

// True if one of the columns [j, j + 4) is the target, or lies behind the last.
__device__ __forceinline__ bool HasExceptions(int32_t j, int32_t columns, int32_t target) {
  return j + 4 > columns || static_cast<uint32_t>(target - j) < 4u;
}

// --- Any row of a cross entropy --------------------------------------------------------------------------------------------------

// Products to logits, in place, and d(logit)/d(argument). Statistics and gradient have the same bits, fp32 ones also with those of
// ToLogitsQuick().
template <bool kWantDerivative>
__device__ __forceinline__ void ToGeneralLogits(const RowView<double>& view, int32_t j, double (&values)[2],
                                                double (&derivative)[2]) {
  ToLogits<true, true, kWantDerivative>(view, j, values, derivative);
}
template <bool kWantDerivative>
__device__ __forceinline__ void ToGeneralLogits(const RowView<float>& view, int32_t j, float (&values)[4], float (&derivative)[4]) {
  float bias[4] = {};
  if (view.bias.data != nullptr) {
    LoadSide(view.bias, j, view.columns, bias);
    ToArguments<true>(view, bias, values, values);
  } else {
    ToArguments<false>(view, bias, values, values);
  }
  if (view.cap != 0.0f) {
    ToLogitsQuick<true, false>(view, values, derivative);
#pragma unroll
    for (int i = 0; i < 4; ++i) derivative[i] *= 4.0f;
  } else {
    ToLogitsQuick<false, false>(view, values, derivative);
  }
}

// --- A divergence's two sides ----------------------------------------------------------------------------------------------------

template <typename T>
struct DivergenceSides {
  RowView<T> student;
  RowView<T> teacher;
  T student_inverse_temperature = 1;
  T teacher_inverse_temperature = 1;
  int32_t columns = 0;  // common ones of this shard
};

template <typename T>
DivergenceSides<T> MakeDivergenceSides(const LogitsView& student, const LogitsView& teacher, const DivergenceTerm& term) {
  return {MakeRowView<T>(student), MakeRowView<T>(teacher), static_cast<T>(1 / term.student_temperature),
          static_cast<T>(1 / term.teacher_temperature), CommonColumns(student, teacher, term)};
}

// The values that the columns of one row share.
template <typename T>
struct SoftRow {
  row_math::Split<T> student_lse;
  row_math::Split<T> teacher_lse;
  row_math::Split<T> lse_difference;  // teacher's less student's
  T beta;
  T one_minus_beta;
  row_math::SlopeShift<T> shift;
  T reference;         // the slope at the top column
  int32_t top_column;  // column of this shard; matches none if it lies elsewhere
};

template <typename T, row_math::DivergenceForm kForm>
__device__ __forceinline__ SoftRow<T> MakeSoftRow(const DivergenceSides<T>& sides, const RowCoefficients& row, double beta) {
  SoftRow<T> soft;
  soft.student_lse = row_math::MakeSplit<T>(row.student_lse);
  soft.teacher_lse = row_math::MakeSplit<T>(row.teacher_lse);
  soft.lse_difference = row_math::MakeSplit<T>(row.teacher_lse - row.student_lse);
  soft.beta = static_cast<T>(beta);
  soft.one_minus_beta = static_cast<T>(1 - beta);
  soft.reference = 0;
  if (kForm != row_math::DivergenceForm::kForward) {
    row_math::SlopeShift<double> shift;
    shift.on = kForm == row_math::DivergenceForm::kMixture && row.top_difference < row_math::kShiftedBelow;
    if (shift.on) shift.log_kappa = log(beta / (1 - beta));
    soft.shift = {shift.on, static_cast<T>(shift.log_kappa)};
    soft.reference = static_cast<T>(row_math::Slope<double, kForm>(row.top_difference, beta, 1 - beta, shift));
  }
  soft.top_column = row.top_column < 0 ? -1 : row.top_column - sides.student.vocab_start;
  return soft;
}

// `student` and `teacher` are logits, not yet tempered. Both products are rounded: with one of them fused into the difference,
// equal logits would not cancel.
template <typename T>
__device__ __forceinline__ row_math::ColumnLogs<T> LogsOf(const DivergenceSides<T>& sides, const SoftRow<T>& row, T student,
                                                          T teacher) {
  const T s = RoundedProduct(student, sides.student_inverse_temperature);
  const T t = RoundedProduct(teacher, sides.teacher_inverse_temperature);
  return {row_math::Minus(t, row.teacher_lse), row_math::Minus(s, row.student_lse), row_math::Minus(t - s, row.lse_difference)};
}

// --- Writing M -------------------------------------------------------------------------------------------------------------------

// One vector of M, 8 bytes: four 16-bit elements out of fp32 values, or two fp32 ones out of fp64 values.
__device__ __forceinline__ uint2 PackMatrix(const float (&values)[4], Element element) {
  uint2 packed;
  if (element == Element::kBFloat16) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(values[0], values[1]);
    const __nv_bfloat162 high = __floats2bfloat162_rn(values[2], values[3]);
    packed.x = *reinterpret_cast<const uint32_t*>(&low);
    packed.y = *reinterpret_cast<const uint32_t*>(&high);
  } else {
    const __half2 low = __floats2half2_rn(values[0], values[1]);
    const __half2 high = __floats2half2_rn(values[2], values[3]);
    packed.x = *reinterpret_cast<const uint32_t*>(&low);
    packed.y = *reinterpret_cast<const uint32_t*>(&high);
  }
  return packed;
}
__device__ __forceinline__ uint2 PackMatrix(const double (&values)[2], Element) {
  return {__float_as_uint(static_cast<float>(values[0])), __float_as_uint(static_cast<float>(values[1]))};
}

// Whether M can be written beside products of `products`, or over them: half their size, rows at multiples of 16 bytes.
inline bool MatrixFits(Element products, const MutableMatrix& matrix) {
  const int64_t stride_bytes = matrix.stride * BytesOf(matrix.element);
  if (stride_bytes % 16 != 0 || reinterpret_cast<uintptr_t>(matrix.data) % 16 != 0) return false;
  return products == Element::kFloat64 ? matrix.element == Element::kFloat32
                                       : matrix.element == Element::kBFloat16 || matrix.element == Element::kFloat16;
}

// Columns of M that are written: up to the padding that the products after it read, as far as a row has it.
inline int32_t MatrixColumns(const LogitsView& logits, int64_t matrix_stride) {
  const int64_t padded = RoundUp(logits.columns, 8);
  return static_cast<int32_t>(padded < matrix_stride ? padded : matrix_stride);
}

// Zeros for a whole row of M, which begins at `row`.
template <typename T, int kThreads>
__device__ __forceinline__ void WriteZeroRow(uint2* row, int32_t matrix_columns) {
  for (int32_t vector = static_cast<int32_t>(threadIdx.x); vector * kVector<T> < matrix_columns; vector += kThreads) {
    row[vector] = make_uint2(0, 0);
  }
}

// --- Reductions over a block of kThreads -----------------------------------------------------------------------------------------

inline constexpr uint32_t kAllLanes = 0xffffffffu;

// The largest value (NaN skipped), to every thread. `shared`: one a warp, not used again before the next barrier.
template <int kThreads, typename T>
__device__ __forceinline__ T BlockMax(T value, T* shared) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value = max(value, __shfl_xor_sync(kAllLanes, value, distance));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; ++warp) value = max(value, shared[warp]);
  return value;
}

// Sums, each by the same tree every time; complete in thread 0 only. `shared` as above.
template <int kThreads, int kCount>
__device__ __forceinline__ void BlockSum(double (&values)[kCount], double (*shared)[kThreads / 32]) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) values[k] += __shfl_xor_sync(kAllLanes, values[k], distance);
    if (threadIdx.x % 32 == 0) shared[k][threadIdx.x / 32] = values[k];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    values[k] = shared[k][0];
    for (int warp = 1; warp < kThreads / 32; ++warp) values[k] += shared[k][warp];
  }
}

}  // namespace headwater::cuda::row_block

#endif  // HEADWATER_KERNELS_CUDA_DEVICE_ROW_BLOCK_CUH_
