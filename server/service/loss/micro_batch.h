// AdmittedMicroBatch: one micro-batch of a ComputeLoss call, from its header to its summary. Admission fills it in
// (micro_batch_admission.cc), ComputeMicroBatch() computes it.
#ifndef HEADWATER_SERVER_SERVICE_LOSS_MICRO_BATCH_H_
#define HEADWATER_SERVER_SERVICE_LOSS_MICRO_BATCH_H_

#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "headwater/v1/loss_service.pb.h"
#include "server/heads/head.h"
#include "server/observability/metrics.h"
#include "server/service/call/rpc_scope.h"
#include "server/service/loss/transfer.h"
#include "server/service/loss/transfer_registry.h"
#include "server/service/request/loss_request.h"
#include "server/service/server_core.h"
#include "server/transport/byte_budget.h"
#include "server/transport/pinned_pool.h"
#include "server/transport/region_registry.h"
#include "server/transport/teacher_join.h"

namespace headwater::service {

// Copies of rows that the senders' threads make.
using RowCopies = std::vector<std::shared_future<absl::Status>>;

// How rows of a region travel, for metrics; kGrpc without one.
observability::Transport PathOf(const transport::RegionUse* region);

// One tensor of rows of a micro-batch, by where its rows come from. Admission calls bytes_to_reserve(), Claim() and Place(), in
// this order. The run then calls Open(), Pull() while rows come, and, if the micro-batch is held, StartCopy() and UseCopy(). One
// thread.
class RowSource {
 public:
  // The place of the rows in the micro-batch, and their names.
  struct Rows {
    int32_t digest_stream = 0;  // 0: hidden states; 1 + term: its teacher's
    std::string name;           // in messages
    int64_t row_start = 0;      // in the micro-batch
    int64_t row_count = 0;
    int64_t row_bytes = 0;
    RowsView* view = nullptr;  // the submission's: where the head finds the rows
    std::string field;         // of the header, that says where they are; empty: they come as chunks
  };
  // The call's own streams bring the rows; derived classes bring them otherwise.
  explicit RowSource(Rows rows) : rows_(std::move(rows)) {}
  virtual ~RowSource() = default;
  RowSource(const RowSource&) = delete;
  RowSource& operator=(const RowSource&) = delete;

  const Rows& rows() const { return rows_; }
  int64_t bytes() const { return rows_.row_count * rows_.row_bytes; }

  // ---- admission
  // Memory of the server that the rows take. `keeps`: with a copy of what lies in the client's memory.
  virtual int64_t bytes_to_reserve([[maybe_unused]] bool keeps) const { return bytes(); }
  // Claims rows that others send. Null: no others send them. kJoinIncomplete.
  virtual absl::StatusOr<std::shared_ptr<transport::RowClaim>> Claim(transport::TeacherJoin&) { return nullptr; }
  // Gets memory for rows that come, and returns how they do.
  virtual absl::StatusOr<Transfer::Tensor> Place(transport::PinnedPool& pool);

  // ---- run
  // Lets rows that are there from the start be read.
  virtual absl::Status Open(observability::Metrics&) { return absl::OkStatus(); }
  // Delivers what others have brought since the last time, as tensor `index` of the transfer.
  virtual absl::Status Pull(Transfer&, size_t) { return absl::OkStatus(); }
  // The claim on rows that are missing and that only others can bring; else null.
  virtual const transport::RowClaim* awaited() const { return nullptr; }

  // The region of rows in the client's memory, which are digested only when they are computed; else null.
  virtual const transport::RegionUse* region() const { return nullptr; }
  // Begins to copy rows whose memory is the client's again after the call, and adds to `copies`. `owner` keeps the region mapped
  // meanwhile.
  virtual absl::Status StartCopy(ServerCore&, const DeviceEvent*, const std::shared_ptr<const void>&, RowCopies*) {
    return absl::OkStatus();
  }
  // The copies are complete: the rows are read there from now on.
  virtual void UseCopy() {}

 protected:
  absl::Status Allocate(transport::PinnedPool& pool);
  // Place() without its allocation.
  Transfer::Tensor Describe() const;
  void PointAt(const void* data, MemorySpace memory) {
    rows_.view->data = data;
    rows_.view->memory = memory;
  }

  const Rows rows_;
  std::shared_ptr<transport::PinnedBlock> block_;  // null: not allocated, or there are no rows
};

// The rows lie in memory of the client: shared, in a named file, or a device's.
std::unique_ptr<RowSource> MakeRegionRows(RowSource::Rows rows, transport::RegionUse region);
// Another process sends them, by way of TeacherJoin. `row_indices` and `user` are Claim()'s; the indices outlive the source.
std::unique_ptr<RowSource> MakeJoinedRows(RowSource::Rows rows, transport::JoinedSet set, const std::vector<int32_t>& row_indices,
                                          std::string user);

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
