// The life of heads around their steps: a server that starts again, heads that nobody uses, their checkpoints.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/integration/transactions/transaction_fixture.h"

namespace headwater::testing {
namespace {

class Lifecycle : public TransactionTest {
 protected:
  ~Lifecycle() override {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }
  ServerSetup WithCheckpoints() {
    std::string pattern = (std::filesystem::temp_directory_path() / "headwater-life-XXXXXX").string();
    if (root_.empty()) root_ = mkdtemp(pattern.data());
    ServerSetup setup = MakeSetup();
    setup.options.checkpoint_directory = root_;
    return setup;
  }
  LossReply Submit(const TestHead& head, int64_t step, int64_t micro_batch, uint32_t seed = 5) {
    return server_->Compute(CrossEntropyHeader(head, step, micro_batch, {1, 2, 3}), Rows(seed));
  }
  void Save(const TestHead& head, const std::string& checkpoint) {
    v1::SaveCheckpointRequest request;
    request.set_name(head.name());
    if (head.head.spec().trainable()) request.set_epoch(head.head.epoch());
    request.set_checkpoint(checkpoint);
    Require(server_->Call(&Heads::SaveCheckpoint, request), "SaveCheckpoint");
  }
  grpc::Status Delete(const TestHead& head) {
    v1::DeleteHeadRequest request;
    request.set_name(head.name());
    request.set_force(true);
    return server_->Call(&Heads::DeleteHead, request);
  }
  std::vector<std::string> Names(const std::string& parent) {
    v1::ListHeadsRequest request;
    request.set_parent(parent);
    v1::ListHeadsResponse response;
    Require(server_->Call(&Heads::ListHeads, request, &response), "ListHeads");
    std::vector<std::string> names;
    for (const v1::Head& head : response.heads()) names.push_back(head.name());
    return names;
  }
  std::string root_;
};

INSTANTIATE_TEST_SUITE_P(Shards, Lifecycle, ::testing::Values(1, 3));

TEST_P(Lifecycle, WhoTakesARestoredHeadNamesTheEpochsThatItHasWorkedUnder) {
  Restart(WithCheckpoints());
  const TestHead old_head = server_->MakeHead("h", SmallSpec());
  const TestHead frozen = server_->MakeHead("frozen", FrozenSpec());
  Save(frozen, "weights");
  Save(old_head, "step-0");
  Require(server_->Apply(ApplyOf(old_head, 0, 0)), "ApplyOptimizerStep");
  Save(old_head, "step-1");
  Restart(WithCheckpoints());
  EXPECT_THAT(Names(""), ::testing::UnorderedElementsAre(old_head.name(), frozen.name()));
  EXPECT_EQ(server_->MetricLine("headwater_restored_heads_total"), "headwater_restored_heads_total 2");
  // Every call on a step learns what it needs to go on, whatever its epoch and its step.
  const v1::Head restored = server_->Get(old_head.name());
  EXPECT_NE(restored.epoch(), old_head.head.epoch());
  TestHead guessed = old_head;
  guessed.head = restored;
  for (const grpc::Status& refusal : {Submit(old_head, 2, 0).status, Submit(guessed, 1, 0).status, server_->Discard(guessed, 1, 0),
                                      server_->Apply(ApplyOf(guessed, 1, 0))}) {
    const WireError error = DecodeError(refusal);
    EXPECT_EQ(error.reason, "STEP_LOST") << error.message;
    EXPECT_EQ(error.at("restoredStep"), "1");
    EXPECT_EQ(error.at("checkpoint"), "step-1");
  }
  // Up to 16 epochs, which others see.
  TestHead head = old_head;
  const std::vector<std::string> worked_under(16, old_head.head.epoch());
  EXPECT_EQ(restored.recovers_epochs_size(), 0);
  ASSERT_EQ(ReasonOf(server_->Take(&head, restored.epoch(), worked_under)), "OK");
  EXPECT_THAT(head.head.recovers_epochs(), ::testing::ElementsAreArray(worked_under));
  EXPECT_THAT(server_->Get(head.name()).recovers_epochs(), ::testing::ElementsAreArray(worked_under));
  EXPECT_EQ(head.head.state(), v1::HEAD_STATE_READY);
  EXPECT_TRUE(head.head.restored_checkpoint().empty());
  // A new run has worked under none.
  ASSERT_EQ(ReasonOf(server_->Take(&head)), "OK");
  EXPECT_EQ(head.head.recovers_epochs_size(), 0);
}

TEST_P(Lifecycle, ListsCheckpointsNewestFirst) {
  const auto list = [&](int page_size, const std::string& token, v1::ListCheckpointsResponse* response) {
    grpc::ClientContext context;
    v1::ListCheckpointsRequest request;
    request.set_name("tenants/default/heads/h");
    request.set_page_size(page_size);
    request.set_page_token(token);
    return server_->heads().ListCheckpoints(&context, request, response);
  };
  v1::ListCheckpointsResponse all;
  EXPECT_EQ(ReasonOf(list(0, "", &all)), "STORAGE_NOT_CONFIGURED");
  Restart(WithCheckpoints());
  ASSERT_EQ(ReasonOf(list(0, "", &all)), "OK");
  EXPECT_EQ(all.checkpoints_size(), 0);
  const int64_t begin = absl::ToUnixSeconds(absl::Now());
  const TestHead head = server_->MakeHead("h", SmallSpec());
  Save(head, "zero");
  Require(server_->Apply(ApplyOf(head, 0, 0)), "ApplyOptimizerStep");
  Save(head, "one");
  Save(head, "again");
  std::filesystem::resize_file(root_ + "/default/h/zero/manifest.json", 10);
  Require(Delete(head), "DeleteHead");  // checkpoints stay
  ASSERT_EQ(ReasonOf(list(0, "", &all)), "OK");
  ASSERT_EQ(all.checkpoints_size(), 3);
  EXPECT_TRUE(all.next_page_token().empty());
  for (int i = 0; i < 2; ++i) {
    const v1::Checkpoint& checkpoint = all.checkpoints(i);
    EXPECT_EQ(checkpoint.checkpoint(), i == 0 ? "again" : "one");
    EXPECT_EQ(checkpoint.step(), 1);
    EXPECT_GT(checkpoint.total_bytes(), 0);
    EXPECT_GE(checkpoint.save_time().seconds(), begin);
    EXPECT_LE(checkpoint.save_time().seconds(), absl::ToUnixSeconds(absl::Now()));
    EXPECT_FALSE(checkpoint.damaged());
  }
  EXPECT_EQ(all.checkpoints(2).checkpoint(), "zero");
  EXPECT_TRUE(all.checkpoints(2).damaged());
  v1::ListCheckpointsResponse page;
  ASSERT_EQ(ReasonOf(list(2, "", &page)), "OK");
  EXPECT_EQ(page.checkpoints_size(), 2);
  ASSERT_EQ(page.next_page_token(), "one");
  ASSERT_EQ(ReasonOf(list(2, "one", &page)), "OK");
  ASSERT_EQ(page.checkpoints_size(), 1);
  EXPECT_EQ(page.checkpoints(0).checkpoint(), "zero");
  EXPECT_TRUE(page.next_page_token().empty());
}

TEST_P(Lifecycle, DeletesOneCheckpoint) {
  const auto remove = [&](const std::string& checkpoint, bool* deleted) {
    v1::DeleteCheckpointRequest request;
    request.set_name("tenants/default/heads/h");
    request.set_checkpoint(checkpoint);
    v1::DeleteCheckpointResponse response;
    const grpc::Status status = server_->Call(&Heads::DeleteCheckpoint, request, &response);
    *deleted = response.deleted();
    return ReasonOf(status);
  };
  bool deleted = false;
  EXPECT_EQ(remove("zero", &deleted), "STORAGE_NOT_CONFIGURED");
  Restart(WithCheckpoints());
  const TestHead head = server_->MakeHead("h", SmallSpec());
  Save(head, "zero");
  Require(server_->Apply(ApplyOf(head, 0, 0)), "ApplyOptimizerStep");
  Save(head, "one");
  std::filesystem::resize_file(root_ + "/default/h/zero/manifest.json", 10);  // a damaged one can be removed, too
  for (const bool first : {true, false}) {
    EXPECT_EQ(remove("zero", &deleted), "OK");
    EXPECT_EQ(deleted, first);
  }
  EXPECT_FALSE(std::filesystem::exists(root_ + "/default/h/zero"));
  EXPECT_TRUE(std::filesystem::exists(root_ + "/default/h/one"));
  EXPECT_EQ(remove("one", &deleted), "OK");
  EXPECT_TRUE(deleted);
  Restart(WithCheckpoints());  // nothing is left that the head could come back from
  EXPECT_THAT(Names(""), ::testing::IsEmpty());
}

TEST_P(Lifecycle, IdleHeadsAreSavedAndDeleted) {
  ServerSetup setup = WithCheckpoints();
  setup.options.idle_head_timeout = absl::Milliseconds(1000);
  setup.options.idle_head_checkpoint = true;
  Restart(setup);
  const TestHead idle = server_->MakeHead("idle", SmallSpec());
  const TestHead used = server_->MakeHead("used", SmallSpec());
  Require(server_->Apply(ApplyOf(idle, 0, 0)), "ApplyOptimizerStep");
  EXPECT_TRUE(Await([&] {
    server_->Get(used.name());  // a use
    return Names("").size() == 1;
  }));
  EXPECT_THAT(Names(""), ::testing::ElementsAre(used.name()));
  EXPECT_TRUE(AwaitMetric("headwater_expired_heads_total", 1));
  // Its checkpoint is there for a head of that name.
  TestHead again = server_->MakeHead("idle", SmallSpec());
  v1::RestoreCheckpointRequest request;
  request.set_name(again.name());
  request.set_epoch(again.head.epoch());
  request.set_checkpoint("idle-1");
  v1::Head restored;
  ASSERT_EQ(ReasonOf(server_->Call(&Heads::RestoreCheckpoint, request, &restored)), "OK");
  EXPECT_EQ(restored.open_step(), 1);
}

TEST_P(Lifecycle, SavingIdleHeadsNeedsADirectory) {
  ServerSetup setup = MakeSetup();
  setup.options.idle_head_checkpoint = true;
  EXPECT_THROW(WireServer server(setup), std::runtime_error);
}

TEST_P(Lifecycle, AHeadIsInUseFromTheHeaderOfAMicroBatchOn) {
  Restart(WithLimit(&service::Limits::max_heads_per_tenant, 1, MakeSetup()));
  const TestHead head = server_->MakeHead("h", SmallSpec());
  OpenStream upload(server_->loss(), CrossEntropyHeader(head, 0, 0, {1, 2, 3}));  // of which no row comes
  EXPECT_TRUE(server_->AwaitInFlight());
  {
    v1::DeleteHeadRequest request;
    request.set_name(head.name());
    const WireError error = DecodeError(server_->Call(&Heads::DeleteHead, request));
    EXPECT_EQ(error.reason, "HEAD_IN_USE");
    EXPECT_EQ(error.at("runningCalls"), "1");
  }
  Require(Delete(head), "DeleteHead with force");
  // The call ends though its client goes on; with it goes what it kept.
  EXPECT_EQ(ReasonOf(upload.End()), "HEAD_NOT_FOUND");
  v1::Head created;
  EXPECT_EQ(ReasonOf(server_->Create(head.name(), SmallSpec(), &created)), "OK");
}

}  // namespace
}  // namespace headwater::testing
