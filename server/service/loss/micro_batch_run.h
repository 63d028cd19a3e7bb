// MicroBatchRun: an admitted micro-batch on its way through the engine. It waits for rows and for its place, is submitted to its
// heads, and sends its gradient.
//
// Computing begins when the first useful rows are there, if the others seem to be near: the engine reads rows as they come
// (IncomingRows). If rows then stay away, the run gives its place to others, and waits until all rows are there.
//
// Every wait is on the transfer's RowExchange. It is woken by rows, the end of the call, joined rows, the queue, a deleted head and
// a lost engine.
//
// Used by one thread, except that the engine's threads report the gradient.
#ifndef HEADWATER_SERVER_SERVICE_LOSS_MICRO_BATCH_RUN_H_
#define HEADWATER_SERVER_SERVICE_LOSS_MICRO_BATCH_RUN_H_

#include <functional>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "headwater/kernels/digest.h"
#include "headwater/v1/loss_service.pb.h"
#include "server/heads/head.h"
#include "server/scheduler/waiting.h"
#include "server/scheduler/work_queue.h"
#include "server/service/loss/micro_batch.h"
#include "server/transport/row_exchange.h"

namespace headwater::service {

class MicroBatchRun {
 public:
  // `micro_batch` and `limits`, which bound the waits, outlive this.
  MicroBatchRun(AdmittedMicroBatch& micro_batch, const scheduler::WaitLimits& limits);
  MicroBatchRun(const MicroBatchRun&) = delete;
  MicroBatchRun& operator=(const MicroBatchRun&) = delete;

  // Streams have begun to bring rows. When this returns OK an EAGER micro-batch is committed, and has been counted.
  absl::Status Compute();
  // After Compute(): returns when grad_hidden has been sent, or written to where the client wants it.
  absl::Status DeliverGrad();
  // Whether the heads have the outcome: later events of the call cannot undo it.
  bool computed() const { return outcome_.has_value() && !outcome_->needs_all_rows; }
  void FillSummary(v1::MicroBatchSummary* summary);

 private:
  class Incoming;
  using Progress = transport::RowProgress;

  // Lets rows in regions be read and written.
  absl::Status OpenRegions();
  absl::Status AddEvent(const transport::RegionUse& region, int64_t row_bytes);
  // Takes what has come of joined rows.
  absl::Status PullRows();
  // Waits until the micro-batch may be submitted: all rows are there, or enough to begin with.
  absl::Status AwaitStart();
  // When it may be submitted even if rows are missing.
  absl::Time EarlyStart(const Progress& rows, absl::Time now);
  // Why the wait for rows is over at `now`; OK if it is not, and `end` is lowered to when it will be.
  absl::Status CheckWait(const Progress& rows, absl::Time now, absl::Time* end) const;
  // `doing` is what the call waits for, for the message.
  absl::Status CheckInTime(absl::Time now, const char* doing) const;
  // Why rows are missing once their streams have ended. A cancellation is known only a moment after that.
  absl::Status ExplainEnd(const absl::Status& status);
  absl::StatusOr<Digest> DigestOfAll();
  // heads::AwaitFiles(), which the end of the transfer ends too.
  absl::Status AwaitFiles();
  // Waits for a place at the engine.
  absl::Status AwaitPlace();
  absl::Status Submit();

  AdmittedMicroBatch& batch_;
  ServerCore& core_;
  transport::RowExchange& exchange_;
  const scheduler::WaitLimits& limits_;
  const std::function<bool()> cancelled_;
  std::optional<heads::SubmissionOutcome> outcome_;
  bool may_begin_early_ = false;
  absl::Time begin_;       // of observability::MonotonicNow()
  absl::Time joined_end_;  // when the call gives up waiting for joined rows alone
  std::optional<scheduler::WorkQueue::Turn> turn_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_LOSS_MICRO_BATCH_RUN_H_
