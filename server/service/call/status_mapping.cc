#include "server/service/call/status_mapping.h"

#include <cstdint>
#include <string>

#include "absl/strings/numbers.h"
#include "headwater/kernels/error.h"
#include "headwater/v1/error.pb.h"
#include "proto/headwater/v1/error_metadata.h"
#include "server/service/request/field_check.h"

namespace headwater::service {
namespace {

constexpr size_t kMostMessageBytes = 1024;
constexpr size_t kMostMetadataBytes = 256;
constexpr char kTypeUrlPrefix[] = "type.googleapis.com/google.rpc.";

std::string Cut(const std::string& text, size_t most_bytes) {
  if (text.size() <= most_bytes) return text;
  size_t end = most_bytes - 3;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;  // not within a UTF-8 sequence
  return text.substr(0, end) + "...";
}

// Packs a message under its google.rpc name, with which it is wire-compatible.
template <typename Message>
void AddDetail(const Message& message, const char* name, v1::RpcStatus* status) {
  google::protobuf::Any* const detail = status->add_details();
  detail->set_type_url(std::string(kTypeUrlPrefix) + name);
  message.SerializeToString(detail->mutable_value());
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const ErrorReason reason = GetErrorReason(status);
  const bool ours = status.code() == ErrorReasonCode(reason);
  const std::string message =
      ours ? Cut(std::string(status.message()), kMostMessageBytes) : "internal error; the server's log has the details";

  v1::RpcStatus details;
  details.set_code(static_cast<int32_t>(ours ? status.code() : absl::StatusCode::kInternal));
  details.set_message(message);
  v1::ErrorInfo info;
  info.set_reason(ErrorReasonName(ours ? reason : ErrorReason::kInternal));
  info.set_domain("headwater");
  int64_t retry_after_ms = -1;
  if (ours) {
    ErrorMetadata metadata = GetErrorMetadata(status);
    for (auto& [key, value] : metadata) {
      if (key == kRetryAfterMsKey && !absl::SimpleAtoi(value, &retry_after_ms)) retry_after_ms = -1;
      value = Cut(value, kMostMetadataBytes);
    }
    v1::SetErrorMetadata(metadata, info.mutable_metadata());
  }
  AddDetail(info, "ErrorInfo", &details);
  if (retry_after_ms >= 0) {
    v1::RetryInfo retry;
    retry.mutable_retry_delay()->set_seconds(retry_after_ms / 1000);
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(retry_after_ms % 1000) * 1000000);
    AddDetail(retry, "RetryInfo", &details);
  }
  return grpc::Status(static_cast<grpc::StatusCode>(details.code()), message, details.SerializeAsString());
}

}  // namespace headwater::service
