// The generalized Jensen-Shannon divergence: betas x temperatures x hard loss x hidden sizes x vocabularies, against fp64.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/support/comparison.h"
#include "tests/kernels/support/kernel_suite.h"
#include "tests/unit/expect_status.h"

namespace headwater::testing {
namespace {

constexpr double kBetas[] = {0.0, 0.1, 0.5, 0.9, 1.0};

// `options` of a small divergence; sets its sizes.
ProblemOptions Small(double beta, ProblemOptions options = {}) {
  options.jsd = true;
  options.beta = beta;
  options.rows = 9;
  options.vocab_size = 67;
  options.hidden_size = 16;
  return options;
}

class JsdBeta : public ::testing::TestWithParam<double> {};

// A teacher that is uniform: columns that there are not must not count beside those that there are.
TEST_P(JsdBeta, MatchesFp64WithAUniformTeacher) {
  for (const double teacher_temperature : {1e9, 1e20}) {
    for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
      const ProblemOptions options = Small(GetParam(), {.teacher_temperature = teacher_temperature});
      SCOPED_TRACE(std::to_string(teacher_temperature) + ", " + DataTypeName(type));
      ExpectEngineMatches(MakeProblem(WithType(options, type)));
    }
  }
}

TEST_P(JsdBeta, MatchesFp64WithEveryOption) {
  for (const auto& [student_temperature, teacher_temperature] : {std::pair{1.0, 1.0}, {2.0, 0.5}, {0.7, 3.0}}) {
    for (const double hard_loss_weight : {0.0, 0.3, 1.0}) {
      for (const int64_t teacher_hidden_size : {16, 29}) {
        for (const int64_t teacher_vocab_size : {0, 61, 80}) {  // the same, shorter and longer than the student's
          SCOPED_TRACE(::testing::Message() << "temperatures " << student_temperature << ", " << teacher_temperature << "; hard "
                                            << hard_loss_weight << "; teacher hidden " << teacher_hidden_size << ", vocab "
                                            << teacher_vocab_size);
          ExpectEngineMatches(MakeProblem(Small(GetParam(), {.token_weights = teacher_hidden_size == 29,
                                                             .class_weights = hard_loss_weight > 0,
                                                             .label_smoothing = hard_loss_weight > 0 ? 0.1 : 0.0,
                                                             .z_loss = hard_loss_weight > 0 ? 1e-3 : 0.0,
                                                             .student_temperature = student_temperature,
                                                             .teacher_temperature = teacher_temperature,
                                                             .hard_loss_weight = hard_loss_weight,
                                                             .teacher_hidden_size = teacher_hidden_size,
                                                             .teacher_vocab_size = teacher_vocab_size})));
        }
      }
    }
  }
}

TEST_P(JsdBeta, MatchesFp64In16Bits) {
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
    for (const double hard_loss_weight : {0.0, 0.3}) {
      SCOPED_TRACE(std::string(DataTypeName(type)) + ", hard " + std::to_string(hard_loss_weight));
      ExpectEngineMatches(MakeProblem(
          WithType(Small(GetParam(), {.bias = true, .student_temperature = 1.5, .hard_loss_weight = hard_loss_weight}), type)));
    }
  }
}

// The loss and the gradients alone, which an engine may compute in one pass of its own.
TEST(JsdAlone, MatchesFp64WithoutTokenOutputs) {
  for (const double beta : {0.0, 0.1, 0.5, 0.9, 0.99, 1.0}) {
    for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
      for (const bool transforms : {false, true}) {
        for (const int64_t vocab_size : {67, 1003}) {
          SCOPED_TRACE(::testing::Message() << "beta " << beta << ", " << DataTypeName(type) << ", vocab " << vocab_size
                                            << (transforms ? ", transforms" : ""));
          ProblemOptions options = Small(beta, {.bias = transforms, .token_weights = transforms, .student_temperature = 1.5});
          options.softcap = transforms ? 8 : 0;
          options.vocab_size = vocab_size;
          ExpectEngineMatches(MakeProblem(WithType(options, type)), {}, {.token_outputs = false});
        }
      }
    }
  }
}

// The same over a vocabulary that no single block holds.
TEST(JsdAlone, MatchesFp64OverALargeVocabulary) {
  for (const double beta : {0.0, 0.5, 1.0}) {
    for (const bool transforms : {false, true}) {
      SCOPED_TRACE("beta " + std::to_string(beta) + (transforms ? ", transforms" : ""));
      ProblemOptions options = WithType(Small(beta), DataType::kBFloat16);
      options.vocab_size = 20003;
      options.hidden_size = 8;
      options.logit_spread = 1;  // as below, of a large vocabulary with token outputs
      options.bias = transforms;
      options.softcap = transforms ? 8 : 0;
      ExpectEngineMatches(MakeProblem(options), {}, {.token_outputs = false});
    }
  }
}

// A teacher of another type: no product takes 16-bit operands of two.
TEST_P(JsdBeta, MatchesFp64WithATeacherOfAnotherType) {
  for (const auto& [type, teacher_type] : {std::pair{DataType::kBFloat16, DataType::kFloat16},
                                           {DataType::kFloat16, DataType::kBFloat16},
                                           {DataType::kBFloat16, DataType::kFloat32},
                                           {DataType::kFloat32, DataType::kFloat16}}) {
    SCOPED_TRACE(std::string(DataTypeName(type)) + ", teacher " + DataTypeName(teacher_type));
    Problem problem = MakeProblem(WithType(Small(GetParam()), type));
    problem.heads[1].spec.data_type = teacher_type;
    problem.terms[0].teacher_type = teacher_type;
    RoundToStorage(&problem);
    ExpectEngineMatches(problem);
  }
}

// A vocabulary that no single block of any kernel holds.
TEST_P(JsdBeta, MatchesFp64OverALargeVocabulary) {
  for (const bool transforms : {false, true}) {
    SCOPED_TRACE(transforms ? "with transforms" : "plain");
    ProblemOptions options = WithType(Small(GetParam()), DataType::kBFloat16);
    options.rows = 5;
    options.vocab_size = 33001;
    options.hidden_size = 8;
    options.logit_spread = 1;  // many columns of similar weight: roundings average out, here as in the plain computation
    options.bias = transforms;
    options.softcap = transforms ? 8 : 0;
    ExpectEngineMatches(MakeProblem(options));
  }
}

TEST_P(JsdBeta, MatchesFp64WithTransformsOnShardsInChunks) {
  ProblemOptions options = Small(GetParam(), {.bias = true,
                                              .logit_scale = -0.8,
                                              .softcap = 8,
                                              .valid_vocab_size = 59,
                                              .loss_scale = 0.5,
                                              .grad_hidden_scale = 2,
                                              .hard_loss_weight = 0.25});
  options.teacher_vocab_size = 64;  // of another size and split than the student's
  EngineOptions engine_options;
  for (const int32_t shard_count : {1, 2, 5}) {
    SCOPED_TRACE("shards " + std::to_string(shard_count));
    engine_options.shard_count = shard_count;
    engine_options.token_chunk_rows = shard_count == 1 ? 0 : 4;
    ExpectEngineMatches(MakeProblem(options), engine_options);
  }
}

// Without targets no row is ignored, and the target's log-probability is 0.
TEST_P(JsdBeta, NeedsNoTargets) {
  const ProblemOptions options = Small(GetParam(), {.token_weights = true, .with_targets = false});
  const Outcome outcome = ExpectEngineMatches(MakeProblem(options));
  EXPECT_EQ(outcome.terms[0].sums.valid_token_count, options.rows);
}

// Logits up to 600 on either side: log-probabilities far below -120 on both, where the mixture underflows in fp32.
TEST_P(JsdBeta, SurvivesLogProbabilitiesBelowMinus120) {
  for (const double logit_spread : {60.0, 170.0}) {
    Problem problem = MakeProblem(Small(GetParam(), {.logit_spread = logit_spread}));
    // Both sides share a weight. Rows 0 to 2 are equal: both sides agree on one column and all others are below -120 on both. Rows
    // 3 and 4 differ. The rest is scaled down to ordinary logits. Where all rows are saturated the gradient itself is 1e-11, less
    // than fp64 resolves.
    const int64_t teacher_size = problem.heads[1].spec.hidden_size;
    std::vector<double>& teacher_hidden = problem.terms[0].teacher_hidden;
    std::copy_n(problem.hidden.begin(), 3 * teacher_size, teacher_hidden.begin());
    problem.heads[1].weight = problem.heads[0].weight;
    for (size_t i = static_cast<size_t>(5 * teacher_size); i < teacher_hidden.size(); ++i) {
      problem.hidden[i] *= 3 / logit_spread;
      teacher_hidden[i] *= 3 / logit_spread;
    }
    RoundToStorage(&problem);
    const Expected expected = ComputeExpected(problem);
    const reference::TermResult& term = expected.result.terms[0];
    EXPECT_GE(*std::max_element(term.max_abs_logit.begin(), term.max_abs_logit.end()), logit_spread == 170.0 ? 400 : 120);
    SCOPED_TRACE("logit spread " + std::to_string(logit_spread));
    ExpectOutcomeMatches(problem, expected, RunOnce(problem));
  }
}

// A student that differs from its teacher by noise of 0.03 in the logits: losses and gradients are made of small differences.
TEST_P(JsdBeta, KeepsItsDigitsForANearlyDistilledStudent) {
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
    ProblemOptions options = WithType(Small(GetParam(), {.logit_spread = 4}), type);
    options.rows = 17;
    options.hidden_size = 64;
    Problem problem = MakeProblem(options);
    std::mt19937_64 random(11);
    const std::vector<double> noise = RandomValues(random, options.vocab_size * options.hidden_size,
                                                   0.03 / std::sqrt(static_cast<double>(options.hidden_size)), DataType::kFloat32);
    problem.heads[1].weight = problem.heads[0].weight;
    for (size_t i = 0; i < noise.size(); ++i) problem.heads[0].weight[i] += noise[i];
    problem.terms[0].teacher_hidden = problem.hidden;
    RoundToStorage(&problem);
    SCOPED_TRACE(DataTypeName(type));
    const Outcome outcome = ExpectEngineMatches(problem);
    EXPECT_LE(outcome.terms[0].sums.loss_sum / static_cast<double>(outcome.terms[0].sums.valid_token_count), 2e-3);
  }
}

// The student is its own teacher: no loss, no gradient beyond rounding, never negative or NaN.
TEST_P(JsdBeta, IsZeroForEqualSides) {
  ProblemOptions options = Small(GetParam());
  Problem problem = MakeProblem(options);
  problem.heads[1].weight = problem.heads[0].weight;
  problem.terms[0].teacher_hidden = problem.hidden;
  const Outcome outcome = RunOnce(problem);
  EXPECT_LE(std::abs(outcome.terms[0].sums.loss_sum), 1e-9);
  for (const float loss : outcome.terms[0].token_loss) EXPECT_LE(std::abs(loss), 1e-9);
  for (const double value : outcome.grad_hidden) ASSERT_LE(std::abs(value), 1e-6);
  for (const float value : outcome.gradients[0].weight) ASSERT_LE(std::abs(value), 1e-6);
}

// The teacher's head may be the student's own: it is read as teacher and gets a gradient as student only.
TEST_P(JsdBeta, AcceptsTheStudentsHeadAsTeacher) {
  Problem problem = MakeProblem(Small(GetParam()));
  problem.heads.resize(1);
  problem.terms[0].teacher = 0;
  ExpectEngineMatches(problem);
}

// A teacher whose rows and weights have one element each: rounding to int8 is exact, for all of a rotated row is equally large.
TEST(Int8Teacher, MatchesFp64WhereRoundingIsExact) {
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
    for (const int32_t shards : {1, 2, 3}) {  // of two, the second one's first column is an odd one
      for (const bool transforms : {false, true}) {
        SCOPED_TRACE(::testing::Message() << DataTypeName(type) << ", shards " << shards << (transforms ? ", transforms" : ""));
        ProblemOptions options =
            Small(0.5, {.bias = transforms, .token_weights = transforms, .teacher_temperature = 0.7, .teacher_hidden_size = 150});
        options.logit_scale = transforms ? -0.8 : 1;
        options.softcap = transforms ? 8 : 0;
        options.hard_loss_weight = transforms ? 0.3 : 0;
        Problem problem = MakeProblem(WithType(options, type));
        TestHead& teacher = problem.heads[1];
        teacher.spec.int8_teacher = true;
        const EngineOptions engine_options = {.shard_count = shards};
        if (!Suite().has_int8_teacher) {
          EXPECT_REASON(MakeSuiteEngine(engine_options)->CreateHead(teacher.spec), kFeatureNotBuilt);
          continue;
        }
        // The copy follows the weights.
        LoadedHeads heads(problem.heads, engine_options);
        heads.Compute(problem);
        heads.ZeroGradients();
        const auto element = [](size_t row) { return (row % 2 == 0 ? 1 : -1) * (1 + 0.25 * static_cast<double>(row % 7)); };
        const auto set_elements = [&](std::vector<double>& rows) {
          std::fill(rows.begin(), rows.end(), 0);
          for (size_t row = 0; row < rows.size() / 150; ++row) rows[row * 150 + row % 4 * 37] = element(row);
        };
        TestTerm& term = problem.terms[0];
        set_elements(teacher.weight);
        set_elements(term.teacher_hidden);
        WriteTensorValues(heads.head(1), HeadTensor::kWeight, teacher.weight);
        const LossSums sums = ExpectHeadsMatch(heads, problem, ComputeExpected(problem)).terms[0].sums;

        double squares = 0, count = 0, columns = 0;
        for (size_t row = 0; row < 9; ++row) {
          const bool counts = term.targets[row] != term.ignore_index && (!transforms || term.token_weights[row] != 0);
          squares += counts ? element(row) * element(row) : 0;
          count += counts ? 1 : 0;
        }
        const size_t first_columns = shards == 1 ? 67 : shards == 2 ? 33 : 22;
        for (size_t column = 0; column < first_columns; ++column) columns += element(column) * element(column);
        const double expected = options.logit_scale * options.logit_scale * squares / count *
                                (columns / static_cast<double>(first_columns)) / (6.0 * 127 * 127 * 256);
        EXPECT_NEAR(sums.teacher_mean_square_error, expected, 1e-5 * expected);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, JsdBeta, ::testing::ValuesIn(kBetas),
                         [](const auto& test) { return "Beta" + std::to_string(static_cast<int>(100 * test.param)); });

}  // namespace
}  // namespace headwater::testing
