// What goes wrong between the C++ client and the real server: reasons, cancellation, refusals in mid-upload, a server that dies.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "headwater/client/client.h"
#include "tests/e2e/cpp/server_process.h"
#include "tests/e2e/cpp/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace headwater::client;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr int64_t kVocabSize = 97;
constexpr int64_t kHiddenSize = 64;
constexpr int64_t kManyRows = 1 << 17;  // 32 MiB of rows: much more than sockets and flow control hold

MicroBatchOptions Submission(int64_t step, int64_t micro_batch) {
  MicroBatchOptions options;
  options.step = step;
  options.micro_batch = micro_batch;
  return options;
}

class Fault : public testing::Test {
 protected:
  Fault()
      : server_({"--max_micro_batch_rows=200000", "--max_message_bytes=33554432"}),
        client_(server_.Connect({.connect_timeout = seconds(20)})) {
    HeadSpec spec;
    spec.vocab_size = kVocabSize;
    spec.hidden_size = kHiddenSize;
    spec.trainable = true;
    spec.optimizer = AdamW();
    head_.emplace(Value(client_.CreateHead("student", spec)));
    weight_ = RandomFloats(1, kVocabSize * kHiddenSize, 0.3F);
    Value(head_->UploadWeights(HeadTensor::kWeight, TensorView::Float32(weight_)));
    rows_ = RandomFloats(2, 5 * kHiddenSize, 1.0F);
  }

  RowsView Rows() const { return RowsView::Float32(rows_, kHiddenSize); }

  ServerProcess server_;
  Client client_;
  std::optional<Head> head_;
  std::vector<float> weight_;
  std::vector<float> rows_;
  const std::vector<int32_t> targets_ = {0, 1, 2, 3, 4};
};

TEST_F(Fault, ErrorsCarryReasonAndMetadata) {
  const absl::Status missing = client_.OpenHead("nobody").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ErrorReason(missing), "HEAD_NOT_FOUND");

  const absl::Status twice = client_.CreateHead("student", head_->spec()).status();
  EXPECT_EQ(ErrorReason(twice), "HEAD_ALREADY_EXISTS");

  const absl::Status target = head_->CrossEntropy(Rows(), {0, 1, 2, 3, kVocabSize}, {}, Submission(0, 0)).Get().status();
  EXPECT_EQ(target.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorReason(target), "TARGET_OUT_OF_VOCAB");
  EXPECT_FALSE(ErrorMetadata(target).empty());

  const absl::Status shape = head_->CrossEntropy(Rows(), {0, 1, 2}, {}, Submission(0, 0)).Get().status();
  EXPECT_EQ(ErrorReason(shape), "SHAPE_MISMATCH");

  const absl::Status step = head_->CrossEntropy(Rows(), targets_, {}, Submission(7, 0)).Get().status();
  EXPECT_EQ(step.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ErrorReason(step), "STEP_MISMATCH");
  EXPECT_EQ(ErrorMetadata(step)["openStep"], "0");

  const absl::Status field = head_->CrossEntropy(Rows(), targets_, {.label_smoothing = 2.0}, Submission(0, 0)).Get().status();
  EXPECT_EQ(ErrorReason(field), "INVALID_FIELD");

  const absl::Status uncommitted = head_->Commit(0, 5).Get().status();
  EXPECT_EQ(ErrorReason(uncommitted), "MICRO_BATCH_NOT_FOUND");

  const absl::Status seal = head_->Seal(0, 2).status();
  EXPECT_EQ(ErrorReason(seal), "MICRO_BATCH_MISSING");
}

TEST_F(Fault, ForgottenTrainerIsFencedOff) {
  Head other = Value(client_.OpenHead("student"));
  Value(other.UploadWeights(HeadTensor::kWeight, TensorView::Float32(weight_)));
  EXPECT_NE(other.epoch(), head_->epoch());
  const absl::Status fenced = head_->CrossEntropy(Rows(), targets_, {}, Submission(0, 0)).Get().status();
  EXPECT_EQ(fenced.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ErrorReason(fenced), "EPOCH_FENCED");
  EXPECT_EQ(ErrorReason(head_->DownloadWeights().status()), "EPOCH_FENCED");
  EXPECT_TRUE(other.CrossEntropy(Rows(), targets_, {}, Submission(0, 0)).Get().ok());
}

TEST_F(Fault, RepeatIsReplayedAndConflictIsRefused) {
  const LossResult first = Value(head_->CrossEntropy(Rows(), targets_, {}, Submission(0, 0)).Get());
  const LossResult second = Value(head_->CrossEntropy(Rows(), targets_, {}, Submission(0, 0)).Get());
  EXPECT_FALSE(first.replayed);
  EXPECT_TRUE(second.replayed);
  EXPECT_EQ(first.digest, second.digest);
  EXPECT_EQ(first.loss_sum, second.loss_sum);
  const std::vector<int32_t> others = {4, 3, 2, 1, 0};
  EXPECT_EQ(ErrorReason(head_->CrossEntropy(Rows(), others, {}, Submission(0, 0)).Get().status()), "MICRO_BATCH_CONFLICT");
  MicroBatchOptions first_wins = Submission(0, 0);
  first_wins.on_mismatch = OnMismatch::kFirstWins;
  EXPECT_TRUE(Value(head_->CrossEntropy(Rows(), others, {}, first_wins).Get()).payload_differs);
  EXPECT_EQ(Value(head_->GetStep()).open.totals.micro_batch_count, 1);
}

TEST_F(Fault, RefusalInTheMiddleOfALongUploadArrives) {
  const std::vector<float> hidden(kManyRows * kHiddenSize, 0.5F);
  const std::vector<int32_t> targets(kManyRows, 1);
  const auto start = steady_clock::now();
  const absl::Status status =
      head_->CrossEntropy(RowsView::Float32(hidden, kHiddenSize), targets, {}, Submission(9, 0)).Get().status();
  EXPECT_EQ(ErrorReason(status), "STEP_MISMATCH") << status;
  EXPECT_LE(steady_clock::now() - start, seconds(10));
}

TEST_F(Fault, DestroyedFutureCancelsAndAddsNothing) {
  const std::vector<float> hidden(kManyRows * kHiddenSize, 0.5F);
  const std::vector<int32_t> targets(kManyRows, 1);
  {
    // Explicit: whatever the server had done already stays undecided, so the step is certain to be empty afterwards.
    MicroBatchOptions options = Submission(0, 0);
    options.commit = CommitMode::kExplicit;
    Future<LossResult> future = head_->CrossEntropy(RowsView::Float32(hidden, kHiddenSize), targets, {}, options);
    EXPECT_FALSE(future.WaitFor(milliseconds(1)));
  }
  // The server notices the cancellation by itself.
  const auto deadline = steady_clock::now() + seconds(20);
  StepStates states = Value(head_->GetStep());
  while (!states.open.micro_batches.empty() && steady_clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(50));
    states = Value(head_->GetStep());
  }
  EXPECT_TRUE(states.open.micro_batches.empty());
  EXPECT_TRUE(head_->CrossEntropy(Rows(), targets_, {}, Submission(0, 0)).Get().ok());
  EXPECT_EQ(Value(head_->Seal(0, 1)).totals.micro_batch_count, 1);
}

TEST_F(Fault, KilledServerInMidUploadIsACleanErrorAndTheClientComesBack) {
  const std::vector<float> hidden(kManyRows * kHiddenSize, 0.5F);
  const std::vector<int32_t> targets(kManyRows, 1);
  Future<LossResult> future =
      head_->CrossEntropy(RowsView::Float32(hidden, kHiddenSize), targets, {}, Submission(0, 0), {.timeout = seconds(30)});
  server_.process().Signal(SIGKILL);
  EXPECT_EQ(server_.process().Wait(), -SIGKILL);
  const auto start = steady_clock::now();
  const absl::Status status = future.Get().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(ErrorReason(status), "");
  EXPECT_LE(steady_clock::now() - start, seconds(5));

  server_.Start();
  // The same client, over a new connection: nothing has to be connected again by hand.
  const auto deadline = steady_clock::now() + seconds(20);
  absl::StatusOr<HealthStatus> health = client_.CheckHealth();
  while (!health.ok() && steady_clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(50));
    health = client_.CheckHealth();
  }
  EXPECT_EQ(Value(health), HealthStatus::kServing);
}

TEST_F(Fault, HealthOfServicesIsTold) {
  EXPECT_EQ(Value(client_.CheckHealth()), HealthStatus::kServing);
  EXPECT_EQ(Value(client_.CheckHealth("headwater.v1.LossService")), HealthStatus::kServing);
  EXPECT_EQ(Value(client_.CheckHealth("headwater.v1.Nonsense")), HealthStatus::kServiceUnknown);
}

TEST_F(Fault, ViewsThatWouldReadOutOfBoundsAreRefusedHere) {
  RowsView rows = Rows();
  rows.data = nullptr;
  EXPECT_EQ(ErrorReason(head_->CrossEntropy(rows, targets_, {}, Submission(0, 0)).Get().status()), "INVALID_FIELD");
  rows = Rows();
  rows.row_count = int64_t{1} << 62;
  EXPECT_EQ(ErrorReason(head_->CrossEntropy(rows, targets_, {}, Submission(0, 0)).Get().status()), "INVALID_FIELD");
  unsigned char small[8];
  MicroBatchOptions options = Submission(0, 0);
  options.grad_hidden = small;
  EXPECT_EQ(ErrorReason(head_->CrossEntropy(Rows(), targets_, {}, options).Get().status()), "DATA_LENGTH_MISMATCH");
}

TEST(Connect, NobodyThereAndWrongOptionsAreToldApart) {
  TemporaryDirectory directory;
  const auto start = steady_clock::now();
  const absl::Status status =
      Client::Connect("unix:" + directory.path() + "/nobody", {.connect_timeout = milliseconds(300)}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_LE(steady_clock::now() - start, seconds(5));
  EXPECT_EQ(ErrorReason(Client::Connect("unix:/nowhere", {.chunk_bytes = 0}).status()), "INVALID_FIELD");
  EXPECT_EQ(ErrorReason(Client::Connect("unix:/nowhere", {.max_message_bytes = int64_t{1} << 40}).status()), "INVALID_FIELD");
}

}  // namespace
}  // namespace headwater::e2e
