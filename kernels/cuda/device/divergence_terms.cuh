// One row's arithmetic of the divergence's row pass on Hopper (divergence_rows.cu, which has the formulas). It makes logits out of
// products, adds a column to the row's sums, and divides the row's factor between M and the hidden states.
//
// The functions are there where the architecture is sm_90a; the types everywhere, for the host that fills them in.
#ifndef HEADWATER_KERNELS_CUDA_DEVICE_DIVERGENCE_TERMS_CUH_
#define HEADWATER_KERNELS_CUDA_DEVICE_DIVERGENCE_TERMS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cuda/device/cluster_row.cuh"
#include "kernels/cuda/device/exact_entries.cuh"
#include "kernels/cuda/device/row_math.cuh"
#include "kernels/cuda/rows/row_passes.h"

namespace headwater::cuda::divergence_row {

using cluster_row::kInputs;

enum class Form : int32_t { kForward, kMixture, kReverse };

constexpr int kSeriesTerms = 8;  // at |d| = 1 off by 7e-7 of the slope, 4e-7 of the loss
constexpr double kLn2 = 0.693147180559945309417;
constexpr double kLog2E = 1.44269504088896340736;
// Stands for columns that are not there; no exponential is left of it, and differences of two of them are finite.
constexpr float kNoColumn = 1e20f;

// A row's factor in two parts: a power of two, by which the hidden states are multiplied, and the rest, which M has. A row's share
// of grad_weight is then rounded to 16 bits once.
struct FactorParts {
  float rest;
  int32_t exponent;  // of the power of two
};

__host__ __device__ __forceinline__ FactorParts SplitFactor(double factor) {
  constexpr int32_t kLargestExponent = 20;  // fp16's scale may be up to 2^100 in either direction
  const auto power = [](int32_t exponent) {
    const uint64_t bits = static_cast<uint64_t>(1023 + exponent) << 52;
    double value;
    memcpy(&value, &bits, sizeof(value));
    return value;
  };
  uint64_t bits;
  memcpy(&bits, &factor, sizeof(bits));
  const int32_t exponent = static_cast<int32_t>(bits >> 52 & 0x7ff) - 1022;
  const int32_t above = exponent < kLargestExponent ? exponent : kLargestExponent;
  const int32_t kept = above < -kLargestExponent ? -kLargestExponent : above;
  return {static_cast<float>(factor * power(-kept)), kept};
}

// How one side's products become logits, where that is more than a factor.
struct SideTransform {
  const void* bias = nullptr;  // [columns], or null
  Element bias_element = Element::kFloat32;
  float logit_scale = 1;
  float cap = 0;
  float inverse_cap = 0;
};

struct KernelParams {
  const float* inputs[kInputs];  // student's, teacher's products
  int64_t strides[kInputs];
  uint16_t* matrix;       // [row_count, matrix_stride], over the student's products or apart
  int64_t matrix_stride;  // a multiple of 8
  const float* token_weights;
  RowReport* reports;
  float* row_factor;
  float* target_factor;
  SideTransform sides[kInputs];
  double gradient_scale;  // loss_scale * logit_scale
  double soft_weight;
  FactorParts unit_factor;     // of a token weight of 1
  double matrix_factor;        // from q (mean - L) as it is here to d(loss)/d(logit argument), token weight excepted
  float log2_scales[kInputs];  // from a value in shared memory to log2 of its exponential
  float ratio;                 // log2_scales[0] / log2_scales[1]
  float no_column[kInputs];
  // kMixture, else 0, 0, 0, 1, 1: log2(1 - beta), log2(beta), log2 of the unit, 1 / (unit (1 - beta)), 1 / unit.
  float log_rest, log_beta, log_unit;
  float log_rest_unit, log_beta_rest;  // log_rest + log_unit, log_beta - log_rest
  float inverse_rest_unit, inverse_unit;
  float top_unit;  // kMixture: unit (1 - beta), else 1
  float beta_log_beta, rest_log_rest;
  float odds;                  // kMixture: beta / (1 - beta)
  float slope[kSeriesTerms];   // L = d * sum slope_k d^k
  float excess[kSeriesTerms];  // loss = q d^2 sum excess_k d^k, with q as it stands in Terms
  int32_t row_count;
  int32_t columns;       // common ones
  int32_t zero_columns;  // up to here M has zeros
  int32_t warps;         // of a CTA, that compute
  int32_t cta_columns;   // a CTA's slice
  int32_t cluster;
  int32_t want_gradient;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using sm90::Exp2;

constexpr float kNearLimit = 1.0f;       // of |d|, for the series
constexpr int32_t kMixedLanes = 8;       // of 32; four columns of each lane of which fewer are near are far
constexpr float kLeastLog = -100.0f;     // log2 of the least q that a loss is taken of, as it stands in Terms
constexpr float kLargestRatio = 126.0f;  // in log2
constexpr float kSmallRatio = 0x1p-11f;  // the first term of the series is off by 2.4e-4 of it, the logarithm by 3.4e-4
constexpr float kAbsent = -1e12f;        // log2 q below this: no column

__device__ __forceinline__ float BiasAt(const SideTransform& side, int32_t column) {
  if (side.bias == nullptr) return 0.0f;
  if (side.bias_element == Element::kFloat32) return __ldg(static_cast<const float*>(side.bias) + column);
  if (side.bias_element == Element::kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(side.bias)[column]);
  return __half2float(static_cast<const __half*>(side.bias)[column]);
}

__device__ __forceinline__ float LogitOf(const SideTransform& side, float product, int32_t column) {
  const float argument = side.logit_scale * (product + BiasAt(side, column));
  return side.cap == 0.0f ? argument : row_math::Softcap(argument, side.cap, side.inverse_cap).z;
}

// The first `count` of four products become logits, the rest `no_column`: there the copy engine left whatever lies between rows. A
// class that its bias rules out, by -inf or the type's least number, counts as an absent column: 0 times it is 0.
template <bool kTransformed>
__device__ __forceinline__ void MakeLogits(const SideTransform& side, int32_t column, int32_t count, float no_column,
                                           float4& values) {
  const auto make = [&](float& value, int32_t i) {
    if (i >= count) {
      value = no_column;
    } else if constexpr (kTransformed) {
      value = LogitOf(side, value, column + i);
      if (value < -kNoColumn) value = -kNoColumn;  // NaN stays
    }
  };
  make(values.x, 0);
  make(values.y, 1);
  make(values.z, 2);
  make(values.w, 3);
}

template <bool kHalf>
__device__ __forceinline__ uint32_t Pack(float low, float high) {
  if constexpr (kHalf) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  } else {
    return sm90::PackBf16(low, high);
  }
}

// sum c_k x^k, k < kTerms.
template <int kTerms>
__device__ __forceinline__ float Polynomial(const float (&c)[kTerms], float x) {
  float y = c[kTerms - 1];
#pragma unroll
  for (int k = kTerms - 2; k >= 0; --k) y = fmaf(x, y, c[k]);
  return y;
}

// A thread's sums in phase 1. kMixture: q stands for unit (1 - beta) q and p for unit beta p. Sums of q L (kForward: of q - p), and
// the sums beside them, leave out the column with q > 1/2.
struct Terms {
  // In units of ln2. kMixture: with q as it stands here, and of far columns p log2(p / m) - q L.
  float loss = 0.0f;
  float mean = 0.0f;     // q L
  float largest = 0.0f;  // of |q L| (kForward: |q - p|)
  float q_largest = 0.0f;
};

// Offsets from a row's log-sum-exps. `student` and `teacher` are added to log2 of an exponential to get log2 q and log2 p in the
// units of Terms. `difference` and `ratio` are added to the difference of the two logits to get d and log2(p / q).
struct RowOffsets {
  float student, teacher;
  float difference, ratio;
};

// The column that has more than half of q, in the one thread that has it.
struct Top {
  int32_t index = -1;       // in the thread's registers; -1: not here
  float slope = 0.0f;       // its L
  float derivative = 1.0f;  // dz/da
};

template <Form kForm, bool kTransformed, bool kHalf>
struct RowTerms {
  static __device__ __forceinline__ float LogQ(const KernelParams& params, const RowOffsets& offsets, float student) {
    return fmaf(student, params.log2_scales[0], offsets.student);
  }
  static __device__ __forceinline__ float LogP(const KernelParams& params, const RowOffsets& offsets, float teacher) {
    return fmaf(teacher, params.log2_scales[1], offsets.teacher);
  }

  // d of a column that may be near; 0 of one that is not there.
  static __device__ __forceinline__ float NearDifference(const KernelParams& params, const RowOffsets& offsets, float student,
                                                         float teacher) {
    const bool is_absent = LogQ(params, offsets, student) < kAbsent && (!kTransformed || IsRuledOut(teacher));
    return is_absent ? 0.0f : Difference(params, offsets.difference, student, teacher);
  }

  // Whole warps: a bit for each lane whose four columns are all near.
  static __device__ __forceinline__ uint32_t NearLanes(const KernelParams& params, const RowOffsets& offsets,
                                                       const float (&student)[4], const float (&teacher)[4]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fabsf(NearDifference(params, offsets, student[i], teacher[i])));
    return __ballot_sync(0xffffffffu, largest < kNearLimit);
  }

  // In phase 1 a student's logit becomes q dz/da (kForward: (q - p) dz/da), the teacher's L (kForward: q).
  static __device__ __forceinline__ void Near(const KernelParams& params, const RowOffsets& offsets, float& student, float& teacher,
                                              Terms& terms) {
    const float d = NearDifference(params, offsets, student, teacher), q = Exp2(LogQ(params, offsets, student));
    float slope = d * Polynomial(params.slope, d);
    terms.loss = fmaf(q * (d * d), Polynomial(params.excess, d), terms.loss);
    if constexpr (kForm == Form::kMixture) {
      slope -= params.log_rest;
    }
    Keep(params, q, slope, kForm == Form::kForward ? -q * slope : q, student, teacher, terms);
  }

  // A column in a row where many are near. Its share of the loss is a separate term. A sum of far columns' terms is a difference of
  // entropies, off by 1e-7 of those. For a student that has nearly become its teacher that is 1e-4 of the loss.
  static __device__ __forceinline__ void Mixed(const KernelParams& params, const RowOffsets& offsets, float& student,
                                               float& teacher, Terms& terms) {
    if constexpr (kForm != Form::kMixture) {
      Far<true>(params, offsets, student, teacher, terms);
    } else {
      const float log_q = LogQ(params, offsets, student);
      // A q that vanishes is taken for the least one, and d for the value that gives p from that q.
      const float q = Exp2(fmaxf(log_q, kLeastLog));
      const float log_p = LogP(params, offsets, teacher) + params.log_rest_unit;
      const float d = fminf(Difference(params, offsets.difference, student, teacher), log_p - kLeastLog);
      const float ratio = Exp2(d) * params.odds, slope = SlopeOf(ratio);
      const float log_m = slope + params.log_rest;  // log2(m / q)
      const float far = fmaf(ratio, d - log_m, -log_m);
      terms.loss = fmaf(q, fabsf(d) < kNearLimit ? d * d * Polynomial(params.excess, d) : far, terms.loss);
      const float kept = log_q > kLeastLog ? q : 0.0f;
      Keep(params, kept, slope, kept, student, teacher, terms);
    }
  }

  // L of a ratio beta p / ((1 - beta) q).
  static __device__ __forceinline__ float SlopeOf(float ratio) {
    float slope;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(slope) : "f"(ratio + 1.0f));
    // Where the teacher has next to nothing, 1 + ratio and its logarithm have no digits of the ratio left.
    if (ratio < kSmallRatio) slope = ratio * static_cast<float>(kLog2E);
    return slope;
  }

  // Transformed logits: the class is ruled out, or there is no such column.
  static __device__ __forceinline__ bool IsRuledOut(float logit) { return kTransformed && logit <= -kNoColumn; }

  // `kSeriesLoss`: not for kMixture; the loss takes the series where |d| is within its limit.
  template <bool kSeriesLoss = false>
  static __device__ __forceinline__ void Far(const KernelParams& params, const RowOffsets& offsets, float& student, float& teacher,
                                             Terms& terms) {
    const float q = Exp2(LogQ(params, offsets, student));
    if constexpr (kForm == Form::kMixture) {
      // Where p / q is not a number any more, q L is 0, as p log2(p / m) is.
      const float log_ratio = fminf(Difference(params, offsets.ratio, student, teacher), kLargestRatio);
      const float ratio = Exp2(log_ratio);
      const float slope = SlopeOf(ratio);
      terms.loss = fmaf(q, fmaf(ratio, log_ratio - slope, -slope), terms.loss);
      Keep(params, q, slope, q, student, teacher, terms);
    } else {
      const float p = Exp2(LogP(params, offsets, teacher));
      float d = Difference(params, offsets.difference, student, teacher);
      // One side is infinitely far from another that rules the class out.
      if constexpr (kForm == Form::kForward) {
        if (IsRuledOut(student)) d = p > 0.0f ? INFINITY : 0.0f;
        const float difference = q - p;
        terms.loss += Share<kSeriesLoss>(params, q, d, fmaf(difference, static_cast<float>(kLog2E), p * d));
        Keep(params, q, 0.0f, difference, student, teacher, terms);
      } else {
        if (IsRuledOut(teacher)) d = q > 0.0f ? -INFINITY : 0.0f;
        terms.loss += Share<kSeriesLoss>(params, q, d, fmaf(p - q, static_cast<float>(kLog2E), -q * d));
        Keep(params, q, d, q, student, teacher, terms);
      }
    }
  }

  template <bool kSeriesLoss>
  static __device__ __forceinline__ float Share(const KernelParams& params, float q, float d, float far) {
    if constexpr (kSeriesLoss) {
      if (fabsf(d) < kNearLimit) return q * (d * d) * Polynomial(params.excess, d);
    }
    return far;
  }

  static __device__ __forceinline__ float Difference(const KernelParams& params, float offset, float student, float teacher) {
    return fmaf(fmaf(-params.ratio, student, teacher), params.log2_scales[1], offset);
  }

  // `entry`: the factor of M that is kept.
  static __device__ __forceinline__ void Keep(const KernelParams& params, float q, float slope, float entry, float& student,
                                              float& teacher, Terms& terms) {
    const float weighted = kForm == Form::kForward ? entry : q * slope;
    terms.mean += weighted;
    if constexpr (kHalf) {
      terms.largest = fmaxf(terms.largest, fabsf(weighted));
      terms.q_largest = fmaxf(terms.q_largest, q);
    }
    student = kTransformed ? entry * Derivative(params, student) : entry;
    teacher = kForm == Form::kForward ? q : slope;
  }

  // dz/da where a softcap is: 1 - (z / cap)^2.
  static __device__ __forceinline__ float Derivative(const KernelParams& params, float student) {
    const float share = student * params.sides[0].inverse_cap;
    return fmaf(-share, share, 1.0f);
  }

  // In units of ln2. `far`: all columns of `terms` are far, and q and p are their probabilities in true units.
  static __device__ __forceinline__ float Loss(const KernelParams& params, const Terms& terms, bool far, float q, float p) {
    if constexpr (kForm != Form::kMixture) return terms.loss;
    return fmaf(terms.loss, params.inverse_unit, far ? -fmaf(params.beta_log_beta, p, params.rest_log_rest * q) : 0.0f);
  }
};

__device__ __forceinline__ float PowerOfTwo(int32_t exponent) {
  return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
}

// Scales an M of fp16 whose largest entry is `most` into [2^12, 2^13), as row_math::MatrixScale() does, from the exponent's bits.
// An M whose `most` is 0 or not finite stays.
__device__ __forceinline__ void FitHalf(float most, FactorParts& factor) {
  if (most > 0.0f && most < INFINITY) {
    const int32_t exponent = static_cast<int32_t>(__float_as_uint(most) >> 23) - 127;
    const int32_t shift = min(100, max(-100, 12 - exponent));
    factor.rest *= PowerOfTwo(shift);
    factor.exponent -= shift;
  }
}

// Scales M so that the row's entries of these sizes are nearly exact in it, by a whole warp. Returns the factor by which the factor
// outside M is multiplied.
template <bool kHalf>
__device__ __forceinline__ float MakeExact(float first, float second, FactorParts& factor) {
  if (!(first > 1e-30f) || exact_entries::AreNearlyExact(first, second, kHalf)) return 1.0f;
  const float rest = factor.rest * exact_entries::BestScaleOfWarp(first, second, kHalf);
  const float outside = factor.rest / rest;
  factor.rest = rest;
  return outside;
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace headwater::cuda::divergence_row

#endif  // HEADWATER_KERNELS_CUDA_DEVICE_DIVERGENCE_TERMS_CUH_
