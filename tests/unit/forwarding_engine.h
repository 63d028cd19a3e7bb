// ForwardingEngine: an engine that is another one, for those that differ from it in a call or two.
#ifndef HEADWATER_TESTS_UNIT_FORWARDING_ENGINE_H_
#define HEADWATER_TESTS_UNIT_FORWARDING_ENGINE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "headwater/kernels/engine.h"

namespace headwater::testing {

class ForwardingEngine : public LossEngine {
 public:
  explicit ForwardingEngine(std::unique_ptr<LossEngine> engine) : engine_(std::move(engine)) {}

  std::string name() const override { return engine_->name(); }
  std::vector<EngineDevice> devices() const override { return engine_->devices(); }
  const EngineOptions& options() const override { return engine_->options(); }
  absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec) const override { return engine_->PlanHead(spec); }
  absl::StatusOr<std::unique_ptr<EngineHead>> DoCreateHead(const HeadSpec& spec) override { return engine_->CreateHead(spec); }
  int64_t planned_bytes() const override { return engine_->planned_bytes(); }
  absl::Status DoHealth() const override { return engine_->health(); }
  int64_t progress() const override { return engine_->progress(); }
  absl::StatusOr<MicroBatchResult> DoCompute(const MicroBatch& micro_batch) override { return engine_->Compute(micro_batch); }

 private:
  const std::unique_ptr<LossEngine> engine_;
};

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_UNIT_FORWARDING_ENGINE_H_
