// What the rows of transaction_rows_test.cc do not say: figures that answers report, limits, and what is refused at its header.
#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/transactions/transaction_fixture.h"

namespace headwater::testing {
namespace {

// Three rows of five fp32 elements, and their targets.
constexpr int64_t kHeldBytes = kRows * kColumns * 4 + kRows * 4;

class Transactions : public TransactionTest {
 protected:
  static v1::HeadSpec WithoutSlots() {
    v1::HeadSpec spec = SmallSpec();
    spec.set_staging_slots(0);
    return spec;
  }
  LossReply Submit(const TestHead& head, int64_t step, int64_t micro_batch) {
    return server_->Compute(CrossEntropyHeader(head, step, micro_batch, {1, 2, 3}), Rows(5));
  }
  grpc::Status KeepAlive(const std::string& session, v1::KeepAliveResponse* response = nullptr) {
    v1::KeepAliveRequest request;
    request.set_session_id(session);
    return server_->Call(&Sessions::KeepAlive, request, response);
  }
  grpc::Status Close(const std::string& session) {
    v1::CloseSessionRequest request;
    request.set_session_id(session);
    return server_->Call(&Sessions::CloseSession, request);
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

INSTANTIATE_TEST_SUITE_P(Shards, Transactions, ::testing::Values(1, 3));

// ---- steps -----------------------------------------------------------------------------------------------------------

// As trainers' options have it.
TEST_P(Transactions, ZeroAndInfinityClipNothing) {
  const TestHead unclipped = server_->MakeHead("unclipped", SmallSpec());
  Require(Submit(unclipped, 0, 0).status, "ComputeLoss");
  ASSERT_EQ(ReasonOf(server_->Apply(ApplyOf(unclipped, 0, 1))), "OK");
  for (const double none : {0.0, std::numeric_limits<double>::infinity()}) {
    const TestHead head = server_->MakeHead(none == 0 ? "zero" : "infinity", SmallSpec());
    Require(Submit(head, 0, 0).status, "ComputeLoss");
    v1::ApplyOptimizerStepRequest request = ApplyOf(head, 0, 1);
    request.set_max_grad_norm(none);
    v1::ApplyOptimizerStepResponse response;
    ASSERT_EQ(ReasonOf(server_->Apply(request, &response)), "OK");
    EXPECT_EQ(response.clip_factor(), 1);
    EXPECT_GT(response.global_grad_norm(), 0);
    EXPECT_EQ(server_->Weights(head), server_->Weights(unclipped));
    request.clear_max_grad_norm();  // the same arguments
    ASSERT_EQ(ReasonOf(server_->Apply(request, &response)), "OK");
    EXPECT_TRUE(response.replayed());
  }
}

TEST_P(Transactions, AClientIsNotToBlameForTheWait) {
  ServerSetup setup = MakeSetup();
  setup.options.limits.max_step_wait = absl::Milliseconds(300);
  setup.options.stream_idle_timeout = absl::Milliseconds(100);
  Restart(setup);
  EXPECT_EQ(ReasonOf(Submit(server_->MakeHead("h", SmallSpec()), 1, 0).status), "STEP_MISMATCH");
}

TEST_P(Transactions, AddGradientIsBoundedByABatchsBytes) {
  Restart(WithLimit(&service::Limits::max_micro_batch_bytes, 60, MakeSetup()));
  const TestHead head = server_->MakeHead("h", SmallSpec());
  EXPECT_EQ(ReasonOf(server_->AddGradient(GradientHeader(head, 0, 0, 3), Random(15, 9, 1))), "OK");  // at the limit
  const std::string before = server_->Snapshot(head);
  const WireError error = DecodeError(server_->AddGradient(GradientHeader(head, 1, 0, 4), Random(20, 9, 1)));
  EXPECT_EQ(error.reason, "LIMIT_EXCEEDED");
  EXPECT_EQ(error.at("limit"), "max_micro_batch_bytes");
  EXPECT_EQ(server_->Snapshot(head), before);
  EXPECT_EQ(server_->MetricLine("headwater_in_flight_bytes"), "headwater_in_flight_bytes 0");
}

TEST_P(Transactions, HalfOfNewWeightsTakesUploadsRoomUntilTheStepIsClosed) {
  Restart(WithLimit(&service::Limits::max_upload_bytes, 320, MakeSetup()));
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

// ---- what is held ----------------------------------------------------------------------------------------------------

TEST_P(Transactions, OnlyWhatAnotherSessionHoldsIsWorthARetry) {
  Restart(WithLimit(&service::Limits::max_held_bytes, kHeldBytes, MakeSetup()));
  const TestHead head = server_->MakeHead("h", SmallSpec());  // one slot
  const std::string own = server_->OpenSession(600000), other = server_->OpenSession(600000);
  v1::MicroBatchHeader header = ExplicitHeader(head, 0, 0);
  header.set_session_id(own);
  Require(server_->Compute(header, Rows(5)).status, "the one that takes the slot");
  header.set_micro_batch(1);
  const WireError own_slot = DecodeError(server_->Compute(header, Rows(6)).status);
  EXPECT_EQ(own_slot.reason, "STAGING_FULL");
  EXPECT_EQ(own_slot.at("ownSlots"), "1");
  EXPECT_FALSE(own_slot.retry_ms.has_value());
  header.set_session_id(other);
  const WireError their_slot = DecodeError(server_->Compute(header, Rows(6)).status);
  EXPECT_EQ(their_slot.reason, "STAGING_FULL");
  EXPECT_EQ(their_slot.at("ownSlots"), "0");
  EXPECT_TRUE(their_slot.retry_ms.has_value());

  header.set_session_id(own);
  header.set_allow_held(true);
  EXPECT_EQ(server_->Compute(header, Rows(6)).summary.form(), v1::CONTRIBUTION_FORM_HELD);  // all that may be held
  header.set_micro_batch(2);
  const WireError own_rows = DecodeError(server_->Compute(header, Rows(7)).status);
  EXPECT_EQ(own_rows.reason, "STAGING_FULL");
  EXPECT_EQ(own_rows.at("limit"), "max_held_bytes");
  EXPECT_NE(own_rows.message.find("staging_slots"), std::string::npos) << own_rows.message;
  EXPECT_FALSE(own_rows.retry_ms.has_value());
  header.set_session_id(other);
  const WireError their_rows = DecodeError(server_->Compute(header, Rows(7)).status);
  EXPECT_EQ(their_rows.at("limit"), "max_held_bytes");
  EXPECT_TRUE(their_rows.retry_ms.has_value());
}

TEST_P(Transactions, HeldBytesCountClassWeightsToo) {
  constexpr int64_t kVocab = 13;
  for (const int64_t missing : {1, 0}) {
    Restart(WithLimit(&service::Limits::max_held_bytes, kHeldBytes + kVocab * 4 - missing, MakeSetup()));
    const TestHead head = server_->MakeHead("h", WithoutSlots());
    v1::MicroBatchHeader header = ExplicitHeader(head, 0, 0);
    header.set_allow_held(true);
    *header.mutable_terms(0)->mutable_cross_entropy()->mutable_class_weights() = FloatTensor(std::vector<float>(kVocab, 0.5F));
    EXPECT_EQ(ReasonOf(server_->Compute(header, Rows(5)).status), missing == 0 ? "OK" : "LIMIT_EXCEEDED");
  }
}

// Nobody sends rows in vain, again and again, of what no commit of another makes room for.
TEST_P(Transactions, WhatCanNeverBeHeldIsRefusedAtItsHeader) {
  for (const int64_t most : {int64_t{0}, kHeldBytes - 1}) {
    Restart(WithLimit(&service::Limits::max_held_bytes, most, MakeSetup()));
    const TestHead head = server_->MakeHead("h", SmallSpec());  // one slot
    const TestHead without = server_->MakeHead("without", WithoutSlots());
    v1::MicroBatchHeader late = ExplicitHeader(head, 0, 0);
    late.set_late_token_factors(true);
    v1::MicroBatchHeader no_slot = ExplicitHeader(without, 0, 0);
    no_slot.set_allow_held(true);
    for (const v1::MicroBatchHeader& header : {late, no_slot}) {
      OpenStream stream(server_->loss(), header);  // no row is sent
      const WireError error = DecodeError(stream.End());
      EXPECT_EQ(error.code, grpc::StatusCode::INVALID_ARGUMENT);
      EXPECT_EQ(error.reason, "LIMIT_EXCEEDED");
      EXPECT_EQ(error.at("field"), "header.row_count");
      EXPECT_EQ(error.at("limit"), "max_held_bytes");
      EXPECT_EQ(error.at("maximum"), absl::StrCat(most));
      EXPECT_EQ(error.at("actual"), absl::StrCat(kHeldBytes));
      EXPECT_FALSE(error.retry_ms.has_value());
    }
    // What a slot does for may be tried again when that is free, and what is added at once needs no room.
    v1::MicroBatchHeader may_be_held = ExplicitHeader(head, 0, 0);
    may_be_held.set_allow_held(true);
    Require(server_->Compute(may_be_held, Rows(5)).status, "staged");
    may_be_held.set_micro_batch(1);
    EXPECT_EQ(ReasonOf(server_->Compute(may_be_held, Rows(6)).status), "STAGING_FULL");
    Require(server_->Commit(head, 0, 0, 1), "CommitMicroBatch");
    EXPECT_EQ(ReasonOf(server_->Compute(may_be_held, Rows(6)).status), "OK");
    v1::MicroBatchHeader eager = CrossEntropyHeader(without, 0, 1, {1, 2, 3});
    eager.set_non_finite_policy(v1::NON_FINITE_POLICY_REFUSE);
    eager.set_allow_held(true);
    EXPECT_EQ(ReasonOf(server_->Compute(eager, Rows(7)).status), "OK");
  }
}

TEST_P(Transactions, TheCommitOfTheHeldIsTimeInWhichTheEngineIsBusy) {
  const TestHead head = server_->MakeHead("h", WithoutSlots());
  v1::MicroBatchHeader header = ExplicitHeader(head, 0, 0);
  header.set_allow_held(true);
  Require(server_->Compute(header, Rows(5)).status, "held");
  const auto busy_seconds = [&] {
    const std::string name = "headwater_compute_busy_seconds_total";
    return std::stod(server_->MetricLine(name).substr(name.size()));
  };
  const double before = busy_seconds();
  server_->gate().Close();
  std::thread committer([&] { EXPECT_EQ(ReasonOf(server_->Commit(head, 0, 0, 1)), "OK"); });
  server_->gate().AwaitWaiting();
  EXPECT_TRUE(Await([&] { return busy_seconds() > before + 0.02; }));
  server_->gate().Open();
  committer.join();
  const double after = busy_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(busy_seconds(), after);
}

// ---- sessions --------------------------------------------------------------------------------------------------------

TEST_P(Transactions, SessionsAreBoundedInNumberAndLease) {
  ServerSetup setup = MakeSetup();
  setup.options.limits.max_sessions = 2;
  setup.options.limits.max_session_lease = absl::Seconds(20);
  Restart(setup);
  const std::string first = server_->OpenSession(60000);
  v1::KeepAliveResponse alive;
  Require(KeepAlive(first, &alive), "KeepAlive");
  EXPECT_EQ(alive.lease().seconds(), 20);
  server_->OpenSession(20000);  // at the limit
  v1::OpenSessionResponse refused;
  const WireError error = DecodeError(server_->Call(&Sessions::OpenSession, {}, &refused));
  EXPECT_EQ(error.reason, "QUOTA_EXCEEDED");
  EXPECT_EQ(error.code, grpc::StatusCode::RESOURCE_EXHAUSTED);
  Require(Close(first), "CloseSession");
  EXPECT_EQ(ReasonOf(server_->Call(&Sessions::OpenSession, {}, &refused)), "OK");
  EXPECT_EQ(refused.lease().seconds(), 20);  // the default is 30 s, or the limit if that is less
}

}  // namespace
}  // namespace headwater::testing
