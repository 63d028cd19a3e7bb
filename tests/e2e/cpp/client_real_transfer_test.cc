// Rows of the C++ client against the real server: a server that stands still, one that is started again, paths that are not there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "headwater/client/client.h"
#include "tests/e2e/cpp/server_process.h"
#include "tests/e2e/cpp/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace headwater::client;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr int64_t kHiddenSize = 512;
constexpr int64_t kVocabSize = 32;

HeadSpec FrozenSpec() {
  HeadSpec spec;
  spec.vocab_size = kVocabSize;
  spec.hidden_size = kHiddenSize;
  return spec;
}

ClientOptions OverGrpc() {
  ClientOptions options;
  options.transport = Transport::kGrpc;
  return options;
}

Head MakeHead(Client& client) {
  Head head = Value(client.AttachHead("h", FrozenSpec()));
  const std::vector<float> weight = RandomFloats(1, kVocabSize * kHiddenSize, 0.1F);
  Value(head.UploadWeights(HeadTensor::kWeight, TensorView::Float32(weight)));
  return head;
}

// A frozen head's gradient.
Future<LossResult> Submit(Head& head, const std::vector<float>& rows, absl::Span<unsigned char> gradient,
                          const CallOptions& call = {}) {
  const std::vector<int32_t> targets(rows.size() / kHiddenSize, 3);
  MicroBatchOptions options;
  options.grad_hidden = gradient;
  return head.CrossEntropy(RowsView::Float32(rows, kHiddenSize), targets, {}, options, call);
}

TEST(ClientRealTransfer, SizesFromNothingToManyStreamsGiveTheSameAsOneStream) {
  const ServerProcess server;
  Client client = server.Connect(OverGrpc());
  ClientOptions one_stream = OverGrpc();
  one_stream.stripes = 1;
  one_stream.chunk_bytes = 3000;
  Client other = server.Connect(one_stream);
  Head head = MakeHead(client);
  Head same = Value(other.OpenHead("h"));
  for (const int64_t row_count : {0, 1, 1023, 1025, 5000}) {
    const std::vector<float> rows = RandomFloats(7, row_count * kHiddenSize, 1.0F);
    std::vector<unsigned char> gradient(rows.size() * 4, 1);
    std::vector<unsigned char> expected(rows.size() * 4, 2);
    const LossResult result = Value(Submit(head, rows, absl::MakeSpan(gradient)).Get());
    const LossResult reference = Value(Submit(same, rows, absl::MakeSpan(expected)).Get());
    EXPECT_EQ(result.loss_sum, reference.loss_sum) << row_count;
    EXPECT_TRUE(gradient == expected) << row_count;
    EXPECT_EQ(result.transport, "grpc");
  }
}

TEST(ClientRealTransfer, ServerThatStandsStillKeepsNoMemoryOfTheCaller) {
  ServerProcess server;
  ClientOptions options = OverGrpc();
  options.retry.max_attempts = 1;
  Client client = server.Connect(options);
  Head head = MakeHead(client);
  const std::vector<float> small(kHiddenSize, 0.5F);
  std::vector<unsigned char> small_gradient(small.size() * 4);
  Value(Submit(head, small, absl::MakeSpan(small_gradient)).Get());

  server.process().Signal(SIGSTOP);
  constexpr size_t kBytes = 64 << 20;
  void* const memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  RowsView view;
  view.data = memory;
  view.hidden_size = kHiddenSize;
  view.row_count = static_cast<int64_t>(kBytes) / view.row_bytes();
  const std::vector<int32_t> targets(static_cast<size_t>(view.row_count), 3);
  MicroBatchOptions micro_batch;
  micro_batch.return_grad_hidden = false;
  Future<LossResult> cancelled = head.CrossEntropy(view, targets, {}, micro_batch);
  EXPECT_FALSE(cancelled.WaitFor(milliseconds(300)));
  const auto start = steady_clock::now();
  cancelled.Cancel();
  EXPECT_EQ(ErrorReason(cancelled.Get().status()), "CANCELLED");
  EXPECT_LT(steady_clock::now() - start, seconds(10)) << "the server was waited for";
  Future<LossResult> late = head.CrossEntropy(view, targets, {}, micro_batch, {.timeout = milliseconds(300)});
  EXPECT_EQ(ErrorReason(late.Get().status()), "DEADLINE_EXCEEDED");
  EXPECT_LT(steady_clock::now() - start, seconds(20)) << "the server was waited for";
  // Whoever reads it now is killed, or loses the connection.
  munmap(memory, kBytes);
  server.process().Signal(SIGCONT);
  const auto deadline = steady_clock::now() + seconds(30);
  absl::Status status;
  do {
    status = Submit(head, small, absl::MakeSpan(small_gradient)).Get().status();
  } while (!status.ok() && steady_clock::now() < deadline);
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ClientRealTransfer, ConnectionsAreMadeAnewAfterARestart) {
  ServerProcess server;
  ClientOptions options = OverGrpc();
  options.retry = {.max_attempts = 100, .initial_backoff = milliseconds(20), .max_backoff = milliseconds(100)};
  Client client = server.Connect(options);
  const std::vector<float> rows = RandomFloats(7, 5000 * kHiddenSize, 1.0F);  // 10 MiB
  std::vector<unsigned char> gradient(rows.size() * 4);
  std::vector<unsigned char> again(rows.size() * 4);
  Head head = MakeHead(client);
  const LossResult before = Value(Submit(head, rows, absl::MakeSpan(gradient)).Get());
  for (const int signal : {SIGKILL, SIGTERM}) {
    server.process().Signal(signal);
    server.process().Wait();
    // While it is away the call waits, by its retries.
    Future<LossResult> meanwhile = Submit(head, rows, absl::MakeSpan(again));
    EXPECT_FALSE(meanwhile.WaitFor(milliseconds(50)));
    server.Start();
    EXPECT_EQ(ErrorReason(meanwhile.Get().status()), "HEAD_NOT_FOUND");
    head = MakeHead(client);
    const LossResult after = Value(Submit(head, rows, absl::MakeSpan(again)).Get());
    EXPECT_EQ(after.loss_sum, before.loss_sum);
    EXPECT_TRUE(gradient == again);
  }
}

TEST(ClientRealTransfer, PathThatDoesNotExistHereIsSaidSo) {
  const ServerProcess server;
  ClientOptions options;
  options.transport = Transport::kCudaIpc;
  Client client = server.Connect(options);
  Head head = MakeHead(client);
  const std::vector<float> rows(4 * kHiddenSize, 0.5F);
  std::vector<unsigned char> gradient(rows.size() * 4);
  const absl::Status status = Submit(head, rows, absl::MakeSpan(gradient)).Get().status();
  EXPECT_EQ(ErrorReason(status), "TRANSPORT_UNAVAILABLE") << status;
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
}

TEST(ClientRealTransfer, AllocatedRowsWorkOnEveryPath) {
  const ServerProcess server;
  for (const Transport transport : {Transport::kAuto, Transport::kGrpc}) {
    ClientOptions options;
    options.transport = transport;
    options.on_notice = [](const std::string&) {};
    Client client = server.Connect(options);
    Head head = MakeHead(client);
    RowsBuffer rows = Value(client.AllocateRows(64, kHiddenSize, DataType::kFloat32));
    RowsBuffer gradient = Value(client.AllocateRows(64, kHiddenSize, DataType::kFloat32));
    const std::vector<float> values = RandomFloats(7, 64 * kHiddenSize, 1.0F);
    std::memcpy(rows.data(), values.data(), values.size() * 4);
    const std::vector<int32_t> targets(64, 3);
    MicroBatchOptions micro_batch;
    micro_batch.grad_hidden = gradient.span();
    Value(head.CrossEntropy(rows.view(), targets, {}, micro_batch).Get());
    std::vector<unsigned char> expected(values.size() * 4);
    Value(Submit(head, values, absl::MakeSpan(expected)).Get());
    EXPECT_EQ(std::memcmp(gradient.data(), expected.data(), expected.size()), 0);
    EXPECT_EQ(ErrorReason(client.AllocateRows(-1, kHiddenSize, DataType::kFloat32).status()), "INVALID_FIELD");
    EXPECT_EQ(ErrorReason(client.AllocateRows(int64_t{1} << 60, kHiddenSize, DataType::kFloat32).status()), "INVALID_FIELD");
    EXPECT_EQ(Value(client.AllocateRows(0, kHiddenSize, DataType::kFloat32)).bytes(), 0);
  }
}

}  // namespace
}  // namespace headwater::e2e
