// What goes wrong while rows travel, on each path that this machine has: trainers that let go, die, or repeat themselves, a server
// that dies. After every fault the server serves on, and the accumulator holds exactly what was accepted: it is compared bit by bit
// with that of a witness, which only ever got the good micro-batches.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "client/core/rows/memory/device_memory.h"
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

constexpr int64_t kVocabSize = 61;
constexpr int64_t kHiddenSize = 64;
constexpr int64_t kFewRows = 5;
constexpr int64_t kManyRows = 1 << 16;  // several stripes, and much more than sockets and flow control hold
constexpr int64_t kManyBytes = kManyRows * kHiddenSize * 4;

MicroBatchOptions Submission(int64_t micro_batch) { return {.step = 0, .micro_batch = micro_batch}; }

// Waits until the contributions of the open step are in this state, but for the good one's.
bool AwaitAllButTheFirst(Head& head, ContributionState state) {
  return Await([&] {
    const std::vector<MicroBatchInfo> known = Value(head.GetStep()).open.micro_batches;
    return std::all_of(known.begin(), known.end(),
                       [&](const MicroBatchInfo& info) { return info.micro_batch == 0 || info.state == state; });
  });
}

class TransportFault : public testing::TestWithParam<Transport> {
 protected:
  TransportFault()
      : server_({"--stream_idle_timeout=3s"}, /*shares_memory=*/true),
        client_(server_.Connect({.connect_timeout = seconds(20), .transport = GetParam()})),
        witness_client_(server_.Connect({.connect_timeout = seconds(20), .transport = Transport::kGrpc})) {
    student_.emplace(MakeHead(client_, "student"));
    witness_.emplace(MakeHead(witness_client_, "witness"));
  }

  Head MakeHead(Client& client, const std::string& name) {
    return CreateHead(client, name, {.vocab_size = kVocabSize, .hidden_size = kHiddenSize, .trainable = true});
  }

  // Device memory is the third path's alone.
  void SetUp() override {
    if (GetParam() != Transport::kCudaIpc) return;
    if (Value(client_.GetServerInfo()).engine != "cuda") GTEST_SKIP() << "the server's engine has no device";
    const auto gpu = internal::DeviceContext::OfFirstGpu();
    if (!gpu.ok()) GTEST_SKIP() << gpu.status();
    gpu_ = *gpu;
    device_rows_ = Value(internal::DeviceBacking::Allocate(gpu_, 2 * kManyBytes));
  }

  // The first rows, on the host and where the path wants them.
  RowsView HostRows(int64_t row_count) const {
    return RowsView::Float32(absl::MakeConstSpan(rows_).first(static_cast<size_t>(row_count * kHiddenSize)), kHiddenSize);
  }
  RowsView Rows(int64_t row_count) {
    RowsView view = HostRows(row_count);
    if (device_rows_ == nullptr) return view;
    EXPECT_EQ(gpu_->CopyNow(nullptr, device_rows_->data(), view.data, row_count * view.row_bytes()), absl::OkStatus());
    view.data = device_rows_->data();
    view.memory = Memory::kCuda;
    return view;
  }
  absl::Span<const int32_t> Targets(int64_t row_count) const {
    return absl::MakeConstSpan(targets_).first(static_cast<size_t>(row_count));
  }

  // Submits to the student over the path. On the device every gradient goes to one place: only the accumulators are compared.
  Future<LossResult> Submit(int64_t row_count, MicroBatchOptions options, const CallOptions& call = {}) {
    const RowsView rows = Rows(row_count);
    if (device_rows_ != nullptr) {
      options.grad_hidden =
          absl::MakeSpan(device_rows_->data() + kManyBytes, static_cast<size_t>(rows.row_count * rows.row_bytes()));
      options.grad_hidden_memory = Memory::kCuda;
    }
    return student_->CrossEntropy(rows, Targets(row_count), {}, options, call);
  }

  // The same micro-batch for the witness.
  void Witness(int64_t micro_batch, int64_t row_count) {
    Value(witness_->CrossEntropy(HostRows(row_count), Targets(row_count), {}, Submission(micro_batch)).Get());
  }
  // A micro-batch that both heads get: it must be accepted, over the wanted path.
  LossResult Good(int64_t micro_batch, int64_t row_count = kFewRows) {
    LossResult result = Value(Submit(row_count, Submission(micro_batch)).Get());
    EXPECT_EQ(result.transport, TransportName(GetParam()));
    EXPECT_FALSE(result.replayed);
    Witness(micro_batch, row_count);
    return result;
  }

  void ExpectSameAccumulators() {
    const TensorBuffer actual = Value(student_->Gradient(0));
    const TensorBuffer expected = Value(witness_->Gradient(0));
    ASSERT_EQ(actual.bytes(), expected.bytes());
    EXPECT_EQ(std::memcmp(actual.data(), expected.data(), static_cast<size_t>(actual.bytes())), 0);
    EXPECT_EQ(Value(student_->GetStep()).open.totals.micro_batch_count, Value(witness_->GetStep()).open.totals.micro_batch_count);
  }

  std::shared_ptr<internal::DeviceContext> gpu_;
  // Rows, then their gradient; goes last, as the client and the server have it open.
  std::shared_ptr<const internal::DeviceBacking> device_rows_;
  ServerProcess server_;
  Client client_;
  Client witness_client_;
  const std::vector<float> rows_ = RandomFloats(2, kManyRows* kHiddenSize, 1.0F);
  const std::vector<int32_t> targets_ = RandomTargets(3, kManyRows, kVocabSize);
  std::optional<Head> student_, witness_;
};

TEST_P(TransportFault, ADroppedFutureAddsNothing) {
  Good(0);
  for (int64_t round = 0; round < 5; ++round) {
    // Explicit: what the server had computed already stays undecided, so that nothing of it is added.
    MicroBatchOptions options = Submission(100 + round);
    options.commit = CommitMode::kExplicit;
    Future<LossResult> future = Submit(kManyRows, options);
    std::this_thread::sleep_for(milliseconds(3 * round));
  }
  EXPECT_TRUE(AwaitAllButTheFirst(*student_, ContributionState::kStaged));
  Good(1);
  Good(2, kManyRows);
  ExpectSameAccumulators();
}

TEST_P(TransportFault, ACancelledEagerOneIsAddedOnceOrNotAtAll) {
  Good(0);
  for (int64_t round = 0; round < 5; ++round) {
    const int64_t id = 1 + round;
    Future<LossResult> future = Submit(kManyRows, Submission(id));
    std::this_thread::sleep_for(milliseconds(4 * round));
    future.Cancel();
    (void)future.Get();
    // Sent again it is in the step exactly once, whatever had become of the first.
    LossResult again;
    EXPECT_TRUE(Await([&] {
      MicroBatchOptions options = Submission(id);
      options.attempt = 1;
      absl::StatusOr<LossResult> result = Submit(kManyRows, options).Get();
      if (!result.ok()) return false;
      again = *std::move(result);
      return true;
    }));
    Witness(id, kManyRows);
  }
  ExpectSameAccumulators();
}

TEST_P(TransportFault, AKilledServerIsACleanErrorAndTheClientComesBack) {
  Good(0);
  Future<LossResult> future = Submit(kManyRows, Submission(1), {.timeout = seconds(20)});
  server_.process().Signal(SIGKILL);
  EXPECT_EQ(server_.process().Wait(), -SIGKILL);
  const auto start = steady_clock::now();
  const absl::Status status = future.Get().status();
  EXPECT_TRUE(status.code() == absl::StatusCode::kUnavailable || status.code() == absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_LE(steady_clock::now() - start, seconds(25));
  server_.Start();
  EXPECT_TRUE(Await([&] { return client_.CheckHealth().ok() && witness_client_.CheckHealth().ok(); }));
  // Another server, without heads: the rows find their path again, whose regions it does not know.
  student_.emplace(MakeHead(client_, "student"));
  witness_.emplace(MakeHead(witness_client_, "witness"));
  Good(0);
  Good(1, kManyRows);
  ExpectSameAccumulators();
}

INSTANTIATE_TEST_SUITE_P(Paths, TransportFault, testing::Values(Transport::kGrpc, Transport::kSharedMemory, Transport::kCudaIpc),
                         [](const auto& path) { return TransportName(path.param); });

// A trainer that is killed; transport_victim.cc: by its transport and the moment.
class KilledClient : public testing::TestWithParam<std::tuple<const char*, const char*>> {};

// Whether the server has memory of another process mapped.
bool HasMappedRegions(ServerProcess& server) {
  return ReadFile("/proc/" + std::to_string(server.process().pid()) + "/maps").find("/memfd:") != std::string::npos;
}

std::string VictimProgram() {
  const char* const program = std::getenv("HEADWATER_TEST_VICTIM");
  return program == nullptr ? TRANSPORT_VICTIM : program;
}

TEST_P(KilledClient, LeavesNothingBehind) {
  const auto [transport, moment] = GetParam();
  ServerProcess server({"--stream_idle_timeout=3s"}, /*shares_memory=*/true);
  Client client = server.Connect({.connect_timeout = seconds(20), .transport = Transport::kGrpc});
  Head head = CreateHead(client, "student", {.vocab_size = kVocabSize, .hidden_size = kHiddenSize, .trainable = true});
  Value(SubmitRandom(head, kFewRows, Submission(0)));
  const TensorBuffer before = Value(head.Gradient(0));

  TemporaryDirectory directory;
  {
    ChildProcess victim({VictimProgram(), server.target(), transport, moment}, directory.path() + "/out",
                        directory.path() + "/err");
    ASSERT_TRUE(Await([&] { return !ReadFile(directory.path() + "/out").empty() || !victim.Running(); }));
    ASSERT_EQ(ReadFile(directory.path() + "/out"), "ready\n") << ReadFile(directory.path() + "/err");
    if (transport == std::string("shared_memory")) {
      EXPECT_TRUE(HasMappedRegions(server));
    }
    std::this_thread::sleep_for(milliseconds(50));
    victim.Signal(SIGKILL);
    EXPECT_EQ(victim.Wait(), -SIGKILL);
  }
  // Its undecided micro-batches are discarded, and its regions go, when its lease ends; the accumulator is as it was.
  EXPECT_TRUE(AwaitAllButTheFirst(head, ContributionState::kDiscarded));
  EXPECT_TRUE(Await([&] { return !HasMappedRegions(server); }));
  const TensorBuffer after = Value(head.Gradient(0));
  EXPECT_EQ(std::memcmp(before.data(), after.data(), static_cast<size_t>(before.bytes())), 0);
  EXPECT_TRUE(SubmitRandom(head, kFewRows, Submission(1 << 20)).ok());
}

INSTANTIATE_TEST_SUITE_P(Paths, KilledClient,
                         testing::Combine(testing::Values("grpc", "shared_memory"), testing::Values("submitting", "undecided")),
                         [](const auto& path) { return std::string(std::get<0>(path.param)) + "_" + std::get<1>(path.param); });

}  // namespace
}  // namespace headwater::e2e
