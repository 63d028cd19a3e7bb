// The main job through the C++ client and the real server, against double precision.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "headwater/client/client.h"
#include "kernels/reference/loss_reference.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::client {
namespace {

using namespace headwater::e2e;

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
  if (trainable) spec.optimizer = Sgd{};
  if (trainable) spec.staging_slots = 2;
  Head head = CreateHead(client, name, spec, Weight(seed, hidden_size));
  const HeadInfo info = Value(head.UploadWeights(HeadTensor::kBias, TensorView::Float32(Bias(seed))));
  EXPECT_EQ(info.state, HeadState::kReady);
  return head;
}

reference::Matrix MatrixOf(const std::vector<float>& values, int64_t columns) {
  return {static_cast<int64_t>(values.size()) / columns, columns, std::vector<double>(values.begin(), values.end())};
}

reference::Head ReferenceHead(int64_t hidden_size, uint32_t seed) {
  const std::vector<float> bias = Bias(seed);
  reference::Head head = {MatrixOf(Weight(seed, hidden_size), hidden_size), {bias.begin(), bias.end()}, {}, true};
  head.transform.valid_vocab_size = kVocabSize;
  return head;
}

void Add(const std::vector<double>& share, double factor, std::vector<double>* sum) {
  for (size_t i = 0; i < share.size(); ++i) (*sum)[i] += factor * share[i];
}

// Each element, against the norm of all.
void ExpectNear(absl::Span<const float> actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += std::pow(static_cast<double>(actual[i]) - expected[i], 2);
    norm += expected[i] * expected[i];
  }
  EXPECT_LE(std::sqrt(difference / norm), kGradientTolerance);
}

MicroBatchOptions Submission(int64_t step, int64_t micro_batch) { return {.step = step, .micro_batch = micro_batch}; }

TEST(MainJob, ASlotThatIsMissingIsReportedOnce) {
  ServerProcess server;
  std::vector<std::string> notices;
  ClientOptions options = {.transport = Transport::kGrpc};
  options.on_notice = [&notices](const std::string& sentence) { notices.push_back(sentence); };
  Head head = MakeHead(server.Connect(options), "student", true, kHiddenSize, 1);  // two slots
  for (int64_t id = 0; id < 4; ++id) {
    MicroBatchOptions late = Submission(0, id);
    late.commit = CommitMode::kExplicit;
    late.allow_held = true;
    Value(SubmitRandom(head, kRows, late));
    EXPECT_EQ(notices.size(), id < 2 ? 0u : 1u);
  }
  EXPECT_NE(notices[0].find("staging_slots"), std::string::npos) << notices[0];
}

TEST(MainJob, TrainsAStepAsDoublePrecisionDoes) {
  ServerProcess server({"--shards=3"});
  // 10 rows a chunk: several chunks up, and the last one is short.
  Client client = server.Connect({.chunk_bytes = 10 * kHiddenSize * 4});
  Head student = MakeHead(client, "student", true, kHiddenSize, 1);
  Head teacher = MakeHead(client, "teacher", false, kTeacherHiddenSize, 2);
  const double scale = 1.0 / 100;
  const std::vector<float> hidden = Hidden(3, kHiddenSize);
  const std::vector<float> teacher_hidden = Hidden(4, kTeacherHiddenSize);
  std::vector<int32_t> targets = RandomTargets(5, kRows, kVocabSize);
  targets[3] = -100;
  const RowsView rows = RowsView::Float32(hidden, kHiddenSize);

  // Three under way at once: eager cross entropy, explicit cross entropy, eager divergence; a fourth is discarded.
  MicroBatchOptions eager = Submission(0, 0), late = Submission(0, 1), divergence = Submission(0, 2), dropped = Submission(0, 3);
  eager.loss_scale = late.loss_scale = divergence.loss_scale = scale;
  eager.outputs = {.loss = true, .lse = true, .target_log_probability = true, .entropy = true, .argmax = true};
  late.commit = dropped.commit = CommitMode::kExplicit;
  const JsdOptions jsd = {.beta = 0.3, .student_temperature = 1.5, .teacher_temperature = 2.0};
  Future<LossResult> eager_future = student.CrossEntropy(rows, targets, {}, eager);
  Future<LossResult> late_future = student.CrossEntropy(rows, targets, {}, late);
  Future<LossResult> divergence_future =
      student.Jsd(rows, teacher, RowsView::Float32(teacher_hidden, kTeacherHiddenSize), {}, jsd, divergence);
  Future<LossResult> dropped_future = student.CrossEntropy(rows, targets, {}, dropped);
  const LossResult eager_result = Value(eager_future.Get());
  const LossResult late_result = Value(late_future.Get());
  const LossResult divergence_result = Value(divergence_future.Get());
  Value(dropped_future.Get());
  EXPECT_TRUE(Value(student.Discard(0, 3).Get()).dropped);
  EXPECT_FALSE(Value(student.Commit(0, 1, 0.5).Get()).replayed);
  EXPECT_TRUE(Value(student.Commit(0, 1, 0.5).Get()).replayed);

  reference::Head expected_head = ReferenceHead(kHiddenSize, 1);
  const reference::Head expected_teacher = ReferenceHead(kTeacherHiddenSize, 2);
  std::vector<double> grad_weight(static_cast<size_t>(kVocabSize * kHiddenSize)), grad_bias(static_cast<size_t>(kVocabSize));
  reference::Term cross_entropy;
  cross_entropy.head = &expected_head;
  cross_entropy.row_count = kRows;
  cross_entropy.loss_scale = scale;
  reference::Term soft = cross_entropy;
  cross_entropy.targets = targets;
  soft.teacher_head = &expected_teacher;
  soft.teacher_hidden = MatrixOf(teacher_hidden, kTeacherHiddenSize);
  reference::JsdOptions& soft_options = soft.loss.emplace<reference::JsdOptions>();
  soft_options.beta = jsd.beta;
  soft_options.student_temperature = jsd.student_temperature;
  soft_options.teacher_temperature = jsd.teacher_temperature;
  for (const auto& [result, term, factor] :
       {std::tuple(&eager_result, &cross_entropy, 1.0), {&late_result, &cross_entropy, 0.5}, {&divergence_result, &soft, 1.0}}) {
    const reference::Result expected = reference::Compute(MatrixOf(hidden, kHiddenSize), {term, 1}, 1);
    EXPECT_LE(std::abs(result->loss_sum / expected.terms[0].sums.loss_sum - 1), kLossTolerance);
    ExpectNear(result->grad_hidden.float32(), expected.grad_hidden.data);
    Add(expected.gradient.at(&expected_head).weight.data, factor, &grad_weight);
    Add(expected.gradient.at(&expected_head).bias, factor, &grad_bias);
  }
  EXPECT_EQ(eager_result.grad_hidden.shape(), (std::vector<int64_t>{kRows, kHiddenSize}));
  EXPECT_EQ(eager_result.valid_token_count, kRows - 1);
  EXPECT_EQ(eager_result.state, ContributionState::kCommitted);
  EXPECT_EQ(late_result.state, ContributionState::kStaged);
  EXPECT_EQ(eager_result.step, 0);
  EXPECT_EQ(eager_result.digest.size(), 16u);
  double token_loss_sum = 0;
  ASSERT_EQ(eager_result.token_loss.size(), static_cast<size_t>(kRows));
  for (const float loss : eager_result.token_loss) token_loss_sum += loss;
  EXPECT_LE(std::abs(token_loss_sum / eager_result.loss_sum - 1), 1e-5);
  ASSERT_EQ(eager_result.target_log_probability.size(), static_cast<size_t>(kRows));
  EXPECT_LE(std::abs(eager_result.target_log_probability[0] + eager_result.token_loss[0]), 1e-5);
  EXPECT_EQ(eager_result.lse.size(), static_cast<size_t>(kRows));
  EXPECT_EQ(eager_result.entropy.size(), static_cast<size_t>(kRows));
  ASSERT_EQ(eager_result.argmax.size(), static_cast<size_t>(kRows));
  EXPECT_EQ(eager_result.argmax[3], -1);

  double norm_squared = 0;
  for (const std::vector<double>* gradient : {&grad_weight, &grad_bias}) {
    for (const double value : *gradient) norm_squared += value * value;
  }
  const SealResult sealed = Value(student.Seal(0, std::vector<int64_t>{2, 0, 1}));
  EXPECT_EQ(sealed.totals.micro_batch_count, 3);
  EXPECT_LE(std::abs(sealed.gradient_norm_squared / norm_squared - 1), 2e-5);
  ExpectNear(Value(student.Gradient(0)).float32(), grad_weight);
  ExpectNear(Value(student.Gradient(0, HeadTensor::kBias)).float32(), grad_bias);
  EXPECT_LE(std::abs(Value(student.GradientNorm(0, 2.0)).gradient_norm_squared / (4 * norm_squared) - 1), 2e-5);

  const double norm = std::sqrt(norm_squared);
  const ApplyOptions apply = {.learning_rate = 2, .max_grad_norm = norm / 2, .weight_decay = 0.1};
  const ApplyResult applied = Value(student.Apply(0, apply));
  EXPECT_EQ(applied.open_step, 1);
  EXPECT_LE(std::abs(applied.global_grad_norm / norm - 1), 1e-5);
  EXPECT_LE(std::abs(applied.clip_factor - 0.5), 1e-5);
  EXPECT_TRUE(Value(student.Apply(0, apply)).replayed);
  for (const auto& [tensor, values, gradient] : {std::tuple(HeadTensor::kWeight, &expected_head.weight.data, &grad_weight),
                                                 {HeadTensor::kBias, &expected_head.bias, &grad_bias}}) {
    Add(*values, -2 * 0.1, values);
    Add(*gradient, -2 * 0.5, values);
    ExpectNear(Value(student.DownloadWeights(tensor)).float32(), *values);
  }
  const StepStates states = Value(student.GetStep());
  EXPECT_EQ(states.open.step, 1);
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
}  // namespace headwater::client
