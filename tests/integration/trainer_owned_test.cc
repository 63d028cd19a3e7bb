// Trainers that own the optimizer, or a part of the gradient: AddGradient, weights that close a step; and a run that takes a head.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/integration/transaction_fixture.h"

namespace headwater::testing {
namespace {

class TrainerOwned : public TransactionTest {
 protected:
  LossReply Submit(const TestHead& head, int64_t step, int64_t micro_batch) {
    return server_->Compute(CrossEntropyHeader(head, step, micro_batch, {1, 2, 3}), Rows(5));
  }
  v1::AddGradientHeader GradientHeader(const TestHead& head, int64_t micro_batch, int64_t row_start, int64_t row_count) {
    v1::AddGradientHeader header;
    *header.mutable_head() = server_->At(head, 0);
    header.set_micro_batch(micro_batch);
    header.set_row_start(row_start);
    header.set_row_count(row_count);
    return header;
  }
};

INSTANTIATE_TEST_SUITE_P(Shards, TrainerOwned, ::testing::Values(1, 3));

TEST_P(TrainerOwned, AddGradientAddsRowsOnce) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  Require(Submit(head, 0, 0).status, "ComputeLoss");
  std::vector<float> expected = Floats(server_->Gradient(head));
  const std::vector<float> rows = Random(4 * 5, 9, 1);
  v1::AddGradientHeader header = GradientHeader(head, 1, 7, 4);
  header.set_factor(-0.5);
  bool replayed = true;
  ASSERT_EQ(ReasonOf(server_->AddGradient(header, rows, &replayed)), "OK");
  EXPECT_FALSE(replayed);
  for (size_t i = 0; i < rows.size(); ++i) expected[7 * 5 + i] += -0.5F * rows[i];
  ExpectClose(Floats(server_->Gradient(head)), expected, 1e-6F);
  EXPECT_EQ(server_->Find(head, 1).state(), v1::CONTRIBUTION_STATE_COMMITTED);
  EXPECT_EQ(server_->Find(head, 1).form(), v1::CONTRIBUTION_FORM_DIRECT);

  const std::string before = server_->Snapshot(head);
  ASSERT_EQ(ReasonOf(server_->AddGradient(header, rows, &replayed)), "OK");
  EXPECT_TRUE(replayed);
  header.set_attempt(3);  // the digest does not cover the attempt
  ASSERT_EQ(ReasonOf(server_->AddGradient(header, rows, &replayed)), "OK");
  EXPECT_TRUE(replayed);
  header.set_factor(0.5);
  EXPECT_EQ(ReasonOf(server_->AddGradient(header, rows)), "MICRO_BATCH_CONFLICT");
  header.set_factor(-0.5);
  EXPECT_EQ(ReasonOf(server_->AddGradient(header, Random(4 * 5, 10, 1))), "MICRO_BATCH_CONFLICT");
  EXPECT_EQ(server_->Snapshot(head), before);
  EXPECT_EQ(ReasonOf(server_->Seal(head, 0, {0, 1})), "OK");
  EXPECT_EQ(ReasonOf(server_->AddGradient(GradientHeader(head, 2, 0, 4), rows)), "STEP_SEALED");
}

TEST_P(TrainerOwned, AddGradientIsBoundedByABatchsBytes) {
  ServerSetup setup = MakeSetup();
  setup.options.limits.max_micro_batch_bytes = 60;
  Restart(setup);
  const TestHead head = server_->MakeHead("h", SmallSpec());
  EXPECT_EQ(ReasonOf(server_->AddGradient(GradientHeader(head, 0, 0, 3), Random(15, 9, 1))), "OK");  // at the limit
  const std::string before = server_->Snapshot(head);
  const WireError error = DecodeError(server_->AddGradient(GradientHeader(head, 1, 0, 4), Random(20, 9, 1)));
  EXPECT_EQ(error.reason, "LIMIT_EXCEEDED");
  EXPECT_EQ(error.at("limit"), "max_micro_batch_bytes");
  EXPECT_EQ(server_->Snapshot(head), before);
  EXPECT_EQ(server_->MetricLine("headwater_in_flight_bytes"), "headwater_in_flight_bytes 0");
}

TEST_P(TrainerOwned, WeightsCloseTheSealedStep) {
  TestHead head = server_->MakeHead("h", SmallSpec());
  Require(Submit(head, 0, 0).status, "ComputeLoss");
  const std::vector<float> next = Random(65, 30, 1);
  v1::Head answer;
  std::string before = server_->Snapshot(head);
  EXPECT_EQ(ReasonOf(server_->Upload(head.head, v1::HEAD_TENSOR_WEIGHT, next, &answer, 0)), "STEP_NOT_SEALED");
  EXPECT_EQ(server_->Snapshot(head), before);
  Require(server_->Seal(head, 0, {0}), "SealStep");
  ASSERT_EQ(ReasonOf(server_->Upload(head.head, v1::HEAD_TENSOR_WEIGHT, next, &answer, 0)), "OK");
  EXPECT_EQ(answer.epoch(), head.head.epoch());
  EXPECT_EQ(answer.open_step(), 1);
  EXPECT_EQ(answer.weight_version(), head.head.weight_version() + 1);
  EXPECT_EQ(server_->Weights(head), Bytes(next));
  EXPECT_EQ(Floats(server_->Gradient(head, 1)), std::vector<float>(65, 0.0F));
  EXPECT_EQ(server_->Steps(head).last_closed().state(), v1::STEP_STATE_REPLACED);
  EXPECT_EQ(server_->MetricLine("headwater_steps_total{how=\"replaced\"}"), "headwater_steps_total{how=\"replaced\"} 1");

  // The same bytes again are answered alike, others conflict.
  before = server_->Snapshot(head, 1);
  ASSERT_EQ(ReasonOf(server_->Upload(head.head, v1::HEAD_TENSOR_WEIGHT, next, &answer, 0)), "OK");
  EXPECT_EQ(answer.open_step(), 1);
  EXPECT_EQ(ReasonOf(server_->Upload(head.head, v1::HEAD_TENSOR_WEIGHT, Random(65, 31, 1), &answer, 0)), "STEP_CONFLICT");
  EXPECT_EQ(ReasonOf(server_->Upload(head.head, v1::HEAD_TENSOR_WEIGHT, next, &answer, 7)), "STEP_MISMATCH");
  EXPECT_EQ(server_->Snapshot(head, 1), before);
  EXPECT_EQ(server_->MetricLine("headwater_upload_bytes"), "headwater_upload_bytes 0");
  EXPECT_EQ(ReasonOf(Submit(head, 1, 0).status), "OK");
}

TEST_P(TrainerOwned, ACutUploadLeavesTheSealedStepAsItWas) {
  v1::HeadSpec spec = SmallSpec();
  spec.set_has_bias(true);
  const TestHead head = server_->MakeHead("h", spec);
  Require(Submit(head, 0, 0).status, "ComputeLoss");
  Require(server_->Seal(head, 0, {0}), "SealStep");
  const std::string before = server_->Snapshot(head);
  const std::vector<float> weight = Random(65, 30, 1);
  v1::Head answer;
  {
    grpc::ClientContext context;
    const auto stream = server_->heads().UploadWeights(&context);
    v1::UploadWeightsRequest request;
    request.mutable_header()->set_name(head.name());
    request.mutable_header()->set_epoch(head.head.epoch());
    request.mutable_header()->set_upload_id("cut");
    request.mutable_header()->set_tensor(v1::HEAD_TENSOR_WEIGHT);
    request.mutable_header()->set_data_type(v1::DATA_TYPE_FLOAT32);
    request.mutable_header()->set_total_bytes(260);
    request.mutable_header()->set_closes_step(0);
    stream->Write(request);
    request.mutable_chunk()->set_data(Bytes(weight).substr(0, 100));
    stream->Write(request);
    context.TryCancel();
    EXPECT_FALSE(stream->Finish().ok());
  }
  EXPECT_EQ(server_->Snapshot(head), before);
  // The weight alone is only the half of it.
  ASSERT_EQ(ReasonOf(server_->Upload(head.head, v1::HEAD_TENSOR_WEIGHT, weight, &answer, 0)), "OK");
  EXPECT_EQ(answer.open_step(), 0);
  EXPECT_EQ(server_->Snapshot(head), before);
  const std::vector<float> bias = Random(13, 32, 1);
  ASSERT_EQ(ReasonOf(server_->Upload(head.head, v1::HEAD_TENSOR_BIAS, bias, &answer, 0)), "OK");
  EXPECT_EQ(answer.open_step(), 1);
  EXPECT_EQ(server_->Weights(head), Bytes(weight) + Bytes(bias));
  EXPECT_EQ(server_->Steps(head).last_closed().state(), v1::STEP_STATE_REPLACED);
}

TEST_P(TrainerOwned, HalfOfNewWeightsTakesUploadsRoomUntilTheStepIsClosed) {
  ServerSetup setup = MakeSetup();
  setup.options.limits.max_upload_bytes = 320;
  Restart(setup);
  v1::HeadSpec spec = SmallSpec();
  spec.set_has_bias(true);
  const TestHead head = server_->MakeHead("h", spec);
  TestHead other = server_->MakeHead("other", SmallSpec());
  Require(server_->Seal(head, 0, {}), "SealStep");
  v1::Head answer;
  ASSERT_EQ(ReasonOf(server_->Upload(head.head, v1::HEAD_TENSOR_WEIGHT, Random(65, 30, 1), &answer, 0)), "OK");
  EXPECT_EQ(server_->MetricLine("headwater_upload_bytes"), "headwater_upload_bytes 260");
  const std::vector<float> values = Random(65, 31, 1);
  const WireError error = DecodeError(server_->Upload(other.head, v1::HEAD_TENSOR_WEIGHT, values, &answer));
  EXPECT_EQ(error.reason, "IN_FLIGHT_BYTES_EXCEEDED");
  EXPECT_EQ(error.at("limit"), "max_upload_bytes");
  EXPECT_TRUE(error.retry_ms.has_value());
  ASSERT_EQ(ReasonOf(server_->Upload(head.head, v1::HEAD_TENSOR_BIAS, Random(13, 32, 1), &answer, 0)), "OK");
  EXPECT_EQ(answer.open_step(), 1);
  EXPECT_EQ(server_->MetricLine("headwater_upload_bytes"), "headwater_upload_bytes 0");
  ASSERT_EQ(ReasonOf(server_->Upload(other.head, v1::HEAD_TENSOR_WEIGHT, values, &other.head)), "OK");
  EXPECT_EQ(server_->Weights(other), Bytes(values));
}

TEST_P(TrainerOwned, TakingAHeadFencesTheOldRun) {
  const TestHead old_head = server_->MakeHead("h", SmallSpec());
  Require(Submit(old_head, 0, 0).status, "ComputeLoss");
  Require(server_->Apply(ApplyOf(old_head, 0, 1)), "ApplyOptimizerStep");
  Require(Submit(old_head, 1, 0).status, "ComputeLoss");
  v1::MicroBatchHeader staged = ExplicitHeader(old_head, 1, 1);
  Require(server_->Compute(staged, Rows(6)).status, "staged");
  const std::string weights = server_->Weights(old_head);
  const v1::Head described = server_->Get(old_head.name());
  TestHead head = old_head;
  EXPECT_EQ(ReasonOf(server_->Take(&head, std::string(16, 'x'))), "EPOCH_FENCED");
  ASSERT_EQ(ReasonOf(server_->Take(&head, old_head.head.epoch())), "OK");
  EXPECT_NE(head.head.epoch(), old_head.head.epoch());
  EXPECT_EQ(head.head.open_step(), 1);
  EXPECT_EQ(head.head.weight_version(), described.weight_version());
  EXPECT_EQ(server_->Weights(head), weights);
  EXPECT_EQ(server_->Steps(head).open().micro_batches_size(), 0);
  EXPECT_EQ(Floats(server_->Gradient(head, 1)), std::vector<float>(65, 0.0F));

  // Of two that take it, the one that came second finds out; the zombie does, too.
  const std::string before = server_->Snapshot(head, 1);
  TestHead second = old_head;
  EXPECT_EQ(ReasonOf(server_->Take(&second, old_head.head.epoch())), "EPOCH_FENCED");
  EXPECT_EQ(ReasonOf(Submit(old_head, 1, 0).status), "EPOCH_FENCED");
  EXPECT_EQ(ReasonOf(server_->Commit(old_head, 1, 1, 1)), "EPOCH_FENCED");
  EXPECT_EQ(ReasonOf(server_->Apply(ApplyOf(old_head, 1, 1))), "EPOCH_FENCED");
  EXPECT_EQ(ReasonOf(server_->AddGradient(GradientHeader(old_head, 3, 0, 1), Random(5, 9, 1))), "EPOCH_FENCED");
  v1::Head answer;
  EXPECT_EQ(ReasonOf(server_->Upload(old_head.head, v1::HEAD_TENSOR_WEIGHT, Random(65, 1, 1), &answer, 1)), "EPOCH_FENCED");
  EXPECT_EQ(server_->Snapshot(head, 1), before);
  EXPECT_EQ(ReasonOf(Submit(head, 1, 0).status), "OK");
}

}  // namespace
}  // namespace headwater::testing
