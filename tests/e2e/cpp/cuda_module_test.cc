// headwaterd with the CUDA engine's module: how it is found and chosen, and how the process ends when the device is lost. A
// stand-in for the module (tests/integration/support/fake_cuda_module.cc) makes this possible without a GPU.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "headwater/client/client.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

using std::chrono::duration;
using std::chrono::seconds;
using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int kDeviceLostStatus = 75;
constexpr int64_t kVocabSize = 11;
constexpr int64_t kHiddenSize = 4;

client::Head MakeHead(client::Client& client) {
  return CreateHead(client, "h", {.vocab_size = kVocabSize, .hidden_size = kHiddenSize},
                    RandomFloats(1, kVocabSize * kHiddenSize, 0.3F));
}

absl::Status Compute(client::Head& head, int64_t row_count) {
  const std::vector<float> rows = RandomFloats(2, row_count * kHiddenSize, 1.0F);
  client::MicroBatchOptions options = {.forward_only = true};
  return head
      .CrossEntropy(client::RowsView::Float32(rows, kHiddenSize), std::vector<int32_t>(static_cast<size_t>(row_count), 1), {},
                    options)
      .Get()
      .status();
}

// What `headwaterd FLAGS` says when it does not start.
ProgramResult Refused(std::vector<std::string> flags) {
  flags.insert(flags.begin(), HEADWATERD);
  flags.push_back("--listen_addresses=unix:/nonexistent-folder/socket");  // were it to start, it would end here
  flags.push_back("--metrics_address=");
  return RunProgram(flags);
}

TEST(CudaModule, AutoFallsBackAndSaysWhy) {
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

TEST(CudaModule, EngineCudaFailsWithOneSentence) {
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
TEST(CudaModule, TheRealOneIsLoadedWhateverTheMachineHas) {
  const EnvironmentVariable module("HEADWATER_CUDA_MODULE", REAL_CUDA_MODULE);
  const ProgramResult result = Refused({"--engine=cuda"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, AnyOf(HasSubstr("headwaterd: --engine=cuda: the CUDA engine cannot be used here: "),
                                HasSubstr("headwaterd: cannot listen on all of the addresses")));
}
#endif

TEST(CudaModule, WhatIsWrongWithTheOptionsIsNoReasonToFallBack) {
  const EnvironmentVariable module("HEADWATER_CUDA_MODULE", FAKE_CUDA_MODULE);
  const ProgramResult result = Refused({"--engine=auto", "--device=9"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("--engine=auto: device_index must be in [0, 9), got 9"));
}

TEST(CudaModule, TheEngineIsToldItsOptionsAndTellsItsDeviceAndPlan) {
  const EnvironmentVariable module("HEADWATER_CUDA_MODULE", FAKE_CUDA_MODULE);
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
    client::HeadSpec spec = {.vocab_size = kVocabSize, .hidden_size = kHiddenSize};
    EXPECT_EQ(Value(client.PlanHead("h", spec)).memory_plan.token_chunk_rows, 4321);  // the chosen engine's plan
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
  const std::string file = testing::TempDir() + "a_file";
  EXPECT_EQ(model("--algorithm_cache=" + file), "Fake GPU, cache " + file + ", timed");
}

// What computes wrong is never SERVING: the self-test ends the process before anybody is told where it listens.
TEST(CudaModule, AnEngineThatFailsItsSelfTestDoesNotServe) {
  const EnvironmentVariable module("HEADWATER_CUDA_MODULE", FAKE_CUDA_MODULE);
  const ProgramResult result =
      RunProgram({HEADWATERD, "--engine=cuda", "--device=6", "--listen_addresses=127.0.0.1:0", "--metrics_address="});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("event=self_test_failed"), HasSubstr("headwaterd: self-test: "), HasSubstr("should be 1.28")));
  EXPECT_THAT(result.err, ::testing::Not(HasSubstr("event=serving")));
  EXPECT_THAT(result.out, ::testing::Not(HasSubstr("listening on")));
}

// 13 rows: the engine tells that its device is lost. 14: only its health() says so.
TEST(CudaModule, ADeviceThatIsLostEndsTheProcess) {
  const EnvironmentVariable module("HEADWATER_CUDA_MODULE", FAKE_CUDA_MODULE);
  for (const int64_t rows : {13, 14}) {
    ServerProcess server({"--engine=cuda", "--device_lost_grace=60s"});
    client::Client client = server.Connect();
    client::Head head = MakeHead(client);
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
TEST(CudaModule, AnEngineThatIsStuckEndsTheProcess) {
  const EnvironmentVariable module("HEADWATER_CUDA_MODULE", FAKE_CUDA_MODULE);
  ServerProcess server({"--engine=cuda", "--engine_stall_timeout=3s", "--device_lost_grace=1s"});
  client::Client client = server.Connect();
  client::Head head = MakeHead(client);
  std::thread call([&] { EXPECT_FALSE(Compute(head, 16).ok()); });
  EXPECT_EQ(server.process().Wait(), kDeviceLostStatus) << server.log();
  EXPECT_THAT(server.log(), AllOf(HasSubstr("event=engine_stuck"), HasSubstr("work=Compute"), HasSubstr("method=ComputeLoss"),
                                  HasSubstr("request_id="), HasSubstr("head=tenants/default/heads/"),
                                  HasSubstr("event=engine_lost"), HasSubstr("not every call was answered")));
  call.join();
}

// A call that never comes back from the device: the process ends when the grace is over, not before, and not much later.
TEST(CudaModule, TheGraceIsALimit) {
  const EnvironmentVariable module("HEADWATER_CUDA_MODULE", FAKE_CUDA_MODULE);
  for (const double grace : {0.0, 1.5}) {
    ServerProcess server({"--engine=cuda", "--device_lost_grace=" + std::to_string(grace) + "s"});
    client::Client client = server.Connect();
    client::Head head = MakeHead(client);
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

}  // namespace
}  // namespace headwater::e2e
