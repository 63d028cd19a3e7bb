// AdmittedMicroBatch: one micro-batch of a ComputeLoss call, from its header to its summary. Admission fills it in
// (micro_batch_admission.cc), MicroBatchRun computes it.
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
#include "server/heads/session_registry.h"
#include "server/observability/call_trace.h"
#include "server/observability/metrics.h"
#include "server/scheduler/waiting.h"
#include "server/service/access/access.h"
#include "server/service/loss/micro_batch_account.h"
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

// Per-token outputs of one term, `[rows]` each and only those asked for; the engine's LossTerm points into them.
struct TokenOutputs {
  std::vector<float> floats;
  std::vector<int32_t> argmax;
};

struct AdmittedMicroBatch {
  explicit AdmittedMicroBatch(ServerCore& server_core) : core(server_core) {}
  AdmittedMicroBatch(const AdmittedMicroBatch&) = delete;
  AdmittedMicroBatch& operator=(const AdmittedMicroBatch&) = delete;

  // Whether rows in the client's memory are copied while the engine computes, because the micro-batch will be HELD.
  bool copies_early() const {
    return submission.late_token_factors || (core.options.deterministic && submission.micro_batch.has_value());
  }
  // Begins to copy them.
  absl::Status StartCopies();
  // Submission::hold: the payload, once it has its place in the budget. `anyway`: even if the budget is used up.
  absl::StatusOr<std::shared_ptr<const void>> Hold(bool anyway);

  ServerCore& core;
  std::string request_id;                           // for logs, profiles and traces
  std::shared_ptr<observability::CallTrace> trace;  // null: the call is not traced
  std::string client;                               // as the fair queue and the fair budget know it
  std::string head_name;                            // the first term's head once the header was valid; for logs

  heads::SessionRegistry::Use session_use;
  std::vector<heads::HeadUse> head_uses;         // from the header on, however long the rows take
  std::optional<TransferRegistry::Entry> entry;  // of a striped transfer
  std::shared_ptr<MicroBatchPayload> payload = std::make_shared<MicroBatchPayload>();
  std::shared_ptr<RowCopies> copies;  // null: nothing is copied
  heads::Submission submission;       // points into the payload and the members around it
  transport::ByteBudget::Reservation reservation;
  std::shared_ptr<Transfer> transfer;       // where rows come in and leave
  std::vector<TokenOutputs> token_outputs;  // one for each term
  std::optional<transport::RegionUse> grad_region;
  bool sends_grad = false;
  observability::Transport path = observability::Transport::kGrpc;  // of the hidden states
  MicroBatchTimes times;
};

// Fills in `micro_batch`, whose core and identity are set: checks the header against the heads, before any row is taken. A
// micro-batch for the step after the open one waits for that step, within `limits`.
absl::Status AdmitMicroBatch(const Caller& caller, const scheduler::WaitLimits& limits, v1::MicroBatchHeader header,
                             AdmittedMicroBatch& micro_batch);

// Gets memory for the per-token outputs that the request asks for, and points the submission's terms there; micro_batch_summary.cc.
void AllocateTokenOutputs(AdmittedMicroBatch& batch);
// Encodes the answer; `now` is when the gradient had left.
void EncodeSummary(const AdmittedMicroBatch& batch, const heads::SubmissionOutcome& outcome, absl::Time now,
                   v1::MicroBatchSummary* summary);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_LOSS_MICRO_BATCH_H_
