// The reference results of a micro-batch: every sum, per-token output and gradient, in fp64, from the definitions.
//
// Shapes and meanings are those of LossTerm and MicroBatch in engine.h. Inputs are the exact values of an engine's inputs: for bf16
// and fp16 the rounded ones (storage.h). Nothing is checked: inputs must be valid.
#ifndef HEADWATER_KERNELS_REFERENCE_LOSS_REFERENCE_H_
#define HEADWATER_KERNELS_REFERENCE_LOSS_REFERENCE_H_

#include <cstdint>
#include <map>
#include <utility>
#include <variant>
#include <vector>

#include "absl/types/span.h"
#include "headwater/kernels/engine.h"
#include "kernels/reference/row_losses.h"

namespace headwater::reference {

// Row-major.
struct Matrix {
  Matrix() = default;
  Matrix(int64_t row_count, int64_t column_count)
      : rows(row_count), columns(column_count), data(static_cast<size_t>(row_count * column_count)) {}
  Matrix(int64_t row_count, int64_t column_count, std::vector<double> values)
      : rows(row_count), columns(column_count), data(std::move(values)) {}
  double& at(int64_t row, int64_t column) { return data[static_cast<size_t>(row * columns + column)]; }
  double at(int64_t row, int64_t column) const { return data[static_cast<size_t>(row * columns + column)]; }
  absl::Span<const double> row(int64_t index) const {
    return absl::MakeConstSpan(data).subspan(static_cast<size_t>(index * columns), static_cast<size_t>(columns));
  }

  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<double> data;
};

struct Head {
  Matrix weight;             // [vocab_size, hidden_size]; padding rows may hold anything
  std::vector<double> bias;  // [vocab_size] or empty
  LogitTransform transform;
  bool trainable = true;
};

struct Term {
  const Head* head = nullptr;
  int64_t row_start = 0;
  int64_t row_count = 0;
  std::vector<int32_t> targets;  // [row_count], or empty for JSD and top-k
  int32_t ignore_index = kDefaultIgnoreIndex;
  std::vector<double> token_weights;    // [row_count], or empty: all 1
  std::vector<double> entropy_factors;  // [row_count], or empty: all 0; cross entropy only, as the next
  std::vector<double> lse_factors;
  double loss_scale = 1;
  std::variant<CrossEntropyOptions, JsdOptions, TopKOptions> loss;
  double gradient_resolution = 0;  // 0: exact
  uint64_t dither_seed = 0;
  DataType dithered_type = DataType::kFloat32;     // Resolution::entry_type
  DataType dither_unit_type = DataType::kFloat32;  // Resolution::unit_type
  const Head* teacher_head = nullptr;
  Matrix teacher_hidden;  // [row_count, teacher's hidden_size]
};

struct TermResult {
  LossSums sums;
  // [row_count]; 0 for ignored rows.
  std::vector<double> token_loss, lse, target_log_probability, entropy, mean_logits, log_sum_sq_probs;
  std::vector<int32_t> argmax;  // [row_count]; -1 for ignored rows
  // [row_count]: the largest |z| that entered the row, the teacher's and tempered ones included; 0 for ignored rows. The tolerance
  // of a token's loss is relative to it.
  std::vector<double> max_abs_logit;
  Matrix logits;  // [row_count, valid_vocab_size], the student's without temperature; rows of ignored tokens are 0
};

struct HeadGradient {
  Matrix weight;             // [vocab_size, hidden_size]
  std::vector<double> bias;  // [vocab_size] or empty
};

struct Result {
  std::vector<TermResult> terms;
  Matrix grad_hidden;                            // [rows, hidden_size]
  std::map<const Head*, HeadGradient> gradient;  // of the trainable heads
};

// Computes all of it. Ignored rows get no loss and no gradient.
Result Compute(const Matrix& hidden, absl::Span<const Term> terms, double grad_hidden_scale);

}  // namespace headwater::reference

#endif  // HEADWATER_KERNELS_REFERENCE_LOSS_REFERENCE_H_
