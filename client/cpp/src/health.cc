#include "client/cpp/src/health.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>

#include <memory>
#include <vector>

#include "headwater/client/future.h"

namespace headwater::client::internal {
namespace {

using google::protobuf::internal::WireFormatLite;

// message HealthCheckRequest { string service = 1; }
grpc::ByteBuffer EncodeRequest(const std::string& service) {
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream output(&stream);
    if (!service.empty()) WireFormatLite::WriteString(1, service, &output);
  }
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

// message HealthCheckResponse { ServingStatus status = 1; }
absl::StatusOr<HealthStatus> DecodeResponse(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  if (!buffer.Dump(&slices).ok()) return MakeAnswerError("the health response cannot be read");
  std::string bytes;
  for (const grpc::Slice& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  google::protobuf::io::CodedInputStream input(reinterpret_cast<const uint8_t*>(bytes.data()), static_cast<int>(bytes.size()));
  uint32_t status = 0;  // UNKNOWN, as proto3 leaves it out
  constexpr uint32_t kStatusTag = WireFormatLite::MakeTag(1, WireFormatLite::WIRETYPE_VARINT);
  while (const uint32_t tag = input.ReadTag()) {
    const bool read = tag == kStatusTag ? input.ReadVarint32(&status) : WireFormatLite::SkipField(&input, tag);
    if (!read) return MakeAnswerError("the health response is not a HealthCheckResponse");
  }
  return static_cast<HealthStatus>(status);
}

}  // namespace

absl::StatusOr<HealthStatus> CheckHealth(Connection& connection, const std::string& service, const CallOptions& options) {
  grpc::GenericStub stub(connection.channel());
  grpc::ClientContext context;
  context.set_deadline(connection.DeadlineOf(options));
  const grpc::ByteBuffer request = EncodeRequest(service);
  grpc::ByteBuffer response;
  auto done = std::make_shared<FutureState<grpc::Status>>();
  stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request, &response,
                 [done](grpc::Status status) { done->Set(std::move(status)); });
  const grpc::Status status = *done->Take();
  if (status.error_code() == grpc::StatusCode::NOT_FOUND) return HealthStatus::kServiceUnknown;
  if (!status.ok()) return FromGrpcStatus(status, connection.target());
  return DecodeResponse(response);
}

}  // namespace headwater::client::internal
