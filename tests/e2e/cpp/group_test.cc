// A server of several processes: what becomes of its clients' calls, its health and its heads when one of them hangs or all end.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "headwater/client/client.h"
#include "tests/e2e/cpp/support/await.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace headwater::client;
using Clock = std::chrono::steady_clock;

constexpr int64_t kRows = 37;
constexpr int64_t kManyRows = 16384;  // of a micro-batch that something happens to: more than a connection buffers
// Seconds from what happens to the answer of the calls in progress.
constexpr double kLongestAnswer = 10;

ClientOptions Impatient() {
  ClientOptions options;
  options.retry.max_attempts = 1;
  options.session_lease = std::chrono::milliseconds(0);
  return options;
}

// Trains a step of one micro-batch, and returns the weight that it leaves.
std::vector<float> TrainStep(Head& head, int64_t step) {
  Value(SubmitRandom(head, kRows, {.step = step, .micro_batch = 0}));
  Value(head.Apply(step, {.learning_rate = 0.01, .expected = 1}));
  return Weight(head);
}

// Submits micro-batches of the open step until one fails; why.
absl::Status SubmitUntilFailure(Head& head, int64_t step) {
  for (int64_t i = 0;; ++i) {
    const auto result = SubmitRandom(head, kManyRows, {.step = step, .micro_batch = i});
    if (!result.ok()) return result.status();
  }
}

// A server of three processes, and a head that has been trained and saved.
class Group : public ::testing::Test {
 protected:
  explicit Group(const std::vector<std::string>& more_flags = {"--rank_timeout=4s"})
      : server_(Flags(more_flags)),
        client_(server_.Connect(Impatient())),
        head_(CreateHead(client_, "student",
                         {.vocab_size = 211, .hidden_size = 23, .trainable = true, .optimizer = AdamW{.weight_decay = 0.1}})),
        weight_(TrainStep(head_, 0)) {
    Value(head_.Save("step-1"));
  }

  static std::vector<std::string> Flags(const std::vector<std::string>& more) {
    std::vector<std::string> flags = {"--workers=2", "--shard_weights=3,1,2"};
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
  }

  // The head comes back from `checkpoint` with the weights of `step_`, and can be trained. While the process restarts in place, it
  // does not listen.
  void ExpectRestored(const std::string& checkpoint) {
    std::optional<Head> head;
    EXPECT_TRUE(Await([&] {
      absl::StatusOr<Client> connected = Client::Connect(server_.target(), Impatient());
      if (!connected.ok()) return false;
      client_ = *std::move(connected);
      absl::StatusOr<Head> opened = client_.OpenHead("student");
      if (opened.ok()) head = *std::move(opened);
      return opened.ok();
    })) << server_.log();
    if (!head.has_value()) throw std::runtime_error("the head does not come back");
    const HeadInfo info = Value(head->Info());
    EXPECT_EQ(info.state, HeadState::kRestored);
    EXPECT_EQ(info.restored_checkpoint, checkpoint);
    EXPECT_EQ(std::get<AdamW>(head->spec().optimizer).weight_decay, 0.1);
    EXPECT_EQ(Value(head->Take()).open_step, step_);
    EXPECT_EQ(Weight(*head), weight_);
    EXPECT_NE(TrainStep(*head, step_), weight_);
  }

  ServerProcess server_;
  Client client_;
  Head head_;
  std::vector<float> weight_;
  int64_t step_ = 1;
};

// The group loses the open step and nothing else, and the caller is answered soon.
TEST_F(Group, NoticesAWorkerThatHangs) {
  absl::Status answer;
  std::thread caller([&] { answer = SubmitUntilFailure(head_, step_); });
  std::this_thread::sleep_for(std::chrono::milliseconds(87));
  const Clock::time_point start = Clock::now();
  server_.worker(1).Signal(SIGSTOP);
  caller.join();
  EXPECT_LE(std::chrono::duration<double>(Clock::now() - start).count(), kLongestAnswer);
  EXPECT_EQ(answer.code(), absl::StatusCode::kAborted) << answer << server_.log();
  EXPECT_EQ(ErrorReason(answer), "STEP_LOST") << answer;
  server_.worker(1).Signal(SIGKILL);
  server_.worker(1).Wait();
  server_.StartWorker(1);
  ExpectRestored("step-1");
}

// The last step is in the group alone.
class DrainingGroup : public Group {
 protected:
  DrainingGroup() : Group({"--drain_checkpoint", "--drain_timeout=120s", "--log_level=info"}) {
    weight_ = TrainStep(head_, step_++);
  }
};

// As when all pods of a deployment are deleted, or a terminal's Ctrl-C goes to all of them.
TEST_F(DrainingGroup, SavesWhatItHoldsWhenAllProcessesAreAskedToEnd) {
  for (size_t worker = 0; worker < server_.worker_count(); ++worker) server_.worker(worker).Signal(SIGTERM);
  server_.process().Signal(SIGTERM);
  for (size_t worker = 0; worker < server_.worker_count(); ++worker) EXPECT_EQ(server_.worker(worker).Wait(), 0);
  EXPECT_EQ(server_.process().Wait(), 0) << server_.log();
  server_.Start();
  ExpectRestored("drain");
}

// A group that was asked to end does not restart, though a rank is lost before everything is saved.
TEST_F(DrainingGroup, DoesNotRestartOnceItWasAskedToEnd) {
  server_.worker(1).Signal(SIGSTOP);
  server_.process().Signal(SIGTERM);
  ASSERT_TRUE(Await([&] { return absl::StrContains(server_.log(), "event=draining"); })) << server_.log();
  server_.worker(1).Signal(SIGKILL);
  EXPECT_EQ(server_.process().Wait(), 75) << server_.log();
  EXPECT_TRUE(absl::StrContains(server_.log(), "event=head_not_saved")) << server_.log();
}

}  // namespace
}  // namespace headwater::e2e
