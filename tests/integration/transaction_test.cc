// The transaction rules through the wire: what is added, when, and that everything else leaves the accumulator bitwise alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/integration/wire_server.h"

namespace headwater::testing {
namespace {

class Transactions : public ::testing::TestWithParam<int> {
 protected:
  static ServerSetup MakeSetup() {
    ServerSetup setup;
    setup.engine.shard_count = GetParam();
    return setup;
  }
  LossReply Submit(const TestHead& head, int64_t step, int64_t micro_batch, uint32_t seed = 5,
                   v1::CommitMode mode = v1::COMMIT_MODE_EAGER) {
    v1::MicroBatchHeader header = CrossEntropyHeader(head, step, micro_batch, {1, 2, 3});
    header.set_commit_mode(mode);
    return server_.Compute(header, Bytes(Random(15, seed, 1)));
  }
  v1::ApplyOptimizerStepRequest ApplyOf(const TestHead& head, int64_t step, int64_t count) {
    v1::ApplyOptimizerStepRequest request;
    *request.mutable_head() = server_.At(head, step);
    request.mutable_expected()->set_count(count);
    request.set_learning_rate(0.01);
    return request;
  }
  WireServer server_{MakeSetup()};
};

INSTANTIATE_TEST_SUITE_P(Shards, Transactions, ::testing::Values(1, 3));

TEST_P(Transactions, AReplayIsAnsweredAlikeAndAddsNothing) {
  const TestHead head = server_.MakeHead("replay", SmallSpec());
  const LossReply first = Submit(head, 0, 0);
  ASSERT_EQ(ReasonOf(first.status), "OK") << first.status.error_message();
  const std::string before = server_.Snapshot(head);
  const LossReply second = Submit(head, 0, 0);
  ASSERT_EQ(ReasonOf(second.status), "OK");
  EXPECT_TRUE(second.summary.replayed());
  EXPECT_EQ(second.summary.digest(), first.summary.digest());
  EXPECT_EQ(second.grad_hidden, first.grad_hidden);
  EXPECT_EQ(second.summary.terms(0).sums().loss_sum(), first.summary.terms(0).sums().loss_sum());
  EXPECT_EQ(server_.Snapshot(head), before);
}

TEST_P(Transactions, ADuplicateWithOtherBytesConflicts) {
  const TestHead head = server_.MakeHead("conflict", SmallSpec());
  Require(Submit(head, 0, 0, 5).status, "ComputeLoss");
  const std::string before = server_.Snapshot(head);
  const LossReply other = Submit(head, 0, 0, 6);
  EXPECT_EQ(ReasonOf(other.status), "MICRO_BATCH_CONFLICT");
  EXPECT_EQ(other.status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_TRUE(other.grad_hidden.empty());
  EXPECT_EQ(server_.Snapshot(head), before);
}

TEST_P(Transactions, TheDigestCoversTheHeader) {
  const TestHead head = server_.MakeHead("digest", SmallSpec());
  v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, 0, {1, 2, 3});
  const std::string rows = Bytes(Random(15, 5, 1));
  Require(server_.Compute(header, rows).status, "ComputeLoss");
  // What only spells out the defaults is the same micro-batch.
  header.mutable_terms(0)->set_loss_scale(1);
  header.mutable_terms(0)->set_ignore_index(-100);
  header.mutable_terms(0)->set_row_count(3);
  header.set_grad_hidden_data_type(v1::DATA_TYPE_FLOAT32);
  header.set_return_grad_hidden(true);
  header.set_commit_mode(v1::COMMIT_MODE_EAGER);
  EXPECT_TRUE(server_.Compute(header, rows).summary.replayed());
  header.mutable_terms(0)->set_loss_scale(2);
  EXPECT_EQ(ReasonOf(server_.Compute(header, rows).status), "MICRO_BATCH_CONFLICT");
}

TEST_P(Transactions, FirstWinsAnswersWithoutAdding) {
  const TestHead head = server_.MakeHead("first-wins", SmallSpec());
  Require(Submit(head, 0, 0, 5).status, "ComputeLoss");
  const std::string before = server_.Snapshot(head);
  v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, 0, {1, 2, 3});
  header.set_on_mismatch(v1::ON_MISMATCH_FIRST_WINS);
  const LossReply reply = server_.Compute(header, Bytes(Random(15, 6, 1)));
  ASSERT_EQ(ReasonOf(reply.status), "OK") << reply.status.error_message();
  EXPECT_TRUE(reply.summary.payload_differs());
  EXPECT_EQ(reply.grad_hidden.size(), 60U);
  EXPECT_EQ(server_.Snapshot(head), before);
}

TEST_P(Transactions, ExplicitWaitsForItsCommitAndTakesAFactor) {
  const TestHead eager = server_.MakeHead("eager", SmallSpec());
  const TestHead head = server_.MakeHead("explicit", SmallSpec());
  Require(Submit(eager, 0, 0).status, "ComputeLoss");
  const std::string zero = server_.Gradient(head);
  const LossReply staged = Submit(head, 0, 0, 5, v1::COMMIT_MODE_EXPLICIT);
  ASSERT_EQ(ReasonOf(staged.status), "OK") << staged.status.error_message();
  EXPECT_EQ(staged.summary.state(), v1::CONTRIBUTION_STATE_STAGED);
  EXPECT_EQ(staged.summary.form(), v1::CONTRIBUTION_FORM_STAGED);
  EXPECT_EQ(server_.Gradient(head), zero);

  bool replayed = true;
  ASSERT_EQ(ReasonOf(server_.Commit(head, 0, 0, 0.5, &replayed)), "OK");
  EXPECT_FALSE(replayed);
  const std::vector<float> half = Floats(server_.Gradient(head));
  const std::vector<float> whole = Floats(server_.Gradient(eager));
  ASSERT_EQ(half.size(), whole.size());
  for (size_t i = 0; i < half.size(); ++i) EXPECT_LE(std::abs(half[i] - 0.5F * whole[i]), 1e-6F) << i;

  const std::string before = server_.Snapshot(head);
  ASSERT_EQ(ReasonOf(server_.Commit(head, 0, 0, 0.5, &replayed)), "OK");
  EXPECT_TRUE(replayed);
  EXPECT_EQ(ReasonOf(server_.Commit(head, 0, 0, 0.25)), "MICRO_BATCH_CONFLICT");
  EXPECT_EQ(ReasonOf(server_.Discard(head, 0, 0)), "MICRO_BATCH_CONFLICT");
  EXPECT_EQ(server_.Snapshot(head), before);
}

TEST_P(Transactions, DiscardDropsAndLeavesATombstone) {
  const TestHead head = server_.MakeHead("discard", SmallSpec());
  Require(Submit(head, 0, 0).status, "ComputeLoss");
  const std::string gradient = server_.Gradient(head);
  Require(Submit(head, 0, 1, 6, v1::COMMIT_MODE_EXPLICIT).status, "ComputeLoss");
  bool dropped = false;
  ASSERT_EQ(ReasonOf(server_.Discard(head, 0, 1, &dropped)), "OK");
  EXPECT_TRUE(dropped);
  ASSERT_EQ(ReasonOf(server_.Discard(head, 0, 1, &dropped)), "OK");
  EXPECT_FALSE(dropped);
  EXPECT_EQ(server_.Gradient(head), gradient);
  EXPECT_EQ(ReasonOf(Submit(head, 0, 1, 6).status), "MICRO_BATCH_DISCARDED");
  EXPECT_EQ(ReasonOf(server_.Commit(head, 0, 1, 1)), "MICRO_BATCH_DISCARDED");
  // One that was never seen leaves a tombstone too.
  ASSERT_EQ(ReasonOf(server_.Discard(head, 0, 2, &dropped)), "OK");
  EXPECT_FALSE(dropped);
  EXPECT_EQ(ReasonOf(Submit(head, 0, 2).status), "MICRO_BATCH_DISCARDED");
  EXPECT_EQ(ReasonOf(server_.Commit(head, 0, 3, 1)), "MICRO_BATCH_NOT_FOUND");
  EXPECT_EQ(server_.Gradient(head), gradient);
}

TEST_P(Transactions, StagingSlotsAreBounded) {
  v1::HeadSpec spec = SmallSpec();
  spec.set_staging_slots(2);
  const TestHead head = server_.MakeHead("slots", spec);
  Require(Submit(head, 0, 0, 5, v1::COMMIT_MODE_EXPLICIT).status, "first");
  Require(Submit(head, 0, 1, 6, v1::COMMIT_MODE_EXPLICIT).status, "second, at the limit");
  const std::string before = server_.Snapshot(head);
  EXPECT_EQ(ReasonOf(Submit(head, 0, 2, 7, v1::COMMIT_MODE_EXPLICIT).status), "STAGING_FULL");
  EXPECT_EQ(server_.Snapshot(head), before);
  Require(server_.Discard(head, 0, 0), "DiscardMicroBatch");
  EXPECT_EQ(ReasonOf(Submit(head, 0, 2, 7, v1::COMMIT_MODE_EXPLICIT).status), "OK");
}

TEST_P(Transactions, TheSealWantsExactlyTheExpectedOnes) {
  const TestHead head = server_.MakeHead("seal", SmallSpec());
  Require(Submit(head, 0, 0).status, "ComputeLoss");
  Require(Submit(head, 0, 1, 6, v1::COMMIT_MODE_EXPLICIT).status, "ComputeLoss");
  const std::string before = server_.Snapshot(head);
  EXPECT_EQ(ReasonOf(server_.Seal(head, 0, {0, 1, 2})), "MICRO_BATCH_MISSING");
  EXPECT_EQ(ReasonOf(server_.Seal(head, 0, {0, 1})), "MICRO_BATCH_UNCOMMITTED");
  EXPECT_EQ(server_.Snapshot(head), before);
  Require(server_.Commit(head, 0, 1, 1), "CommitMicroBatch");
  EXPECT_EQ(ReasonOf(server_.Seal(head, 0, {0})), "MICRO_BATCH_UNEXPECTED");
  v1::SealStepResponse sealed;
  ASSERT_EQ(ReasonOf(server_.Seal(head, 0, {1, 0}, &sealed)), "OK");
  EXPECT_FALSE(sealed.replayed());
  EXPECT_EQ(sealed.totals().micro_batch_count(), 2);
  EXPECT_EQ(sealed.totals().valid_token_count(), 6);
  double norm_squared = 0;
  for (const float value : Floats(server_.Gradient(head))) norm_squared += static_cast<double>(value) * value;
  EXPECT_LE(std::abs(sealed.gradient_norm_squared() - norm_squared), 1e-9 * norm_squared);
  ASSERT_EQ(ReasonOf(server_.Seal(head, 0, {0, 1}, &sealed)), "OK");
  EXPECT_TRUE(sealed.replayed());
  EXPECT_EQ(ReasonOf(Submit(head, 0, 2).status), "STEP_SEALED");
  EXPECT_TRUE(Submit(head, 0, 0).summary.replayed());  // a lost answer can be had again
}

TEST_P(Transactions, AWrongStepIsRefusedWithTheOpenOne) {
  const TestHead head = server_.MakeHead("steps", SmallSpec());
  const std::string before = server_.Snapshot(head);
  const LossReply reply = Submit(head, 2, 0);
  const WireError error = DecodeError(reply.status);
  EXPECT_EQ(error.code, grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(error.reason, "STEP_MISMATCH");
  EXPECT_EQ(error.at("openStep"), "0");
  EXPECT_EQ(ReasonOf(server_.Commit(head, 2, 0, 1)), "STEP_MISMATCH");
  EXPECT_EQ(ReasonOf(server_.Seal(head, 2, {})), "STEP_MISMATCH");
  EXPECT_EQ(server_.Snapshot(head), before);
}

// As trainers' options have it.
TEST_P(Transactions, ZeroAndInfinityClipNothing) {
  const TestHead unclipped = server_.MakeHead("unclipped", SmallSpec());
  Require(Submit(unclipped, 0, 0).status, "ComputeLoss");
  ASSERT_EQ(ReasonOf(server_.Apply(ApplyOf(unclipped, 0, 1))), "OK");
  for (const double none : {0.0, std::numeric_limits<double>::infinity()}) {
    const TestHead head = server_.MakeHead(none == 0 ? "zero" : "infinity", SmallSpec());
    Require(Submit(head, 0, 0).status, "ComputeLoss");
    v1::ApplyOptimizerStepRequest request = ApplyOf(head, 0, 1);
    request.set_max_grad_norm(none);
    v1::ApplyOptimizerStepResponse response;
    ASSERT_EQ(ReasonOf(server_.Apply(request, &response)), "OK");
    EXPECT_EQ(response.clip_factor(), 1);
    EXPECT_GT(response.global_grad_norm(), 0);
    EXPECT_EQ(server_.Weights(head), server_.Weights(unclipped));
    request.clear_max_grad_norm();  // the same arguments
    ASSERT_EQ(ReasonOf(server_.Apply(request, &response)), "OK");
    EXPECT_TRUE(response.replayed());
  }
}

TEST_P(Transactions, ApplyIsReplayedOrConflicts) {
  const TestHead head = server_.MakeHead("apply", SmallSpec());
  Require(Submit(head, 0, 0).status, "ComputeLoss");
  const std::string weights = server_.Weights(head);
  v1::ApplyOptimizerStepRequest request = ApplyOf(head, 0, 1);
  request.set_max_grad_norm(0.1);
  request.set_gradient_factor(0.5);
  request.set_other_grad_norm_squared(4);
  v1::ApplyOptimizerStepResponse first;
  ASSERT_EQ(ReasonOf(server_.Apply(request, &first)), "OK");
  EXPECT_EQ(first.open_step(), 1);
  EXPECT_EQ(first.weight_version(), head.head.weight_version() + 1);
  EXPECT_LE(std::abs(first.global_grad_norm() - std::sqrt(first.gradient_norm_squared() + 4)), 1e-12);
  EXPECT_LE(std::abs(first.clip_factor() - 0.1 / (first.global_grad_norm() + 1e-6)), 1e-12);
  EXPECT_NE(server_.Weights(head), weights);
  EXPECT_EQ(Floats(server_.Gradient(head, 1)), std::vector<float>(65, 0.0F));

  const std::string before = server_.Snapshot(head, 1);
  v1::ApplyOptimizerStepResponse second;
  ASSERT_EQ(ReasonOf(server_.Apply(request, &second)), "OK");
  EXPECT_TRUE(second.replayed());
  second.set_replayed(false);
  EXPECT_EQ(second.SerializeAsString(), first.SerializeAsString());
  request.set_learning_rate(0.02);
  EXPECT_EQ(ReasonOf(server_.Apply(request)), "STEP_CONFLICT");
  EXPECT_EQ(server_.Snapshot(head, 1), before);
  EXPECT_EQ(ReasonOf(Submit(head, 0, 1).status), "STEP_MISMATCH");
  EXPECT_EQ(ReasonOf(Submit(head, 1, 0).status), "OK");
  EXPECT_EQ(server_.Steps(head).last_closed().state(), v1::STEP_STATE_APPLIED);
}

TEST_P(Transactions, DiscardGradientClosesTheStepAndKeepsTheWeights) {
  const TestHead head = server_.MakeHead("overflow", SmallSpec());
  Require(Submit(head, 0, 0).status, "ComputeLoss");
  Require(Submit(head, 0, 1, 6, v1::COMMIT_MODE_EXPLICIT).status, "ComputeLoss");
  const std::string weights = server_.Weights(head);
  for (const bool replayed : {false, true}) {
    grpc::ClientContext context;
    v1::DiscardGradientRequest request;
    *request.mutable_head() = server_.At(head, 0);
    v1::DiscardGradientResponse response;
    Require(server_.heads().DiscardGradient(&context, request, &response), "DiscardGradient");
    EXPECT_EQ(response.open_step(), 1);
    EXPECT_EQ(response.replayed(), replayed);
  }
  EXPECT_EQ(server_.Weights(head), weights);
  EXPECT_EQ(Floats(server_.Gradient(head, 1)), std::vector<float>(65, 0.0F));
  EXPECT_EQ(server_.Steps(head).last_closed().state(), v1::STEP_STATE_DISCARDED);
  EXPECT_EQ(ReasonOf(server_.Apply(ApplyOf(head, 0, 1))), "STEP_CONFLICT");
}

TEST_P(Transactions, NonFiniteRowsAreReportedOrRefused) {
  const TestHead head = server_.MakeHead("non-finite", SmallSpec());
  std::vector<float> rows = Random(15, 5, 1);
  rows[7] = std::numeric_limits<float>::quiet_NaN();
  v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, 0, {1, 2, 3});
  header.set_non_finite_policy(v1::NON_FINITE_POLICY_REFUSE);
  const std::string before = server_.Snapshot(head);
  EXPECT_EQ(ReasonOf(server_.Compute(header, Bytes(rows)).status), "NON_FINITE_VALUES");
  EXPECT_EQ(server_.Snapshot(head), before);

  header.set_non_finite_policy(v1::NON_FINITE_POLICY_REPORT);
  const LossReply reply = server_.Compute(header, Bytes(rows));
  ASSERT_EQ(ReasonOf(reply.status), "OK") << reply.status.error_message();
  EXPECT_EQ(reply.summary.terms(0).non_finite_row_count(), 1);
  v1::SealStepResponse sealed;
  Require(server_.Seal(head, 0, {0}, &sealed), "SealStep");
  EXPECT_GT(sealed.non_finite_count(), 0);
  EXPECT_EQ(sealed.totals().non_finite_row_count(), 1);
  const std::string weights = server_.Weights(head);
  EXPECT_EQ(ReasonOf(server_.Apply(ApplyOf(head, 0, 1))), "NON_FINITE_GRADIENT");
  EXPECT_EQ(server_.Weights(head), weights);
  EXPECT_EQ(server_.Steps(head).open().state(), v1::STEP_STATE_SEALED);
}

TEST_P(Transactions, AnUploadFencesTheOldEpoch) {
  const TestHead old_head = server_.MakeHead("fence", SmallSpec());
  TestHead head = old_head;
  Require(Submit(head, 0, 0).status, "ComputeLoss");
  Require(server_.Upload(head.head, v1::HEAD_TENSOR_WEIGHT, head.weight, &head.head), "UploadWeights");
  ASSERT_NE(head.head.epoch(), old_head.head.epoch());
  const std::string before = server_.Snapshot(head);
  const WireError error = DecodeError(Submit(old_head, 0, 1).status);
  EXPECT_EQ(error.code, grpc::StatusCode::ABORTED);
  EXPECT_EQ(error.reason, "EPOCH_FENCED");
  EXPECT_EQ(ReasonOf(server_.Commit(old_head, 0, 0, 1)), "EPOCH_FENCED");
  EXPECT_EQ(ReasonOf(server_.Discard(old_head, 0, 0)), "EPOCH_FENCED");
  EXPECT_EQ(ReasonOf(server_.Seal(old_head, 0, {})), "EPOCH_FENCED");
  EXPECT_EQ(ReasonOf(server_.Apply(ApplyOf(old_head, 0, 0))), "EPOCH_FENCED");
  EXPECT_EQ(server_.Snapshot(head), before);
  EXPECT_EQ(server_.Steps(head).open().micro_batches_size(), 0);  // its contributions went with the old weights
}

TEST_P(Transactions, ARecreatedHeadFencesTheOldEpoch) {
  const TestHead old_head = server_.MakeHead("again", SmallSpec());
  Require(Submit(old_head, 0, 0).status, "ComputeLoss");
  grpc::ClientContext refused_context;
  v1::DeleteHeadRequest request;
  v1::DeleteHeadResponse response;
  request.set_name(old_head.name());
  EXPECT_EQ(ReasonOf(server_.heads().DeleteHead(&refused_context, request, &response)), "HEAD_IN_USE");
  grpc::ClientContext stale_context;
  request.set_force(true);
  request.set_epoch(std::string(16, 'x'));
  EXPECT_EQ(ReasonOf(server_.heads().DeleteHead(&stale_context, request, &response)), "EPOCH_FENCED");
  grpc::ClientContext context;
  request.set_epoch(old_head.head.epoch());
  Require(server_.heads().DeleteHead(&context, request, &response), "DeleteHead");
  EXPECT_EQ(ReasonOf(Submit(old_head, 0, 1).status), "HEAD_NOT_FOUND");
  const TestHead head = server_.MakeHead("again", SmallSpec());
  const std::string before = server_.Snapshot(head);
  EXPECT_EQ(ReasonOf(Submit(old_head, 0, 1).status), "EPOCH_FENCED");
  EXPECT_EQ(server_.Snapshot(head), before);
}

TEST_P(Transactions, ManyMicroBatchesAreOneBigOne) {
  const TestHead many = server_.MakeHead("many", SmallSpec());
  const TestHead one = server_.MakeHead("one", SmallSpec());
  std::vector<float> all;
  std::vector<int32_t> targets;
  for (uint32_t k = 0; k < 4; ++k) {
    Require(Submit(many, 0, k, 10 + k).status, "ComputeLoss");
    const std::vector<float> rows = Random(15, 10 + k, 1);
    all.insert(all.end(), rows.begin(), rows.end());
    targets.insert(targets.end(), {1, 2, 3});
  }
  Require(server_.Compute(CrossEntropyHeader(one, 0, 0, targets), Bytes(all)).status, "ComputeLoss");
  const std::vector<float> sum = Floats(server_.Gradient(many));
  const std::vector<float> whole = Floats(server_.Gradient(one));
  ASSERT_EQ(sum.size(), whole.size());
  for (size_t i = 0; i < sum.size(); ++i) EXPECT_LE(std::abs(sum[i] - whole[i]), 1e-5F * std::max(1.0F, std::abs(whole[i]))) << i;
}

}  // namespace
}  // namespace headwater::testing
