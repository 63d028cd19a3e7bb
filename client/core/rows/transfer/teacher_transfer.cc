#include "client/core/rows/transfer/teacher_transfer.h"

#include <utility>

namespace headwater::client::internal {
namespace {

constexpr char kStreamTeacher[] = "/headwater.v1.LossService/StreamTeacher";

}  // namespace

void TeacherTransfer::StartAttempt(v1::StreamTeacherHeader header, Deadline deadline, Done done) {
  header_ = std::move(header);
  deadline_ = deadline;
  done_ = std::move(done);
  RunBeginning([this] { Begin(); });
}

void TeacherTransfer::Begin() {
  absl::Status status = Connect(0, 0, deadline_);
  if (status.ok()) status = SendRows();
  if (!status.ok()) Deliver(std::move(status));
}

absl::Status TeacherTransfer::SendRows() {
  v1::StreamTeacherRequest first;
  *first.mutable_header() = header_;
  TransferRequest request;
  request.method = kStreamTeacher;
  request.first_message = first.SerializeAsString();
  request.answer_is_message = true;
  request.deadline = deadline_;
  if (bytes() > 0) {
    OutgoingRows& rows = request.rows.emplace_back();
    rows = {v1::CHUNK_ROLE_TEACHER_HIDDEN, 0, nullptr, rows_.row_count, rows_.row_bytes(), 0};
    if (absl::Status status = BringToHost(rows_, cuda_stream_, &rows); !status.ok()) return status;
  }
  Send(std::move(request));
  return absl::OkStatus();
}

void TeacherTransfer::Ended(TransferResult result) {
  if (rows_.memory == Memory::kHost) return EndedByRows(std::move(result));
  // Waits for the copies.
  result_ = std::move(result);
  RunEnding([this] { EndedByRows(std::move(result_)); });
}

void TeacherTransfer::EndedByRows(TransferResult result) {
  if (!result.status.ok()) return Deliver(std::move(result.status));
  Deliver(std::move(result.answer));
}

void TeacherTransfer::Deliver(absl::StatusOr<std::string> answer) {
  FinishCopies();
  const Done done = std::move(done_);
  done(std::move(answer));
}

}  // namespace headwater::client::internal
