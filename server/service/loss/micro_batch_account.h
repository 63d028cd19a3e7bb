// The metrics and the trace of a micro-batch whose outcome is known.
#ifndef HEADWATER_SERVER_SERVICE_LOSS_MICRO_BATCH_ACCOUNT_H_
#define HEADWATER_SERVER_SERVICE_LOSS_MICRO_BATCH_ACCOUNT_H_

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/heads/head.h"
#include "server/observability/call_trace.h"
#include "server/observability/metrics.h"

namespace headwater::service {

// When a micro-batch reached each of its stages; times of observability::MonotonicNow().
struct MicroBatchTimes {
  absl::Time header;    // its header came
  absl::Time last_row;  // its last row was there
  absl::Time engine_start;
  absl::Time engine_end;
};

observability::MicroBatchOutcome OutcomeOf(const heads::SubmissionOutcome& outcome);
observability::MicroBatchOutcome OutcomeOf(const absl::Status& error);

// Floating point operations of the products that a micro-batch which succeeded needed at least (headwater_product_flops_total).
double ProductFlopsOf(const heads::Submission& submission, const heads::SubmissionOutcome& outcome);
// How full its token chunks were, by the plan of its first term's head; 0 if nothing was computed or the engine has no chunks.
double ChunkFillOf(const heads::Submission& submission, const heads::SubmissionOutcome& outcome);

// Counts a micro-batch that succeeded. `path`: of its hidden states.
void CountMicroBatch(observability::Metrics& metrics, const heads::Submission& submission, const heads::SubmissionOutcome& outcome,
                     observability::Transport path, const MicroBatchTimes& times);

// Writes where the time of such a micro-batch went, up to `end`, when its gradient had left.
void TraceMicroBatch(observability::CallTrace& trace, const heads::Submission& submission, const heads::SubmissionOutcome& outcome,
                     observability::Transport path, const MicroBatchTimes& times, absl::Time end);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_LOSS_MICRO_BATCH_ACCOUNT_H_
