// Calls that come before their step: they wait, bounded by their deadline, by the server's limits, and by its drain.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/transaction_fixture.h"

namespace headwater::testing {
namespace {

class Waiting : public TransactionTest {
 protected:
  LossReply Submit(const TestHead& head, int64_t step, int64_t micro_batch, const SendOptions& send = {}) {
    return server_->Compute(CrossEntropyHeader(head, step, micro_batch, {1, 2, 3}), Rows(5), "", send);
  }
  bool AwaitWaiting(int count) { return AwaitMetric("headwater_waiting_calls", count); }
  grpc::Status SealAndWait(const TestHead& head, const std::vector<int64_t>& ids, int deadline_ms, v1::SealStepResponse* response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(deadline_ms));
    v1::SealStepRequest request;
    *request.mutable_head() = server_->At(head, 0);
    for (const int64_t id : ids) request.mutable_expected()->mutable_ids()->add_ids(id);
    request.set_wait(true);
    return server_->heads().SealStep(&context, request, response);
  }
};

INSTANTIATE_TEST_SUITE_P(Shards, Waiting, ::testing::Values(1, 3));

TEST_P(Waiting, AMicroBatchOfTheNextStepWaitsForIt) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  Require(Submit(head, 0, 0).status, "ComputeLoss");
  LossReply reply;
  std::thread early([&] { reply = Submit(head, 1, 0); });
  EXPECT_TRUE(AwaitWaiting(1));
  EXPECT_EQ(server_->MetricLine("headwater_in_flight_bytes"), "headwater_in_flight_bytes 0");  // it holds no budget
  Require(server_->Apply(ApplyOf(head, 0, 1)), "ApplyOptimizerStep");
  early.join();
  ASSERT_EQ(ReasonOf(reply.status), "OK") << reply.status.error_message();
  EXPECT_EQ(reply.summary.step(), 1);
  EXPECT_EQ(reply.summary.terms(0).weight_version(), head.head.weight_version() + 1);
  EXPECT_TRUE(AwaitWaiting(0));
}

TEST_P(Waiting, EveryCallOnTheNextStepWaits) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  std::vector<std::function<grpc::Status()>> calls = {
      [&] { return server_->Discard(head, 1, 7); },
      [&] {
        v1::AddGradientHeader header;
        *header.mutable_head() = server_->At(head, 1);
        header.set_micro_batch(8);
        header.set_row_count(1);
        return server_->AddGradient(header, Random(5, 1, 1));
      },
      [&] { return server_->Commit(head, 1, 9, 1); },
      [&] {
        grpc::ClientContext context;
        v1::GetGradientNormRequest request;
        *request.mutable_head() = server_->At(head, 1);
        v1::GetGradientNormResponse response;
        return server_->heads().GetGradientNorm(&context, request, &response);
      },
      [&] {
        grpc::ClientContext context;
        v1::DownloadGradientRequest request;
        *request.mutable_head() = server_->At(head, 1);
        request.set_tensor(v1::HEAD_TENSOR_WEIGHT);
        std::string bytes;
        return ReadDownload(*server_->heads().DownloadGradient(&context, request), &bytes);
      },
      [&] {
        v1::Head answer;  // of a step that is open by then, not sealed
        return server_->Upload(head.head, v1::HEAD_TENSOR_WEIGHT, head.weight, &answer, 1);
      },
  };
  const std::vector<std::string> expected = {"OK", "OK", "MICRO_BATCH_NOT_FOUND", "OK", "OK", "STEP_NOT_SEALED"};
  std::vector<std::string> reasons(calls.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < calls.size(); ++i) threads.emplace_back([&, i] { reasons[i] = ReasonOf(calls[i]()); });
  EXPECT_TRUE(AwaitWaiting(static_cast<int>(calls.size())));
  Require(server_->Apply(ApplyOf(head, 0, 0)), "ApplyOptimizerStep");
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(reasons, expected);

  // And those that close a step; one of them does it for both.
  std::string seal;
  std::string apply;
  std::string discard;
  std::thread sealer([&] { seal = ReasonOf(server_->Seal(head, 2, {})); });
  std::thread applier([&] { apply = ReasonOf(server_->Apply(ApplyOf(head, 2, 0))); });
  EXPECT_TRUE(AwaitWaiting(2));
  v1::ApplyOptimizerStepRequest close = ApplyOf(head, 1, 0);
  close.mutable_expected()->mutable_ids()->add_ids(8);
  Require(server_->Apply(close), "ApplyOptimizerStep");
  sealer.join();
  applier.join();
  EXPECT_THAT(seal, ::testing::AnyOf("OK", "STEP_MISMATCH"));
  EXPECT_EQ(apply, "OK");
  std::thread discarder([&] {
    grpc::ClientContext context;
    v1::DiscardGradientRequest request;
    *request.mutable_head() = server_->At(head, 4);
    v1::DiscardGradientResponse response;
    discard = ReasonOf(server_->heads().DiscardGradient(&context, request, &response));
  });
  EXPECT_TRUE(AwaitWaiting(1));
  Require(server_->Apply(ApplyOf(head, 3, 0)), "ApplyOptimizerStep");
  discarder.join();
  EXPECT_EQ(discard, "OK");
}

TEST_P(Waiting, EndsWithTheCallsDeadlineOrCancellation) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  const std::string before = server_->Snapshot(head);
  EXPECT_EQ(Submit(head, 1, 0, {.deadline_ms = 150}).status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(AwaitWaiting(0));
  OpenStream call(server_->loss(), CrossEntropyHeader(head, 1, 0, {1, 2, 3}));
  EXPECT_TRUE(AwaitWaiting(1));
  call.context.TryCancel();
  EXPECT_EQ(call.End().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(AwaitWaiting(0));
  EXPECT_EQ(ReasonOf(Submit(head, 2, 0).status), "STEP_MISMATCH");  // not the next one: answered at once
  EXPECT_EQ(server_->Snapshot(head), before);
}

TEST_P(Waiting, IsBoundedInTimeAndNumber) {
  ServerSetup setup = MakeSetup();
  setup.options.limits.max_step_wait = absl::Milliseconds(300);
  setup.options.limits.max_waiting_calls = 2;
  setup.options.stream_idle_timeout = absl::Milliseconds(100);  // the client is not to blame for the wait
  Restart(setup);
  const TestHead head = server_->MakeHead("h", SmallSpec());
  const WireError late = DecodeError(Submit(head, 1, 0).status);
  EXPECT_EQ(late.reason, "STEP_MISMATCH");
  EXPECT_EQ(late.at("openStep"), "0");

  setup.options.limits.max_step_wait = absl::Minutes(1);
  setup.options.stream_idle_timeout = absl::Seconds(20);
  Restart(setup);
  const TestHead other = server_->MakeHead("h", SmallSpec());
  std::vector<std::thread> calls;
  for (int64_t id = 0; id < 2; ++id) {
    calls.emplace_back([&, id] { EXPECT_EQ(ReasonOf(Submit(other, 1, id).status), "OK"); });
  }
  EXPECT_TRUE(AwaitWaiting(2));  // at the limit
  const WireError full = DecodeError(Submit(other, 1, 2).status);
  EXPECT_EQ(full.code, grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(full.reason, "QUEUE_FULL");
  EXPECT_EQ(full.at("limit"), "max_waiting_calls");
  EXPECT_TRUE(full.retry_ms.has_value());
  Require(server_->Apply(ApplyOf(other, 0, 0)), "ApplyOptimizerStep");
  for (std::thread& call : calls) call.join();
}

TEST_P(Waiting, ASealMayWaitForItsMicroBatches) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  Require(Submit(head, 0, 0).status, "committed");
  Require(server_->Compute(ExplicitHeader(head, 0, 1), Rows(6)).status, "staged");
  const std::string before = server_->Snapshot(head);
  v1::SealStepResponse response;
  // The answer leaves before the deadline; on a machine that is busy it may come too late nevertheless.
  WireError missing;
  for (int i = 0; i < 10 && missing.reason != "MICRO_BATCH_MISSING"; ++i)
    missing = DecodeError(SealAndWait(head, {0, 1, 2}, 400, &response));
  EXPECT_EQ(missing.reason, "MICRO_BATCH_MISSING") << missing.message;
  EXPECT_EQ(missing.at("missing"), "2");
  EXPECT_TRUE(AwaitWaiting(0));
  EXPECT_EQ(server_->Snapshot(head), before);
  std::string reason;
  std::thread seal([&] { reason = ReasonOf(SealAndWait(head, {0, 1, 2}, 20000, &response)); });
  EXPECT_TRUE(AwaitWaiting(1));
  Require(Submit(head, 0, 2).status, "the missing one");
  Require(server_->Commit(head, 0, 1, 1), "the undecided one");
  seal.join();
  EXPECT_EQ(reason, "OK");
  EXPECT_EQ(response.totals().micro_batch_count(), 3);
  EXPECT_GT(response.gradient_norm_squared(), 0);
  EXPECT_EQ(server_->Steps(head).open().state(), v1::STEP_STATE_SEALED);
}

TEST_P(Waiting, ASealThatHasWaitedLongEnoughSaysWhatIsMissing) {
  ServerSetup setup = MakeSetup();
  setup.options.limits.max_step_wait = absl::Milliseconds(150);
  Restart(setup);
  const TestHead head = server_->MakeHead("h", SmallSpec());
  v1::SealStepResponse response;
  EXPECT_EQ(ReasonOf(SealAndWait(head, {0}, 20000, &response)), "MICRO_BATCH_MISSING");
  EXPECT_EQ(server_->Steps(head).open().state(), v1::STEP_STATE_OPEN);
}

TEST_P(Waiting, ASealOfAStepThatIsSealedOtherwiseIsAnsweredAtOnce) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  Require(Submit(head, 0, 0).status, "ComputeLoss");
  Require(server_->Seal(head, 0, {0}), "SealStep");
  v1::SealStepResponse response;
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(ReasonOf(SealAndWait(head, {0, 1}, 60000, &response)), "MICRO_BATCH_MISSING");
  EXPECT_LE(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
  EXPECT_EQ(ReasonOf(SealAndWait(head, {0}, 60000, &response)), "OK");
  EXPECT_TRUE(response.replayed());
}

TEST_P(Waiting, EndsAtOnceWhenTheServerDrains) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  Require(server_->Compute(ExplicitHeader(head, 0, 1), Rows(6)).status, "staged");
  LossReply early;
  std::string seal;
  v1::SealStepResponse response;
  std::thread first([&] { early = Submit(head, 1, 0); });
  std::thread second([&] { seal = ReasonOf(SealAndWait(head, {1}, 20000, &response)); });
  EXPECT_TRUE(AwaitWaiting(2));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(server_->server().Drain(absl::Seconds(20)));
  EXPECT_LE(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  first.join();
  second.join();
  const WireError error = DecodeError(early.status);
  EXPECT_EQ(error.reason, "DRAINING");
  EXPECT_EQ(error.code, grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(seal, "DRAINING");
}

}  // namespace
}  // namespace headwater::testing
