// 009: the divergence's row pass of the product (kernels/cuda/rows/divergence_rows.cu), and the passes of a rank that has some of a
// row's columns (divergence_shards.cu, all ranks' here on one GPU), against fp64 on the CPU, over every beta, hard rows, options
// and edges; then their times against the device's copy of as many bytes, and those of the passes for any GPU.
// Run: 009_divergence_rows [check | time | once | shards]
// Links: kernels/cuda/rows/divergence_rows.cu kernels/cuda/rows/divergence_params.cu kernels/cuda/rows/divergence_shards.cu
// Links: kernels/cuda/rows/divergence.cu kernels/cuda/rows/row_distribution.cu kernels/cuda/rows/row_statistics.cu
// Links: kernels/cuda/rows/row_gradient.cu kernels/cuda/rows/finish_rows.cu

#include <cuda_fp16.h>

#include <cstring>

#include "bench.cuh"
#include "kernels/cuda/rows/divergence_shards.h"
#include "kernels/cuda/rows/row_passes.h"

namespace {

using headwater::cuda::DivergenceTerm;
using headwater::cuda::Element;
using headwater::cuda::LogitsView;
using headwater::cuda::RoundUp;
using headwater::cuda::RowReport;
using headwater::lab::Check;
using headwater::lab::DeviceArray;
using headwater::lab::NormalAt;

enum class Rows { kFlat, kWide, kDistilled, kSimilar, kDisjoint, kConfident, kConfidentElsewhere };
const char* const kNames[] = {"flat", "std 30", "distilled", "similar", "disjoint", "confident", "confident elsewhere"};

struct Case {
  Rows kind = Rows::kFlat;
  int64_t rows = 33;
  int64_t vocab = 1000;
  double beta = 0.5;
  Element matrix = Element::kBFloat16;
  int64_t extra_student = 0, extra_teacher = 0;  // columns beyond the common ones
  int64_t extra_stride = 0;
  double student_temperature = 1, teacher_temperature = 1;
  double student_scale = 1, teacher_scale = 1;
  double student_cap = 0, teacher_cap = 0;
  bool bias = false;
  int32_t shards = 0;  // 0: the pass over a whole row
};

// Products; columns from `columns` to `stride` keep the array's poison.
__global__ void FillProductsKernel(float* out, int64_t rows, int64_t columns, int64_t stride, Rows kind, bool teacher, float unit) {
  for (int64_t index = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; index < rows * columns;
       index += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t row = index / columns, column = index % columns;
    const auto at = static_cast<uint64_t>(row * 1000003 + column);
    const float own = NormalAt(teacher ? 21 : 22, at), shared = NormalAt(23, at);
    float z = own;
    if (kind == Rows::kWide) z = 30.0f * own;
    if (kind == Rows::kDistilled) z = 3.0f * shared + (teacher ? 0.0f : 0.03f * own);
    if (kind == Rows::kSimilar) z = 3.0f * shared + (teacher ? 0.0f : 0.35f * own);
    if (kind == Rows::kDisjoint) z = 10.0f * own;
    if (kind == Rows::kConfident || kind == Rows::kConfidentElsewhere) {
      const int64_t top = (row * 7919 + (kind == Rows::kConfidentElsewhere && teacher ? 77 : 0)) % columns;
      if (column == top) z += 18.0f + static_cast<float>(row % 8);
    }
    out[row * stride + column] = z * unit;
  }
}

void Fill(const DeviceArray<float>& out, int64_t rows, int64_t columns, int64_t stride, Rows kind, bool teacher, double unit) {
  FillProductsKernel<<<1056, 256>>>(out.get(), rows, columns, stride, kind, teacher, static_cast<float>(unit));
  LAB_CUDA(cudaGetLastError());
}

double LogitOf(double product, double bias, double scale, double cap) {
  const double a = scale * (product + bias);
  return cap == 0 ? a : cap * std::tanh(a / cap);
}

double MatrixValue(uint16_t bits, Element element) {
  if (element == Element::kFloat16) {
    __half_raw raw;
    raw.x = bits;
    return static_cast<double>(__half2float(__half(raw)));
  }
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value = 0.0f;
  std::memcpy(&value, &wide, sizeof(value));
  return static_cast<double>(value);
}

// `value` as M's element holds it, rounded once.
double Rounded(double value, Element element) {
  const float single = static_cast<float>(value);  // its own rounding is 2^-16 of bf16's
  if (element == Element::kFloat16) return static_cast<double>(__half2float(__float2half_rn(single)));
  return static_cast<double>(__bfloat162float(__float2bfloat16_rn(single)));
}

// The first column of a shard, of `columns`: uneven, multiples of 8; the last one's end for shard `shards`.
int64_t ShardStart(int64_t columns, int32_t shards, int32_t shard) {
  if (shard == shards) return columns;
  return columns * shard * (shard + 1) / (shards * (shards + 1)) / 8 * 8;
}

LogitsView ShardOf(LogitsView view, int64_t start, int64_t end) {
  view.products = static_cast<const float*>(view.products) + start;
  view.columns = std::max<int64_t>(std::min(view.columns, end) - start, 0);
  view.vocab_start = start;
  return view;
}

// One of the two ways to M in place and the reports.
struct Passes {
  LogitsView student, teacher;
  headwater::cuda::ChunkRows rows;
  DivergenceTerm term;
  double loss_scale = 1;
  Element matrix = Element::kBFloat16;
  int32_t shards = 0;

  bool Fit() const { return shards > 0 || DivergenceRowsFit(student, teacher, term, matrix); }
  cudaError_t Run(bool want_gradient, RowReport* reports, float* row_factor, float* target_factor) const {
    if (shards == 0) {
      return LaunchDivergenceRows(student, teacher, rows, term, loss_scale,
                                  headwater::cuda::InPlaceMatrix(student, rows.row_count, matrix), want_gradient, reports,
                                  row_factor, target_factor, nullptr);
    }
    const int64_t count = rows.row_count;
    const DeviceArray<headwater::cuda::ShardSides> sides(count * shards);
    const DeviceArray<headwater::cuda::ShardSums> sums(count * shards);
    const DeviceArray<headwater::cuda::ShardRow> shard_rows(count);
    const auto for_each = [&](const auto& launch) {
      for (int32_t shard = 0; shard < shards; ++shard) {
        const int64_t start = ShardStart(student.columns, shards, shard), end = ShardStart(student.columns, shards, shard + 1);
        LAB_CUDA(launch(ShardOf(student, start, end), ShardOf(teacher, start, end), shard * count));
      }
    };
    for_each([&](const LogitsView& s, const LogitsView& t, int64_t place) {
      return LaunchShardSides(s, t, count, term, sides.get() + place, nullptr);
    });
    LAB_CUDA(LaunchFinishShardSides(sides.get(), shards, student, teacher, count, term, shard_rows.get(), nullptr));
    for_each([&](const LogitsView& s, const LogitsView& t, int64_t place) {
      return LaunchShardSums(s, t, count, term, matrix, shard_rows.get(), sums.get() + place, nullptr);
    });
    LAB_CUDA(LaunchFinishShardSums(sums.get(), shards, student, teacher, rows, term, loss_scale, matrix, want_gradient,
                                   shard_rows.get(), reports, row_factor, target_factor, nullptr));
    if (want_gradient) {
      for_each([&](const LogitsView& s, const LogitsView& t, int64_t) {
        return LaunchShardGradient(s, t, count, term, shard_rows.get(), headwater::cuda::InPlaceMatrix(s, count, matrix), nullptr);
      });
    }
    return cudaDeviceSynchronize();  // before the arrays go
  }
  // Where an entry of M is, in 16-bit elements from the first product on.
  int64_t PlaceInMatrix(int64_t row, int64_t column) const {
    int64_t start = 0;
    for (int32_t shard = 0; shard < shards; ++shard) {
      if (const int64_t next = ShardStart(student.columns, shards, shard); next <= column) start = next;
    }
    return row * 2 * student.stride + 2 * start + column - start;
  }
};

// log1p and expm1 throughout: exact to fp64's digits near and far.
void Reference(const Case& c, const std::vector<double>& student, const std::vector<double>& teacher, double* loss,
               std::vector<double>* grad) {
  const size_t n = student.size();
  const auto lse = [](const std::vector<double>& z, double temperature) {
    double top = -INFINITY, sum = 0;
    for (const double v : z) top = std::max(top, v / temperature);
    for (const double v : z) sum += std::exp(v / temperature - top);
    return top + std::log(sum);
  };
  const double lse_q = lse(student, c.student_temperature), lse_p = lse(teacher, c.teacher_temperature);
  const double beta = c.beta;
  std::vector<double> q(n), slope(n);
  size_t top = 0;
  *loss = 0;
  for (size_t j = 0; j < n; ++j) {
    const double log_q = student[j] / c.student_temperature - lse_q, log_p = teacher[j] / c.teacher_temperature - lse_p;
    const double d = log_p - log_q, p = std::exp(log_p);
    q[j] = std::exp(log_q);
    if (q[j] > q[top]) top = j;
    if (beta == 0) {
      slope[j] = d > 0 ? p * std::expm1(-d) : -q[j] * std::expm1(d);  // q - p
      *loss += p * d + slope[j];
    } else if (beta == 1) {
      slope[j] = -d;
      *loss += -q[j] * d + (d > 0 ? p * -std::expm1(-d) : q[j] * std::expm1(d));
    } else {
      const double r = d > 0 ? -d - std::log1p((1 - beta) * std::expm1(-d)) : -std::log1p(beta * std::expm1(d));
      slope[j] = r;
      *loss += beta * p * (r + d) + (1 - beta) * q[j] * r;
    }
  }
  // The top column's entry is what the others leave.
  const double reference = beta == 0 ? 0 : slope[top];
  double mean = 0;
  for (size_t j = 0; j < n; ++j) {
    if (j != top) mean += beta == 0 ? slope[j] : q[j] * (slope[j] - reference);
  }
  for (size_t j = 0; j < n; ++j) (*grad)[j] = beta == 0 ? slope[j] : q[j] * (slope[j] - reference - mean);
  (*grad)[top] = beta == 0 ? -mean : -q[top] * mean;
  const double factor = (beta > 0 && beta < 1 ? 1 - beta : 1) / c.student_temperature;
  for (size_t j = 0; j < n; ++j) {
    const double z = student[j];
    (*grad)[j] *= factor * c.student_scale * (c.student_cap == 0 ? 1 : 1 - z / c.student_cap * (z / c.student_cap));
  }
}

void CheckCase(const Case& c) {
  const int64_t student_columns = c.vocab + c.extra_student, teacher_columns = c.vocab + c.extra_teacher;
  const int64_t student_stride = RoundUp(student_columns, 8) + c.extra_stride,
                teacher_stride = RoundUp(teacher_columns, 4) + c.extra_stride;
  DeviceArray<float> student(c.rows * student_stride), teacher(c.rows * teacher_stride);
  Fill(student, c.rows, student_columns, student_stride, c.kind, false, c.student_temperature / c.student_scale);
  Fill(teacher, c.rows, teacher_columns, teacher_stride, c.kind, true, c.teacher_temperature / c.teacher_scale);
  std::vector<float> bias_values, token_weights;
  for (int64_t j = 0; j < c.vocab + c.extra_student + c.extra_teacher; ++j) {
    bias_values.push_back(c.bias ? 0.25f * static_cast<float>(j % 5) : 0.0f);
  }
  for (int64_t i = 0; i < c.rows; ++i) token_weights.push_back(i % 11 == 5 ? 0.0f : 0.3f + 0.1f * static_cast<float>(i % 7));
  const DeviceArray<float> bias(bias_values), device_weights(token_weights);
  const std::vector<float> student_values = student.ToHost(), teacher_values = teacher.ToHost();

  LogitsView student_view, teacher_view;
  student_view.products = student.get();
  student_view.stride = student_stride;
  student_view.columns = student_columns;
  student_view.bias = c.bias ? bias.get() : nullptr;
  student_view.transform = {c.student_scale, c.student_cap};
  teacher_view.products = teacher.get();
  teacher_view.stride = teacher_stride;
  teacher_view.columns = teacher_columns;
  teacher_view.transform = {c.teacher_scale, c.teacher_cap};
  DivergenceTerm term;
  term.beta = c.beta;
  term.student_temperature = c.student_temperature;
  term.teacher_temperature = c.teacher_temperature;
  term.soft_weight = 0.75;
  term.common_columns = c.vocab;
  char name[160];
  std::snprintf(name, sizeof(name), "%s V%d beta %.1f%s%s%s%s: ", kNames[static_cast<int>(c.kind)], static_cast<int>(c.vocab),
                c.beta, c.matrix == Element::kFloat16 ? " fp16" : "", c.student_temperature != 1 ? " tempered" : "",
                c.student_cap != 0 ? " capped" : "", c.bias ? " bias" : "");
  const std::string what = c.shards == 0 ? name : std::to_string(c.shards) + " shards, " + name;
  headwater::cuda::ChunkRows rows;
  rows.row_count = c.rows;
  rows.token_weights = device_weights.get();
  const DeviceArray<RowReport> reports(c.rows), forward_reports(c.rows);
  const DeviceArray<float> row_factor(c.rows), target_factor(c.rows);
  const double loss_scale = 8;
  const Passes passes = {student_view, teacher_view, rows, term, loss_scale, c.matrix, c.shards};
  if (!passes.Fit()) {
    Check(what + "fits", 1, 0);
    return;
  }
  LAB_CUDA(passes.Run(false, forward_reports.get(), nullptr, nullptr));
  LAB_CUDA(passes.Run(true, reports.get(), row_factor.get(), target_factor.get()));
  LAB_CUDA(cudaDeviceSynchronize());
  const std::vector<float> matrix_bits = student.ToHost(), factors = row_factor.ToHost(), target_factors = target_factor.ToHost();
  const std::vector<RowReport> report = reports.ToHost(), forward_report = forward_reports.ToHost();
  const auto* matrix = reinterpret_cast<const uint16_t*>(matrix_bits.data());

  // Once more from the same products: the same bits, in reports too.
  LAB_CUDA(cudaMemcpy(student.get(), student_values.data(), student.bytes(), cudaMemcpyHostToDevice));
  LAB_CUDA(passes.Run(true, reports.get(), row_factor.get(), target_factor.get()));
  LAB_CUDA(cudaDeviceSynchronize());
  const std::vector<float> again = student.ToHost();
  const std::vector<RowReport> report_again = reports.ToHost();
  bool repeats = std::memcmp(again.data(), matrix_bits.data(), student.bytes()) == 0;

  double loss_error = 0, difference = 0, rounding_difference = 0, excess = 0, norm = 0, worst_row = 0, largest_row = 0, outside = 0,
         bound_excess = 0;
  std::vector<std::pair<double, double>> row_norms;  // of the difference, of the reference
  const std::vector<int64_t> chosen = c.rows > 8 && c.vocab > 5000 ? std::vector<int64_t>{0, 3, c.rows / 2, c.rows - 1} : [&] {
    std::vector<int64_t> all;
    for (int64_t i = 0; i < c.rows; ++i) all.push_back(i);
    return all;
  }();
  for (int64_t i = 0; i < c.rows; ++i) {
    repeats = repeats && report[i].soft == report_again[i].soft && report[i].soft == forward_report[i].soft;
    for (int64_t j = c.vocab; j < RoundUp(student_columns, 8); ++j) {
      outside += std::fabs(MatrixValue(matrix[passes.PlaceInMatrix(i, j)], c.matrix)) == 0 ? 0 : 1;
    }
    outside += target_factors[i] == 0.0f ? 0 : 1;
  }
  for (const int64_t i : chosen) {
    std::vector<double> s(static_cast<size_t>(c.vocab)), t(s.size()), grad(s.size());
    for (int64_t j = 0; j < c.vocab; ++j) {
      const double b = c.bias ? static_cast<double>(bias_values[j]) : 0;
      s[j] = LogitOf(static_cast<double>(student_values[i * student_stride + j]), b, c.student_scale, c.student_cap);
      t[j] = LogitOf(static_cast<double>(teacher_values[i * teacher_stride + j]), 0, c.teacher_scale, c.teacher_cap);
    }
    double loss = 0;
    Reference(c, s, t, &loss, &grad);
    loss_error = std::max(loss_error, std::fabs(report[i].soft - loss) / (loss + 1e-5));
    if (!(std::fabs(report[i].soft) < INFINITY)) loss_error = NAN;
    double row_difference = 0, row_norm = 0;
    const double factor = loss_scale * term.soft_weight * static_cast<double>(token_weights[i]);
    for (int64_t j = 0; j < c.vocab; ++j) {
      const double expected = factor * grad[j];
      const double got = static_cast<double>(factors[i]) * MatrixValue(matrix[passes.PlaceInMatrix(i, j)], c.matrix);
      row_difference += (got - expected) * (got - expected);
      row_norm += expected * expected;
      bound_excess = std::max(bound_excess, std::fabs(expected) - report[i].gradient_bound * (1 + 1e-6));
      if (factors[i] == 0.0f) continue;
      const double best = static_cast<double>(factors[i]) * Rounded(expected / static_cast<double>(factors[i]), c.matrix);
      rounding_difference += (best - expected) * (best - expected);
      excess += (got - best) * (got - best);
    }
    difference += row_difference;
    norm += row_norm;
    row_norms.emplace_back(std::sqrt(row_difference), std::sqrt(row_norm));
    largest_row = std::max(largest_row, std::sqrt(row_norm));
  }
  for (const auto& [error, size] : row_norms) worst_row = std::max(worst_row, error / std::max(size, 1e-3 * largest_row));
  // M's rounding alone; where a row's gradient stands on a few columns, as much as it happens to be there.
  const double unavoidable = std::sqrt(rounding_difference / norm);
  const double rounding = c.matrix == Element::kFloat16 ? 4e-4 : 2.2e-3;
  // Over a few columns roundings do not average out.
  Check(what + "losses", loss_error,
        c.vocab >= 1000 && (c.kind == Rows::kFlat || c.kind == Rows::kSimilar || c.kind == Rows::kDisjoint) ? 1e-5 : 1e-4);
  Check(what + "gradient", std::sqrt(difference / norm), std::max(unavoidable * 1.05, rounding));
  std::printf("    M's rounding alone %.3e, distance to the exact M rounded %.3e\n", unavoidable, std::sqrt(excess / norm));
  double not_powers = 0;
  for (const float factor : factors) {
    int exponent = 0;
    not_powers += factor == 0.0f || std::frexp(factor, &exponent) == 0.5f ? 0 : 1;
  }
  // A row of which one column has most may take another (device/exact_entries.cuh).
  if (c.kind == Rows::kFlat && c.vocab >= 1000 && !(not_powers == 0))
    Check(what + "factors that are no powers of two", not_powers, 0);
  Check(what + "worst row", worst_row, 10 * rounding);
  if (!(outside == 0)) Check(what + "columns that M does not have, factors of targets", outside, 0);
  // beta = 1: q (log q - log p) has no bound, and the report's is the size that a gradient has there.
  if (c.beta < 1 && !(bound_excess <= 0)) Check(what + "bound of the gradient", bound_excess, 0);
  if (!repeats) Check(what + "repeats bit by bit, with and without gradient", 1, 0);
}

// A product that is not finite makes its row's loss NaN or infinite, and nobody else's.
void CheckNotFinite(float value, bool in_teacher, double beta, int32_t shards) {
  const int64_t rows = 40, vocab = 33000;
  DeviceArray<float> student(rows * vocab), teacher(rows * vocab);
  Fill(student, rows, vocab, vocab, Rows::kFlat, false, 1);
  Fill(teacher, rows, vocab, vocab, Rows::kFlat, true, 1);
  float* const hit = (in_teacher ? teacher.get() : student.get()) + 17 * vocab + 20001;
  LAB_CUDA(cudaMemcpy(hit, &value, sizeof(value), cudaMemcpyHostToDevice));
  LogitsView views[2];
  for (int side = 0; side < 2; ++side) {
    views[side].products = side == 0 ? student.get() : teacher.get();
    views[side].stride = views[side].columns = vocab;
  }
  DivergenceTerm term;
  term.beta = beta;
  term.common_columns = vocab;
  headwater::cuda::ChunkRows chunk;
  chunk.row_count = rows;
  const DeviceArray<RowReport> reports(rows);
  const DeviceArray<float> row_factor(rows), target_factor(rows);
  const Passes passes = {views[0], views[1], chunk, term, 1, Element::kBFloat16, shards};
  LAB_CUDA(passes.Run(true, reports.get(), row_factor.get(), target_factor.get()));
  LAB_CUDA(cudaDeviceSynchronize());
  const std::vector<RowReport> report = reports.ToHost();
  double wrong = 0;
  for (int64_t i = 0; i < rows; ++i) wrong += (std::fabs(report[i].soft) < INFINITY) == (i != 17) ? 0 : 1;
  Check(std::string("a product ") + std::to_string(value) + (in_teacher ? " of the teacher" : " of the student") + ", beta " +
            std::to_string(beta) + (shards == 0 ? "" : ", shards"),
        wrong, 0);
}

void CheckAll(int32_t shards) {
  for (const int64_t vocab : {1000, 4104, 32000, 128256}) {
    for (const Rows kind : {Rows::kFlat, Rows::kWide, Rows::kDistilled, Rows::kSimilar, Rows::kDisjoint, Rows::kConfident,
                            Rows::kConfidentElsewhere}) {
      for (const double beta : {0.0, 0.1, 0.5, 0.9, 1.0}) {
        Case c;
        c.shards = shards;
        c.kind = kind;
        c.vocab = vocab;
        c.beta = beta;
        CheckCase(c);
      }
    }
  }
  for (const double beta : {0.0, 0.3, 1.0}) {
    Case c;
    c.shards = shards;
    c.beta = beta;
    c.vocab = 9999;
    c.rows = 150;
    c.extra_student = 13;
    c.extra_teacher = 2;
    c.extra_stride = 16;
    c.student_temperature = 2;
    c.teacher_temperature = 0.7;
    CheckCase(c);
    c.matrix = Element::kFloat16;
    c.kind = Rows::kDistilled;
    CheckCase(c);
    c.kind = Rows::kConfidentElsewhere;
    CheckCase(c);
    c.student_scale = -0.5;
    CheckCase(c);
    if (shards > 0) continue;
    c.bias = true;
    c.student_cap = 30;
    c.teacher_cap = 50;
    CheckCase(c);
    c.matrix = Element::kBFloat16;
    CheckCase(c);
  }
  for (const int64_t vocab : {5, 16385, 200000, 262144}) {
    Case c;
    c.shards = shards;
    c.vocab = vocab;
    CheckCase(c);
  }
  for (const double beta : {0.0, 0.5, 1.0}) {
    for (const bool in_teacher : {false, true}) {
      CheckNotFinite(NAN, in_teacher, beta, shards);
      CheckNotFinite(INFINITY, in_teacher, beta, shards);
    }
  }
}

// Median time of `pass` alone; the products are put back before each.
void Time(const char* name, int64_t rows, int64_t vocab, Rows kind, double beta) {
  const DeviceArray<float> products(rows * vocab), student(rows * vocab), teacher(rows * vocab);
  Fill(products, rows, vocab, vocab, kind, false, 1);
  Fill(teacher, rows, vocab, vocab, kind, true, 1);
  const DeviceArray<RowReport> reports(rows);
  const DeviceArray<float> row_factor(rows), target_factor(rows);
  LogitsView views[2];
  for (int side = 0; side < 2; ++side) {
    views[side].products = side == 0 ? student.get() : teacher.get();
    views[side].stride = views[side].columns = vocab;
  }
  DivergenceTerm term;
  term.beta = beta;
  term.common_columns = vocab;
  headwater::cuda::ChunkRows chunk;
  chunk.row_count = rows;
  if (!DivergenceRowsFit(views[0], views[1], term, Element::kBFloat16)) {
    std::printf("%-32s does not fit\n", name);
    return;
  }
  const double elements = static_cast<double>(rows) * static_cast<double>(vocab);
  cudaEvent_t start, stop;
  LAB_CUDA(cudaEventCreate(&start));
  LAB_CUDA(cudaEventCreate(&stop));
  const auto median = [&](bool copy) {
    std::vector<double> times;
    for (int i = 0; i < 60; ++i) {
      LAB_CUDA(cudaMemcpyAsync(student.get(), products.get(), student.bytes(), cudaMemcpyDeviceToDevice, nullptr));
      LAB_CUDA(cudaEventRecord(start, nullptr));
      if (copy) {  // 5 bytes a column in, 5 out
        LAB_CUDA(cudaMemcpyAsync(student.get(), teacher.get(), student.bytes(), cudaMemcpyDeviceToDevice, nullptr));
        LAB_CUDA(cudaMemcpyAsync(student.get(), products.get(), student.bytes() / 4, cudaMemcpyDeviceToDevice, nullptr));
      } else {
        LAB_CUDA(LaunchDivergenceRows(views[0], views[1], chunk, term, 1,
                                      headwater::cuda::InPlaceMatrix(views[0], rows, Element::kBFloat16), true, reports.get(),
                                      row_factor.get(), target_factor.get(), nullptr));
      }
      LAB_CUDA(cudaEventRecord(stop, nullptr));
      LAB_CUDA(cudaEventSynchronize(stop));
      float ms = 0;
      LAB_CUDA(cudaEventElapsedTime(&ms, start, stop));
      times.push_back(static_cast<double>(ms));
    }
    return headwater::lab::Median(times);
  };
  const double pass = median(false), copy = median(true);
  std::printf("%-32s %8.3f ms   %5.2f TB/s   copy of as many bytes %8.3f ms   ratio %.3f\n", name, pass, 10e-9 * elements / pass,
              copy, pass / copy);
  std::fflush(stdout);
  LAB_CUDA(cudaEventDestroy(start));
  LAB_CUDA(cudaEventDestroy(stop));
}

// Each pass of one of `ranks` ranks alone, and those that any GPU can do.
void TimeShard(int32_t ranks, Rows kind, double beta) {
  const int64_t rows = 4096, columns = RoundUp(128256 / ranks, 8);
  const DeviceArray<float> products(rows * columns), student(rows * columns), teacher(rows * columns);
  Fill(products, rows, columns, columns, kind, false, 1);
  Fill(teacher, rows, columns, columns, kind, true, 1);
  LogitsView views[2];
  for (int side = 0; side < 2; ++side) {
    views[side].products = side == 0 ? student.get() : teacher.get();
    views[side].stride = views[side].columns = columns;
  }
  DivergenceTerm term;
  term.beta = beta;
  term.common_columns = columns;
  headwater::cuda::ChunkRows chunk;
  chunk.row_count = rows;
  const DeviceArray<RowReport> reports(rows);
  const DeviceArray<float> row_factor(rows), target_factor(rows);
  const DeviceArray<headwater::cuda::ShardSides> sides(rows);
  const DeviceArray<headwater::cuda::ShardSums> sums(rows);
  const DeviceArray<headwater::cuda::ShardRow> shard_rows(rows);
  const DeviceArray<headwater::cuda::SoftStats> soft_student(rows), soft_teacher(rows);
  const DeviceArray<headwater::cuda::DivergenceSums> divergence_sums(rows);
  DeviceArray<headwater::cuda::RowCoefficients> coefficients(rows);
  coefficients.Zero();
  const headwater::cuda::MutableMatrix matrix = headwater::cuda::InPlaceMatrix(views[0], rows, Element::kBFloat16);
  headwater::cuda::FinishOptions options;
  options.divergence_follows = true;
  cudaEvent_t start, stop;
  LAB_CUDA(cudaEventCreate(&start));
  LAB_CUDA(cudaEventCreate(&stop));
  const auto median = [&](const auto& launch) {
    std::vector<double> times;
    for (int i = 0; i < 30; ++i) {
      LAB_CUDA(cudaMemcpyAsync(student.get(), products.get(), student.bytes(), cudaMemcpyDeviceToDevice, nullptr));
      LAB_CUDA(cudaEventRecord(start, nullptr));
      LAB_CUDA(launch());
      LAB_CUDA(cudaEventRecord(stop, nullptr));
      LAB_CUDA(cudaEventSynchronize(stop));
      float ms = 0;
      LAB_CUDA(cudaEventElapsedTime(&ms, start, stop));
      times.push_back(static_cast<double>(ms));
    }
    return headwater::lab::Median(times);
  };
  const double own[5] = {
      median([&] { return LaunchShardSides(views[0], views[1], rows, term, sides.get(), nullptr); }),
      median([&] { return LaunchFinishShardSides(sides.get(), 1, views[0], views[1], rows, term, shard_rows.get(), nullptr); }),
      median(
          [&] { return LaunchShardSums(views[0], views[1], rows, term, matrix.element, shard_rows.get(), sums.get(), nullptr); }),
      median([&] {
        return LaunchFinishShardSums(sums.get(), 1, views[0], views[1], chunk, term, 1, matrix.element, true, shard_rows.get(),
                                     reports.get(), row_factor.get(), target_factor.get(), nullptr);
      }),
      median([&] { return LaunchShardGradient(views[0], views[1], rows, term, shard_rows.get(), matrix, nullptr); })};
  const double any[5] = {
      median([&] { return LaunchSoftStats(views[0], views[1], rows, term, soft_student.get(), soft_teacher.get(), nullptr); }),
      median([&] { return LaunchFinishSoftStats(soft_student.get(), soft_teacher.get(), 1, rows, coefficients.get(), nullptr); }),
      median(
          [&] { return LaunchDivergenceSums(views[0], views[1], rows, term, coefficients.get(), divergence_sums.get(), nullptr); }),
      median([&] {
        return LaunchFinishDivergence(divergence_sums.get(), 1, chunk, term, options, false, reports.get(), coefficients.get(),
                                      row_factor.get(), target_factor.get(), nullptr);
      }),
      median([&] {
        return LaunchDivergenceGradient(views[0], views[1], chunk, term, options.cross_entropy, coefficients.get(), matrix,
                                        nullptr);
      })};
  const double bytes = 26.0 * static_cast<double>(rows) * static_cast<double>(columns);
  const auto print = [&](const char* which, const double(&ms)[5]) {
    const double sum = ms[0] + ms[1] + ms[2] + ms[3] + ms[4];
    std::printf(
        "rank of %d, N4096, %s, beta %.1f, %s: sides %.3f finish %.3f sums %.3f finish %.3f gradient %.3f, all %.3f ms, %.2f "
        "TB/s\n",
        ranks, kNames[static_cast<int>(kind)], beta, which, ms[0], ms[1], ms[2], ms[3], ms[4], sum, 1e-9 * bytes / sum);
  };
  print("own", own);
  print("for any GPU", any);
  std::fflush(stdout);
  LAB_CUDA(cudaEventDestroy(start));
  LAB_CUDA(cudaEventDestroy(stop));
}

void TimeShards() {
  for (const int32_t ranks : {2, 4, 8}) TimeShard(ranks, Rows::kFlat, 0.5);
  for (const Rows kind : {Rows::kDistilled, Rows::kConfident}) TimeShard(4, kind, 0.5);
  for (const double beta : {0.0, 1.0}) TimeShard(4, Rows::kFlat, beta);
}

}  // namespace

int main(int argc, char** argv) {
  headwater::lab::PrintDevice("009_divergence_rows");
  if (argc >= 2 && std::string(argv[1]) == "once") {
    Time("N4096 V128256 beta 0.5 flat", 4096, 128256, Rows::kFlat, 0.5);
    return 0;
  }
  if (argc >= 2 && std::string(argv[1]) == "shards") {
    CheckAll(4);
    TimeShards();
    return headwater::lab::AnyCheckFailed() ? 1 : 0;
  }
  const std::string only = argc < 2 ? "" : argv[1];
  for (const int32_t shards : {0, 2, 4}) {
    if (only != "time") CheckAll(shards);
  }
  if (only != "check") {
    Time("N4096 V128256 beta 0.5 flat", 4096, 128256, Rows::kFlat, 0.5);
    Time("N4096 V128256 beta 0.5 distilled", 4096, 128256, Rows::kDistilled, 0.5);
    Time("N4096 V128256 beta 0.5 similar", 4096, 128256, Rows::kSimilar, 0.5);
    Time("N4096 V128256 beta 0.5 confident", 4096, 128256, Rows::kConfident, 0.5);
    Time("N4096 V128256 beta 0", 4096, 128256, Rows::kFlat, 0);
    Time("N4096 V128256 beta 1", 4096, 128256, Rows::kFlat, 1);
    Time("N8192 V32000 beta 0.5", 8192, 32000, Rows::kFlat, 0.5);
    Time("N4096 V151936 beta 0.5", 4096, 151936, Rows::kFlat, 0.5);
    Time("N2048 V256000 beta 0.5", 2048, 256000, Rows::kFlat, 0.5);
    TimeShards();
  }
  return headwater::lab::AnyCheckFailed() ? 1 : 0;
}
