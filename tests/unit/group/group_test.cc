// What a group does when a rank fails or goes; and that it yields what one engine does, to the bit.
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/error.h"
#include "server/group/group_engine.h"
#include "server/group/restarter.h"
#include "tests/kernels/engine_run.h"
#include "tests/kernels/problem.h"
#include "tests/unit/group/worker_threads.h"

namespace headwater::testing {
namespace {

EngineOptions ThreeRanks() {
  EngineOptions options;
  options.shard_count = 3;
  options.shard_weights = {3, 1, 2};
  options.thread_count = 1;
  return options;
}

std::unique_ptr<ThreadedGroup> MakeGroup() {
  auto group = ThreadedGroup::Create(ThreeRanks());
  EXPECT_TRUE(group.ok()) << group.status();
  return group.ok() ? *std::move(group) : nullptr;
}

std::unique_ptr<EngineHead> MakeHead(LossEngine& engine, const Problem& problem) {
  auto head = engine.CreateHead(problem.heads[0].spec);
  EXPECT_TRUE(head.ok()) << head.status();
  WriteTensorValues(**head, HeadTensor::kWeight, problem.heads[0].weight);
  return *std::move(head);
}

TEST(GroupFailure, AWorkerThatIsGoneLosesTheGroupAndAllItsRanks) {
  const Problem problem = MakeProblem(ProblemOptions());
  for (const size_t gone : {size_t{1}, size_t{2}}) {
    const auto group = MakeGroup();
    const auto head = MakeHead(*group, problem);
    PreparedMicroBatch prepared(problem, {head.get()}, ComputeOptions());
    ASSERT_TRUE(group->Compute(prepared.micro_batch).ok());
    ASSERT_TRUE(group->health().ok());
    group->Cut(gone);
    const auto result = group->Compute(prepared.micro_batch);
    EXPECT_TRUE(HasReason(result.status(), ErrorReason::kEngineFailed)) << result.status();
    EXPECT_TRUE(HasReason(group->health(), ErrorReason::kEngineFailed)) << group->health();
    EXPECT_EQ(head->ZeroGradient(), group->health());
    EXPECT_EQ(group->CreateHead(problem.heads[0].spec).status(), group->health());
    // Nobody waits for ever.
    EXPECT_FALSE(group->AwaitEnd(1).ok());
    EXPECT_FALSE(group->AwaitEnd(2).ok());
  }
}

// The rows of a micro-batch stop coming because the caller gives up: that costs the group nothing.
class EndingFlow final : public RowFlow {
 public:
  EndingFlow(bool at_await, absl::Status end) : at_await_(at_await), end_(std::move(end)) {}
  absl::Status AwaitRows(int64_t) override { return at_await_ ? end_ : absl::OkStatus(); }
  absl::Status Decide(const DigestBuilder*) override { return at_await_ ? absl::OkStatus() : end_; }
  void GradHiddenReady(int64_t) override {}

 private:
  const bool at_await_;
  const absl::Status end_;
};

TEST(GroupFailure, ACallerThatGivesUpIsNoFailure) {
  const Problem problem = MakeProblem(ProblemOptions());
  const auto group = MakeGroup();
  const auto head = MakeHead(*group, problem);
  for (const bool at_await : {true, false}) {
    PreparedMicroBatch prepared(problem, {head.get()}, ComputeOptions());
    EndingFlow flow(at_await, MakeError(ErrorReason::kCancelled, "the caller gives up"));
    prepared.micro_batch.flow = &flow;
    const auto result = group->Compute(prepared.micro_batch);
    EXPECT_TRUE(HasReason(result.status(), ErrorReason::kCancelled)) << result.status();
    const auto stats = head->ComputeGradientStats();
    ASSERT_TRUE(stats.ok()) << stats.status();
    EXPECT_EQ(stats->norm_squared, 0);
    EXPECT_TRUE(group->health().ok()) << group->health();
  }
  PreparedMicroBatch prepared(problem, {head.get()}, ComputeOptions());
  EXPECT_TRUE(group->Compute(prepared.micro_batch).ok());
}

TEST(GroupAssembly, TakesNoStrangersAndNoMoreThanItWants) {
  group::AssemblyOptions options;
  options.engine.shard_count = 2;
  options.engine.thread_count = 1;
  options.version = "this";
  options.listen_host = "127.0.0.1";
  auto assembly = group::GroupAssembly::Create(options);
  ASSERT_TRUE(assembly.ok()) << assembly.status();
  const auto engine = (*assembly)->TakeEngine();
  HeadSpec spec = MakeProblem(ProblemOptions()).heads[0].spec;
  EXPECT_TRUE(HasReason(engine->CreateHead(spec).status(), ErrorReason::kStarting));

  TestCall silent;
  v1::JoinRequest no_hello;
  no_hello.mutable_alive();
  silent.Write(no_hello);
  EXPECT_TRUE(HasReason((*assembly)->Serve(silent), ErrorReason::kProtocolViolation));
  TestCall other;
  v1::JoinRequest hello;
  hello.mutable_hello()->set_version("another");
  other.Write(hello);
  EXPECT_TRUE(HasReason((*assembly)->Serve(other), ErrorReason::kInvalidCombination));

  // One that leaves before the group is formed leaves its place to the next.
  hello.mutable_hello()->set_version("this");
  for (const int32_t port : {0, 65536}) {
    hello.mutable_hello()->set_port(port);
    TestCall nowhere;
    nowhere.Write(hello);
    EXPECT_TRUE(HasReason((*assembly)->Serve(nowhere), ErrorReason::kProtocolViolation)) << port;
  }
  hello.mutable_hello()->set_port(1);
  TestCall leaving;
  leaving.Write(hello);
  leaving.Cancel();
  EXPECT_TRUE(HasReason((*assembly)->Serve(leaving), ErrorReason::kCancelled));
  EXPECT_TRUE(HasReason((*assembly)->Form([] { return true; }), ErrorReason::kCancelled));
}

TEST(Restarter, KeepsTheArgumentsAndTheAddressesOnce) {
  group::Restarter restarter;
  std::string program = "headwaterd";
  std::string flag = "--listen_addresses=127.0.0.1:0";
  std::vector<char*> arguments = {program.data(), flag.data()};
  restarter.KeepArguments(2, arguments.data());
  restarter.KeepAddresses({"127.0.0.1:4711", "unix:/tmp/s"}, {});
  const std::vector<std::string> expected = {program, flag, "--listen_addresses=127.0.0.1:4711,unix:/tmp/s"};
  EXPECT_EQ(restarter.Arguments(), expected);
  // The next life begins with those, and adds no more.
  std::string added = expected.back();
  arguments.push_back(added.data());
  restarter.KeepArguments(3, arguments.data());
  EXPECT_EQ(restarter.Arguments(), expected);
}

// Everything that a micro-batch yields on an engine, and the accumulator after it.
Outcome ComputeOn(LossEngine& engine, const Problem& problem) {
  std::vector<std::unique_ptr<EngineHead>> heads;
  std::vector<EngineHead*> pointers;
  for (const TestHead& test_head : problem.heads) {
    auto head = engine.CreateHead(test_head.spec);
    EXPECT_TRUE(head.ok()) << head.status();
    heads.push_back(*std::move(head));
    pointers.push_back(heads.back().get());
    WriteTensorValues(*pointers.back(), HeadTensor::kWeight, test_head.weight);
    if (test_head.spec.has_bias) WriteTensorValues(*pointers.back(), HeadTensor::kBias, test_head.bias);
  }
  PreparedMicroBatch prepared(problem, pointers, ComputeOptions());
  Outcome outcome;
  const auto result = engine.Compute(prepared.micro_batch);
  EXPECT_TRUE(result.ok()) << result.status();
  if (result.ok()) prepared.Collect(*result, &outcome);
  for (size_t i = 0; i < pointers.size(); ++i) {
    Gradient& gradient = outcome.gradients.emplace_back();
    for (const double value : ReadTensorValues(*pointers[i], HeadTensor::kGradWeight)) {
      gradient.weight.push_back(static_cast<float>(value));
    }
  }
  return outcome;
}

// Sums have one order, whatever the ranks are: shards of one engine, threads or processes; and every time.
TEST(GroupResults, HaveTheBitsOfOneEngineWithAsManyShards) {
  ProblemOptions options;
  options.rows = 70;
  options.vocab_size = 211;
  options.bias = true;
  options.label_smoothing = 0.1;
  for (const bool jsd : {false, true}) {
    options.jsd = jsd;
    const Problem problem = MakeProblem(options);
    EngineOptions shards = ThreeRanks();
    shards.token_chunk_rows = 16;
    shards.thread_count = 3;
    const auto one = CreateCpuEngine(shards);
    ASSERT_TRUE(one.ok());
    const Outcome expected = ComputeOn(**one, problem);
    const auto threads = group::CreateLocalCpuGroup(shards);
    ASSERT_TRUE(threads.ok());
    EXPECT_TRUE(ComputeOn(**threads, problem).BitwiseEquals(expected));
    shards.thread_count = 1;  // of each
    for (int round = 0; round < 2; ++round) {
      const auto links = ThreadedGroup::Create(shards);
      ASSERT_TRUE(links.ok());
      EXPECT_TRUE(ComputeOn(**links, problem).BitwiseEquals(expected));
    }
  }
}

}  // namespace
}  // namespace headwater::testing
