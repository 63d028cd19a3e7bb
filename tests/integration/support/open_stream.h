// A ComputeLoss stream that a test holds in its hands.
#ifndef HEADWATER_TESTS_INTEGRATION_SUPPORT_OPEN_STREAM_H_
#define HEADWATER_TESTS_INTEGRATION_SUPPORT_OPEN_STREAM_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <string>

#include "headwater/v1/loss_service.grpc.pb.h"

namespace headwater::testing {

// Sends its header at once, and the first rows if there are any; open until half-closed, cancelled or answered.
struct OpenStream {
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ComputeLossRequest, v1::ComputeLossResponse>> stream;

  // `rows`: `row_count` of the first rows' bytes.
  OpenStream(v1::LossService::Stub& stub, const v1::MicroBatchHeader& header, const std::string& rows = "", int64_t row_count = 0) {
    stream = stub.ComputeLoss(&context);
    v1::ComputeLossRequest request;
    *request.mutable_header() = header;
    stream->Write(request);
    if (row_count == 0) return;
    request.mutable_chunk()->set_role(v1::CHUNK_ROLE_HIDDEN);
    request.mutable_chunk()->set_row_count(row_count);
    request.mutable_chunk()->set_data(rows);
    stream->Write(request);
  }
  // Reads to the end.
  grpc::Status End() {
    v1::ComputeLossResponse response;
    while (stream->Read(&response)) {
    }
    return stream->Finish();
  }
};

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_SUPPORT_OPEN_STREAM_H_
