// headwaterd with the CUDA engine's module: how it is found and chosen, and how the process ends when the device is lost. And with
// an engine that is held in its middle: what probes report meanwhile, and how the server is drained. A stand-in for the module
// (tests/integration/support/fake_cuda_module.cc) makes this possible without a GPU.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "headwater/client/client.h"
#include "tests/e2e/cpp/support/await.h"
#include "tests/e2e/cpp/support/child_process.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"
#include "tests/integration/support/raw_call.h"

namespace headwater::e2e {
namespace {

using std::chrono::duration;
using std::chrono::seconds;
using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int kDeviceLostStatus = 75;
const client::HeadSpec kSpec = {.vocab_size = 11, .hidden_size = 4};

absl::Status Compute(client::Head& head, int64_t row_count) {
  return SubmitRandom(head, row_count, {.forward_only = true}).status();
}

class CudaModule : public ::testing::Test {
 private:
  const EnvironmentVariable module_{"HEADWATER_CUDA_MODULE", FAKE_CUDA_MODULE};
};

// What `headwaterd FLAGS` says when it does not start.
ProgramResult Refused(std::vector<std::string> flags) {
  flags.insert(flags.begin(), HEADWATERD);
  flags.push_back("--listen_addresses=unix:/nonexistent-folder/socket");  // were it to start, it would end here
  flags.push_back("--metrics_address=");
  return RunProgram(flags);
}

TEST_F(CudaModule, AutoFallsBackAndSaysWhy) {
  const EnvironmentVariable module("HEADWATER_CUDA_MODULE", "/nonexistent-folder/module.so");
  ServerProcess server({"--engine=auto", "--log_level=info"});
  client::Client client = server.Connect();
  const client::ServerInfo info = Value(client.GetServerInfo());
  EXPECT_EQ(info.engine, "cpu");
  EXPECT_THAT(info.engine_note, AllOf(HasSubstr("running on the CPU: the CUDA engine cannot be had"),
                                      HasSubstr("there is no file where HEADWATER_CUDA_MODULE says")));
  EXPECT_THAT(server.log(), HasSubstr("event=starting engine=cpu"));
  EXPECT_THAT(server.log(), HasSubstr(info.engine_note));
}

TEST_F(CudaModule, EngineCudaFailsWithOneSentence) {
  {
    const EnvironmentVariable module("HEADWATER_CUDA_MODULE", "/nonexistent-folder/module.so");
    const ProgramResult result = Refused({"--engine=cuda"});
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_EQ(
        result.err,
        "headwaterd: --engine=cuda: the CUDA engine cannot be had: there is no file where HEADWATER_CUDA_MODULE says that its "
        "module is\n");
  }
  const auto with_module = [](const char* path, const char* device) {
    const EnvironmentVariable module("HEADWATER_CUDA_MODULE", path);
    const ProgramResult result = Refused({"--engine=cuda", std::string("--device=") + device});
    EXPECT_EQ(result.exit_code, 1) << path;
    return result.err;
  };
  // No library; a library that is no module; one of another build; one that finds no GPU; one that is broken.
  EXPECT_THAT(with_module(__FILE__, "0"), HasSubstr("its module cannot be loaded: cuda_module_test.cc: "));
  EXPECT_THAT(with_module("libm.so.6", "0"), HasSubstr("there is no file"));  // a path, never a name to search for
  Dl_info libc;
  ASSERT_NE(dladdr(dlsym(RTLD_DEFAULT, "dladdr"), &libc), 0);
  EXPECT_THAT(with_module(libc.dli_fname, "0"), HasSubstr("the file is no module of it"));
  EXPECT_THAT(with_module(FAKE_CUDA_MODULE_OF_ANOTHER_BUILD, "0"),
              AllOf(HasSubstr("expected \"" HEADWATER_VERSION ", interface "), HasSubstr("got \"0.0.9, interface 0\"")));
  EXPECT_THAT(with_module(FAKE_CUDA_MODULE, "7"), HasSubstr("--engine=cuda: no fake GPU is visible"));
  EXPECT_THAT(with_module(FAKE_CUDA_MODULE, "8"), HasSubstr("made no engine and did not say why"));
  EXPECT_THAT(with_module(FAKE_CUDA_MODULE, "-1"), HasSubstr("--device: expected >= 0, got -1"));
}

#ifdef REAL_CUDA_MODULE
// The real one can be loaded on any machine: the server starts as far as its addresses, or is told what the machine lacks.
TEST_F(CudaModule, TheRealOneIsLoadedWhateverTheMachineHas) {
  const EnvironmentVariable module("HEADWATER_CUDA_MODULE", REAL_CUDA_MODULE);
  const ProgramResult result = Refused({"--engine=cuda"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, AnyOf(HasSubstr("headwaterd: --engine=cuda: the CUDA engine cannot be used here: "),
                                HasSubstr("headwaterd: cannot listen on all of the addresses")));
}
#endif

TEST_F(CudaModule, WhatIsWrongWithTheOptionsIsNoReasonToFallBack) {
  const ProgramResult result = Refused({"--engine=auto", "--device=9"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("--engine=auto: device_index must be in [0, 9), got 9"));
}

TEST_F(CudaModule, TheEngineIsToldItsOptionsAndTellsItsDeviceAndPlan) {
  {
    const EnvironmentVariable cache("XDG_CACHE_HOME", "/var/tmp/cache-of-this-test");
    ServerProcess server({"--engine=auto", "--device=3"});
    client::Client client = server.Connect();
    const client::ServerInfo info = Value(client.GetServerInfo());
    EXPECT_EQ(info.engine, "cuda");
    EXPECT_EQ(info.engine_note, "");
    ASSERT_EQ(info.devices.size(), 1U);
    EXPECT_EQ(info.devices[0].name, "cuda:3");
    EXPECT_EQ(info.devices[0].model, "Fake GPU, cache /var/tmp/cache-of-this-test/headwater/cublaslt.json, timed");
    EXPECT_EQ(Value(client.PlanHead("h", kSpec)).memory_plan.token_chunk_rows, 4321);  // the chosen engine's plan
    const ProgramResult printed = RunProgram({HEADWATERCTL, "--server=" + server.target(), "info"});
    EXPECT_EQ(printed.exit_code, 0);
    EXPECT_THAT(printed.out, AllOf(HasSubstr("cuda:3"), HasSubstr("Fake GPU")));
    const ProgramResult planned =
        RunProgram({HEADWATERCTL, "--server=" + server.target(), "plan", "--vocab_size=11", "--hidden_size=4"});
    EXPECT_THAT(planned.out, HasSubstr("rows computed at once: 4321"));
  }
  const EnvironmentVariable cache("XDG_CACHE_HOME", "not/absolute");
  const EnvironmentVariable home("HOME", "/var/tmp/home-of-this-test");
  const auto model = [](const std::string& flag) {
    ServerProcess server({"--engine=cuda", flag});
    client::Client client = server.Connect();
    return Value(client.GetServerInfo()).devices[0].model;
  };
  EXPECT_EQ(model("--timed_search=false"), "Fake GPU, cache /var/tmp/home-of-this-test/.cache/headwater/cublaslt.json, untimed");
  EXPECT_EQ(model("--algorithm_cache="), "Fake GPU, cache none, timed");
  const std::string file = ::testing::TempDir() + "a_file";
  EXPECT_EQ(model("--algorithm_cache=" + file), "Fake GPU, cache " + file + ", timed");
}

// What computes wrong is never SERVING: the self-test ends the process before anybody is told where it listens.
TEST_F(CudaModule, AnEngineThatFailsItsSelfTestDoesNotServe) {
  const ProgramResult result =
      RunProgram({HEADWATERD, "--engine=cuda", "--device=6", "--listen_addresses=127.0.0.1:0", "--metrics_address="});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("event=self_test_failed"), HasSubstr("headwaterd: self-test: "), HasSubstr("should be 1.28")));
  EXPECT_THAT(result.err, ::testing::Not(HasSubstr("event=serving")));
  EXPECT_THAT(result.out, ::testing::Not(HasSubstr("listening on")));
}

// 13 rows: the engine tells that its device is lost. 14: only its health() says so.
TEST_F(CudaModule, ADeviceThatIsLostEndsTheProcess) {
  for (const int64_t rows : {13, 14}) {
    ServerProcess server({"--engine=cuda", "--device_lost_grace=60s"});
    client::Client client = server.Connect();
    client::Head head = CreateHead(client, "h", kSpec);
    ASSERT_TRUE(Compute(head, 5).ok());
    const absl::Status lost = Compute(head, rows);
    EXPECT_EQ(lost.code(), absl::StatusCode::kInternal) << lost;
    EXPECT_EQ(client::ErrorReason(lost), "ENGINE_FAILED");
    EXPECT_THAT(std::string(lost.message()), HasSubstr("an illegal memory access was encountered"));
    const auto start = steady_clock::now();
    EXPECT_EQ(server.process().Wait(), kDeviceLostStatus) << server.log();
    EXPECT_LE(steady_clock::now() - start, seconds(20));  // every call is answered: the grace is not waited for
    EXPECT_THAT(server.log(), AllOf(HasSubstr("event=engine_lost"), HasSubstr("every call was answered")));
    server.Start();  // what an orchestrator does
    EXPECT_EQ(Value(server.Connect().CheckHealth()), client::HealthStatus::kServing);
  }
}

// A call that never comes back, of an engine that says nothing: the server notices, and ends as if the device were lost.
TEST_F(CudaModule, AnEngineThatIsStuckEndsTheProcess) {
  ServerProcess server({"--engine=cuda", "--engine_stall_timeout=3s", "--device_lost_grace=1s"});
  client::Client client = server.Connect();
  client::Head head = CreateHead(client, "h", kSpec);
  std::thread call([&] { EXPECT_FALSE(Compute(head, 16).ok()); });
  EXPECT_EQ(server.process().Wait(), kDeviceLostStatus) << server.log();
  EXPECT_THAT(server.log(), AllOf(HasSubstr("event=engine_stuck"), HasSubstr("work=Compute"), HasSubstr("method=ComputeLoss"),
                                  HasSubstr("request_id="), HasSubstr("head=tenants/default/heads/"),
                                  HasSubstr("event=engine_lost"), HasSubstr("not every call was answered")));
  call.join();
}

// A call that never comes back from the device: the process ends when the grace is over, not before, and not much later.
TEST_F(CudaModule, TheGraceIsALimit) {
  for (const double grace : {0.0, 1.5}) {
    ServerProcess server({"--engine=cuda", "--device_lost_grace=" + std::to_string(grace) + "s"});
    client::Client client = server.Connect();
    client::Head head = CreateHead(client, "h", kSpec);
    const auto start = steady_clock::now();
    std::thread call([&] { EXPECT_FALSE(Compute(head, 15).ok()); });
    EXPECT_EQ(server.process().Wait(), kDeviceLostStatus) << server.log();
    const double took = duration<double>(steady_clock::now() - start).count();
    EXPECT_GE(took, grace);
    EXPECT_LE(took, grace + 5.0);
    EXPECT_THAT(server.log(), HasSubstr("not every call was answered"));
    call.join();
  }
}

// ---- an engine that is held in its middle -------------------------------------------------------------------------------

class HeldModule : public CudaModule {
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
    client::Head head =
        CreateHead(client, "h", {.vocab_size = 12, .hidden_size = 4, .trainable = true, .optimizer = client::AdamW{}});
    Value(SubmitRandom(head, 5, {.step = 0, .micro_batch = 0}));
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
