// FakeEngine: an engine whose numbers are whole, so that sums do not depend on order and every comparison can be bitwise.
//
// A row has the value v = hidden; with a teacher, the teacher's first weight (its whole part) x the teacher's first hidden element
// is added to v[0]. A row with target t adds loss_scale x token weight x v to row t of grad_weight and loss_scale x token weight to
// grad_bias[t]; its loss is token weight x v[0]; grad_hidden gets loss_scale x token weight x v x grad_hidden_scale, for each term
// over it; lse is the first element of the weight's row t. A row whose value has a NaN counts as non-finite. Optimizer: weight -=
// learning_rate x multiplier x gradient; moments add up gradients (and squares).
//
// It records calls by name, can fail the next call of a name, and can stop inside Compute() until it is told to go on. It also
// checks the engine's threading rule: two calls that touch one head at the same time fail the test, unless both are Compute()
// without staging. Rows that flow are awaited in two halves.
#ifndef HEADWATER_TESTS_UNIT_SERVER_FAKE_ENGINE_H_
#define HEADWATER_TESTS_UNIT_SERVER_FAKE_ENGINE_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/engine.h"

namespace headwater::testing {

// What an engine that is wrong does, for the test of a test.
enum class FakeBug {
  kNone,
  kDropsCommit,
  kAddsTwice,
  kLeaksSlot,  // of a contribution that is dropped
  kKeepsGradient,
  kAddsUndecided,     // rows whose flow decides against them
  kRepeatsOtherwise,  // a row that is computed again gets another gradient
  kAppliesByHalf,     // an update that a shard was not ready for is made
  kSwapsByHalf,       // of new weights the bias is forgotten
};

// What the engine and its heads share: fault injection and records.
class FakeControl {
 public:
  // The next call of `name` ("Compute", "Commit", "WriteTensor", "ReadTensor", "ZeroGradient", "ResetOptimizerState",
  // "ComputeGradientStats", "ApplyOptimizer", "AddToGradient") after `skip` more fails with `status`: with kShardNotReady before it
  // has changed anything, else after it has changed something where it changes anything. "Upload" is the part of a Compute() whose
  // rows flow that comes before its Decide().
  void FailNext(const std::string& name, const absl::Status& status, int skip = 0);
  void ClearFailures();
  // Called by the engine; returns the failure that is due.
  absl::Status Note(const std::string& name);
  // Called by the engine when a call has changed or computed something.
  void Done() const {
    if (on_done != nullptr) on_done();
  }
  // Calls so far.
  int CountOf(const std::string& name) const;
  // Called inside Compute(), if set: before it looks at rows, and after Decide() of a flow.
  std::function<void()> during_compute;
  // Called first by every call, and by Done(), if set.
  std::function<void()> on_call, on_done;
  FakeBug bug = FakeBug::kNone;

 private:
  struct Failure {
    absl::Status status;
    int skip;
  };
  mutable absl::Mutex mutex_;
  std::map<std::string, Failure> failures_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, int> counts_ ABSL_GUARDED_BY(mutex_);
};

class FakeHead : public EngineHead {
 public:
  FakeHead(const HeadSpec& spec, int32_t shard_count, FakeControl& control);

  const HeadSpec& spec() const override { return spec_; }
  const MemoryPlan& plan() const override { return plan_; }
  absl::Span<const VocabShard> shards() const override { return shards_; }
  int64_t ElementCount(HeadTensor tensor) const override { return static_cast<int64_t>(Tensor(tensor).size()); }
  DataType TensorDataType(HeadTensor tensor) const override;
  absl::Status DoReadTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const override;
  absl::Status DoWriteTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in) override;
  absl::Status DoZeroGradient() override;
  absl::Status DoAddToGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, double factor,
                               const float* in) override;
  absl::Status DoResetOptimizerState() override;
  absl::StatusOr<GradientStats> DoComputeGradientStats() const override;
  absl::Status DoApplyOptimizer(const OptimizerStep& step) override;
  int32_t FreeStagingSlots() const override { return spec_.staging_slots - slots_taken_; }

  // The numbers as they are; empty for a tensor that the head does not have. Without a master the stored tensor is the master.
  const std::vector<float>& Tensor(HeadTensor tensor) const;
  int64_t update_count() const { return update_count_; }  // of the last update

 private:
  friend class FakeEngine;
  friend class FakeStaged;
  class Use;  // one call's time with the head
  enum class Access { kNone, kShares, kAlone };

  bool has_master() const;

  const HeadSpec spec_;
  MemoryPlan plan_;
  std::vector<VocabShard> shards_;
  FakeControl& control_;
  mutable std::atomic<int> weight_users_ = 0, gradient_users_ = 0;
  std::atomic<int32_t> slots_taken_ = 0;  // contributions are destroyed while other calls run
  int64_t update_count_ = 0;
  // fp32 of every tensor that the head has; kWeight and kBias hold the rounded values.
  std::map<HeadTensor, std::vector<float>> tensors_;
};

class FakeEngine : public LossEngine {
 public:
  explicit FakeEngine(int32_t shard_count = 1);

  std::string name() const override { return "fake"; }
  std::vector<EngineDevice> devices() const override { return {}; }
  const EngineOptions& options() const override { return options_; }
  absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec) const override;
  absl::StatusOr<std::unique_ptr<EngineHead>> DoCreateHead(const HeadSpec& spec) override;
  int64_t planned_bytes() const override { return 0; }
  absl::StatusOr<MicroBatchResult> DoCompute(const MicroBatch& micro_batch) override;

  FakeControl& control() { return control_; }

 private:
  friend class FakeStaged;

  // What a micro-batch adds, by head and tensor.
  using Gradients = std::map<FakeHead*, std::map<HeadTensor, std::vector<float>>>;
  // Adds factor x gradients to the accumulators.
  static void Add(const Gradients& gradients, float factor);

  EngineOptions options_;
  FakeControl control_;
  absl::Mutex adding_;  // Compute() calls that overlap add one after the other
};

// Rounds to the nearest bfloat16, ties to even.
float RoundToBFloat16(float value);

// A small spec: fp32, trainable, two staging slots, SGD without momentum.
HeadSpec SmallSpec(int64_t vocab_size = 5, int64_t hidden_size = 3);

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_UNIT_SERVER_FAKE_ENGINE_H_
