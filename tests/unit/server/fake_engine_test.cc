// The fake engine keeps the engine's contract where the server's core relies on it.
#include "fake_engine.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

#include "headwater/kernels/error.h"

namespace headwater::testing {
namespace {

class FakeEngineTest : public ::testing::Test {
 protected:
  std::unique_ptr<EngineHead> MakeHead(int32_t staging_slots) {
    HeadSpec spec = SmallSpec();
    spec.staging_slots = staging_slots;
    return *engine_.CreateHead(spec);
  }

  // Row i goes to target i of each head.
  absl::StatusOr<MicroBatchResult> Compute(const std::vector<EngineHead*>& heads, GradWeightMode mode) {
    std::vector<LossTerm> terms;
    for (EngineHead* head : heads) {
      LossTerm& term = terms.emplace_back();
      term.head = head;
      term.row_count = 2;
      term.targets = targets_;
      term.loss_scale = 2;
    }
    const MicroBatch micro_batch = {.hidden = {hidden_, 2, 3, DataType::kFloat32},
                                    .terms = terms,
                                    .backward = true,
                                    .grad_hidden = {grad_hidden_, 2, 3, DataType::kFloat32},
                                    .grad_weight = mode};
    return engine_.Compute(micro_batch);
  }

  static std::vector<float> Gradient(const EngineHead& head) {
    std::vector<float> values(static_cast<size_t>(head.ElementCount(HeadTensor::kGradWeight)));
    EXPECT_TRUE(head.ReadTensor(HeadTensor::kGradWeight, 0, head.ElementCount(HeadTensor::kGradWeight), values.data()).ok());
    return values;
  }

  const std::vector<int32_t> targets_ = {0, 1};
  const float hidden_[6] = {1, 2, 3, 4, 5, 6};
  float grad_hidden_[6] = {9, 9, 9, 9, 9, 9};
  const std::vector<float> added_ = {2, 4, 6, 8, 10, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  const std::vector<float> nothing_ = std::vector<float>(15, 0.0F);
  FakeEngine engine_;
};

TEST_F(FakeEngineTest, SeveralHeadsAreStagedTogether) {
  const auto first = MakeHead(1);
  const auto second = MakeHead(1);
  auto result = Compute({first.get(), second.get(), first.get()}, GradWeightMode::kStage);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(grad_hidden_[5], 18) << "three terms";
  EXPECT_EQ(first->FreeStagingSlots() + second->FreeStagingSlots(), 0);
  EXPECT_EQ(Gradient(*first), nothing_);
  EXPECT_TRUE(HasReason(Compute({second.get()}, GradWeightMode::kStage).status(), ErrorReason::kStagingFull));

  // Not ready: nothing changed, and it may be tried again.
  engine_.control().FailNext("Commit", MakeError(ErrorReason::kShardNotReady, "shard 0 could not begin"));
  EXPECT_TRUE(HasReason(result->staged->Commit(1), ErrorReason::kShardNotReady));
  EXPECT_EQ(Gradient(*first), nothing_);
  EXPECT_EQ(first->FreeStagingSlots() + second->FreeStagingSlots(), 0);
  ASSERT_TRUE(result->staged->Commit(1).ok());
  EXPECT_EQ(Gradient(*second), added_);
  EXPECT_EQ(Gradient(*first)[5], 24);
  EXPECT_EQ(first->FreeStagingSlots() + second->FreeStagingSlots(), 2);
}

TEST_F(FakeEngineTest, NoSlotIsTakenIfOneIsMissing) {
  const auto first = MakeHead(1);
  const auto second = MakeHead(0);
  EXPECT_TRUE(HasReason(Compute({first.get(), second.get()}, GradWeightMode::kStage).status(), ErrorReason::kStagingFull));
  EXPECT_EQ(first->FreeStagingSlots(), 1);
}

TEST_F(FakeEngineTest, AddsToTheGradient) {
  const auto head = MakeHead(0);
  const float in[] = {1, 2};
  ASSERT_TRUE(head->AddToGradient(HeadTensor::kGradWeight, 13, 2, 0.5, in).ok());
  EXPECT_EQ(Gradient(*head)[14], 1);
  EXPECT_TRUE(HasReason(head->AddToGradient(HeadTensor::kGradWeight, 14, 2, 1, in), ErrorReason::kChunkOutOfRange));
  EXPECT_TRUE(HasReason(head->AddToGradient(HeadTensor::kWeight, 0, 1, 1, in), ErrorReason::kInvalidField));
  EXPECT_TRUE(HasReason(head->AddToGradient(HeadTensor::kGradWeight, 0, 1, 1e39, in), ErrorReason::kInvalidField));
  engine_.control().FailNext("AddToGradient", MakeError(ErrorReason::kShardNotReady, "shard 0 could not begin"));
  EXPECT_TRUE(HasReason(head->AddToGradient(HeadTensor::kGradWeight, 0, 2, 1, in), ErrorReason::kShardNotReady));
  EXPECT_EQ(Gradient(*head)[0], 0);
  engine_.control().FailNext("AddToGradient", MakeError(ErrorReason::kEngineFailed, "shard 0 failed"));
  EXPECT_TRUE(HasReason(head->AddToGradient(HeadTensor::kGradWeight, 0, 2, 1, in), ErrorReason::kEngineFailed));
  EXPECT_EQ(Gradient(*head)[0], 1) << "part of it may be in";
}

// Dropping a contribution is no call on its heads: others may run.
TEST_F(FakeEngineTest, DestructionOverlapsOtherCalls) {
  const auto head = MakeHead(40);
  std::vector<std::unique_ptr<StagedContribution>> dropped;
  for (int i = 0; i < 30; ++i) dropped.push_back(std::move(Compute({head.get()}, GradWeightMode::kStage)->staged));
  std::thread dropper([&dropped] {
    while (!dropped.empty()) dropped.pop_back();
  });
  for (int i = 0; i < 30; ++i) {
    auto staged = std::move(Compute({head.get()}, GradWeightMode::kStage)->staged);
    EXPECT_TRUE(staged->Commit(1).ok());
    EXPECT_GE(head->FreeStagingSlots(), 10);
  }
  dropper.join();
  EXPECT_EQ(head->FreeStagingSlots(), 40);
  EXPECT_EQ(Gradient(*head)[0], 60);
}

}  // namespace
}  // namespace headwater::testing
