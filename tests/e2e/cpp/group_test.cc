// A server of several processes: what becomes of its clients' calls, its health and its heads when one of them dies or hangs.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "headwater/client/client.h"
#include "tests/e2e/cpp/support/await.h"
#include "tests/e2e/cpp/support/fp64_head.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace headwater::client;
using Clock = std::chrono::steady_clock;

constexpr int64_t kVocabSize = 211;
constexpr int64_t kHiddenSize = 23;
constexpr int64_t kRows = 37;
constexpr int64_t kManyRows = 16384;  // of a micro-batch that something happens to
// Of fp32 against fp64 over several steps of AdamW; a contribution that is lost or added twice costs much more.
constexpr double kTolerance = 1e-4;

// Seconds from what happens to the answer of the calls in progress.
constexpr double kLongestAnswer = 10;

ClientOptions Impatient() {
  ClientOptions options;
  options.retry.max_attempts = 1;
  options.session_lease = std::chrono::milliseconds(0);
  return options;
}

Head MakeHead(Client client) {
  HeadSpec spec = {.vocab_size = kVocabSize, .hidden_size = kHiddenSize, .has_bias = true, .trainable = true};
  spec.optimizer = AdamW{.weight_decay = 0.1};
  Head head = Value(client.CreateHead("student", spec));
  const std::vector<float> weight = RandomFloats(1, kVocabSize * kHiddenSize, 0.3F);
  Value(head.UploadWeights(HeadTensor::kWeight, TensorView::Float32(weight)));
  const std::vector<float> bias(static_cast<size_t>(kVocabSize));
  Value(head.UploadWeights(HeadTensor::kBias, TensorView::Float32(bias)));
  return head;
}

MicroBatchOptions Submission(int64_t step, int64_t micro_batch) { return {.step = step, .micro_batch = micro_batch}; }

// A step on the server and in double precision.
void TrainStepUnsaved(Head& head, int64_t step, Fp64Head* reference) {
  std::vector<std::vector<float>> hidden;
  std::vector<std::vector<int32_t>> targets;
  for (uint32_t seed = static_cast<uint32_t>(100 + 2 * step); hidden.size() < 2; ++seed) {
    hidden.push_back(RandomFloats(seed, kRows * kHiddenSize, 1.0F));
    targets.push_back(RandomTargets(seed, kRows, kVocabSize));
  }
  // Both are on their way at once.
  std::vector<LossResult> results(2);
  std::vector<std::thread> callers;
  for (size_t i = 0; i < 2; ++i) {
    callers.emplace_back([&, i] {
      results[i] = Value(
          head.CrossEntropy(RowsView::Float32(hidden[i], kHiddenSize), targets[i], {}, Submission(step, static_cast<int64_t>(i)))
              .Get());
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (size_t i = 0; i < 2; ++i) {
    const LossResult& result = results[i];
    const Fp64Head::Loss expected = reference->CrossEntropy(hidden[i], targets[i], 1.0, 1.0);
    EXPECT_LE(std::abs(result.loss_sum / expected.sum - 1), kTolerance);
    EXPECT_LE(RelativeError(result.grad_hidden.float32(), expected.grad_hidden), kTolerance);
  }
  Value(head.Apply(step, {.learning_rate = 0.01, .expected = 2}));
  reference->Apply(0.01, 0.1, std::numeric_limits<double>::infinity());
}

void TrainStep(Head& head, int64_t step, Fp64Head* reference) {
  TrainStepUnsaved(head, step, reference);
  Value(head.Save("step-" + std::to_string(step + 1)));
}

// Submits micro-batches of the open step until one fails; why.
absl::Status SubmitUntilFailure(Head& head, int64_t step) {
  const std::vector<float> hidden = RandomFloats(7, kManyRows * kHiddenSize, 1.0F);
  const std::vector<int32_t> targets = RandomTargets(7, kManyRows, kVocabSize);
  for (int64_t i = 0;; ++i) {
    const auto result = head.CrossEntropy(RowsView::Float32(hidden, kHiddenSize), targets, {}, Submission(step, i)).Get();
    if (!result.ok()) return result.status();
  }
}

// The head once the server has it back. The process may be in the middle of beginning anew, and not listen.
Head AwaitHead(const ServerProcess& server, Client* client) {
  std::optional<Head> head;
  EXPECT_TRUE(Await([&] {
    absl::StatusOr<Client> connected = Client::Connect(server.target(), Impatient());
    if (!connected.ok()) return false;
    *client = *std::move(connected);
    absl::StatusOr<Head> opened = client->OpenHead("student");
    if (opened.ok()) head = *std::move(opened);
    return opened.ok();
  })) << server.log();
  return head.has_value() ? *head : throw std::runtime_error("the head does not come back");
}

// A server of three processes, and a head that has been trained and saved.
class Group : public ::testing::Test {
 protected:
  explicit Group(const std::vector<std::string>& more_flags = {"--rank_timeout=4s"})
      : server_(Flags(more_flags)), client_(server_.Connect(Impatient())), head_(MakeHead(client_)) {
    TrainStep(head_, 0, &reference_);
  }

  static std::vector<std::string> Flags(const std::vector<std::string>& more) {
    std::vector<std::string> flags = {"--workers=2", "--shard_weights=3,1,2"};
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
  }

  ServerProcess server_;
  Fp64Head reference_{kVocabSize, kHiddenSize, RandomFloats(1, kVocabSize* kHiddenSize, 0.3F),
                      std::vector<float>(static_cast<size_t>(kVocabSize))};
  Client client_;
  Head head_;
  int64_t step_ = 1;
};

// It loses the open step and nothing else, and its caller is answered soon.
TEST_F(Group, NoticesAWorkerThatHangs) {
  absl::Status answer;
  std::thread caller([&] { answer = SubmitUntilFailure(head_, step_); });
  std::this_thread::sleep_for(std::chrono::milliseconds(87));
  const Clock::time_point start = Clock::now();
  server_.worker(1).Signal(SIGSTOP);
  caller.join();
  EXPECT_LE(std::chrono::duration<double>(Clock::now() - start).count(), kLongestAnswer);
  EXPECT_EQ(answer.code(), absl::StatusCode::kAborted) << answer;
  EXPECT_EQ(ErrorReason(answer), "STEP_LOST") << answer;
  server_.worker(1).Signal(SIGKILL);
  server_.worker(1).Wait();
  server_.StartWorker(1);
  head_ = AwaitHead(server_, &client_);
  EXPECT_EQ(Value(head_.Info()).state, HeadState::kRestored);
  EXPECT_EQ(Value(head_.Take()).open_step, step_);
  EXPECT_LE(RelativeError(Value(head_.DownloadWeights()).float32(), reference_.weight()), kTolerance);
  TrainStep(head_, step_, &reference_);
  EXPECT_LE(RelativeError(Value(head_.DownloadWeights()).float32(), reference_.weight()), kTolerance);
}

// What nobody has saved is in the group alone.
class DrainingGroup : public Group {
 protected:
  DrainingGroup() : Group({"--drain_checkpoint", "--drain_timeout=120s", "--log_level=info"}) {
    TrainStepUnsaved(head_, step_++, &reference_);
  }
};

// As when all pods of a deployment are deleted, or a terminal's Ctrl-C goes to all of them.
TEST_F(DrainingGroup, SavesWhatItHoldsWhenAllProcessesAreAskedToEnd) {
  for (size_t worker = 0; worker < server_.worker_count(); ++worker) server_.worker(worker).Signal(SIGTERM);
  server_.process().Signal(SIGTERM);
  for (size_t worker = 0; worker < server_.worker_count(); ++worker) EXPECT_EQ(server_.worker(worker).Wait(), 0);
  EXPECT_EQ(server_.process().Wait(), 0) << server_.log();
  server_.Start();
  head_ = AwaitHead(server_, &client_);
  EXPECT_EQ(Value(head_.Info()).restored_checkpoint, "drain");
  EXPECT_EQ(Value(head_.Take()).open_step, step_);
  TrainStepUnsaved(head_, step_, &reference_);
  EXPECT_LE(RelativeError(Value(head_.DownloadWeights()).float32(), reference_.weight()), kTolerance);
}

// It was told to end: it does, though a rank is lost before everything is saved.
TEST_F(DrainingGroup, DoesNotBeginAnewOnceItWasAskedToEnd) {
  server_.worker(1).Signal(SIGSTOP);
  server_.process().Signal(SIGTERM);
  ASSERT_TRUE(Await([&] { return absl::StrContains(server_.log(), "event=draining"); })) << server_.log();
  server_.worker(1).Signal(SIGKILL);
  EXPECT_EQ(server_.process().Wait(), 75) << server_.log();
  EXPECT_TRUE(absl::StrContains(server_.log(), "event=head_not_saved")) << server_.log();
}

}  // namespace
}  // namespace headwater::e2e
