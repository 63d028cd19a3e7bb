// Contributions that are HELD as rows: without a slot, with factors for each row, within their budget.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/transaction_fixture.h"

namespace headwater::testing {
namespace {

// Three rows of five fp32 elements, and their targets.
constexpr int64_t kHeldBytes = kRows * kColumns * 4 + kRows * 4;

class Holding : public TransactionTest {
 protected:
  static v1::HeadSpec WithoutSlots() {
    v1::HeadSpec spec = SmallSpec();
    spec.set_staging_slots(0);
    return spec;
  }
  // The gradient of the same three rows, with these weights, submitted EAGER to a head of its own.
  std::vector<float> Expected(const std::string& id, uint32_t seed, const std::vector<float>& token_weights) {
    const TestHead head = server_->MakeHead(id, SmallSpec());
    v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, 0, {1, 2, 3});
    *header.mutable_terms(0)->mutable_token_weights() = FloatTensor(token_weights);
    Require(server_->Compute(header, Rows(seed)).status, "the expected gradient");
    return Floats(server_->Gradient(head));
  }
};

INSTANTIATE_TEST_SUITE_P(Shards, Holding, ::testing::Values(1, 3));

TEST_P(Holding, TakesTheContributionThatFindsNoSlot) {
  const TestHead head = server_->MakeHead("h", SmallSpec());  // one slot
  v1::MicroBatchHeader header = ExplicitHeader(head, 0, 0);
  header.set_allow_held(true);
  const LossReply staged = server_->Compute(header, Rows(5));
  EXPECT_EQ(staged.summary.form(), v1::CONTRIBUTION_FORM_STAGED);
  header.set_micro_batch(1);
  const LossReply held = server_->Compute(header, Rows(6));
  ASSERT_EQ(ReasonOf(held.status), "OK") << held.status.error_message();
  EXPECT_EQ(held.summary.form(), v1::CONTRIBUTION_FORM_HELD);
  EXPECT_EQ(held.summary.state(), v1::CONTRIBUTION_STATE_STAGED);
  EXPECT_EQ(held.grad_hidden.size(), 60U);
  EXPECT_GT(held.summary.terms(0).sums().loss_sum(), 0);
  EXPECT_EQ(server_->Find(head, 1).form(), v1::CONTRIBUTION_FORM_HELD);
  EXPECT_EQ(Floats(server_->Gradient(head)), std::vector<float>(65, 0.0F));
  EXPECT_EQ(server_->MetricLine("headwater_held_bytes"), absl::StrCat("headwater_held_bytes ", kHeldBytes));
  EXPECT_EQ(server_->MetricLine("headwater_micro_batches_total{outcome=\"held\"}"),
            "headwater_micro_batches_total{outcome=\"held\"} 1");

  ASSERT_EQ(ReasonOf(server_->Commit(head, 0, 1, 0.5)), "OK");
  ExpectClose(Floats(server_->Gradient(head)), Expected("half", 6, {0.5F, 0.5F, 0.5F}));
  EXPECT_EQ(server_->MetricLine("headwater_held_bytes"), "headwater_held_bytes 0");
  const std::string before = server_->Snapshot(head);
  bool replayed = false;
  ASSERT_EQ(ReasonOf(server_->Commit(head, 0, 1, 0.5, &replayed)), "OK");
  EXPECT_TRUE(replayed);
  EXPECT_EQ(ReasonOf(server_->Commit(head, 0, 1, 0.25)), "MICRO_BATCH_CONFLICT");
  EXPECT_EQ(server_->Snapshot(head), before);
}

TEST_P(Holding, WaitsForTheFactorsOfEachRow) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  v1::MicroBatchHeader header = ExplicitHeader(head, 0, 0);
  header.set_late_token_factors(true);
  *header.mutable_terms(0)->mutable_token_weights() = FloatTensor({2, 1, 1});
  const LossReply held = server_->Compute(header, Rows(5));
  ASSERT_EQ(ReasonOf(held.status), "OK") << held.status.error_message();
  EXPECT_EQ(held.summary.form(), v1::CONTRIBUTION_FORM_HELD);  // though a slot is free
  const std::string before = server_->Snapshot(head);
  v1::CommitMicroBatchRequest commit = CommitOf(head, 0, 0);
  commit.set_factor(2);
  *commit.mutable_token_factors() = FloatTensor({1, 2});
  const WireError error = DecodeError(server_->Commit(commit));
  EXPECT_EQ(error.reason, "SHAPE_MISMATCH");
  EXPECT_EQ(server_->Snapshot(head), before);

  *commit.mutable_token_factors() = FloatTensor({0.25F, -1, 0});
  bool replayed = true;
  ASSERT_EQ(ReasonOf(server_->Commit(commit, &replayed)), "OK");
  EXPECT_FALSE(replayed);
  ExpectClose(Floats(server_->Gradient(head)), Expected("weighted", 5, {2 * 2 * 0.25F, 2 * -1, 0}));
  const std::string after = server_->Snapshot(head);
  ASSERT_EQ(ReasonOf(server_->Commit(commit, &replayed)), "OK");
  EXPECT_TRUE(replayed);
  *commit.mutable_token_factors() = FloatTensor({0.25F, -1, 1});
  EXPECT_EQ(ReasonOf(server_->Commit(commit)), "MICRO_BATCH_CONFLICT");
  commit.clear_token_factors();
  EXPECT_EQ(ReasonOf(server_->Commit(commit)), "MICRO_BATCH_CONFLICT");
  EXPECT_EQ(server_->Snapshot(head), after);
}

TEST_P(Holding, OnlyWhatAnotherSessionHasIsWorthARetry) {
  ServerSetup setup = MakeSetup();
  setup.options.limits.max_held_bytes = kHeldBytes;
  Restart(setup);
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

TEST_P(Holding, NeedsNoSlotAtAll) {
  const TestHead head = server_->MakeHead("h", WithoutSlots());
  v1::MicroBatchHeader header = ExplicitHeader(head, 0, 0);
  EXPECT_EQ(ReasonOf(server_->Compute(header, Rows(5)).status), "STAGING_FULL");
  header.set_allow_held(true);
  ASSERT_EQ(ReasonOf(server_->Compute(header, Rows(5)).status), "OK");
  ASSERT_EQ(ReasonOf(server_->Commit(head, 0, 0, 1)), "OK");
  // An EAGER micro-batch that must be finite before it is added.
  v1::MicroBatchHeader refuse = CrossEntropyHeader(head, 0, 1, {1, 2, 3});
  refuse.set_non_finite_policy(v1::NON_FINITE_POLICY_REFUSE);
  EXPECT_EQ(ReasonOf(server_->Compute(refuse, Rows(6)).status), "STAGING_FULL");
  refuse.set_allow_held(true);
  std::vector<float> broken = Random(15, 6, 1);
  broken[7] = std::numeric_limits<float>::quiet_NaN();
  const std::string before = server_->Snapshot(head);
  EXPECT_EQ(ReasonOf(server_->Compute(refuse, Bytes(broken)).status), "NON_FINITE_VALUES");
  EXPECT_EQ(server_->Snapshot(head), before);
  const LossReply added = server_->Compute(refuse, Rows(6));
  ASSERT_EQ(ReasonOf(added.status), "OK") << added.status.error_message();
  EXPECT_EQ(added.summary.state(), v1::CONTRIBUTION_STATE_COMMITTED);
  std::vector<float> expected = Expected("first", 5, {1, 1, 1});
  const std::vector<float> second = Expected("second", 6, {1, 1, 1});
  for (size_t i = 0; i < expected.size(); ++i) expected[i] += second[i];
  ExpectClose(Floats(server_->Gradient(head)), expected, 4e-6F);
  EXPECT_EQ(server_->MetricLine("headwater_held_bytes"), "headwater_held_bytes 0");
}

TEST_P(Holding, IsBoundedByItsBudget) {
  ServerSetup setup = MakeSetup();
  setup.options.limits.max_held_bytes = 2 * kHeldBytes;
  Restart(setup);
  const TestHead head = server_->MakeHead("h", WithoutSlots());
  v1::MicroBatchHeader header = ExplicitHeader(head, 0, 0);
  header.set_allow_held(true);
  Require(server_->Compute(header, Rows(5)).status, "first");
  header.set_micro_batch(1);
  Require(server_->Compute(header, Rows(6)).status, "second, at the limit");
  const std::string before = server_->Snapshot(head);
  header.set_micro_batch(2);
  const WireError error = DecodeError(server_->Compute(header, Rows(7)).status);
  EXPECT_EQ(error.code, grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(error.reason, "STAGING_FULL");
  EXPECT_EQ(error.at("limit"), "max_held_bytes");
  EXPECT_EQ(error.at("requestedBytes"), absl::StrCat(kHeldBytes));
  EXPECT_EQ(error.at("availableBytes"), "0");
  EXPECT_TRUE(error.retry_ms.has_value());
  EXPECT_EQ(server_->Snapshot(head), before);
  Require(server_->Discard(head, 0, 0), "DiscardMicroBatch");
  EXPECT_EQ(ReasonOf(server_->Compute(header, Rows(7)).status), "OK");
  // What a closed step leaves behind is freed, too.
  grpc::ClientContext context;
  v1::DiscardGradientRequest discard;
  *discard.mutable_head() = server_->At(head, 0);
  v1::DiscardGradientResponse discarded;
  Require(server_->heads().DiscardGradient(&context, discard, &discarded), "DiscardGradient");
  EXPECT_EQ(server_->MetricLine("headwater_held_bytes"), "headwater_held_bytes 0");
}

TEST_P(Holding, CountsClassWeightsAndRowNumbersToo) {
  constexpr int64_t kVocab = 13;
  for (const int64_t missing : {1, 0}) {
    ServerSetup setup = MakeSetup();
    setup.options.limits.max_held_bytes = kHeldBytes + kVocab * 4 - missing;
    Restart(setup);
    const TestHead head = server_->MakeHead("h", WithoutSlots());
    v1::MicroBatchHeader header = ExplicitHeader(head, 0, 0);
    header.set_allow_held(true);
    *header.mutable_terms(0)->mutable_cross_entropy()->mutable_class_weights() = FloatTensor(std::vector<float>(kVocab, 0.5F));
    EXPECT_EQ(ReasonOf(server_->Compute(header, Rows(5)).status), missing == 0 ? "OK" : "LIMIT_EXCEEDED");
  }
}

// Nobody sends rows in vain, again and again, of what no commit of another makes room for.
TEST_P(Holding, WhatCanNeverBeHeldIsRefusedAtItsHeader) {
  for (const int64_t most : {int64_t{0}, kHeldBytes - 1}) {
    ServerSetup setup = MakeSetup();
    setup.options.limits.max_held_bytes = most;
    Restart(setup);
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

TEST_P(Holding, ItsCommitIsTimeInWhichTheEngineIsBusy) {
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

TEST_P(Holding, EndsWithTheTeachersWeights) {
  const TestHead student = server_->MakeHead("student", WithoutSlots());
  v1::HeadSpec spec = SmallSpec(13, 4);
  spec.set_trainable(false);
  spec.clear_optimizer();
  TestHead teacher = server_->MakeHead("teacher", spec, 7);
  v1::MicroBatchHeader header = ExplicitHeader(student, 0, 0);
  header.set_allow_held(true);
  header.mutable_terms(0)->mutable_jensen_shannon();
  header.mutable_terms(0)->mutable_teacher_hidden()->set_head(teacher.name());
  header.mutable_terms(0)->mutable_teacher_hidden()->set_data_type(v1::DATA_TYPE_FLOAT32);
  const std::string teacher_rows = Bytes(Random(12, 9, 1));
  Require(server_->Compute(header, Rows(5), teacher_rows).status, "held");
  header.set_micro_batch(1);
  Require(server_->Compute(header, Rows(6), teacher_rows).status, "held, too");
  ASSERT_EQ(ReasonOf(server_->Commit(student, 0, 0, 1)), "OK");
  const std::string gradient = server_->Gradient(student);
  Require(server_->Upload(teacher.head, v1::HEAD_TENSOR_WEIGHT, Random(52, 8, 1), &teacher.head), "new weights of the teacher");
  const WireError error = DecodeError(server_->Commit(student, 0, 1, 1));
  EXPECT_EQ(error.reason, "WEIGHT_VERSION_MISMATCH");
  EXPECT_EQ(error.code, grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(server_->Gradient(student), gradient);
  EXPECT_EQ(ReasonOf(server_->Discard(student, 0, 1)), "OK");
}

}  // namespace
}  // namespace headwater::testing
