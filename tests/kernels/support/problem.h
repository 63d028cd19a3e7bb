// A problem: heads, rows and loss terms with exact values, from which the reference, the plain computation and an engine compute.
#ifndef HEADWATER_TESTS_KERNELS_SUPPORT_PROBLEM_H_
#define HEADWATER_TESTS_KERNELS_SUPPORT_PROBLEM_H_

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "headwater/kernels/engine.h"
#include "kernels/reference/loss_reference.h"

namespace headwater::testing {

struct TestHead {
  HeadSpec spec;
  std::vector<double> weight;  // [vocab_size, hidden_size], exact in spec.data_type
  std::vector<double> bias;    // [vocab_size] or empty
};

struct TestTerm {
  int head = 0;  // index into Problem::heads
  int64_t row_start = 0;
  int64_t row_count = 0;
  std::vector<int32_t> targets;
  int32_t ignore_index = kDefaultIgnoreIndex;
  std::vector<float> token_weights;
  std::vector<float> entropy_factors;
  std::vector<float> lse_factors;
  double loss_scale = 1;
  std::variant<reference::CrossEntropyOptions, reference::JsdOptions, reference::TopKOptions> loss;
  double gradient_resolution = 0;
  uint64_t dither_seed = 0;
  DataType dithered_type = DataType::kFloat32;     // type to which the engine rounds entries before; see reference::Resolution
  DataType dither_unit_type = DataType::kFloat32;  // type to which the engine rounds a resolution times all factors
  int teacher = -1;                                // index into Problem::heads
  std::vector<double> teacher_hidden;
  DataType teacher_type = DataType::kFloat32;
};

struct Problem {
  std::vector<TestHead> heads;
  int64_t rows = 0;
  int64_t hidden_size = 0;
  DataType hidden_type = DataType::kFloat32;
  std::vector<double> hidden;  // [rows, hidden_size], exact in hidden_type
  std::vector<TestTerm> terms;
  DataType grad_hidden_type = DataType::kFloat32;
  double grad_hidden_scale = 1;
};

// The properties of a problem that MakeProblem() draws. One term over all rows.
struct ProblemOptions {
  std::string name;  // of the test case
  int64_t rows = 13;
  int64_t vocab_size = 101;
  int64_t hidden_size = 24;
  DataType head_type = DataType::kFloat32;
  DataType hidden_type = DataType::kFloat32;  // of hidden states, teacher's hidden states and grad_hidden
  bool bias = false;
  double logit_scale = 1;
  double softcap = 0;            // 0: none
  int64_t valid_vocab_size = 0;  // 0: vocab_size. Padding rows of weight and bias are NaN
  double logit_spread = 3;       // standard deviation of x . weight^T
  double ignored_share = 0.2;    // of the rows, about
  int32_t ignore_index = kDefaultIgnoreIndex;
  bool token_weights = false;    // non-uniform, with zero and negative ones
  bool entropy_factors = false;  // of any sign, with zeros
  bool lse_factors = false;      // of any sign, with zeros
  bool class_weights = false;
  bool negative_class_weights = false;  // every third one, with class_weights
  double temperature = 1;
  bool token_scaling = false;
  double label_smoothing = 0;
  double z_loss = 0;
  double loss_scale = 1;
  double grad_hidden_scale = 1;
  bool jsd = false;
  double beta = 0.5;
  double student_temperature = 1;
  double teacher_temperature = 1;
  double hard_loss_weight = 0;
  bool with_targets = true;         // JSD without hard loss may go without
  int64_t teacher_hidden_size = 0;  // 0: hidden_size
  int64_t teacher_vocab_size = 0;   // 0: vocab_size; else truncate_to_common
  double gradient_resolution = 0;
  int64_t top_k = 0;         // > 0: a top-k teacher of so many entries a row, with student_temperature
  double teacher_noise = 1;  // of a top-k teacher: standard deviation of its logits' differences from the student's
  int32_t staging_slots = 0;
  bool trainable = true;
  uint64_t seed = 1;
};

// Every option of the cross entropy alone, and all of them together; fp32.
std::vector<ProblemOptions> CrossEntropyOptionCases();

// Sets head_type and hidden_type.
ProblemOptions WithType(ProblemOptions options, DataType type);

// Draws a problem. Half of the targets are the row's most likely class, so that rows are confident as well as surprised.
Problem MakeProblem(const ProblemOptions& options);

// Normally distributed values, each rounded to `type`.
std::vector<double> RandomValues(std::mt19937_64& random, int64_t count, double standard_deviation, DataType type);

// Rows [row_start, row_start + row_count) of a problem whose only term covers all rows.
Problem SliceRows(const Problem& problem, int64_t row_start, int64_t row_count);

// The problem with values rounded to the types of heads and rows, after a test has set them.
void RoundToStorage(Problem* problem);
// A row's products with the head's valid rows, and the bias.
std::vector<double> ProductsOf(const TestHead& head, const double* x, bool with_bias = true);
// Gives a row of head 0's first term this target and the margin over its other logits, which must be small. Does not round.
void MakeConfident(Problem* problem, int64_t row, int64_t target, double margin);

struct PlainResult;

// The expected results of the problem.
struct Expected {
  Expected() = default;
  Expected(Expected&&) = default;  // keeps the heads where they are; a copy's keys would point to the original's heads
  Expected(const Expected&) = delete;
  Expected& operator=(const Expected&) = delete;

  reference::Result result;
  std::vector<reference::Head> heads;                // keys of result.gradient, in the problem's order
  mutable std::shared_ptr<const PlainResult> plain;  // PlainOf()'s, from its first call on
  const reference::HeadGradient& gradient(int head) const { return result.gradient.at(&heads[static_cast<size_t>(head)]); }
};

Expected ComputeExpected(const Problem& problem);

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_SUPPORT_PROBLEM_H_
