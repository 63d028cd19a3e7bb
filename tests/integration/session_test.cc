// Sessions through the wire: leases, ownership, and what an ended session leaves behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>

#include "tests/integration/transaction_fixture.h"

namespace headwater::testing {
namespace {

class Sessions : public TransactionTest {
 protected:
  grpc::Status KeepAlive(const std::string& session, v1::KeepAliveResponse* response = nullptr) {
    grpc::ClientContext context;
    v1::KeepAliveRequest request;
    request.set_session_id(session);
    v1::KeepAliveResponse ignored;
    return server_->sessions().KeepAlive(&context, request, response != nullptr ? response : &ignored);
  }
  grpc::Status Close(const std::string& session) {
    grpc::ClientContext context;
    v1::CloseSessionRequest request;
    request.set_session_id(session);
    v1::CloseSessionResponse response;
    return server_->sessions().CloseSession(&context, request, &response);
  }
  // An EXPLICIT micro-batch of the session.
  LossReply Stage(const TestHead& head, int64_t micro_batch, const std::string& session, int64_t attempt = 0) {
    v1::MicroBatchHeader header = ExplicitHeader(head, 0, micro_batch);
    header.set_session_id(session);
    header.set_attempt(attempt);
    return server_->Compute(header, Rows(5));
  }
};

INSTANTIATE_TEST_SUITE_P(Shards, Sessions, ::testing::Values(1, 3));

TEST_P(Sessions, AreOpenedRenewedAndClosed) {
  grpc::ClientContext context;
  v1::OpenSessionResponse opened;
  Require(server_->sessions().OpenSession(&context, {}, &opened), "OpenSession");
  EXPECT_EQ(opened.session_id().size(), 32U);
  EXPECT_EQ(opened.lease().seconds(), 30);
  const std::string other = server_->OpenSession(2500);
  EXPECT_NE(other, opened.session_id());
  v1::KeepAliveResponse alive;
  ASSERT_EQ(ReasonOf(KeepAlive(other, &alive)), "OK");
  EXPECT_EQ(alive.lease().seconds(), 2);
  EXPECT_EQ(alive.lease().nanos(), 500000000);
  EXPECT_EQ(server_->MetricLine("headwater_sessions"), "headwater_sessions 2");
  EXPECT_EQ(ReasonOf(Close(other)), "OK");
  EXPECT_EQ(ReasonOf(Close(other)), "OK");  // ending one that has ended is not an error
  const WireError error = DecodeError(KeepAlive(other));
  EXPECT_EQ(error.reason, "SESSION_NOT_FOUND");
  EXPECT_EQ(error.code, grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(server_->MetricLine("headwater_sessions"), "headwater_sessions 1");
  EXPECT_EQ(server_->MetricLine("headwater_sessions_ended_total{how=\"closed\"}"),
            "headwater_sessions_ended_total{how=\"closed\"} 1");
}

TEST_P(Sessions, OwnWhatIsUndecided) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  const std::string owner = server_->OpenSession(20000);
  const std::string other = server_->OpenSession(20000);
  Require(Stage(head, 0, owner).status, "ComputeLoss");
  const std::string before = server_->Snapshot(head);
  const WireError error = DecodeError(server_->Commit(CommitOf(head, 0, 0)));
  EXPECT_EQ(error.reason, "NOT_SESSION_OWNER");
  EXPECT_EQ(error.code, grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(ReasonOf(server_->Commit(CommitOf(head, 0, 0, 0, other))), "NOT_SESSION_OWNER");
  EXPECT_EQ(ReasonOf(server_->Discard(DiscardOf(head, 0, 0))), "NOT_SESSION_OWNER");
  EXPECT_EQ(ReasonOf(server_->Discard(DiscardOf(head, 0, 0, 0, other))), "NOT_SESSION_OWNER");
  EXPECT_EQ(ReasonOf(server_->Commit(CommitOf(head, 0, 0, 0, std::string(32, 'x')))), "SESSION_NOT_FOUND");
  EXPECT_EQ(server_->Snapshot(head), before);
  EXPECT_EQ(ReasonOf(server_->Commit(CommitOf(head, 0, 0, 0, owner))), "OK");
  // A higher attempt discards whoever owns the lower one.
  Require(Stage(head, 1, owner).status, "ComputeLoss");
  bool dropped = false;
  EXPECT_EQ(ReasonOf(server_->Discard(DiscardOf(head, 0, 1, 1), &dropped)), "OK");
  EXPECT_TRUE(dropped);
  EXPECT_EQ(ReasonOf(server_->Commit(CommitOf(head, 0, 1, 0, owner))), "MICRO_BATCH_DISCARDED");
}

TEST_P(Sessions, ThatEndLeaveTombstonesForWhatIsUndecided) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  const std::string session = server_->OpenSession(600);
  v1::MicroBatchHeader eager = CrossEntropyHeader(head, 0, 0, {1, 2, 3});
  eager.set_session_id(session);
  Require(server_->Compute(eager, Rows(4)).status, "committed");
  const std::string gradient = server_->Gradient(head);
  Require(Stage(head, 1, session).status, "staged");
  EXPECT_TRUE(Await([&] { return server_->Find(head, 1).state() == v1::CONTRIBUTION_STATE_DISCARDED; }));
  EXPECT_EQ(server_->Find(head, 0).state(), v1::CONTRIBUTION_STATE_COMMITTED);  // committed ones stay
  EXPECT_EQ(ReasonOf(server_->Commit(CommitOf(head, 0, 1, 0, session))), "SESSION_NOT_FOUND");
  EXPECT_EQ(ReasonOf(server_->Commit(CommitOf(head, 0, 1))), "MICRO_BATCH_DISCARDED");
  EXPECT_EQ(ReasonOf(Stage(head, 1, "").status), "MICRO_BATCH_DISCARDED");
  EXPECT_EQ(server_->Gradient(head), gradient);
  EXPECT_TRUE(AwaitMetric("headwater_sessions_ended_total{how=\"expired\"}", 1));
  EXPECT_TRUE(AwaitMetric("headwater_session_discards_total{how=\"expired\"}", 1));
  // One that is closed is not one that went silent.
  const std::string orderly = server_->OpenSession(20000);
  Require(Stage(head, 2, orderly).status, "staged");
  EXPECT_EQ(ReasonOf(Close(orderly)), "OK");
  EXPECT_TRUE(AwaitMetric("headwater_session_discards_total{how=\"closed\"}", 1));
  EXPECT_TRUE(AwaitMetric("headwater_session_discards_total{how=\"expired\"}", 1));
  // The slot is free, and a higher attempt begins anew.
  EXPECT_EQ(ReasonOf(Stage(head, 1, "", 1).status), "OK");
  EXPECT_EQ(ReasonOf(server_->Commit(CommitOf(head, 0, 1, 1))), "OK");
}

TEST_P(Sessions, AreRenewedByAnyCallThatNamesThem) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  const std::string kept = server_->OpenSession(800);
  const std::string worked = server_->OpenSession(800);
  Require(Stage(head, 0, kept).status, "staged");
  for (int i = 0; i < 12; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_EQ(ReasonOf(KeepAlive(kept)), "OK");
    v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, 1 + i, {1, 2, 3});
    header.set_session_id(worked);
    EXPECT_EQ(ReasonOf(server_->Compute(header, Rows(5)).status), "OK");
  }
  EXPECT_EQ(server_->Find(head, 0).state(), v1::CONTRIBUTION_STATE_STAGED);
  EXPECT_TRUE(Await([&] { return server_->Find(head, 0).state() == v1::CONTRIBUTION_STATE_DISCARDED; }));
}

TEST_P(Sessions, DoNotEndWhileACallRuns) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  const std::string session = server_->OpenSession(600);
  server_->gate().Close();
  LossReply reply;
  std::thread call([&] { reply = Stage(head, 0, session); });
  server_->gate().AwaitWaiting();
  std::this_thread::sleep_for(std::chrono::milliseconds(900));
  EXPECT_EQ(server_->MetricLine("headwater_sessions"), "headwater_sessions 1");
  server_->gate().Open();
  call.join();
  EXPECT_EQ(ReasonOf(reply.status), "OK") << reply.status.error_message();
  EXPECT_EQ(reply.summary.state(), v1::CONTRIBUTION_STATE_STAGED);
  EXPECT_TRUE(Await([&] { return server_->Find(head, 0).state() == v1::CONTRIBUTION_STATE_DISCARDED; }));
}

TEST_P(Sessions, ClosedWhileACallRunsTakeItsContributionWhenItEnds) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  const std::string session = server_->OpenSession(20000);
  const std::string before = server_->Gradient(head);
  server_->gate().Close();
  std::thread call([&] { Stage(head, 0, session); });
  server_->gate().AwaitWaiting();
  std::thread close([&] { EXPECT_EQ(ReasonOf(Close(session)), "OK"); });
  EXPECT_TRUE(Await([&] { return ReasonOf(KeepAlive(session)) == "SESSION_NOT_FOUND"; }));
  server_->gate().Open();
  call.join();
  close.join();
  EXPECT_TRUE(Await([&] { return server_->Find(head, 0).state() != v1::CONTRIBUTION_STATE_STAGED; }));
  EXPECT_NE(ReasonOf(server_->Commit(CommitOf(head, 0, 0))), "OK");
  EXPECT_EQ(server_->Gradient(head), before);
}

TEST_P(Sessions, AreBoundedInNumberAndLease) {
  ServerSetup setup = MakeSetup();
  setup.options.limits.max_sessions = 2;
  setup.options.limits.max_session_lease = absl::Seconds(20);
  Restart(setup);
  const std::string first = server_->OpenSession(60000);
  v1::KeepAliveResponse alive;
  Require(KeepAlive(first, &alive), "KeepAlive");
  EXPECT_EQ(alive.lease().seconds(), 20);
  server_->OpenSession(20000);  // at the limit
  grpc::ClientContext context;
  v1::OpenSessionResponse refused;
  const WireError error = DecodeError(server_->sessions().OpenSession(&context, {}, &refused));
  EXPECT_EQ(error.reason, "QUOTA_EXCEEDED");
  EXPECT_EQ(error.code, grpc::StatusCode::RESOURCE_EXHAUSTED);
  Require(Close(first), "CloseSession");
  grpc::ClientContext again;
  EXPECT_EQ(ReasonOf(server_->sessions().OpenSession(&again, {}, &refused)), "OK");
  EXPECT_EQ(refused.lease().seconds(), 20);  // the default is 30 s, or the limit if that is less
}

}  // namespace
}  // namespace headwater::testing
