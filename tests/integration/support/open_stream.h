// Streams that a test holds in its hands, and ComputeLoss calls from the header to the end of the answer.
#ifndef HEADWATER_TESTS_INTEGRATION_SUPPORT_OPEN_STREAM_H_
#define HEADWATER_TESTS_INTEGRATION_SUPPORT_OPEN_STREAM_H_

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "headwater/v1/head_service.grpc.pb.h"
#include "headwater/v1/loss_service.grpc.pb.h"

namespace headwater::testing {

// A connection of its own, whose calls gRPC does not retry.
inline std::shared_ptr<grpc::Channel> OwnChannel(
    const std::string& address, const std::shared_ptr<grpc::ChannelCredentials>& credentials = grpc::InsecureChannelCredentials()) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetMaxReceiveMessageSize(64 << 20);
  return grpc::CreateCustomChannel(address, credentials, arguments);
}

// Of int32_t or float.
template <typename T>
v1::Tensor TensorOf(const std::vector<T>& values) {
  v1::Tensor tensor;
  tensor.set_data_type(std::is_same_v<T, float> ? v1::DATA_TYPE_FLOAT32 : v1::DATA_TYPE_INT32);
  tensor.add_shape(static_cast<int64_t>(values.size()));
  tensor.set_data(values.data(), values.size() * sizeof(T));
  return tensor;
}

// FORWARD_BACKWARD cross entropy of fp32 rows with these targets.
inline v1::MicroBatchHeader CrossEntropyHeader(const v1::HeadStep& head, int64_t hidden_size, int64_t micro_batch,
                                               const std::vector<int32_t>& targets) {
  v1::MicroBatchHeader header;
  header.set_micro_batch(micro_batch);
  header.set_compute_mode(v1::COMPUTE_MODE_FORWARD_BACKWARD);
  header.set_row_count(static_cast<int64_t>(targets.size()));
  header.set_hidden_size(hidden_size);
  header.set_data_type(v1::DATA_TYPE_FLOAT32);
  v1::LossTerm* const term = header.add_terms();
  *term->mutable_head() = head;
  *term->mutable_targets() = TensorOf(targets);
  term->mutable_cross_entropy();
  return header;
}

inline v1::RowChunk HiddenChunk(const std::string& rows, int64_t row_start, int64_t row_count) {
  v1::RowChunk chunk;
  chunk.set_role(v1::CHUNK_ROLE_HIDDEN);
  chunk.set_row_start(row_start);
  chunk.set_row_count(row_count);
  chunk.set_data(rows);
  return chunk;
}
// These rows of more, which have `row_bytes` bytes each.
inline v1::RowChunk ChunkOf(const std::string& all_rows, int64_t row_bytes, int64_t row_start, int64_t row_count) {
  return HiddenChunk(all_rows.substr(static_cast<size_t>(row_start * row_bytes), static_cast<size_t>(row_count * row_bytes)),
                     row_start, row_count);
}

// How a call and its rows are sent.
struct SendOptions {
  int64_t chunk_rows = 3;
  int deadline_ms = 60000;
  std::map<std::string, std::string> metadata = {};
  std::map<int32_t, std::string> teacher_rows = {};  // bytes, by term
};

// Reads all that comes.
template <typename Request, typename Response>
grpc::Status EndOf(grpc::ClientReaderWriter<Request, Response>& stream) {
  Response response;
  while (stream.Read(&response)) {
  }
  return stream.Finish();
}

// A stream that carries rows; open until half-closed, cancelled or answered.
template <typename Request, typename Response>
struct RowStream {
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<Request, Response>> stream;
  // What has come, once it has ended.
  std::vector<v1::RowChunk> grad_hidden;
  v1::MicroBatchSummary summary;

  explicit RowStream(const SendOptions& send = {}) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(send.deadline_ms));
    for (const auto& [key, value] : send.metadata) context.AddMetadata(key, value);
  }
  bool Send(const v1::RowChunk& chunk) {
    Request request;
    *request.mutable_chunk() = chunk;
    return stream->Write(request);
  }
  grpc::Status End() {
    Response response;
    while (stream->Read(&response)) {
      if (response.has_chunk()) grad_hidden.push_back(response.chunk());
      if constexpr (requires { response.summary(); }) {
        if (response.has_summary()) summary = response.summary();
      }
    }
    return stream->Finish();
  }
  grpc::Status Cancel() {
    context.TryCancel();
    return End();
  }
};

// A ComputeLoss call. Sends its header at once, and the first rows if there are any.
struct OpenStream : RowStream<v1::ComputeLossRequest, v1::ComputeLossResponse> {
  // `rows`: `row_count` of the first rows' bytes.
  OpenStream(v1::LossService::Stub& stub, const v1::MicroBatchHeader& header, const std::string& rows = "", int64_t row_count = 0,
             const SendOptions& send = {})
      : RowStream(send) {
    stream = stub.ComputeLoss(&context);
    v1::ComputeLossRequest request;
    *request.mutable_header() = header;
    stream->Write(request);
    if (row_count > 0) Send(HiddenChunk(rows, 0, row_count));
  }
};

// An UploadWeights call, step by step. Sends its header at once.
struct UploadStream {
  UploadStream(v1::HeadService::Stub& stub, const v1::UploadWeightsHeader& header) : stream(stub.UploadWeights(&context)) {
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
  grpc::Status Cancel() {
    context.TryCancel();
    return End();
  }

  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::UploadWeightsRequest, v1::UploadWeightsResponse>> stream;
  int64_t resume_offset = -1;  // what the header was answered; -1: nothing
  v1::Head head;               // what the end was
};

// A StreamTeacher call, step by step. Sends its header at once.
struct TeacherStream {
  TeacherStream(v1::LossService::Stub& stub, const v1::StreamTeacherHeader& header)
      : writer(stub.StreamTeacher(&context, &response)) {
    v1::StreamTeacherRequest request;
    *request.mutable_header() = header;
    writer->Write(request);
  }
  bool Send(const v1::RowChunk& chunk) {
    v1::StreamTeacherRequest request;
    *request.mutable_chunk() = chunk;
    return writer->Write(request);
  }
  grpc::Status End() {
    writer->WritesDone();
    return writer->Finish();
  }

  grpc::ClientContext context;
  v1::StreamTeacherResponse response;
  std::unique_ptr<grpc::ClientWriter<v1::StreamTeacherRequest>> writer;
};
// Rows of float32, of tenant `default`.
inline v1::StreamTeacherHeader TeacherHeader(const std::string& key, int64_t total_row_count, int64_t hidden_size) {
  v1::StreamTeacherHeader header;
  header.set_tenant("tenants/default");
  header.set_join_key(key);
  header.set_total_row_count(total_row_count);
  header.set_data_type(v1::DATA_TYPE_FLOAT32);
  header.set_hidden_size(hidden_size);
  return header;
}

// What a ComputeLoss call brought.
struct LossReply {
  grpc::Status status;
  v1::MicroBatchSummary summary;
  std::string grad_hidden;  // bytes
  std::vector<int64_t> chunk_starts;
  std::multimap<std::string, std::string> initial_metadata;
};

// `rows` are bytes in the header's type.
inline LossReply ComputeLoss(v1::LossService::Stub& stub, const v1::MicroBatchHeader& header, const std::string& rows,
                             const SendOptions& send = {}) {
  OpenStream call(stub, header, "", 0, send);
  const auto send_rows = [&](const std::string& bytes, int64_t row_count, v1::ChunkRole role, int32_t term_index) {
    for (int64_t start = 0; start < row_count && !bytes.empty(); start += send.chunk_rows) {
      const int64_t count = std::min(send.chunk_rows, row_count - start);
      v1::RowChunk chunk = ChunkOf(bytes, static_cast<int64_t>(bytes.size()) / row_count, start, count);
      chunk.set_role(role);
      chunk.set_term_index(term_index);
      call.Send(chunk);
    }
  };
  send_rows(rows, header.row_count(), v1::CHUNK_ROLE_HIDDEN, 0);
  for (const auto& [term_index, bytes] : send.teacher_rows) {
    const v1::LossTerm& term = header.terms(term_index);
    send_rows(bytes, term.has_row_count() ? term.row_count() : header.row_count() - term.row_start(), v1::CHUNK_ROLE_TEACHER_HIDDEN,
              term_index);
  }
  call.stream->WritesDone();
  LossReply reply;
  reply.status = call.End();
  reply.summary = call.summary;
  for (const v1::RowChunk& chunk : call.grad_hidden) {
    reply.chunk_starts.push_back(chunk.row_start());
    reply.grad_hidden += chunk.data();
  }
  for (const auto& [key, value] : call.context.GetServerInitialMetadata()) {
    reply.initial_metadata.emplace(std::string(key.data(), key.size()), std::string(value.data(), value.size()));
  }
  return reply;
}

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_SUPPORT_OPEN_STREAM_H_
