#include "server/service/stream_teacher_call.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/service/field_check.h"
#include "server/service/loss_request.h"
#include "server/service/message_order.h"

namespace headwater::service {

absl::Status StreamTeacherCall::OnMessage(v1::StreamTeacherRequest* message) {
  return TakeInOrder(
      message, stream_ != nullptr, [this](const v1::StreamTeacherHeader& header) { return OnHeader(header); },
      [this](const v1::RowChunk* chunk) { return OnChunk(*chunk); });
}

absl::Status StreamTeacherCall::OnHeader(const v1::StreamTeacherHeader& header) {
  auto request = DecodeStreamTeacherHeader(header, core_.options.limits);
  if (!request.ok()) return request.status();
  HEADWATER_RETURN_IF_ERROR(caller_.CheckTenant(request->set.tenant));
  auto use = core_.UseSession(request->session);
  if (!use.ok()) return use.status();
  session_use_ = *std::move(use);
  auto stream = core_.join.Open(request->set, request->row_indices, request->session);
  if (!stream.ok()) return stream.status();
  stream_ = *std::move(stream);
  return absl::OkStatus();
}

absl::Status StreamTeacherCall::OnChunk(const v1::RowChunk& chunk) {
  if (chunk.role() != v1::CHUNK_ROLE_TEACHER_HIDDEN) {
    return chunk.role() == v1::CHUNK_ROLE_UNSPECIFIED ? MissingField("chunk.role", "TEACHER_HIDDEN")
                                                      : FieldError(ErrorReason::kInvalidField, "chunk.role", "TEACHER_HIDDEN",
                                                                   absl::StrCat(static_cast<int>(chunk.role())));
  }
  HEADWATER_RETURN_IF_ERROR(CheckRange("chunk.term_index", chunk.term_index(), 0, 0));
  const int64_t data_bytes = static_cast<int64_t>(chunk.data().size());
  HEADWATER_RETURN_IF_ERROR(CheckLimit("chunk.data", data_bytes, "max_chunk_bytes", core_.options.limits.max_chunk_bytes));
  HEADWATER_RETURN_IF_ERROR(stream_->Add(chunk.row_start(), chunk.row_count(), chunk.data().data(), data_bytes, "chunk"));
  core_.metrics.CountBytes(observability::Direction::kIn, data_bytes);
  return absl::OkStatus();
}

absl::Status StreamTeacherCall::Finish(v1::StreamTeacherResponse* response) {
  HEADWATER_RETURN_IF_ERROR(CheckHeaderSeen(stream_ != nullptr));
  HEADWATER_RETURN_IF_ERROR(stream_->Finish());
  response->set_row_count(stream_->row_count());
  return absl::OkStatus();
}

}  // namespace headwater::service
