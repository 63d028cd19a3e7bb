// The calls of LossEngine that hand its observer on: to a new head, to a contribution, and to the flow of rows.
#include <memory>
#include <optional>
#include <utility>

#include "headwater/kernels/engine.h"

namespace headwater {
namespace {

class ObservedFlow final : public RowFlow {
 public:
  ObservedFlow(EngineObserver& observer, RowFlow& flow) : observer_(observer), flow_(flow) {}
  absl::Status AwaitRows(int64_t row_end) override {
    const Visit visit(observer_);
    return flow_.AwaitRows(row_end);
  }
  absl::Status Decide(const DigestBuilder* rows) override {
    const Visit visit(observer_);
    return flow_.Decide(rows);
  }
  void GradHiddenReady(int64_t row_end) override {
    const Visit visit(observer_);
    flow_.GradHiddenReady(row_end);
  }

 private:
  class Visit {
   public:
    explicit Visit(EngineObserver& observer) : observer_(observer) { observer_.EnterFlow(); }
    ~Visit() { observer_.LeaveFlow(); }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;

   private:
    EngineObserver& observer_;
  };

  EngineObserver& observer_;
  RowFlow& flow_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<EngineHead>> LossEngine::CreateHead(const HeadSpec& spec) {
  const ObservedCall call(observer_.get(), "CreateHead");
  absl::StatusOr<std::unique_ptr<EngineHead>> head = DoCreateHead(spec);
  if (head.ok() && observer_ != nullptr) (*head)->observer_ = observer_.get();
  return head;
}

absl::StatusOr<MicroBatchResult> LossEngine::Compute(const MicroBatch& micro_batch) {
  if (observer_ == nullptr) return DoCompute(micro_batch);
  MicroBatch observed = micro_batch;
  std::optional<ObservedFlow> flow;
  if (micro_batch.flow != nullptr) observed.flow = &flow.emplace(*observer_, *micro_batch.flow);
  const ObservedCall call(observer_.get(), "Compute");
  absl::StatusOr<MicroBatchResult> result = DoCompute(observed);
  if (result.ok() && result->staged != nullptr) result->staged->observer_ = observer_.get();
  return result;
}

}  // namespace headwater
