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

std::string Rows(int count) { return Bytes(Random(static_cast<size_t>(count) * 5, 5, 1)); }

// A server that listens on a port of loopback beside its socket.
struct TcpServer {
  explicit TcpServer(ServerSetup setup = {}) : server(Listening(std::move(setup))) {
    const std::string& address = server.server().addresses().front();
    port = std::stoi(address.substr(address.rfind(':') + 1));
  }
  static ServerSetup Listening(ServerSetup setup) {
    setup.options.listen_addresses = {"127.0.0.1:0"};
    return setup;
  }
  bool AwaitConnections(int count) { return server.AwaitMetric("headwater_connections", count); }
  WireServer server;
  int port = 0;
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
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(open.emplace_back(tcp.port).connected());
  ASSERT_TRUE(tcp.AwaitConnections(3));
  Http2Client fourth(tcp.port);  // the kernel connects; the server's answer is the end
  EXPECT_TRUE(fourth.AwaitEnd());
  EXPECT_EQ(tcp.server.MetricLine("headwater_connections_refused_total"), "headwater_connections_refused_total 1");
  EXPECT_EQ(Ask(tcp.server.NewChannel(), kLong).error_code(), grpc::StatusCode::UNAVAILABLE);  // the socket's count as well
  open.pop_front();
  ASSERT_TRUE(tcp.AwaitConnections(2));
  EXPECT_TRUE(Ask(tcp.server.NewChannel(), kLong).ok());
  // The others were not touched.
  EXPECT_TRUE(open.front().Send(kHttp2Preface + Http2Client::Encode({kSettingsFrame, 0, 0, ""})));
  EXPECT_EQ(open.front().Read()->type, kSettingsFrame);
}

TEST(ConnectionLimits, ThousandsThatComeAndGoLeaveNothing) {
  TcpServer tcp(WithLimit(&service::Limits::max_connections, 50));
  ASSERT_TRUE(Ask(tcp.server.NewChannel(), kLong).ok());
  ASSERT_TRUE(tcp.AwaitConnections(0));
  for (int i = 0; i < 2000; ++i) ASSERT_TRUE(Http2Client(tcp.port).connected());
  // Some of them are gone before they are accepted, and take their turn then.
  EXPECT_TRUE(Await([&] { return Ask(tcp.server.NewChannel(), kLong).ok(); }));
  EXPECT_TRUE(tcp.AwaitConnections(0));
}

TEST(ConnectionLimits, AHandshakeThatIsNotFinishedEnds) {
  TcpServer tcp(WithLimit(&service::Limits::max_handshake_time, absl::Milliseconds(200)));
  Http2Client silent(tcp.port);
  Http2Client half(tcp.port);
  EXPECT_TRUE(half.Send("PRI * HTTP/2.0\r\n"));
  EXPECT_TRUE(silent.AwaitEnd());
  EXPECT_TRUE(half.AwaitEnd());
  EXPECT_TRUE(tcp.AwaitConnections(0));
  EXPECT_TRUE(Ask(tcp.server.NewChannel(), kLong).ok());
}

TEST(ConnectionLimits, AnIdleOneIsClosedAndMadeAnewWhenItIsNeeded) {
  TcpServer tcp(WithLimit(&service::Limits::max_connection_idle, absl::Milliseconds(200)));
  const std::shared_ptr<grpc::Channel> channel = tcp.server.NewChannel();
  ASSERT_TRUE(Ask(channel, kLong).ok());
  EXPECT_TRUE(tcp.AwaitConnections(0));
  // A call that comes at the moment of closing may be told UNAVAILABLE, as by any gRPC server.
  EXPECT_TRUE(Await([&] { return Ask(channel, kLong).ok(); }));
}

TEST(ConnectionLimits, TwoPingsTooEarlyAreBorneAndTheThirdEndsIt) {
  TcpServer tcp;
  Http2Client client(tcp.port);
  const std::string ping = Http2Client::Encode({kPingFrame, 0, 0, "12345678"});
  ASSERT_TRUE(client.Send(kHttp2Preface + Http2Client::Encode({kSettingsFrame, 0, 0, ""}) + ping + ping + ping));
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
  std::string bytes = kHttp2Preface + Http2Client::Encode({kSettingsFrame, 0, 0, ""});
  for (int i = 0; i < count; ++i) {
    const uint32_t stream = 2 * static_cast<uint32_t>(i) + 1;
    bytes += Http2Client::Encode({kHeadersFrame, kEndHeaders, stream, CallHeaders()}) +
             Http2Client::Encode({kResetFrame, 0, stream, std::string("\0\0\0\x08", 4)});
  }
  return bytes;
}

TEST(ConnectionLimits, OneThatCancelsTooManyCallsIsCutOffAtThe17th) {
  ServerSetup setup;
  setup.options.max_cancel_rate = 0.001;  // time gives nothing
  TcpServer tcp(setup);
  const auto ended_calls = [&](int count) {
    return tcp.server.AwaitMetric("headwater_request_seconds_count{method=\"ComputeLoss\"}", count);
  };
  Http2Client modest(tcp.port);
  ASSERT_TRUE(modest.Send(Resets(16)));
  EXPECT_TRUE(ended_calls(16));
  EXPECT_TRUE(tcp.AwaitConnections(1));
  Http2Client one_more(tcp.port);
  ASSERT_TRUE(one_more.Send(Resets(17)));
  EXPECT_TRUE(one_more.AwaitEnd());
  EXPECT_TRUE(ended_calls(33));
  EXPECT_EQ(tcp.server.MetricLine("headwater_connections_dropped_total"), "headwater_connections_dropped_total 1");
  EXPECT_TRUE(tcp.AwaitConnections(1));
  // The host's next one waits, and is served.
  const absl::Time start = absl::Now();
  Http2Client next(tcp.port);
  ASSERT_TRUE(next.Send(Resets(0)));
  EXPECT_EQ(next.Read()->type, kSettingsFrame);
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(240));
}

TEST(ConnectionLimits, CancelsWithinTheRateAreBorne) {
  ServerSetup setup;
  setup.options.max_cancel_rate = 5;  // 50 at once
  TcpServer tcp(setup);
  Http2Client client(tcp.port);
  ASSERT_TRUE(client.Send(Resets(50)));
  EXPECT_TRUE(tcp.server.AwaitMetric("headwater_request_seconds_count{method=\"ComputeLoss\"}", 50));
  EXPECT_TRUE(tcp.AwaitConnections(1));
  EXPECT_EQ(tcp.server.MetricLine("headwater_connections_dropped_total"), "headwater_connections_dropped_total 0");
}

// gRPC answers by itself, without a handler, what has no method. Such calls do not wait for the server.
TEST(ConnectionLimits, CallsOfAMethodThatThereIsNotDoNotWait) {
  ServerSetup setup;
  setup.options.max_cancel_rate = 0.001;  // time gives nothing
  setup.options.limits.max_connection_streams = 1;
  setup.options.max_reset_backlog = 3;
  TcpServer tcp(setup);
  Http2Client client(tcp.port);
  ASSERT_TRUE(client.Send(Resets(1)));  // whose call it is gets known
  ASSERT_TRUE(tcp.server.AwaitMetric("headwater_request_seconds_count{method=\"ComputeLoss\"}", 1));
  for (uint32_t stream = 3; stream < 3 + 2 * 4 * (1 + 3); stream += 2) {
    ASSERT_TRUE(client.Send(Http2Client::Encode({kHeadersFrame, kEndHeaders | kEndStream, stream, CallHeaders("Unknown")})));
    bool answered = false;
    while (!answered) {
      const auto frame = client.Read();
      ASSERT_TRUE(frame.has_value()) << stream;
      answered = frame->type == kHeadersFrame && frame->stream == stream;
    }
  }
  EXPECT_EQ(tcp.server.MetricLine("headwater_connections_dropped_total"), "headwater_connections_dropped_total 0");
}

TEST(ConnectionLimits, AFloodOfResetsEndsAndOthersGoOn) {
  ServerSetup setup;
  setup.options.limits.max_connection_streams = 8;
  setup.options.max_reset_backlog = 8;
  TcpServer tcp(setup);
  const std::shared_ptr<grpc::Channel> channel = tcp.server.NewChannel();
  for (int i = 0; i < 3; ++i) {
    Http2Client client(tcp.port);
    client.Send(Resets(5000));  // may be cut off on the way
    EXPECT_TRUE(client.AwaitEnd());
    EXPECT_TRUE(Ask(channel, kLong).ok());
  }
  EXPECT_TRUE(tcp.server.AwaitMetric("headwater_connections_dropped_total", 3));
  EXPECT_TRUE(tcp.AwaitConnections(1));  // the channel's
}

TEST(StreamLimits, OnOneConnection) {
  WireServer server(WithLimit(&service::Limits::max_connection_streams, 2));
  const TestHead head = server.MakeHead("h", SmallSpec());
  const std::shared_ptr<grpc::Channel> channel = server.NewChannel();
  const auto loss = v1::LossService::NewStub(channel);
  OpenStream first(*loss, CrossEntropyHeader(head, 0, 0, {1, 2, 3}), Rows(1), 1);
  OpenStream second(*loss, CrossEntropyHeader(head, 0, 1, {1, 2, 3}), Rows(1), 1);
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
  WireServer server(WithLimit(&service::Limits::max_stream_time, absl::Milliseconds(400)));
  const TestHead head = server.MakeHead("h", SmallSpec());
  const std::string before = server.Snapshot(head);
  OpenStream slow(server.loss(), CrossEntropyHeader(head, 0, 0, {1, 2, 3}), Rows(1), 1);
  const grpc::Status ended = slow.End();
  EXPECT_EQ(ended.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_THAT(ended.error_message(), HasSubstr("max_stream_time"));
  EXPECT_TRUE(server.AwaitNothingInFlight());
  EXPECT_EQ(server.Snapshot(head), before);
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
  ServerSetup idle;
  idle.options.stream_idle_timeout = absl::Milliseconds(100);
  ExpectEnds(idle, grpc::StatusCode::CANCELLED, "stream_idle_timeout");
  ExpectEnds(WithLimit(&service::Limits::max_stream_time, absl::Milliseconds(100)), grpc::StatusCode::DEADLINE_EXCEEDED,
             "max_stream_time");
}

// A watch of the health that has begun: its first answer has come.
struct Watch {
  explicit Watch(const std::shared_ptr<grpc::Channel>& channel) : stub(channel) {
    call = stub.PrepareCall(&context, "/grpc.health.v1.Health/Watch", &queue);
    call->StartCall(nullptr);
    Next();
    const grpc::Slice nothing;
    call->WriteLast(grpc::ByteBuffer(&nothing, 1), grpc::WriteOptions(), nullptr);
    Next();
    call->Read(&answer, nullptr);
    begun = Next();
  }
  grpc::Status End() {
    if (begun) context.TryCancel();
    grpc::Status status;
    call->Finish(&status, nullptr);
    Next();
    return status;
  }
  bool Next() {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  }
  grpc::GenericStub stub;
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call;
  grpc::ByteBuffer answer;
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

TEST(Overload, TheQueueIsBounded) {
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

// Uploads that stand still hold every thread. Health is truthful whatever the load; another client's call makes them give way, and
// gets in.
TEST(Overload, UploadsThatStandStillGiveWay) {
  ServerSetup setup;
  setup.options.max_threads = 8;
  WireServer server(setup);
  const TestHead head = server.MakeHead("h", SmallSpec());
  const std::string before = server.Snapshot(head);
  std::deque<OpenStream> held;
  for (int64_t id = 0; id < 8; ++id) held.emplace_back(server.loss(), CrossEntropyHeader(head, 0, id, {1, 2, 3}), Rows(1), 1);
  ASSERT_TRUE(server.AwaitMetric("headwater_in_flight_bytes", 960));
  const auto another = [&] { return server.Compute(CrossEntropyHeader(head, 0, 9, {1}), Rows(1)).status; };
  const WireError error = DecodeError(another());
  EXPECT_EQ(error.reason, "QUEUE_FULL");
  EXPECT_EQ(error.at("limit"), "max_threads");
  EXPECT_TRUE(error.retry_ms.has_value());
  EXPECT_EQ(headwater::testing::Health(server.NewChannel(), ""), 1);
  EXPECT_EQ(server.Snapshot(head), before);
  EXPECT_TRUE(Await([&] {
    const grpc::Status status = another();
    EXPECT_TRUE(status.ok() || ReasonOf(status) == "QUEUE_FULL") << ReasonOf(status);
    return status.ok();
  }));
  for (OpenStream& stream : held) stream.Cancel();
  EXPECT_EQ(server.Steps(head).open().micro_batches_size(), 1);
}

// gRPC hands over a call that is no stream when its request is there.
TEST(Overload, CallsWhoseRequestDoesNotComeHoldNoThread) {
  ServerSetup setup;
  setup.options.max_threads = 8;
  TcpServer tcp(setup);
  Http2Client client(tcp.port);
  std::string calls = kHttp2Preface + Http2Client::Encode({kSettingsFrame, 0, 0, ""});
  for (int i = 0; i < 8 * setup.options.max_threads; ++i) {
    const uint32_t stream = 2 * static_cast<uint32_t>(i) + 1;
    calls += Http2Client::Encode({kHeadersFrame, kEndHeaders, stream, CallHeaders("CommitMicroBatch")});
  }
  ASSERT_TRUE(client.Send(calls + Http2Client::Encode({kPingFrame, 0, 0, "12345678"})));
  for (bool taken = false; !taken;) {
    const auto frame = client.Read();
    ASSERT_TRUE(frame.has_value());
    taken = frame->type == kPingFrame;
  }
  EXPECT_TRUE(Ask(tcp.server.NewChannel(), kLong).ok());
}

// The same for the bytes in flight.
TEST(Overload, BytesOfUploadsThatStandStillAreGivenBack) {
  ServerSetup setup;
  setup.options.limits.max_micro_batch_bytes = 60;
  setup.options.limits.max_in_flight_bytes = 120;
  WireServer server(setup);
  const TestHead head = server.MakeHead("h", SmallSpec());
  OpenStream holder(server.loss(), CrossEntropyHeader(head, 0, 0, {1, 2, 3}), Rows(1), 1);
  ASSERT_TRUE(server.AwaitMetric("headwater_in_flight_bytes", 120));
  EXPECT_TRUE(Await([&] { return server.Compute(CrossEntropyHeader(head, 0, 1, {1}), Rows(1)).status.ok(); }));
  const WireError error = DecodeError(holder.End());
  EXPECT_EQ(error.reason, "QUEUE_FULL");
  EXPECT_THAT(error.message, HasSubstr("its rows have stopped coming"));
  EXPECT_TRUE(error.retry_ms.has_value());
}

// All connections of a Unix socket have one address. Room that is kept for a client that was refused is kept from the others too.
TEST(Overload, ConnectionsOfAUnixSocketAreClientsOfTheirOwn) {
  WireServer server(WithLimit(&service::Limits::max_in_flight_bytes, 160));
  const TestHead head = server.MakeHead("h", SmallSpec());
  OpenStream holder(server.loss(), CrossEntropyHeader(head, 0, 0, {1, 2, 3}), Rows(1), 1);
  ASSERT_TRUE(server.AwaitMetric("headwater_in_flight_bytes", 120));
  const auto other = v1::LossService::NewStub(server.NewChannel());
  // Within the time for which room is kept; again, if a busy machine has let that pass.
  EXPECT_TRUE(Await([&] {
    OpenStream refused(*other, CrossEntropyHeader(head, 0, 1, {1, 2, 3}));
    EXPECT_EQ(ReasonOf(refused.End()), "IN_FLIGHT_BYTES_EXCEEDED");
    const WireError error = DecodeError(server.Compute(CrossEntropyHeader(head, 0, 2, {1}), Rows(1)).status);
    return error.reason == "IN_FLIGHT_BYTES_EXCEEDED" && error.message.find("kept for others") != std::string::npos;
  }));
  holder.Cancel();
}

}  // namespace
}  // namespace headwater::testing
