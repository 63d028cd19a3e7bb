// Streams that a test holds in its hands.
#ifndef HEADWATER_TESTS_INTEGRATION_SUPPORT_OPEN_STREAM_H_
#define HEADWATER_TESTS_INTEGRATION_SUPPORT_OPEN_STREAM_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "headwater/v1/loss_service.grpc.pb.h"

namespace headwater::testing {

inline v1::RowChunk HiddenChunk(const std::string& rows, int64_t row_start, int64_t row_count) {
  v1::RowChunk chunk;
  chunk.set_role(v1::CHUNK_ROLE_HIDDEN);
  chunk.set_row_start(row_start);
  chunk.set_row_count(row_count);
  chunk.set_data(rows);
  return chunk;
}

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

  RowStream() { context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60)); }
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
  OpenStream(v1::LossService::Stub& stub, const v1::MicroBatchHeader& header, const std::string& rows = "", int64_t row_count = 0) {
    stream = stub.ComputeLoss(&context);
    v1::ComputeLossRequest request;
    *request.mutable_header() = header;
    stream->Write(request);
    if (row_count > 0) Send(HiddenChunk(rows, 0, row_count));
  }
};

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_SUPPORT_OPEN_STREAM_H_
