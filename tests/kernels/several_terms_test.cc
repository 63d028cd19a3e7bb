// Several loss terms in one micro-batch: several heads over one set of rows, several teachers over row ranges.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/support/comparison.h"

namespace headwater::testing {
namespace {

// Three terms over overlapping rows of one micro-batch: two heads, one of them under two losses.
Problem SeveralTerms(int32_t staging_slots) {
  const ProblemOptions options = {.rows = 20, .bias = true, .jsd = true, .hard_loss_weight = 0.3, .staging_slots = staging_slots};
  Problem problem = MakeProblem(options);
  const ProblemOptions second = {.rows = 20, .vocab_size = 57, .label_smoothing = 0.1, .staging_slots = staging_slots, .seed = 5};
  const Problem other = MakeProblem(second);
  problem.heads.push_back(other.heads[0]);

  TestTerm on_other_head = SliceRows(other, 3, 11).terms[0];
  on_other_head.head = 2;
  on_other_head.row_start = 3;
  on_other_head.loss_scale = 0.25;
  TestTerm on_first_head = problem.terms[0];
  on_first_head.loss = reference::CrossEntropyOptions{0.0, 1e-3, {}};
  on_first_head.teacher = -1;
  on_first_head.teacher_hidden.clear();
  on_first_head.row_start = 12;
  on_first_head.row_count = 8;
  on_first_head.targets.resize(8);
  on_first_head.loss_scale = -0.5;
  problem.terms[0] = SliceRows(problem, 0, 16).terms[0];
  problem.terms.push_back(on_other_head);
  problem.terms.push_back(on_first_head);
  problem.grad_hidden_scale = 2;
  return problem;
}

TEST(SeveralTerms, OverlappingRangesAreSummed) {
  const Problem problem = SeveralTerms(0);
  const Expected expected = ComputeExpected(problem);
  for (const int32_t shard_count : {1, 3}) {
    for (const int64_t token_chunk_rows : {0, 1, 3}) {
      ExpectEngineMatches(problem, expected, {.shard_count = shard_count, .token_chunk_rows = token_chunk_rows});
    }
  }
}

// The data beside the rows grows with the terms, and has a bound of its own. Fewer rows are computed at once then.
TEST(SeveralTerms, AsManyAsThereMayBeOverManyRows) {
  const ProblemOptions options = {.rows = 8192, .vocab_size = 8, .hidden_size = 8, .loss_scale = 1.0 / 64};
  Problem problem = MakeProblem(WithType(options, DataType::kBFloat16));
  const TestTerm term = problem.terms[0];
  while (problem.terms.size() < 64) problem.terms.push_back(term);
  ExpectEngineMatches(problem);
}

TEST(SeveralTerms, AreStagedAndCommittedTogether) {
  const Problem problem = SeveralTerms(2);  // the first head's two terms may take a slot each
  const Expected expected = ComputeExpected(problem);
  LoadedHeads heads(problem.heads, {});
  Outcome outcome;
  std::unique_ptr<StagedContribution> staged = heads.Stage(problem, {}, &outcome);
  for (const Gradient& gradient : outcome.gradients) ExpectGradientZero(gradient);
  outcome.gradients.clear();
  ExpectOutcomeMatches(problem, expected, outcome);
  ASSERT_TRUE(staged->Commit(1).ok());
  ExpectGradientNear(heads.ReadGradient(0), expected.gradient(0));
  ExpectGradientNear(heads.ReadGradient(2), expected.gradient(2));

  heads.ZeroGradients();
  heads.Stage(problem).reset();
  ExpectGradientZero(heads.ReadGradient(0));
  ExpectGradientZero(heads.ReadGradient(2));
  EXPECT_EQ(heads.head(0).FreeStagingSlots(), 2);
  EXPECT_EQ(heads.head(2).FreeStagingSlots(), 2);
}

// Heads over the same rows, each with targets of its own: the k-th looks k tokens further, and has none for the last k rows.
Problem FiveHeads(int32_t staging_slots) {
  constexpr int kHeads = 5;
  const ProblemOptions options = {.rows = 23, .bias = true, .ignored_share = 0, .staging_slots = staging_slots};
  Problem problem = MakeProblem(options);
  const std::vector<int32_t> tokens = problem.terms[0].targets;
  const TestTerm first = problem.terms[0];
  for (int k = 1; k < kHeads; ++k) {
    ProblemOptions other = options;
    other.seed = static_cast<uint64_t>(40 + k);
    problem.heads.push_back(MakeProblem(other).heads[0]);
    TestTerm term = first;
    term.head = k;
    term.loss_scale = 1.0 / (1 + k);
    for (size_t row = 0; row < tokens.size(); ++row) {
      const size_t next = row + static_cast<size_t>(k);
      term.targets[row] = next < tokens.size() ? tokens[next] : kDefaultIgnoreIndex;
    }
    problem.terms.push_back(term);
  }
  return problem;
}

TEST(SeveralTerms, FiveHeadsEqualFiveCalls) {
  const Problem together = FiveHeads(1);
  for (const int32_t shard_count : {1, 3, 7}) {
    SCOPED_TRACE("shards " + std::to_string(shard_count));
    const EngineOptions engine_options = {.shard_count = shard_count};
    ExpectEngineMatches(together, engine_options);

    LoadedHeads apart_heads(together.heads, engine_options);
    std::vector<double> grad_hidden;
    std::vector<TermOutcome> terms;
    for (const TestTerm& term : together.terms) {
      Problem single = together;
      single.terms = {term};
      const Outcome outcome = apart_heads.Compute(single);
      terms.push_back(outcome.terms[0]);
      grad_hidden.resize(outcome.grad_hidden.size(), 0.0);
      for (size_t i = 0; i < grad_hidden.size(); ++i) grad_hidden[i] += outcome.grad_hidden[i];
    }
    const std::vector<Gradient> apart = apart_heads.ReadGradients();

    LoadedHeads heads(together.heads, engine_options);
    const Outcome outcome = heads.Compute(together);
    for (size_t k = 0; k < apart.size(); ++k) {
      EXPECT_TRUE(outcome.gradients[k] == apart[k]) << "grad_weight of head " << k;
      EXPECT_EQ(outcome.terms[k].sums.loss_sum, terms[k].sums.loss_sum) << k;
      EXPECT_EQ(outcome.terms[k].token_loss, terms[k].token_loss) << k;
      EXPECT_EQ(outcome.terms[k].argmax, terms[k].argmax) << k;
    }
    ASSERT_EQ(outcome.grad_hidden.size(), grad_hidden.size());
    double largest = 0;
    for (const double value : grad_hidden) largest = std::max(largest, std::abs(value));
    for (size_t i = 0; i < grad_hidden.size(); ++i) {
      // Sums of five fp32 numbers.
      ASSERT_LE(std::abs(outcome.grad_hidden[i] - grad_hidden[i]), 1e-6 * largest) << "grad_hidden[" << i << "]";
    }

    heads.ZeroGradients();
    std::unique_ptr<StagedContribution> staged = heads.Stage(together);
    for (const Gradient& gradient : heads.ReadGradients()) ExpectGradientZero(gradient);
    ASSERT_TRUE(staged->Commit(1).ok());
    EXPECT_TRUE(heads.ReadGradients() == apart) << "committed together";
  }
}

// Two teachers of different widths and a plain cross entropy, each over rows of its own, some of them under two terms.
TEST(SeveralTerms, DifferentTeachersOverRowRanges) {
  const ProblemOptions options = {.rows = 31,
                                  .bias = true,
                                  .token_weights = true,
                                  .jsd = true,
                                  .hard_loss_weight = 0.25,
                                  .teacher_hidden_size = 19,
                                  .staging_slots = 1};
  const Problem first = MakeProblem(options);
  ProblemOptions with_second_teacher = options;
  with_second_teacher.seed = 8;
  with_second_teacher.teacher_hidden_size = 33;
  with_second_teacher.beta = 0;
  with_second_teacher.hard_loss_weight = 0;
  with_second_teacher.student_temperature = 2;
  const Problem second = MakeProblem(with_second_teacher);

  Problem problem = first;
  problem.heads.push_back(second.heads[1]);  // the second teacher
  problem.terms[0] = SliceRows(first, 0, 12).terms[0];
  TestTerm soft = SliceRows(second, 10, 14).terms[0];
  soft.teacher = 2;
  soft.row_start = 10;
  problem.terms.push_back(soft);
  TestTerm hard = SliceRows(first, 20, 11).terms[0];
  hard.loss = reference::CrossEntropyOptions{0.1, 1e-3, {}};
  hard.teacher = -1;
  hard.teacher_hidden.clear();
  hard.row_start = 20;
  problem.terms.push_back(hard);
  for (const int32_t shard_count : {1, 3}) {
    const EngineOptions engine_options = {.shard_count = shard_count};
    const Outcome direct = ExpectEngineMatches(problem, engine_options);
    LoadedHeads heads(problem.heads, engine_options);
    Outcome outcome;
    std::unique_ptr<StagedContribution> staged = heads.Stage(problem, {}, &outcome);
    ASSERT_TRUE(staged->Commit(1).ok());
    ExpectGradientNear(heads.ReadGradient(0), ComputeExpected(problem).gradient(0));
    outcome.gradients = direct.gradients;
    EXPECT_TRUE(outcome.BitwiseEquals(direct)) << "answers do not depend on where grad_weight goes";
  }
}

}  // namespace
}  // namespace headwater::testing
