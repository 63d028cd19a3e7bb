// ComputeLossCall: one ComputeLoss stream, without its I/O: messages in, messages out. Drives decoding, admission, assembly of the
// rows, the digest, the queue and the head. The gRPC handler only moves messages, so another transport can drive the same class.
//
//   call.OnMessage(header); call.OnMessage(chunk)...; call.Finish();          // any error ends the call
//   while (call.NextChunk(&chunk)) send(chunk);  call.FillSummary(&summary);  // after Finish() was OK
//
// Not thread-safe.
#ifndef HEADWATER_SERVER_SERVICE_COMPUTE_LOSS_CALL_H_
#define HEADWATER_SERVER_SERVICE_COMPUTE_LOSS_CALL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "headwater/kernels/digest.h"
#include "headwater/v1/loss_service.pb.h"
#include "server/heads/head.h"
#include "server/service/loss_request.h"
#include "server/service/server_core.h"
#include "server/transport/byte_budget.h"
#include "server/transport/row_assembler.h"

namespace headwater::service {

class ComputeLossCall {
 public:
  // `client` is the identity that the fair queue knows; `cancelled` is asked from this thread and from the queue's.
  ComputeLossCall(ServerCore& core, std::string client, std::function<bool()> cancelled, absl::Time deadline);
  // Counts what became of the micro-batch.
  ~ComputeLossCall();

  // Takes the header or a chunk. The header is checked against the head before any row is accepted. May move data out of `message`.
  absl::Status OnMessage(v1::ComputeLossRequest* message);
  // The client has half-closed: computes, and commits or stages. When this returns OK an EAGER micro-batch is committed.
  absl::Status Finish();

  // Next rows of grad_hidden, in ascending order; false when there are no more.
  bool NextChunk(v1::RowChunk* chunk);
  void FillSummary(v1::MicroBatchSummary* summary);

  // The head's name once the header was valid; for logs.
  const std::string& head_name() const { return head_name_; }

 private:
  struct TokenOutputs;

  absl::Status OnHeader(const v1::MicroBatchHeader& header);
  absl::Status OnChunk(v1::RowChunk* chunk);
  absl::Status BuildSubmission();
  absl::Status CheckHeads() const;
  absl::Status CheckTargets() const;
  absl::Status ReserveBytes();
  void AllocateOutputs();
  absl::Status Done(absl::Status status);

  ServerCore& core_;
  const std::string client_;
  const std::function<bool()> cancelled_;
  const absl::Time deadline_;

  MicroBatchRequest request_;
  std::string head_name_;
  heads::Submission submission_;  // points into the members around it
  transport::ByteBudget::Reservation reservation_;
  std::unique_ptr<transport::RowAssembler> hidden_;
  std::unique_ptr<transport::RowAssembler> teacher_hidden_;
  DigestBuilder digest_;
  std::unique_ptr<uint8_t[]> grad_hidden_;
  std::unique_ptr<TokenOutputs> token_outputs_;
  std::optional<heads::SubmissionOutcome> outcome_;
  int64_t next_grad_row_ = 0;
  bool header_seen_ = false;
  bool counted_ = false;

  absl::Time header_time_;
  absl::Time last_row_time_;
  absl::Time engine_start_time_;
  absl::Time engine_end_time_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_COMPUTE_LOSS_CALL_H_
