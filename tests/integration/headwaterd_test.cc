// The program itself: flags, documents printed from it, ports, signals.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "headwater/v1/head_service.grpc.pb.h"
#include "headwater/v1/loss_service.grpc.pb.h"
#include "headwater/v1/session_service.grpc.pb.h"
#include "tests/e2e/cpp/support/await.h"
#include "tests/e2e/cpp/support/child_process.h"
#include "tests/integration/support/open_stream.h"

namespace headwater::testing {
namespace {

using e2e::ChildProcess;
using e2e::EnvironmentVariable;
using e2e::ReadFile;
using e2e::TemporaryDirectory;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::StartsWith;

class Headwaterd : public ::testing::Test {
 protected:
  // Starts headwaterd, by `program`; stdout and stderr go into files.
  void Start(const std::vector<std::string>& flags, std::vector<std::string> program = {HEADWATERD_PROGRAM}) {
    program.insert(program.end(), flags.begin(), flags.end());
    std::filesystem::remove(Path("err"));
    std::filesystem::remove(Path("ports"));
    process_.emplace(program, Path("out"), Path("err"));
  }
  // The same with a socket of its own, where it must listen.
  void Serve(std::vector<std::string> flags, const std::vector<std::string>& program = {HEADWATERD_PROGRAM}) {
    flags.insert(flags.end(), {"--listen_addresses=" + socket_, "--metrics_address=", "--port_file=" + Path("ports")});
    Start(flags, program);
    EXPECT_THAT(Addresses(), ElementsAre(socket_)) << Err();
  }
  // Exit status of the program, which must end by itself.
  int Wait() { return process_->Wait(); }
  int Run(const std::vector<std::string>& flags) {
    Start(flags);
    return Wait();
  }
  void Stop(int signal_number = SIGTERM) {
    process_->Signal(signal_number);
    EXPECT_EQ(Wait(), 0) << Err();
  }
  // Addresses in the port file, once it is there.
  std::vector<std::string> Addresses() {
    e2e::Await([&] { return std::filesystem::exists(Path("ports")); });
    std::vector<std::string> addresses;
    std::ifstream file(Path("ports"));
    for (std::string line; std::getline(file, line);) addresses.push_back(line);
    return addresses;
  }
  std::string Path(const std::string& name) const { return folder_.path() + "/" + name; }
  std::string Out() const { return ReadFile(Path("out")); }
  std::string Err() const { return ReadFile(Path("err")); }

  const EnvironmentVariable module_{"HEADWATER_CUDA_MODULE",
                                    "/nonexistent-folder/module.so"};  // the CPU, whatever this machine has
  const TemporaryDirectory folder_;
  const std::string socket_ = "unix:" + Path("socket");
  std::optional<ChildProcess> process_;
};

TEST_F(Headwaterd, TellsItsVersion) {
  EXPECT_EQ(Run({"--version"}), 0);
  EXPECT_EQ(Out(), "headwaterd " HEADWATER_VERSION "\n");
}

TEST_F(Headwaterd, HelpsWithItsOwnFlags) {
  EXPECT_EQ(Run({"--shards=2", "--help"}), 0);
  const std::string help = Out();
  EXPECT_THAT(help, StartsWith("headwaterd [flags]: serves LM heads"));
  EXPECT_THAT(help, HasSubstr("\n\nEngine\n\n"));    // a section
  EXPECT_THAT(help, HasSubstr("\n  --shards=1\n"));  // with defaults
  // Each flag once, none of a library's, and no line that a terminal breaks.
  EXPECT_EQ(help.find("  --load_root="), help.rfind("  --load_root="));
  EXPECT_THAT(help, Not(HasSubstr("--flagfile=\n")));
  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), line.find("  --") == 0 ? 200U : 132U) << line;
  EXPECT_EQ(Run({"--shards=two"}), 1);
  EXPECT_THAT(Err(), HasSubstr("--help"));
}

// A container's processors are often fewer than the machine's.
TEST_F(Headwaterd, ComputesOnTheProcessorsThatItMayUse) {
  const std::string taskset = "/usr/bin/taskset";
  if (!std::filesystem::exists(taskset)) GTEST_SKIP() << taskset << " is not there";
  for (const std::string& group : {std::string("--shards=1"), std::string("--workers=1")}) {
    // The first processor that this process may use.
    cpu_set_t mask;
    ASSERT_EQ(sched_getaffinity(0, sizeof(mask), &mask), 0);
    int first = 0;
    while (!CPU_ISSET(first, &mask)) ++first;
    Serve({group, "--engine=cpu"}, {taskset, "--cpu-list", std::to_string(first), HEADWATERD_PROGRAM});
    EXPECT_THAT(Err(), HasSubstr(" threads=1 "));
    Stop();
  }
}

TEST_F(Headwaterd, ServesUntilItIsToldToStop) {
  for (const int signal_number : {SIGTERM, SIGINT, SIGHUP}) {
    Start({"--listen_addresses=127.0.0.1:0," + socket_, "--metrics_address=127.0.0.1:0", "--shards=2", "--shard_weights=1,2",
           "--threads=2", "--log_format=json", "--port_file=" + Path("ports")});
    const std::vector<std::string> addresses = Addresses();
    ASSERT_THAT(addresses, ElementsAre(MatchesRegex("127.0.0.1:[1-9][0-9]*"), socket_)) << Err();
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
    Stop(signal_number);
    EXPECT_THAT(Out(), HasSubstr("listening on " + addresses[0]));
    EXPECT_THAT(Err(), HasSubstr("\"event\":\"drained\",\"clean\":true}"));
  }
}

// A signal that no thread waits for stays where it is until the main thread does: one that another thread took would end the
// process.
TEST_F(Headwaterd, TakesSignalsInItsMainThreadAlone) {
  const EnvironmentVariable threads("OPENBLAS_NUM_THREADS", "2");  // of the library's own, from before main()
  Serve({});
  int others = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(process_->pid()) + "/task")) {
    if (task.path().filename() == std::to_string(process_->pid())) continue;
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
  Stop();
}

// Sanitizers allocate in ways of their own.
#if !defined(HEADWATER_SANITIZED)
TEST_F(Headwaterd, RefusesPlannedMemoryAndEndsWithoutAnyOther) {
  constexpr int64_t kRows = int64_t{1} << 23;
  const std::string terabyte = std::to_string(int64_t{1} << 40);
  Serve({"--engine=cpu", "--threads=1", "--memory_budget_bytes=" + terabyte, "--max_join_bytes=" + terabyte,
         "--max_micro_batch_rows=" + std::to_string(kRows), "--max_message_bytes=" + std::to_string(32 * kRows)});
  // As `ulimit -v` would: so much and a quarter of a gibibyte.
  const std::string status = ReadFile("/proc/" + std::to_string(process_->pid()) + "/status");
  const size_t size = status.find("VmSize:");
  ASSERT_NE(size, std::string::npos);
  const rlim_t bytes = (rlim_t{std::stoull(status.substr(size + 7))} << 10) + (rlim_t{256} << 20);
  const rlimit limit = {bytes, bytes};
  ASSERT_EQ(prlimit(process_->pid(), RLIMIT_AS, &limit, nullptr), 0);

  const auto channel = grpc::CreateChannel(socket_, grpc::InsecureChannelCredentials());
  const auto heads = v1::HeadService::NewStub(channel);
  v1::CreateHeadRequest wanted;
  wanted.mutable_spec()->set_data_type(v1::DATA_TYPE_FLOAT32);
  wanted.mutable_spec()->set_hidden_size(8);
  v1::CreateHeadResponse created;
  const auto create = [&](const std::string& name, int64_t vocab_size) {
    grpc::ClientContext context;
    wanted.set_name("tenants/default/heads/" + name);
    wanted.mutable_spec()->set_vocab_size(vocab_size);
    return heads->CreateHead(&context, wanted, &created);
  };
  const grpc::Status refused = create("large", int64_t{1} << 24);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << refused.error_message();
  EXPECT_THAT(refused.error_message(), HasSubstr("the system refused"));
  EXPECT_TRUE(create("small", 8).ok());

  // Each row of a set that is announced takes a little.
  TeacherStream stream(*v1::LossService::NewStub(channel), TeacherHeader("key", kRows, 8));
  EXPECT_EQ(Wait(), 71) << Err();
  EXPECT_EQ(stream.End().error_code(), grpc::StatusCode::UNAVAILABLE);
  const std::string log = Err();
  const size_t line = log.find(" level=error event=out_of_memory ");
  ASSERT_NE(line, std::string::npos) << log;
  EXPECT_EQ(log.find('\n', line) + 1, log.size()) << log;
}
#endif

TEST_F(Headwaterd, ReadsItsFlagsFromAFile) {
  std::ofstream(Path("flags")) << "--listen_addresses=" << socket_ << "\n--metrics_address=\n--port_file=" << Path("ports") << "\n";
  Start({"--flagfile=" + Path("flags")});
  EXPECT_THAT(Addresses(), ElementsAre(socket_)) << Err();
  Stop();
}

// Flags, separated by spaces, and part of what is said of them before anything is served.
struct Refusal {
  std::string flags;
  std::string sentence;
};

TEST_F(Headwaterd, RefusesWhatItCannotDoWithOneSentence) {
  const std::string file = Path("file");
  std::ofstream(file) << "x";
  const std::string join = "--join=127.0.0.1:1 ";
  const std::vector<Refusal> refusals = {
      {"--engine=cuda", "--engine=cuda: the CUDA engine cannot be had"},
      {"--engine=tpu", "expected auto, cpu or cuda, got \"tpu\""},
      {"--shards=0", "--shards: expected >= 1, got 0"},
      {"--threads=-1", "--threads: expected >= 0, got -1"},
      {"--max_threads=7", "max_threads: expected at least 8, got 7"},
      {"--max_metadata_bytes=1023", "max_metadata_bytes: expected at least 1024"},
      {"--idle_head_checkpoint", "idle_head_checkpoint: expected a checkpoint_directory"},
      {"--max_step_wait=0", "max_step_wait: expected at least 1ns, got 0"},
      {"--shards=2 --shard_weights=1", "--shard_weights: expected 2 numbers"},
      {"--max_heads=0", "max_heads: expected at least 1, got 0"},
      {"--worker_token=worker", "--worker_token: expected --workers and --token_file with it"},
      {"--workers=1 --token_file=/nonexistent", "--worker_token: expected the name of a token"},
      {"--workers=2 --max_threads=9", "--max_threads: expected at least 10"},
      {"--workers=1 --engine_stall_timeout=9999ms",
       "--engine_stall_timeout: expected 0, or with --workers at least 2 times --rank_timeout, 10s, got 9.999s"},
      {"--workers=1 --min_ping_interval=30001ms",
       "--min_ping_interval: expected at most 30s with --workers, which ping every 1m, got 30.001s"},
      {"--workers=1 --max_message_bytes=1048575", "--max_message_bytes: expected at least 1048576"},
      {join + "--tls_certificate=a", "--tls_certificate and --tls_key: expected both"},
      {join + "--tls_certificate=a --tls_key=b", "expected --join_ca with it"},
      {"--workers=1 --engine=cuda", "--engine=cuda: the CUDA engine cannot be had"},
      {"--workers=1 --engine=tpu", "--engine: expected auto, cpu or cuda, got \"tpu\""},
      {"--workers=1 --gpus=2", "--gpus: expected --engine=cuda with more than one"},
      {"--engine=auto --gpus=2", "--gpus: expected --engine=cuda with more than one"},
      {"--engine=cuda --gpus=0", "--gpus: expected 1 to 64, got 0"},
      {"--engine=cuda --gpus=2 --shards=2", "--gpus: expected --shards=1 with more than one"},
      {"--workers=193 --gpus=64 --engine=cuda", "--workers: expected at most 256 together with --gpus, got 193 and 64"},
      {join + "--engine=tpu", "--engine: expected auto, cpu or cuda, got \"tpu\""},
      {join + "--gpus=2", "--gpus: expected --engine=cuda with more than one"},
      {join + "--gpus=65 --engine=cuda", "--gpus: expected 1 to 64, got 65"},
      {join + "--device=-1", "--device: expected >= 0, got -1"},
      {join + "--device_lost_grace=-1s", "--device_lost_grace: expected a duration from 0 to 1h"},
      {join + "--device_lost_grace=inf", "--device_lost_grace: expected a duration from 0 to 1h"},
      {join + "--device_lost_grace=61m", "--device_lost_grace: expected a duration from 0 to 1h"},
      {"--drain_timeout=0", "--drain_timeout: expected a duration > 0, got 0"},
      {"--metrics_address=127.0.0.1:65536", "expected host:port, with a port from 0 to 65535, got '127.0.0.1:65536'"},
      {"--log_level=loud", "expected debug, info, warning, error or off"},
      {"--listen_addresses=unix:/nonexistent-folder/s", "cannot listen"},
      {"word", "unexpected argument \"word\""},
      // Paths: before heads are brought back, and not as late as the first call that needs the path.
      {"--load_root=/nosuch", "load_root: expected a folder that can be read, got /nosuch: No such file"},
      {"--load_root=" + file, "got " + file + ": Not a directory"},
      {"--port_file=/nosuch/ports", "--port_file: cannot write into the folder of /nosuch/ports: No such"},
      {"--port_file=" + folder_.path(), "--port_file: cannot write " + folder_.path() + ": Is a directory"},
      {"--engine=auto --algorithm_cache=/nosuch/a.json", "--algorithm_cache: cannot write into the folder"},
      {"--checkpoint_directory=" + file + "/c", file},
      {"--trace_dir=" + file + "/t", "trace_dir: cannot use " + file + "/t"},
      {"--token_file=/nosuch", "/nosuch"},
      {"--tls_certificate=/nosuch.crt --tls_key=/nosuch.key", "/nosuch.crt"},
      {"--descriptor_socket=/nosuch/s", "/nosuch/s"},
      {join + "--join_ca=/nosuch", "--join_ca: cannot read /nosuch: No such file"},
      {join + "--join_token_file=/nosuch", "--join_token_file: cannot read /nosuch"},
      {join + "--join_ca=" + file + " --tls_certificate=/nosuch --tls_key=" + file, "--tls_certificate: cannot read /nosuch"},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.flags);
    std::vector<std::string> flags = {"--listen_addresses=" + socket_, "--metrics_address="};
    std::istringstream words(refusal.flags);
    for (std::string flag; words >> flag;) flags.push_back(flag);
    EXPECT_EQ(Run(flags), 1);
    EXPECT_THAT(Err(), AllOf(HasSubstr(refusal.sentence), Not(HasSubstr("event=serving"))));
  }
}

TEST_F(Headwaterd, PrintsTheDocumentsThatAreCheckedIn) {
  ASSERT_EQ(Run({"--print_metrics_doc"}), 0);
  EXPECT_EQ(Out(), ReadFile(HEADWATER_DOCS "/metrics.md")) << "run headwaterd --print_metrics_doc > docs/metrics.md";
  ASSERT_EQ(Run({"--print_flags_doc"}), 0);
  EXPECT_THAT(ReadFile(HEADWATER_DOCS "/flags.md"), HasSubstr("compares -->\n" + Out() + "<!-- end of flags -->"))
      << "put what headwaterd --print_flags_doc prints into docs/flags.md";
  EXPECT_THAT(Out(), HasSubstr("| `--max_queue_depth` | `64` |"));
}

}  // namespace
}  // namespace headwater::testing
