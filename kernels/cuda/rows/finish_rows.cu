// Rows' losses out of their statistics, and the gradient passes' coefficients of a row. One thread a row, all fp64: the shards'
// statistics are merged in order by the lines that the CPU engine runs (kernels/core/loss/row_loss.h).
#include "kernels/cuda/device/elements.cuh"
#include "kernels/cuda/device/exact_entries.cuh"
#include "kernels/cuda/device/row_factors.cuh"
#include "kernels/cuda/device/row_math.cuh"
#include "kernels/cuda/rows/row_passes.h"
#include "kernels/cuda/rows/top_k_rows.h"

namespace headwater::cuda {
namespace {

using row_factors::GradientFactor;

constexpr int kThreads = 128;
constexpr double kLn2 = 0.693147180559945309417;
constexpr int kLargestExponent = 20;  // fp16's scale may be up to 2^100 in either direction (row_math::MatrixScale)

unsigned BlocksOf(int64_t row_count) { return static_cast<unsigned>((row_count + kThreads - 1) / kThreads); }

// The gradient factor in two parts. A power of two, exact in every type, goes to the hidden states; the rest is rounded together
// with the matrix. So a row's share of grad_weight has one rounding to 16 bits, not two. MakeExact() divides rows of which one
// column has most in another way.
struct FactorParts {
  double scale;      // RowCoefficients::scale
  float row_factor;  // the rest of the gradient factor: a power of two, except after MakeExact()
};

__device__ FactorParts SplitFactor(double gradient_factor, double bound, Element matrix_element) {
  if (gradient_factor == 0) return {0, 0.0f};
  int exponent = 0;
  double scale = frexp(gradient_factor, &exponent);
  // The power of two must be a normal number of fp32, with room for the fp16 scale; the excess goes into M.
  const int kept = exponent < -kLargestExponent ? -kLargestExponent : exponent > kLargestExponent ? kLargestExponent : exponent;
  scale = ldexp(scale, exponent - kept);
  const double fp16_scale = matrix_element == Element::kFloat16 ? row_math::MatrixScale(bound * fabs(scale)) : 1;
  return {scale * fp16_scale, static_cast<float>(ldexp(1.0 / fp16_scale, kept))};
}

// Scales M so that its entries of these sizes (before scaling) are nearly exact in 16 bits.
__device__ void MakeExact(double first, double second, double gradient_factor, Element matrix_element, FactorParts* parts) {
  if (matrix_element == Element::kFloat32) return;
  const bool half = matrix_element == Element::kFloat16;
  const auto first_entry = static_cast<float>(fabs(parts->scale * first));
  const auto second_entry = static_cast<float>(fabs(parts->scale * second));
  if (!(first_entry > 1e-30f) || exact_entries::AreNearlyExact(first_entry, second_entry, half)) return;
  parts->scale *= static_cast<double>(exact_entries::BestScale(first_entry, second_entry, half));
  parts->row_factor = static_cast<float>(gradient_factor / parts->scale);
}

// Bound of |e^{z - max} (probability + distance * (max - z))|: x e^-x is at most 1/e.
__device__ double ExponentialBound(double probability, double distance) { return fabs(probability) + 0.3679 * fabs(distance); }

// Bound of the hard loss's entries of M before scaling. No class weight exceeds the sum of all, and the smoothing's share of
// probability_factor contains that sum.
__device__ double HardBound(const RowCoefficients& row, const CrossEntropyTerm& term) {
  return ExponentialBound(row.probability_factor, row.distance_factor) + fabs(row.class_factor) * term.class_weight_bound;
}

// Scales M so that the row's resolution is a power of two in M too. It is one, or where M is fp16 the power that keeps M inside
// fp16's range. The resolution is the largest power of two <= tau sum_{v != y} e^{z_v - z_y} in units of e^{z_v - z_y}. False for a
// row without a resolution.
__device__ bool SetResolution(const RowStats& merged, const RowLoss& loss, double gradient_factor, const FinishOptions& options,
                              RowCoefficients* row, float* row_factor, DitherRow* dither) {
  const double distance = merged.others.max - merged.target_logit;
  const double exponent = floor(log2(options.gradient_resolution) + distance / kLn2 + log2(merged.others.sum));
  if (!isfinite(exponent) || row->probability_factor == 0 || gradient_factor == 0) return false;
  const double largest = exp(distance - exponent * kLn2);  // of a column at the maximum, in units of the resolution
  const double unit = options.matrix_element == Element::kFloat16 ? row_math::MatrixScale(largest) : 1;
  row->scale = largest * unit / row->probability_factor;
  *row_factor = static_cast<float>(gradient_factor / row->scale);
  dither->unit = static_cast<float>(unit);
  dither->unit_in_g = loss.inverse_sum / largest;
  dither->target_entry = merged.others.sum * loss.inverse_sum;
  return true;
}

// The larger; NaN if one is.
__device__ double Largest(double a, double b) { return a > b || std::isnan(a) ? a : b; }

__global__ void __launch_bounds__(kThreads)
    FinishRowsKernel(const RowStats* stats, int32_t shard_count, const double* target_arguments, const ChunkRows rows,
                     const FinishOptions options, RowReport* reports, RowCoefficients* coefficients, float* row_factor,
                     float* target_factor, DitherRow* dither) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows.row_count) return;
  RowStats merged;
  for (int32_t shard = 0; shard < shard_count; ++shard) MergeStats(stats[shard * rows.row_count + row], &merged);
  const int32_t target = rows.targets == nullptr ? -1 : rows.targets[row];
  const double cap = options.transform.softcap;
  double target_argument = 0;
  if (target >= 0) {
    target_argument = target_arguments[row];
    merged.target_logit = cap == 0 ? target_argument : cap * tanh(target_argument / cap);
    if (merged.target_logit > merged.best || (merged.target_logit == merged.best && target < merged.best_column)) {
      merged.best = merged.target_logit;
      merged.best_column = target;
    }
  }
  const CrossEntropyTerm& term = options.cross_entropy.term;
  const RowLoss loss = FinishRow(merged, target, term);
  const row_factors::FactoredGradient factored = row_factors::FactoredGradientOf(loss, rows, options, row);
  const double gradient_factor = factored.factor;
  const RowGradient& gradient = factored.gradient;
  const bool has_gradient = options.hard_weight != 0 && target >= 0;

  RowReport report;
  report.hard = loss.hard;
  report.z_loss = loss.z_loss;
  report.lse = loss.lse;
  report.target_log_probability = loss.target_log_probability;
  report.entropy = loss.entropy;
  report.mean_logits = loss.mean_logits;
  report.log_sum_sq_probs = loss.log_sum_sq_probs;
  report.argmax = static_cast<int32_t>(merged.best_column);
  if (has_gradient && gradient_factor != 0) {
    report.gradient_bound = fabs(gradient_factor) * options.hard_weight *
                            Largest(ExponentialBound(gradient.probability_factor, gradient.distance_factor), fabs(gradient.target));
  }
  reports[row] = report;

  RowCoefficients& out = coefficients[row];
  out.max = loss.max;
  out.probability_factor = has_gradient ? options.hard_weight * gradient.probability_factor : 0.0;
  out.distance_factor = has_gradient ? options.hard_weight * gradient.distance_factor : 0.0;
  out.class_factor = has_gradient ? options.hard_weight * gradient.class_factor : 0.0;
  target_factor[row] =
      has_gradient && gradient_factor != 0
          ? static_cast<float>(gradient_factor * options.hard_weight * gradient.target * SoftcapDerivative(target_argument, cap))
          : 0.0f;
  if (options.divergence_follows) return;
  if (options.gradient_resolution > 0) {
    dither[row] = DitherRow();
    if (has_gradient && SetResolution(merged, loss, gradient_factor, options, &out, &row_factor[row], &dither[row])) {
      dither[row].target_entry *= SoftcapDerivative(target_argument, cap);
      return;
    }
  }
  FactorParts parts = SplitFactor(gradient_factor, HardBound(out, term), options.matrix_element);
  // One column has most of the row.
  if (out.class_factor == 0 && loss.lse - loss.max < kLn2) {
    MakeExact(out.probability_factor, out.probability_factor, gradient_factor, options.matrix_element, &parts);
  }
  out.scale = parts.scale;
  row_factor[row] = parts.row_factor;
}

__global__ void __launch_bounds__(kThreads)
    FinishDivergenceKernel(const DivergenceSums* sums, int32_t shard_count, const ChunkRows rows, const DivergenceTerm term,
                           const FinishOptions options, bool has_cross_entropy, RowReport* reports, RowCoefficients* coefficients,
                           float* row_factor, float* target_factor) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows.row_count) return;
  DivergenceSums merged;
  for (int32_t shard = 0; shard < shard_count; ++shard) {
    const DivergenceSums& next = sums[shard * rows.row_count + row];
    merged.loss += next.loss;
    merged.mean += next.mean;
    if (next.bound > merged.bound) merged.bound_q = next.bound_q;
    merged.bound = fmax(merged.bound, next.bound);
    merged.q_max = fmax(merged.q_max, next.q_max);
  }
  const double gradient_factor = GradientFactor(rows, options, row);
  if (!has_cross_entropy) {
    reports[row] = RowReport();
    coefficients[row].max = 0;
    coefficients[row].probability_factor = 0;
    coefficients[row].distance_factor = 0;
    coefficients[row].class_factor = 0;
    target_factor[row] = 0;
  }
  reports[row].soft = merged.loss;
  reports[row].gradient_bound += fabs(gradient_factor) * term.soft_weight;

  RowCoefficients& out = coefficients[row];
  out.divergence_mean = merged.mean;
  // beta 0 and 1 are formulas of their own, without the factor 1 - beta.
  out.soft_factor = term.soft_weight * (term.beta > 0 && term.beta < 1 ? 1 - term.beta : 1.0) / term.student_temperature;
  const double q_max = term.beta == 0 ? 0.0 : merged.q_max;
  const double q_top = exp(out.top_log_q);
  const double top = term.beta == 0 ? 1.0 : q_top;
  const double soft_bound = fmax(merged.bound + q_max * fabs(merged.mean), top * fabs(merged.mean));
  const double hard_bound = HardBound(out, options.cross_entropy.term);
  FactorParts parts = SplitFactor(gradient_factor, hard_bound + out.soft_factor * soft_bound, options.matrix_element);
  // The most probable column's entry weighs as much as all others together; often one of them has most of that.
  if (hard_bound == 0 && q_top > 0.5) {
    const double slope = merged.bound_q < 0 ? -merged.bound : merged.bound;
    const double other = term.beta == 0 ? slope : fabs(merged.bound_q) * merged.mean - slope;
    MakeExact(top * merged.mean * out.soft_factor, other * out.soft_factor, gradient_factor, options.matrix_element, &parts);
  }
  out.scale = parts.scale;
  row_factor[row] = parts.row_factor;
}

__device__ __forceinline__ double WarpLargest(double value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value = Largest(value, __shfl_xor_sync(0xffffffffu, value, distance));
  return value;
}

// FinishTopK() of kernels/core/loss/top_k.h, one warp a row.
__global__ void __launch_bounds__(kThreads)
    FinishTopKKernel(const RowStats* stats, int32_t shard_count, const TopKRows top_k, const ChunkRows rows,
                     const FinishOptions options, RowReport* reports, RowCoefficients* coefficients, float* row_factor,
                     float* target_factor) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (row >= rows.row_count) return;
  const int64_t first = row * top_k.k + threadIdx.x % 32, last = (row + 1) * top_k.k;
  PieceStats others = {-kRowInfinity, 0, 0, 0};
  for (int32_t shard = 0; shard < shard_count; ++shard) MergeStats(stats[shard * rows.row_count + row].others, &others);

  double probability_sum = 0, largest = others.max;
  for (int64_t entry = first; entry < last; entry += 32) {
    if (top_k.columns[entry] < 0) continue;
    probability_sum += exp(static_cast<double>(top_k.log_probs[entry]));
    largest = Largest(largest, top_k.logits[entry]);
  }
  probability_sum = elements::WarpSum(probability_sum);
  largest = WarpLargest(largest);
  const double rest = 1 - probability_sum < top_k.least_rest_mass ? 0.0 : 1 - probability_sum;
  const double mass = probability_sum + rest;

  double sum = 0;
  for (int64_t entry = first; entry < last; entry += 32) {
    if (top_k.columns[entry] >= 0) sum += exp(top_k.logits[entry] - largest);
  }
  const double others_sum = others.max == -kRowInfinity ? others.sum : others.sum * exp(others.max - largest);
  sum = elements::WarpSum(sum) + others_sum;
  const double lse = largest + log(sum);
  const double rest_factor = others.sum == 0 ? 0.0 : (mass * (others_sum / sum) - rest) / others.sum;

  double loss = 0, bound = fabs(rest_factor);
  for (int64_t entry = first; entry < last; entry += 32) {
    if (top_k.columns[entry] < 0) continue;
    const double log_p = top_k.log_probs[entry], log_q = top_k.logits[entry] - lse;
    loss += Weighted(exp(log_p), log_p - log_q);
    bound = Largest(bound, fabs(mass * exp(log_q) - exp(log_p)));
  }
  loss = elements::WarpSum(loss);
  bound = WarpLargest(bound);
  if (rest > 0) loss += rest * (log(rest) - (LogSumExp(others) - lse));

  const double gradient_factor = GradientFactor(rows, options, row);
  const FactorParts parts = SplitFactor(gradient_factor, bound, options.matrix_element);
  for (int64_t entry = first; entry < last; entry += 32) {
    if (top_k.columns[entry] < 0) continue;
    const double slope = mass * exp(top_k.logits[entry] - lse) - exp(static_cast<double>(top_k.log_probs[entry]));
    top_k.gradient[entry] = parts.scale == 0 ? 0.0f : static_cast<float>(parts.scale * slope);
  }
  if (threadIdx.x % 32 != 0) return;
  RowReport report;
  report.soft = loss;
  report.gradient_bound = gradient_factor == 0 ? 0.0 : fabs(gradient_factor) * bound;
  reports[row] = report;
  RowCoefficients out;
  out.max = others.max == -kRowInfinity ? 0.0 : others.max;
  out.probability_factor = rest_factor;
  out.scale = parts.scale;
  coefficients[row] = out;
  row_factor[row] = parts.row_factor;
  target_factor[row] = 0;
}

}  // namespace

cudaError_t LaunchFinishTopK(const RowStats* stats, int32_t shard_count, const TopKRows& top_k, const ChunkRows& rows,
                             const FinishOptions& options, RowReport* reports, RowCoefficients* coefficients, float* row_factor,
                             float* target_factor, cudaStream_t stream) {
  if (rows.row_count == 0) return cudaSuccess;
  FinishTopKKernel<<<BlocksOf(32 * rows.row_count), kThreads, 0, stream>>>(stats, shard_count, top_k, rows, options, reports,
                                                                           coefficients, row_factor, target_factor);
  return cudaGetLastError();
}

cudaError_t LaunchFinishRows(const RowStats* stats, int32_t shard_count, const double* target_arguments, const ChunkRows& rows,
                             const FinishOptions& options, RowReport* reports, RowCoefficients* coefficients, float* row_factor,
                             float* target_factor, DitherRow* dither, cudaStream_t stream) {
  if (rows.row_count == 0) return cudaSuccess;
  FinishRowsKernel<<<BlocksOf(rows.row_count), kThreads, 0, stream>>>(stats, shard_count, target_arguments, rows, options, reports,
                                                                      coefficients, row_factor, target_factor, dither);
  return cudaGetLastError();
}

cudaError_t LaunchFinishDivergence(const DivergenceSums* sums, int32_t shard_count, const ChunkRows& rows,
                                   const DivergenceTerm& term, const FinishOptions& options, bool has_cross_entropy,
                                   RowReport* reports, RowCoefficients* coefficients, float* row_factor, float* target_factor,
                                   cudaStream_t stream) {
  if (rows.row_count == 0) return cudaSuccess;
  FinishDivergenceKernel<<<BlocksOf(rows.row_count), kThreads, 0, stream>>>(
      sums, shard_count, rows, term, options, has_cross_entropy, reports, coefficients, row_factor, target_factor);
  return cudaGetLastError();
}

}  // namespace headwater::cuda
