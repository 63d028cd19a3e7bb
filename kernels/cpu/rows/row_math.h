// Elementary functions for row kernels, written so that the compiler vectorises the loops that call them.
//
// This file is included by row_kernels_impl.h only, inside a namespace of its own for each instruction set. It must not use inline
// functions of the standard library: the linker could keep a copy compiled for AVX-512 for the whole program.
//
// Numerics. Let k be the integer nearest to x / ln 2, and x = k ln 2 + r. The constant ln 2 is split in two parts (Cody and Waite).
// The result is a Taylor polynomial in r of a degree whose remainder is below half a unit in the last place. Relative errors: about
// 1 ulp. NaN stays NaN: every comparison that picks a constant is false for NaN. Arguments below the smallest normal result give 0.
#ifndef HEADWATER_ROW_INLINE
#define HEADWATER_ROW_INLINE static inline __attribute__((always_inline))
#endif

// e^x - 1 for the reduced argument, and 2^k, whose combination gives e^x and e^x - 1 without cancellation.
template <typename T>
struct ReducedExp {
  T expm1_r;
  T scale;
};

HEADWATER_ROW_INLINE ReducedExp<float> ReduceExp(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which then stands in the low bits
  const float shifted = x * 1.44269504088896341f + magic;
  const float k = shifted - magic;
  float r = x - k * 0.693359375f;
  r = r - k * -2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  const float tail = p * r * r;
  const int32_t bits = (__builtin_bit_cast(int32_t, shifted) - 0x4B400000 + 127) << 23;
  return {r + tail, __builtin_bit_cast(float, bits)};
}

HEADWATER_ROW_INLINE ReducedExp<double> ReduceExp(double x) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52
  const double shifted = x * 1.44269504088896340736 + magic;
  const double k = shifted - magic;
  double r = x - k * 6.93147180369123816490e-01;
  r = r - k * 1.90821492927058770002e-10;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  const double tail = p * r * r;
  const int64_t bits = (__builtin_bit_cast(int64_t, shifted) - 0x4338000000000000LL + 1023) << 52;
  return {r + tail, __builtin_bit_cast(double, bits)};
}

template <typename T>
struct ExpRange;
template <>
struct ExpRange<float> {
  static constexpr float kLow = -87.33f;
  static constexpr float kHigh = 88.37f;
};
template <>
struct ExpRange<double> {
  static constexpr double kLow = -708.39;
  static constexpr double kHigh = 709.43;
};

// e^x for x <= kHigh (larger ones give e^kHigh: the callers subtract a maximum first).
template <typename T>
HEADWATER_ROW_INLINE T Exp(T x) {
  T clamped = x < ExpRange<T>::kLow ? ExpRange<T>::kLow : x;
  clamped = clamped > ExpRange<T>::kHigh ? ExpRange<T>::kHigh : clamped;
  const ReducedExp<T> e = ReduceExp(clamped);
  const T value = e.scale + e.scale * e.expm1_r;
  return x < ExpRange<T>::kLow ? T(0) : value;
}

// e^x - 1 and e^x of one argument.
template <typename T>
struct ExpPair {
  T expm1;
  T exp;
};

template <typename T>
HEADWATER_ROW_INLINE ExpPair<T> ExpBoth(T x) {
  T clamped = x < ExpRange<T>::kLow ? ExpRange<T>::kLow : x;
  clamped = clamped > ExpRange<T>::kHigh ? ExpRange<T>::kHigh : clamped;
  const ReducedExp<T> e = ReduceExp(clamped);
  const T expm1 = e.scale * e.expm1_r + (e.scale - T(1));
  const T exp = e.scale + e.scale * e.expm1_r;
  return {expm1, x < ExpRange<T>::kLow ? T(0) : exp};
}

// ln(1 + x) for x in [-1, 2^52]; -inf at -1.
HEADWATER_ROW_INLINE double Log1p(double x) {
  const double u = 1.0 + x;
  const double lost = (x - (u - 1.0)) / u;  // the rounding error of 1 + x, to first order
  // u = 2^k m, m in [sqrt(1/2), sqrt(2)); ln m = 2 atanh((m - 1) / (m + 1)).
  const int64_t bits = __builtin_bit_cast(int64_t, u);
  const int64_t offset = 0x3FE6A09E667F3BCDLL;
  const int64_t k_bits = (bits - offset) & static_cast<int64_t>(0xFFF0000000000000ULL);
  const double m = __builtin_bit_cast(double, bits - k_bits);
  // The exponent as a double by the magic number: a 64-bit shift and conversion do not vectorise below AVX-512.
  const int64_t k_int = static_cast<int64_t>((static_cast<uint64_t>(k_bits) + 0x4000000000000000ULL) >> 52);  // k + 1024; NaN wraps
  const double k = __builtin_bit_cast(double, k_int + 0x4330000000000000LL) - 4503599627370496.0 - 1024.0;
  const double f = m - 1.0;
  const double s = f / (2.0 + f);
  const double s2 = s * s;
  double p = 1.0 / 21;
  p = p * s2 + 1.0 / 19;
  p = p * s2 + 1.0 / 17;
  p = p * s2 + 1.0 / 15;
  p = p * s2 + 1.0 / 13;
  p = p * s2 + 1.0 / 11;
  p = p * s2 + 1.0 / 9;
  p = p * s2 + 1.0 / 7;
  p = p * s2 + 1.0 / 5;
  p = p * s2 + 1.0 / 3;
  const double log_m = 2.0 * s + 2.0 * s * s2 * p;
  const double value = k * 6.93147180369123816490e-01 + (log_m + (k * 1.90821492927058770002e-10 + lost));
  return u == 0.0 ? -__builtin_inf() : value;
}

// A logit behind the softcap, and d(logit)/d(argument).
template <typename T>
struct CappedLogit {
  T z;
  T derivative;
};

// z = cap tanh(a / cap) from e^{-2|a|/cap}: neither small nor large arguments cancel. derivative = 1 - tanh^2 = 4e / (1 + e)^2.
template <typename T>
HEADWATER_ROW_INLINE CappedLogit<T> Softcap(T a, T cap) {
  const T u = a / cap;
  const T magnitude = u < T(0) ? -u : u;
  const ExpPair<T> e = ExpBoth(T(-2) * magnitude);
  const T denominator = T(2) + e.expm1;  // 1 + e^{-2|u|}
  const T tanh = -e.expm1 / denominator;
  return {cap * (u < T(0) ? -tanh : tanh), T(4) * e.exp / (denominator * denominator)};
}
