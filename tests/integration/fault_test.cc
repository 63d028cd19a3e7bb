// Clients that die, stall or come too many, and a server that drains: beside the rows of transaction_rows_forms.cc on clients that
// cancel.
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "tests/integration/support/open_stream.h"
#include "tests/integration/support/wire_server.h"

namespace headwater::testing {
namespace {

std::string Rows(int64_t row_count, uint32_t seed = 5) { return Bytes(Random(static_cast<size_t>(row_count * 5), seed, 1)); }

// The first one of the three rows that most tests here send.
std::string FirstRow() { return Rows(3).substr(0, 20); }

TEST(Faults, TheClientThatTakesNothingIsCutOff) {
  ServerSetup setup;
  setup.options.stream_idle_timeout = absl::Milliseconds(300);
  WireServer server(setup);
  const TestHead head = server.MakeHead("h", SmallSpec(13, 64));
  constexpr int64_t kRows = 1 << 15;  // 8 MiB of grad_hidden: far more than flow control lets through unread
  // Its own connection: what it leaves unread holds up everything else on the one that it shares.
  const auto stub = v1::LossService::NewStub(server.NewChannel());
  OpenStream call(*stub, CrossEntropyHeader(head, 0, 0, std::vector<int32_t>(kRows, 1)));
  constexpr int64_t kChunkRows = 1 << 13;
  for (int64_t row = 0; row < kRows; row += kChunkRows) {
    ASSERT_TRUE(call.Send(HiddenChunk(std::string(kChunkRows * 256, '\0'), row, kChunkRows)));
  }
  call.stream->WritesDone();
  ASSERT_TRUE(Await([&] { return server.Steps(head).open().micro_batches_size() == 1; }));
  EXPECT_TRUE(server.AwaitNothingInFlight());
  // It was committed before the answer could be sent: the client finds it in the step.
  EXPECT_EQ(server.Steps(head).open().micro_batches(0).state(), v1::CONTRIBUTION_STATE_COMMITTED);
  call.context.TryCancel();
}

TEST(Faults, CompressedMessagesAreRefused) {
  WireServer server;
  grpc::ClientContext context;
  context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  v1::GetHeadRequest request;
  request.set_name("tenants/default/heads/" + std::string(1 << 12, 'a'));
  v1::Head response;
  EXPECT_EQ(server.heads().GetHead(&context, request, &response).error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST(Faults, TheQueueIsBounded) {
  ServerSetup setup;
  setup.options.queue_widths = {1, 1};  // one micro-batch at a time: the next one waits in the queue
  setup.options.limits.max_queue_depth = 2;
  WireServer server(setup);
  const TestHead head = server.MakeHead("h", SmallSpec());
  server.gate().Close();
  std::vector<std::thread> calls;
  const auto submit = [&](int64_t micro_batch) {
    calls.emplace_back([&server, &head, micro_batch] {
      Require(server.Compute(CrossEntropyHeader(head, 0, micro_batch, {1, 2, 3}), Rows(3)).status, "accepted");
    });
  };
  submit(0);
  server.gate().AwaitWaiting();
  submit(1);
  submit(2);  // at the limit
  EXPECT_TRUE(server.AwaitMetric("headwater_queue_depth", 2));
  const WireError error = DecodeError(server.Compute(CrossEntropyHeader(head, 0, 3, {1, 2, 3}), Rows(3)).status);
  EXPECT_EQ(error.code, grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(error.reason, "QUEUE_FULL");
  EXPECT_TRUE(error.retry_ms.has_value());
  server.gate().Open();
  for (std::thread& call : calls) call.join();
  EXPECT_EQ(server.Steps(head).open().micro_batches_size(), 3);
}

TEST(Faults, BytesInFlightAreBounded) {
  // One micro-batch of 3 rows takes 60 bytes in and 60 out.
  ServerSetup setup;
  setup.options.limits.max_micro_batch_bytes = 60;
  setup.options.limits.max_in_flight_bytes = 120;
  WireServer server(setup);
  const TestHead head = server.MakeHead("h", SmallSpec());
  OpenStream holder(server.loss(), CrossEntropyHeader(head, 0, 0, {1, 2, 3}), FirstRow(), 1);  // at the limit
  ASSERT_TRUE(server.AwaitInFlight());
  const std::string before = server.Snapshot(head);
  const WireError error = DecodeError(server.Compute(CrossEntropyHeader(head, 0, 1, {1}), Rows(1)).status);
  EXPECT_EQ(error.reason, "IN_FLIGHT_BYTES_EXCEEDED");
  EXPECT_EQ(error.at("requestedBytes"), "40");
  EXPECT_EQ(error.at("availableBytes"), "0");
  EXPECT_TRUE(error.retry_ms.has_value());
  EXPECT_EQ(server.Snapshot(head), before);
  holder.Cancel();
  ASSERT_TRUE(server.AwaitNothingInFlight());
  EXPECT_EQ(ReasonOf(server.Compute(CrossEntropyHeader(head, 0, 1, {1, 2, 3}), Rows(3)).status), "OK");
  // What could never fit is not worth waiting for.
  const WireError never = DecodeError(server.Compute(CrossEntropyHeader(head, 0, 2, {1, 2, 3, 4}), Rows(4)).status);
  EXPECT_EQ(never.reason, "LIMIT_EXCEEDED");
  EXPECT_EQ(never.at("limit"), "max_micro_batch_bytes");
}

TEST(Faults, ACommitWhoseClientGoesAwayIsCarriedOutAllTheSame) {
  WireServer server;
  const TestHead head = server.MakeHead("h", SmallSpec());
  v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, 0, {1, 2, 3});
  header.set_commit_mode(v1::COMMIT_MODE_EXPLICIT);
  header.set_late_token_factors(true);
  Require(server.Compute(header, Rows(3)).status, "held");
  server.gate().Close();
  grpc::ClientContext context;
  v1::CommitMicroBatchRequest request;
  *request.add_heads() = server.At(head, 0);
  request.set_micro_batch(0);
  std::thread commit([&] {
    v1::CommitMicroBatchResponse response;
    EXPECT_EQ(server.loss().CommitMicroBatch(&context, request, &response).error_code(), grpc::StatusCode::CANCELLED);
  });
  server.gate().AwaitWaiting();
  context.TryCancel();
  commit.join();
  server.gate().Open();
  EXPECT_TRUE(Await([&] { return server.Find(head, 0).state() == v1::CONTRIBUTION_STATE_COMMITTED; }));
  bool replayed = false;
  EXPECT_EQ(ReasonOf(server.Commit(request, &replayed)), "OK");
  EXPECT_TRUE(replayed);
}

TEST(Faults, DrainThatRunsOutOfTimeCancels) {
  WireServer server;
  const TestHead head = server.MakeHead("h", SmallSpec());
  OpenStream stalled(server.loss(), CrossEntropyHeader(head, 0, 0, {1, 2, 3}), FirstRow(), 1);
  ASSERT_TRUE(server.AwaitInFlight());
  EXPECT_FALSE(server.server().Drain(absl::Milliseconds(50)));
  EXPECT_FALSE(stalled.End().ok());
}

}  // namespace
}  // namespace headwater::testing
