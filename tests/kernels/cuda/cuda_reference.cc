#include "tests/kernels/cuda/cuda_reference.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <thread>

#include "absl/types/span.h"
#include "kernels/reference/row_losses.h"
#include "tests/kernels/cuda/cuda_fp64.h"
#include "tests/unit/run_threads.h"

namespace headwater::testing {
namespace {

using reference::Real;

constexpr int64_t kDouble = sizeof(double);

std::vector<double> ReadDoubles(const double* data, int64_t count) {
  std::vector<double> values(static_cast<size_t>(count));
  CopyMemory(values.data(), data, count * kDouble);
  return values;
}

// Calls work(row) for each row, on all cores.
void ForEachRow(int64_t rows, const std::function<void(int64_t row)>& work) {
  const int64_t threads = std::max<int64_t>(std::thread::hardware_concurrency(), 1);
  RunThreads(threads, [&](int64_t first) {
    for (int64_t row = first; row < rows; row += threads) work(row);
  });
}

absl::Span<double> RowOf(std::vector<double>& values, int64_t row, int64_t columns) {
  return absl::MakeSpan(values).subspan(static_cast<size_t>(row * columns), static_cast<size_t>(columns));
}

double LargestOf(const std::vector<Real>& z) {
  Real largest = 0;
  for (const Real value : z) largest = std::max(largest, std::abs(value));
  return static_cast<double>(largest);
}

// The gradient of loss_scale times the row's loss, in place of its logits.
void SetRow(const reference::RowLoss& loss, double loss_scale, absl::Span<double> row) {
  for (size_t j = 0; j < row.size(); ++j) row[j] = static_cast<double>(loss_scale * loss.gradient[j]);
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

DeviceReference::DeviceReference(BlasContext& context, int64_t rows, int64_t width, int64_t vocab, const Buffer& hidden,
                                 const Buffer& weight)
    : context_(context),
      rows_(rows),
      width_(width),
      vocab_(vocab),
      hidden_(BufferKind::kDevice, rows * width * kDouble),
      weight_(BufferKind::kDevice, vocab * width * kDouble),
      logits_(BufferKind::kDevice, rows * vocab * kDouble) {
  CheckCuda(Widen(hidden.as<uint16_t>(), hidden_.as<double>(), rows * width), "Widen");
  CheckCuda(Widen(weight.as<uint16_t>(), weight_.as<double>(), vocab * width), "Widen");
  BlasProduct(context, {BlasKind::kLogits, BlasTypes::kFloat64, rows, width, vocab}, hidden_.as<void>(), weight_.as<void>(),
              logits_.as<void>())
      .Enqueue(nullptr);
  CheckCuda(cudaDeviceSynchronize(), "logits in fp64");
}

RowResults DeviceReference::CrossEntropy(const std::vector<int32_t>& targets, double loss_scale) {
  const size_t rows = static_cast<size_t>(rows_);
  RowResults results = {.loss = std::vector<double>(rows),
                        .lse = std::vector<double>(rows),
                        .entropy = std::vector<double>(rows),
                        .argmax = std::vector<int32_t>(rows),
                        .largest_logit = std::vector<double>(rows)};
  std::vector<double> values = ReadDoubles(logits_.as<double>(), rows_ * vocab_);
  ForEachRow(rows_, [&](int64_t row) {
    const size_t i = static_cast<size_t>(row);
    const absl::Span<double> of_row = RowOf(values, row, vocab_);
    std::vector<Real> z(of_row.begin(), of_row.end());
    const reference::RowLoss loss = reference::CrossEntropyRow(z, targets[i], {});
    results.loss[i] = static_cast<double>(loss.hard);
    results.lse[i] = static_cast<double>(reference::LogSumExp(z));
    results.entropy[i] = static_cast<double>(reference::Entropy(z));
    results.argmax[i] = static_cast<int32_t>(std::max_element(z.begin(), z.end()) - z.begin());
    z[static_cast<size_t>(targets[i])] = 0;
    results.largest_logit[i] = LargestOf(z);
    SetRow(loss, loss_scale, of_row);
  });
  ComputeGradients(values);
  return results;
}

RowResults DeviceReference::Divergence(const DeviceReference& teacher, double beta, double loss_scale) {
  const size_t rows = static_cast<size_t>(rows_);
  RowResults results = {.loss = std::vector<double>(rows), .largest_logit = std::vector<double>(rows)};
  std::vector<double> values = ReadDoubles(logits_.as<double>(), rows_ * vocab_);
  std::vector<double> teacher_values = ReadDoubles(teacher.logits_.as<double>(), rows_ * vocab_);
  ForEachRow(rows_, [&](int64_t row) {
    const size_t i = static_cast<size_t>(row);
    const absl::Span<double> of_row = RowOf(values, row, vocab_), of_teacher = RowOf(teacher_values, row, vocab_);
    const std::vector<Real> z(of_row.begin(), of_row.end()), t(of_teacher.begin(), of_teacher.end());
    const reference::RowLoss loss = reference::JsdRow(z, t, /*target=*/0, {.beta = beta});
    results.loss[i] = static_cast<double>(loss.soft);
    results.largest_logit[i] = std::max(LargestOf(z), LargestOf(t));
    SetRow(loss, loss_scale, of_row);
  });
  ComputeGradients(values);
  return results;
}

void DeviceReference::ComputeGradients(const std::vector<double>& gradient) {
  if (grad_weight_.bytes() == 0) {
    grad_hidden_ = Buffer(BufferKind::kDevice, hidden_.bytes());
    grad_weight_ = Buffer(BufferKind::kDevice, weight_.bytes());
  }
  const Buffer of_logits(BufferKind::kDevice, logits_.bytes());
  CopyMemory(of_logits.as<void>(), gradient.data(), of_logits.bytes());
  BlasProduct(context_, {BlasKind::kGradHidden, BlasTypes::kFloat64, rows_, width_, vocab_}, of_logits.as<void>(),
              weight_.as<void>(), grad_hidden_.as<void>())
      .Enqueue(nullptr);
  BlasProduct(context_, {BlasKind::kGradWeight, BlasTypes::kFloat64, rows_, width_, vocab_}, of_logits.as<void>(),
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
