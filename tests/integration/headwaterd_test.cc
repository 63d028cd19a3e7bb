// The program itself: flags, documents printed from it, ports, signals.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "headwater/v1/head_service.grpc.pb.h"
#include "headwater/v1/session_service.grpc.pb.h"

extern char** environ;

namespace headwater::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream contents;
  contents << file.rdbuf();
  return contents.str();
}

// A variable of the environment that programs are started with.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) {
    if (const char* const former = getenv(name)) former_ = former;
    setenv(name, value, 1);
  }
  ~ScopedVariable() { former_.has_value() ? setenv(name_, former_->c_str(), 1) : unsetenv(name_); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  const char* const name_;
  std::optional<std::string> former_;
};

class Headwaterd : public ::testing::Test {
 protected:
  Headwaterd() {
    setenv("HEADWATER_CUDA_MODULE", "/nonexistent-folder/module.so", 1);  // the CPU, whatever this machine has
    std::string pattern = (std::filesystem::temp_directory_path() / "headwaterd-test-XXXXXX").string();
    directory_ = mkdtemp(pattern.data());
  }
  ~Headwaterd() override {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }
  // Starts the program; stdout and stderr go into files.
  void Start(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), HEADWATERD_PROGRAM);
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    for (const auto& [descriptor, name] : {std::pair(1, "/out"), std::pair(2, "/err")}) {
      posix_spawn_file_actions_addopen(&actions, descriptor, (directory_ + name).c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
    }
    ASSERT_EQ(posix_spawn(&pid_, pointers[0], &actions, nullptr, pointers.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
  }
  // Exit status of the program, which must end by itself within 20 s; -1 if it does not.
  int Wait() {
    for (int i = 0; i < 2000; ++i) {
      int status = 0;
      if (waitpid(pid_, &status, WNOHANG) == pid_) {
        pid_ = 0;
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return -1;
  }
  int Run(const std::vector<std::string>& arguments) {
    Start(arguments);
    return Wait();
  }
  // Addresses in the port file, once it is there.
  std::vector<std::string> Addresses(const std::string& port_file) {
    for (int i = 0; i < 2000 && !std::filesystem::exists(port_file); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::vector<std::string> addresses;
    std::ifstream file(port_file);
    for (std::string line; std::getline(file, line);) addresses.push_back(line);
    return addresses;
  }
  std::string Out() const { return ReadFile(directory_ + "/out"); }
  std::string Err() const { return ReadFile(directory_ + "/err"); }

  std::string directory_;
  pid_t pid_ = 0;
};

TEST_F(Headwaterd, TellsItsVersion) {
  EXPECT_EQ(Run({"--version"}), 0);
  EXPECT_EQ(Out(), "headwaterd " HEADWATER_VERSION "\n");
}

TEST_F(Headwaterd, HelpsWithItsOwnFlags) {
  EXPECT_EQ(Run({"--help"}), 1);  // Abseil's
  EXPECT_THAT(Out(), HasSubstr("Flags from server/main.cc:"));
  EXPECT_THAT(Out(), HasSubstr("--listen_addresses"));
  EXPECT_THAT(Out(), HasSubstr("--workspace_bytes"));
}

TEST_F(Headwaterd, ServesUntilItIsToldToStop) {
  for (const int signal_number : {SIGTERM, SIGINT, SIGHUP}) {
    const std::string port_file = directory_ + "/ports" + std::to_string(signal_number);
    Start({"--listen_addresses=127.0.0.1:0,unix:" + directory_ + "/socket", "--metrics_address=127.0.0.1:0", "--shards=2",
           "--shard_weights=1,2", "--threads=2", "--log_format=json", "--port_file=" + port_file});
    const std::vector<std::string> addresses = Addresses(port_file);
    ASSERT_THAT(addresses, ElementsAre(MatchesRegex("127.0.0.1:[1-9][0-9]*"), "unix:" + directory_ + "/socket")) << Err();
    for (const std::string& address : addresses) {
      const auto stub = v1::SessionService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
      grpc::ClientContext context;
      v1::ServerInfo info;
      ASSERT_TRUE(stub->GetServerInfo(&context, {}, &info).ok());
      EXPECT_EQ(info.engine(), "cpu");
      EXPECT_THAT(info.engine_note(), HasSubstr("CUDA"));
      EXPECT_EQ(info.version(), HEADWATER_VERSION);
    }
    const auto heads = v1::HeadService::NewStub(grpc::CreateChannel(addresses[0], grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    v1::CreateHeadRequest request;
    request.set_name("tenants/default/heads/h");
    request.mutable_spec()->set_vocab_size(9);
    request.mutable_spec()->set_hidden_size(2);
    request.mutable_spec()->set_data_type(v1::DATA_TYPE_FLOAT32);
    v1::CreateHeadResponse response;
    ASSERT_TRUE(heads->CreateHead(&context, request, &response).ok());
    ASSERT_EQ(response.head().shards_size(), 2);
    EXPECT_EQ(response.head().shards(0).vocab_end(), 3);
    EXPECT_EQ(response.head().shards(1).vocab_end(), 9);
    ASSERT_EQ(kill(pid_, signal_number), 0);
    EXPECT_EQ(Wait(), 0) << Err();
    EXPECT_THAT(Out(), HasSubstr("listening on " + addresses[0]));
    EXPECT_THAT(Err(), HasSubstr("\"event\":\"drained\",\"clean\":true}"));
  }
}

// A signal that no thread waits for stays where it is until the main thread does: one that another thread took would end the
// process.
TEST_F(Headwaterd, TakesSignalsInItsMainThreadAlone) {
  const ScopedVariable threads("OPENBLAS_NUM_THREADS", "2");  // of the library's own, from before main()
  Start({"--listen_addresses=unix:" + directory_ + "/socket", "--metrics_address=", "--port_file=" + directory_ + "/ports"});
  ASSERT_EQ(Addresses(directory_ + "/ports").size(), 1U) << Err();
  int others = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(pid_) + "/task")) {
    if (task.path().filename() == std::to_string(pid_)) continue;
    const std::string status = ReadFile(task.path() / "status");
    const size_t line = status.find("SigBlk:");
    if (line == std::string::npos) continue;  // it has ended meanwhile
    ++others;
    const unsigned long long blocked = std::stoull(status.substr(line + 7), nullptr, 16);
    for (const int signal_number : {SIGTERM, SIGINT, SIGUSR2}) {
      EXPECT_NE(blocked >> (signal_number - 1) & 1, 0U) << signal_number << "\n" << status;
    }
  }
  EXPECT_GT(others, 0);
  ASSERT_EQ(kill(pid_, SIGTERM), 0);
  EXPECT_EQ(Wait(), 0);
}

TEST_F(Headwaterd, ReadsItsFlagsFromAFile) {
  std::ofstream(directory_ + "/flags") << "--listen_addresses=unix:" << directory_ << "/socket\n--metrics_address=\n--max_heads=7\n"
                                       << "--port_file=" << directory_ << "/ports\n";
  Start({"--flagfile=" + directory_ + "/flags"});
  ASSERT_EQ(Addresses(directory_ + "/ports").size(), 1U) << Err();
  const auto stub =
      v1::SessionService::NewStub(grpc::CreateChannel("unix:" + directory_ + "/socket", grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::ServerInfo info;
  ASSERT_TRUE(stub->GetServerInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.limits().max_heads(), 7);
  ASSERT_EQ(kill(pid_, SIGTERM), 0);
  EXPECT_EQ(Wait(), 0);
}

TEST_F(Headwaterd, RefusesWhatItCannotDoWithOneSentence) {
  const auto refused = [&](const std::vector<std::string>& arguments) {
    EXPECT_EQ(Run(arguments), 1);
    return Err();
  };
  EXPECT_THAT(refused({"--engine=cuda"}), HasSubstr("--engine=cuda: the CUDA engine cannot be had"));
  EXPECT_THAT(refused({"--engine=tpu"}), HasSubstr("expected auto, cpu or cuda, got \"tpu\""));
  EXPECT_THAT(refused({"--shards=0"}), HasSubstr("--shards: expected >= 1, got 0"));
  EXPECT_THAT(refused({"--threads=-1"}), HasSubstr("--threads: expected >= 0, got -1"));
  EXPECT_THAT(refused({"--max_threads=7"}), HasSubstr("--max_threads: expected >= 8, got 7"));
  EXPECT_THAT(refused({"--max_metadata_bytes=1023"}), HasSubstr("max_metadata_bytes: expected at least 1024"));
  EXPECT_THAT(refused({"--idle_head_checkpoint"}), HasSubstr("idle_head_checkpoint: expected a checkpoint_directory"));
  EXPECT_THAT(refused({"--max_step_wait=0"}), HasSubstr("max_step_wait: expected a duration > 0"));
  EXPECT_THAT(refused({"--shards=2", "--shard_weights=1"}), HasSubstr("--shard_weights: expected 2 numbers"));
  EXPECT_THAT(refused({"--max_heads=0"}), HasSubstr("max_heads: expected at least 1, got 0"));
  EXPECT_THAT(refused({"--max_stripes=0"}), HasSubstr("max_stripes: expected at least 1, got 0"));
  EXPECT_THAT(refused({"--max_stripe_wait=0"}), HasSubstr("max_stripe_wait: expected a duration > 0"));
  EXPECT_THAT(refused({"--max_join_wait=-1s"}), HasSubstr("max_join_wait: expected a duration > 0"));
  EXPECT_THAT(refused({"--max_join_bytes=-1"}), HasSubstr("max_join_bytes: expected at least 0, got -1"));
  EXPECT_THAT(refused({"--max_threads=1"}), HasSubstr("--max_threads"));
  EXPECT_THAT(refused({"--worker_token=worker"}), HasSubstr("--worker_token: expected --workers and --token_file with it"));
  EXPECT_THAT(refused({"--workers=1", "--token_file=/nonexistent"}), HasSubstr("--worker_token: expected the name of a token"));
  EXPECT_THAT(refused({"--workers=2", "--max_threads=9"}), HasSubstr("--max_threads: expected at least 10"));
  EXPECT_THAT(refused({"--workers=1", "--engine_stall_timeout=9999ms"}),
              HasSubstr("--engine_stall_timeout: expected 0, or with --workers at least 2 times --rank_timeout, 10s, got 9.999s"));
  EXPECT_THAT(refused({"--workers=1", "--min_ping_interval=30001ms"}),
              HasSubstr("--min_ping_interval: expected at most 30s with --workers, which ping every 1m, got 30.001s"));
  EXPECT_THAT(refused({"--workers=1", "--max_message_bytes=1048575"}), HasSubstr("--max_message_bytes: expected at least 1048576"));
  EXPECT_THAT(refused({"--join=127.0.0.1:1", "--tls_certificate=a"}), HasSubstr("--tls_certificate and --tls_key: expected both"));
  EXPECT_THAT(refused({"--join=127.0.0.1:1", "--tls_certificate=a", "--tls_key=b"}), HasSubstr("expected --join_ca with it"));
  EXPECT_THAT(refused({"--workers=1", "--engine=cuda"}), HasSubstr("--engine=cuda: the CUDA engine cannot be had"));
  EXPECT_THAT(refused({"--workers=1", "--engine=tpu"}), HasSubstr("--engine: expected auto, cpu or cuda, got \"tpu\""));
  EXPECT_THAT(refused({"--workers=1", "--gpus=2"}), HasSubstr("--gpus: expected --engine=cuda with more than one"));
  EXPECT_THAT(refused({"--workers=193", "--gpus=64", "--engine=cuda"}),
              HasSubstr("--workers: expected at most 256 together with --gpus, got 193 and 64"));
  EXPECT_THAT(refused({"--join=127.0.0.1:1", "--engine=tpu"}), HasSubstr("--engine: expected auto, cpu or cuda, got \"tpu\""));
  EXPECT_THAT(refused({"--join=127.0.0.1:1", "--gpus=2"}), HasSubstr("--gpus: expected --engine=cuda with more than one"));
  EXPECT_THAT(refused({"--join=127.0.0.1:1", "--gpus=65", "--engine=cuda"}), HasSubstr("--gpus: expected 1 to 64, got 65"));
  EXPECT_THAT(refused({"--join=127.0.0.1:1", "--device=-1"}), HasSubstr("--device: expected >= 0, got -1"));
  EXPECT_THAT(refused({"--drain_timeout=0"}), HasSubstr("--drain_timeout: expected a duration > 0, got 0"));
  EXPECT_THAT(refused({"--listen_addresses=unix:" + directory_ + "/s", "--metrics_address=127.0.0.1:65536"}),
              HasSubstr("expected host:port, with a port from 0 to 65535, got '127.0.0.1:65536'"));
  EXPECT_THAT(refused({"--join=127.0.0.1:1", "--device_lost_grace=61m"}),
              HasSubstr("--device_lost_grace: expected a duration from 0 to 1h"));
  EXPECT_THAT(refused({"--log_level=loud"}), HasSubstr("expected debug, info, warning, error or off"));
  EXPECT_THAT(refused({"--listen_addresses=unix:/nonexistent-folder/s", "--metrics_address="}), HasSubstr("cannot listen"));
  EXPECT_THAT(refused({"word"}), HasSubstr("unexpected argument \"word\""));
}

TEST_F(Headwaterd, PrintsTheDocumentsThatAreCheckedIn) {
  ASSERT_EQ(Run({"--print_metrics_doc"}), 0);
  EXPECT_EQ(Out(), ReadFile(HEADWATER_DOCS "/metrics.md")) << "run headwaterd --print_metrics_doc > docs/metrics.md";
  ASSERT_EQ(Run({"--print_flags_doc"}), 0);
  EXPECT_THAT(ReadFile(HEADWATER_DOCS "/operations.md"), HasSubstr("compares -->\n" + Out() + "<!-- end of flags -->"))
      << "put what headwaterd --print_flags_doc prints into docs/operations.md";
  EXPECT_THAT(Out(), HasSubstr("| `--max_queue_depth` | `64` |"));
}

}  // namespace
}  // namespace headwater::testing
