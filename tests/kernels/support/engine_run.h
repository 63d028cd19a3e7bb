// Runs a problem on an engine, with guards around everything the engine may touch.
#ifndef HEADWATER_TESTS_KERNELS_SUPPORT_ENGINE_RUN_H_
#define HEADWATER_TESTS_KERNELS_SUPPORT_ENGINE_RUN_H_

#include <array>
#include <cstdint>
#include <deque>
#include <iterator>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "kernels/reference/loss_reference.h"
#include "tests/kernels/support/problem.h"

namespace headwater::testing {

// An output buffer between canaries, filled with a pattern that is not a valid result.
class GuardedBuffer {
 public:
  GuardedBuffer() = default;
  GuardedBuffer(int64_t bytes, uint8_t poison);
  uint8_t* data() { return storage_.data() + kGuardBytes; }
  const uint8_t* data() const { return storage_.data() + kGuardBytes; }
  int64_t bytes() const { return static_cast<int64_t>(storage_.size()) - 2 * kGuardBytes; }
  bool guards_intact() const;
  bool untouched() const;

 private:
  static constexpr int64_t kGuardBytes = 64;
  std::vector<uint8_t> storage_;
  uint8_t poison_ = 0;
};

// The accumulator of a head, bit for bit.
struct Gradient {
  std::vector<float> weight;
  std::vector<float> bias;
  bool operator==(const Gradient& other) const;  // bitwise
  double SquaredNorm() const;
};

struct TermOutcome {
  LossSums sums;
  // Empty if not asked for.
  std::vector<float> token_loss, lse, target_log_probability, entropy, mean_logits, log_sum_sq_probs;
  std::vector<int32_t> argmax;
};

// The outputs of floats for each token: where an engine writes one, and where it is kept. The first is the only one of a top-k
// loss.
struct TokenOutput {
  const char* name;
  float* LossTerm::*written;
  std::vector<float> TermOutcome::*kept;
  std::vector<double> reference::TermResult::*expected;
};
#define HEADWATER_TOKEN_OUTPUT(name) \
  { #name, &LossTerm::name, &TermOutcome::name, &reference::TermResult::name }
inline constexpr TokenOutput kTokenOutputs[] = {
    HEADWATER_TOKEN_OUTPUT(token_loss), HEADWATER_TOKEN_OUTPUT(lse),         HEADWATER_TOKEN_OUTPUT(target_log_probability),
    HEADWATER_TOKEN_OUTPUT(entropy),    HEADWATER_TOKEN_OUTPUT(mean_logits), HEADWATER_TOKEN_OUTPUT(log_sum_sq_probs)};
#undef HEADWATER_TOKEN_OUTPUT

struct Outcome {
  std::vector<TermOutcome> terms;
  std::vector<uint8_t> grad_hidden_bytes;
  std::vector<double> grad_hidden;  // decoded; empty if not asked for
  std::vector<Gradient> gradients;  // of every head, after the call; empty ones for frozen heads
  // True if every output of the two is bitwise the same.
  bool BitwiseEquals(const Outcome& other) const;
};

struct ComputeOptions {
  bool backward = true;
  bool grad_hidden = true;
  bool token_outputs = true;
  GradWeightMode grad_weight = GradWeightMode::kAccumulate;
  bool refuse_non_finite = false;
  RowFlow* flow = nullptr;
  bool read_gradients = true;  // into the outcome, after the call
};

// A MicroBatch with the memory it points to. Tests may change `micro_batch` and `terms` before they hand it to the engine.
class PreparedMicroBatch {
 public:
  // `heads` in the problem's order.
  PreparedMicroBatch(const Problem& problem, const std::vector<EngineHead*>& heads, const ComputeOptions& options);
  PreparedMicroBatch(const PreparedMicroBatch&) = delete;
  PreparedMicroBatch& operator=(const PreparedMicroBatch&) = delete;

  MicroBatch micro_batch;
  std::vector<LossTerm> terms;

  // Copies the outputs out, and fails the test if a canary or an input has changed.
  void Collect(const MicroBatchResult& result, Outcome* outcome) const;
  void ExpectGuardsAndInputsIntact() const;
  // After a refused call: nothing has been written at all.
  void ExpectOutputsUntouched() const;

 private:
  // A term's.
  struct Inputs {
    std::vector<int32_t> targets;
    std::vector<float> token_weights, entropy_factors, lse_factors, class_weights;
    std::vector<uint8_t> teacher_hidden;
    bool operator==(const Inputs&) const = default;
  };
  using Outputs = std::array<GuardedBuffer, std::size(kTokenOutputs) + 1>;  // the last one is argmax

  std::vector<uint8_t> hidden_, hidden_copy_;
  GuardedBuffer grad_hidden_;
  std::deque<Inputs> inputs_, inputs_copy_;
  std::deque<Outputs> outputs_;
};

// The engine under test, which must be made.
std::unique_ptr<LossEngine> MakeSuiteEngine(const EngineOptions& options = {});

// A problem's heads on an engine. A head without values starts at 0.
class LoadedHeads {
 public:
  // On an engine of their own.
  LoadedHeads(const std::vector<TestHead>& heads, const EngineOptions& options);
  // On an engine that outlives them.
  LoadedHeads(LossEngine& engine, const std::vector<TestHead>& heads);

  LossEngine& engine() { return engine_; }
  EngineHead& head(int index) { return *heads_[static_cast<size_t>(index)]; }
  std::vector<EngineHead*> pointers() const;
  Gradient ReadGradient(int head) const;
  std::vector<Gradient> ReadGradients() const;
  void ZeroGradients();

  // Computes a problem whose heads are these; its own are not looked at. Any error fails the test.
  Outcome Compute(const Problem& problem, const ComputeOptions& options = {});
  // The same, keeping the contribution.
  std::unique_ptr<StagedContribution> Stage(const Problem& problem, ComputeOptions options = {}, Outcome* outcome = nullptr);
  absl::StatusOr<MicroBatchResult> TryCompute(const Problem& problem, const ComputeOptions& options, Outcome* outcome = nullptr);

 private:
  const std::unique_ptr<LossEngine> own_engine_;
  LossEngine& engine_;
  std::vector<std::unique_ptr<EngineHead>> heads_;
};

// One computation on a fresh engine.
Outcome RunOnce(const Problem& problem, const EngineOptions& engine_options = {}, const ComputeOptions& options = {});

// Copies a whole tensor out, decoded.
std::vector<double> ReadTensorValues(const EngineHead& head, HeadTensor tensor);
// Sets a whole tensor; values are rounded to its type.
void WriteTensorValues(EngineHead& head, HeadTensor tensor, const std::vector<double>& values);

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_SUPPORT_ENGINE_RUN_H_
