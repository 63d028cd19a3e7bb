#include "tests/kernels/cuda/cuda_reference.h"

#include <cuda_runtime_api.h>

#include <numeric>

#include "tests/kernels/cuda/cuda_fp64.h"

namespace headwater::testing {
namespace {

constexpr int64_t kDouble = sizeof(double);

std::vector<double> ReadDoubles(const double* data, int64_t count) {
  std::vector<double> values(static_cast<size_t>(count));
  CopyMemory(values.data(), data, count * kDouble);
  return values;
}

double Mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

template <typename T>
TensorErrors Errors(const T* actual, const double* expected, int64_t rows, int64_t columns) {
  Buffer buffer(BufferKind::kDevice, 2 * (rows + columns) * kDouble);
  CheckCuda(cudaMemset(buffer.as<void>(), 0, static_cast<size_t>(buffer.bytes())), "cudaMemset");
  DifferenceSums sums = {.row_difference = buffer.as<double>()};
  sums.row_reference = sums.row_difference + rows;
  sums.column_difference = sums.row_reference + rows;
  sums.column_reference = sums.column_difference + columns;
  CheckCuda(AddDifference(actual, expected, rows, columns, sums), "AddDifference");
  return ErrorsOfSums({ReadDoubles(sums.row_difference, rows), ReadDoubles(sums.row_reference, rows),
                       ReadDoubles(sums.column_difference, columns), ReadDoubles(sums.column_reference, columns)});
}

}  // namespace

double RowResults::MeanLoss() const { return Mean(loss); }
double RowResults::MeanLargestLogit() const { return Mean(largest_logit); }

DeviceReference::DeviceReference(BlasContext& context, int64_t rows, int64_t width, int64_t vocab, const uint16_t* hidden,
                                 const uint16_t* weight)
    : context_(context),
      rows_(rows),
      width_(width),
      vocab_(vocab),
      hidden_(BufferKind::kDevice, rows * width * kDouble),
      weight_(BufferKind::kDevice, vocab * width * kDouble),
      logits_(BufferKind::kDevice, rows * vocab * kDouble),
      row_values_(BufferKind::kDevice, 5 * rows * kDouble),
      argmax_(BufferKind::kDevice, rows * static_cast<int64_t>(sizeof(int32_t))) {
  CheckCuda(Widen(hidden, hidden_.as<double>(), rows * width), "Widen");
  CheckCuda(Widen(weight, weight_.as<double>(), vocab * width), "Widen");
  BlasProduct(context, {BlasKind::kLogits, BlasTypes::kFloat64, rows, width, vocab}, hidden_.as<void>(), weight_.as<void>(),
              logits_.as<void>())
      .Enqueue(nullptr);
  CheckCuda(cudaDeviceSynchronize(), "logits in fp64");
}

RowResults DeviceReference::CrossEntropy(const int32_t* targets, double loss_scale) {
  if (gradient_.bytes() == 0) gradient_ = Buffer(BufferKind::kDevice, logits_.bytes());
  CopyMemory(gradient_.as<void>(), logits_.as<void>(), logits_.bytes());
  double* values = row_values_.as<double>();
  const RowValues out = {values, values + rows_, values + 2 * rows_, values + 3 * rows_, argmax_.as<int32_t>(), values + 4 * rows_};
  CheckCuda(CrossEntropyRows(gradient_.as<double>(), rows_, vocab_, targets, loss_scale, out), "CrossEntropyRows");
  ComputeGradients();
  RowResults results = {.loss = ReadDoubles(out.loss, rows_),
                        .lse = ReadDoubles(out.lse, rows_),
                        .target_log_probability = ReadDoubles(out.target_log_probability, rows_),
                        .entropy = ReadDoubles(out.entropy, rows_)};
  results.argmax.resize(static_cast<size_t>(rows_));
  CopyMemory(results.argmax.data(), out.argmax, argmax_.bytes());
  results.largest_logit = ReadDoubles(out.largest_other, rows_);
  return results;
}

RowResults DeviceReference::Divergence(const DeviceReference& teacher, double beta, double loss_scale) {
  if (gradient_.bytes() == 0) gradient_ = Buffer(BufferKind::kDevice, logits_.bytes());
  double* values = row_values_.as<double>();
  const RowValues out = {.loss = values, .largest_other = values + rows_};
  CheckCuda(DivergenceRows(logits_.as<double>(), teacher.logits_.as<double>(), gradient_.as<double>(), rows_, vocab_, beta,
                           loss_scale, out),
            "DivergenceRows");
  ComputeGradients();
  return {.loss = ReadDoubles(out.loss, rows_), .largest_logit = ReadDoubles(out.largest_other, rows_)};
}

void DeviceReference::ComputeGradients() {
  if (grad_weight_.bytes() == 0) {
    grad_hidden_ = Buffer(BufferKind::kDevice, hidden_.bytes());
    grad_weight_ = Buffer(BufferKind::kDevice, weight_.bytes());
  }
  BlasProduct(context_, {BlasKind::kGradHidden, BlasTypes::kFloat64, rows_, width_, vocab_}, gradient_.as<void>(),
              weight_.as<void>(), grad_hidden_.as<void>())
      .Enqueue(nullptr);
  BlasProduct(context_, {BlasKind::kGradWeight, BlasTypes::kFloat64, rows_, width_, vocab_}, gradient_.as<void>(),
              hidden_.as<void>(), grad_weight_.as<void>())
      .Enqueue(nullptr);
  CheckCuda(cudaDeviceSynchronize(), "gradients in fp64");
}

TensorErrors DeviceReference::GradHiddenErrors(const uint16_t* actual) const {
  return Errors(actual, grad_hidden_.as<double>(), rows_, width_);
}
TensorErrors DeviceReference::GradWeightErrors(const float* actual) const {
  return Errors(actual, grad_weight_.as<double>(), vocab_, width_);
}
std::vector<double> DeviceReference::ReadLogits(int64_t row) const {
  return ReadDoubles(logits_.as<double>() + row * vocab_, vocab_);
}

}  // namespace headwater::testing
