// What a group does when a rank fails, refuses, hangs or goes.
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "headwater/kernels/error.h"
#include "server/group/group_engine.h"
#include "server/group/ranks/rank.h"
#include "server/group/restarter.h"
#include "tests/kernels/support/engine_run.h"
#include "tests/kernels/support/problem.h"
#include "tests/unit/expect_status.h"
#include "tests/unit/forwarding_engine.h"
#include "tests/unit/group/worker_threads.h"

namespace headwater::testing {
namespace {

using ::testing::HasSubstr;

EngineOptions ThreeRanks() { return {.shard_count = 3, .shard_weights = {3, 1, 2}, .thread_count = 1}; }

std::unique_ptr<EngineHead> MakeHead(LossEngine& engine, const Problem& problem) {
  auto head = engine.CreateHead(problem.heads[0].spec);
  EXPECT_OK(head);
  WriteTensorValues(**head, HeadTensor::kWeight, problem.heads[0].weight);
  return *std::move(head);
}

TEST(GroupFailure, AWorkerThatIsGoneLosesTheGroupAndAllItsRanks) {
  const Problem problem = MakeProblem(ProblemOptions());
  for (const size_t gone : {size_t{1}, size_t{2}}) {
    const auto group = ThreadedGroup::Make(ThreeRanks());
    const auto head = MakeHead(*group, problem);
    PreparedMicroBatch prepared(problem, {head.get()}, ComputeOptions());
    ASSERT_OK(group->Compute(prepared.micro_batch));
    ASSERT_OK(group->health());
    group->Cut(gone);
    EXPECT_REASON(group->Compute(prepared.micro_batch), kEngineFailed);
    EXPECT_REASON(group->health(), kEngineFailed);
    EXPECT_EQ(head->ZeroGradient(), group->health());
    EXPECT_EQ(group->CreateHead(problem.heads[0].spec).status(), group->health());
    // Nobody waits for ever.
    EXPECT_FALSE(group->AwaitEnd(1).ok());
    EXPECT_FALSE(group->AwaitEnd(2).ok());
  }
}

// Its device hangs in a call, and it knows.
class HangingEngine final : public ForwardingEngine {
 public:
  HangingEngine(std::unique_ptr<LossEngine> engine, absl::Notification& go_on)
      : ForwardingEngine(std::move(engine)), go_on_(go_on) {}
  absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec) const override {
    hangs_ = true;
    go_on_.WaitForNotification();
    return ForwardingEngine::PlanHead(spec);
  }
  absl::Status DoHealth() const override {
    return hangs_ ? MakeError(ErrorReason::kEngineFailed, "the device hangs") : ForwardingEngine::DoHealth();
  }

 private:
  absl::Notification& go_on_;
  mutable std::atomic<bool> hangs_ = false;
};

TEST(GroupFailure, AWorkerWhoseDeviceHangsSaysSo) {
  absl::Notification answered, go_on;
  const auto group = ThreadedGroup::Make(ThreeRanks(), [&](const EngineOptions& options) {
    MadeEngine engine = CreateCpuEngine(options);
    if (options.group.rank == 2 && engine.ok()) engine = std::make_unique<HangingEngine>(*std::move(engine), go_on);
    return engine;
  });
  absl::Status status;
  std::thread caller([&] {
    status = group->PlanHead(MakeProblem(ProblemOptions()).heads[0].spec).status();
    answered.Notify();
  });
  EXPECT_TRUE(answered.WaitForNotificationWithTimeout(absl::Seconds(30)));
  go_on.Notify();
  caller.join();
  EXPECT_REASON(status, kEngineFailed);
  EXPECT_EQ(status.message(), "the device hangs");
  EXPECT_EQ(group->health(), status);
}

TEST(GroupAssembly, TakesNoStrangersAndNoMoreThanItWants) {
  const group::AssemblyOptions options = {
      .engine = {.shard_count = 2, .thread_count = 1}, .version = "this", .listen_host = "127.0.0.1"};
  ASSERT_OK_AND_ASSIGN(auto assembly, group::GroupAssembly::Create(options));
  const auto engine = assembly->TakeEngine();
  HeadSpec spec = MakeProblem(ProblemOptions()).heads[0].spec;
  EXPECT_REASON(engine->CreateHead(spec), kStarting);

  TestCall silent;
  v1::JoinRequest no_hello;
  no_hello.mutable_alive();
  silent.Write(no_hello);
  EXPECT_REASON(assembly->Serve(silent), kProtocolViolation);
  // A worker that leaves before the group is formed leaves its place to the next.
  for (int worker = 0; worker < 2; ++worker) {
    TestCall leaving;
    leaving.Write(HelloOf("this"));
    leaving.Cancel();
    EXPECT_REASON(assembly->Serve(leaving), kCancelled);
  }
  assembly->GiveUp();
  EXPECT_REASON(assembly->Form(), kCancelled);
}

TEST(GroupAssembly, TellsWhyEveryRankRefuses) {
  const auto group = ThreadedGroup::Create(ThreeRanks(), [](const EngineOptions& options) -> MadeEngine {
    return MakeError(ErrorReason::kInvalidField, options.group.rank == 2 ? "nor here" : "there is no room here");
  });
  EXPECT_REASON(group, kEngineFailed);
  EXPECT_THAT(group.status().message(), HasSubstr("rank 1: there is no room here; rank 2: nor here"));
}

TEST(GroupAssembly, TellsWhoIsLateBesideWhoRefuses) {
  const auto late = [](const EngineOptions& options) -> MadeEngine {
    if (options.group.rank == 2) return MakeError(ErrorReason::kInvalidField, "there is no room here");
    absl::SleepFor(absl::Seconds(5));
    return CreateCpuEngine(options);
  };
  const auto group = ThreadedGroup::Create(ThreeRanks(), late, /*setup_timeout=*/absl::Seconds(3));
  EXPECT_THAT(group.status().message(), HasSubstr("rank 1: it has not become ready in time; rank 2: there is no room here"));
}

// A leader that is asked to end ends, whatever its workers do.
TEST(GroupAssembly, CanBeGivenUpAtAnyTimeOfItsForming) {
  for (const bool meets : {false, true}) {
    const group::AssemblyOptions options = {.engine = {.shard_count = 2, .thread_count = 1},
                                            .version = "this",
                                            .listen_host = "127.0.0.1",
                                            .setup_timeout = absl::Hours(1)};
    ASSERT_OK_AND_ASSIGN(auto assembly, group::GroupAssembly::Create(options));
    const auto engine = assembly->TakeEngine();
    TestCall call;
    absl::Notification go_on;
    std::thread handler([&] { assembly->Serve(call).IgnoreError(); });
    std::thread worker([&] {
      group::WorkerOptions one = {.version = "this", .leader_host = "127.0.0.1", .listen_host = "127.0.0.1"};
      one.make_engine = [&](const EngineOptions& engine_options) {
        assembly->GiveUp();
        go_on.WaitForNotification();
        return CreateCpuEngine(engine_options);
      };
      if (meets) {
        group::RunWorker(call, one).IgnoreError();
        return;
      }
      call.Write(HelloOf("this"));
      v1::JoinResponse welcome;
      EXPECT_TRUE(static_cast<group::WorkerChannel&>(call).Read(&welcome));
      assembly->GiveUp();
    });
    const absl::Status formed = assembly->Form();
    EXPECT_REASON(formed, kCancelled);
    go_on.Notify();
    call.Cancel();
    worker.join();
    handler.join();
  }
}

TEST(GroupAssembly, DoesNotListenToWhoeverComesTooLate) {
  const auto group = ThreadedGroup::Make(ThreeRanks());
  TestCall silent;
  EXPECT_REASON(group->assembly().Serve(silent), kFeatureNotBuilt);
}

TEST(RankLink, KeepsNoMoreRepliesThanItSays) {
  for (const bool large : {false, true}) {
    const auto cancelled = std::make_shared<std::atomic<bool>>(false);
    group::RankLink link([](const v1::JoinResponse&) { return true; }, [cancelled] { *cancelled = true; });
    v1::JoinRequest message;
    message.mutable_reply()->mutable_data()->resize(large ? size_t{1} << 20 : 0);
    const int64_t most = large ? group::RankLink::kMaxReplyBytes >> 20 : static_cast<int64_t>(group::RankLink::kMaxReplies);
    std::thread worker([&] {
      for (int64_t i = 0; i < 3 * most; ++i) link.Deliver(message);
    });
    // One is taken, one more comes in its place, and the next one waits.
    EXPECT_TRUE(Await([&] { return link.messages() == most + 1; })) << link.messages();
    EXPECT_TRUE(link.AwaitReply().ok());
    EXPECT_TRUE(Await([&] { return link.messages() == most + 2; })) << link.messages();
    link.Break(MakeError(ErrorReason::kEngineFailed, "enough"));
    worker.join();
    EXPECT_EQ(link.messages(), most + 2);
    EXPECT_TRUE(*cancelled);
  }
}

TEST(RankLink, AWriteThatHangsHoldsTheLinksThreadAlone) {
  absl::Notification ended, failed;
  group::RankLink link([&](const v1::JoinResponse&) { return ended.WaitForNotificationWithTimeout(absl::Seconds(60)); }, [] {});
  std::thread sender([&] { link.SendAll(); });
  std::thread caller([&] {
    while (link.Send({}).ok()) {
    }
    failed.Notify();
  });
  EXPECT_FALSE(failed.WaitForNotificationWithTimeout(absl::Milliseconds(50)));
  link.Break(MakeError(ErrorReason::kEngineFailed, "enough"));
  EXPECT_TRUE(failed.WaitForNotificationWithTimeout(absl::Seconds(30)));
  ended.Notify();
  caller.join();
  sender.join();
}

// Who drops a head waits for nobody; and the ranks learn of it though no call follows.
TEST(GroupRelease, DoesNotWaitForTheRanks) {
  std::atomic<LossEngine*> worker_engine = nullptr;
  EngineOptions two = ThreeRanks();
  two.shard_count = 2;
  two.shard_weights = {};
  const auto group = ThreadedGroup::Make(two, [&](const EngineOptions& options) {
    MadeEngine engine = CreateCpuEngine(options);
    if (engine.ok()) worker_engine = engine->get();
    return engine;
  });
  auto head = MakeHead(*group, MakeProblem(ProblemOptions()));
  ASSERT_GT(worker_engine.load()->planned_bytes(), 0);
  group->Pause(1, true);
  absl::Notification released;
  std::thread owner([&] {
    head.reset();
    released.Notify();
  });
  EXPECT_TRUE(released.WaitForNotificationWithTimeout(absl::Seconds(20)));
  EXPECT_GT(worker_engine.load()->planned_bytes(), 0);
  group->Pause(1, false);
  owner.join();
  EXPECT_TRUE(Await([&] { return worker_engine.load()->planned_bytes() == 0; }));
}

// The other ranks wait for a rank that computes for longer.
TEST(GroupTimes, SeparateComputingFromWaiting) {
  static constexpr absl::Duration kWait = absl::Milliseconds(30);
  std::atomic<group::GroupAssembly*> assembly = nullptr;
  const auto group = ThreadedGroup::Make(ThreeRanks(), [&](const EngineOptions& options) {
    EngineOptions slow = options;
    slow.shard_probe = [&assembly, rank = options.group.rank, done = std::make_shared<bool>(false)](ShardPhase phase, int32_t) {
      group::GroupAssembly* const times = assembly.load();
      if (rank == 2 && phase == ShardPhase::kAct && times != nullptr && !*done) {
        *done = true;
        const absl::Duration start = times->rank_times()[0].waiting;
        EXPECT_TRUE(Await([&] { return times->rank_times()[0].waiting - start >= kWait; }));
      }
      return absl::OkStatus();
    };
    return CreateCpuEngine(slow);
  });
  const Problem problem = MakeProblem(ProblemOptions());
  const auto head = MakeHead(*group, problem);
  const auto before = group->assembly().rank_times();
  ASSERT_EQ(before.size(), 3u);
  assembly = &group->assembly();
  PreparedMicroBatch prepared(problem, {head.get()}, ComputeOptions());
  ASSERT_OK(group->Compute(prepared.micro_batch));
  const auto first = group->assembly().rank_times()[0];
  EXPECT_GE(first.waiting - before[0].waiting, kWait);
  EXPECT_GT(first.computing, before[0].computing);
  EXPECT_GT(first.communicating, absl::ZeroDuration());
  // A worker reports its times with its heartbeats.
  EXPECT_TRUE(Await([&] { return group->assembly().rank_times()[2].computing - before[2].computing >= kWait / 2; }));
}

TEST(Restarter, KeepsTheArgumentsAndTheAddressesOnce) {
  group::Restarter restarter;
  std::string program = "headwaterd";
  std::string flag = "--listen_addresses=127.0.0.1:0";
  std::vector<char*> arguments = {program.data(), flag.data()};
  restarter.KeepArguments(2, arguments.data());
  restarter.KeepAddresses({"127.0.0.1:4711", "unix:/tmp/s"}, {}, "[::1]:0", 4712);
  const std::vector<std::string> expected = {program, flag, "--listen_addresses=127.0.0.1:4711,unix:/tmp/s",
                                             "--metrics_address=[::1]:4712"};
  EXPECT_EQ(restarter.Arguments(), expected);
  // The next life begins with those, and adds no more.
  std::vector<std::string> added(expected.begin() + 2, expected.end());
  for (std::string& one : added) arguments.push_back(one.data());
  restarter.KeepArguments(4, arguments.data());
  EXPECT_EQ(restarter.Arguments(), expected);
  restarter.KeepAddresses({"127.0.0.1:4711"}, {"unix:/tmp/a"}, "", 0);  // no metrics are served
  EXPECT_EQ(restarter.Arguments().back(), "--admin_listen_addresses=unix:/tmp/a");
}

}  // namespace
}  // namespace headwater::testing
