#include "server/service/upload_call.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/service/field_check.h"
#include "server/service/proto_encoding.h"

namespace headwater::service {

absl::Status UploadCall::OnMessage(const v1::UploadWeightsRequest& message, v1::UploadWeightsResponse* response) {
  switch (message.message_case()) {
    case v1::UploadWeightsRequest::kHeader:
      if (upload_.has_value()) {
        return FieldError(ErrorReason::kProtocolViolation, "header", "one header, first", "a second header");
      }
      return OnHeader(message.header(), response);
    case v1::UploadWeightsRequest::kChunk:
      if (!upload_.has_value()) return FieldError(ErrorReason::kProtocolViolation, "header", "a header first", "a chunk");
      return OnChunk(message.chunk());
    case v1::UploadWeightsRequest::MESSAGE_NOT_SET:
      break;
  }
  return MissingField("message", "a header or a chunk");
}

absl::Status UploadCall::OnHeader(const v1::UploadWeightsHeader& header, v1::UploadWeightsResponse* response) {
  auto request = DecodeUploadHeader(header);
  if (!request.ok()) return request.status();
  request_ = *std::move(request);
  head_name_ = request_.name.ToString();
  auto head = core_.registry.Find(request_.name);
  if (!head.ok()) return head.status();
  head_ = *std::move(head);
  HEADWATER_RETURN_IF_ERROR(head_->CheckEpoch(request_.epoch));
  const HeadSpec& spec = head_->spec();
  const bool bias = request_.tensor == HeadTensor::kBias;
  if (bias && !spec.has_bias) {
    return FieldError(ErrorReason::kInvalidCombination, "header.tensor", "WEIGHT, because the head has no bias", "BIAS");
  }
  if (request_.data_type != spec.data_type && request_.data_type != DataType::kFloat32) {
    return FieldError(ErrorReason::kDataTypeMismatch, "header.data_type",
                      absl::StrCat("float32 or the storage type ", DataTypeName(spec.data_type)), DataTypeName(request_.data_type));
  }
  const int64_t expected_bytes = spec.vocab_size * (bias ? 1 : spec.hidden_size) * ElementBytes(request_.data_type);
  if (request_.total_bytes != expected_bytes) {
    return FieldError(ErrorReason::kDataLengthMismatch, "header.total_bytes", absl::StrCat(expected_bytes),
                      absl::StrCat(request_.total_bytes));
  }
  auto upload = core_.uploads.Open(head_, request_);
  if (!upload.ok()) return upload.status();
  upload_.emplace(*std::move(upload));
  response->set_resume_offset_bytes(upload_->received_bytes());
  return absl::OkStatus();
}

absl::Status UploadCall::OnChunk(const v1::ByteChunk& chunk) {
  const int64_t data_bytes = static_cast<int64_t>(chunk.data().size());
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("chunk.offset_bytes", chunk.offset_bytes(), 0));
  HEADWATER_RETURN_IF_ERROR(CheckLimit("chunk.data", data_bytes, "max_chunk_bytes", core_.options.limits.max_chunk_bytes));
  HEADWATER_RETURN_IF_ERROR(upload_->Append(chunk.offset_bytes(), chunk.data()));
  core_.metrics.CountBytes(observability::Direction::kIn, data_bytes);
  return absl::OkStatus();
}

absl::Status UploadCall::Finish(v1::UploadWeightsResponse* response) {
  if (!upload_.has_value()) return FieldError(ErrorReason::kProtocolViolation, "header", "a header first", "the stream's end");
  auto bytes = upload_->Complete();
  if (!bytes.ok()) return bytes.status();
  const absl::Status status = head_->SetTensor(request_.epoch, request_.tensor, request_.data_type, *bytes, request_.total_bytes);
  // A stale epoch may be corrected and the upload taken up again without a byte sent; after anything else it is used up.
  if (!HasReason(status, ErrorReason::kEpochFenced)) upload_->Drop();
  HEADWATER_RETURN_IF_ERROR(status);
  EncodeHead(head_->Describe(), core_.AvailableBytes(), response->mutable_head());
  return absl::OkStatus();
}

}  // namespace headwater::service
