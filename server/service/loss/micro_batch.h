// AdmittedMicroBatch: one micro-batch of a ComputeLoss call, from its header to its summary. Admission fills it in
// (micro_batch_admission.cc), ComputeMicroBatch() computes it.
#ifndef HEADWATER_SERVER_SERVICE_LOSS_MICRO_BATCH_H_
#define HEADWATER_SERVER_SERVICE_LOSS_MICRO_BATCH_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "headwater/v1/loss_service.pb.h"
#include "server/heads/head.h"
#include "server/observability/metrics.h"
#include "server/service/call/rpc_scope.h"
#include "server/service/loss/row_source.h"
#include "server/service/loss/transfer.h"
#include "server/service/loss/transfer_registry.h"
#include "server/service/request/loss_request.h"
#include "server/service/server_core.h"
#include "server/transport/byte_budget.h"
#include "server/transport/region_registry.h"

namespace headwater::service {

// All that a submission's terms and rows point to. A contribution that is held as rows shares it.
struct MicroBatchPayload {
  MicroBatchRequest request;
  std::vector<std::unique_ptr<RowSource>> sources;  // the hidden states, then each teacher's rows
  transport::ByteBudget::Reservation held;          // of max_held_bytes, once it is held

  // Bytes of rows, per-row data and class weights.
  int64_t bytes() const;
};

// When a micro-batch reached each of its stages; times of observability::MonotonicNow().
struct MicroBatchTimes {
  absl::Time header;    // its header came
  absl::Time last_row;  // its last row was there
  absl::Time engine_start;
  absl::Time engine_end;
};

struct AdmittedMicroBatch {
  // The scope keeps the call's heads and session.
  AdmittedMicroBatch(ServerCore& server_core, RpcScope& call) : core(server_core), scope(call), client(call.client()) {}
  AdmittedMicroBatch(const AdmittedMicroBatch&) = delete;
  AdmittedMicroBatch& operator=(const AdmittedMicroBatch&) = delete;

  // Whether rows in the client's memory are copied while the engine computes, because the micro-batch will be HELD.
  bool copies_early() const {
    return submission.late_token_factors || (core.options.deterministic && submission.micro_batch.has_value());
  }
  // Begins to copy them, and waits for copies that have begun: the first error of any.
  absl::Status StartCopies();
  absl::Status AwaitCopies() const;
  // Whether the heads have the outcome: later events of the call cannot undo it.
  bool computed() const { return outcome.has_value() && !outcome->needs_all_rows; }
  // Submission::hold: the payload, once it has its place in the budget. `anyway`: even if the budget is used up.
  absl::StatusOr<std::shared_ptr<const void>> Hold(bool anyway);

  ServerCore& core;
  RpcScope& scope;
  std::string client;  // as the fair queue and the fair budget know it

  std::optional<TransferRegistry::Entry> entry;  // of a striped transfer
  std::shared_ptr<MicroBatchPayload> payload = std::make_shared<MicroBatchPayload>();
  RowCopies copies;
  heads::Submission submission;  // points into the payload and the members around it
  transport::ByteBudget::Reservation reservation;
  // On joined rows. A contribution that is left undecided keeps them (Submission::until_decided).
  std::shared_ptr<std::vector<std::shared_ptr<transport::RowClaim>>> claims =
      std::make_shared<std::vector<std::shared_ptr<transport::RowClaim>>>();
  std::shared_ptr<Transfer> transfer;  // where rows come in and leave
  // Per-token outputs of each term, those asked for one behind the other, `[rows]` each; the engine's LossTerm points into them.
  std::vector<std::vector<char>> token_outputs;
  std::optional<transport::RegionUse> grad_region;
  bool sends_grad = false;
  observability::Transport path = observability::Transport::kGrpc;  // of the hidden states
  MicroBatchTimes times;
  std::optional<heads::SubmissionOutcome> outcome;
};

// Fills in `micro_batch`: checks the header against the heads, before any row is taken. A micro-batch for the step after the open
// one waits for that step, within the limits of its call.
absl::Status AdmitMicroBatch(v1::MicroBatchHeader header, AdmittedMicroBatch& micro_batch);

// Computes a micro-batch whose streams have begun to bring rows; micro_batch_run.cc. When this returns OK the outcome is there, an
// EAGER micro-batch is committed, and it has been counted.
absl::Status ComputeMicroBatch(AdmittedMicroBatch& batch);
// After ComputeMicroBatch(): returns when grad_hidden has been sent, or written to where the client wants it.
absl::Status DeliverGrad(AdmittedMicroBatch& batch);

// Gets memory for the per-token outputs that the request asks for, and points the submission's terms there; micro_batch_summary.cc.
void AllocateTokenOutputs(AdmittedMicroBatch& batch);
// Encodes the answer; `now` is when the gradient had left.
void EncodeSummary(const AdmittedMicroBatch& batch, absl::Time now, v1::MicroBatchSummary* summary);

// The outcome of a micro-batch that failed, for metrics.
observability::MicroBatchOutcome OutcomeOf(const absl::Status& error);
// Counts a micro-batch that succeeded.
void CountMicroBatch(const AdmittedMicroBatch& batch);
// Writes into the call's trace, if it has one, where the time of a micro-batch that succeeded went. Its gradient had left at `end`.
void TraceMicroBatch(const AdmittedMicroBatch& batch, absl::Time end);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_LOSS_MICRO_BATCH_H_
