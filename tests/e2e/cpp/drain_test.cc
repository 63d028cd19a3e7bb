// SIGTERM while an optimizer step is being applied: one shard has the new weights, the other has not. The step is whole all the
// same: applied, answered and saved if the drain waits for it; not there at all if it does not.
//
// The engine is the stand-in for the CUDA module (tests/integration/support/fake_cuda_module.cc), which can be held at that point.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <future>
#include <string>
#include <vector>

#include "headwater/client/client.h"
#include "tests/e2e/cpp/support/await.h"
#include "tests/e2e/cpp/support/held_module.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kVocabSize = 12;
constexpr int64_t kHiddenSize = 4;
constexpr int64_t kRows = 5;

class Drain : public HeldModule {
 protected:
  static std::vector<std::string> Flags(std::vector<std::string> more) {
    std::vector<std::string> flags = {"--engine=cuda", "--shards=2", "--deterministic", "--log_level=info"};
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
  }
  static client::Client Connect(const ServerProcess& server) {
    client::ClientOptions options;
    options.retry.max_attempts = 1;
    return server.Connect(options);
  }
  // A head whose step 0 has one micro-batch.
  static client::Head Train(client::Client& client) {
    client::Head head = CreateHead(
        client, "h", {.vocab_size = kVocabSize, .hidden_size = kHiddenSize, .trainable = true, .optimizer = client::AdamW{}},
        RandomFloats(1, kVocabSize * kHiddenSize, 0.3F));
    const std::vector<float> rows = RandomFloats(2, kRows * kHiddenSize, 1.0F);
    client::MicroBatchOptions options = {.step = 0, .micro_batch = 0};
    Value(head.CrossEntropy(client::RowsView::Float32(rows, kHiddenSize), RandomTargets(3, kRows, kVocabSize), {}, options).Get());
    return head;
  }
  static absl::StatusOr<client::ApplyResult> Apply(client::Head& head) {
    return head.Apply(0, {.learning_rate = 0.01, .expected = 1});
  }
};

TEST_F(Drain, WaitsForAnOptimizerStepThatIsBeingAppliedAndSavesIt) {
  std::vector<float> expected;
  {
    ServerProcess undisturbed(Flags({}));
    client::Client client = Connect(undisturbed);
    client::Head head = Train(client);
    Value(Apply(head));
    expected = Weight(head);
  }
  ServerProcess server(Flags({"--drain_checkpoint", "--drain_timeout=120s"}));
  client::Client client = Connect(server);
  client::Head head = Train(client);
  ASSERT_NE(Weight(head), expected);
  Hold();
  auto applying = std::async(std::launch::async, [&] { return Apply(head); });
  ASSERT_TRUE(AwaitHeld());
  server.process().Signal(SIGTERM);
  EXPECT_TRUE(Await([&] {
    const auto health = client.CheckHealth();
    return health.ok() && *health == client::HealthStatus::kNotServing;
  }));
  EXPECT_EQ(client::ErrorReason(client.CreateHead("other", {.vocab_size = 2, .hidden_size = 2}).status()), "DRAINING");
  EXPECT_TRUE(server.process().Running());
  Release();
  const auto applied = applying.get();
  ASSERT_TRUE(applied.ok()) << applied.status() << server.log();
  EXPECT_EQ(applied->open_step, 1);
  EXPECT_EQ(server.process().Wait(), 0) << server.log();
  EXPECT_THAT(server.log(), HasSubstr("event=drained clean=true"));

  server.Start();
  client::Client later = Connect(server);
  client::Head restored = Value(later.OpenHead("h"));
  EXPECT_EQ(Weight(restored), expected);
  EXPECT_EQ(Value(restored.Take()).open_step, 1);
}

TEST_F(Drain, AStepThatItDoesNotWaitForIsNotAppliedAtAll) {
  ServerProcess server(Flags({"--drain_timeout=1s"}));
  client::Client client = Connect(server);
  client::Head head = Train(client);
  const std::vector<float> before = Weight(head);
  Value(head.Save("before"));
  Hold();
  auto applying = std::async(std::launch::async, [&] { return Apply(head); });
  ASSERT_TRUE(AwaitHeld());
  server.process().Signal(SIGTERM);
  EXPECT_FALSE(applying.get().ok());  // cancelled when the time is over, while the engine is still at it
  Release();
  EXPECT_EQ(server.process().Wait(), 1) << server.log();
  EXPECT_THAT(server.log(), HasSubstr("the drain timeout passed; calls were cancelled"));

  server.Start();
  client::Client later = Connect(server);
  client::Head restored = Value(later.OpenHead("h"));
  EXPECT_EQ(Weight(restored), before);
  EXPECT_EQ(Value(restored.Take()).open_step, 0);
}

}  // namespace
}  // namespace headwater::e2e
