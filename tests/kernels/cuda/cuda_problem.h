// Problems of real size on the GPU, and an engine that computes them: bf16 heads and rows in device memory.
#ifndef HEADWATER_TESTS_KERNELS_CUDA_CUDA_PROBLEM_H_
#define HEADWATER_TESTS_KERNELS_CUDA_CUDA_PROBLEM_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "headwater/kernels/engine.h"
#include "tests/kernels/cuda/cuda_support.h"

namespace headwater::testing {

struct ProblemShape {
  std::string name;
  int64_t rows = 0;
  int64_t width = 0;
  int64_t vocab = 0;
};

// The kind of logits. Kinds that name a probability or a loss have one column for each row, where the weight is a multiple of that
// row's hidden state.
enum class Regime {
  kFlat,         // standard deviation 1
  kRealistic,    // about 2 nats: ln(p / (1 - p)) of the targets from -6 to 3
  kWide,         // standard deviation 30
  kConfident,    // mean loss 0.004: ln(p / (1 - p)) from 3.9 to 9
  kThreeNines,   // p = 0.999
  kFiveNines,    // p = 0.99999
  kNineNines,    // p = 1 - 1e-9
  kNearlyEqual,  // divergence: the student's logits are the teacher's (standard deviation 3) plus noise of 0.03
};
const char* RegimeName(Regime regime);

// The inputs. `teacher_` parts are empty for the cross entropy; the teacher has the student's shape.
struct DeviceProblem {
  ProblemShape shape;
  Buffer hidden, weight;  // bf16 [rows, width], [vocab, width]
  Buffer teacher_hidden, teacher_weight;
  std::vector<int32_t> targets;  // [rows], all different
  Buffer device_targets;         // int32 [rows]
};
DeviceProblem MakeCrossEntropyProblem(const ProblemShape& shape, Regime regime);
DeviceProblem MakeDivergenceProblem(const ProblemShape& shape, Regime regime);

// An engine's results. grad_hidden and grad_weight are on the device.
struct DeviceOutcome {
  LossSums sums;
  std::vector<float> token_loss, lse, target_log_probability, entropy;  // empty if not asked for
  std::vector<int32_t> argmax;
  Buffer grad_hidden;  // bf16 [rows, width]
  Buffer grad_weight;  // fp32 [vocab, width]
};

// Bitwise the same, gradients included.
bool SameBits(const DeviceOutcome& a, const DeviceOutcome& b);

// Losses that a problem is computed with.
struct DeviceLoss {
  bool divergence = false;
  double beta = 0.5;
  double loss_scale = 1;
};

// An engine with a problem's head, and its teacher. `problem` must outlive it.
class DeviceEngine {
 public:
  DeviceEngine(const DeviceProblem& problem, EngineOptions options, int32_t staging_slots = 0);

  LossEngine& engine() { return *engine_; }
  EngineHead& head() { return *head_; }
  std::vector<float> ReadGradient() { return ReadFloats(*head_, HeadTensor::kGradWeight); }

  // Forward and backward on the accumulator, of the cross entropy of the problem's rows [first_row, first_row + row_count), which
  // are at `hidden`. The term is this object's: for one micro-batch at a time.
  MicroBatch Make(const void* hidden, MemorySpace hidden_memory, void* grad_hidden, MemorySpace grad_memory, int64_t first_row,
                  int64_t row_count);
  LossTerm& term() { return term_; }

  // Forward and backward on an accumulator of 0, rows and grad_hidden in device memory, or in page-locked host memory.
  DeviceOutcome Compute(const DeviceLoss& loss, MemorySpace memory = MemorySpace::kDevice);
  // Forward only, with every per-token output.
  DeviceOutcome ComputeTokenOutputs(const DeviceLoss& loss);

 private:
  DeviceOutcome Run(const DeviceLoss& loss, const MicroBatch& micro_batch, bool all_outputs);

  const DeviceProblem& problem_;
  std::unique_ptr<LossEngine> engine_;
  std::unique_ptr<EngineHead> head_, teacher_;
  LossTerm term_;
};

HeadSpec BFloat16Head(const ProblemShape& shape, bool trainable);
// Sets a head's weight from bf16 values in device memory.
void WriteWeight(EngineHead& head, const Buffer& weight);

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_CUDA_CUDA_PROBLEM_H_
