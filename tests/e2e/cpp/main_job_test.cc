// The main job through the C++ client and the real server, against double precision.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "headwater/client/client.h"
#include "tests/e2e/cpp/support/fp64_head.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace headwater::client;

// Odd sizes, so that nothing fits a vector by accident.
constexpr int64_t kVocabSize = 211;
constexpr int64_t kHiddenSize = 23;
constexpr int64_t kTeacherHiddenSize = 31;
constexpr int64_t kRows = 37;
// docs: fp32 tolerances of losses and gradients.
constexpr double kLossTolerance = 1e-6;
constexpr double kGradientTolerance = 1e-5;

std::vector<float> Weight(uint32_t seed, int64_t hidden_size) { return RandomFloats(seed, kVocabSize * hidden_size, 0.3F); }
std::vector<float> Hidden(uint32_t seed, int64_t hidden_size) { return RandomFloats(seed, kRows * hidden_size, 1.0F); }
std::vector<float> Bias(uint32_t seed) { return RandomFloats(seed, kVocabSize, 0.1F); }

Head MakeHead(Client client, const std::string& name, bool trainable, int64_t hidden_size, uint32_t seed) {
  HeadSpec spec = {.vocab_size = kVocabSize, .hidden_size = hidden_size, .has_bias = true, .trainable = trainable};
  if (trainable) spec.optimizer = AdamW{.weight_decay = 0.1};
  if (trainable) spec.staging_slots = 2;
  Head head = Value(client.CreateHead(name, spec));
  Value(head.UploadWeights(HeadTensor::kWeight, TensorView::Float32(Weight(seed, hidden_size))));
  const HeadInfo info = Value(head.UploadWeights(HeadTensor::kBias, TensorView::Float32(Bias(seed))));
  EXPECT_EQ(info.state, HeadState::kReady);
  return head;
}

Fp64Head MakeReference(int64_t hidden_size, uint32_t seed) {
  return Fp64Head(kVocabSize, hidden_size, Weight(seed, hidden_size), Bias(seed));
}

MicroBatchOptions Submission(int64_t step, int64_t micro_batch) { return {.step = step, .micro_batch = micro_batch}; }

TEST(MainJob, ASlotThatIsMissingIsReportedOnce) {
  ServerProcess server;
  std::vector<std::string> notices;
  ClientOptions options = {.transport = Transport::kGrpc};
  options.on_notice = [&notices](const std::string& sentence) { notices.push_back(sentence); };
  Head head = MakeHead(server.Connect(options), "student", true, kHiddenSize, 1);  // two slots
  const std::vector<float> hidden = Hidden(2, kHiddenSize);
  for (int64_t id = 0; id < 4; ++id) {
    MicroBatchOptions late = Submission(0, id);
    late.commit = CommitMode::kExplicit;
    late.allow_held = true;
    Value(head.CrossEntropy(RowsView::Float32(hidden, kHiddenSize), RandomTargets(3, kRows, kVocabSize), {}, late).Get());
    EXPECT_EQ(notices.size(), id < 2 ? 0u : 1u);
  }
  EXPECT_NE(notices[0].find("staging_slots"), std::string::npos) << notices[0];
}

TEST(MainJob, TrainsTwoStepsAsDoublePrecisionDoes) {
  ServerProcess server({"--shards=3"});
  // 10 rows a chunk: several chunks up, and the last one is short.
  Client client = server.Connect({.chunk_bytes = 10 * kHiddenSize * 4});
  Head student = MakeHead(client, "student", true, kHiddenSize, 1);
  Head teacher = MakeHead(client, "teacher", false, kTeacherHiddenSize, 2);
  Fp64Head reference = MakeReference(kHiddenSize, 1);
  const Fp64Head reference_teacher = MakeReference(kTeacherHiddenSize, 2);
  const double scale = 1.0 / 100;

  for (int64_t step = 0; step < 2; ++step) {
    const uint32_t seed = 100 + 10 * static_cast<uint32_t>(step);
    const std::vector<float> hidden = Hidden(seed, kHiddenSize);
    const std::vector<float> teacher_hidden = Hidden(seed + 1, kTeacherHiddenSize);
    std::vector<int32_t> targets = RandomTargets(seed + 2, kRows, kVocabSize);
    targets[3] = -100;
    const RowsView rows = RowsView::Float32(hidden, kHiddenSize);

    // Three under way at once: eager cross entropy, explicit cross entropy, eager divergence; a fourth is discarded.
    MicroBatchOptions eager = Submission(step, 0);
    eager.loss_scale = scale;
    eager.outputs = {.loss = true, .lse = true, .target_log_probability = true, .entropy = true, .argmax = true};
    MicroBatchOptions late = Submission(step, 1);
    late.loss_scale = scale;
    late.commit = CommitMode::kExplicit;
    MicroBatchOptions divergence = Submission(step, 2);
    divergence.loss_scale = scale;
    MicroBatchOptions dropped = Submission(step, 3);
    dropped.commit = CommitMode::kExplicit;
    JsdOptions jsd = {.beta = 0.3, .student_temperature = 1.5, .teacher_temperature = 2.0};
    Future<LossResult> eager_future = student.CrossEntropy(rows, targets, {}, eager);
    Future<LossResult> late_future = student.CrossEntropy(rows, targets, {}, late);
    Future<LossResult> divergence_future =
        student.Jsd(rows, teacher, RowsView::Float32(teacher_hidden, kTeacherHiddenSize), {}, jsd, divergence);
    Future<LossResult> dropped_future = student.CrossEntropy(rows, targets, {}, dropped);

    const LossResult eager_result = Value(eager_future.Get());
    const LossResult late_result = Value(late_future.Get());
    const LossResult divergence_result = Value(divergence_future.Get());
    Value(dropped_future.Get());
    EXPECT_TRUE(Value(student.Discard(step, 3).Get()).dropped);
    EXPECT_FALSE(Value(student.Commit(step, 1, 0.5).Get()).replayed);
    EXPECT_TRUE(Value(student.Commit(step, 1, 0.5).Get()).replayed);

    const Fp64Head::Loss eager_expected = reference.CrossEntropy(hidden, targets, scale, 1.0);
    const Fp64Head::Loss late_expected = reference.CrossEntropy(hidden, targets, scale, 0.5);
    const Fp64Head::Loss divergence_expected = reference.Jsd(hidden, reference_teacher, teacher_hidden, 0.3, 1.5, 2.0, scale);
    EXPECT_LE(std::abs(eager_result.loss_sum / eager_expected.sum - 1), kLossTolerance);
    EXPECT_LE(std::abs(late_result.loss_sum / late_expected.sum - 1), kLossTolerance);
    EXPECT_LE(std::abs(divergence_result.loss_sum / divergence_expected.sum - 1), kLossTolerance);
    EXPECT_LE(RelativeError(eager_result.grad_hidden.float32(), eager_expected.grad_hidden), kGradientTolerance);
    EXPECT_LE(RelativeError(late_result.grad_hidden.float32(), late_expected.grad_hidden), kGradientTolerance);
    EXPECT_LE(RelativeError(divergence_result.grad_hidden.float32(), divergence_expected.grad_hidden), kGradientTolerance);
    EXPECT_EQ(eager_result.grad_hidden.shape(), (std::vector<int64_t>{kRows, kHiddenSize}));
    EXPECT_EQ(eager_result.valid_token_count, kRows - 1);
    EXPECT_EQ(eager_result.state, ContributionState::kCommitted);
    EXPECT_EQ(late_result.state, ContributionState::kStaged);
    EXPECT_EQ(eager_result.step, step);
    EXPECT_EQ(eager_result.digest.size(), 16u);

    double token_loss_sum = 0;
    ASSERT_EQ(eager_result.token_loss.size(), static_cast<size_t>(kRows));
    for (const float loss : eager_result.token_loss) token_loss_sum += loss;
    EXPECT_LE(std::abs(token_loss_sum / eager_expected.sum - 1), 1e-5);
    ASSERT_EQ(eager_result.target_log_probability.size(), static_cast<size_t>(kRows));
    EXPECT_LE(std::abs(eager_result.target_log_probability[0] + eager_result.token_loss[0]), 1e-5);
    EXPECT_EQ(eager_result.lse.size(), static_cast<size_t>(kRows));
    EXPECT_EQ(eager_result.entropy.size(), static_cast<size_t>(kRows));
    ASSERT_EQ(eager_result.argmax.size(), static_cast<size_t>(kRows));
    EXPECT_EQ(eager_result.argmax[3], -1);

    const SealResult sealed = Value(student.Seal(step, std::vector<int64_t>{2, 0, 1}));
    EXPECT_EQ(sealed.totals.micro_batch_count, 3);
    EXPECT_LE(std::abs(sealed.gradient_norm_squared / reference.GradNormSquared() - 1), 2e-5);
    EXPECT_LE(RelativeError(Value(student.Gradient(step)).float32(), reference.grad_weight()), kGradientTolerance);
    EXPECT_LE(RelativeError(Value(student.Gradient(step, HeadTensor::kBias)).float32(), reference.grad_bias()), kGradientTolerance);
    EXPECT_LE(std::abs(Value(student.GradientNorm(step, 2.0)).gradient_norm_squared / (4 * reference.GradNormSquared()) - 1), 2e-5);

    const double norm = std::sqrt(reference.GradNormSquared());
    const ApplyOptions apply = {.learning_rate = 0.01, .max_grad_norm = norm / 2};
    const ApplyResult applied = Value(student.Apply(step, apply));
    EXPECT_EQ(applied.open_step, step + 1);
    EXPECT_LE(std::abs(applied.global_grad_norm / norm - 1), 1e-5);
    EXPECT_LE(std::abs(applied.clip_factor - 0.5), 1e-5);
    EXPECT_TRUE(Value(student.Apply(step, apply)).replayed);
    reference.Apply(0.01, 0.1, norm / 2);
    EXPECT_LE(RelativeError(Value(student.DownloadWeights()).float32(), reference.weight()), kGradientTolerance);
    EXPECT_LE(RelativeError(Value(student.DownloadWeights(HeadTensor::kBias)).float32(), reference.bias()), kGradientTolerance);
  }
  const StepStates states = Value(student.GetStep());
  EXPECT_EQ(states.open.step, 2);
  EXPECT_EQ(states.open.state, StepState::kOpen);
  ASSERT_TRUE(states.last_closed.has_value());
  EXPECT_EQ(states.last_closed->state, StepState::kApplied);
}

TEST(MainJob, TeachersRowsMeetTheTrainers) {
  ServerProcess server;
  Client trainer = server.Connect();
  Client teachers_process = server.Connect();
  Head head = MakeHead(trainer, "student", false, kHiddenSize, 1);
  const Head teacher_head = MakeHead(trainer, "teacher", false, kTeacherHiddenSize, 2);
  const std::vector<float> hidden = Hidden(3, kHiddenSize);
  const std::vector<float> teacher_hidden = Hidden(4, kTeacherHiddenSize);
  const RowsView rows = RowsView::Float32(hidden, kHiddenSize);
  const RowsView teacher_rows = RowsView::Float32(teacher_hidden, kTeacherHiddenSize);
  const LossResult expected = Value(head.Jsd(rows, teacher_head, teacher_rows, {}, {}, {}).Get());
  const absl::Status refused = head.Jsd(rows, teacher_head, rows, {}, {}, {}).Get().status();
  EXPECT_EQ(ErrorReason(refused), "SHAPE_MISMATCH") << refused;
  EXPECT_NE(std::string(refused.message()).find("expected [37, 31]"), std::string::npos) << refused;
  const JoinedTeacherOptions joined = {.join_key = "both", .total_rows = kRows};
  LossTerm two_teachers = {.loss = JsdOptions(), .teacher = teacher_head, .teacher_hidden = teacher_rows, .joined_teacher = joined};
  EXPECT_EQ(ErrorReason(head.Multi(rows, {&two_teachers, 1}, {}).Get().status()), "INVALID_COMBINATION");

  std::vector<int32_t> indices(kRows);
  std::iota(indices.begin(), indices.end(), 0);
  Future<LossResult> future = head.Jsd(rows, teacher_head, joined, {}, {}, {});
  EXPECT_FALSE(future.WaitFor(std::chrono::milliseconds(100)));
  const Teacher teacher = teachers_process.OpenTeacher(joined.join_key, kRows);
  EXPECT_EQ(Value(teacher.Stream(teacher_rows, indices).Get()).row_count, kRows);
  const LossResult result = Value(future.Get());
  EXPECT_EQ(result.loss_sum, expected.loss_sum);
  EXPECT_EQ(result.grad_hidden.float32(), expected.grad_hidden.float32());
}

}  // namespace
}  // namespace headwater::e2e
