// The row kernels' only source; included by one file for each instruction set, which defines HEADWATER_ROW_NAMESPACE.
//
// Mapping   loops over contiguous elements with `omp simd`; the compiler vectorises them for the file's instruction set.
// Traffic   every kernel reads its piece once (stats: twice, the second time from the cache) and writes it at most once.
// Numerics  fp32 pieces are cut into blocks of 1024, whose fp32 partial sums are added up in fp64. What an entropy is made of is
//           summed in fp64 at once.
#include <cstdint>

#include "kernels/cpu/rows/row_kernels.h"

namespace headwater::cpu::HEADWATER_ROW_NAMESPACE {
namespace {

#include "kernels/cpu/rows/row_math.h"

constexpr int64_t kBlock = 1024;

template <typename T>
HEADWATER_ROW_INLINE bool IsNan(T x) {
  return x != x;
}

HEADWATER_ROW_INLINE float FromBfloat16(uint16_t value) { return __builtin_bit_cast(float, static_cast<uint32_t>(value) << 16); }

HEADWATER_ROW_INLINE float FromFloat16(uint16_t value) {
  // The exponent is moved by a multiplication, which also makes subnormals right.
  const uint32_t magnitude = static_cast<uint32_t>(value & 0x7FFFu) << 13;
  const float scaled = __builtin_bit_cast(float, magnitude) * 5.192296858534828e33f;  // 2^112
  const uint32_t special = magnitude | 0x7F800000u;
  const uint32_t bits = magnitude >= 0x0F800000u ? special : __builtin_bit_cast(uint32_t, scaled);
  return __builtin_bit_cast(float, bits | (static_cast<uint32_t>(value & 0x8000u) << 16));
}

HEADWATER_ROW_INLINE uint16_t ToBfloat16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

HEADWATER_ROW_INLINE uint16_t ToFloat16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t normal = (magnitude + 0xC8000FFFu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 shifts a subnormal result's bits to the bottom, rounded by the addition.
  const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
  const uint32_t subnormal = __builtin_bit_cast(uint32_t, shifted) - 0x3F000000u;
  const uint32_t special = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x477FF000u ? special : result;  // 65520 and above round to infinity
  return static_cast<uint16_t>(result | ((bits >> 16) & 0x8000u));
}

void Bfloat16ToFloat(const uint16_t* in, int64_t count, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = FromBfloat16(in[i]);
}
void Float16ToFloat(const uint16_t* in, int64_t count, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = FromFloat16(in[i]);
}
void FloatToBfloat16(const float* in, int64_t count, uint16_t* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = ToBfloat16(in[i]);
}
void FloatToFloat16(const float* in, int64_t count, uint16_t* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = ToFloat16(in[i]);
}
void FloatToDouble(const float* in, int64_t count, double* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = in[i];
}
void Bfloat16ToDouble(const uint16_t* in, int64_t count, double* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = FromBfloat16(in[i]);
}
void Float16ToDouble(const uint16_t* in, int64_t count, double* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = FromFloat16(in[i]);
}

double Dot(const float* x, const float* y, int64_t count) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(y[i]);
  return sum;
}

template <typename T>
void Affine(T* a, const float* bias, T scale, int64_t count) {
  if (bias == nullptr) {
    if (scale == T(1)) return;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) a[i] = a[i] * scale;
    return;
  }
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) a[i] = (a[i] + static_cast<T>(bias[i])) * scale;
}

template <bool kCapped, typename T>
HEADWATER_ROW_INLINE T Logit(T a, T cap, T inverse_temperature) {
  const T z = kCapped ? Softcap(a, cap).z : a;
  return z * inverse_temperature;
}

// Statistics of at most kBlock elements.
template <typename T, bool kCapped>
PieceStats BlockStats(const T* a, int64_t count, const StatsOptions& options) {
  const T cap = static_cast<T>(options.cap);
  const T inverse_temperature = static_cast<T>(options.inverse_temperature);
  const T low = -static_cast<T>(__builtin_inf());
  T computed[kBlock];
  const T* z = a;
  T max = low;
  if (kCapped || inverse_temperature != T(1)) {
#pragma omp simd reduction(max : max)
    for (int64_t i = 0; i < count; ++i) {
      computed[i] = Logit<kCapped>(a[i], cap, inverse_temperature);
      max = computed[i] > max ? computed[i] : max;
    }
    z = computed;
  } else {
#pragma omp simd reduction(max : max)
    for (int64_t i = 0; i < count; ++i) max = z[i] > max ? z[i] : max;
  }
  // Clang begins a reduction with the lowest finite number, which stands then if there is nothing above -inf.
  if (max == -static_cast<T>(sizeof(T) == sizeof(float) ? __FLT_MAX__ : __DBL_MAX__)) {
    bool is_there = false;
    for (int64_t i = 0; i < count; ++i) is_there = is_there || z[i] == max;
    if (!is_there) max = low;
  }
  // An infinite maximum must not be subtracted from itself where all is -inf: those terms are 0.
  const T offset = max == low ? T(0) : max;
  T sum = 0;
  T linear = 0;
  T total = 0;
  double all = 0;  // the exponentials' sum
  double rest = 0;
  double weighted = 0;
  double squares = 0;
  if (options.want_spread) {
    T tops = 0;  // columns at the maximum, to rounding
#pragma omp simd reduction(+ : rest, tops, weighted, squares)
    for (int64_t i = 0; i < count; ++i) {
      const T shifted = z[i] - offset;
      T e = Exp(shifted);
      if constexpr (sizeof(T) == sizeof(float)) {
        // The rounding error of the subtraction, which is a relative error of e.
        const T back = shifted - z[i];
        const T lost = (z[i] - (shifted - back)) - (offset + back);
        e = e == T(0) ? T(0) : e + e * lost;
      }
      const T below = e == T(1) ? T(0) : e;
      tops += e == T(1) ? T(1) : T(0);
      rest += static_cast<double>(below);
      squares += static_cast<double>(below * below);
      weighted += static_cast<double>(e == T(0) ? T(0) : e * shifted);  // 0 * -inf is 0 here
    }
    all = static_cast<double>(tops) + rest;
    // Where all is -inf there is no column at the maximum.
    const double other_tops = tops == T(0) ? 0.0 : static_cast<double>(tops) - 1.0;
    rest += other_tops;
    squares += other_tops;
  } else {
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) sum += Exp(z[i] - offset);
    all = static_cast<double>(sum);
  }
  if (options.want_linear) {
    if (options.class_weights != nullptr) {
      const float* class_weights = options.class_weights;
#pragma omp simd reduction(+ : linear)
      for (int64_t i = 0; i < count; ++i) {
        const T weight = static_cast<T>(class_weights[i]);
        linear += weight == T(0) ? T(0) : weight * z[i];
      }
    } else {
#pragma omp simd reduction(+ : linear)
      for (int64_t i = 0; i < count; ++i) linear += z[i];
    }
  }
  if (options.want_total) {
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < count; ++i) total += z[i];
  }
  return {static_cast<double>(max), all, weighted, static_cast<double>(linear), rest, squares, static_cast<double>(total)};
}

template <typename T>
PieceStats Stats(const T* a, int64_t count, const StatsOptions& options) {
  PieceStats total = {-__builtin_inf(), 0, 0, 0, 0, 0, 0};
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t length = count - start < kBlock ? count - start : kBlock;
    StatsOptions block_options = options;
    if (options.class_weights != nullptr) block_options.class_weights = options.class_weights + start;
    const PieceStats block = options.cap > 0 ? BlockStats<T, true>(a + start, length, block_options)
                                             : BlockStats<T, false>(a + start, length, block_options);
    // As MergeStats() does it.
    const bool replaces = block.max > total.max;
    const PieceStats top = replaces ? block : total;
    const PieceStats low = replaces ? total : block;
    const double shift = low.max - top.max;  // -inf if there was nothing before
    const double factor = shift < -745.0 || top.max == -__builtin_inf() ? 0.0 : Exp(shift);
    // A NaN of a lower block must not be multiplied away.
    const double low_sum = IsNan(low.sum) ? low.sum : factor * low.sum;
    total = {top.max,
             top.sum + low_sum,
             top.weighted + (factor == 0.0 ? 0.0 : factor * (low.weighted + shift * low.sum)),
             total.linear + block.linear,
             top.rest + low_sum,
             top.squares + factor * factor * (1.0 + low.squares),
             total.total + block.total};
  }
  return total;
}

template <typename T>
int64_t FirstAtLeast(const T* a, int64_t count, double cap, double inverse_temperature, double value) {
  for (int64_t i = 0; i < count; ++i) {
    const T z = cap > 0 ? Softcap(a[i], static_cast<T>(cap)).z : a[i];
    if (static_cast<double>(z * static_cast<T>(inverse_temperature)) >= value) return i;
  }
  return count;
}

int64_t CollectAtLeast(const float* a, int64_t count, float value, int64_t capacity, int32_t* indices) {
  constexpr int64_t kProbe = 128;
  int64_t found = 0;
  for (int64_t start = 0; start < count; start += kProbe) {
    const int64_t length = count - start < kProbe ? count - start : kProbe;
    int32_t hits = 0;
#pragma omp simd reduction(+ : hits)
    for (int64_t i = 0; i < length; ++i) hits += a[start + i] >= value ? 1 : 0;
    if (hits == 0) continue;
    for (int64_t i = start; i < start + length; ++i) {
      if (!(a[i] >= value)) continue;
      if (found < capacity) indices[found] = static_cast<int32_t>(i);
      ++found;
    }
  }
  return found;
}

template <typename T, bool kCapped, bool kClasses, bool kWeights, bool kDistance>
void GradientLoop(const T* a, int64_t count, double cap, const GradientCoefficients& coefficients, const float* class_weights,
                  float* gradient) {
  const T max = static_cast<T>(coefficients.max);
  const T inverse_temperature = static_cast<T>(coefficients.inverse_temperature);
  const T probability_factor = static_cast<T>(coefficients.probability_factor);
  const T distance_factor = static_cast<T>(coefficients.distance_factor);
  const T class_factor = static_cast<T>(coefficients.class_factor);
  const T typed_cap = static_cast<T>(cap);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    T z = a[i];
    T derivative = 1;
    if constexpr (kCapped) {
      const CappedLogit<T> capped = Softcap(z, typed_cap);
      z = capped.z;
      derivative = capped.derivative;
    }
    const T shifted = (z - max) * inverse_temperature;
    const T e = Exp(shifted);
    T g = probability_factor * e;
    if constexpr (kDistance) g -= e == T(0) ? T(0) : e * distance_factor * shifted;  // 0 * -inf is 0 here
    if constexpr (kClasses) g -= class_factor * (kWeights ? static_cast<T>(class_weights[i]) : T(1));
    gradient[i] = static_cast<float>(kCapped ? g * derivative : g);
  }
}

template <typename T, bool kCapped, bool kDistance>
void GradientForm(const T* a, int64_t count, double cap, const GradientCoefficients& coefficients, const float* class_weights,
                  float* gradient) {
  if (coefficients.class_factor == 0) {
    GradientLoop<T, kCapped, false, false, kDistance>(a, count, cap, coefficients, class_weights, gradient);
  } else if (class_weights == nullptr) {
    GradientLoop<T, kCapped, true, false, kDistance>(a, count, cap, coefficients, class_weights, gradient);
  } else {
    GradientLoop<T, kCapped, true, true, kDistance>(a, count, cap, coefficients, class_weights, gradient);
  }
}

template <typename T, bool kCapped>
void GradientCapped(const T* a, int64_t count, double cap, const GradientCoefficients& coefficients, const float* class_weights,
                    float* gradient) {
  if (coefficients.distance_factor == 0) {
    GradientForm<T, kCapped, false>(a, count, cap, coefficients, class_weights, gradient);
  } else {
    GradientForm<T, kCapped, true>(a, count, cap, coefficients, class_weights, gradient);
  }
}

template <typename T>
void GradientOf(const T* a, int64_t count, double cap, const GradientCoefficients& coefficients, const float* class_weights,
                float* gradient) {
  if (cap > 0) {
    GradientCapped<T, true>(a, count, cap, coefficients, class_weights, gradient);
  } else {
    GradientCapped<T, false>(a, count, cap, coefficients, class_weights, gradient);
  }
}

void GradientFloat(float* a, int64_t count, double cap, const GradientCoefficients& coefficients, const float* class_weights) {
  GradientOf<float>(a, count, cap, coefficients, class_weights, a);
}

template <bool kClasses, bool kWeights>
void DitherLoop(float* a, int64_t count, int64_t column, const DitherOptions& options, const float* class_weights,
                DitherSums* sums) {
  const DitherKey key = options.key;
  const float scale = static_cast<float>(options.scale);
  const float factor = static_cast<float>(options.factor);
  const float class_factor = static_cast<float>(options.class_factor);
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t length = count - start < kBlock ? count - start : kBlock;
    float* block = a + start;
    const uint32_t first = static_cast<uint32_t>(column + start);
    int32_t below_count = 0;
    float error = 0, norm = 0;
#pragma omp simd reduction(+ : below_count, error, norm)
    for (int64_t i = 0; i < length; ++i) {
      const float ratio = scale * block[i];
      const float size = ratio < 0 ? -ratio : ratio;
      const bool below = size < 1;  // a NaN stays one
      const float unit = ratio < 0 ? -1.0f : 1.0f;
      const float drawn = DitherSurvives(below ? size : 0.0f, key, first + static_cast<uint32_t>(i)) ? unit : 0.0f;
      float g = factor * (below ? drawn : ratio);
      if constexpr (kClasses) g -= class_factor * (kWeights ? class_weights[start + i] : 1.0f);
      block[i] = g;
      below_count += below ? 1 : 0;
      error += below ? size * (1 - size) : 0.0f;
      norm += size * size;
    }
    sums->entry_count += below_count;
    sums->squared_error += static_cast<double>(error);
    sums->squared_norm += static_cast<double>(norm);
  }
}

void Dither(float* a, int64_t count, int64_t column, const DitherOptions& options, const float* class_weights, DitherSums* sums) {
  if (options.class_factor == 0) {
    DitherLoop<false, false>(a, count, column, options, class_weights, sums);
  } else if (class_weights == nullptr) {
    DitherLoop<true, false>(a, count, column, options, class_weights, sums);
  } else {
    DitherLoop<true, true>(a, count, column, options, class_weights, sums);
  }
}

// log p, log q, p, q and the derivative of the student's softcap at one column.
struct Pair {
  double log_p;
  double log_q;
  double p;
  double q;
  double derivative;
};

HEADWATER_ROW_INLINE Pair LogPair(double student, double teacher, const DivergenceOptions& o) {
  CappedLogit<double> s = {student, 1.0};
  if (o.student_cap > 0) s = Softcap(student, o.student_cap);
  double t = teacher;
  if (o.teacher_cap > 0) t = Softcap(teacher, o.teacher_cap).z;
  const double log_q = s.z * o.student_inverse_temperature - o.student_lse;
  const double log_p = t * o.teacher_inverse_temperature - o.teacher_lse;
  return {log_p, log_q, Exp(log_p), Exp(log_q), s.derivative};
}

// The logarithms of p / m and q / m, with d = log p - log q and m = beta p + (1 - beta) q. They are log(q / m) = -log1p(beta
// expm1(d)) and log(p / m) = d + log(q / m). log(q / m) = -log1p(beta expm1(d)) and log(p / m) = d + log(q / m). For d > 0 the
// mirror image, log(p / m) = -log1p((1 - beta) expm1(-d)), does not overflow.
struct MixtureLogs {
  double log_p_over_m;
  double log_q_over_m;
};

HEADWATER_ROW_INLINE MixtureLogs LogsOverMixture(double d, double beta) {
  const bool above = d > 0;
  const double magnitude = above ? -d : d;
  const double share = above ? 1 - beta : beta;
  const double smaller = -Log1p(share * ExpBoth(magnitude).expm1);
  return above ? MixtureLogs{smaller, smaller - d} : MixtureLogs{d + smaller, smaller};
}

// q - p without cancellation, and without e^d where d = log p - log q > 0 could overflow.
HEADWATER_ROW_INLINE double DifferenceOfProbabilities(const Pair& x, double d) {
  const double towards = ExpBoth(d > 0 ? -d : d).expm1;
  return d > 0 ? x.p * towards : (x.q == 0 ? 0 : -x.q * towards);
}

template <int kForm>  // 0: beta = 0; 1: beta = 1; 2: in between
void DivergenceSumsLoop(const double* student, const double* teacher, int64_t count, const DivergenceOptions& options, double* loss,
                        double* mean) {
  const DivergenceOptions o = options;
  double loss_sum = 0;
  double mean_sum = 0;
#pragma omp simd reduction(+ : loss_sum, mean_sum)
  for (int64_t i = 0; i < count; ++i) {
    const Pair x = LogPair(student[i], teacher[i], o);
    const double d = x.log_p - x.log_q;
    if constexpr (kForm == 0) {
      // p d - p + q >= 0: no cancellation between columns where P is near Q. The extra terms sum to 0.
      loss_sum += (x.p == 0 ? 0 : x.p * d) + (x.q - x.p);
      mean_sum += DifferenceOfProbabilities(x, d);
    } else if constexpr (kForm == 1) {
      const double term = x.q == 0 ? 0 : x.q * -d;
      loss_sum += term + (x.p - x.q);
      mean_sum += x.q == 0 ? 0 : x.q * (-d - o.reference);
    } else {
      const MixtureLogs logs = LogsOverMixture(d, o.beta);
      const double q_part = x.q == 0 ? 0 : x.q * logs.log_q_over_m;
      const double p_part = x.p == 0 ? 0 : x.p * logs.log_p_over_m;
      // Each column's beta p log(p/m) + (1 - beta) q log(q/m) is >= 0, because t log t is convex.
      loss_sum += o.beta * p_part + (1 - o.beta) * q_part;
      mean_sum += x.q == 0 ? 0 : x.q * (logs.log_q_over_m - o.reference);
    }
  }
  *loss += loss_sum;
  *mean += mean_sum;
}

void DivergenceSums(const double* student, const double* teacher, int64_t count, const DivergenceOptions& options, double* loss,
                    double* mean) {
  if (options.beta == 0) {
    DivergenceSumsLoop<0>(student, teacher, count, options, loss, mean);
  } else if (options.beta == 1) {
    DivergenceSumsLoop<1>(student, teacher, count, options, loss, mean);
  } else {
    DivergenceSumsLoop<2>(student, teacher, count, options, loss, mean);
  }
}

template <int kForm>
void DivergenceGradientLoop(const double* student, const double* teacher, int64_t count, const DivergenceOptions& options,
                            double mean, double factor, float* gradient) {
  const DivergenceOptions o = options;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const Pair x = LogPair(student[i], teacher[i], o);
    const double d = x.log_p - x.log_q;
    double g;
    if constexpr (kForm == 0) {
      g = DifferenceOfProbabilities(x, d);
    } else if constexpr (kForm == 1) {
      g = x.q == 0 ? 0 : x.q * (-d - o.reference - mean);
    } else {
      g = x.q == 0 ? 0 : (1 - o.beta) * x.q * (LogsOverMixture(d, o.beta).log_q_over_m - o.reference - mean);
    }
    gradient[i] += static_cast<float>(factor * g * x.derivative);
  }
}

void DivergenceGradient(const double* student, const double* teacher, int64_t count, const DivergenceOptions& options, double mean,
                        double factor, float* gradient) {
  if (options.beta == 0) {
    DivergenceGradientLoop<0>(student, teacher, count, options, mean, factor, gradient);
  } else if (options.beta == 1) {
    DivergenceGradientLoop<1>(student, teacher, count, options, mean, factor, gradient);
  } else {
    DivergenceGradientLoop<2>(student, teacher, count, options, mean, factor, gradient);
  }
}

void AddColumnSums(const float* in, int64_t rows, int64_t stride, int64_t count, float alpha, float* out) {
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t length = count - start < kBlock ? count - start : kBlock;
    float sums[kBlock] = {};
    for (int64_t row = 0; row < rows; ++row) {
      const float* piece = in + row * stride + start;
#pragma omp simd
      for (int64_t i = 0; i < length; ++i) sums[i] += piece[i];
    }
#pragma omp simd
    for (int64_t i = 0; i < length; ++i) out[start + i] += alpha * sums[i];
  }
}

void AddScaled(const float* in, int64_t count, float alpha, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] += alpha * in[i];
}

void Scale(const float* in, int64_t count, float alpha, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = alpha * in[i];
}

int64_t CountNonFinite(const float* in, int64_t count) {
  int64_t total = 0;
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t length = count - start < kBlock ? count - start : kBlock;
    int32_t found = 0;
#pragma omp simd reduction(+ : found)
    for (int64_t i = 0; i < length; ++i) {
      found += (__builtin_bit_cast(uint32_t, in[start + i]) & 0x7F800000u) == 0x7F800000u ? 1 : 0;
    }
    total += found;
  }
  return total;
}

double SumOfSquares(const float* in, int64_t count) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(in[i]) * static_cast<double>(in[i]);
  return sum;
}

double SumOfMagnitudes(const float* in, int64_t count) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(in[i] < 0 ? -in[i] : in[i]);
  return sum;
}

HEADWATER_ROW_INLINE float Sqrt(float x) { return __builtin_sqrtf(x); }

void AdamW(const AdamWScalars& scalars, int64_t count, float* parameter, float* gradient, float* moment1, float* moment2) {
  const AdamWScalars s = scalars;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float g = gradient[i] * s.multiplier;
    // lerp, as PyTorch takes it for weights below and above one half.
    const float difference = g - moment1[i];
    const float m =
        s.one_minus_beta1 < 0.5f ? moment1[i] + s.one_minus_beta1 * difference : g - difference * (1 - s.one_minus_beta1);
    const float v = moment2[i] * s.beta2 + s.one_minus_beta2 * g * g;
    const float denominator = Sqrt(v) / s.root_correction + s.epsilon;
    parameter[i] = parameter[i] * s.decay - s.step_size * (m / denominator);
    moment1[i] = m;
    moment2[i] = v;
    gradient[i] = 0;
  }
}

void Sgd(const SgdScalars& scalars, int64_t count, float* parameter, float* gradient, float* momentum_buffer) {
  const SgdScalars s = scalars;
  if (momentum_buffer == nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const float g = gradient[i] * s.multiplier + s.weight_decay * parameter[i];
      parameter[i] -= s.learning_rate * g;
      gradient[i] = 0;
    }
    return;
  }
  const float keep = s.first_step ? 0.0f : s.momentum;
  const float add = s.first_step ? 1.0f : s.one_minus_dampening;
  const float look_ahead = s.nesterov ? s.momentum : 1.0f;
  const float own = s.nesterov ? 1.0f : 0.0f;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float g = gradient[i] * s.multiplier + s.weight_decay * parameter[i];
    const float buffer = keep * momentum_buffer[i] + add * g;
    parameter[i] -= s.learning_rate * (own * g + look_ahead * buffer);
    momentum_buffer[i] = buffer;
    gradient[i] = 0;
  }
}

}  // namespace

extern const RowKernels kRowKernels;
const RowKernels kRowKernels = {
    HEADWATER_ROW_INSTRUCTION_SET,
    Bfloat16ToFloat,
    Float16ToFloat,
    FloatToBfloat16,
    FloatToFloat16,
    FloatToDouble,
    Bfloat16ToDouble,
    Float16ToDouble,
    Dot,
    Affine<float>,
    Affine<double>,
    Stats<float>,
    Stats<double>,
    FirstAtLeast<float>,
    FirstAtLeast<double>,
    CollectAtLeast,
    GradientFloat,
    GradientOf<double>,
    Dither,
    DivergenceSums,
    DivergenceGradient,
    AddColumnSums,
    AddScaled,
    Scale,
    CountNonFinite,
    SumOfSquares,
    SumOfMagnitudes,
    AdamW,
    Sgd,
};

}  // namespace headwater::cpu::HEADWATER_ROW_NAMESPACE
