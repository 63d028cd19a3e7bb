// ComputeLoss through the wire: what comes back in which form. tests/e2e/python/losses has the numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/integration/support/wire_server.h"

namespace headwater::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::IsSupersetOf;
using ::testing::Pointwise;

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

TEST_P(ComputeLoss, TheSummarySaysWhatWasComputed) {
  const TestHead head = server_.MakeHead("student", SmallSpec());
  const TestHead teacher = server_.MakeHead("teacher", FrozenSpec(13, 4), 7);
  v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, 4, {3, -100, 12});
  v1::LossTerm* const soft = header.add_terms();
  *soft = header.terms(0);
  soft->mutable_jensen_shannon();
  soft->mutable_teacher_hidden()->set_head(teacher.name());
  soft->mutable_teacher_hidden()->set_data_type(v1::DATA_TYPE_FLOAT32);
  for (const auto output : {v1::TOKEN_OUTPUT_LOSS, v1::TOKEN_OUTPUT_LSE, v1::TOKEN_OUTPUT_ARGMAX, v1::TOKEN_OUTPUT_LSE}) {
    header.add_outputs(output);
  }
  const LossReply reply =
      server_.MustCompute(header, Bytes(Random(15, 5, 1)), "", {.teacher_rows = {{1, Bytes(Random(12, 6, 1))}}});
  ASSERT_EQ(reply.summary.terms_size(), 2);
  for (const v1::LossTermResult& result : reply.summary.terms()) {
    EXPECT_EQ(result.sums().valid_token_count(), 2);
    EXPECT_EQ(result.non_finite_row_count(), 0);
    EXPECT_EQ(result.weight_version(), head.head.weight_version());
    EXPECT_THAT(result.token_loss().shape(), ElementsAre(3));
    EXPECT_THAT(result.lse().shape(), ElementsAre(3));
    EXPECT_FALSE(result.has_entropy());
    EXPECT_EQ(result.argmax().data_type(), v1::DATA_TYPE_INT32);
    EXPECT_EQ(result.argmax().data().size(), 12U);
  }
  EXPECT_EQ(reply.summary.terms(1).teacher_weight_version(), teacher.head.weight_version());
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
  EXPECT_THAT(Floats(server_.Gradient(held)), Pointwise(FloatNear(1e-6F), Floats(server_.Gradient(direct))));
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
