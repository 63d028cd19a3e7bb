// ComputeLossCall: one micro-batch on its way through the server, whatever carries its bytes: decoding, admission, memory for its
// rows, the queue, the head, the summary.
//
//   call.Accept(header);    // may wait for the step; any error ends the call
//   ... streams join call.transfer() and bring rows ...
//   call.Run();             // waits for rows and for its turn; when this returns OK an EAGER micro-batch is committed, and
//   call.FillSummary(&summary);  //   grad_hidden has been sent, or written to where the client wants it
//
// Computing begins when the first useful rows are there, if the others seem to be near: the engine reads what comes (IncomingRows).
// Rows that stay away then make it give its turn to others, and wait until all rows are there.
//
// One thread; but for what the engine's threads tell of the gradient.
#ifndef HEADWATER_SERVER_SERVICE_COMPUTE_LOSS_CALL_H_
#define HEADWATER_SERVER_SERVICE_COMPUTE_LOSS_CALL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "headwater/kernels/digest.h"
#include "headwater/v1/loss_service.pb.h"
#include "server/heads/head.h"
#include "server/heads/session_registry.h"
#include "server/heads/submit.h"
#include "server/observability/call_trace.h"
#include "server/observability/metrics.h"
#include "server/scheduler/waiting.h"
#include "server/service/access.h"
#include "server/service/loss_request.h"
#include "server/service/micro_batch_account.h"
#include "server/service/server_core.h"
#include "server/service/transfer.h"
#include "server/service/transfer_registry.h"
#include "server/transport/byte_budget.h"
#include "server/transport/region_registry.h"

namespace headwater::service {

class ComputeLossCall {
 public:
  // `client` is the identity that the fair queue knows; `limits` bounds the waits.
  // `identity` goes to logs, profiles and traces.
  struct Identity {
    std::string request_id;
    std::shared_ptr<observability::CallTrace> trace;  // null: the call is not traced
  };
  ComputeLossCall(ServerCore& core, Caller caller, std::string client, scheduler::WaitLimits limits, Identity identity);
  // Counts what became of the micro-batch.
  ~ComputeLossCall();
  ComputeLossCall(const ComputeLossCall&) = delete;
  ComputeLossCall& operator=(const ComputeLossCall&) = delete;

  // Checks the header against the heads, before any row is taken; one for the step after the open one waits for it.
  absl::Status Accept(const v1::MicroBatchHeader& header);
  // Where rows come in and leave. After Accept().
  const std::shared_ptr<Transfer>& transfer() const { return transfer_; }
  absl::Status Run();
  void FillSummary(v1::MicroBatchSummary* summary);
  // Whether its heads have the outcome, so that nothing that happens to the call later takes it back. On the thread of Run().
  bool computed() const { return outcome_.has_value() && !outcome_->needs_all_rows; }

  // The first term's head once the header was valid; for logs.
  const std::string& head_name() const { return head_name_; }

 private:
  class Incoming;
  struct Payload;
  struct Kept;
  struct Source;
  struct TokenOutputs;

  absl::Status OnHeader(const v1::MicroBatchHeader& header);
  // Where the rows come from: the regions that the header names, or chunks.
  absl::Status FindRows();
  void FillSubmission();
  absl::Status AwaitSteps();
  absl::Status ReserveBytes();
  // Claims the teacher rows that other processes send.
  absl::Status ClaimJoined();
  // Gets memory for what comes as chunks, and for the gradient.
  absl::Status PlaceRows();
  absl::Status PlaceGrad();
  // Where the submission finds the rows.
  void PointAt(const Source& source, const void* data, MemorySpace memory);
  void AllocateTokenOutputs();
  // Lets rows in regions be read and written.
  absl::Status PrepareRegions();
  absl::Status AddEvent(const transport::RegionUse& region, int64_t row_bytes);
  // It will be HELD, so that rows that lie in the client's memory are copied.
  bool KeepsCopies() const;
  // Begins to copy them.
  absl::Status BeginToKeep();
  // Submission::hold: the payload, once it has its place in the budget.
  // `anyway`: even if the budget is used up.
  absl::StatusOr<std::shared_ptr<const void>> HoldPayload(bool anyway);

  bool Joins() const;
  // Takes what has come of joined rows.
  absl::Status PullJoined();
  bool OnlyJoinedMissing() const;
  absl::Status AwaitJoined();

  absl::Status Compute();
  // Waits until the micro-batch may be submitted: all rows are there, or enough to begin with.
  absl::Status AwaitStart();
  bool EnoughToBegin() const;
  // Why rows are missing, once their streams have ended: that a client is gone is known a moment later.
  absl::Status ExplainEnd(const absl::Status& status);
  absl::StatusOr<Digest> DigestOfAll();
  // heads::AwaitFiles(), which the end of the transfer ends too.
  absl::Status AwaitFiles();
  absl::Status Submit();
  absl::Status AwaitGradSent();
  void CountOutcome();
  // Where the time went, up to `end`.
  void Trace(absl::Time end) const;
  absl::Status Done(absl::Status status);

  ServerCore& core_;
  const Caller caller_;
  std::string client_;
  const scheduler::WaitLimits limits_;
  const std::function<bool()> cancelled_ = [this] { return limits_.waiter->cancelled(); };
  const Identity identity_;

  heads::SessionRegistry::Use session_use_;
  std::vector<heads::HeadUse> head_uses_;  // from the header on, however long the rows take
  std::optional<TransferRegistry::Entry> entry_;
  std::shared_ptr<Payload> payload_;  // shared with the contribution if it is held as rows
  std::shared_ptr<Kept> kept_;        // null: nothing is copied
  std::string head_name_;
  heads::Submission submission_;  // points into the payload and the members around it
  transport::ByteBudget::Reservation reservation_;
  std::shared_ptr<Transfer> transfer_;
  std::vector<TokenOutputs> token_outputs_;  // one for each term
  std::optional<heads::SubmissionOutcome> outcome_;
  observability::Transport path_ = observability::Transport::kGrpc;  // of the hidden states
  std::optional<transport::RegionUse> grad_region_;
  bool sends_grad_ = false;
  bool may_begin_early_ = false;
  bool counted_ = false;

  absl::Time accept_time_;              // of observability::MonotonicNow(), like all times here
  scheduler::StartOrder::Place place_;  // until it begins
  MicroBatchTimes times_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_COMPUTE_LOSS_CALL_H_
