// Rows of the C++ client against the real server: a server that stands still, joined teachers, paths that are not there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "headwater/client/client.h"
#include "tests/e2e/cpp/support/await.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace headwater::client;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr int64_t kHiddenSize = 512;
constexpr int64_t kVocabSize = 32;

HeadSpec FrozenSpec() { return {.vocab_size = kVocabSize, .hidden_size = kHiddenSize}; }

ClientOptions OverGrpc() { return {.transport = Transport::kGrpc}; }

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
  MicroBatchOptions options = {.grad_hidden = gradient};
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
    EXPECT_EQ(client.stats().stripes, row_count == 5000 ? 3 : row_count == 1025 ? 2 : 1);  // over 2 MiB: 2
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
  RowsView view = {.data = memory, .hidden_size = kHiddenSize};
  view.row_count = static_cast<int64_t>(kBytes) / view.row_bytes();
  const std::vector<int32_t> targets(static_cast<size_t>(view.row_count), 3);
  MicroBatchOptions micro_batch = {.return_grad_hidden = false};
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
  absl::Status status;
  EXPECT_TRUE(Await([&] {
    status = Submit(head, small, absl::MakeSpan(small_gradient)).Get().status();
    return status.ok();
  })) << status;
}

TEST(ClientRealTransfer, PathThatDoesNotExistHereIsSaidSo) {
  const ServerProcess server;
  ClientOptions options = {.transport = Transport::kCudaIpc};
  Client client = server.Connect(options);
  Head head = MakeHead(client);
  const std::vector<float> rows(4 * kHiddenSize, 0.5F);
  std::vector<unsigned char> gradient(rows.size() * 4);
  const absl::Status status = Submit(head, rows, absl::MakeSpan(gradient)).Get().status();
  EXPECT_EQ(ErrorReason(status), "TRANSPORT_UNAVAILABLE") << status;
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
}

TEST(ClientRealTransfer, SharedMemoryCarriesEveryKindOfMicroBatchAndARestart) {
  const TemporaryDirectory directory;
  ServerProcess server({"--descriptor_socket=" + directory.path() + "/memory"});
  ClientOptions options = {.retry = {.max_attempts = 100, .initial_backoff = milliseconds(20), .max_backoff = milliseconds(100)}};
  Client client = server.Connect(options);
  Client other = server.Connect(OverGrpc());
  const std::vector<float> rows = RandomFloats(7, 700 * kHiddenSize, 1.0F);
  const std::vector<int32_t> targets = RandomTargets(8, 700, kVocabSize);
  const std::vector<float> weight = RandomFloats(1, kVocabSize * kHiddenSize, 0.1F);
  for (int round = 0; round < 2; ++round) {
    SCOPED_TRACE(round);
    HeadSpec spec = FrozenSpec();
    spec.trainable = true;
    Head head = Value(client.AttachHead("trained", spec));
    Value(head.UploadWeights(HeadTensor::kWeight, TensorView::Float32(weight)));
    Head same = Value(other.OpenHead("trained"));
    MicroBatchOptions micro_batch = {.step = 0};
    std::vector<LossResult> results;
    for (const CommitMode commit : {CommitMode::kEager, CommitMode::kExplicit}) {
      micro_batch.commit = commit;
      for (Head* const by : {&head, &same}) {
        micro_batch.micro_batch = static_cast<int64_t>(results.size());
        results.push_back(Value(by->CrossEntropy(RowsView::Float32(rows, kHiddenSize), targets, {}, micro_batch).Get()));
        EXPECT_EQ(results.back().transport, by == &head ? "shared_memory" : "grpc");
        if (commit == CommitMode::kExplicit) Value(results.back().contribution->Commit({.factor = 0.5}).Get());
      }
    }
    for (const LossResult& result : results) {
      EXPECT_EQ(result.loss_sum, results[0].loss_sum);
      EXPECT_EQ(result.grad_hidden.float32(), results[0].grad_hidden.float32());
    }
    EXPECT_EQ(Value(head.Seal(0, 4)).totals.valid_token_count, 4 * 700);
    if (round == 1) break;
    server.KillAndStart();
  }
  EXPECT_EQ(client.stats().shared_memory.micro_batches, 4);
  EXPECT_EQ(client.stats().why_not_better, "");
}

TEST(ClientRealTransfer, TeachersRowsMeetTheTrainersInEitherOrder) {
  const ServerProcess server;
  Client trainer = server.Connect(OverGrpc());
  Client teachers_process = server.Connect(OverGrpc());
  Head head = MakeHead(trainer);
  HeadSpec teacher_spec = FrozenSpec();
  teacher_spec.hidden_size = 64;
  Head teacher_head = Value(trainer.CreateHead("teacher", teacher_spec));
  const std::vector<float> weight = RandomFloats(4, kVocabSize * 64, 0.3F);
  Value(teacher_head.UploadWeights(HeadTensor::kWeight, TensorView::Float32(weight)));
  constexpr int64_t kRows = 300;
  const std::vector<float> rows = RandomFloats(7, kRows * kHiddenSize, 1.0F);
  const std::vector<float> teacher_rows = RandomFloats(9, kRows * 64, 1.0F);
  const LossResult expected =
      Value(head.Jsd(RowsView::Float32(rows, kHiddenSize), teacher_head, RowsView::Float32(teacher_rows, 64), {}, {}, {}).Get());

  // Of as many bytes, and of fewer.
  const absl::Span<const float> fewer(teacher_rows.data(), (kRows - 1) * 64);
  for (const auto& [wrong, shape] :
       {std::pair(RowsView::Float32(teacher_rows, 32), "[600, 32]"), std::pair(RowsView::Float32(fewer, 64), "[299, 64]")}) {
    const absl::Status refused = head.Jsd(RowsView::Float32(rows, kHiddenSize), teacher_head, wrong, {}, {}, {}).Get().status();
    EXPECT_EQ(ErrorReason(refused), "SHAPE_MISMATCH") << refused;
    EXPECT_THAT(std::string(refused.message()),
                testing::AllOf(testing::HasSubstr("expected [300, 64]"), testing::HasSubstr(shape)));
  }

  // Two streams bring the odd and the even rows.
  std::vector<std::vector<float>> halves(2);
  std::vector<std::vector<int32_t>> indices(2);
  for (int32_t row = 0; row < kRows; ++row) {
    std::vector<float>& half = halves[static_cast<size_t>(row % 2)];
    half.insert(half.end(), teacher_rows.begin() + row * 64, teacher_rows.begin() + (row + 1) * 64);
    indices[static_cast<size_t>(row % 2)].push_back(row);
  }
  for (const bool teacher_first : {true, false}) {
    const std::string key = teacher_first ? "first" : "last";
    const Teacher teacher = teachers_process.OpenTeacher(key, kRows);
    const auto stream = [&](size_t half) {
      return Value(teacher.Stream(RowsView::Float32(halves[half], 64), indices[half]).Get()).row_count;
    };
    EXPECT_EQ(stream(0), kRows / 2);
    if (teacher_first) {
      EXPECT_EQ(stream(1), kRows / 2);
    }
    JoinedTeacherOptions joined = {.join_key = key, .total_rows = kRows};
    Future<LossResult> future = head.Jsd(RowsView::Float32(rows, kHiddenSize), teacher_head, joined, {}, {}, {});
    if (!teacher_first) {
      EXPECT_FALSE(future.WaitFor(milliseconds(100)));
      EXPECT_EQ(stream(1), kRows / 2);
    }
    const LossResult result = Value(future.Get());
    EXPECT_EQ(result.loss_sum, expected.loss_sum);
    EXPECT_EQ(result.grad_hidden.float32(), expected.grad_hidden.float32());
  }

  const Teacher late = teachers_process.OpenTeacher("late", kRows);
  JoinedTeacherOptions joined = {.join_key = "late", .total_rows = kRows};
  const absl::Status missing =
      head.Jsd(RowsView::Float32(rows, kHiddenSize), teacher_head, joined, {}, {}, {}, {.timeout = milliseconds(500)})
          .Get()
          .status();
  EXPECT_THAT(ErrorReason(missing), testing::AnyOf("JOIN_INCOMPLETE", "DEADLINE_EXCEEDED")) << missing;
  const std::vector<int32_t> twice(kRows / 2, 3);
  EXPECT_EQ(late.Stream(RowsView::Float32(halves[0], 64), twice).Get().status().code(), absl::StatusCode::kInvalidArgument);
  Future<StreamedRows> cancelled = late.Stream(RowsView::Float32(halves[0], 64), indices[0]);
  cancelled.Cancel();
  cancelled.Get().IgnoreError();
  // A term cannot have both.
  LossTerm term = {.loss = JsdOptions(),
                   .teacher = teacher_head,
                   .teacher_hidden = RowsView::Float32(teacher_rows, 64),
                   .joined_teacher = joined};
  EXPECT_EQ(ErrorReason(head.Multi(RowsView::Float32(rows, kHiddenSize), {&term, 1}, {}).Get().status()), "INVALID_COMBINATION");
}

TEST(ClientRealTransfer, AllocatedRowsWorkOnEveryPath) {
  const TemporaryDirectory directory;
  const ServerProcess server({"--descriptor_socket=" + directory.path() + "/memory"});
  for (const Transport transport : {Transport::kAuto, Transport::kGrpc}) {
    ClientOptions options = {.transport = transport};
    options.on_notice = [](const std::string&) {};
    Client client = server.Connect(options);
    Head head = MakeHead(client);
    RowsBuffer rows = Value(client.AllocateRows(64, kHiddenSize, DataType::kFloat32));
    RowsBuffer gradient = Value(client.AllocateRows(64, kHiddenSize, DataType::kFloat32));
    const std::vector<float> values = RandomFloats(7, 64 * kHiddenSize, 1.0F);
    std::memcpy(rows.data(), values.data(), values.size() * 4);
    const std::vector<int32_t> targets(64, 3);
    MicroBatchOptions micro_batch = {.grad_hidden = gradient.span()};
    const LossResult result = Value(head.CrossEntropy(rows.view(), targets, {}, micro_batch).Get());
    EXPECT_EQ(result.transport, transport == Transport::kAuto ? "shared_memory" : "grpc");
    EXPECT_EQ(rows.shared(), transport == Transport::kAuto);
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
