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

grpc::Status SaveAs(WireServer& server, const TestHead& head, const std::string& checkpoint) {
  v1::SaveCheckpointRequest request;
  request.set_name(head.name());
  request.set_epoch(head.head.epoch());
  request.set_checkpoint(checkpoint);
  return server.Call(&Heads::SaveCheckpoint, request);
}

// One upload stream, step by step.
struct Upload {
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::UploadWeightsRequest, v1::UploadWeightsResponse>> stream;
  int64_t resume_offset = -1;
  v1::Head head;

  Upload(WireServer& server, const v1::UploadWeightsHeader& header) : stream(server.heads().UploadWeights(&context)) {
    v1::UploadWeightsRequest request;
    *request.mutable_header() = header;
    v1::UploadWeightsResponse response;
    if (stream->Write(request) && stream->Read(&response)) resume_offset = response.resume_offset_bytes();
  }
  void Send(int64_t offset, const std::string& data) {
    v1::UploadWeightsRequest request;
    request.mutable_chunk()->set_offset_bytes(offset);
    request.mutable_chunk()->set_data(data);
    stream->Write(request);
  }
  grpc::Status End() {
    stream->WritesDone();
    v1::UploadWeightsResponse response;
    while (stream->Read(&response)) head = response.head();
    return stream->Finish();
  }
};

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
    Upload cut(server_, header);
    EXPECT_EQ(cut.resume_offset, 0);
    cut.Send(0, bytes.substr(0, 100));
    EXPECT_EQ(ReasonOf(cut.End()), "PROTOCOL_VIOLATION");  // 160 bytes are missing
  }
  EXPECT_EQ(server_.Get(created.name()).state(), v1::HEAD_STATE_LOADING);
  {
    Upload cancelled(server_, header);
    EXPECT_EQ(cancelled.resume_offset, 100);
    cancelled.context.TryCancel();
    cancelled.End();
  }
  Upload resumed(server_, header);
  ASSERT_EQ(resumed.resume_offset, 100);
  resumed.Send(100, bytes.substr(100));
  ASSERT_EQ(ReasonOf(resumed.End()), "OK");
  EXPECT_EQ(resumed.head.state(), v1::HEAD_STATE_READY);
  EXPECT_EQ(resumed.head.weight_checksum(), Checksum(bytes));
  TestHead head;
  head.head = resumed.head;
  EXPECT_EQ(server_.Weights(head), bytes);
  EXPECT_THAT(server_.server().SerializeMetrics(), ::testing::HasSubstr("headwater_upload_bytes 0\n"));
}

TEST_P(Weights, AnUploadsIdStandsForOneContent) {
  const TestHead head = server_.MakeHead("h", SmallSpec());
  const std::string before = server_.Snapshot(head);
  const std::string bytes = Bytes(Random(65, 4, 1));
  {
    v1::UploadWeightsHeader header = UploadHeader(head.head, "sum");
    header.set_checksum(std::string(16, '\1'));
    Upload upload(server_, header);
    upload.Send(0, bytes);
    EXPECT_EQ(ReasonOf(upload.End()), "CHECKSUM_MISMATCH");
    EXPECT_EQ(Upload(server_, header).resume_offset, 0);  // its bytes were wrong: they are gone
  }
  Upload begun(server_, UploadHeader(head.head, "other"));
  v1::UploadWeightsHeader header = UploadHeader(head.head, "other");
  header.set_checksum(Checksum(bytes));
  EXPECT_EQ(ReasonOf(Upload(server_, header).End()), "INVALID_COMBINATION");
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
  WireServer server;
  const TestHead head = server.MakeHead("h", SmallSpec());
  const auto missing = [&](auto method, auto request) {
    request.set_name(head.name());
    if constexpr (requires { request.set_epoch(""); }) request.set_epoch(head.head.epoch());
    if constexpr (requires { request.set_checkpoint(""); }) request.set_checkpoint("c");
    if constexpr (requires { request.set_path(""); }) request.set_path("w.safetensors");
    const WireError error = DecodeError(server.Call(method, request));
    EXPECT_EQ(error.reason, "STORAGE_NOT_CONFIGURED");
    return error.at("expected");
  };
  EXPECT_EQ(missing(&Heads::LoadWeights, v1::LoadWeightsRequest()), "--load_root");
  EXPECT_EQ(missing(&Heads::SaveCheckpoint, v1::SaveCheckpointRequest()), "--checkpoint_directory");
  EXPECT_EQ(missing(&Heads::ListCheckpoints, v1::ListCheckpointsRequest()), "--checkpoint_directory");
  EXPECT_EQ(missing(&Heads::DeleteCheckpoint, v1::DeleteCheckpointRequest()), "--checkpoint_directory");
  EXPECT_EQ(missing(&Heads::RestoreCheckpoint, v1::RestoreCheckpointRequest()), "--checkpoint_directory");
}

TEST(WeightsInUpload, AreFourOfAHeadAndBoundedInBytes) {
  constexpr int64_t kMost = 4 * 260;
  WireServer server(WithLimit(&service::Limits::max_upload_bytes, kMost));
  v1::Head head;
  v1::Head other;
  Require(server.Create("tenants/default/heads/h", SmallSpec(), &head), "CreateHead");
  Require(server.Create("tenants/default/heads/other", SmallSpec(), &other), "CreateHead");
  std::deque<Upload> uploads;
  for (const char* const id : {"a", "b", "c", "d"}) {
    uploads.emplace_back(server, UploadHeader(head, id));
    EXPECT_EQ(uploads.back().resume_offset, 0) << id;
  }
  EXPECT_TRUE(server.AwaitMetric("headwater_upload_bytes", kMost));
  WireError error = DecodeError(Upload(server, UploadHeader(head, "e")).End());
  EXPECT_EQ(error.code, grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(error.reason, "QUOTA_EXCEEDED");
  EXPECT_EQ(error.at("field"), "header.upload_id");
  EXPECT_EQ(error.at("limit"), "uploads_per_head");
  EXPECT_EQ(error.at("maximum"), "4");
  EXPECT_EQ(error.at("actual"), "5");
  error = DecodeError(Upload(server, UploadHeader(other, "e")).End());
  EXPECT_EQ(error.reason, "IN_FLIGHT_BYTES_EXCEEDED");
  EXPECT_EQ(error.at("maximum"), std::to_string(kMost));
  for (Upload& upload : uploads) {
    upload.context.TryCancel();
    upload.End();
  }
}

// ---- checkpoints, and heads that go ----------------------------------------------------------------------------------

TEST(Checkpoints, AreListedByPageAndDamagedOnesCanBeDeleted) {
  const TemporaryDirectory root;
  ServerSetup setup;
  setup.options.checkpoint_directory = root.path();
  WireServer server(setup);
  const TestHead head = server.MakeHead("h", SmallSpec());
  for (const char* const id : {"zero", "one", "two"}) Require(SaveAs(server, head, id), "SaveCheckpoint");
  std::filesystem::resize_file(root.path() + "/default/h/zero/manifest.json", 10);
  v1::ListCheckpointsRequest list;
  list.set_name(head.name());
  list.set_page_size(2);
  std::string listed;
  do {
    v1::ListCheckpointsResponse page;
    Require(server.Call(&Heads::ListCheckpoints, list, &page), "ListCheckpoints");
    for (const v1::Checkpoint& one : page.checkpoints()) listed += one.checkpoint() + (one.damaged() ? " damaged, " : ", ");
    listed += "end of page; ";
    list.set_page_token(page.next_page_token());
  } while (!list.page_token().empty());
  EXPECT_EQ(listed, "two, one, end of page; zero damaged, end of page; ");
  v1::DeleteCheckpointRequest request;
  request.set_name(head.name());
  request.set_checkpoint("zero");
  Require(server.Call(&Heads::DeleteCheckpoint, request), "DeleteCheckpoint");
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
    return server.MetricLine("headwater_expired_heads_total") == "headwater_expired_heads_total 1";
  }));
  v1::GetHeadRequest request;
  request.set_name("tenants/default/heads/idle");
  EXPECT_EQ(ReasonOf(server.Call(&Heads::GetHead, request)), "HEAD_NOT_FOUND");
  server.Get(used.name());
  EXPECT_TRUE(std::filesystem::exists(root.path() + "/default/idle/idle-0"));
}

TEST(Heads, AreInUseFromTheHeaderOfAMicroBatchOn) {
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
