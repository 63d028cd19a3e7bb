// A save on a disk that takes its time: what it keeps waiting, how that ends, and what goes on beside it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "tests/integration/support/hanging_disk.h"
#include "tests/integration/transactions/transaction_fixture.h"

namespace headwater::testing {
namespace {

// A folder of the test's own.
std::string MakeRoot() {
  std::string pattern = (std::filesystem::temp_directory_path() / "headwater-slow-disk-XXXXXX").string();
  return mkdtemp(pattern.data());
}

class SlowDisk : public ::testing::Test {
 protected:
  SlowDisk() {
    ServerSetup setup;
    setup.options.checkpoint_directory = root_;
    setup.options.limits.max_waiting_calls = 2;
    server_ = std::make_unique<WireServer>(setup);
    saved_ = server_->MakeHead("saved", SmallSpec());
  }
  ~SlowDisk() override {
    EndHang();
    server_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }

  // Begins a save of `saved_` that hangs until EndHang().
  void BeginSave() {
    disk_hangs = true;
    const int before = hanging_writes;
    saver_ = std::thread([this] { save_reason_ = ReasonOf(Save("x")); });
    EXPECT_TRUE(Await([before] { return hanging_writes > before; }));
  }
  // What became of the save, if there was one.
  std::string EndHang() {
    disk_hangs = false;
    if (saver_.joinable()) saver_.join();
    return save_reason_;
  }
  grpc::Status Stage(const TestHead& head, int64_t micro_batch, const std::string& session = "") {
    v1::MicroBatchHeader header = ExplicitHeader(head, 0, micro_batch);
    header.set_session_id(session);
    header.set_allow_held(true);
    return server_->Compute(header, Rows(5)).status;
  }
  grpc::Status Commit(int64_t micro_batch) {
    v1::CommitMicroBatchRequest request;
    *request.add_heads() = server_->At(saved_, 0);
    request.set_micro_batch(micro_batch);
    return server_->Call(&Loss::CommitMicroBatch, request);
  }
  grpc::Status Save(const std::string& checkpoint, grpc::ClientContext& context) {
    v1::SaveCheckpointRequest request;
    request.set_name(saved_.name());
    request.set_epoch(saved_.head.epoch());
    request.set_checkpoint(checkpoint);
    v1::SaveCheckpointResponse response;
    return server_->heads().SaveCheckpoint(&context, request, &response);
  }
  grpc::Status Save(const std::string& checkpoint, std::optional<int> deadline_ms = std::nullopt) {
    grpc::ClientContext context;
    if (deadline_ms.has_value()) {
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(*deadline_ms));
    }
    return Save(checkpoint, context);
  }
  grpc::Status Delete(bool force) {
    v1::DeleteHeadRequest request;
    request.set_name(saved_.name());
    request.set_force(force);
    return server_->Call(&Heads::DeleteHead, request);
  }
  std::string KeepAlive(const std::string& session) {
    v1::KeepAliveRequest request;
    request.set_session_id(session);
    return ReasonOf(server_->Call(&Sessions::KeepAlive, request));
  }
  v1::ContributionState StateOf(const TestHead& head, int64_t micro_batch) { return server_->Find(head, micro_batch).state(); }
  bool AwaitWaiting(int count) { return server_->AwaitMetric("headwater_waiting_calls", count); }

  const std::string root_ = MakeRoot();
  std::unique_ptr<WireServer> server_;
  TestHead saved_;
  std::thread saver_;
  std::string save_reason_ = "no save";
};

TEST_F(SlowDisk, KeepsOnlyWhatConflictsWithASaveWaiting) {
  for (int64_t id = 0; id < 2; ++id) Require(Stage(saved_, id), "ComputeLoss");
  const std::string session = server_->OpenSession(60000);
  BeginSave();
  EXPECT_EQ(ReasonOf(Commit(0)), "OK");
  EXPECT_EQ(ReasonOf(Stage(saved_, 2)), "OK");
  std::string reasons[2];
  std::thread saves[2];
  for (size_t id = 0; id < 2; ++id) {
    saves[id] = std::thread([this, id, &reasons] { reasons[id] = ReasonOf(Save("save-" + std::to_string(id))); });
  }
  EXPECT_TRUE(AwaitWaiting(2));
  // As many wait as may; others go on.
  for (int i = 0; i < 20; ++i) {
    const WireError full = DecodeError(Save("too-many"));
    EXPECT_EQ(full.code, grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_EQ(full.reason, "QUEUE_FULL") << full.message;
    EXPECT_EQ(full.at("limit"), "max_waiting_calls");
    EXPECT_EQ(full.at("maximum"), "2");
    EXPECT_TRUE(full.retry_ms.has_value());
    EXPECT_EQ(KeepAlive(session), "OK");
  }
  EXPECT_EQ(ReasonOf(Commit(1)), "OK");
  EXPECT_EQ(EndHang(), "OK");
  for (std::thread& save : saves) save.join();
  EXPECT_THAT(reasons, ::testing::Each("OK"));
  EXPECT_TRUE(AwaitWaiting(0));
}

TEST_F(SlowDisk, CallsEndWithTheirDeadlinesAndClients) {
  BeginSave();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Save("y", 200).error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(AwaitWaiting(0));
  grpc::ClientContext context;
  std::thread saves([&] { EXPECT_EQ(Save("y", context).error_code(), grpc::StatusCode::CANCELLED); });
  EXPECT_TRUE(AwaitWaiting(1));
  context.TryCancel();
  saves.join();
  EXPECT_TRUE(AwaitWaiting(0));
  EXPECT_EQ(EndHang(), "OK");
  EXPECT_EQ(ReasonOf(Save("y")), "OK");  // none of them has made it
}

TEST_F(SlowDisk, KeepsNoSessionAlive) {
  const TestHead other = server_->MakeHead("other", SmallSpec());
  const std::string one = server_->OpenSession(3000);
  const std::string two = server_->OpenSession(3000);
  Require(Stage(saved_, 0, one), "ComputeLoss");
  Require(Stage(other, 0, two), "ComputeLoss");
  BeginSave();
  EXPECT_TRUE(Await([&] { return StateOf(saved_, 0) == v1::CONTRIBUTION_STATE_DISCARDED; }));
  EXPECT_TRUE(Await([&] { return StateOf(other, 0) == v1::CONTRIBUTION_STATE_DISCARDED; }));
  EXPECT_EQ(KeepAlive(one), "SESSION_NOT_FOUND");
  EXPECT_EQ(ReasonOf(Commit(0)), "MICRO_BATCH_DISCARDED");  // told at once
  EXPECT_EQ(EndHang(), "OK");
  EXPECT_EQ(ReasonOf(Commit(0)), "MICRO_BATCH_DISCARDED");
}

TEST_F(SlowDisk, AHeadThatIsBeingSavedIsInUse) {
  Require(Stage(saved_, 0), "ComputeLoss");
  BeginSave();
  std::string save;
  std::thread saves([&] { save = ReasonOf(Save("y")); });
  EXPECT_TRUE(AwaitWaiting(1));
  const WireError in_use = DecodeError(Delete(/*force=*/false));
  EXPECT_EQ(in_use.reason, "HEAD_IN_USE");
  EXPECT_EQ(in_use.at("runningCalls"), "2");
  std::string deletion;
  std::thread deletes([&] { deletion = ReasonOf(Delete(/*force=*/true)); });
  saves.join();  // while the disk still hangs
  EXPECT_EQ(save, "HEAD_NOT_FOUND");
  EXPECT_EQ(EndHang(), "OK");
  deletes.join();
  EXPECT_EQ(deletion, "OK");
}

}  // namespace
}  // namespace headwater::testing
