// Submission: one micro-batch on its way into its heads: checked, announced, computed, and settled as a contribution.
//
// Its calls are no methods of Head: a submission may name several heads, as students and as teachers.
#ifndef HEADWATER_SERVER_HEADS_STEPS_SUBMIT_H_
#define HEADWATER_SERVER_HEADS_STEPS_SUBMIT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "headwater/kernels/digest.h"
#include "headwater/kernels/engine.h"
#include "server/heads/head_name.h"
#include "server/heads/session_registry.h"
#include "server/heads/steps/pending_contribution.h"
#include "server/heads/steps/step_calls.h"
#include "server/heads/steps/step_ledger.h"
#include "server/scheduler/waiting.h"

namespace headwater::observability {
class BusyClock;
}

namespace headwater::heads {

class Head;

// One loss term of a submission, with owned data; the head pointers are resolved names.
struct SubmittedTerm {
  std::shared_ptr<Head> head;
  std::optional<Epoch> head_epoch;  // required for a trainable head in a backward call
  std::optional<int64_t> step;      // required where head_epoch is
  std::optional<int64_t> expected_weight_version;
  std::shared_ptr<Head> teacher_head;  // JSD with a teacher's head
  std::optional<Epoch> teacher_head_epoch;
  std::optional<int64_t> expected_teacher_weight_version;
  LossTerm term;  // spans and pointers into memory that the caller keeps until Submit() returns;
                  // `head`, `teacher_head` and their pointers are filled in by Submit()
};

// Rows of a submission that may still be arriving. Implemented by the call that reads them from the client; outlives Submit().
class IncomingRows {
 public:
  virtual ~IncomingRows() = default;
  // As RowFlow::AwaitRows(). kCancelled with `stalled` set in the source when rows stay away for too long to hold the engine for.
  // Called by the thread that computes, like Finish().
  virtual absl::Status AwaitRows(int64_t row_end) = 0;
  // True once AwaitRows() has given up because the rows stalled. The submission is not refused: it comes again when it is complete.
  virtual bool stalled() const = 0;
  // The digest of canonical header and rows, once all rows are there. Called once, in a backward call. `rows`: the engine's sums,
  // if it was asked for them (`engine_digests`), else null.
  virtual absl::StatusOr<Digest> Finish(const DigestBuilder* rows) = 0;
  // As RowFlow::GradHiddenReady().
  virtual void GradHiddenReady(int64_t row_end) = 0;
};

// A micro-batch: its header is decoded; its rows are there, or on their way. The decoder checks its form: which fields there are,
// which exclude each other, and that the terms of one head name one epoch and step.
struct Submission {
  std::vector<SubmittedTerm> terms;
  std::optional<int64_t> micro_batch;  // absent: nothing is added (forward only, frozen head)
  int64_t attempt = 0;
  std::string label;  // MicroBatch::label: the call's request id
  bool backward = false;
  bool explicit_commit = false;
  bool first_wins = false;  // on_mismatch
  bool refuse_non_finite = false;
  bool late_token_factors = false;   // held even if slots are free; needs `hold` and explicit_commit
  std::optional<SessionId> session;  // owns the contribution while it is undecided; the caller holds a SessionRegistry::Use
  // Called at most once, when the contribution is to be held as rows. Keeps alive all that the terms and `hidden` point to, until
  // the returned pointer is dropped; or returns why that fails (kStagingFull). Null: a micro-batch that finds no slot is refused.
  // In deterministic mode every contribution is held.
  std::function<absl::StatusOr<std::shared_ptr<const void>>()> hold;
  // `hold` for a contribution that others wait for, in deterministic mode: it must find room, or no call makes progress. Null:
  // `hold` itself.
  std::function<absl::StatusOr<std::shared_ptr<const void>>()> hold_first;
  RowsView hidden;
  MutableRowsView grad_hidden;  // data null: not wanted
  double grad_hidden_scale = 1;
  Digest digest{};  // of canonical header and rows; not looked at with `incoming`
  // Not null: the rows are read as they come, and the digest follows at the end. Only a micro-batch that is new to the step is
  // computed so. For any other, or if the rows stall, Submit() changes nothing and answers `needs_all_rows`.
  IncomingRows* incoming = nullptr;
  bool engine_digests = false;         // MicroBatch::digest_rows; only with `incoming`
  const DeviceEvent* after = nullptr;  // MicroBatch::after; outlives Submit()
  // Kept by a contribution that is left undecided, until it is decided or dropped. May be null.
  std::shared_ptr<const void> until_decided;
};

struct SubmissionOutcome {
  std::vector<LossSums> terms;
  std::vector<int64_t> weight_versions;          // one for each term
  std::vector<int64_t> teacher_weight_versions;  // 0 without teacher
  ContributionState state = ContributionState::kNone;
  ContributionForm form = ContributionForm::kNone;
  bool replayed = false;
  bool payload_differs = false;
  std::optional<int64_t> step;
  Digest digest{};  // that the micro-batch is known by
  // Nothing was done: submit it again, without `incoming`, when all rows are there. Rows of grad_hidden that GradHiddenReady() has
  // reported stay right if both tries saw the same versions of all weights, which are filled in.
  bool needs_all_rows = false;
};

// For server/heads alone: whether a submission may take a staging slot.
bool NeedsSlot(const Submission& submission);
// Its heads, each once, in the order of the terms; and those of them to whose accumulators it adds.
std::vector<Head*> HeadsOf(const Submission& submission);
std::vector<Head*> TargetsOf(const Submission& submission);

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

// Adds the contribution to all its heads, or to none. `targets` must be exactly its heads (kInvalidCombination otherwise). True if
// this call committed it, false if an equal call had before. kNotSessionOwner if another session than `session` owns it.
// kInvalidCombination for token factors of a contribution that is not HELD, kShapeMismatch for their number. kWeightVersionMismatch
// if it is HELD and a teacher's weights have changed. `busy` (may be null) counts the engine's work for it, but not the wait for
// the heads.
absl::StatusOr<bool> Commit(const std::vector<DecisionTarget>& targets, int64_t micro_batch, int64_t attempt,
                            const CommitArguments& arguments, const std::optional<SessionId>& session,
                            observability::BusyClock* busy = nullptr,
                            const scheduler::WaitLimits& limits = scheduler::AsLongAsItTakes());
// True if a contribution was dropped. An attempt higher than the contribution's needs no session.
absl::StatusOr<bool> Discard(const std::vector<DecisionTarget>& targets, int64_t micro_batch, int64_t attempt,
                             const std::optional<SessionId>& session,
                             const scheduler::WaitLimits& limits = scheduler::AsLongAsItTakes());

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_STEPS_SUBMIT_H_
