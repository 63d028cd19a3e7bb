// SelfTest: a cross entropy and a divergence whose results were computed once in exact arithmetic and are written down here.
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "headwater/kernels/engine.h"
#include "headwater/kernels/error.h"

namespace headwater {
namespace {

constexpr int64_t kVocabSize = 3;
constexpr int64_t kHiddenSize = 2;
constexpr double kTolerance = 2e-6;

// Student logits of the two rows: (0.5, 1, -0.5) and (0, 0.5, 1); the teacher's: (1, -1, 0) and (0.25, 0.75, -0.5).
constexpr float kStudentWeight[] = {0.5f, 0.0f, 1.0f, 0.5f, -0.5f, 1.0f};
constexpr float kTeacherWeight[] = {1.0f, 0.25f, -1.0f, 0.75f, 0.0f, -0.5f};
constexpr float kHidden[] = {1.0f, 0.0f, 0.0f, 1.0f};

absl::Status Check(const std::string& what, double expected, double actual) {
  if (std::abs(actual - expected) <= kTolerance) return absl::OkStatus();
  return MakeError(ErrorReason::kEngineFailed,
                   "self-test: " + what + " should be " + std::to_string(expected) + ", is " + std::to_string(actual));
}

absl::StatusOr<std::unique_ptr<EngineHead>> MakeHead(LossEngine& engine, const float* weight, bool trainable) {
  HeadSpec spec;
  spec.vocab_size = kVocabSize;
  spec.hidden_size = kHiddenSize;
  spec.transform.valid_vocab_size = kVocabSize;
  spec.trainable = trainable;
  absl::StatusOr<std::unique_ptr<EngineHead>> head = engine.CreateHead(spec);
  if (!head.ok()) return head.status();
  absl::Status status = (*head)->WriteTensor(HeadTensor::kWeight, 0, kVocabSize * kHiddenSize, weight);
  if (!status.ok()) return status;
  return head;
}

struct Expected {
  double loss_sum;
  double grad_hidden[4];
  double grad_weight[6];
};

// ln sum e^z - z_y of targets 1 and 2, and its derivatives.
constexpr Expected kCrossEntropy = {1.2844002760,
                                    {-0.3486769587, -0.1047736541, 0.6471175518, -0.3399216661},
                                    {0.3314989604, 0.1863237232, -0.4534506127, 0.3071958857, 0.1219516523, -0.4935196089}};
// beta = 1/2: the symmetrical Jensen-Shannon divergence.
constexpr Expected kDivergence = {0.2042218235,
                                  {0.0903659828, 0.0271540002, -0.1211087379, 0.0636167012},
                                  {-0.0859139917, -0.0348706829, 0.1175199830, -0.0574920366, -0.0316059913, 0.0923627196}};

absl::Status CheckTerm(LossEngine& engine, const std::string& name, const LossTerm& term, const Expected& expected) {
  std::vector<float> grad_hidden(4, 0);
  MicroBatch micro_batch;
  micro_batch.hidden = {kHidden, 2, kHiddenSize, DataType::kFloat32};
  micro_batch.terms = absl::MakeConstSpan(&term, 1);
  micro_batch.backward = true;
  micro_batch.grad_hidden = {grad_hidden.data(), 2, kHiddenSize, DataType::kFloat32};
  micro_batch.grad_weight = GradWeightMode::kAccumulate;
  absl::StatusOr<MicroBatchResult> result = engine.Compute(micro_batch);
  if (!result.ok()) return result.status();
  absl::Status status = Check(name + " loss", expected.loss_sum, result->terms[0].loss_sum);
  for (size_t i = 0; i < 4 && status.ok(); ++i) {
    status = Check(name + " grad_hidden " + std::to_string(i), expected.grad_hidden[i], static_cast<double>(grad_hidden[i]));
  }
  std::vector<float> grad_weight(6, 0);
  if (status.ok()) status = term.head->ReadTensor(HeadTensor::kGradWeight, 0, 6, grad_weight.data());
  for (size_t i = 0; i < 6 && status.ok(); ++i) {
    status = Check(name + " grad_weight " + std::to_string(i), expected.grad_weight[i], static_cast<double>(grad_weight[i]));
  }
  if (status.ok()) status = term.head->ZeroGradient();
  return status;
}

}  // namespace

absl::Status SelfTest(LossEngine& engine) {
  absl::StatusOr<std::unique_ptr<EngineHead>> student = MakeHead(engine, kStudentWeight, /*trainable=*/true);
  if (!student.ok()) return student.status();
  absl::StatusOr<std::unique_ptr<EngineHead>> teacher = MakeHead(engine, kTeacherWeight, /*trainable=*/false);
  if (!teacher.ok()) return teacher.status();
  const std::vector<int32_t> targets = {1, 2};
  LossTerm term;
  term.head = student->get();
  term.row_count = 2;
  term.targets = targets;
  term.loss = CrossEntropySpec();
  absl::Status status = CheckTerm(engine, "cross entropy", term, kCrossEntropy);
  if (!status.ok()) return status;
  term.targets = {};
  term.loss = JsdSpec();
  term.teacher_head = teacher->get();
  term.teacher_hidden = {kHidden, 2, kHiddenSize, DataType::kFloat32};
  return CheckTerm(engine, "divergence", term, kDivergence);
}

}  // namespace headwater
