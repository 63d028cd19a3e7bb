// Arguments that could make an engine read or write out of bounds, or that mean nothing: refused with the right reason, nothing
// changed.
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/error.h"
#include "tests/kernels/support/comparison.h"
#include "tests/kernels/support/extreme_values.h"
#include "tests/unit/expect_status.h"

namespace headwater::testing {
namespace {

class BadArguments : public ::testing::TestWithParam<bool> {
 protected:
  using M = PreparedMicroBatch&;
  static constexpr ErrorReason kShape = ErrorReason::kShapeMismatch, kField = ErrorReason::kInvalidField,
                               kMissing = ErrorReason::kMissingField, kCombination = ErrorReason::kInvalidCombination;

  BadArguments() : problem_(MakeBase(GetParam())) {}

  // Not in the constructor, which runs for skipped tests, too.
  void SetUp() override {
    heads_ = std::make_unique<LoadedHeads>(problem_.heads, EngineOptions());
    heads_->Compute(problem_);
    before_ = heads_->ReadGradient(0);
  }

  static Problem MakeBase(bool jsd) {
    const ProblemOptions options = {.softcap = jsd ? 0.0 : 30.0,
                                    .valid_vocab_size = 90,
                                    .token_weights = true,
                                    .class_weights = true,
                                    .label_smoothing = jsd ? 0.0 : 0.1,
                                    .jsd = jsd,
                                    .hard_loss_weight = jsd ? 0.5 : 0.0,
                                    .staging_slots = 1};
    return MakeProblem(options);
  }

  // Changes a good micro-batch by `change`, and expects the refusal in every mode that the change leaves alone.
  void ExpectRefused(const std::string& what, ErrorReason reason, const std::function<void(PreparedMicroBatch&)>& change) {
    SCOPED_TRACE(what);
    for (const GradWeightMode mode : {GradWeightMode::kAccumulate, GradWeightMode::kStage}) {
      PreparedMicroBatch prepared(problem_, heads_->pointers(), ComputeOptions{.grad_weight = mode});
      change(prepared);
      const absl::StatusOr<MicroBatchResult> result = heads_->engine().Compute(prepared.micro_batch);
      ASSERT_FALSE(result.ok());
      EXPECT_TRUE(HasReason(result.status(), reason))
          << "expected " << ErrorReasonName(reason) << ", got " << ErrorReasonName(GetErrorReason(result.status())) << ": "
          << result.status();
      EXPECT_GT(result.status().message().size(), 10u);
      prepared.ExpectOutputsUntouched();
      EXPECT_TRUE(heads_->ReadGradient(0) == before_) << "the accumulator changed";
      EXPECT_EQ(heads_->head(0).FreeStagingSlots(), 1);
    }
  }

  CrossEntropySpec& CrossEntropy(M m) {
    if (auto* jsd = std::get_if<JsdSpec>(&m.terms[0].loss)) return jsd->hard_loss;
    return std::get<CrossEntropySpec>(m.terms[0].loss);
  }

  const Problem problem_;
  std::unique_ptr<LoadedHeads> heads_;
  Gradient before_;
};

TEST_P(BadArguments, Targets) {
  for (const int32_t target :
       {90, 100, 101, 50000, -1, -99, -101, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
    std::vector<int32_t> targets = problem_.terms[0].targets;
    targets[4] = target;
    ExpectRefused("target " + std::to_string(target), ErrorReason::kTargetOutOfVocab, [&](M m) { m.terms[0].targets = targets; });
  }
}

TEST_P(BadArguments, Sizes) {
  const std::vector<int32_t> many_targets(100, 1);
  const std::vector<float> many_weights(200, 1.0f);
  ExpectRefused("a target too few", kShape, [](M m) { m.terms[0].targets.remove_suffix(1); });
  ExpectRefused("targets too many", kShape, [&](M m) { m.terms[0].targets = many_targets; });
  ExpectRefused("a token weight too few", kShape, [](M m) { m.terms[0].token_weights.remove_suffix(1); });
  ExpectRefused("token weights too many", kShape, [&](M m) { m.terms[0].token_weights = many_weights; });
  ExpectRefused("a class weight too few", kShape, [this](M m) { CrossEntropy(m).class_weights.remove_suffix(1); });
  ExpectRefused("class weights too many", kShape, [&](M m) { CrossEntropy(m).class_weights = many_weights; });
  ExpectRefused("hidden too narrow", kShape, [](M m) { m.micro_batch.hidden.column_count -= 1; });
  ExpectRefused("grad_hidden too narrow", kShape, [](M m) { m.micro_batch.grad_hidden.column_count -= 1; });
  ExpectRefused("grad_hidden too short", kShape, [](M m) { m.micro_batch.grad_hidden.row_count -= 1; });
  if (GetParam()) {
    ExpectRefused("teacher too narrow", kShape, [](M m) { m.terms[0].teacher_hidden.column_count -= 1; });
    ExpectRefused("teacher too short", kShape, [](M m) { m.terms[0].teacher_hidden.row_count -= 1; });
  }
}

TEST_P(BadArguments, RowRanges) {
  for (const auto& [start, count] :
       {std::pair<int64_t, int64_t>{-1, 13}, {1, 13}, {0, 14}, {14, 0}, {0, -1}, {kMost, 13}, {5, kMost}}) {
    ExpectRefused("rows " + std::to_string(start) + " + " + std::to_string(count), kField, [start = start, count = count](M m) {
      m.terms[0].row_start = start;
      m.terms[0].row_count = count;
    });
  }
  ExpectRefused("negative rows", kField, [](M m) { m.micro_batch.hidden.row_count = -1; });
}

TEST_P(BadArguments, MissingParts) {
  ExpectRefused("no terms", kMissing, [](M m) { m.micro_batch.terms = {}; });
  ExpectRefused("no head", kMissing, [](M m) { m.terms[0].head = nullptr; });
  ExpectRefused("no hidden", kMissing, [](M m) { m.micro_batch.hidden.data = nullptr; });
  ExpectRefused("no targets", kMissing, [](M m) { m.terms[0].targets = {}; });
  if (GetParam()) {
    ExpectRefused("no teacher head", kMissing, [](M m) { m.terms[0].teacher_head = nullptr; });
    ExpectRefused("no teacher rows", kMissing, [](M m) { m.terms[0].teacher_hidden.data = nullptr; });
  } else {
    ExpectRefused("a teacher for cross entropy", kCombination, [](M m) { m.terms[0].teacher_head = m.terms[0].head; });
  }
}

TEST_P(BadArguments, Types) {
  const DataType unknown = static_cast<DataType>(9);
  ExpectRefused("hidden", kField, [&](M m) { m.micro_batch.hidden.data_type = unknown; });
  ExpectRefused("grad_hidden", kField, [&](M m) { m.micro_batch.grad_hidden.data_type = unknown; });
  if (GetParam()) {
    ExpectRefused("teacher", kField, [&](M m) { m.terms[0].teacher_hidden.data_type = unknown; });
  }
}

TEST_P(BadArguments, MemorySpaces) {
  const auto expect_refused = [this](const std::string& what, MemorySpace memory) {
    ExpectRefused("hidden in " + what, kField, [&](M m) { m.micro_batch.hidden.memory = memory; });
    ExpectRefused("grad_hidden in " + what, kField, [&](M m) { m.micro_batch.grad_hidden.memory = memory; });
    if (GetParam()) {
      ExpectRefused("teacher in " + what, kField, [&](M m) { m.terms[0].teacher_hidden.memory = memory; });
    }
  };
  expect_refused("unknown memory", static_cast<MemorySpace>(7));
  if (heads_->engine().name() != "cpu") return;  // the rest is about an engine without a device
  expect_refused("device memory", MemorySpace::kDevice);
  PreparedMicroBatch prepared(problem_, heads_->pointers(), {});
  prepared.micro_batch.hidden.memory = MemorySpace::kDevice;
  const absl::Status status = heads_->engine().Compute(prepared.micro_batch).status();
  EXPECT_EQ(status.message(), "hidden.memory must be host: this engine has no device memory");
  EXPECT_EQ(GetErrorMetadata(status).at("field"), "hidden.memory");
}

TEST_P(BadArguments, GradientsWithoutBackward) {
  ExpectRefused("grad_hidden", kCombination, [](M m) {
    m.micro_batch.backward = false;
    m.micro_batch.grad_weight = GradWeightMode::kNone;
  });
  ExpectRefused("grad_weight", kCombination, [](M m) {
    m.micro_batch.backward = false;
    m.micro_batch.grad_hidden = {};
  });
}

// Products into the accumulator may have begun when the first NaN is seen: the policy needs a staged contribution.
TEST_P(BadArguments, RefusingNonFiniteInPlace) {
  const auto result = heads_->TryCompute(problem_, ComputeOptions{.refuse_non_finite = true});
  EXPECT_REASON(result, kInvalidCombination);
  EXPECT_TRUE(heads_->ReadGradient(0) == before_);
}

// integration_bad_input_test has a row for every range and combination of a term's options. Here is that an engine checks them,
// too.
TEST_P(BadArguments, Values) {
  for (const double value : {kNan, kInfinity, -kInfinity}) {
    ExpectRefused("grad_hidden_scale", kField, [&](M m) { m.micro_batch.grad_hidden_scale = value; });
  }
  std::vector<float> factors(13, 0.5f);
  factors[7] = static_cast<float>(kNan);
  ExpectRefused("token weight", kField, [&](M m) { m.terms[0].token_weights = factors; });
  std::vector<float> class_weights(90, 1.0f);
  class_weights[89] = static_cast<float>(kInfinity);
  ExpectRefused("class weight", kField, [&](M m) { CrossEntropy(m).class_weights = class_weights; });
  ExpectRefused("label_smoothing", kField, [this](M m) { CrossEntropy(m).label_smoothing = 1.1; });
  if (GetParam()) {
    ExpectRefused("beta", kField, [](M m) { std::get<JsdSpec>(m.terms[0].loss).beta = kNan; });
    return;
  }
  const absl::Span<const float> too_few = absl::MakeConstSpan(factors).first(12);
  for (const auto member : {&LossTerm::entropy_factors, &LossTerm::lse_factors}) {
    ExpectRefused("factors that are not finite", kField, [&](M m) { m.terms[0].*member = factors; });
    ExpectRefused("factors too few", kShape, [&](M m) { m.terms[0].*member = too_few; });
  }
  ExpectRefused("gradient_resolution with smoothing behind a softcap", kCombination,
                [](M m) { m.terms[0].gradient_resolution = 0.01; });
}

INSTANTIATE_TEST_SUITE_P(All, BadArguments, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "Jsd" : "CrossEntropy"; });

// Unequal vocabularies are refused with both sizes in the message, unless truncation is asked for.
TEST(UnequalVocabularies, AreRefusedWithBothSizes) {
  Problem problem = MakeProblem({.jsd = true, .teacher_vocab_size = 88});
  std::get<reference::JsdOptions>(problem.terms[0].loss).truncate_to_common = false;
  LoadedHeads heads(problem.heads, {});
  const auto result = heads.TryCompute(problem, {});
  EXPECT_REASON(result, kVocabSizeMismatch);
  const std::string message(result.status().message());
  EXPECT_NE(message.find("88"), std::string::npos) << message;
  EXPECT_NE(message.find("101"), std::string::npos) << message;
  ExpectGradientZero(heads.ReadGradient(0));
}

// A bad term behind a good one: the good one must not have run.
TEST(SeveralBadTerms, AllTermsAreCheckedFirst) {
  Problem problem = MakeProblem(ProblemOptions());
  problem.terms.push_back(problem.terms[0]);
  problem.terms[1].targets.back() = 101;
  LoadedHeads heads(problem.heads, {});
  PreparedMicroBatch prepared(problem, heads.pointers(), {});
  const auto result = heads.engine().Compute(prepared.micro_batch);
  EXPECT_REASON(result, kTargetOutOfVocab);
  prepared.ExpectOutputsUntouched();
  ExpectGradientZero(heads.ReadGradient(0));
}

}  // namespace
}  // namespace headwater::testing
