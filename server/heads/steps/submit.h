// A micro-batch's way into its heads: checked, announced, computed, and settled as a contribution.
//
// These are functions of no head alone: a submission may name several, as students and as teachers.
#ifndef HEADWATER_SERVER_HEADS_STEPS_SUBMIT_H_
#define HEADWATER_SERVER_HEADS_STEPS_SUBMIT_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "server/heads/steps/submission.h"
#include "server/scheduler/waiting.h"

namespace headwater::heads {

// Everything that can be refused before the rows have arrived; changes nothing.
absl::Status CheckSubmission(const Submission& submission);
// To be called once the header has been accepted. Checks like CheckSubmission(); then an attempt > 0 aborts lower ones: what they
// left undecided is dropped, and one that is running ends with kAttemptSuperseded unless it is past the point of no return.
absl::Status Announce(const Submission& submission, const scheduler::WaitLimits& limits = scheduler::AsLongAsItTakes());
// Waits while the weights of one of the submission's heads are written, from files perhaps, or are to be written next: Submit()
// would wait just as long, but with the turn at the engine that its caller has by then, and that others could use. What can be
// refused is refused without waiting.
absl::Status AwaitFiles(const Submission& submission, const scheduler::WaitLimits& limits);
// Whether AwaitFiles() has something to wait for.
bool IsBehindFiles(const Submission& submission);
// Computes and, where it adds something, commits or stages. Waits for all heads of the submission, which it shares with others of
// its kind unless it may take a staging slot. `cancelled` is asked once more just before the point from which the submission can no
// longer be aborted; true ends it with kCancelled and nothing changed. With `incoming` that point is when all rows are there;
// before it, and whenever rows are awaited, `cancelled` and higher attempts are looked at.
absl::StatusOr<SubmissionOutcome> Submit(const Submission& submission, LossEngine& engine, const std::function<bool()>& cancelled);

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_STEPS_SUBMIT_H_
