// Attempts through the wire: a higher one aborts what a lower one has not committed, and the lower one is refused from then on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>

#include "tests/integration/transaction_fixture.h"

namespace headwater::testing {
namespace {

class Attempts : public TransactionTest {
 protected:
  LossReply Submit(const TestHead& head, int64_t attempt, uint32_t seed, v1::CommitMode mode = v1::COMMIT_MODE_EXPLICIT) {
    v1::MicroBatchHeader header = ExplicitHeader(head, 0, 0);
    header.set_commit_mode(mode);
    header.set_attempt(attempt);
    return server_->Compute(header, Rows(seed));
  }
  // Waits until a second micro-batch, beside one that is computed, has been admitted and announces its attempt.
  void AwaitAnnouncement() {
    EXPECT_TRUE(Await([&] { return server_->MetricLine("headwater_in_flight_bytes") == "headwater_in_flight_bytes 240"; }));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
};

INSTANTIATE_TEST_SUITE_P(Shards, Attempts, ::testing::Values(1, 3));

TEST_P(Attempts, AHigherOneReplacesWhatIsStaged) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  const TestHead witness = server_->MakeHead("witness", SmallSpec());
  Require(Submit(witness, 0, 6, v1::COMMIT_MODE_EAGER).status, "witness");
  Require(Submit(head, 0, 5).status, "attempt 0");
  const LossReply second = Submit(head, 2, 6);  // other bytes, and the only slot
  ASSERT_EQ(ReasonOf(second.status), "OK") << second.status.error_message();
  EXPECT_FALSE(second.summary.replayed());
  EXPECT_EQ(server_->Find(head, 0).attempt(), 2);
  const std::string before = server_->Snapshot(head);
  const WireError error = DecodeError(Submit(head, 1, 5).status);
  EXPECT_EQ(error.reason, "ATTEMPT_SUPERSEDED");
  EXPECT_EQ(error.code, grpc::StatusCode::ABORTED);
  EXPECT_EQ(ReasonOf(server_->Commit(CommitOf(head, 0, 0, 0))), "ATTEMPT_SUPERSEDED");
  EXPECT_EQ(server_->Snapshot(head), before);
  EXPECT_EQ(server_->MetricLine("headwater_micro_batches_total{outcome=\"superseded\"}"),
            "headwater_micro_batches_total{outcome=\"superseded\"} 1");
  EXPECT_EQ(ReasonOf(server_->Commit(CommitOf(head, 0, 0, 2))), "OK");
  ExpectClose(Floats(server_->Gradient(head)), Floats(server_->Gradient(witness)));
}

TEST_P(Attempts, AHigherOneOfACommittedMicroBatchIsAReplayOrAConflict) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  const LossReply first = Submit(head, 0, 5, v1::COMMIT_MODE_EAGER);
  Require(first.status, "attempt 0");
  const std::string gradient = server_->Gradient(head);
  const LossReply again = Submit(head, 1, 5, v1::COMMIT_MODE_EAGER);
  ASSERT_EQ(ReasonOf(again.status), "OK") << again.status.error_message();
  EXPECT_TRUE(again.summary.replayed());
  EXPECT_EQ(again.summary.digest(), first.summary.digest());  // the digest does not cover the attempt
  EXPECT_EQ(again.grad_hidden, first.grad_hidden);
  EXPECT_EQ(ReasonOf(Submit(head, 2, 6, v1::COMMIT_MODE_EAGER).status), "MICRO_BATCH_CONFLICT");
  EXPECT_EQ(server_->Gradient(head), gradient);
}

TEST_P(Attempts, TheHeaderOfAHigherOneDropsTheLowerOneAtOnce) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  Require(Submit(head, 0, 5).status, "attempt 0");
  const std::string zero = server_->Gradient(head);
  v1::MicroBatchHeader header = ExplicitHeader(head, 0, 0);
  header.set_attempt(1);
  OpenStream higher(server_->loss(), header);
  EXPECT_TRUE(Await([&] { return server_->Find(head, 0).state() == v1::CONTRIBUTION_STATE_UNSPECIFIED; }));
  EXPECT_EQ(server_->Find(head, 0).attempt(), 1);
  higher.context.TryCancel();
  higher.End();
  // The announcement stays: a late lower attempt cannot come back, the higher one can.
  EXPECT_EQ(ReasonOf(Submit(head, 0, 5).status), "ATTEMPT_SUPERSEDED");
  EXPECT_EQ(ReasonOf(server_->Commit(CommitOf(head, 0, 0, 0))), "ATTEMPT_SUPERSEDED");
  EXPECT_EQ(server_->Gradient(head), zero);
  EXPECT_EQ(ReasonOf(Submit(head, 1, 7).status), "OK");
  EXPECT_EQ(ReasonOf(server_->Commit(CommitOf(head, 0, 0, 1))), "OK");
}

TEST_P(Attempts, AHigherOneEndsALowerOneThatIsComputed) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  server_->gate().Close();
  LossReply lower;
  std::thread running([&] { lower = Submit(head, 0, 5); });
  server_->gate().AwaitWaiting();
  EXPECT_EQ(ReasonOf(Submit(head, 0, 5).status), "MICRO_BATCH_IN_PROGRESS");  // the same attempt
  LossReply higher;
  std::thread second([&] { higher = Submit(head, 1, 6); });
  AwaitAnnouncement();
  server_->gate().Open();
  running.join();
  second.join();
  EXPECT_EQ(ReasonOf(lower.status), "ATTEMPT_SUPERSEDED");
  EXPECT_EQ(ReasonOf(higher.status), "OK") << higher.status.error_message();
  EXPECT_EQ(server_->Find(head, 0).attempt(), 1);
  EXPECT_EQ(server_->Find(head, 0).state(), v1::CONTRIBUTION_STATE_STAGED);
}

TEST_P(Attempts, ALowerOneBeyondThePointOfNoReturnStays) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  server_->gate().Close();
  LossReply lower;
  std::thread running([&] { lower = Submit(head, 0, 5, v1::COMMIT_MODE_EAGER); });
  server_->gate().AwaitWaiting();  // in the engine: its products may have begun
  LossReply higher;
  std::thread second([&] { higher = Submit(head, 1, 5, v1::COMMIT_MODE_EAGER); });
  AwaitAnnouncement();
  server_->gate().Open();
  running.join();
  second.join();
  EXPECT_EQ(ReasonOf(lower.status), "OK") << lower.status.error_message();
  EXPECT_EQ(ReasonOf(higher.status), "OK") << higher.status.error_message();
  EXPECT_TRUE(higher.summary.replayed());
  EXPECT_EQ(server_->Steps(head).open().totals().micro_batch_count(), 1);
}

TEST_P(Attempts, ADiscardCoversItsAttemptAndThoseBelow) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  Require(Submit(head, 0, 5).status, "attempt 0");
  bool dropped = false;
  ASSERT_EQ(ReasonOf(server_->Discard(DiscardOf(head, 0, 0, 2), &dropped)), "OK");
  EXPECT_TRUE(dropped);
  for (const int64_t attempt : {0, 1, 2}) EXPECT_EQ(ReasonOf(Submit(head, attempt, 5).status), "MICRO_BATCH_DISCARDED");
  EXPECT_EQ(ReasonOf(server_->Commit(CommitOf(head, 0, 0, 2))), "MICRO_BATCH_DISCARDED");
  ASSERT_EQ(ReasonOf(Submit(head, 3, 5).status), "OK");
  EXPECT_EQ(ReasonOf(server_->Commit(CommitOf(head, 0, 0, 3))), "OK");
}

}  // namespace
}  // namespace headwater::testing
