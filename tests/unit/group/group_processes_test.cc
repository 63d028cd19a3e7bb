// Groups of processes with several ranks each, as those with several GPUs: who is which rank, who is refused, and what becomes of
// ranks that wait for one that fails while the engines are made. CPU engines stand in for those on GPUs.
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "headwater/kernels/communicator.h"
#include "headwater/kernels/error.h"
#include "server/group/engines_together.h"
#include "server/group/ranks/rank_codec.h"
#include "server/group/ranks/rank_worker.h"
#include "tests/kernels/support/engine_run.h"
#include "tests/kernels/support/problem.h"
#include "tests/unit/expect_status.h"
#include "tests/unit/forwarding_engine.h"
#include "tests/unit/group/local_cpu_group.h"
#include "tests/unit/group/worker_threads.h"

namespace headwater::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kGroupId[] = "the id of a group";

absl::Status NoRoom() { return MakeError(ErrorReason::kInvalidField, "there is no room here"); }

// As engines on GPUs do that meet on the device: until the others have come, or one of them has given up.
MadeEngine WaitForTheOthers(const EngineOptions& options) {
  EXPECT_TRUE(Await([&] { return !options.group.communicator->status().ok(); }));
  return options.group.communicator->status();
}

// Two ranks of the leader's, and four of two other processes.
group::AssemblyOptions SixRanks() {
  group::AssemblyOptions options = LocalAssemblyOptions();
  options.engine.shard_count = 6;
  options.engine.shard_weights = {3, 1, 2, 1, 1, 2};
  options.engine.thread_count = 1;
  options.engine.device_index = 4;
  options.engine.timed_search = false;
  options.engine_name = "cuda";
  options.device_group_id = kGroupId;
  options.own_ranks = 2;
  options.workers = 4;
  options.setup_timeout = absl::Hours(1);
  return options;
}

// A leader, and the calls and threads of those that join it.
class Processes {
 public:
  explicit Processes(group::AssemblyOptions options) {
    auto made = group::GroupAssembly::Create(std::move(options));
    EXPECT_OK(made);
    assembly_ = *std::move(made);
    engine_ = assembly_->TakeEngine();
    workers_.emplace(*assembly_);
  }
  // Rank `index` of `ranks` of a process joins; returns when the leader has taken it.
  void Join(const std::string& process, int32_t index, int32_t ranks, const group::EngineMaker& make,
            std::function<void()> on_call_ended = nullptr) {
    std::shared_ptr<group::ProcessRows>& rows = rows_[process];
    if (rows == nullptr && ranks > 1) rows = std::make_shared<group::ProcessRows>();
    group::WorkerOptions worker = LocalWorkerOptions();
    worker.process = process;
    worker.process_index = index;
    worker.process_ranks = ranks;
    worker.rows = rows;
    worker.engine_options.device_index = 10 * process.back() + index;
    worker.make_cuda_engine = make;
    worker.alive_interval = absl::Milliseconds(5);
    worker.on_call_ended = on_call_ended;
    TestCall& call = workers_->Join(worker);
    EXPECT_TRUE(Await([&] { return call.IsTaken(); }));
  }
  // All of its ranks.
  void JoinAll(const std::string& process, int32_t ranks, const group::EngineMaker& make = CreateCpuEngine) {
    for (int32_t index = 0; index < ranks; ++index) Join(process, index, ranks, make);
  }
  // What the leader answers who says this.
  absl::Status Hello(const v1::RankHello& hello) {
    TestCall call;
    v1::JoinRequest request;
    *request.mutable_hello() = hello;
    static_cast<group::WorkerChannel&>(call).Write(request);
    call.Cancel();
    return assembly_->Serve(call);
  }
  absl::Status Form() { return assembly_->Form(); }
  // Calls by the order in which they came.
  void Cut(size_t call) { workers_->call(call).Cancel(); }
  int64_t data_bytes(size_t call) { return workers_->call(call).data_bytes(); }
  LossEngine& engine() { return *engine_; }
  int ended() const { return workers_->ended(); }

 private:
  std::unique_ptr<group::GroupAssembly> assembly_;
  std::unique_ptr<LossEngine> engine_;
  std::map<std::string, std::shared_ptr<group::ProcessRows>> rows_;  // by process
  std::optional<WorkerThreads> workers_;
};

TEST(GroupProcesses, TheRanksOfAProcessAreNeighboursWhoeverComesFirst) {
  absl::Mutex mutex;
  std::map<int32_t, EngineOptions> seen;  // by rank
  const auto make = [&](const EngineOptions& options) -> MadeEngine {
    {
      absl::MutexLock lock(&mutex);
      seen[options.group.rank] = options;
      seen[options.group.rank].group.communicator = nullptr;
    }
    return CreateCpuEngine(options);
  };
  group::AssemblyOptions options = SixRanks();
  options.make_engine = make;
  Processes processes(options);
  processes.Join("b", 1, 2, make);
  processes.Join("a", 0, 2, make);
  processes.Join("b", 0, 2, make);
  processes.Join("a", 1, 2, make);
  ASSERT_OK(processes.Form());
  EXPECT_EQ(processes.engine().name(), "cuda");
  // The leader's GPUs from its --device on; the others' are their own to say.
  const std::vector<int32_t> devices = {4, 5, 980, 981, 970, 971};
  ASSERT_EQ(seen.size(), devices.size());
  for (const auto& [rank, one] : seen) {
    EXPECT_EQ(one.device_index, devices[static_cast<size_t>(rank)]) << rank;
    EXPECT_EQ(one.group.world_size, 6) << rank;
    EXPECT_EQ(one.group.device_group_id, kGroupId) << rank;
    EXPECT_FALSE(one.group.shared_views) << rank;
    EXPECT_FALSE(one.timed_search) << rank;
    EXPECT_EQ(one.shard_weights, options.engine.shard_weights) << rank;
  }
  // The bits of six ranks in one process.
  ASSERT_OK_AND_ASSIGN(const auto local, CreateLocalCpuGroup(options.engine));
  const Problem problem = MakeProblem(ProblemOptions());
  const Outcome outcome = LoadedHeads(processes.engine(), problem.heads).Compute(problem);
  EXPECT_FALSE(outcome.grad_hidden_bytes.empty());
  EXPECT_TRUE(outcome.BitwiseEquals(LoadedHeads(*local, problem.heads).Compute(problem)));
}

// Ranks on CPUs, which would take it.
TEST(GroupProcesses, AResolutionThatGpusDoNotHaveReachesNoRank) {
  group::AssemblyOptions options = SixRanks();
  options.make_engine = CreateCpuEngine;
  Processes processes(options);
  processes.JoinAll("a", 4);
  ASSERT_OK(processes.Form());
  for (const Parallelism parallelism : {Parallelism::kVocabulary, Parallelism::kRows}) {
    for (const double label_smoothing : {0.0, 0.1}) {
      Problem problem = MakeProblem({.label_smoothing = label_smoothing});
      problem.terms[0].gradient_resolution = 0x1p-6;
      problem.heads[0].spec.parallelism = parallelism;
      const absl::Status status = LoadedHeads(processes.engine(), problem.heads).TryCompute(problem, {}).status();
      EXPECT_EQ(ReasonOf(status), parallelism == Parallelism::kRows && label_smoothing == 0 ? "OK" : "FEATURE_NOT_BUILT");
    }
  }
}

// Rows that come two at a time, and may end early.
class SlowFlow final : public RowFlow {
 public:
  SlowFlow(int64_t rows, absl::Status end_of_rows, absl::Status decision)
      : rows_(rows), end_of_rows_(std::move(end_of_rows)), decision_(std::move(decision)) {}
  absl::Status AwaitRows(int64_t row_end) override { return row_end <= rows_ ? absl::OkStatus() : end_of_rows_; }
  absl::Status Decide(const DigestBuilder*) override { return decision_; }
  void GradHiddenReady(int64_t) override {}

 private:
  const int64_t rows_;
  const absl::Status end_of_rows_;
  const absl::Status decision_;
};

TEST(GroupProcesses, RowsComeOnceToAProcess) {
  group::AssemblyOptions options = SixRanks();
  options.make_engine = CreateCpuEngine;
  options.engine.token_chunk_rows = 2;
  Processes processes(options);
  processes.JoinAll("a", 3);
  processes.JoinAll("b", 1);
  ASSERT_OK(processes.Form());
  for (const bool jsd : {false, true}) {
    const Problem problem = MakeProblem({.jsd = jsd, .hard_loss_weight = jsd ? 0.3 : 0.0});
    LoadedHeads heads(processes.engine(), problem.heads);
    const auto compute = [&](RowFlow* flow) { return heads.TryCompute(problem, {.flow = flow}).status(); };
    std::vector<int64_t> before, after;
    for (size_t call = 0; call < 4; ++call) before.push_back(processes.data_bytes(call));
    ASSERT_TRUE(compute(nullptr).ok());
    for (size_t call = 0; call < 4; ++call) after.push_back(processes.data_bytes(call) - before[call]);
    EXPECT_GT(after[0], 0);
    EXPECT_EQ(after, (std::vector<int64_t>{after[0], 0, 0, after[0]}));
    // A caller that gives up, of whose rows some have come, and one that decides against it, are no failure.
    const absl::Status gives_up = MakeError(ErrorReason::kCancelled, "the caller gives up");
    const int64_t rows = problem.rows;
    for (const int64_t here : {int64_t{0}, rows / 2, rows}) {
      SlowFlow flow(here, gives_up, here == rows ? gives_up : absl::OkStatus());
      EXPECT_REASON(compute(&flow), kCancelled) << here;
      ASSERT_OK(processes.engine().health());
    }
    SlowFlow flow(rows, absl::OkStatus(), absl::OkStatus());
    EXPECT_TRUE(compute(&flow).ok());
  }
}

TEST(GroupRows, EndOrGoOnWithoutWhoeverComesTooLate) {
  group::ProcessRows rows;
  const absl::Status ended = MakeError(ErrorReason::kCancelled, "the caller gives up");
  const absl::Status closed = MakeError(ErrorReason::kEngineFailed, "it is gone");
  const auto begin = [&rows](uint64_t id) {
    v1::RankCompute message;
    message.set_row_count(3);
    message.set_hidden_size(2);
    message.set_data_type(v1::DATA_TYPE_FLOAT32);
    auto call = group::ReceivedCall::Decode(message, [](uint64_t) { return nullptr; });
    EXPECT_TRUE(call.ok()) << call.status();
    rows.Begin(id, std::make_shared<group::SharedCall>(*std::move(call)));
  };
  rows.Open();
  begin(7);
  const auto seventh = rows.Await(7);
  ASSERT_TRUE(seventh.ok()) << seventh.status();
  group::RowsHere& here = (*seventh)->rows;
  std::thread waiting([&] { EXPECT_TRUE(here.Await(2).ok()); });
  here.Come(1);
  here.Come(2);
  waiting.join();
  EXPECT_REASON(rows.Await(6), kEngineFailed);
  here.End(ended);
  here.End(closed);  // the first word counts
  EXPECT_TRUE(here.Await(2).ok());
  EXPECT_EQ(here.Await(3).status(), ended);
  std::thread reader([&] { EXPECT_EQ(rows.Await(8).status(), closed); });
  rows.Close(closed);
  reader.join();
  rows.Open();
  begin(1);
  EXPECT_TRUE(rows.Await(1).ok());
}

TEST(GroupProcesses, WhoDoesNotFitIsToldWhatWasExpected) {
  Processes processes(SixRanks());
  // Whoever fits leaves as soon as the leader looks after it.
  const auto fits = ErrorReason::kCancelled, breaks = ErrorReason::kProtocolViolation, too_many = ErrorReason::kFeatureNotBuilt;
  struct Row {
    const char* process;
    int32_t index, ranks;
    ErrorReason reason;
    const char* message = "";
    const char* engine = "cuda";
    const char* version = "test";
    int32_t port = 1;
  };
  const auto expect = [&](const std::vector<Row>& rows) {
    for (const Row& row : rows) {
      v1::RankHello hello;
      hello.set_version(row.version);
      hello.set_port(row.port);
      hello.set_engine(row.engine);
      hello.set_process(row.process);
      hello.set_process_index(row.index);
      hello.set_process_ranks(row.ranks);
      const absl::Status status = processes.Hello(hello);
      EXPECT_TRUE(HasReason(status, row.reason)) << row.process << " " << row.index << " " << row.ranks << ": " << status;
      EXPECT_THAT(status.message(), HasSubstr(row.message));
    }
  };
  const std::string long_name(65, 'p');
  const auto other = ErrorReason::kInvalidCombination;
  expect({{"", 0, 0, other, "the worker's engine is cpu, this server's cuda", "cpu"},
          {"", 0, 0, other, "", "cuda", "another"},
          {"", 0, 0, breaks, "", "cuda", "test", 0},
          {"", 0, 0, breaks, "", "cuda", "test", 65536},
          {"", 0, 0, fits},
          {"", 0, 1, fits},
          {"", 0, 4, fits},
          {"", 0, 5, too_many, "this server waits for 4 ranks of workers, other processes bring 0 of them, and this one 5"},
          {"", 0, -1, breaks},
          {"", 0, 257, breaks},
          {"", -1, 2, breaks},
          {"", 2, 2, breaks},
          {long_name.c_str(), 0, 2, breaks}});
  // A place that a process has yet to fill is not free.
  processes.Join("a", 1, 3, CreateCpuEngine);
  expect({{"b", 0, 2, too_many, "other processes bring 3 of them, and this one 2"},
          {"b", 0, 1, fits},
          {"a", 0, 3, fits},
          {"a", 1, 3, other, "rank 1 of this process has joined already"}});
}

TEST(GroupProcesses, ARankThatFailsKeepsNobodyWaiting) {
  for (const int32_t failing : {1, 4}) {  // the leader's, a worker's
    const auto make = [failing](const EngineOptions& one) {
      return one.group.rank == failing ? MadeEngine(NoRoom()) : WaitForTheOthers(one);
    };
    group::AssemblyOptions options = SixRanks();
    options.make_engine = make;
    Processes processes(options);
    processes.JoinAll("a", 4, make);
    const absl::Status formed = processes.Form();
    EXPECT_REASON(formed, kEngineFailed);
    EXPECT_THAT(formed.message(), HasSubstr("rank " + std::to_string(failing) + ": there is no room here"));
    EXPECT_THAT(formed.message(), Not(HasSubstr("rank 0")));
    if (failing == 4) {
      EXPECT_THAT(formed.message(), Not(HasSubstr("rank 1")));
    }
  }
}

// Fails in a micro-batch.
class FailingEngine final : public ForwardingEngine {
 public:
  using ForwardingEngine::ForwardingEngine;
  absl::StatusOr<MicroBatchResult> DoCompute(const MicroBatch&) override {
    return MakeError(ErrorReason::kEngineFailed, "the device is on fire");
  }
};

TEST(GroupProcesses, AnOwnRankThatFailsInACallKeepsNobodyWaiting) {
  for (const int32_t failing : {0, 1}) {
    for (const bool has_flow : {false, true}) {
      group::AssemblyOptions options = SixRanks();
      options.make_engine = [failing](const EngineOptions& one) -> MadeEngine {
        MadeEngine made = CreateCpuEngine(one);
        if (one.group.rank == failing && made.ok()) made = std::make_unique<FailingEngine>(*std::move(made));
        return made;
      };
      Processes processes(options);
      processes.JoinAll("a", 3);
      processes.JoinAll("b", 1);
      ASSERT_OK(processes.Form());
      const Problem problem = MakeProblem(ProblemOptions());
      ASSERT_OK_AND_ASSIGN(const auto head, processes.engine().CreateHead(problem.heads[0].spec));
      PreparedMicroBatch prepared(problem, {head.get()}, ComputeOptions());
      SlowFlow flow(prepared.micro_batch.hidden.row_count, absl::OkStatus(), absl::OkStatus());
      if (has_flow) prepared.micro_batch.flow = &flow;
      const absl::Status status = processes.engine().Compute(prepared.micro_batch).status();
      EXPECT_REASON(status, kEngineFailed);
      EXPECT_EQ(status.message(), "the device is on fire");
      EXPECT_EQ(processes.engine().health(), status);
      EXPECT_TRUE(Await([&] { return processes.ended() == 4; })) << processes.ended();
    }
  }
}

TEST(GroupProcesses, SetUpIsBoundedWhileAWorkerIsSilent) {
  group::AssemblyOptions options = SixRanks();
  options.setup_timeout = absl::Milliseconds(500);
  options.make_engine = WaitForTheOthers;
  absl::Notification formed;
  Processes processes(options);
  const auto make = [&](const EngineOptions& one) {
    if (one.group.rank == 3) formed.WaitForNotification();
    return WaitForTheOthers(one);
  };
  processes.JoinAll("a", 4, make);
  const absl::Status status = processes.Form();
  formed.Notify();
  EXPECT_REASON(status, kEngineFailed);
  EXPECT_THAT(status.message(), HasSubstr("rank 3: it has not become ready in time"));
}

TEST(GroupProcesses, AWorkerWhoseCallEndsGivesUpWhatWaits) {
  group::AssemblyOptions options = SixRanks();
  options.make_engine = WaitForTheOthers;
  Processes processes(options);
  std::atomic<int> waiting = 0;
  std::atomic<int> came_back = 0;
  std::atomic<int> told = 0;
  const auto make = [&](const EngineOptions& one) {
    ++waiting;
    MadeEngine made = WaitForTheOthers(one);
    ++came_back;
    return made;
  };
  for (int32_t index = 0; index < 4; ++index) processes.Join("a", index, 4, make, [&told] { ++told; });
  absl::Status formed;
  std::thread leader([&] { formed = processes.Form(); });
  EXPECT_TRUE(Await([&] { return waiting == 4; }));
  processes.Cut(2);
  EXPECT_TRUE(Await([&] { return came_back == 4 && told == 4; })) << came_back << " came back, " << told << " were told";
  leader.join();
  EXPECT_REASON(formed, kEngineFailed);
  EXPECT_THAT(formed.message(), HasSubstr("rank 4: the worker's call has ended"));
}

TEST(GroupTogether, TellsTheFirstFailureAndAbortsOnce) {
  absl::Mutex mutex;
  std::atomic<bool> aborted = false;
  std::atomic<int> aborts = 0;
  const group::FirstFailure failure = group::RunTogether(
      3,
      [&](size_t index) -> absl::Status {
        if (index == 1) return NoRoom();
        EXPECT_TRUE(Await([&] { return aborted.load(); }));
        return MakeError(ErrorReason::kEngineFailed, "given up");
      },
      [&](const absl::Status& why) {
        EXPECT_THAT(why.message(), HasSubstr("no room"));
        ++aborts;
        aborted = true;
      },
      {mutex, [] { return false; }});
  EXPECT_EQ(failure.index, 1u);
  EXPECT_THAT(failure.status.message(), HasSubstr("no room"));
  EXPECT_EQ(aborts, 1);
}

TEST(GroupTogether, IsGivenUpWhileAllWait) {
  absl::Mutex mutex;
  std::atomic<bool> aborted = false;
  int waiting = 0;
  const group::FirstFailure failure = group::RunTogether(
      2,
      [&](size_t) -> absl::Status {
        {
          absl::MutexLock lock(&mutex);
          ++waiting;
        }
        EXPECT_TRUE(Await([&] { return aborted.load(); }));
        return MakeError(ErrorReason::kEngineFailed, "given up");
      },
      [&](const absl::Status&) { aborted = true; }, {mutex, [&] { return waiting == 2; }});
  EXPECT_REASON(failure.status, kCancelled);
}

}  // namespace
}  // namespace headwater::testing
