// What probes are told in every state of a server: by grpc.health.v1.Health, as the kubelet asks it, of the server as a whole and
// of each service, and by `headwaterctl health`, whose exit status a probe with a command goes by. The table is in
// docs/operations.md.
//
// The engine is the stand-in for the CUDA module (tests/integration/support/fake_cuda_module.cc), which can be held.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/e2e/cpp/support/await.h"
#include "tests/e2e/cpp/support/child_process.h"
#include "tests/e2e/cpp/support/held_module.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/integration/support/raw_call.h"

namespace headwater::e2e {
namespace {

// grpc.health.v1.HealthCheckResponse.ServingStatus, or that nobody answers.
enum Answer { kNobody = -1, kServing = 1, kNotServing = 2 };

const std::vector<std::string>& Services() {
  static const std::vector<std::string> services = {"", "headwater.v1.LossService", "headwater.v1.HeadService",
                                                    "headwater.v1.SessionService", "headwater.v1.GroupService"};
  return services;
}

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
  for (const std::string& service : Services()) EXPECT_EQ(Kubelet(target, service), answer) << service;
  const ProgramResult command = Command(target);
  EXPECT_EQ(command.exit_code, answer == kServing ? 0 : 1) << command.out << command.err;
  EXPECT_EQ(command.out, answer == kServing ? "SERVING\n" : answer == kNotServing ? "NOT_SERVING\n" : "");
}

bool AwaitAnswer(const std::string& target, Answer answer) {
  return Await([&] { return Kubelet(target) == answer; });
}

using Probes = HeldModule;

// The self-test is held in its middle: the server listens, and says that it does not serve. Then it passes, or fails.
TEST_F(Probes, TellOfTheSelfTest) {
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
  // It begins anew in its own place: between two answers there may be none.
  EXPECT_TRUE(AwaitAnswer(server.target(), kNotServing)) << server.log();
  EXPECT_TRUE(Await([&] { return Command(server.target()).out == "NOT_SERVING\n"; }));
  EXPECT_TRUE(server.process().Running());
  // Nothing but another worker helps.
  EXPECT_NE(Kubelet(server.target()), kServing);
  server.StartWorker(1);
  EXPECT_TRUE(AwaitAnswer(server.target(), kServing)) << server.log();
  ExpectAll(server.target(), kServing);
}

}  // namespace
}  // namespace headwater::e2e
