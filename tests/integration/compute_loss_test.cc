// ComputeLoss through the wire: numbers against the fp64 reference, and what comes back in which form.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "kernels/reference/loss_reference.h"
#include "tests/integration/support/wire_server.h"

namespace headwater::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsSupersetOf;

constexpr double kLossTolerance = 1e-6;
constexpr double kGradientTolerance = 1e-5;

reference::Matrix ToMatrix(const std::vector<float>& values, int64_t rows, int64_t columns) {
  return {rows, columns, std::vector<double>(values.begin(), values.end())};
}

reference::Head ToReference(const TestHead& head) {
  const v1::HeadSpec& spec = head.head.spec();
  reference::Head made;
  made.weight = ToMatrix(head.weight, spec.vocab_size(), spec.hidden_size());
  made.bias.assign(head.bias.begin(), head.bias.end());
  made.transform.logit_scale = spec.transform().logit_scale();
  if (spec.transform().has_softcap()) made.transform.softcap = spec.transform().softcap();
  made.transform.valid_vocab_size = spec.transform().valid_vocab_size();
  made.trainable = spec.trainable();
  return made;
}

// ||actual - expected|| / ||expected||; NaN if anything is not finite.
double RelativeError(const std::vector<float>& actual, const std::vector<double>& expected) {
  if (actual.size() != expected.size()) return std::nan("");
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    difference += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference) / std::sqrt(norm);
}

class ComputeLoss : public ::testing::TestWithParam<int> {
 protected:
  static ServerSetup MakeSetup() {
    ServerSetup setup;
    setup.engine.shard_count = GetParam();
    return setup;
  }
  WireServer server_{MakeSetup()};
};

INSTANTIATE_TEST_SUITE_P(Shards, ComputeLoss, ::testing::Values(1, 3));

TEST_P(ComputeLoss, CrossEntropyIsTheReferences) {
  v1::HeadSpec spec = SmallSpec(37, 7);
  spec.set_has_bias(true);
  spec.mutable_transform()->set_softcap(4);
  spec.mutable_transform()->set_logit_scale(0.7);
  spec.mutable_transform()->set_valid_vocab_size(35);
  const TestHead head = server_.MakeHead("ce", spec);
  const std::vector<int32_t> targets = {3, -100, 34, 0, 12, -100, 7, 19, 28, 1, 2};
  const std::vector<float> hidden = Random(targets.size() * 7, 5, 1.5F);
  const std::vector<float> token_weights = {1, 2, 0.5F, -0.25F, 3, 1, 0, 1, 2, 1, 1};
  std::vector<float> class_weights(35, 1);
  class_weights[3] = 2.5F;
  class_weights[12] = 0;

  v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, 4, targets);
  v1::LossTerm* const term = header.mutable_terms(0);
  *term->mutable_token_weights() = FloatTensor(token_weights);
  term->set_loss_scale(0.125);
  term->mutable_cross_entropy()->set_label_smoothing(0.1);
  term->mutable_cross_entropy()->set_z_loss(1e-3);
  *term->mutable_cross_entropy()->mutable_class_weights() = FloatTensor(class_weights);
  header.set_grad_hidden_scale(2);
  for (const auto output : {v1::TOKEN_OUTPUT_LOSS, v1::TOKEN_OUTPUT_LSE, v1::TOKEN_OUTPUT_TARGET_LOG_PROBABILITY,
                            v1::TOKEN_OUTPUT_ENTROPY, v1::TOKEN_OUTPUT_ARGMAX, v1::TOKEN_OUTPUT_LSE}) {
    header.add_outputs(output);
  }
  const LossReply reply = server_.MustCompute(header, Bytes(hidden));

  const reference::Head reference_head = ToReference(head);
  reference::Term expected_term;
  expected_term.head = &reference_head;
  expected_term.row_count = static_cast<int64_t>(targets.size());
  expected_term.targets = targets;
  expected_term.token_weights.assign(token_weights.begin(), token_weights.end());
  expected_term.loss_scale = 0.125;
  expected_term.loss = reference::CrossEntropyOptions{0.1, 1e-3, std::vector<double>(class_weights.begin(), class_weights.end())};
  const reference::Result expected = reference::Compute(ToMatrix(hidden, 11, 7), {&expected_term, 1}, 2);
  const reference::TermResult& expected_result = expected.terms[0];

  const v1::LossTermResult& result = reply.summary.terms(0);
  EXPECT_LE(std::abs(result.sums().loss_sum() - expected_result.sums.loss_sum) / std::abs(expected_result.sums.loss_sum),
            kLossTolerance);
  EXPECT_LE(std::abs(result.sums().z_loss_sum() - expected_result.sums.z_loss_sum),
            1e-5 * std::abs(expected_result.sums.z_loss_sum));
  EXPECT_EQ(result.sums().valid_token_count(), 9);
  EXPECT_DOUBLE_EQ(result.sums().token_weight_sum(), expected_result.sums.token_weight_sum);
  EXPECT_DOUBLE_EQ(result.sums().target_weight_sum(), expected_result.sums.target_weight_sum);
  EXPECT_EQ(result.non_finite_row_count(), 0);
  EXPECT_EQ(result.weight_version(), head.head.weight_version());
  EXPECT_LE(RelativeError(Floats(result.token_loss().data()), expected_result.token_loss), 1e-6);
  EXPECT_LE(RelativeError(Floats(result.lse().data()), expected_result.lse), 1e-6);
  EXPECT_LE(RelativeError(Floats(result.target_log_probability().data()), expected_result.target_log_probability), 1e-6);
  EXPECT_LE(RelativeError(Floats(result.entropy().data()), expected_result.entropy), 1e-5);
  ASSERT_EQ(result.argmax().data().size(), targets.size() * 4);
  EXPECT_EQ(std::memcmp(result.argmax().data().data(), expected_result.argmax.data(), targets.size() * 4), 0);
  EXPECT_THAT(result.token_loss().shape(), ElementsAre(11));
  EXPECT_EQ(result.argmax().data_type(), v1::DATA_TYPE_INT32);

  EXPECT_LE(RelativeError(Floats(reply.grad_hidden), expected.grad_hidden.data), kGradientTolerance);
  std::vector<double> expected_gradient = expected.gradient.at(&reference_head).weight.data;
  const std::vector<double>& bias = expected.gradient.at(&reference_head).bias;
  expected_gradient.insert(expected_gradient.end(), bias.begin(), bias.end());
  EXPECT_LE(RelativeError(Floats(server_.Gradient(head)), expected_gradient), kGradientTolerance);

  EXPECT_EQ(reply.summary.state(), v1::CONTRIBUTION_STATE_COMMITTED);
  EXPECT_EQ(reply.summary.form(), v1::CONTRIBUTION_FORM_DIRECT);
  EXPECT_EQ(reply.summary.step(), 0);
  EXPECT_EQ(reply.summary.digest().size(), 16U);
  EXPECT_EQ(reply.summary.transport(), "grpc");
  EXPECT_TRUE(reply.summary.timing().has_engine());
  EXPECT_FALSE(reply.summary.replayed());
}

// A factor at commit multiplies all three; factors by row would not, and are refused.
TEST_P(ComputeLoss, HeldFactorsTakeAFactorAndNoTokenFactors) {
  v1::HeadSpec spec = SmallSpec();
  spec.set_staging_slots(0);
  const TestHead direct = server_.MakeHead("direct", spec);
  const TestHead held = server_.MakeHead("held", spec);
  const std::string rows = Bytes(Random(15, 5, 1));
  const auto header_of = [&](const TestHead& head, float factor) {
    v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, 0, {1, 2, 3});
    v1::LossTerm* const term = header.mutable_terms(0);
    *term->mutable_token_weights() = FloatTensor({factor, factor, factor});
    *term->mutable_entropy_factors() = FloatTensor({0, 2 * factor, -factor});
    return header;
  };
  Require(server_.Compute(header_of(direct, 0.5F), rows).status, "ComputeLoss");
  v1::MicroBatchHeader header = header_of(held, 1);
  header.set_commit_mode(v1::COMMIT_MODE_EXPLICIT);
  header.set_allow_held(true);
  const LossReply reply = server_.MustCompute(header, rows);
  EXPECT_EQ(reply.summary.form(), v1::CONTRIBUTION_FORM_HELD);
  v1::CommitMicroBatchRequest commit;
  *commit.add_heads() = server_.At(held, 0);
  commit.set_micro_batch(0);
  *commit.mutable_token_factors() = FloatTensor({1, 2, 3});
  EXPECT_EQ(ReasonOf(server_.Commit(commit)), "INVALID_COMBINATION");
  Require(server_.Commit(held, 0, 0, 0.5), "CommitMicroBatch");
  const std::vector<float> expected = Floats(server_.Gradient(direct));
  EXPECT_LE(RelativeError(Floats(server_.Gradient(held)), {expected.begin(), expected.end()}), 1e-6);
}

TEST_P(ComputeLoss, JensenShannonIsTheReferences) {
  const TestHead student = server_.MakeHead("student", SmallSpec(29, 6), 1);
  v1::HeadSpec teacher_spec = SmallSpec(31, 9);
  teacher_spec.set_trainable(false);
  teacher_spec.clear_optimizer();
  const TestHead teacher = server_.MakeHead("teacher", teacher_spec, 7);
  const std::vector<int32_t> targets = {3, 28, -100, 0, 12};
  const std::vector<float> hidden = Random(5 * 6, 5, 1);
  const std::vector<float> teacher_hidden = Random(5 * 9, 6, 1);

  v1::MicroBatchHeader header = CrossEntropyHeader(student, 0, 0, targets);
  v1::JensenShannonLoss* const loss = header.mutable_terms(0)->mutable_jensen_shannon();
  loss->set_beta(0.3);
  loss->set_student_temperature(1.5);
  loss->set_teacher_temperature(2);
  loss->set_hard_loss_weight(0.25);
  loss->mutable_hard_loss()->set_label_smoothing(0.05);
  loss->set_vocab_alignment(v1::VOCAB_ALIGNMENT_TRUNCATE_TO_COMMON);
  header.mutable_terms(0)->mutable_teacher_hidden()->set_head(teacher.name());
  header.mutable_terms(0)->mutable_teacher_hidden()->set_data_type(v1::DATA_TYPE_FLOAT32);
  const LossReply reply = server_.MustCompute(header, Bytes(hidden), Bytes(teacher_hidden), {.chunk_rows = 2, .reversed = true});

  const reference::Head reference_student = ToReference(student);
  const reference::Head reference_teacher = ToReference(teacher);
  reference::Term expected_term;
  expected_term.head = &reference_student;
  expected_term.row_count = 5;
  expected_term.targets = targets;
  expected_term.loss = reference::JsdOptions{0.3, 1.5, 2, 0.25, {0.05, 0, {}}, true};
  expected_term.teacher_head = &reference_teacher;
  expected_term.teacher_hidden = ToMatrix(teacher_hidden, 5, 9);
  const reference::Result expected = reference::Compute(ToMatrix(hidden, 5, 6), {&expected_term, 1}, 1);

  const v1::LossSums& sums = reply.summary.terms(0).sums();
  const LossSums& expected_sums = expected.terms[0].sums;
  EXPECT_LE(std::abs(sums.loss_sum() - expected_sums.loss_sum) / expected_sums.loss_sum, kLossTolerance);
  EXPECT_LE(std::abs(sums.soft_loss_sum() - expected_sums.soft_loss_sum) / expected_sums.soft_loss_sum, 1e-5);
  EXPECT_LE(std::abs(sums.hard_loss_sum() - expected_sums.hard_loss_sum) / expected_sums.hard_loss_sum, 1e-5);
  EXPECT_EQ(sums.valid_token_count(), 4);
  EXPECT_LE(RelativeError(Floats(reply.grad_hidden), expected.grad_hidden.data), kGradientTolerance);
  EXPECT_LE(RelativeError(Floats(server_.Gradient(student)), expected.gradient.at(&reference_student).weight.data),
            kGradientTolerance);
  EXPECT_EQ(reply.summary.terms(0).teacher_weight_version(), teacher.head.weight_version());
}

TEST_P(ComputeLoss, ChunkingAndOrderOfArrivalChangeNothing) {
  const std::vector<int32_t> targets = {3, 1, 9, 0, 12, 4, 7};
  const std::string rows = Bytes(Random(targets.size() * 5, 5, 1));
  std::string first_gradient;
  std::string first_grad_hidden;
  std::string first_digest;
  for (const SendOptions& send :
       {SendOptions{.chunk_rows = 7}, SendOptions{.chunk_rows = 1}, SendOptions{.chunk_rows = 2, .reversed = true}}) {
    const TestHead head = server_.MakeHead("chunks" + std::to_string(send.chunk_rows), SmallSpec());
    v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, 0, targets);
    const LossReply reply = server_.MustCompute(header, rows, "", send);
    if (first_gradient.empty()) {
      first_gradient = server_.Gradient(head);
      first_grad_hidden = reply.grad_hidden;
    }
    EXPECT_EQ(server_.Gradient(head), first_gradient);
    EXPECT_EQ(reply.grad_hidden, first_grad_hidden);
    // The same micro-batch again, in other chunks, is the same micro-batch.
    const LossReply replay = server_.Compute(header, rows, "", {.chunk_rows = 3});
    EXPECT_TRUE(replay.summary.replayed());
    EXPECT_EQ(replay.summary.digest(), reply.summary.digest());
    EXPECT_EQ(replay.grad_hidden, first_grad_hidden);
    EXPECT_EQ(server_.Gradient(head), first_gradient);
  }
}

TEST_P(ComputeLoss, AMicroBatchWithoutRowsIsCounted) {
  const TestHead head = server_.MakeHead("empty", SmallSpec());
  const LossReply reply = server_.MustCompute(CrossEntropyHeader(head, 0, 6, {}), "");
  EXPECT_EQ(reply.summary.state(), v1::CONTRIBUTION_STATE_COMMITTED);
  EXPECT_EQ(server_.Steps(head).open().micro_batches(0).micro_batch(), 6);
  EXPECT_EQ(Floats(server_.Gradient(head)), std::vector<float>(65, 0.0F));
}

TEST_P(ComputeLoss, GradHiddenIsLeftOutOnRequest) {
  const TestHead head = server_.MakeHead("frozen-hidden", SmallSpec());
  v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, 0, {1, 2, 3});
  header.set_return_grad_hidden(false);
  const LossReply reply = server_.MustCompute(header, Bytes(Random(15, 5, 1)));
  EXPECT_TRUE(reply.grad_hidden.empty());
  EXPECT_NE(Floats(server_.Gradient(head)), std::vector<float>(65, 0.0F));
}

TEST_P(ComputeLoss, GradHiddenComesInAscendingChunksWithinTheLimit) {
  ServerSetup setup = MakeSetup();
  setup.options.limits.max_hidden_size = 64;
  setup.options.limits.max_chunk_bytes = 256;  // 12 rows of 5 fp32
  WireServer small(setup);
  const TestHead head = small.MakeHead("chunked", SmallSpec());
  const LossReply reply = small.Compute(CrossEntropyHeader(head, 0, 0, std::vector<int32_t>(30, 1)), Bytes(Random(150, 5, 1)));
  ASSERT_EQ(ReasonOf(reply.status), "OK") << reply.status.error_message();
  EXPECT_THAT(reply.chunk_starts, ElementsAre(0, 12, 24));
  EXPECT_EQ(reply.grad_hidden.size(), 600U);
}

TEST_P(ComputeLoss, ServerInfoTellsWhatItIs) {
  v1::ServerInfo info;
  Require(server_.Call(&Sessions::GetServerInfo, {}, &info), "GetServerInfo");
  EXPECT_EQ(info.engine(), "cpu");
  EXPECT_EQ(info.incarnation().size(), 16U);
  EXPECT_EQ(info.limits().max_stripe_wait_s(), 10);
  EXPECT_GE(info.devices_size(), 1);
  EXPECT_GT(info.devices(0).memory_budget_bytes(), 0);
  const std::vector<std::string> features(info.features().begin(), info.features().end());
  EXPECT_THAT(features,
              IsSupersetOf({"cross_entropy", "jensen_shannon", "explicit_commit", "staged", "sessions", "attempts", "held",
                            "token_factors", "several_terms", "add_gradient", "closes_step", "take_head", "wait", "attach",
                            "tenants", "temperature", "token_scaling", "entropy_factors", "gradient_resolution"}));
}

}  // namespace
}  // namespace headwater::testing
