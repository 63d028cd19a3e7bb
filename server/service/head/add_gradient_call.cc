#include "server/service/head/add_gradient_call.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/digest.h"
#include "headwater/kernels/error.h"
#include "server/service/request/canonical_header.h"
#include "server/service/request/field_check.h"
#include "server/service/request/message_order.h"

namespace headwater::service {

absl::Status AddGradientCall::OnMessage(v1::AddGradientRequest* message) {
  return TakeInOrder(
      message, header_seen_,
      [this](const v1::AddGradientHeader& header) {
        header_seen_ = true;
        return OnHeader(header);
      },
      [this](const v1::ByteChunk* chunk) { return OnChunk(*chunk); });
}

absl::Status AddGradientCall::OnHeader(const v1::AddGradientHeader& header) {
  HEADWATER_ASSIGN_OR_RETURN(request_, DecodeAddGradientHeader(header));
  head_name_ = request_.name.ToString();
  HEADWATER_ASSIGN_OR_RETURN(session_use_, core_.UseSession(request_.session));
  HEADWATER_ASSIGN_OR_RETURN(auto head, caller_.Find(core_.registry, request_.name));
  head_ = heads::HeadUse(std::move(head));
  const HeadSpec& spec = head_->spec();
  HEADWATER_RETURN_IF_ERROR(CheckRange("header.row_start", request_.row_start, 0, spec.vocab_size - 1));
  HEADWATER_RETURN_IF_ERROR(CheckRange("header.row_count", request_.row_count, 1, spec.vocab_size - request_.row_start));
  HEADWATER_RETURN_IF_ERROR(head_->AwaitStep(request_.key, limits_));
  HEADWATER_RETURN_IF_ERROR(head_->AwaitTurn(request_.key, request_.micro_batch, limits_));
  HEADWATER_RETURN_IF_ERROR(
      head_->CheckAddGradient(request_.key, request_.micro_batch, request_.attempt, request_.row_start, request_.row_count));
  row_bytes_ = spec.hidden_size * int64_t{sizeof(float)};
  const Limits& limits = core_.options.limits;
  HEADWATER_RETURN_IF_ERROR(CheckLimit("header.row_count", total_bytes(), "max_micro_batch_bytes", limits.max_micro_batch_bytes));
  HEADWATER_RETURN_IF_ERROR(CheckLimit("header.row_count", total_bytes(), "max_in_flight_bytes", limits.max_in_flight_bytes));
  HEADWATER_RETURN_IF_ERROR(core_.ReserveInFlight(client_, total_bytes(), "the gradient", &reservation_));
  rows_.emplace(total_bytes());
  return absl::OkStatus();
}

absl::Status AddGradientCall::OnChunk(const v1::ByteChunk& chunk) {
  const int64_t data_bytes = static_cast<int64_t>(chunk.data().size());
  HEADWATER_RETURN_IF_ERROR(CheckByteChunk(core_, chunk));
  HEADWATER_RETURN_IF_ERROR(CheckNextBytes(chunk.offset_bytes(), data_bytes, rows_->size(), total_bytes()));
  if (!rows_->Append(chunk.data().data(), data_bytes)) {
    return MakeError(ErrorReason::kMemoryBudgetExceeded,
                     absl::StrCat("the host has no memory for ", data_bytes, " more bytes of the gradient"),
                     {{"requestedBytes", absl::StrCat(data_bytes)}});
  }
  return absl::OkStatus();
}

absl::Status AddGradientCall::Finish(v1::AddGradientResponse* response) {
  HEADWATER_RETURN_IF_ERROR(CheckHeaderSeen(header_seen_));
  if (rows_->size() != total_bytes()) {
    return FieldError(ErrorReason::kProtocolViolation, "chunk", absl::StrCat(total_bytes(), " bytes in all"),
                      absl::StrCat(rows_->size()));
  }
  DigestBuilder digest;
  digest.AddRows(0, request_.row_start, request_.row_count, row_bytes_, rows_->data());
  heads::GradientPart part;
  part.row_start = request_.row_start;
  part.row_count = request_.row_count;
  part.data = reinterpret_cast<const float*>(rows_->data());
  part.factor = request_.factor;
  auto added = head_->AddGradient(
      request_.key, request_.micro_batch, request_.attempt, digest.Finish(CanonicalHeader(request_)), part,
      [this] { return limits_.waiter->cancelled(); }, limits_);
  if (!added.ok()) return added.status();
  if (*added) core_.metrics.CountCommit();
  response->set_replayed(!*added);
  return absl::OkStatus();
}

}  // namespace headwater::service
