// What bounds connections and streams, each at its limit and one beyond: how many there are, how large their metadata is, how long
// they take.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/support/http2_client.h"
#include "tests/integration/support/open_stream.h"
#include "tests/integration/support/raw_call.h"
#include "tests/integration/support/wire_server.h"

namespace headwater::testing {
namespace {

using ::testing::HasSubstr;

// A server that listens on a port of loopback beside its socket.
struct TcpServer : WireServer {
  explicit TcpServer(ServerSetup setup = {})
      : WireServer(WithOption(&service::ServerOptions::listen_addresses, {"127.0.0.1:0"}, std::move(setup))) {}
  bool AwaitConnections(int count) { return AwaitMetric("headwater_connections", count); }
};

grpc::Status Ask(const std::shared_ptr<grpc::Channel>& channel, std::chrono::seconds deadline, const std::string& padding = "") {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + deadline);
  if (!padding.empty()) context.AddMetadata("x-padding", padding);
  v1::ServerInfo info;
  return v1::SessionService::NewStub(channel)->GetServerInfo(&context, {}, &info);
}

constexpr std::chrono::seconds kLong(60);

TEST(ConnectionLimits, OneMoreThanMaxConnectionsIsClosedAtOnce) {
  TcpServer tcp(WithLimit(&service::Limits::max_connections, 3));
  std::deque<Http2Client> open;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(open.emplace_back(tcp.tcp_port()).connected());
  ASSERT_TRUE(tcp.AwaitConnections(3));
  Http2Client fourth(tcp.tcp_port());  // the kernel connects; the server's answer is the end
  EXPECT_TRUE(fourth.AwaitEnd());
  EXPECT_EQ(tcp.Metric("headwater_connections_refused_total"), "1");
  EXPECT_EQ(Ask(tcp.NewChannel(), kLong).error_code(), grpc::StatusCode::UNAVAILABLE);  // the socket's count as well
  open.pop_front();
  ASSERT_TRUE(tcp.AwaitConnections(2));
  EXPECT_TRUE(Ask(tcp.NewChannel(), kLong).ok());
  // The others were not touched.
  EXPECT_TRUE(open.front().Send(Http2Start()));
  EXPECT_EQ(open.front().Read()->type, kSettingsFrame);
}

TEST(ConnectionLimits, ThousandsThatComeAndGoLeaveNothing) {
  TcpServer tcp(WithLimit(&service::Limits::max_connections, 50));
  ASSERT_TRUE(Ask(tcp.NewChannel(), kLong).ok());
  ASSERT_TRUE(tcp.AwaitConnections(0));
  for (int i = 0; i < 2000; ++i) ASSERT_TRUE(Http2Client(tcp.tcp_port()).connected());
  // Some of them are gone before they are accepted, and take their turn then.
  EXPECT_TRUE(Await([&] { return Ask(tcp.NewChannel(), kLong).ok(); }));
  EXPECT_TRUE(tcp.AwaitConnections(0));
}

TEST(ConnectionLimits, AHandshakeThatIsNotFinishedEnds) {
  TcpServer tcp(WithLimit(&service::Limits::max_handshake_time, absl::Milliseconds(200)));
  Http2Client silent(tcp.tcp_port());
  Http2Client half(tcp.tcp_port());
  EXPECT_TRUE(half.Send("PRI * HTTP/2.0\r\n"));
  EXPECT_TRUE(silent.AwaitEnd());
  EXPECT_TRUE(half.AwaitEnd());
  EXPECT_TRUE(tcp.AwaitConnections(0));
  EXPECT_TRUE(Ask(tcp.NewChannel(), kLong).ok());
}

TEST(ConnectionLimits, AnIdleOneIsClosedAndMadeAnewWhenItIsNeeded) {
  TcpServer tcp(WithLimit(&service::Limits::max_connection_idle, absl::Milliseconds(200)));
  const std::shared_ptr<grpc::Channel> channel = tcp.NewChannel();
  ASSERT_TRUE(Ask(channel, kLong).ok());
  EXPECT_TRUE(tcp.AwaitConnections(0));
  // A call that comes at the moment of closing may be told UNAVAILABLE, as by any gRPC server.
  EXPECT_TRUE(Await([&] { return Ask(channel, kLong).ok(); }));
}

TEST(ConnectionLimits, TwoPingsTooEarlyAreBorneAndTheThirdEndsIt) {
  TcpServer tcp;
  Http2Client client(tcp.tcp_port());
  const std::string ping = Http2Frame{kPingFrame, 0, 0, "12345678"}.Encode();
  ASSERT_TRUE(client.Send(Http2Start() + ping + ping + ping));
  for (int answered = 0; answered < 3;) {  // the first is none too early
    const auto frame = client.Read();
    ASSERT_TRUE(frame.has_value());
    ASSERT_NE(frame->type, kGoAwayFrame);
    answered += frame->type == kPingFrame && frame->flags == 1 ? 1 : 0;
  }
  ASSERT_TRUE(client.Send(ping));
  std::string goodbye;
  while (const auto frame = client.Read()) {
    if (frame->type == kGoAwayFrame) goodbye = frame->payload;
  }
  EXPECT_THAT(goodbye, HasSubstr("too_many_pings"));
  EXPECT_TRUE(tcp.AwaitConnections(0));
}

// The preface, and this many calls that are reset as soon as they have begun.
std::string Resets(int count) {
  std::string bytes = Http2Start();
  for (int i = 0; i < count; ++i) {
    const uint32_t stream = 2 * static_cast<uint32_t>(i) + 1;
    bytes += Http2Frame{kHeadersFrame, kEndHeaders, stream, CallHeaders()}.Encode() +
             Http2Frame{kResetFrame, 0, stream, std::string("\0\0\0\x08", 4)}.Encode();
  }
  return bytes;
}

TEST(ConnectionLimits, OneThatCancelsTooManyCallsIsCutOffAtThe17th) {
  TcpServer tcp(WithOption(&service::ServerOptions::max_cancel_rate, 0.001));  // time gives nothing
  const auto ended_calls = [&](int count) {
    return tcp.AwaitMetric("headwater_request_seconds_count{method=\"ComputeLoss\"}", count);
  };
  Http2Client modest(tcp.tcp_port());
  ASSERT_TRUE(modest.Send(Resets(16)));
  EXPECT_TRUE(ended_calls(16));
  EXPECT_TRUE(tcp.AwaitConnections(1));
  Http2Client one_more(tcp.tcp_port());
  ASSERT_TRUE(one_more.Send(Resets(17)));
  EXPECT_TRUE(one_more.AwaitEnd());
  EXPECT_TRUE(ended_calls(33));
  EXPECT_EQ(tcp.Metric("headwater_connections_dropped_total"), "1");
  EXPECT_TRUE(tcp.AwaitConnections(1));
  // The host's next one waits, and is served.
  const absl::Time start = absl::Now();
  Http2Client next(tcp.tcp_port());
  ASSERT_TRUE(next.Send(Resets(0)));
  EXPECT_EQ(next.Read()->type, kSettingsFrame);
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(240));
}

TEST(ConnectionLimits, CancelsWithinTheRateAreBorne) {
  TcpServer tcp(WithOption(&service::ServerOptions::max_cancel_rate, 5));  // 50 at once
  Http2Client client(tcp.tcp_port());
  ASSERT_TRUE(client.Send(Resets(50)));
  EXPECT_TRUE(tcp.AwaitMetric("headwater_request_seconds_count{method=\"ComputeLoss\"}", 50));
  EXPECT_TRUE(tcp.AwaitConnections(1));
  EXPECT_EQ(tcp.Metric("headwater_connections_dropped_total"), "0");
}

// gRPC answers by itself, without a handler, what has no method. Such calls do not wait for the server.
TEST(ConnectionLimits, CallsOfAMethodThatThereIsNotDoNotWait) {
  ServerSetup setup;
  setup.options.max_cancel_rate = 0.001;  // time gives nothing
  setup.options.limits.max_connection_streams = 1;
  setup.options.max_reset_backlog = 3;
  TcpServer tcp(setup);
  Http2Client client(tcp.tcp_port());
  ASSERT_TRUE(client.Send(Resets(1)));  // whose call it is gets known
  ASSERT_TRUE(tcp.AwaitMetric("headwater_request_seconds_count{method=\"ComputeLoss\"}", 1));
  for (uint32_t stream = 3; stream < 3 + 2 * 4 * (1 + 3); stream += 2) {
    ASSERT_TRUE(client.Send(Http2Frame{kHeadersFrame, kEndHeaders | kEndStream, stream, CallHeaders("Unknown")}.Encode()));
    bool answered = false;
    while (!answered) {
      const auto frame = client.Read();
      ASSERT_TRUE(frame.has_value()) << stream;
      answered = frame->type == kHeadersFrame && frame->stream == stream;
    }
  }
  EXPECT_EQ(tcp.Metric("headwater_connections_dropped_total"), "0");
}

TEST(ConnectionLimits, AFloodOfResetsEndsAndOthersGoOn) {
  TcpServer tcp(WithLimit(&service::Limits::max_connection_streams, 8, WithOption(&service::ServerOptions::max_reset_backlog, 8)));
  const std::shared_ptr<grpc::Channel> channel = tcp.NewChannel();
  for (int i = 0; i < 3; ++i) {
    Http2Client client(tcp.tcp_port());
    client.Send(Resets(5000));  // may be cut off on the way
    EXPECT_TRUE(client.AwaitEnd());
    EXPECT_TRUE(Ask(channel, kLong).ok());
  }
  EXPECT_TRUE(tcp.AwaitMetric("headwater_connections_dropped_total", 3));
  EXPECT_TRUE(tcp.AwaitConnections(1));  // the channel's
}

TEST(StreamLimits, OnOneConnection) {
  HeadServer server(WithLimit(&service::Limits::max_connection_streams, 2));
  const std::shared_ptr<grpc::Channel> channel = server.NewChannel();
  const auto loss = v1::LossService::NewStub(channel);
  OpenStream first(*loss, CrossEntropyHeader(server.head, 0, 0, {1, 2, 3}), Rows(1), 1);
  OpenStream second(*loss, CrossEntropyHeader(server.head, 0, 1, {1, 2, 3}), Rows(1), 1);
  // Each takes 60 bytes in and 60 out.
  ASSERT_TRUE(server.AwaitMetric("headwater_in_flight_bytes", 240));
  EXPECT_EQ(Ask(channel, std::chrono::seconds(1)).error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);  // it never got there
  EXPECT_TRUE(Ask(server.NewChannel(), kLong).ok());
  first.Cancel();
  EXPECT_TRUE(Ask(channel, kLong).ok());
  second.Cancel();
}

TEST(StreamLimits, OfMetadata) {
  WireServer server(WithLimit(&service::Limits::max_metadata_bytes, 4096));
  // The largest padding that is let through; what goes with it is a few hundred bytes. On connections of their own: gRPC may lose
  // track of the compression of one whose metadata it has refused.
  size_t good = 0;
  size_t bad = 8192;
  while (bad - good > 1) {
    const size_t middle = (good + bad) / 2;
    const grpc::Status status = Ask(server.NewChannel(), kLong, std::string(middle, 'x'));
    if (status.ok()) {
      good = middle;
    } else {
      EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << middle << ": " << status.error_message();
      bad = middle;
    }
  }
  EXPECT_LT(good, 4096U - 32U);
  EXPECT_GT(good, 4096U - 1024U);
}

TEST(StreamLimits, TheLeastMetadataStillServes) {
  WireServer server(WithLimit(&service::Limits::max_metadata_bytes, service::kLeastMetadataBytes));
  const grpc::Status status = Ask(server.NewChannel(), kLong, std::string(256, 'x'));
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST(StreamLimits, OfTheirTime) {
  HeadServer server(WithLimit(&service::Limits::max_stream_time, absl::Milliseconds(400)));
  const std::string before = server.Snapshot(server.head);
  OpenStream slow(server.loss(), CrossEntropyHeader(server.head, 0, 0, {1, 2, 3}), Rows(1), 1);
  const grpc::Status ended = slow.End();
  EXPECT_EQ(ended.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_THAT(ended.error_message(), HasSubstr("max_stream_time"));
  EXPECT_TRUE(server.AwaitNothingInFlight());
  EXPECT_EQ(server.Snapshot(server.head), before);
}

// Whatever the stream, and though it never says what it wants.
void ExpectEnds(const ServerSetup& setup, grpc::StatusCode code, const std::string& limit) {
  WireServer server(setup);
  const auto expect = [&](auto method, auto& stub) {
    grpc::ClientContext context;
    const grpc::Status ended = EndOf(*(stub.*method)(&context));
    EXPECT_EQ(ended.error_code(), code);
    EXPECT_THAT(ended.error_message(), HasSubstr(limit));
    return ReasonOf(ended);
  };
  const char* const reason = code == grpc::StatusCode::CANCELLED ? "CANCELLED" : "DEADLINE_EXCEEDED";
  for (int repeat = 0; repeat < 3; ++repeat) {
    EXPECT_EQ(expect(&Loss::ComputeLoss, server.loss()), reason);
    EXPECT_EQ(expect(&Loss::TransferRows, server.loss()), reason);
    expect(&Heads::UploadWeights, server.heads());
  }
}

TEST(StreamLimits, OfTheirTimesAreReportedToTheClient) {
  ExpectEnds(WithOption(&service::ServerOptions::stream_idle_timeout, absl::Milliseconds(100)), grpc::StatusCode::CANCELLED,
             "stream_idle_timeout");
  ExpectEnds(WithLimit(&service::Limits::max_stream_time, absl::Milliseconds(100)), grpc::StatusCode::DEADLINE_EXCEEDED,
             "max_stream_time");
}

// A watch of the health that has begun: its first answer has come.
struct Watch {
  explicit Watch(const std::shared_ptr<grpc::Channel>& channel) : call(channel, "/grpc.health.v1.Health/Watch") {
    call.Write("");
    call.WritesDone();
    begun = call.Read().has_value();
  }
  grpc::Status End() {
    if (begun) call.context().TryCancel();
    return call.Finish();
  }
  RawCall call;
  bool begun = false;
};

TEST(StreamLimits, OfHealthWatches) {
  WireServer server(WithLimit(&service::Limits::max_health_watches, 2));
  const std::shared_ptr<grpc::Channel> channel = server.NewChannel();
  Watch first(channel);
  Watch second(channel);
  EXPECT_TRUE(first.begun);
  EXPECT_TRUE(second.begun);
  Watch third(channel);
  EXPECT_FALSE(third.begun);
  const grpc::Status refused = third.End();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("max_health_watches"));
  EXPECT_EQ(headwater::testing::Health(channel, ""), 1);  // a question is no watch
  first.End();
  EXPECT_TRUE(Await([&] {
    Watch again(channel);
    const bool begun = again.begun;
    again.End();
    return begun;
  }));
  second.End();
}

TEST(StreamLimits, TheClientThatTakesNothingIsCutOff) {
  WireServer server(WithOption(&service::ServerOptions::stream_idle_timeout, absl::Milliseconds(300)));
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

TEST(Overload, TheQueueIsBounded) {
  // One micro-batch at a time: the next one waits in the queue.
  HeadServer server(WithLimit(&service::Limits::max_queue_depth, 2, WithOption(&service::ServerOptions::queue_widths, {1, 1})));
  server.gate().Close();
  std::vector<std::thread> calls;
  const auto submit = [&](int64_t micro_batch) {
    calls.emplace_back([&server, micro_batch] {
      server.MustCompute(CrossEntropyHeader(server.head, 0, micro_batch, {1, 2, 3}), Rows(3));
    });
  };
  submit(0);
  server.gate().AwaitWaiting();
  submit(1);
  submit(2);  // at the limit
  EXPECT_TRUE(server.AwaitMetric("headwater_queue_depth", 2));
  const LossReply refused = server.Compute(CrossEntropyHeader(server.head, 0, 3, {1, 2, 3}), Rows(3));
  EXPECT_TRUE(ExpectError(refused.status, "QUEUE_FULL").retry_ms.has_value());
  server.gate().Open();
  for (std::thread& call : calls) call.join();
  EXPECT_EQ(server.Steps(server.head).open().micro_batches_size(), 3);
}

// Uploads that stand still hold every thread. Health is truthful whatever the load; another client's call makes them give way, and
// gets in.
TEST(Overload, UploadsThatStandStillGiveWay) {
  HeadServer server(WithOption(&service::ServerOptions::max_threads, 8));
  const std::string before = server.Snapshot(server.head);
  std::deque<OpenStream> held;
  for (int64_t id = 0; id < 8; ++id)
    held.emplace_back(server.loss(), CrossEntropyHeader(server.head, 0, id, {1, 2, 3}), Rows(1), 1);
  ASSERT_TRUE(server.AwaitMetric("headwater_in_flight_bytes", 960));
  const auto another = [&] { return server.Compute(CrossEntropyHeader(server.head, 0, 9, {1}), Rows(1)).status; };
  EXPECT_TRUE(ExpectError(another(), "QUEUE_FULL", {{"limit", "max_threads"}}).retry_ms.has_value());
  EXPECT_EQ(headwater::testing::Health(server.NewChannel(), ""), 1);
  EXPECT_EQ(server.Snapshot(server.head), before);
  EXPECT_TRUE(Await([&] {
    const grpc::Status status = another();
    EXPECT_TRUE(status.ok() || ReasonOf(status) == "QUEUE_FULL") << ReasonOf(status);
    return status.ok();
  }));
  for (OpenStream& stream : held) stream.Cancel();
  EXPECT_EQ(server.Steps(server.head).open().micro_batches_size(), 1);
}

// gRPC hands over a call that is no stream when its request is there.
TEST(Overload, CallsWhoseRequestDoesNotComeHoldNoThread) {
  constexpr int kThreads = 8;
  TcpServer tcp(WithOption(&service::ServerOptions::max_threads, kThreads));
  Http2Client client(tcp.tcp_port());
  std::string calls = Http2Start();
  for (int i = 0; i < 8 * kThreads; ++i) {
    const uint32_t stream = 2 * static_cast<uint32_t>(i) + 1;
    calls += Http2Frame{kHeadersFrame, kEndHeaders, stream, CallHeaders("CommitMicroBatch")}.Encode();
  }
  ASSERT_TRUE(client.Send(calls + Http2Frame{kPingFrame, 0, 0, "12345678"}.Encode()));
  for (bool taken = false; !taken;) {
    const auto frame = client.Read();
    ASSERT_TRUE(frame.has_value());
    taken = frame->type == kPingFrame;
  }
  EXPECT_TRUE(Ask(tcp.NewChannel(), kLong).ok());
}

// The same for the bytes in flight.
TEST(Overload, BytesOfUploadsThatStandStillAreGivenBack) {
  HeadServer server(WithLimit(&service::Limits::max_micro_batch_bytes, 60, WithLimit(&service::Limits::max_in_flight_bytes, 120)));
  OpenStream holder(server.loss(), CrossEntropyHeader(server.head, 0, 0, {1, 2, 3}), Rows(1), 1);
  ASSERT_TRUE(server.AwaitMetric("headwater_in_flight_bytes", 120));
  EXPECT_TRUE(Await([&] { return server.Compute(CrossEntropyHeader(server.head, 0, 1, {1}), Rows(1)).status.ok(); }));
  const WireError error = ExpectError(holder.End(), "QUEUE_FULL");
  EXPECT_THAT(error.message, HasSubstr("its rows have stopped coming"));
  EXPECT_TRUE(error.retry_ms.has_value());
}

// All connections of a Unix socket have one address. Room that is kept for a client that was refused is kept from the others too.
TEST(Overload, ConnectionsOfAUnixSocketAreClientsOfTheirOwn) {
  HeadServer server(WithLimit(&service::Limits::max_in_flight_bytes, 160));
  OpenStream holder(server.loss(), CrossEntropyHeader(server.head, 0, 0, {1, 2, 3}), Rows(1), 1);
  ASSERT_TRUE(server.AwaitMetric("headwater_in_flight_bytes", 120));
  const auto other = v1::LossService::NewStub(server.NewChannel());
  // Within the time for which room is kept; again, if a busy machine has let that pass.
  EXPECT_TRUE(Await([&] {
    OpenStream refused(*other, CrossEntropyHeader(server.head, 0, 1, {1, 2, 3}));
    EXPECT_EQ(ReasonOf(refused.End()), "IN_FLIGHT_BYTES_EXCEEDED");
    const WireError error = DecodeError(server.Compute(CrossEntropyHeader(server.head, 0, 2, {1}), Rows(1)).status);
    return error.reason == "IN_FLIGHT_BYTES_EXCEEDED" && error.message.find("kept for others") != std::string::npos;
  }));
  holder.Cancel();
}

}  // namespace
}  // namespace headwater::testing
