// How a micro-batch's rows are cut into chunks, and how their results are added up.
#include "kernels/core/micro_batch_plan.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/error.h"

namespace headwater {
namespace {

constexpr int32_t kIgnored = kDefaultIgnoreIndex;

// A head that holds nothing.
class EmptyHead final : public HeadBase {
 public:
  explicit EmptyHead(const HeadSpec& spec) : HeadBase(spec, MemoryPlan(), SplitVocab(spec.vocab_size, 1, {}), "none") {}
  absl::Status DoReadTensor(HeadTensor, int64_t, int64_t, void*) const override { return absl::UnimplementedError(""); }
  absl::Status DoWriteTensor(HeadTensor, int64_t, int64_t, const void*) override { return absl::UnimplementedError(""); }
  absl::Status DoZeroGradient() override { return absl::UnimplementedError(""); }
  absl::Status DoAddToGradient(HeadTensor, int64_t, int64_t, double, const float*) override { return absl::UnimplementedError(""); }
  absl::Status DoResetOptimizerState() override { return absl::UnimplementedError(""); }
  absl::StatusOr<GradientStats> DoComputeGradientStats() const override { return absl::UnimplementedError(""); }
  absl::Status DoApplyOptimizer(const OptimizerStep&) override { return absl::UnimplementedError(""); }
};

HeadSpec Spec(int32_t staging_slots) {
  return {.vocab_size = 100,
          .hidden_size = 8,
          .transform = {.valid_vocab_size = 100},
          .trainable = true,
          .staging_slots = staging_slots};
}

class MicroBatchPlanTest : public ::testing::Test {
 protected:
  // A term over rows [start, start + targets.size()).
  LossTerm& AddTerm(int64_t start, std::vector<int32_t> targets, EngineHead* head = nullptr) {
    targets_.push_back(std::make_unique<std::vector<int32_t>>(std::move(targets)));
    LossTerm term;
    term.head = head == nullptr ? &head_ : head;
    term.row_start = start;
    term.row_count = static_cast<int64_t>(targets_.back()->size());
    term.targets = *targets_.back();
    term.loss = CrossEntropySpec();
    terms_.push_back(term);
    return terms_.back();
  }

  MicroBatchPlan Plan(int64_t rows, const ChunkLimits& limits) {
    batch_.hidden.row_count = rows;
    batch_.hidden.column_count = 8;
    batch_.backward = true;
    batch_.terms = terms_;
    MicroBatchPlan plan = PlanTerms(batch_);
    PlanChunks(limits, &plan);
    return plan;
  }

  static std::vector<int64_t> Sizes(const MicroBatchPlan& plan) {
    std::vector<int64_t> sizes;
    for (const Chunk& chunk : plan.chunks) sizes.push_back(static_cast<int64_t>(chunk.batch_rows.size()));
    return sizes;
  }

  // Every row of every chunk says where it is.
  static void ExpectConsistent(const MicroBatchPlan& plan) {
    for (const Chunk& chunk : plan.chunks) {
      EXPECT_TRUE(std::is_sorted(chunk.batch_rows.begin(), chunk.batch_rows.end()));
      for (const TermChunk& part : chunk.terms) {
        ASSERT_FALSE(part.rows.empty());
        const LossTerm& term = *plan.terms[part.term].term;
        for (const ChunkRow& row : part.rows) {
          EXPECT_EQ(row.batch_row, term.row_start + row.term_row);
          ASSERT_LT(row.chunk_row, static_cast<int64_t>(chunk.batch_rows.size()));
          EXPECT_EQ(chunk.batch_rows[static_cast<size_t>(row.chunk_row)], row.batch_row);
          EXPECT_EQ(row.target, term.targets[static_cast<size_t>(row.term_row)]);
        }
      }
    }
  }

  EmptyHead head_{Spec(2)};
  std::vector<std::unique_ptr<std::vector<int32_t>>> targets_;
  std::vector<LossTerm> terms_;
  MicroBatch batch_;
};

TEST_F(MicroBatchPlanTest, ChunksAreEvenUpToTheGrain) {
  AddTerm(0, std::vector<int32_t>(1000, 1));
  using Rows = std::vector<int64_t>;
  const auto sizes = [this](const ChunkLimits& limits) {
    const MicroBatchPlan plan = Plan(1000, limits);
    ExpectConsistent(plan);
    return Sizes(plan);
  };
  EXPECT_EQ(sizes({4096, 1, false}), Rows({1000}));
  EXPECT_EQ(sizes({999, 1, false}), Rows({500, 500}));
  EXPECT_EQ(sizes({999, 128, false}), Rows({512, 488}));
  EXPECT_EQ(sizes({384, 128, false}), Rows({384, 384, 232}));
  EXPECT_EQ(sizes({400, 128, false}), Rows({384, 384, 232}));
  EXPECT_EQ(sizes({500, 128, false}), Rows({500, 500})) << "max_rows wins over the grain";
  EXPECT_EQ(sizes({300, 1, true}), Rows({300, 300, 300, 100}));
}

TEST_F(MicroBatchPlanTest, IgnoredRowsLeaveGaps) {
  AddTerm(2, {5, kIgnored, 7, 8, kIgnored});
  const MicroBatchPlan plan = Plan(8, {100, 1, false});
  ExpectConsistent(plan);
  ASSERT_EQ(plan.chunks.size(), 1u);
  EXPECT_EQ(plan.chunks[0].batch_rows, (std::vector<int64_t>{2, 4, 5}));
  EXPECT_FALSE(plan.chunks[0].ContiguousInBatch());
  EXPECT_TRUE(plan.chunks[0].terms[0].ContiguousInChunk());
  EXPECT_FALSE(plan.chunks[0].terms[0].ContiguousInBatch());
}

// Any factor gives a row a gradient; vectors of zeros ask for nothing.
TEST_F(MicroBatchPlanTest, RowsWithAFactorAlone) {
  const std::vector<float> weights = {1, 0, 0, 0, 0};
  const std::vector<float> entropy_factors = {0, 0, -2, 0, 0};
  const std::vector<float> lse_factors = {0, 0, 0, 3, 0};
  const std::vector<float> zeros(5, 0.0f);
  LossTerm& term = AddTerm(0, {1, 2, 3, 4, 5});
  term.token_weights = weights;
  term.entropy_factors = entropy_factors;
  term.lse_factors = lse_factors;
  MicroBatchPlan plan = Plan(5, {100, 1, false});
  ASSERT_EQ(plan.chunks.size(), 1u);
  EXPECT_EQ(plan.chunks[0].batch_rows, (std::vector<int64_t>{0, 2, 3}));
  EXPECT_EQ(plan.chunks[0].terms[0].rows[1].entropy_factor, -2);
  EXPECT_EQ(plan.chunks[0].terms[0].rows[2].lse_factor, 3);
  EXPECT_TRUE(plan.terms[0].wants_weighted && plan.terms[0].has_entropy_factors && plan.terms[0].has_lse_factors);
  // A row without a weight adds nothing to the sums, whatever its loss, and has a gradient that must be finite.
  BeginOutputs(&plan);
  RowReport report = {.hard = std::numeric_limits<double>::infinity(), .gradient_bound = 1};
  RecordRow(plan.chunks[0].terms[0].rows[1], report, true, &plan.terms[0]);
  EXPECT_EQ(plan.terms[0].sums.loss_sum, 0);
  EXPECT_EQ(plan.terms[0].non_finite, std::vector<uint8_t>(5, 0));
  report.gradient_bound = report.hard;
  RecordRow(plan.chunks[0].terms[0].rows[2], report, true, &plan.terms[0]);
  EXPECT_EQ(plan.terms[0].non_finite, (std::vector<uint8_t>{0, 0, 0, 1, 0}));
  terms_[0].entropy_factors = terms_[0].lse_factors = zeros;
  const MicroBatchPlan idle = Plan(5, {100, 1, false});
  EXPECT_EQ(Sizes(idle), std::vector<int64_t>{1});
  EXPECT_FALSE(idle.terms[0].wants_weighted || idle.terms[0].has_entropy_factors || idle.terms[0].has_lse_factors);
}

TEST_F(MicroBatchPlanTest, SlotsAreTakenForEachHeadOnce) {
  EmptyHead other(Spec(1));
  AddTerm(0, {1, 2, 3});
  AddTerm(3, {4, kIgnored}, &other);
  AddTerm(5, {6, 7});
  batch_.grad_weight = GradWeightMode::kStage;
  {
    MicroBatchPlan plan = Plan(7, {2, 1, false});
    ASSERT_TRUE(TakeSlots(&plan).ok());
    ASSERT_EQ(plan.slots.size(), 2u);
    EXPECT_EQ(plan.slots[0].row_count, 5);
    EXPECT_EQ(plan.slots[1].row_count, 1);
    EXPECT_EQ(plan.terms[2].slot, 0);
    EXPECT_EQ(head_.FreeStagingSlots(), 1);
    EXPECT_EQ(other.FreeStagingSlots(), 0);

    MicroBatchPlan second = Plan(7, {2, 1, false});
    EXPECT_TRUE(HasReason(TakeSlots(&second), ErrorReason::kStagingFull));
    EXPECT_EQ(head_.FreeStagingSlots(), 1) << "a plan that is refused keeps no slot";
    EXPECT_EQ(second.terms[0].slot, -1);

    const MicroBatchPlan moved = std::move(plan);
    EXPECT_EQ(head_.FreeStagingSlots(), 1);
  }
  EXPECT_EQ(head_.FreeStagingSlots(), 2);
  EXPECT_EQ(other.FreeStagingSlots(), 1);
}

TEST_F(MicroBatchPlanTest, ReportsAreAddedUp) {
  std::vector<float> token_loss(3, 0.0f);
  std::vector<int32_t> argmax(3, 0);
  const std::vector<float> weights = {2, -1, 1};
  LossTerm& term = AddTerm(0, {1, 2, 3});
  term.token_weights = weights;
  term.token_loss = token_loss.data();
  term.argmax = argmax.data();
  batch_.refuse_non_finite = true;
  MicroBatchPlan plan = Plan(3, {100, 1, false});
  BeginOutputs(&plan);
  EXPECT_EQ(argmax, std::vector<int32_t>(3, -1));
  const std::vector<ChunkRow>& rows = plan.chunks[0].terms[0].rows;
  RowReport report;
  report.soft = std::numeric_limits<double>::quiet_NaN();  // has no weight in a cross entropy
  report.hard = 3;
  report.z_loss = 0.5;
  report.argmax = 17;
  RecordRow(rows[0], report, true, &plan.terms[0]);
  RecordRow(rows[1], report, true, &plan.terms[0]);
  EXPECT_EQ(plan.terms[0].sums.hard_loss_sum, 3);
  EXPECT_EQ(plan.terms[0].sums.z_loss_sum, 0.5);
  EXPECT_EQ(plan.terms[0].sums.loss_sum, 3.5);
  EXPECT_EQ(token_loss[1], 3.5f);
  EXPECT_EQ(argmax[1], 17);
  std::vector<LossSums> sums;
  EXPECT_TRUE(FinishTerms(&plan, &sums).ok());
  report.gradient_bound = 1e39;  // not a number of fp32
  RecordRow(rows[2], report, true, &plan.terms[0]);
  EXPECT_TRUE(HasReason(FinishTerms(&plan, &sums), ErrorReason::kNonFiniteValues));
  EXPECT_EQ(sums.back().non_finite_row_count, 1);
}

}  // namespace
}  // namespace headwater
