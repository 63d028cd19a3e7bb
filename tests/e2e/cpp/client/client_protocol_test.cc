// The C++ client against servers that break off, refuse, stall or answer nonsense.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "headwater/client/client.h"
#include "tests/e2e/cpp/support/scripted_server.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace headwater::client;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr int64_t kHiddenSize = 4;

ClientOptions MakeOptions() {
  ClientOptions options = {.chunk_bytes = 16};
  options.retry = {.max_attempts = 3, .initial_backoff = milliseconds(1), .max_backoff = milliseconds(2)};
  return options;
}

class ClientProtocol : public testing::Test {
 protected:
  ClientProtocol() : client_(Value(Client::Connect(server_.target(), MakeOptions()))), head_(Value(client_.OpenHead("h"))) {}

  Future<LossResult> Submit(const std::vector<float>& hidden, const CallOptions& options = {}) {
    const std::vector<int32_t> targets(hidden.size() / kHiddenSize, 1);
    MicroBatchOptions micro_batch = {.step = 0, .micro_batch = 0};
    return head_.CrossEntropy(RowsView::Float32(hidden, kHiddenSize), targets, {}, micro_batch, options);
  }

  // What a server with the two rows of `two_rows_` answers; tests bend it.
  static v1::ComputeLossResponse GradRows(int64_t row_start, int64_t row_count) {
    v1::ComputeLossResponse response;
    v1::RowChunk* chunk = response.mutable_chunk();
    chunk->set_role(v1::CHUNK_ROLE_GRAD_HIDDEN);
    chunk->set_row_start(row_start);
    chunk->set_row_count(row_count);
    chunk->set_data(std::string(static_cast<size_t>(row_count) * kHiddenSize * 4, '\1'));
    return response;
  }
  static v1::ComputeLossResponse Summary() {
    v1::ComputeLossResponse response;
    response.mutable_summary()->add_terms();
    return response;
  }
  void AnswerWith(std::vector<v1::ComputeLossResponse> responses) {
    server_.compute_loss = [responses](grpc::ServerContext*, ScriptedServer::LossStream* stream) {
      v1::ComputeLossRequest request;
      while (stream->Read(&request)) {
      }
      for (const v1::ComputeLossResponse& response : responses) stream->Write(response);
      return grpc::Status::OK;
    };
  }

  ScriptedServer server_;
  Client client_;
  Head head_;
  const std::vector<float> two_rows_ = std::vector<float>(2 * kHiddenSize, 0.5F);
};

TEST_F(ClientProtocol, ReasonMetadataAndDelayAreDecoded) {
  server_.unary_status = ErrorWithReason(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", 250);
  const absl::Status status = head_.Commit(0, 0).Get().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "scripted");
  EXPECT_EQ(ErrorReason(status), "QUEUE_FULL");
  EXPECT_EQ(ErrorMetadata(status)["field"], "value");
  EXPECT_EQ(RetryDelay(status), milliseconds(250));
  server_.unary_status = grpc::Status(grpc::StatusCode::INTERNAL, "no details", "\xff garbage");
  const absl::Status plain = head_.Commit(0, 0).Get().status();
  EXPECT_EQ(ErrorReason(plain), "");
  EXPECT_TRUE(ErrorMetadata(plain).empty());
  EXPECT_EQ(RetryDelay(plain), std::nullopt);
}

TEST_F(ClientProtocol, NonsenseIsAnErrorAndNeverWrittenOutOfBounds) {
  v1::ComputeLossResponse short_data = GradRows(0, 2);
  short_data.mutable_chunk()->mutable_data()->pop_back();
  v1::ComputeLossResponse wrong_role = GradRows(0, 2);
  wrong_role.mutable_chunk()->set_role(v1::CHUNK_ROLE_HIDDEN);
  v1::ComputeLossResponse huge = GradRows(0, 2);
  huge.mutable_chunk()->set_row_count(int64_t{1} << 60);
  v1::ComputeLossResponse bad_output = Summary();
  bad_output.mutable_summary()->mutable_terms(0)->mutable_token_loss()->set_data("123");
  v1::ComputeLossResponse no_terms;
  no_terms.mutable_summary();
  for (const std::vector<v1::ComputeLossResponse>& responses :
       std::vector<std::vector<v1::ComputeLossResponse>>{{},                           // nothing
                                                         {GradRows(0, 2)},             // no summary
                                                         {Summary()},                  // no gradient
                                                         {GradRows(0, 1), Summary()},  // half a gradient
                                                         {GradRows(1, 1), Summary()},  // not from the beginning
                                                         {GradRows(0, 3), Summary()},  // too many rows
                                                         {GradRows(0, 2), GradRows(0, 1), Summary()},
                                                         {short_data, Summary()},
                                                         {wrong_role, Summary()},
                                                         {huge, Summary()},
                                                         {GradRows(0, 2), Summary(), Summary()},
                                                         {GradRows(0, 2), bad_output},
                                                         {GradRows(0, 2), no_terms},
                                                         {v1::ComputeLossResponse(), Summary()}}) {
    AnswerWith(responses);
    const absl::Status status = Submit(two_rows_).Get().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_EQ(ErrorReason(status), "INTERNAL");
  }
}

TEST_F(ClientProtocol, ServerThatRefusesWithoutReadingEndsALongUpload) {
  server_.compute_loss = [](grpc::ServerContext*, ScriptedServer::LossStream*) {
    return ErrorWithReason(grpc::StatusCode::FAILED_PRECONDITION, "STEP_SEALED");
  };
  Client client = Value(Client::Connect(server_.target()));
  head_ = Value(client.OpenHead("h"));
  const std::vector<float> hidden(8 << 20, 0.5F);  // 32 MiB
  EXPECT_EQ(ErrorReason(Submit(hidden).Get().status()), "STEP_SEALED");
}

TEST_F(ClientProtocol, UploadResumesUnderTheSameId) {
  const std::vector<float> weight = RandomFloats(3, 32, 1.0F);
  std::string upload_id;
  std::string received;
  server_.upload_weights = [&](ScriptedServer::UploadStream* stream) {
    v1::UploadWeightsRequest request;
    if (!stream->Read(&request) || !request.has_header()) return grpc::Status(grpc::StatusCode::INTERNAL, "no header");
    EXPECT_TRUE(upload_id.empty() || request.header().upload_id() == upload_id);
    upload_id = request.header().upload_id();
    EXPECT_EQ(request.header().total_bytes(), 128);
    EXPECT_EQ(request.header().checksum().size(), 16u);
    v1::UploadWeightsResponse response;
    response.set_resume_offset_bytes(static_cast<int64_t>(received.size()));
    stream->Write(response);
    const bool break_off = received.size() < 96;  // twice: at 48 and at 96 bytes
    const size_t stop = received.size() + 48;
    while (stream->Read(&request)) {
      EXPECT_EQ(request.chunk().offset_bytes(), static_cast<int64_t>(received.size()));
      received += request.chunk().data();
      if (break_off && received.size() >= stop) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "cut");
    }
    response.mutable_head()->set_open_step(1);
    stream->Write(response);
    return grpc::Status::OK;
  };
  // Weights that close a step are repeated even when their last byte may have been on its way.
  EXPECT_TRUE(head_.ReplaceWeights(0, TensorView::Float32(weight)).ok());
  EXPECT_EQ(server_.calls, 3);
  EXPECT_EQ(received, std::string(reinterpret_cast<const char*>(weight.data()), 128));
}

TEST_F(ClientProtocol, UploadGivesUpAfterItsRetriesAndOnOtherErrors) {
  const std::vector<float> weight(32);
  server_.upload_weights = [](ScriptedServer::UploadStream*) { return grpc::Status(grpc::StatusCode::UNAVAILABLE, "down"); };
  EXPECT_EQ(head_.UploadWeights(HeadTensor::kWeight, TensorView::Float32(weight)).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(server_.calls, 3);
  server_.upload_weights = [](ScriptedServer::UploadStream*) { return ErrorWithReason(grpc::StatusCode::ABORTED, "EPOCH_FENCED"); };
  EXPECT_EQ(ErrorReason(head_.UploadWeights(HeadTensor::kWeight, TensorView::Float32(weight)).status()), "EPOCH_FENCED");
  EXPECT_EQ(server_.calls, 4);
  server_.upload_weights = [](ScriptedServer::UploadStream* stream) {
    v1::UploadWeightsResponse response;
    response.set_resume_offset_bytes(1000);
    stream->Write(response);
    v1::UploadWeightsRequest request;
    while (stream->Read(&request)) {
    }
    return grpc::Status::OK;
  };
  EXPECT_EQ(head_.UploadWeights(HeadTensor::kWeight, TensorView::Float32(weight)).status().code(), absl::StatusCode::kInternal);
}

TEST_F(ClientProtocol, AllPagesOfHeadsAreListed) {
  server_.list_heads = [](const v1::ListHeadsRequest& request, v1::ListHeadsResponse* response) {
    response->add_heads()->set_name("page" + request.page_token());
    if (request.page_token() != "2") response->set_next_page_token(request.page_token().empty() ? "1" : "2");
    return grpc::Status::OK;
  };
  const std::vector<HeadInfo> heads = Value(client_.ListHeads());
  ASSERT_EQ(heads.size(), 3u);
  EXPECT_EQ(heads[2].name, "page2");
}

TEST_F(ClientProtocol, PagesWithoutEndEndAtTheDeadline) {
  // So long only that a client which goes on and on ends, too.
  const auto end = steady_clock::now() + seconds(5);
  server_.list_heads = [end](const v1::ListHeadsRequest&, v1::ListHeadsResponse* response) {
    if (steady_clock::now() < end) response->set_next_page_token("more");
    return grpc::Status::OK;
  };
  EXPECT_EQ(ErrorReason(client_.ListHeads({.timeout = milliseconds(200)}).status()), "DEADLINE_EXCEEDED");
}

TEST_F(ClientProtocol, HeadOfImpossibleSizesIsAnError) {
  // The server's heads have eight rows: of the last two the bytes, in float32, or the elements are more than can be counted.
  for (const int64_t hidden_size : {int64_t{0}, int64_t{-4}, int64_t{1} << 58, int64_t{1} << 60}) {
    SCOPED_TRACE(hidden_size);
    server_.WithState([hidden_size](ScriptedServer::State& state) { state.hidden_size = hidden_size; });
    EXPECT_EQ(ErrorReason(client_.OpenHead("h").status()), "INTERNAL");
    EXPECT_EQ(ErrorReason(client_.CreateHead("h", HeadSpec()).status()), "INTERNAL");
    EXPECT_EQ(ErrorReason(client_.AttachHead("h", HeadSpec()).status()), "INTERNAL");
  }
}

}  // namespace
}  // namespace headwater::e2e
