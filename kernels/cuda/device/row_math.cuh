// Elementary functions of the row passes, for fp32 and fp64 logits, on both sides: kernels call them, and host tests check them.
//
// fp32. Exponentials and logarithms use the processor's approximations (ex2, lg2, rcp: relative errors of 2^-22.5, 2^-22 and
// 2^-23). Arguments are reduced so that little else is lost. With 2^-24 for a unit, errors are 2 units for Exp and Expm1, 5 for the
// logarithms of the mixture, 6 for the softcap (tests/unit/kernels/cuda_row_math_test.cc). Exp is good to 3e-7 of the term at any
// argument.
//
// fp64. The library's functions, in formulas that do not cancel.
//
// Everywhere: NaN stays NaN, because every comparison that picks a constant is false for NaN; e^-inf is 0, and 0 * -inf is not
// computed. Results below the smallest normal number are 0.
#ifndef HEADWATER_KERNELS_CUDA_DEVICE_ROW_MATH_CUH_
#define HEADWATER_KERNELS_CUDA_DEVICE_ROW_MATH_CUH_

#include <cmath>
#include <cstdint>

#include "kernels/core/loss/row_loss.h"

#ifdef __CUDACC__
#define HEADWATER_ROW_MATH __host__ __device__ __forceinline__
#else
#define HEADWATER_ROW_MATH inline
#endif

namespace headwater::cuda::row_math {

// --- The processor's approximations; on the host, the functions themselves -------------------------------------------------------

HEADWATER_ROW_MATH float Exp2Approx(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}

HEADWATER_ROW_MATH float Log2Approx(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::log2(x);
#endif
}

HEADWATER_ROW_MATH float DivideApprox(float a, float b) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
  return a * y;
#else
  return a / b;
#endif
}

HEADWATER_ROW_MATH double DivideApprox(double a, double b) { return a / b; }

// --- Exponentials ----------------------------------------------------------------------------------------------------------------

// `x`, not below where e^x is 0: a number multiplied by e^x, or subtracted from itself, is then finite.
HEADWATER_ROW_MATH float ClampExponent(float x) { return x < -150.0f ? -150.0f : x; }
HEADWATER_ROW_MATH double ClampExponent(double x) { return x < -800.0 ? -800.0 : x; }

// e^x for an x that ClampExponent() returned; x <= 88 (fp32).
// The product with log2 e is taken in two parts: its rounding alone would be |x| 2^-25 of the term.
HEADWATER_ROW_MATH float ExpClamped(float x) {
  const float log2_e = 1.44269502162933349609f;  // and the rest of it:
  const float log2_e_rest = 1.92596299112661746887e-8f;
  const float exponent = x * log2_e;
  const float residual = fmaf(x, log2_e_rest, fmaf(x, log2_e, -exponent));
  const float e = Exp2Approx(exponent);
  return fmaf(e, residual * 0.693147182464599609375f, e);
}
HEADWATER_ROW_MATH double ExpClamped(double x) { return exp(x); }

// e^x.
template <typename T>
HEADWATER_ROW_MATH T Exp(T x) {
  return ExpClamped(ClampExponent(x));
}

template <typename T>
struct ExpPair {
  T exp;
  T expm1;
};

// e^x and e^x - 1 for x <= 0.
HEADWATER_ROW_MATH ExpPair<float> ExpBoth(float x) {
  const float e = Exp(x);
  // Taylor's polynomial: its remainder is below 2e-8 of the result where it is taken.
  float near = fmaf(x, 1.0f / 40320, 1.0f / 5040);
  near = fmaf(x, near, 1.0f / 720);
  near = fmaf(x, near, 1.0f / 120);
  near = fmaf(x, near, 1.0f / 24);
  near = fmaf(x, near, 1.0f / 6);
  near = fmaf(x, near, 0.5f);
  near = fmaf(x * x, near, x);
  return {e, x > -0.5f ? near : e - 1.0f};
}
HEADWATER_ROW_MATH ExpPair<double> ExpBoth(double x) { return {exp(x), expm1(x)}; }

// --- Softcap ---------------------------------------------------------------------------------------------------------------------

template <typename T>
struct CappedLogit {
  T z;           // cap * tanh(a / cap)
  T derivative;  // dz/da
};

// The softcap by e = e^{-2|a|/cap}. For large arguments it is cap - 2 cap e / (1 + e), which is rounded once where the logit is
// near the cap. For small ones it is a series. dz/da = 4e / (1 + e)^2 cancels nowhere.
HEADWATER_ROW_MATH CappedLogit<float> Softcap(float a, float cap, float inverse_cap) {
  const float u = fabsf(a * inverse_cap);
  const float e = Exp(-2.0f * u);
  const float share = DivideApprox(1.0f, 1.0f + e);
  const float far = fmaf(-2.0f * cap, e * share, cap);
  const float u2 = u * u;
  // tanh(u) / u - 1; the next term is below 1e-8 where it is taken.
  float near = fmaf(u2, 21844.0f / 6081075, -1382.0f / 155925);
  near = fmaf(u2, near, 62.0f / 2835);
  near = fmaf(u2, near, -17.0f / 315);
  near = fmaf(u2, near, 2.0f / 15);
  near = fmaf(u2, near, -1.0f / 3);
  near *= u2;
  const float magnitude = fabsf(a);
  near = fmaf(magnitude, near, magnitude);
  return {copysignf(u < 0.4f ? near : far, a), 4.0f * (e * share) * share};
}
HEADWATER_ROW_MATH CappedLogit<double> Softcap(double a, double cap, double) {
  const double u = a / cap;
  const double e = exp(-2 * fabs(u));
  return {cap * tanh(u), 4 * e / ((1 + e) * (1 + e))};
}

// --- The cross entropy's fp32 passes ---------------------------------------------------------------------------------------------
//
// The results of these passes are sums and 16-bit numbers, so few instructions matter. An exponential is one multiply-add and one
// approximation, relative to 2^k with a whole k near the maximum instead of to the maximum itself. A multiply-add rounds once, to
// 2^-24 of the exponent. The fp32 value of log2 e shifts a logit z by 1.3e-8 |z|, which is below the rounding of z.

inline constexpr float kLog2E = 1.44269502162933349609f;
inline constexpr double kLn2 = 0.693147180559945309417;

// The exponent of e^z / 2^k, for Exp2Approx().
HEADWATER_ROW_MATH float ExponentOver(float z, float k) { return fmaf(z, kLog2E, -k); }

// k for rows or pieces whose largest logit is `max`.
HEADWATER_ROW_MATH float NearestExponent(float max) { return rintf(max * kLog2E); }

// 2^(from - to) for whole numbers from <= to; 0 where it is no normal number, or one of them is not finite.
HEADWATER_ROW_MATH double PowerOfTwo(float from, float to) {
  const float exponent = from - to;
  return exponent > -1000.0f ? ldexp(1.0, static_cast<int>(exponent)) : 0.0;
}

struct QuickCappedLogit {
  float z;                   // cap * tanh(a / cap)
  float quarter_derivative;  // dz/da / 4
};

// SoftcapQuick()'s argument for a is a times this.
HEADWATER_ROW_MATH double SoftcapExponent(double cap) { return 2 / (kLn2 * cap); }

// Whether an argument is near: |u| < 1/2, u = a / cap, exponent = 2 log2(e) u.
HEADWATER_ROW_MATH bool IsNearSoftcap(float exponent) { return fabsf(exponent) < 1.44269502f; }

// Softcap() of a near argument, in 8 instructions and without an exponential: a polynomial in `exponent`^2. The derivative is
// 1 - tanh^2, which cancels little there.
HEADWATER_ROW_MATH QuickCappedLogit SoftcapNear(float a, float exponent, float half_inverse_cap) {
  const float square = exponent * exponent;
  // tanh(u) / u - 1, interpolated at Chebyshev's points of u^2 <= 1/4: the remainder is below 5e-8.
  float near = fmaf(square, 3.74424781e-06f, -9.25143759e-05f);
  near = fmaf(square, near, 1.92321371e-03f);
  near = fmaf(square, near, -4.00377251e-02f);
  near = fmaf(a, square * near, a);
  const float half = near * half_inverse_cap;
  return {near, fmaf(-half, half, 0.25f)};
}

// Softcap() of any argument. The value z is good to 5e-7 of itself. The derivative is as good at arguments within the cap, and
// loses another 2e-7 for each cap beyond. Where arguments are not near, r = 1 / (1 + e^{2|u|}) gives tanh |u| = 1 - 2r and the
// derivative 4r(1 - r), which cancels nowhere. A near argument has the bits of SoftcapNear().
HEADWATER_ROW_MATH QuickCappedLogit SoftcapQuick(float a, float exponent, float cap, float half_inverse_cap) {
  const QuickCappedLogit near = SoftcapNear(a, exponent, half_inverse_cap);
  const float r = DivideApprox(1.0f, 1.0f + Exp2Approx(fabsf(exponent)));
  const float far = fmaf(-2.0f * cap, r, cap);
  const bool is_near = IsNearSoftcap(exponent);
  return {is_near ? near.z : copysignf(far, a), is_near ? near.quarter_derivative : fmaf(-r, r, r)};
}

// --- Divergence ------------------------------------------------------------------------------------------------------------------
//
// P teacher, Q student, d = log p - log q, m = beta p + (1 - beta) q. For 0 < beta < 1:
//   log(q/m) = -log1p(beta expm1(d)) and log(p/m) = d + log(q/m), or mirrored: log(p/m) = -log1p((1 - beta) expm1(-d)).
// No exponential has a positive argument.

enum class DivergenceForm : int32_t {
  kForward,  // beta = 0: KL(P || Q)
  kReverse,  // beta = 1: KL(Q || P)
  kMixture,  // in between
};

// A number in two parts whose sum is exact to twice T's digits (fp32). It can be subtracted from a T that is near it.
template <typename T>
struct Split {
  T high;
  T low;
};
template <typename T>
HEADWATER_ROW_MATH Split<T> MakeSplit(double value) {
  const T high = static_cast<T>(value);
  // An infinity has no rest.
  const double rest = fabs(value) < kRowInfinity ? value - static_cast<double>(high) : 0.0;
  return {high, static_cast<T>(rest)};
}
template <typename T>
HEADWATER_ROW_MATH T Minus(T x, const Split<T>& y) {
  return (x - y.high) - y.low;
}

// The logarithms log q and d at one column, from the tempered logits. The logits are subtracted from each other before the
// log-sum-exps are, so that a student near its teacher keeps its digits.
template <typename T>
struct ColumnLogs {
  T log_p;
  T log_q;
  T d;
};

// log1p(y) for y in (-1, 1], given 1 + y as a sum of positive numbers too.
HEADWATER_ROW_MATH float Log1p(float y, float one_plus_y) {
  // 2 atanh(t), t = y / (2 + y) in [-1/3, 1/3]: the remainder is below 2e-8 of the result.
  const float t = DivideApprox(y, 2.0f + y);
  const float t2 = t * t;
  float near = fmaf(t2, 2.0f / 13, 2.0f / 11);
  near = fmaf(t2, near, 2.0f / 9);
  near = fmaf(t2, near, 2.0f / 7);
  near = fmaf(t2, near, 2.0f / 5);
  near = fmaf(t2, near, 2.0f / 3);
  near = fmaf(t2 * t, near, 2.0f * t);
  const float far = Log2Approx(one_plus_y) * 0.693147182464599609375f;
  return y > -0.5f ? near : far;
}
HEADWATER_ROW_MATH double Log1p(double y, double one_plus_y) { return y > -0.5 ? log1p(y) : log(one_plus_y); }

template <typename T>
struct MixtureLogs {
  T log_p_over_m;
  T log_q_over_m;
};
// The mirror image is taken only where beta (e^d - 1) > 1. Below that, log(q/m) is small against d if beta is small, and would be a
// difference of nearly equal numbers.
template <typename T>
HEADWATER_ROW_MATH MixtureLogs<T> LogsOverMixture(T d, T beta, T one_minus_beta) {
  const bool above = d > T(0);
  const ExpPair<T> e = ExpBoth(above ? -d : d);
  const bool mirrored = above && -beta * e.expm1 > e.exp;
  const T share = mirrored ? one_minus_beta : beta, rest = mirrored ? beta : one_minus_beta;
  const T product = share * e.expm1;
  const T y = above && !mirrored ? DivideApprox(-product, e.exp) : product;
  const T log_of_sum = Log1p(y, share * e.exp + rest);
  return mirrored ? MixtureLogs<T>{-log_of_sum, -log_of_sum - d} : MixtureLogs<T>{d - log_of_sum, -log_of_sum};
}

// Below this |x|, ExcessNear() is exact to T's digits.
HEADWATER_ROW_MATH float ExcessLimit(float) { return 0.5f; }
HEADWATER_ROW_MATH double ExcessLimit(double) { return 0.03; }

// x + e^-x - 1 >= 0, of second order in x.
template <typename T>
HEADWATER_ROW_MATH T ExcessNear(T x) {
  T series = T(1.0 / 40320) - x * T(1.0 / 362880);
  series = T(-1.0 / 5040) + x * series;
  series = T(1.0 / 720) + x * series;
  series = T(-1.0 / 120) + x * series;
  series = T(1.0 / 24) + x * series;
  series = T(-1.0 / 6) + x * series;
  series = T(0.5) + x * series;
  return x * x * series;
}

// weight * (x + e^-x - 1), given weight * (e^-x - 1); weight 0 wins over an infinite x.
template <typename T>
HEADWATER_ROW_MATH T WeightedExcess(T weight, T x, T weighted_expm1) {
  const T far = (weight == T(0) ? T(0) : weight * x) + weighted_expm1;
  return std::fabs(x) < ExcessLimit(x) ? weight * ExcessNear(x) : far;
}

// q - p = -q expm1(d), mirrored for d > 0.
template <typename T>
HEADWATER_ROW_MATH T ProbabilityDifference(const ColumnLogs<T>& logs) {
  const bool above = logs.d > T(0);
  const T larger = Exp(above ? logs.log_p : logs.log_q);
  const T difference = larger * ExpBoth(above ? -logs.d : logs.d).expm1;
  return larger == T(0) ? T(0) : (above ? difference : -difference);
}

// Where the student's most probable column has almost none of the teacher's mass, log(q/m) is close to -log(1 - beta) in all
// columns that count. Their differences are lost. Such a row takes the slope log(q/m) + log(1 - beta) = -log1p(kappa e^d), kappa =
// beta / (1 - beta), whose small values keep their digits. Elsewhere log(q/m) itself is the small number.
template <typename T>
struct SlopeShift {
  bool on = false;
  T log_kappa = 0;
};
// The rows that take it: d at the student's most probable column is below this.
constexpr double kShiftedBelow = -2;

// A form's replacement for log q - log m: the gradient is q (slope - mean of slopes).
template <typename T, DivergenceForm kForm>
HEADWATER_ROW_MATH T Slope(T d, T beta, T one_minus_beta, const SlopeShift<T>& shift) {
  if (kForm == DivergenceForm::kReverse) return -d;
  if (!shift.on) return LogsOverMixture(d, beta, one_minus_beta).log_q_over_m;
  const T x = d + shift.log_kappa;
  const bool above = x > T(0);
  const T e = Exp(above ? -x : x);
  return -Log1p(e, T(1) + e) - (above ? x : T(0));
}

template <typename T>
struct ColumnTerms {
  T loss;   // >= 0
  T slope;  // q (slope - reference); q - p for kForward
  T q;
};

// `reference`: the slope at the student's most probable column, whose own term is left to the caller.
template <typename T, DivergenceForm kForm>
HEADWATER_ROW_MATH ColumnTerms<T> DivergenceTerms(const ColumnLogs<T>& logs, T beta, T one_minus_beta, T reference,
                                                  const SlopeShift<T>& shift = SlopeShift<T>()) {
  const T q = Exp(logs.log_q);
  const T p = Exp(logs.log_p);
  if (kForm == DivergenceForm::kForward) {
    // p d - p + q: the extra terms sum to 0 over the row.
    return {WeightedExcess(p, logs.d, q - p), ProbabilityDifference(logs), q};
  }
  if (kForm == DivergenceForm::kReverse) {
    return {WeightedExcess(q, -logs.d, p - q), q == T(0) ? T(0) : q * (-logs.d - reference), q};
  }
  const MixtureLogs<T> over = LogsOverMixture(logs.d, beta, one_minus_beta);
  // q expm1(-log(q/m)) = m - q and p expm1(-log(p/m)) = m - p; weighted by 1 - beta and beta they sum to 0 in every column.
  const T student = WeightedExcess(q, over.log_q_over_m, beta * (p - q));
  const T teacher = WeightedExcess(p, over.log_p_over_m, one_minus_beta * (q - p));
  const T slope = shift.on ? Slope<T, kForm>(logs.d, beta, one_minus_beta, shift) : over.log_q_over_m;
  return {beta * teacher + one_minus_beta * student, q == T(0) ? T(0) : q * (slope - reference), q};
}

// d(divergence)/d(tempered student logit) without the factor 1 - beta of kMixture; `mean` is relative to `reference`.
template <typename T, DivergenceForm kForm>
HEADWATER_ROW_MATH T DivergenceGradient(const ColumnLogs<T>& logs, T beta, T one_minus_beta, T reference, T mean,
                                        const SlopeShift<T>& shift = SlopeShift<T>()) {
  if (kForm == DivergenceForm::kForward) return ProbabilityDifference(logs);
  const T q = Exp(logs.log_q);
  return q == T(0) ? T(0) : q * (Slope<T, kForm>(logs.d, beta, one_minus_beta, shift) - reference - mean);
}

// --- fp16's power of two ---------------------------------------------------------------------------------------------------------

// 2^k that brings `bound` into [2^12, 2^13); 1 where nothing is to be scaled.
HEADWATER_ROW_MATH double MatrixScale(double bound) {
  if (!(bound > 0) || !(bound < kRowInfinity)) return 1;
  int exponent = 0;
  frexp(bound, &exponent);
  const int shift = 13 - exponent;
  // A row factor must remain a normal fp32 number; so small a gradient does not count.
  return ldexp(1.0, shift < -100 ? -100 : shift > 100 ? 100 : shift);
}

}  // namespace headwater::cuda::row_math

#endif  // HEADWATER_KERNELS_CUDA_DEVICE_ROW_MATH_CUH_
