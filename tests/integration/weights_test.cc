// Weights in and out: resumable uploads, checksums, downloads, files, checkpoints.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <xxhash.h>

#include <chrono>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/support/faulty_disk.h"
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
  const WireError error = DecodeError(SaveAs(server, head, "c"));
  EXPECT_EQ(error.reason, "STORAGE_NOT_CONFIGURED");
  EXPECT_EQ(error.at("expected"), "--checkpoint_directory");
  v1::LoadWeightsRequest load;
  load.set_name(head.name());
  load.set_epoch(head.head.epoch());
  load.set_path("w.safetensors");
  EXPECT_EQ(DecodeError(server.Call(&Heads::LoadWeights, load)).at("expected"), "--load_root");
  v1::ListCheckpointsRequest list;
  list.set_name(head.name());
  EXPECT_EQ(DecodeError(server.Call(&Heads::ListCheckpoints, list)).at("expected"), "--checkpoint_directory");
  v1::DeleteCheckpointRequest remove;
  remove.set_name(head.name());
  remove.set_checkpoint("c");
  EXPECT_EQ(DecodeError(server.Call(&Heads::DeleteCheckpoint, remove)).at("expected"), "--checkpoint_directory");
  v1::RestoreCheckpointRequest restore;
  restore.set_name(head.name());
  restore.set_epoch(head.head.epoch());
  restore.set_checkpoint("c");
  EXPECT_EQ(DecodeError(server.Call(&Heads::RestoreCheckpoint, restore)).at("expected"), "--checkpoint_directory");
}

// A save reads the weights: micro-batches of its head and of others run beside it.
TEST(WeightsBeingSaved, KeepNoMicroBatchWaiting) {
  const TemporaryDirectory root;
  ServerSetup setup;
  setup.options.checkpoint_directory = root.path();
  WireServer server(setup);
  const TestHead saved = server.MakeHead("saved", SmallSpec());
  const TestHead other = server.MakeHead("other", SmallSpec());
  constexpr int64_t kRows = 2000;  // large ones, of which two are at the engine
  const std::string rows = Bytes(Random(kRows * 5, 5, 1));
  const auto header = [&](const TestHead& head, int64_t micro_batch) {
    return CrossEntropyHeader(head, 0, micro_batch, std::vector<int32_t>(kRows, 1));
  };
  disk_hangs = true;
  std::vector<std::thread> threads;
  threads.emplace_back([&] { EXPECT_EQ(ReasonOf(SaveAs(server, saved, "x")), "OK"); });
  EXPECT_TRUE(Await([] { return hanging_writes > 0; }));
  for (const TestHead* head : {&saved, &other}) {
    for (int64_t id = 0; id < 2; ++id) {
      EXPECT_EQ(ReasonOf(server.Compute(header(*head, id), rows, "", {.chunk_rows = 500, .deadline_ms = 20000}).status), "OK");
    }
  }
  EXPECT_GT(hanging_writes, 0);
  disk_hangs = false;
  for (std::thread& thread : threads) thread.join();
  for (int64_t id = 0; id < 2; ++id) EXPECT_EQ(server.Find(saved, id).state(), v1::CONTRIBUTION_STATE_COMMITTED) << id;
}

TEST(WeightsInUpload, TheServersLimitIsTheStores) {
  WireServer server(WithLimit(&service::Limits::max_upload_bytes, 260));
  v1::Head head;
  Require(server.Create("tenants/default/heads/h", SmallSpec(), &head), "CreateHead");
  Upload first(server, UploadHeader(head, "a"));  // at the limit
  EXPECT_EQ(first.resume_offset, 0);
  EXPECT_EQ(server.MetricLine("headwater_upload_bytes"), "headwater_upload_bytes 260");
  const WireError error = DecodeError(Upload(server, UploadHeader(head, "b")).End());
  EXPECT_EQ(error.reason, "IN_FLIGHT_BYTES_EXCEEDED");
  EXPECT_EQ(error.at("maximum"), "260");
  first.context.TryCancel();
  first.End();
}

TEST(WeightsInUpload, AreFourOfAHead) {
  WireServer server;
  v1::Head head;
  Require(server.Create("tenants/default/heads/h", SmallSpec(), &head), "CreateHead");
  std::deque<Upload> uploads;
  for (const char* const id : {"a", "b", "c", "d"}) {
    uploads.emplace_back(server, UploadHeader(head, id));
    EXPECT_EQ(uploads.back().resume_offset, 0) << id;
  }
  const WireError error = DecodeError(Upload(server, UploadHeader(head, "e")).End());
  EXPECT_EQ(error.code, grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(error.reason, "QUOTA_EXCEEDED");
  EXPECT_EQ(error.at("field"), "header.upload_id");
  EXPECT_EQ(error.at("limit"), "uploads_per_head");
  EXPECT_EQ(error.at("maximum"), "4");
  EXPECT_EQ(error.at("actual"), "5");
  for (Upload& upload : uploads) {
    upload.context.TryCancel();
    upload.End();
  }
}

}  // namespace
}  // namespace headwater::testing
