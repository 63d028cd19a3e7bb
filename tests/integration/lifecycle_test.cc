// Heads and their checkpoints beside their steps: how they are listed, deleted and saved, and when a head is in use.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/integration/support/open_stream.h"
#include "tests/integration/support/wire_server.h"

namespace headwater::testing {
namespace {

using ::testing::ElementsAre;

class Lifecycle : public ::testing::Test {
 protected:
  Lifecycle() { setup_.options.checkpoint_directory = root_; }
  // Closes the open step.
  static void Discard(WireServer& server, const TestHead& head) {
    v1::DiscardGradientRequest request;
    *request.mutable_head() = server.At(head, server.Get(head.name()).open_step());
    Require(server.Call(&Heads::DiscardGradient, request), "DiscardGradient");
  }
  static std::vector<std::string> Names(WireServer& server) {
    v1::ListHeadsResponse response;
    Require(server.Call(&Heads::ListHeads, {}, &response), "ListHeads");
    std::vector<std::string> names;
    for (const v1::Head& head : response.heads()) names.push_back(head.name());
    return names;
  }
  const TemporaryDirectory folder_;
  const std::string& root_ = folder_.path();
  ServerSetup setup_;
};

TEST_F(Lifecycle, CheckpointsAreListedNewestFirstAndDeleted) {
  WireServer server(setup_);
  const TestHead head = server.MakeHead("h", SmallSpec());
  for (const char* const id : {"zero", "one", "again"}) {
    v1::SaveCheckpointRequest request;
    request.set_name(head.name());
    request.set_epoch(head.head.epoch());
    request.set_checkpoint(id);
    Require(server.Call(&Heads::SaveCheckpoint, request), "SaveCheckpoint");
    if (request.checkpoint() == "zero") Discard(server, head);
  }
  std::filesystem::resize_file(root_ + "/default/h/zero/manifest.json", 10);
  v1::ListCheckpointsRequest list;
  list.set_name(head.name());
  list.set_page_size(2);
  v1::ListCheckpointsResponse page;
  Require(server.Call(&Heads::ListCheckpoints, list, &page), "ListCheckpoints");
  ASSERT_EQ(page.checkpoints_size(), 2);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(page.checkpoints(i).checkpoint(), i == 0 ? "again" : "one");
    EXPECT_EQ(page.checkpoints(i).step(), 1);
    EXPECT_FALSE(page.checkpoints(i).damaged());
  }
  ASSERT_EQ(page.next_page_token(), "one");
  list.set_page_token("one");
  Require(server.Call(&Heads::ListCheckpoints, list, &page), "ListCheckpoints");
  ASSERT_EQ(page.checkpoints_size(), 1);
  EXPECT_EQ(page.checkpoints(0).checkpoint(), "zero");
  EXPECT_TRUE(page.checkpoints(0).damaged());
  EXPECT_TRUE(page.next_page_token().empty());

  v1::DeleteCheckpointRequest request;
  request.set_name(head.name());
  request.set_checkpoint("zero");  // a damaged one can be removed, too
  v1::DeleteCheckpointResponse response;
  for (const bool first : {true, false}) {
    Require(server.Call(&Heads::DeleteCheckpoint, request, &response), "DeleteCheckpoint");
    EXPECT_EQ(response.deleted(), first);
  }
  EXPECT_FALSE(std::filesystem::exists(root_ + "/default/h/zero"));
  EXPECT_TRUE(std::filesystem::exists(root_ + "/default/h/one"));
}

TEST_F(Lifecycle, IdleHeadsAreSavedAndDeleted) {
  setup_.options.idle_head_timeout = absl::Milliseconds(1000);
  setup_.options.idle_head_checkpoint = true;
  WireServer server(setup_);
  const TestHead idle = server.MakeHead("idle", SmallSpec());
  const TestHead used = server.MakeHead("used", SmallSpec());
  Discard(server, idle);
  EXPECT_TRUE(Await([&] {
    server.Get(used.name());  // a use
    return Names(server).size() == 1;
  }));
  EXPECT_THAT(Names(server), ElementsAre(used.name()));
  EXPECT_TRUE(server.AwaitMetric("headwater_expired_heads_total", 1));
  EXPECT_TRUE(std::filesystem::exists(root_ + "/default/idle/idle-1"));
}

TEST_F(Lifecycle, AHeadIsInUseFromTheHeaderOfAMicroBatchOn) {
  WireServer server(WithLimit(&service::Limits::max_heads_per_tenant, 1));
  const TestHead head = server.MakeHead("h", SmallSpec());
  OpenStream upload(server.loss(), CrossEntropyHeader(head, 0, 0, {1, 2, 3}));  // of which no row comes
  EXPECT_TRUE(server.AwaitInFlight());
  v1::DeleteHeadRequest request;
  request.set_name(head.name());
  const WireError error = DecodeError(server.Call(&Heads::DeleteHead, request));
  EXPECT_EQ(error.reason, "HEAD_IN_USE");
  EXPECT_EQ(error.at("runningCalls"), "1");
  request.set_force(true);
  Require(server.Call(&Heads::DeleteHead, request), "DeleteHead with force");
  // The call ends though its client goes on; with it goes what it kept.
  EXPECT_EQ(ReasonOf(upload.End()), "HEAD_NOT_FOUND");
  v1::Head created;
  EXPECT_EQ(ReasonOf(server.Create(head.name(), SmallSpec(), &created)), "OK");
}

}  // namespace
}  // namespace headwater::testing
