// Weights in and out: resumable uploads, checksums, downloads, checkpoints; and when a head is in use.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <xxhash.h>

#include <deque>
#include <filesystem>
#include <string>

#include "tests/integration/support/open_stream.h"
#include "tests/integration/support/wire_server.h"

namespace headwater::testing {
namespace {

std::string Checksum(const std::string& bytes) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
  return std::string(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest));
}

class Weights : public ::testing::TestWithParam<int> {
 protected:
  ServerSetup MakeSetup() {
    ServerSetup setup;
    setup.engine.shard_count = GetParam();
    setup.options.load_root = root_.path();
    setup.options.checkpoint_directory = root_.path() + "/checkpoints";
    return setup;
  }
  const TemporaryDirectory root_;
  WireServer server_{MakeSetup()};
};

INSTANTIATE_TEST_SUITE_P(Shards, Weights, ::testing::Values(1, 3));

TEST_P(Weights, ACutUploadGoesOnWhereItStopped) {
  v1::Head created;
  Require(server_.Create("tenants/default/heads/h", SmallSpec(), &created), "CreateHead");
  EXPECT_EQ(created.state(), v1::HEAD_STATE_LOADING);
  const std::string bytes = Bytes(Random(65, 3, 1));
  v1::UploadWeightsHeader header = UploadHeader(created, "u1");
  header.set_checksum(Checksum(bytes));
  {
    UploadStream cut(server_.heads(), header);
    EXPECT_EQ(cut.resume_offset, 0);
    cut.Send(0, bytes.substr(0, 100));
    EXPECT_EQ(ReasonOf(cut.End()), "PROTOCOL_VIOLATION");  // 160 bytes are missing
  }
  EXPECT_EQ(server_.Get(created.name()).state(), v1::HEAD_STATE_LOADING);
  {
    UploadStream cancelled(server_.heads(), header);
    EXPECT_EQ(cancelled.resume_offset, 100);
    cancelled.Cancel();
  }
  UploadStream resumed(server_.heads(), header);
  ASSERT_EQ(resumed.resume_offset, 100);
  resumed.Send(100, bytes.substr(100));
  ASSERT_EQ(ReasonOf(resumed.End()), "OK");
  EXPECT_EQ(resumed.head.state(), v1::HEAD_STATE_READY);
  EXPECT_EQ(resumed.head.weight_checksum(), Checksum(bytes));
  EXPECT_EQ(server_.Weights({.head = resumed.head}), bytes);
  EXPECT_THAT(server_.server().SerializeMetrics(), ::testing::HasSubstr("headwater_upload_bytes 0\n"));
}

TEST_P(Weights, AnUploadsIdStandsForOneContent) {
  const TestHead head = server_.MakeHead("h", SmallSpec());
  const std::string before = server_.Snapshot(head);
  const std::string bytes = Bytes(Random(65, 4, 1));
  {
    v1::UploadWeightsHeader header = UploadHeader(head.head, "sum");
    header.set_checksum(std::string(16, '\1'));
    UploadStream upload(server_.heads(), header);
    upload.Send(0, bytes);
    EXPECT_EQ(ReasonOf(upload.End()), "CHECKSUM_MISMATCH");
    EXPECT_EQ(UploadStream(server_.heads(), header).resume_offset, 0);  // its bytes were wrong: they are gone
  }
  UploadStream begun(server_.heads(), UploadHeader(head.head, "other"));
  v1::UploadWeightsHeader header = UploadHeader(head.head, "other");
  header.set_checksum(Checksum(bytes));
  EXPECT_EQ(ReasonOf(UploadStream(server_.heads(), header).End()), "INVALID_COMBINATION");
  begun.context.TryCancel();
  EXPECT_EQ(server_.Snapshot(head), before);
}

TEST_P(Weights, DownloadsResumeAnywhereOnAnElement) {
  v1::HeadSpec spec = SmallSpec();
  spec.set_data_type(v1::DATA_TYPE_BFLOAT16);
  spec.set_has_bias(true);
  const TestHead head = server_.MakeHead("h", spec);
  const auto download = [&](v1::DataType type, int64_t offset, std::string* bytes, v1::DownloadTensorHeader* header) {
    grpc::ClientContext context;
    v1::DownloadWeightsRequest request;
    request.set_name(head.name());
    request.set_tensor(v1::HEAD_TENSOR_WEIGHT);
    request.set_data_type(type);
    request.set_offset_bytes(offset);
    return ReadDownload(*server_.heads().DownloadWeights(&context, request), bytes, header);
  };
  std::string stored;
  v1::DownloadTensorHeader header;
  ASSERT_EQ(ReasonOf(download(v1::DATA_TYPE_UNSPECIFIED, 0, &stored, &header)), "OK");
  EXPECT_EQ(stored.size(), 130U);
  EXPECT_EQ(header.data_type(), v1::DATA_TYPE_BFLOAT16);
  EXPECT_EQ(header.total_bytes(), 130);
  EXPECT_THAT(header.shape(), ::testing::ElementsAre(13, 5));
  std::string rest;
  ASSERT_EQ(ReasonOf(download(v1::DATA_TYPE_BFLOAT16, 62, &rest, &header)), "OK");
  EXPECT_EQ(rest, stored.substr(62));
  EXPECT_EQ(header.total_bytes(), 130);
  ASSERT_EQ(ReasonOf(download(v1::DATA_TYPE_BFLOAT16, 130, &rest, &header)), "OK");
  EXPECT_TRUE(rest.empty());
  // The master weights kept what was uploaded, whole.
  ASSERT_EQ(ReasonOf(download(v1::DATA_TYPE_FLOAT32, 0, &rest, &header)), "OK");
  EXPECT_EQ(rest, Bytes(head.weight));
}

TEST(WeightsWithoutStorage, SayWhichFlagIsMissing) {
  HeadServer server;
  const auto missing = [&](auto method, auto request) {
    if constexpr (requires { request.set_checkpoint(""); }) request.set_checkpoint("c");
    if constexpr (requires { request.set_path(""); }) request.set_path("w.safetensors");
    return ExpectError(server.Call(method, request), "STORAGE_NOT_CONFIGURED").at("expected");
  };
  EXPECT_EQ(missing(&Heads::LoadWeights, RequestOn<v1::LoadWeightsRequest>(server.head)), "--load_root");
  EXPECT_EQ(missing(&Heads::SaveCheckpoint, RequestOn<v1::SaveCheckpointRequest>(server.head)), "--checkpoint_directory");
  EXPECT_EQ(missing(&Heads::ListCheckpoints, RequestOn<v1::ListCheckpointsRequest>(server.head)), "--checkpoint_directory");
  EXPECT_EQ(missing(&Heads::DeleteCheckpoint, RequestOn<v1::DeleteCheckpointRequest>(server.head)), "--checkpoint_directory");
  EXPECT_EQ(missing(&Heads::RestoreCheckpoint, RequestOn<v1::RestoreCheckpointRequest>(server.head)), "--checkpoint_directory");
}

TEST(WeightsInUpload, AreFourOfAHeadAndBoundedInBytes) {
  constexpr int64_t kMost = 4 * 260;
  WireServer server(WithLimit(&service::Limits::max_upload_bytes, kMost));
  v1::Head head;
  v1::Head other;
  Require(server.Create("tenants/default/heads/h", SmallSpec(), &head), "CreateHead");
  Require(server.Create("tenants/default/heads/other", SmallSpec(), &other), "CreateHead");
  std::deque<UploadStream> uploads;
  for (const char* const id : {"a", "b", "c", "d"}) {
    uploads.emplace_back(server.heads(), UploadHeader(head, id));
    EXPECT_EQ(uploads.back().resume_offset, 0) << id;
  }
  EXPECT_TRUE(server.AwaitMetric("headwater_upload_bytes", kMost));
  ExpectError(UploadStream(server.heads(), UploadHeader(head, "e")).End(), "QUOTA_EXCEEDED",
              {{"field", "header.upload_id"}, {"limit", "uploads_per_head"}, {"maximum", "4"}, {"actual", "5"}});
  ExpectError(UploadStream(server.heads(), UploadHeader(other, "e")).End(), "IN_FLIGHT_BYTES_EXCEEDED",
              {{"maximum", std::to_string(kMost)}});
  for (UploadStream& upload : uploads) upload.Cancel();
}

// ---- checkpoints, and heads that go ----------------------------------------------------------------------------------

TEST(Checkpoints, AreListedByPageAndDamagedOnesCanBeDeleted) {
  const TemporaryDirectory root;
  HeadServer server(WithOption(&service::ServerOptions::checkpoint_directory, root.path()));
  for (const char* const id : {"zero", "one", "two"}) Require(server.Save(server.head, id), "SaveCheckpoint");
  std::filesystem::resize_file(root.path() + "/default/h/zero/manifest.json", 10);
  auto list = RequestOn<v1::ListCheckpointsRequest>(server.head);
  list.set_page_size(2);
  std::string listed;
  do {
    const v1::ListCheckpointsResponse page = server.Must(&Heads::ListCheckpoints, list);
    for (const v1::Checkpoint& one : page.checkpoints()) listed += one.checkpoint() + (one.damaged() ? " damaged, " : ", ");
    listed += "end of page; ";
    list.set_page_token(page.next_page_token());
  } while (!list.page_token().empty());
  EXPECT_EQ(listed, "two, one, end of page; zero damaged, end of page; ");
  auto request = RequestOn<v1::DeleteCheckpointRequest>(server.head);
  request.set_checkpoint("zero");
  server.Must(&Heads::DeleteCheckpoint, request);
  EXPECT_FALSE(std::filesystem::exists(root.path() + "/default/h/zero"));
  EXPECT_TRUE(std::filesystem::exists(root.path() + "/default/h/one"));
}

TEST(IdleHeads, AreSavedAndDeleted) {
  const TemporaryDirectory root;
  ServerSetup setup;
  setup.options.checkpoint_directory = root.path();
  setup.options.idle_head_timeout = absl::Milliseconds(1000);
  setup.options.idle_head_checkpoint = true;
  WireServer server(setup);
  server.MakeHead("idle", SmallSpec());
  const TestHead used = server.MakeHead("used", SmallSpec());
  EXPECT_TRUE(Await([&] {
    server.Get(used.name());  // a use
    return server.Metric("headwater_expired_heads_total") == "1";
  }));
  v1::GetHeadRequest request;
  request.set_name("tenants/default/heads/idle");
  EXPECT_EQ(ReasonOf(server.Call(&Heads::GetHead, request)), "HEAD_NOT_FOUND");
  server.Get(used.name());
  EXPECT_TRUE(std::filesystem::exists(root.path() + "/default/idle/idle-0"));
}

TEST(Heads, AreInUseFromTheHeaderOfAMicroBatchOn) {
  HeadServer server(WithLimit(&service::Limits::max_heads_per_tenant, 1));
  OpenStream upload(server.loss(), CrossEntropyHeader(server.head, 0, 0, {1, 2, 3}));  // of which no row comes
  EXPECT_TRUE(server.AwaitInFlight());
  auto request = RequestOn<v1::DeleteHeadRequest>(server.head);
  ExpectError(server.Call(&Heads::DeleteHead, request), "HEAD_IN_USE", {{"runningCalls", "1"}});
  request.set_force(true);
  server.Must(&Heads::DeleteHead, request);
  // The call ends though its client goes on; with it goes what it kept.
  EXPECT_EQ(ReasonOf(upload.End()), "HEAD_NOT_FOUND");
  EXPECT_EQ(ReasonOf(server.Create(server.head.name(), SmallSpec())), "OK");
}

}  // namespace
}  // namespace headwater::testing
