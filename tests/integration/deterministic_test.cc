// Deterministic mode through the wire: the gradient's bits do not depend on who comes when; what waits, what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/integration/transactions/transaction_fixture.h"
#include "tests/unit/run_threads.h"

namespace headwater::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMicroBatches = 5;

class DeterministicTest : public TransactionTest {
 protected:
  static ServerSetup Deterministic() {
    ServerSetup setup = MakeSetup();
    setup.options.deterministic = true;
    setup.options.limits.ordered_window = kMicroBatches;
    setup.options.limits.max_held_bytes = 1 << 20;
    setup.engine.deterministic = true;
    return setup;
  }
  void SetUp() override { Restart(Deterministic()); }
  // Even ids EAGER, odd ones EXPLICIT with a factor.
  void Add(const TestHead& head, int64_t step, int64_t id) {
    const uint32_t seed = static_cast<uint32_t>(100 * step + id);
    const bool is_explicit = id % 2 == 1;
    const LossReply reply = server_->MustCompute(
        is_explicit ? ExplicitHeader(head, step, id) : CrossEntropyHeader(head, step, id, {1, 2, 3}), Rows(seed));
    EXPECT_EQ(reply.summary.form(), v1::CONTRIBUTION_FORM_HELD);
    EXPECT_EQ(reply.summary.state(), is_explicit ? v1::CONTRIBUTION_STATE_STAGED : v1::CONTRIBUTION_STATE_COMMITTED);
    if (is_explicit) Require(server_->Commit(head, step, id, 0.7), "CommitMicroBatch");
  }
  std::string Train(const TestHead& head, const std::vector<int64_t>& order) {
    for (int64_t step = 0; step < 2; ++step) {
      for (const int64_t id : order) Add(head, step, id);
      Require(server_->Apply(ApplyOf(head, step, kMicroBatches)), "ApplyOptimizerStep");
    }
    return server_->Weights(head);
  }
};

INSTANTIATE_TEST_SUITE_P(Shards, DeterministicTest, ::testing::Values(1, 3));

TEST_P(DeterministicTest, OrderTrainersAndRestartsDoNotShow) {
  v1::ServerInfo info;
  Require(server_->Call(&Sessions::GetServerInfo, {}, &info), "GetServerInfo");
  EXPECT_TRUE(info.deterministic());
  EXPECT_EQ(info.limits().ordered_window(), kMicroBatches);
  const std::string expected = Train(server_->MakeHead("ordered", SmallSpec()), {0, 1, 2, 3, 4});
  EXPECT_EQ(Train(server_->MakeHead("reversed", SmallSpec()), {4, 3, 2, 1, 0}), expected);
  Restart(Deterministic());
  EXPECT_EQ(Train(server_->MakeHead("mixed", SmallSpec()), {2, 0, 4, 1, 3}), expected);
  const TestHead head = server_->MakeHead("threads", SmallSpec());
  for (int64_t step = 0; step < 2; ++step) {
    RunThreads(3, [&](int64_t rank) {
      for (int64_t id = rank; id < kMicroBatches; id += 3) Add(head, step, id);
    });
    Require(server_->Apply(ApplyOf(head, step, kMicroBatches)), "ApplyOptimizerStep");
  }
  EXPECT_EQ(server_->Weights(head), expected);
}

TEST_P(DeterministicTest, WhatWaitsIsToldAndGivesItsRoomBack) {
  const TestHead head = server_->MakeHead("waits", SmallSpec());
  Add(head, 0, 2);
  EXPECT_TRUE(AwaitMetric("headwater_waiting_contributions", 1));
  EXPECT_EQ(server_->Find(head, 2).state(), v1::CONTRIBUTION_STATE_COMMITTED);
  v1::GetGradientNormRequest norm;
  *norm.mutable_head() = server_->At(head, 0);
  v1::GetGradientNormResponse unused;
  EXPECT_EQ(ReasonOf(server_->Call(&Heads::GetGradientNorm, norm, &unused)), "STEP_NOT_SEALED");
  Add(head, 0, 0);
  Require(server_->Discard(head, 0, 1), "DiscardMicroBatch");
  EXPECT_TRUE(AwaitMetric("headwater_waiting_contributions", 0));
  EXPECT_TRUE(AwaitMetric("headwater_held_bytes", 0));
  Require(server_->Seal(head, 0, {0, 2}), "SealStep");
}

TEST(Deterministic, NeedsAnEngineThatIs) {
  EngineOptions engine_options;
  auto engine = CreateCpuEngine(engine_options);
  ASSERT_TRUE(engine.ok());
  service::ServerOptions options;
  options.listen_addresses = {"127.0.0.1:0"};
  options.deterministic = true;
  const auto server = service::Server::Start(options, *std::move(engine));
  EXPECT_THAT(server.status().message(), HasSubstr("EngineOptions::deterministic"));
}

}  // namespace
}  // namespace headwater::testing
