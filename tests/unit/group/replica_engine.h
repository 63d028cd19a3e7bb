// ReplicaEngine: an engine all of whose heads have Parallelism::kRows, whatever their specification says.
#ifndef HEADWATER_TESTS_UNIT_GROUP_REPLICA_ENGINE_H_
#define HEADWATER_TESTS_UNIT_GROUP_REPLICA_ENGINE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "headwater/kernels/engine.h"

namespace headwater::testing {

class ReplicaEngine final : public LossEngine {
 public:
  explicit ReplicaEngine(std::unique_ptr<LossEngine> engine) : engine_(std::move(engine)) {}

  std::string name() const override { return engine_->name(); }
  std::vector<EngineDevice> devices() const override { return engine_->devices(); }
  const EngineOptions& options() const override { return engine_->options(); }
  absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec) const override { return engine_->PlanHead(ByRows(spec)); }
  absl::StatusOr<std::unique_ptr<EngineHead>> CreateHead(const HeadSpec& spec) override {
    return engine_->CreateHead(ByRows(spec));
  }
  int64_t planned_bytes() const override { return engine_->planned_bytes(); }
  absl::Status health() const override { return engine_->health(); }
  int64_t progress() const override { return engine_->progress(); }
  absl::StatusOr<MicroBatchResult> Compute(const MicroBatch& micro_batch) override { return engine_->Compute(micro_batch); }

 private:
  static HeadSpec ByRows(HeadSpec spec) {
    spec.parallelism = Parallelism::kRows;
    return spec;
  }

  const std::unique_ptr<LossEngine> engine_;
};

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_UNIT_GROUP_REPLICA_ENGINE_H_
