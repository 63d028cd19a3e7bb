// Calls of several threads on one head. An engine may compute them together, but each has its own result, and the accumulator the
// sum of all.
#include <cstdint>
#include <latch>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/support/comparison.h"
#include "tests/kernels/support/kernel_suite.h"
#include "tests/kernels/support/plain_computation.h"
#include "tests/unit/run_threads.h"

namespace headwater::testing {
namespace {

constexpr int kCallers = 12;
constexpr int kRounds = 4;

ProblemOptions Options(DataType type) {
  return WithType({.rows = 480, .vocab_size = 301, .hidden_size = 40, .bias = true, .ignored_share = 0.1, .token_weights = true},
                  type);
}

// Parts of uneven sizes, together all rows.
std::vector<Problem> Parts(const Problem& problem) {
  std::vector<Problem> parts;
  int64_t start = 0;
  for (int caller = 0; caller < kCallers; ++caller) {
    const int64_t end =
        caller + 1 == kCallers ? problem.rows : problem.rows * (caller + 1) * (caller + 2) / (kCallers * (kCallers + 1));
    parts.push_back(SliceRows(problem, start, end - start));
    // Each asks for something of its own; not all of that can be computed together.
    TestTerm& term = parts.back().terms[0];
    if (caller % 2 == 1) term.lse_factors.assign(static_cast<size_t>(term.row_count), 0.25f * static_cast<float>(caller));
    std::get<reference::CrossEntropyOptions>(term.loss).temperature = caller % 4 == 2 ? 0.8 : 1;
    term.loss_scale = 1 + 0.1 * caller;
    parts.back().grad_hidden_scale = 1 - 0.05 * caller;
    start = end;
  }
  return parts;
}

class OverlappingCalls : public ::testing::TestWithParam<DataType> {};

TEST_P(OverlappingCalls, EachHasItsOwnResultAndTheAccumulatorHasAll) {
  const Problem problem = MakeProblem(Options(GetParam()));
  const std::vector<Problem> parts = Parts(problem);
  reference::Matrix grad_weight(problem.heads[0].spec.vocab_size, problem.hidden_size);
  std::vector<double> plain_grad_weight(grad_weight.data.size(), 0);
  std::vector<Expected> expected;
  for (const Problem& part : parts) {
    expected.push_back(ComputeExpected(part));
    const PlainResult& plain = PlainOf(part, expected.back());
    for (size_t i = 0; i < grad_weight.data.size(); ++i) {
      grad_weight.data[i] += expected.back().gradient(0).weight.data[i];
      plain_grad_weight[i] += plain.grad_weight[0][i];
    }
  }
  LoadedHeads heads(problem.heads, {});
  const ComputeOptions options = {.token_outputs = false};
  for (int round = 0; round < kRounds; ++round) {
    heads.ZeroGradients();
    std::vector<std::unique_ptr<PreparedMicroBatch>> prepared;
    std::vector<Outcome> outcomes(parts.size());
    std::vector<absl::Status> statuses(parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      prepared.push_back(std::make_unique<PreparedMicroBatch>(parts[i], heads.pointers(), options));
    }
    // One caller's mistake is its own.
    const PreparedMicroBatch wrong_problem(parts[0], heads.pointers(), options);
    MicroBatch wrong = wrong_problem.micro_batch;
    wrong.hidden.column_count += 1;
    std::latch all_here(static_cast<std::ptrdiff_t>(parts.size()) + 1);
    absl::Status wrong_status;
    RunThreads(static_cast<int64_t>(parts.size()) + 1, [&](int64_t caller) {
      const auto i = static_cast<size_t>(caller);
      all_here.arrive_and_wait();
      if (i == parts.size()) {
        wrong_status = heads.engine().Compute(wrong).status();
        return;
      }
      const absl::StatusOr<MicroBatchResult> result = heads.engine().Compute(prepared[i]->micro_batch);
      statuses[i] = result.status();
      if (result.ok()) prepared[i]->Collect(*result, &outcomes[i]);
    });
    EXPECT_EQ(wrong_status.code(), absl::StatusCode::kInvalidArgument) << wrong_status;
    for (size_t i = 0; i < parts.size(); ++i) {
      SCOPED_TRACE("caller " + std::to_string(i));
      ASSERT_TRUE(statuses[i].ok()) << statuses[i];
      ExpectOutcomeMatches(parts[i], expected[i], outcomes[i]);
    }
    const Gradient gradient = heads.ReadGradient(0);
    ExpectTensorNear("grad_weight", ToDoubles(gradient.weight), grad_weight,
                     GetParam() == DataType::kFloat32 ? nullptr : &plain_grad_weight, Suite().grad_weight_factor * kPlainFactor);
  }
}

INSTANTIATE_TEST_SUITE_P(All, OverlappingCalls, ::testing::Values(DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16),
                         [](const auto& type) { return std::string(DataTypeName(type.param)); });

}  // namespace
}  // namespace headwater::testing
