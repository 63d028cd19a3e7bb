#include "engine.h"

#include <utility>

#include "headwater/kernels/error.h"

namespace headwater::history {
namespace {

// Takes every decision for a yes, and keeps it.
class UndecidedFlow : public RowFlow {
 public:
  explicit UndecidedFlow(RowFlow& flow) : flow_(flow) {}
  absl::Status AwaitRows(int64_t row_end) override { return flow_.AwaitRows(row_end); }
  absl::Status Decide(const DigestBuilder* rows) override {
    decision = flow_.Decide(rows);
    return absl::OkStatus();
  }
  void GradHiddenReady(int64_t row_end) override { flow_.GradHiddenReady(row_end); }

  absl::Status decision;

 private:
  RowFlow& flow_;
};

}  // namespace

class HistoryEngine::Head : public testing::FakeHead {
 public:
  Head(const HeadSpec& spec, HistoryEngine& engine)
      : FakeHead(spec, engine.options().shard_count, engine.control()), engine_(engine) {
    engine_.heads.push_back(this);
  }
  ~Head() override { std::erase(engine_.heads, this); }

  absl::Status DoWriteTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in) override {
    const bool forgets = engine_.bug_ == EngineBug::kSwapsByHalf && tensor == HeadTensor::kBias;
    return forgets ? engine_.control().Note("WriteTensor") : FakeHead::DoWriteTensor(tensor, element_start, element_count, in);
  }
  absl::Status DoZeroGradient() override {
    return engine_.bug_ == EngineBug::kKeepsGradient ? engine_.control().Note("ZeroGradient") : FakeHead::DoZeroGradient();
  }
  absl::Status DoApplyOptimizer(const OptimizerStep& step) override {
    absl::Status status = FakeHead::DoApplyOptimizer(step);
    if (!status.ok() && engine_.bug_ == EngineBug::kAppliesByHalf) FakeHead::DoApplyOptimizer(step).IgnoreError();
    return status;
  }

 private:
  HistoryEngine& engine_;
};

// Commits not at all, or twice.
class HistoryEngine::Staged : public StagedContribution {
 public:
  Staged(std::unique_ptr<StagedContribution> contribution, bool drops) : contribution_(std::move(contribution)), drops_(drops) {}
  absl::Status DoCommit(double factor) override {
    if (!drops_) return contribution_->Commit(2 * factor);
    contribution_.reset();
    return absl::OkStatus();
  }

 private:
  std::unique_ptr<StagedContribution> contribution_;
  const bool drops_;
};

HistoryEngine::HistoryEngine(int32_t shard_count, EngineBug bug) : FakeEngine(shard_count), bug_(bug) {
  control().leaks_slots = bug == EngineBug::kLeaksSlot;
  control().during_compute = [this] {
    if (const std::function<void()> work = std::exchange(during_compute, nullptr); work != nullptr) work();
  };
}

absl::StatusOr<std::unique_ptr<EngineHead>> HistoryEngine::DoCreateHead(const HeadSpec& spec) {
  if (absl::Status status = control().Note("CreateHead"); !status.ok()) return status;
  return std::make_unique<Head>(spec, *this);
}

absl::StatusOr<MicroBatchResult> HistoryEngine::DoCompute(const MicroBatch& micro_batch) {
  if (bug_ == EngineBug::kAddsUndecided && micro_batch.flow != nullptr) {
    UndecidedFlow flow(*micro_batch.flow);
    MicroBatch undecided = micro_batch;
    undecided.flow = &flow;
    absl::StatusOr<MicroBatchResult> result = FakeEngine::DoCompute(undecided);
    if (!flow.decision.ok()) return flow.decision;
    return result;
  }
  absl::StatusOr<MicroBatchResult> result = FakeEngine::DoCompute(micro_batch);
  if (!result.ok()) return result;
  const bool is_repeat = micro_batch.backward && micro_batch.grad_weight == GradWeightMode::kNone;
  if (bug_ == EngineBug::kRepeatsOtherwise && is_repeat && micro_batch.grad_hidden.data != nullptr) {
    ++static_cast<float*>(micro_batch.grad_hidden.data)[0];
  }
  if ((bug_ == EngineBug::kDropsCommit || bug_ == EngineBug::kAddsTwice) && result->staged != nullptr) {
    result->staged = std::make_unique<Staged>(std::move(result->staged), bug_ == EngineBug::kDropsCommit);
  }
  return result;
}

}  // namespace headwater::history
