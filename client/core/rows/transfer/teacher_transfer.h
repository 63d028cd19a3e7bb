// TeacherTransfer: one stream of teacher rows for a join.
#ifndef HEADWATER_CLIENT_CORE_ROWS_TRANSFER_TEACHER_TRANSFER_H_
#define HEADWATER_CLIENT_CORE_ROWS_TRANSFER_TEACHER_TRANSFER_H_

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "client/core/rows/transfer/rows_call.h"
#include "headwater/client/tensor.h"
#include "headwater/v1/loss_service.pb.h"

namespace headwater::client::internal {

// By gRPC, on one stream: what limits a teacher is its own computing.
class TeacherTransfer : public RowsCall {
 public:
  // Gets the serialized StreamTeacherResponse.
  using Done = std::function<void(absl::StatusOr<std::string>)>;

  // `rows` are checked against overflow (CheckRows).
  TeacherTransfer(RowTransport& transport, RowsView rows, void* cuda_stream)
      : RowsCall(transport), rows_(rows), cuda_stream_(cuda_stream) {}

  // Starts an attempt, after the end of the one before; `done` as of MicroBatchTransfer.
  void StartAttempt(v1::StreamTeacherHeader header, Deadline deadline, Done done);

 private:
  void Begin();
  absl::Status SendRows();
  void Ended(TransferResult result) override;
  void EndedByRows(TransferResult result);
  void Deliver(absl::StatusOr<std::string> answer);
  int64_t bytes() const { return rows_.row_count * rows_.row_bytes(); }

  const RowsView rows_;
  void* const cuda_stream_;
  v1::StreamTeacherHeader header_;
  Deadline deadline_;
  Done done_;
  TransferResult result_;  // between Ended() and what it runs
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_TRANSFER_TEACHER_TRANSFER_H_
