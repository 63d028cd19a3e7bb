// Row kernels: the CPU engine's work on logits, gradients and parameters besides matrix products.
//
// One source (row_kernels_impl.h) is compiled for several instruction sets and picked at run time; see row_kernels.cc. Every
// kernel works on a contiguous piece of a row (or of a tensor) and is single-threaded; callers split work over threads by fixed
// ranges. Same input, same machine: same bits. Kernels allocate nothing.
//
// Logits arrive as `a`, the argument of the softcap (logit_scale * (x . w + bias)); z below is cap * tanh(a / cap), or a if cap
// is 0.
#ifndef HEADWATER_KERNELS_CPU_ROWS_ROW_KERNELS_H_
#define HEADWATER_KERNELS_CPU_ROWS_ROW_KERNELS_H_

#include <cstdint>

#include "kernels/core/loss/dither.h"
#include "kernels/core/loss/piece_stats.h"
#include "kernels/core/optimizer_scalars.h"

namespace headwater::cpu {

struct StatsOptions {
  double cap = 0;                        // 0: none
  double inverse_temperature = 1;        // z is multiplied by it (fp64 kernels only)
  const float* class_weights = nullptr;  // of the piece's columns; null: all 1
  bool want_spread = false;              // weighted, rest and squares
  bool want_linear = false;
  bool want_total = false;
};

// Coefficients of a row's gradient, with s = (z_v - max) * inverse_temperature:
// g_v = (e^s (probability_factor - distance_factor s) - class_factor * class_weight_v) * dz/da.
struct GradientCoefficients {
  double max;
  double inverse_temperature;
  double probability_factor;
  double distance_factor;
  double class_factor;
};

// The dithering of a row's entries (core/dither.h). The result is g_v = factor * dithered(scale * a_v) - class_factor *
// class_weight_v, where 1 is the row's resolution.
struct DitherOptions {
  DitherKey key;
  double scale;
  double factor;
  double class_factor;
};

// Options of a divergence of two rows: log q = student z * student_inverse_temperature - student_lse, and log p of the teacher.
struct DivergenceOptions {
  double beta = 0.5;
  double student_cap = 0;
  double teacher_cap = 0;
  double student_inverse_temperature = 1;
  double teacher_inverse_temperature = 1;
  double student_lse = 0;
  double teacher_lse = 0;
  double reference = 0;  // see divergence_sums
};

struct RowKernels {
  const char* instruction_set;

  // Conversions. Narrowing rounds to nearest even; NaN stays NaN (quiet); fp16 overflow gives infinity.
  void (*bfloat16_to_float)(const uint16_t* in, int64_t count, float* out);
  void (*float16_to_float)(const uint16_t* in, int64_t count, float* out);
  void (*float_to_bfloat16)(const float* in, int64_t count, uint16_t* out);
  void (*float_to_float16)(const float* in, int64_t count, uint16_t* out);
  void (*float_to_double)(const float* in, int64_t count, double* out);
  void (*bfloat16_to_double)(const uint16_t* in, int64_t count, double* out);
  void (*float16_to_double)(const uint16_t* in, int64_t count, double* out);

  // sum x[i] y[i] in fp64.
  double (*dot)(const float* x, const float* y, int64_t count);
  // a = (a + bias) * scale; bias may be null.
  void (*affine_float)(float* a, const float* bias, float scale, int64_t count);
  void (*affine_double)(double* a, const float* bias, double scale, int64_t count);

  PieceStats (*stats_float)(const float* a, int64_t count, const StatsOptions& options);
  PieceStats (*stats_double)(const double* a, int64_t count, const StatsOptions& options);
  // First index whose z * inverse_temperature is at least `value`, or count.
  int64_t (*first_at_least_float)(const float* a, int64_t count, double cap, double inverse_temperature, double value);
  int64_t (*first_at_least_double)(const double* a, int64_t count, double cap, double inverse_temperature, double value);
  // Writes the indices i with a[i] >= value, in order, at most `capacity` of them; returns how many there are.
  int64_t (*collect_at_least)(const float* a, int64_t count, float value, int64_t capacity, int32_t* indices);
  // The gradient over the logits, in place.
  void (*gradient_float)(float* a, int64_t count, double cap, const GradientCoefficients& coefficients, const float* class_weights);
  void (*gradient_double)(const double* a, int64_t count, double cap, const GradientCoefficients& coefficients,
                          const float* class_weights, float* gradient);

  // The dithered gradient over the entries of columns [column, column + count) of the vocabulary, in place. Adds to *sums, in units
  // of the resolution; class_weights of these columns, or null: all 1.
  void (*dither)(float* a, int64_t count, int64_t column, const DitherOptions& options, const float* class_weights,
                 DitherSums* sums);

  // Sums for the divergence of a row, over a piece of it without the student's most probable column b, whose terms would cancel
  // each other. The terms are s_v = log(q_v / m_v), for beta = 1 log q_v - log p_v, with the reference s_b. The kernel adds sum q
  // (s - s_b) to mean, for beta = 0 sum q - p. Adds the piece's divergence to loss.
  void (*divergence_sums)(const double* student, const double* teacher, int64_t count, const DivergenceOptions& options,
                          double* loss, double* mean);
  // gradient += factor * d(divergence)/d(student z * inverse temperature) * dz/da, for columns other than b. The divergence's
  // derivative is (1 - beta) q (s - s_b - mean), without the (1 - beta) for beta = 1; for beta = 0 it is q - p.
  void (*divergence_gradient)(const double* student, const double* teacher, int64_t count, const DivergenceOptions& options,
                              double mean, double factor, float* gradient);

  // out[j] += alpha * sum_i in[i * stride + j], rows in order.
  void (*add_column_sums)(const float* in, int64_t rows, int64_t stride, int64_t count, float alpha, float* out);
  // out += alpha * in.
  void (*add_scaled)(const float* in, int64_t count, float alpha, float* out);
  // out = in * alpha.
  void (*scale)(const float* in, int64_t count, float alpha, float* out);
  int64_t (*count_non_finite)(const float* in, int64_t count);
  double (*sum_of_squares)(const float* in, int64_t count);
  double (*sum_of_magnitudes)(const float* in, int64_t count);
  // Updates parameters and state from the gradient and zeroes the gradient.
  void (*adamw)(const AdamWScalars& scalars, int64_t count, float* parameter, float* gradient, float* moment1, float* moment2);
  void (*sgd)(const SgdScalars& scalars, int64_t count, float* parameter, float* gradient, float* momentum_buffer);
};

// The kernels for this processor.
const RowKernels& GetRowKernels();

// All variants that this processor can run, the portable one first; for tests. Ends with null.
const RowKernels* const* AllRowKernels();

}  // namespace headwater::cpu

#endif  // HEADWATER_KERNELS_CPU_ROWS_ROW_KERNELS_H_
