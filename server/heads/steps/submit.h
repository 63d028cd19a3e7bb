// A micro-batch's way into its heads: checked, announced, computed, and settled as a contribution.
//
// They are no methods of Head: a submission may name several heads, as students and as teachers.
#ifndef HEADWATER_SERVER_HEADS_STEPS_SUBMIT_H_
#define HEADWATER_SERVER_HEADS_STEPS_SUBMIT_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "server/heads/steps/submission.h"
#include "server/scheduler/waiting.h"

namespace headwater::heads {

// Returns every error that is known before the rows have arrived; changes nothing.
absl::Status CheckSubmission(const Submission& submission);
// To be called once the header has been accepted. Checks like CheckSubmission(); then an attempt > 0 aborts lower ones. Their
// undecided contributions are dropped, and a running one ends with kAttemptSuperseded unless it is past the point of no return.
absl::Status Announce(const Submission& submission, const scheduler::WaitLimits& limits = scheduler::AsLongAsItTakes());
// Waits while the weights of one of the submission's heads are written, from files perhaps, or are to be written next. Submit()
// would wait just as long, but would keep its caller's turn at the engine from others. Refuses without waiting where it can.
absl::Status AwaitFiles(const Submission& submission, const scheduler::WaitLimits& limits);
// Whether AwaitFiles() has something to wait for.
bool IsBehindFiles(const Submission& submission);
// Computes and, where it adds something, commits or stages. Waits for all heads of the submission, which it shares with others of
// its kind unless it may take a staging slot. `cancelled` is asked once more just before the submission can no longer be aborted;
// true ends it with kCancelled and nothing changed. With `incoming` that point is when all rows are there; before it, and whenever
// rows are awaited, `cancelled` and higher attempts are looked at.
absl::StatusOr<SubmissionOutcome> Submit(const Submission& submission, LossEngine& engine, const std::function<bool()>& cancelled);

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_STEPS_SUBMIT_H_
