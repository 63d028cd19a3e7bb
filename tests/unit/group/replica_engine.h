// ReplicaEngine: an engine all of whose heads have Parallelism::kRows, whatever their specification says.
#ifndef HEADWATER_TESTS_UNIT_GROUP_REPLICA_ENGINE_H_
#define HEADWATER_TESTS_UNIT_GROUP_REPLICA_ENGINE_H_

#include <memory>

#include "tests/unit/forwarding_engine.h"

namespace headwater::testing {

class ReplicaEngine final : public ForwardingEngine {
 public:
  using ForwardingEngine::ForwardingEngine;

  absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec) const override { return ForwardingEngine::PlanHead(ByRows(spec)); }
  absl::StatusOr<std::unique_ptr<EngineHead>> DoCreateHead(const HeadSpec& spec) override {
    return ForwardingEngine::DoCreateHead(ByRows(spec));
  }

 private:
  static HeadSpec ByRows(HeadSpec spec) {
    spec.parallelism = Parallelism::kRows;
    return spec;
  }
};

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_UNIT_GROUP_REPLICA_ENGINE_H_
