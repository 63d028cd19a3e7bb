// A server whose engine is held in its middle: what probes report meanwhile, and how it is drained. The engine is the stand-in
// for the CUDA module (tests/integration/support/fake_cuda_module.cc).
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <future>
#include <string>
#include <vector>

#include "headwater/client/client.h"
#include "tests/e2e/cpp/support/await.h"
#include "tests/e2e/cpp/support/child_process.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"
#include "tests/integration/support/raw_call.h"

namespace headwater::e2e {
namespace {

using ::testing::HasSubstr;

class HeldModule : public ::testing::Test {
 protected:
  ~HeldModule() override { Release(); }

  std::string Path(const std::string& name) const { return folder_.path() + "/" + name; }
  void Hold() const { WriteFile(Path("hold"), ""); }
  bool AwaitHeld() const {
    return Await([&] { return std::filesystem::exists(Path("held")); });
  }
  void Release() const { std::filesystem::remove(Path("hold")); }

 private:
  const TemporaryDirectory folder_;
  const EnvironmentVariable module_{"HEADWATER_CUDA_MODULE", FAKE_CUDA_MODULE};
  const EnvironmentVariable hold_{"HEADWATER_FAKE_HOLD", folder_.path()};
};

// What probes report in every state of a server: by grpc.health.v1.Health, as the kubelet asks it, of the server as a whole and
// of each service, and by `headwaterctl health`, whose exit status a probe with a command goes by. The table is in
// docs/operations.md.

// grpc.health.v1.HealthCheckResponse.ServingStatus, or that nobody answers.
enum Answer { kNobody = -1, kServing = 1, kNotServing = 2 };

// What a kubelet gets: it makes a new connection for each probe.
int Kubelet(const std::string& target, const std::string& service = "") {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return headwater::testing::Health(grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments), service);
}

ProgramResult Command(const std::string& target) {
  return RunProgram({HEADWATERCTL, "--server=" + target, "--connect_timeout=10s", "health"});
}

// All probes say the same, and go on to.
void ExpectAll(const std::string& target, Answer answer) {
  for (const char* service :
       {"", "headwater.v1.LossService", "headwater.v1.HeadService", "headwater.v1.SessionService", "headwater.v1.GroupService"}) {
    EXPECT_EQ(Kubelet(target, service), answer) << service;
  }
  const ProgramResult command = Command(target);
  EXPECT_EQ(command.exit_code, answer == kServing ? 0 : 1) << command.out << command.err;
  EXPECT_EQ(command.out, answer == kServing ? "SERVING\n" : answer == kNotServing ? "NOT_SERVING\n" : "");
}

bool AwaitAnswer(const std::string& target, Answer answer) {
  return Await([&] { return Kubelet(target) == answer; });
}

// The self-test is held in its middle: the server listens, and says that it does not serve. Then it passes, or fails.
TEST_F(HeldModule, ProbesTellOfTheSelfTest) {
  for (const bool passes : {true, false}) {
    Hold();
    const std::string socket = Path("socket");
    ChildProcess server({HEADWATERD, "--engine=cuda", passes ? "--device=0" : "--device=6", "--listen_addresses=unix:" + socket,
                         "--metrics_address=", "--log_level=warning"},
                        Path("out"), Path("err"));
    ASSERT_TRUE(AwaitHeld()) << ReadFile(Path("err"));
    ExpectAll("unix:" + socket, kNotServing);
    Release();
    if (passes) {
      EXPECT_TRUE(AwaitAnswer("unix:" + socket, kServing)) << ReadFile(Path("err"));
      ExpectAll("unix:" + socket, kServing);
    } else {
      EXPECT_EQ(server.Wait(), 1) << ReadFile(Path("err"));
      EXPECT_EQ(Kubelet("unix:" + socket), kNobody);
    }
    std::filesystem::remove(Path("held"));
  }
}

// Of several processes, one is lost: the leader does not serve until another one has come.
TEST(GroupProbes, TellOfALostRank) {
  ServerProcess server({"--workers=2"});
  ExpectAll(server.target(), kServing);
  server.worker(1).Signal(SIGKILL);
  server.worker(1).Wait();
  // It restarts in place: between two answers there may be none.
  EXPECT_TRUE(AwaitAnswer(server.target(), kNotServing)) << server.log();
  EXPECT_TRUE(Await([&] { return Command(server.target()).out == "NOT_SERVING\n"; }));
  EXPECT_TRUE(server.process().Running());
  // Nothing but another worker helps.
  EXPECT_NE(Kubelet(server.target()), kServing);
  server.StartWorker(1);
  EXPECT_TRUE(AwaitAnswer(server.target(), kServing)) << server.log();
  ExpectAll(server.target(), kServing);
}

constexpr int64_t kVocabSize = 12;
constexpr int64_t kHiddenSize = 4;
constexpr int64_t kRows = 5;

// SIGTERM while an optimizer step is being applied: one shard has the new weights, the other has not. The step is whole all the
// same: applied, answered and saved if the drain waits for it; not there at all if it does not.
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
  // The server starts again with the head as it was.
  static void ExpectRestored(ServerProcess& server, const std::vector<float>& weight, int64_t open_step) {
    server.Start();
    client::Client client = Connect(server);
    client::Head head = Value(client.OpenHead("h"));
    EXPECT_EQ(Weight(head), weight);
    EXPECT_EQ(Value(head.Take()).open_step, open_step);
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

  ExpectRestored(server, expected, 1);
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

  ExpectRestored(server, before, 0);
}

}  // namespace
}  // namespace headwater::e2e
