#include "server/service/head/upload_call.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/service/request/field_check.h"
#include "server/service/request/message_order.h"
#include "server/service/request/proto_encoding.h"

namespace headwater::service {

absl::Status UploadCall::OnMessage(v1::UploadWeightsRequest* message, v1::UploadWeightsResponse* response) {
  return TakeInOrder(
      message, upload_.has_value(), [&](const v1::UploadWeightsHeader& header) { return OnHeader(header, response); },
      [this](const v1::ByteChunk* chunk) { return OnChunk(*chunk); });
}

absl::Status UploadCall::OnHeader(const v1::UploadWeightsHeader& header, v1::UploadWeightsResponse* response) {
  HEADWATER_ASSIGN_OR_RETURN(request_, DecodeUploadHeader(header));
  head_name_ = request_.name.ToString();
  const bool outside = !request_.closes_step.has_value();
  HEADWATER_RETURN_IF_ERROR(caller_.CheckHead(request_.name, outside ? kUploadOutsideStep : Permission::kCompute));
  HEADWATER_ASSIGN_OR_RETURN(auto head, core_.registry.Find(request_.name));
  head_ = heads::HeadUse(std::move(head));
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
  HEADWATER_RETURN_IF_ERROR(CheckClosesStep());
  HEADWATER_ASSIGN_OR_RETURN(auto upload, core_.uploads.Open(head_.head(), request_));
  upload_.emplace(std::move(upload));
  response->set_resume_offset_bytes(upload_->received_bytes());
  return absl::OkStatus();
}

absl::Status UploadCall::CheckClosesStep() {
  if (!request_.closes_step.has_value()) return absl::OkStatus();
  const heads::StepKey key = {request_.epoch, *request_.closes_step};
  HEADWATER_RETURN_IF_ERROR(head_->AwaitStep(key, limits_));
  auto steps = head_->GetSteps(request_.epoch);
  if (!steps.ok()) return steps.status();
  const auto& [open, last_closed] = *steps;
  if (key.step == open.step) {
    if (open.state == heads::StepState::kSealed) return absl::OkStatus();
    return MakeError(ErrorReason::kStepNotSealed,
                     absl::StrCat("header.closes_step: expected a step that is sealed, got step ", key.step, ", which is open"),
                     {{"field", "header.closes_step"}, {"expected", "a sealed step"}, {"actual", absl::StrCat(key.step)}});
  }
  if (last_closed.has_value() && key.step == last_closed->step) return absl::OkStatus();  // a repeat, perhaps
  return MakeError(ErrorReason::kStepMismatch,
                   absl::StrCat("header.closes_step: expected the step ", open.step, " that is open or sealed, got ", key.step),
                   {{"field", "header.closes_step"},
                    {"expected", absl::StrCat(open.step)},
                    {"actual", absl::StrCat(key.step)},
                    {"openStep", absl::StrCat(open.step)}});
}

absl::Status UploadCall::OnChunk(const v1::ByteChunk& chunk) {
  HEADWATER_RETURN_IF_ERROR(CheckByteChunk(core_, chunk));
  return upload_->Append(chunk.offset_bytes(), chunk.data());
}

absl::StatusOr<heads::HeadInfo> UploadCall::UseTensor(std::shared_ptr<const uint8_t> bytes) {
  if (!request_.closes_step.has_value()) {
    return head_->SetTensor(request_.epoch, request_.tensor, request_.data_type, bytes.get(), request_.total_bytes, limits_);
  }
  const heads::ShadowTensor shadow = {request_.tensor, request_.data_type, std::move(bytes), request_.total_bytes};
  auto replaced = head_->Replace({request_.epoch, *request_.closes_step}, shadow, limits_);
  if (!replaced.ok()) return replaced.status();
  if (replaced->closed && !replaced->replayed) core_.metrics.CountStep(observability::StepOutcome::kReplaced);
  return std::move(replaced->head);
}

absl::Status UploadCall::Finish(v1::UploadWeightsResponse* response) {
  HEADWATER_RETURN_IF_ERROR(CheckHeaderSeen(upload_.has_value()));
  HEADWATER_ASSIGN_OR_RETURN(auto bytes, upload_->Complete());
  const absl::StatusOr<heads::HeadInfo> head = UseTensor(std::move(bytes));
  const absl::Status& status = head.status();
  // Errors that the client, or time, can put right: the upload can be used again without sending a byte. Any other error uses it
  // up. kQueueFull and kDeadlineExceeded end the wait for the head.
  const bool may_be_repeated = HasReason(status, ErrorReason::kEpochFenced) || HasReason(status, ErrorReason::kStepNotSealed) ||
                               HasReason(status, ErrorReason::kQueueFull) || HasReason(status, ErrorReason::kDeadlineExceeded) ||
                               HasReason(status, ErrorReason::kCancelled) || HasReason(status, ErrorReason::kShardNotReady);
  if (!may_be_repeated) upload_->Drop();
  HEADWATER_RETURN_IF_ERROR(status);
  EncodeHead(*head, core_.AvailableBytes(), response->mutable_head());
  return absl::OkStatus();
}

}  // namespace headwater::service
