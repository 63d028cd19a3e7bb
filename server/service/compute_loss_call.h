// ComputeLossCall: one ComputeLoss stream, without its I/O: messages in, messages out. Drives decoding, admission, assembly of the
// rows, the digest, the queue and the head. The gRPC handler only moves messages, so another transport can drive the same class.
//
//   call.OnMessage(header); call.OnMessage(chunk)...; call.Finish();          // any error ends the call; the header may have to
//   wait while (call.NextChunk(&chunk)) send(chunk);  call.FillSummary(&summary);  // after Finish() was OK
//
// Not thread-safe.
#ifndef HEADWATER_SERVER_SERVICE_COMPUTE_LOSS_CALL_H_
#define HEADWATER_SERVER_SERVICE_COMPUTE_LOSS_CALL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "headwater/kernels/digest.h"
#include "headwater/v1/loss_service.pb.h"
#include "server/heads/head.h"
#include "server/heads/session_registry.h"
#include "server/service/loss_request.h"
#include "server/service/server_core.h"
#include "server/transport/byte_budget.h"
#include "server/transport/row_assembler.h"

namespace headwater::service {

class ComputeLossCall {
 public:
  // `client` is the identity that the fair queue knows; `limits` bounds its waits: `limits.cancelled` is asked from this thread and
  // from the queue's.
  ComputeLossCall(ServerCore& core, std::string client, heads::WaitLimits limits);
  // Counts what became of the micro-batch.
  ~ComputeLossCall();

  // Takes the header or a chunk. The header is checked against the heads before any row is accepted; one for the step after the
  // open one waits for it here. May move data out of `message`.
  absl::Status OnMessage(v1::ComputeLossRequest* message);
  // The client has half-closed: computes, and commits or stages. When this returns OK an EAGER micro-batch is committed.
  absl::Status Finish();

  // Next rows of grad_hidden, in ascending order; false when there are no more.
  bool NextChunk(v1::RowChunk* chunk);
  void FillSummary(v1::MicroBatchSummary* summary);

  // The first term's head once the header was valid; for logs.
  const std::string& head_name() const { return head_name_; }

 private:
  struct Payload;
  struct TokenOutputs;

  absl::Status OnHeader(const v1::MicroBatchHeader& header);
  absl::Status OnChunk(v1::RowChunk* chunk);
  // The assembler that the chunk goes to, and its stream in the digest.
  absl::StatusOr<std::pair<transport::RowAssembler*, int32_t>> StreamOf(const v1::RowChunk& chunk);
  void FillSubmission();
  absl::Status AwaitSteps();
  absl::Status ReserveBytes();
  // Submission::hold: the payload, once it has its place in the budget.
  absl::StatusOr<std::shared_ptr<const void>> HoldPayload();
  absl::Status CompleteRows();
  void AllocateOutputs();
  void CountOutcome();
  absl::Status Done(absl::Status status);

  ServerCore& core_;
  const std::string client_;
  const heads::WaitLimits limits_;

  heads::SessionRegistry::Use session_use_;
  std::shared_ptr<Payload> payload_;  // shared with the contribution if it is held as rows
  std::string head_name_;
  heads::Submission submission_;  // points into the payload and the members around it
  transport::ByteBudget::Reservation reservation_;
  DigestBuilder digest_;
  std::unique_ptr<uint8_t[]> grad_hidden_;
  std::vector<TokenOutputs> token_outputs_;  // one for each term
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
