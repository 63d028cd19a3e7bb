// HistoryEngine: an engine for random histories: whole numbers, small, quick, and open to view.
//
// A row with hidden state h, target t, token weight w in a term of scale s has the value v = h, in a JSD term with the teacher's
// first weight times its first hidden element added to v[0]. It adds s w v to row t of grad_weight and s w to grad_bias[t]; its
// loss is w v[0]; grad_hidden gets s w v; lse is the first element of the weight's row t. SGD: weight -= learning_rate x multiplier
// x gradient; moments add up gradients and their squares. So what a call saw, and how often it counted, can be told from the
// numbers.
//
// Rows that flow are awaited in two halves; what is added is added after the decision.
//
// One call can be made to fail, and the engine can be given one of some bugs, for the test of the test.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_ENGINE_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_ENGINE_H_

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "await_points.h"
#include "headwater/kernels/engine.h"

namespace headwater::history {

// What a planted bug does.
enum class EngineBug {
  kNone,
  kDropsCommit,
  kAddsTwice,
  kLeaksSlot,
  kKeepsGradient,
  kAddsUndecided,
  kRepeatsOtherwise,  // a row that is computed again gets another gradient
  kAppliesByHalf,     // an update that a shard was not ready for is made by the others
  kSwapsByHalf        // of new weights the bias is forgotten
};

class HistoryHead;

// What the engine and its heads share. Not thread-safe: a history runs in one thread at a time.
struct EngineControl {
  EngineBug bug = EngineBug::kNone;
  // The next call of this name fails: with kShardNotReady before it changes anything, else after. "Upload" is what comes before the
  // decision in a Compute() whose rows flow.
  const char* failing_call = nullptr;
  absl::Status failure;
  std::function<void()> during_compute;  // called once, then empty
  std::vector<HistoryHead*> heads;       // those that live, in the order of their creation
  AwaitPoints* await_points = nullptr;   // passed before and after each call that changes or computes something

  // A call of this name begins: the failure that is due in it.
  absl::Status Take(const char* call);
  // A call has done its work.
  void Done() const {
    if (await_points != nullptr) await_points->Pass();
  }
};

class HistoryHead : public EngineHead {
 public:
  HistoryHead(const HeadSpec& spec, const MemoryPlan& plan, int32_t shard_count, EngineControl& control);
  ~HistoryHead() override;

  const HeadSpec& spec() const override { return spec_; }
  const MemoryPlan& plan() const override { return plan_; }
  absl::Span<const VocabShard> shards() const override { return shards_; }
  int64_t ElementCount(HeadTensor tensor) const override { return static_cast<int64_t>(Tensor(tensor).size()); }
  DataType TensorDataType(HeadTensor) const override { return DataType::kFloat32; }
  absl::Status DoReadTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const override;
  absl::Status DoWriteTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in) override;
  absl::Status DoZeroGradient() override;
  absl::Status DoAddToGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, double factor,
                               const float* in) override;
  absl::Status DoResetOptimizerState() override;
  absl::StatusOr<GradientStats> DoComputeGradientStats() const override;
  absl::Status DoApplyOptimizer(const OptimizerStep& step) override;
  int32_t FreeStagingSlots() const override { return spec_.staging_slots - slots_taken_; }

  // The numbers as they are; empty for a tensor that the head does not have. Master and stored tensor are one.
  const std::vector<float>& Tensor(HeadTensor tensor) const;
  int64_t update_count() const { return update_count_; }  // that the last update was told

 private:
  friend class HistoryEngine;
  friend class HistoryStaged;

  std::vector<float>& Tensor(HeadTensor tensor) { return const_cast<std::vector<float>&>(std::as_const(*this).Tensor(tensor)); }

  const HeadSpec spec_;
  const MemoryPlan plan_;
  std::vector<VocabShard> shards_;
  EngineControl& control_;
  int32_t slots_taken_ = 0;
  int64_t update_count_ = 0;
  std::array<std::vector<float>, 11> tensors_;  // by value of HeadTensor
};

class HistoryEngine : public LossEngine {
 public:
  explicit HistoryEngine(int32_t shard_count) { options_.shard_count = shard_count; }

  std::string name() const override { return "history"; }
  std::vector<EngineDevice> devices() const override { return {}; }
  const EngineOptions& options() const override { return options_; }
  absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec) const override;
  absl::StatusOr<std::unique_ptr<EngineHead>> DoCreateHead(const HeadSpec& spec) override;
  int64_t planned_bytes() const override { return 0; }
  absl::StatusOr<MicroBatchResult> DoCompute(const MicroBatch& micro_batch) override;

  EngineControl& control() { return control_; }

 private:
  EngineOptions options_;
  EngineControl control_;
};

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_ENGINE_H_
