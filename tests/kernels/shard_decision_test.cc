// Work that changes a head is decided once for all its shards. A shard that is not ready stops it with nothing changed; a shard
// that fails afterwards is an engine failure. Failures come from EngineOptions::shard_probe.
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/error.h"
#include "tests/kernels/support/comparison.h"

namespace headwater::testing {
namespace {

// A failure of one shard in one phase, while armed.
struct ShardFault {
  std::atomic<bool> armed{false};
  ShardPhase phase = ShardPhase::kPrepare;
  int32_t rank = 0;
};

constexpr int32_t kStagingSlots = 2;

// Everything that a head holds, bit for bit.
using State = std::map<HeadTensor, std::vector<double>>;

State ReadState(const EngineHead& head) {
  State state;
  for (int32_t tensor = 1; tensor <= 10; ++tensor) {
    state[static_cast<HeadTensor>(tensor)] = ReadTensorValues(head, static_cast<HeadTensor>(tensor));
  }
  return state;
}

ProblemOptions Options(uint64_t seed) { return {.bias = true, .staging_slots = kStagingSlots, .seed = seed}; }

// A trainable head with momentum on an engine whose shards can be made to fail. It has been worked with: nothing is 0.
class Bench {
 public:
  explicit Bench(int32_t shard_count) : problem_(MakeProblem(Options(1))), other_(MakeProblem(Options(2))) {
    problem_.heads[0].spec.optimizer = AdamWSpec{};
    problem_.heads.push_back(other_.heads[0]);
    EngineOptions options = {.shard_count = shard_count};
    options.shard_probe = [this](ShardPhase phase, int32_t rank) -> absl::Status {
      if (!fault.armed || fault.phase != phase || fault.rank != rank) return absl::OkStatus();
      return absl::ResourceExhaustedError("the probe says no");
    };
    heads_ = std::make_unique<LoadedHeads>(problem_.heads, options);
    other_.terms[0].head = 1;
    heads_->Compute(problem_);
    heads_->Compute(other_);
    EXPECT_TRUE(head().ApplyOptimizer(Step()).ok());
    heads_->Compute(problem_);
  }

  static OptimizerStep Step() { return {.learning_rate = 0.125, .settings = AdamWSpec{}}; }

  EngineHead& head() { return heads_->head(0); }
  // A head that takes part in nothing.
  EngineHead& bystander() { return heads_->head(1); }
  LoadedHeads& heads() { return *heads_; }
  const Problem& problem() const { return problem_; }
  const Problem& other() const { return other_; }

  ShardFault fault;

 private:
  Problem problem_;
  Problem other_;
  std::unique_ptr<LoadedHeads> heads_;
};

struct Operation {
  const char* name;
  // Called twice if the first is refused; a test has staged the contribution before.
  std::function<absl::Status(Bench&, StagedContribution*)> run;
};

std::vector<Operation> Operations(int32_t shard_count) {
  std::vector<Operation> all = {
      {"Compute",
       [](Bench& bench, StagedContribution*) { return bench.heads().TryCompute(bench.problem(), ComputeOptions()).status(); }},
      {"Commit", [](Bench&, StagedContribution* staged) { return staged->Commit(0.5); }},
      {"AddToGradient",
       [](Bench& bench, StagedContribution*) {
         const std::vector<float> in(static_cast<size_t>(bench.head().ElementCount(HeadTensor::kGradWeight)), 0.25f);
         return bench.head().AddToGradient(HeadTensor::kGradWeight, 0, static_cast<int64_t>(in.size()), 3, in.data());
       }},
      {"ApplyOptimizer", [](Bench& bench, StagedContribution*) { return bench.head().ApplyOptimizer(Bench::Step()); }},
      {"ZeroGradient", [](Bench& bench, StagedContribution*) { return bench.head().ZeroGradient(); }},
      {"ResetOptimizerState", [](Bench& bench, StagedContribution*) { return bench.head().ResetOptimizerState(); }},
  };
  if (shard_count > 1) {  // a range on one shard is that shard's alone
    all.push_back({"WriteTensor", [](Bench& bench, StagedContribution*) {
                     const std::vector<float> in(static_cast<size_t>(bench.head().ElementCount(HeadTensor::kWeight)), 0.5f);
                     return bench.head().WriteTensor(HeadTensor::kWeight, 0, static_cast<int64_t>(in.size()), in.data());
                   }});
  }
  return all;
}

class ShardDecision : public ::testing::TestWithParam<int32_t> {};

TEST_P(ShardDecision, NotReadyChangesNothingAndTheNextCallWorks) {
  const int32_t shard_count = GetParam();
  for (const Operation& operation : Operations(shard_count)) {
    Bench undisturbed(shard_count);
    const std::unique_ptr<StagedContribution> undisturbed_staged = undisturbed.heads().Stage(undisturbed.problem());
    ASSERT_TRUE(operation.run(undisturbed, undisturbed_staged.get()).ok()) << operation.name;
    const State expected = ReadState(undisturbed.head());

    Bench bench(shard_count);
    const std::unique_ptr<StagedContribution> staged = bench.heads().Stage(bench.problem());
    const State before = ReadState(bench.head());
    EXPECT_NE(before, expected) << operation.name << " does nothing that could be seen";
    for (int32_t rank = 0; rank < shard_count; ++rank) {
      SCOPED_TRACE(std::string(operation.name) + ", shard " + std::to_string(rank));
      bench.fault.rank = rank;
      bench.fault.armed = true;
      const absl::Status status = operation.run(bench, staged.get());
      bench.fault.armed = false;
      ASSERT_TRUE(HasReason(status, ErrorReason::kShardNotReady)) << status;
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
      EXPECT_EQ(GetErrorMetadata(status)["shard"], std::to_string(rank));
      EXPECT_EQ(ReadState(bench.head()), before);
      EXPECT_EQ(bench.head().FreeStagingSlots(), kStagingSlots - 1);
    }
    const absl::Status status = operation.run(bench, staged.get());
    ASSERT_TRUE(status.ok()) << operation.name << ": " << status;
    EXPECT_EQ(ReadState(bench.head()), expected) << operation.name;
  }
}

TEST_P(ShardDecision, AFailureAfterwardsIsTheEnginesAndStaysWithItsHead) {
  const int32_t shard_count = GetParam();
  for (const Operation& operation : Operations(shard_count)) {
    SCOPED_TRACE(operation.name);
    Bench bench(shard_count);
    std::unique_ptr<StagedContribution> staged = bench.heads().Stage(bench.problem());
    const State before = ReadState(bench.head());
    const State bystander = ReadState(bench.bystander());
    bench.fault.phase = ShardPhase::kAct;
    bench.fault.rank = shard_count / 2;
    bench.fault.armed = true;
    const absl::Status status = operation.run(bench, staged.get());
    bench.fault.armed = false;
    ASSERT_TRUE(HasReason(status, ErrorReason::kEngineFailed)) << status;

    // The others continue undisturbed, and so does the head itself, once it has been restored.
    EXPECT_EQ(ReadState(bench.bystander()), bystander);
    EXPECT_TRUE(bench.heads().TryCompute(bench.other(), ComputeOptions()).ok());
    staged.reset();
    EXPECT_EQ(bench.head().FreeStagingSlots(), kStagingSlots);
    for (const auto& [tensor, values] : before) WriteTensorValues(bench.head(), tensor, values);
    EXPECT_EQ(ReadState(bench.head()), before);
    Bench undisturbed(shard_count);
    EXPECT_TRUE(bench.heads().Compute(bench.problem()).gradients[0] ==
                undisturbed.heads().Compute(undisturbed.problem()).gradients[0]);
  }
}

// A contribution that could not be staged leaves its slot free.
TEST_P(ShardDecision, StagingThatFailsLeavesNoSlotTaken) {
  for (const ShardPhase phase : {ShardPhase::kPrepare, ShardPhase::kAct}) {
    Bench bench(GetParam());
    const State before = ReadState(bench.head());
    bench.fault.phase = phase;
    bench.fault.armed = true;
    const ComputeOptions stage = {.grad_weight = GradWeightMode::kStage};
    const absl::Status status = bench.heads().TryCompute(bench.problem(), stage).status();
    bench.fault.armed = false;
    EXPECT_TRUE(HasReason(status, phase == ShardPhase::kPrepare ? ErrorReason::kShardNotReady : ErrorReason::kEngineFailed))
        << status;
    EXPECT_EQ(bench.head().FreeStagingSlots(), kStagingSlots);
    EXPECT_EQ(ReadState(bench.head()), before);
    EXPECT_TRUE(bench.heads().TryCompute(bench.problem(), stage).ok());
  }
}

INSTANTIATE_TEST_SUITE_P(Shards, ShardDecision, ::testing::Values(1, 3, 7),
                         [](const auto& test) { return std::to_string(test.param); });

}  // namespace
}  // namespace headwater::testing
