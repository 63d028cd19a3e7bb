// Head: one LM head's transactions. Ties the open step to the engine's numbers.
//
// Head itself has name, specification, epoch and state, and takes the locks. Its parts have files of their own: StepTransactions
// (ledger, pending contributions, order), WeightTensors and WeightRecord (tensors, versions, checkpoints), HeadGate (who may
// enter).
//
// Thread-safe, with two locks: `compute_mutex_` is held for engine work and for every change of the head, `state_mutex_` for
// moments only. So Describe(), GetSteps(), CheckSubmission() and a duplicate's kMicroBatchInProgress are answered while another
// call computes; all other methods wait for it. Submissions that stage nothing share the compute locks of their heads: several
// small ones reach the engine together, and the next large one is ready. Nothing here knows gRPC; errors carry reasons (error.h).
//
// Calls that save the head, or set it from files, hold it for as long as the disk takes. Other calls wait for them at the gate, in
// turns and as their WaitLimits allow (head_gate.h). A method that takes limits may answer kDeadlineExceeded, kCancelled, or the
// error of WaitLimits::places, and has changed nothing then (in deterministic mode Seal() and Apply() may have sealed the step).
// Behind a computation a call waits whatever its limits are, and checks them before it changes anything.
//
// Every call answers, in this order: kHeadNotFound after Retire(); kHeadNotTrainable where a step is named and the head is frozen;
// kStepLost while the head is RESTORED and the call names an epoch or a step; kEpochFenced; kStepLost while the head is LOST;
// kWeightsNotLoaded while it is LOADING.
//
// A head is LOST when the engine failed (kEngineFailed, kInternal) while its accumulator, weights or optimizer state were being
// changed: their values are unknown. Everything undecided is dropped, and every call but SetTensor(s) and Restore is refused until
// one of those gives the head a new epoch. An engine that fails before it changes anything (a staged or forward-only computation,
// one whose rows were still awaited, a read, kShardNotReady) leaves the head as it was. Computations beside the one that failed end
// with kStepLost. A head is RESTORED when the server has brought it back from a checkpoint: Take(), Restore() and SetTensor(s) with
// the current epoch make it READY.
//
// In deterministic mode (HeadLimits::deterministic) contributions are added in ascending id, each by a computation of its own over
// held rows, always of the same kind. A step's gradient is then bitwise equal whatever the order in which contributions came, were
// repeated or decided. A contribution that is committed before its turn waits in an OrderedWindow; its state is COMMITTED, and
// nobody can take it back. Calls on a head do not share its compute lock in this mode.
//
// An undecided contribution may belong to several heads (a micro-batch with several terms). It is dropped in all of them as soon as
// one of them drops it; the others notice at their next call, before anything else.
#ifndef HEADWATER_SERVER_HEADS_HEAD_H_
#define HEADWATER_SERVER_HEADS_HEAD_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "headwater/kernels/digest.h"
#include "headwater/kernels/engine.h"
#include "server/heads/epoch.h"
#include "server/heads/head_gate.h"
#include "server/heads/head_info.h"
#include "server/heads/head_name.h"
#include "server/heads/pending_contribution.h"
#include "server/heads/session_registry.h"
#include "server/heads/step_calls.h"
#include "server/heads/step_ledger.h"
#include "server/heads/step_transactions.h"
#include "server/heads/submission.h"
#include "server/heads/tensor_update.h"
#include "server/heads/weight_record.h"
#include "server/heads/weight_tensors.h"
#include "server/scheduler/waiting.h"

namespace headwater::checkpoint {
class CheckpointStore;
}
namespace headwater::observability {
class BusyClock;
}

namespace headwater::heads {

// Every call that may wait takes limits.
using scheduler::AsLongAsItTakes;
using scheduler::WaitLimits;

class HeadUse;

class Head : public std::enable_shared_from_this<Head> {
 public:
  // Plans, admits and allocates. Engine errors pass through. `engine` must outlive the head.
  static absl::StatusOr<std::shared_ptr<Head>> Create(const HeadName& name, const HeadSpec& spec, LossEngine& engine,
                                                      const HeadLimits& limits);

  // Drops what is undecided.
  ~Head();

  const HeadName& name() const { return name_; }
  const HeadSpec& spec() const { return spec_; }
  // MemoryPlan::token_chunk_rows of its plan.
  int64_t token_chunk_rows() const { return engine_head_->plan().token_chunk_rows; }
  HeadInfo Describe() const;
  // kEpochFenced (with both epochs in hex, and openStep) unless `epoch` is the head's; kStepLost if it has been restored since.
  absl::Status CheckEpoch(const Epoch& epoch) const;
  // A call that names the open step + 1 waits here until that step is open; any other call, and one that is to fail anyway, goes on
  // at once. So does this one at WaitLimits::step_deadline, to be answered kStepMismatch.
  absl::Status AwaitStep(const StepKey& key, const WaitLimits& limits);
  // When a call last named the head, by the registry's clock.
  void Touch(absl::Time now);
  absl::Time last_use() const;

  // ---- micro-batches -------------------------------------------------------------------------------------------------
  // Everything that can be refused before the rows have arrived; changes nothing. Static: a submission may name several heads.
  static absl::Status CheckSubmission(const Submission& submission);
  // To be called once the header has been accepted. Checks like CheckSubmission(); then an attempt > 0 aborts lower ones: what they
  // left undecided is dropped, and one that is running ends with kAttemptSuperseded unless it is past the point of no return.
  static absl::Status Announce(const Submission& submission, const WaitLimits& limits = AsLongAsItTakes());
  // Waits while a call that takes as long as files do (Save(), Restore(), SetTensors()) has one of the submission's heads, or is
  // the next to have it: Submit() would wait just as long, but with the turn at the engine that its caller has by then, and that
  // others could use. What can be refused is refused without waiting. kCancelled, kDeadlineExceeded. Nothing to wait for once that
  // head has been retired.
  static absl::Status AwaitFiles(const Submission& submission, const WaitLimits& limits);
  // Whether AwaitFiles() has something to wait for.
  static bool IsBehindFiles(const Submission& submission);
  // Computes and, where it adds something, commits or stages. Locks all heads of the submission (ordered by address), shared with
  // others of its kind unless it may take a staging slot. `cancelled` is asked once more just before the point from which the
  // submission can no longer be aborted; true ends it with kCancelled and nothing changed. With `incoming` that point is when all
  // rows are there; before it, and whenever rows are awaited, `cancelled` and higher attempts are looked at.
  static absl::StatusOr<SubmissionOutcome> Submit(const Submission& submission, LossEngine& engine,
                                                  const std::function<bool()>& cancelled);
  // Adds the contribution to all its heads, or to none: `targets` must be exactly those (kInvalidCombination otherwise). True if
  // this call committed it, false if an equal call had. `session`: kNotSessionOwner unless it owns the contribution, or nobody
  // does. kInvalidCombination for token factors of a contribution that is not HELD, kShapeMismatch for their number;
  // kWeightVersionMismatch if it is HELD and a teacher's weights have changed. `busy` (may be null) counts what the engine does for
  // it, but not the wait for the heads, which files may have.
  static absl::StatusOr<bool> Commit(const std::vector<DecisionTarget>& targets, int64_t micro_batch, int64_t attempt,
                                     const CommitArguments& arguments, const std::optional<SessionId>& session,
                                     observability::BusyClock* busy = nullptr, const WaitLimits& limits = AsLongAsItTakes());
  // True if something was dropped. An attempt higher than the one that is there needs no session.
  static absl::StatusOr<bool> Discard(const std::vector<DecisionTarget>& targets, int64_t micro_batch, int64_t attempt,
                                      const std::optional<SessionId>& session, const WaitLimits& limits = AsLongAsItTakes());
  // Commit() and Discard() for a micro-batch of this head alone that no session owns.
  absl::StatusOr<bool> Commit(const StepKey& key, int64_t micro_batch, int64_t attempt, double factor);
  absl::StatusOr<bool> Discard(const StepKey& key, int64_t micro_batch, int64_t attempt);
  // Refuses what AddGradient() would refuse whatever the bytes are, for before they arrive.
  absl::Status CheckAddGradient(const StepKey& key, int64_t micro_batch, int64_t attempt, int64_t row_start,
                                int64_t row_count) const;
  // Adds a trainer's own part as a committed contribution. True if this call added it, false for a repeat with the same digest.
  absl::StatusOr<bool> AddGradient(const StepKey& key, int64_t micro_batch, int64_t attempt, const Digest& digest,
                                   const GradientPart& part, const std::function<bool()>& cancelled,
                                   const WaitLimits& limits = AsLongAsItTakes());
  // In deterministic mode AddGradient() is refused (kOrderedWindowFull) until its predecessors are there, and adds them first: its
  // rows are not kept. Waits for that; OK as well at WaitLimits::step_deadline.
  absl::Status AwaitTurn(const StepKey& key, int64_t micro_batch, const WaitLimits& limits) const;
  // Whether AwaitTurn() has nothing to wait for.
  bool HasItsTurn(const StepKey& key, int64_t micro_batch) const;
  // Drops what a session that has ended left undecided; a tombstone stays for each. Returns how many micro-batches this call
  // dropped. Waits for nobody: one thread ends all sessions. What a call of the session is just committing stays, and so does what
  // its calls still add; that is dropped when the last of them has ended, and the session with it once more.
  int64_t DropSession(const SessionId& session);

  // ---- steps ---------------------------------------------------------------------------------------------------------
  absl::StatusOr<std::pair<StepRecord, std::optional<StepRecord>>> GetSteps(const Epoch& epoch) const;
  // With `wait`: as long as micro-batches are missing or undecided, and the step takes them, waits for them.
  absl::StatusOr<SealReply> Seal(const StepKey& key, const ExpectedMicroBatches& expected, const WaitLimits& wait = {},
                                 const WaitLimits& limits = AsLongAsItTakes());
  // Whether the step is open, so that what it lacks may still come.
  bool TakesMicroBatches(const StepKey& key) const;
  // Needs a sealed step, or `expected` to seal the open one first (kMissingField without it); the step stays sealed if the update
  // is then refused (kNonFiniteGradient). With `expected` for a sealed step the expectation must hold. Replay: the last closed step
  // with equal arguments gets the stored reply; `expected` is compared only if both calls gave it. Anything else for the last
  // closed step is kStepConflict. kOptimizerNotConfigured; kInvalidCombination for overrides that the head's optimizer does not
  // have; kInvalidField for values out of range.
  absl::StatusOr<ApplyReply> Apply(const StepKey& key, const std::optional<ExpectedMicroBatches>& expected,
                                   const ApplyArguments& arguments, const WaitLimits& limits = AsLongAsItTakes());
  // Returns {open step, replayed}.
  absl::StatusOr<std::pair<int64_t, bool>> DiscardGradient(const StepKey& key, const WaitLimits& limits = AsLongAsItTakes());
  // Takes one tensor of the weights that close a sealed step. When the head has all of its tensors they are swapped in whole, the
  // step is REPLACED and step + 1 is open. A repeat of a tensor that the last closed step was replaced with is answered alike.
  // kStepMismatch, kStepNotSealed, kStepConflict; and what SetTensor() refuses. The epoch stays, optimizer state is kept.
  absl::StatusOr<ReplaceReply> Replace(const StepKey& key, const ShadowTensor& tensor,
                                       const WaitLimits& limits = AsLongAsItTakes());
  // Lets go of a tensor that waits for the others, if it is the one at `data`: its room is needed. The step needs all of them again
  // then. False if it does not wait here, or a call computes on the head or changes it.
  bool DropShadow(const void* data);
  // A new run takes over: a new epoch, an empty open step. kEpochFenced if `epoch` is given and not the head's; kHeadNotTrainable;
  // kStepLost for a head that is LOST. This, Replace() and the other calls that make an epoch return the head as they leave it:
  // whoever takes it right afterwards has another epoch, which the former owner must not learn from its own call. The taker has
  // worked under `recovers_epochs` before the server was started again: Describe() tells them as long as the new epoch lasts.
  absl::StatusOr<HeadInfo> Take(const std::optional<Epoch>& epoch, std::vector<Epoch> recovers_epochs = {},
                                const WaitLimits& limits = AsLongAsItTakes());
  // Without factor.
  absl::StatusOr<GradientStats> GradientNorm(const StepKey& key, const WaitLimits& limits = AsLongAsItTakes()) const;
  // Copies accumulator elements out as fp32; `tensor` is kGradWeight or kGradBias (kWeight and kBias mean the same). Fails with
  // kStepMismatch when the step has moved on between two calls.
  absl::Status ReadGradient(const StepKey& key, HeadTensor tensor, int64_t element_start, int64_t element_count, float* out,
                            const WaitLimits& limits = AsLongAsItTakes()) const;

  // ---- weights -------------------------------------------------------------------------------------------------------
  // Sets a whole tensor (kWeight or kBias), in the storage type or fp32 (rounded to nearest even for storage, kept whole in the
  // master weights). Becomes READY when all tensors are there; a READY or LOST head gets a new epoch, version + 1 and an empty
  // step, uncommitted contributions are dropped, and optimizer state starts again from 0 (Restore brings weights together with
  // theirs). kEpochFenced for a stale epoch; kDataTypeMismatch, kDataLengthMismatch, kInvalidField.
  absl::StatusOr<HeadInfo> SetTensor(const Epoch& epoch, HeadTensor tensor, DataType data_type, const void* data,
                                     int64_t byte_count, const WaitLimits& limits = AsLongAsItTakes());
  // SetTensor() for one or two tensors in one change, read from sources in pieces of at most kTensorPieceBytes. Those that are not
  // in memory are read through once before anything is written, without holding up other calls: if one fails then, its error comes
  // back, and the head is as before. One that fails after that has changed meanwhile: a head that was LOADING still is, without the
  // tensors of this call, and is told the source's error; any other is LOST (kEngineFailed).
  absl::StatusOr<HeadInfo> SetTensors(const Epoch& epoch, const std::vector<TensorUpdate>& updates,
                                      const WaitLimits& limits = AsLongAsItTakes());
  // Copies elements of kWeight or kBias (storage type), kMasterWeight or kMasterBias (fp32). kWeightVersionMismatch if `version` is
  // given and not the current one; kEpochFenced (kStepLost of a RESTORED head) the same for `epoch`.
  absl::Status ReadWeights(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out,
                           std::optional<int64_t> version, const std::optional<Epoch>& epoch = std::nullopt,
                           const WaitLimits& limits = AsLongAsItTakes()) const;

  // ---- checkpoints ---------------------------------------------------------------------------------------------------
  struct SavedCheckpoint {
    int64_t step = 0;
    int64_t total_bytes = 0;
  };
  // Writes weights, optimizer state and the open step's number; contributions of the open step are not part of it. `epoch` is
  // required for a trainable head.
  absl::StatusOr<SavedCheckpoint> Save(const std::optional<Epoch>& epoch, checkpoint::CheckpointStore& store,
                                       const std::string& checkpoint_name, bool overwrite,
                                       const WaitLimits& limits = AsLongAsItTakes());
  // Save(), replacing a checkpoint of that name, for a READY head that has changed since its last save; true if it was saved.
  // kDeadlineExceeded if it has, after `deadline`. Does not wait for calls that compute, or that come before it: nothing if there
  // are any.
  std::optional<absl::StatusOr<bool>> TrySaveIfChanged(checkpoint::CheckpointStore& store, const std::string& checkpoint_name,
                                                       absl::Time deadline);
  // Sets weights, optimizer state and step; a new epoch, version + 1, an empty open step. If the checkpoint is not there, damaged
  // or of another spec, the head is as before. In deterministic mode so it is if the checkpoint was saved where sums are made in
  // another order (kCheckpointSpecMismatch); else HeadInfo::restore_note says so. A new head that has not been saved yet goes on
  // with the checkpoint's run (CheckpointStore::Continue()).
  absl::StatusOr<HeadInfo> Restore(const Epoch& epoch, checkpoint::CheckpointStore& store, const std::string& checkpoint_name,
                                   const WaitLimits& limits = AsLongAsItTakes());
  // Restore() for a head that was just created because the server restarted: a trainable one is RESTORED then.
  absl::Status ComeBack(checkpoint::CheckpointStore& store, const std::string& checkpoint_name);
  // One of the head's checkpoints was removed: errors do not name it any more, and TrySaveIfChanged() does not count on it.
  void CheckpointRemoved(const checkpoint::CheckpointStore& store);

  // True if there are uncommitted contributions, running calls (submissions, and whoever has a HeadUse) or a non-empty open step.
  bool InUse() const;
  // Whether somebody has a HeadUse of it.
  bool HasUses() const;
  // kHeadNotFound once it has been retired.
  absl::Status CheckThere() const;
  // Called when the head leaves the registry: later calls that still hold it answer kHeadNotFound. Waits for a running call, then
  // drops what is staged.
  void Retire();
  // Retires unless `epoch` is given and stale (kEpochFenced) or the head is in use and `force` is not set (kHeadInUse). Decided at
  // once, without waiting for a running call; what is staged goes with the head.
  absl::Status TryRetire(const std::optional<Epoch>& epoch, bool force);

 private:
  // The state that a call needs.
  enum class Need { kAnyState, kNotLost, kReady };
  friend class HeadUse;
  // Hold the compute locks, or the state locks, of some heads, taken in ascending address so that nobody waits in a circle.
  class ComputeLocks;
  class StateLocks;

  Head(const HeadName& name, const HeadSpec& spec, const HeadLimits& limits, LossEngine& engine,
       std::unique_ptr<EngineHead> engine_head);

  // The checks that every call begins with. `epoch` null: not checked.
  absl::Status Check(const Epoch* epoch, Need need, bool for_step) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex_);
  // Check(), with the lock taken for a moment.
  absl::Status LockAndCheck(const Epoch* epoch, Need need, bool for_step) const ABSL_LOCKS_EXCLUDED(state_mutex_);
  // Check() for a call on the gradient of the open or sealed step.
  absl::Status CheckOpenStep(const StepKey& key) const ABSL_LOCKS_EXCLUDED(state_mutex_);
  HeadInfo DescribeLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex_);
  absl::Status EpochError(const Epoch& epoch) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex_);
  absl::Status LostError() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex_);
  bool InUseLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex_);
  // The gates of some heads, in ascending address.
  static std::vector<HeadGate*> GatesOf(const std::set<Head*, std::less<>>& heads);
  void MarkRetired() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex_);
  void CountUse(int64_t change) ABSL_LOCKS_EXCLUDED(state_mutex_);

  // Closes the step, with everything that belonged to it alone.
  absl::Status CloseStep(int64_t step, StepState how) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex_);
  // Waits while micro-batches that Seal() needs are missing or undecided. OK when there is nothing to wait for, and at the
  // deadline.
  absl::Status AwaitMicroBatches(const StepKey& key, const ExpectedMicroBatches& expected, const WaitLimits& limits) const
      ABSL_LOCKS_EXCLUDED(state_mutex_);
  // Restarts at a step: new epoch, nothing known, READY.
  void StartAfresh(int64_t step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex_);

  // The heads whose accumulators a submission adds to, each once, in the order of the terms.
  static std::vector<Head*> TargetsOf(const Submission& submission);
  static absl::Status CheckTerm(const Submission& submission, size_t index);
  absl::Status CheckAsStudent(const SubmittedTerm& term, bool is_target, const Submission& submission) const;
  absl::Status CheckAsTeacher(const SubmittedTerm& term) const;
  // One computation with what it adds to; head_submit.cc.
  class SubmissionRun;

  // The pending contribution that a commit is for: the same in all targets, and theirs alone. Null if an equal call has committed
  // it.
  static absl::StatusOr<std::shared_ptr<PendingContribution>> FindPending(const std::vector<DecisionTarget>& targets,
                                                                          int64_t micro_batch, int64_t attempt,
                                                                          const CommitFactor& factor,
                                                                          const std::optional<SessionId>& session);
  // A held contribution is computed again with its teacher: that must be there, and be what it was.
  static absl::Status CheckHeldTeacher(Head* teacher, int64_t weight_version);
  // Whether Discard() would be refused.
  static absl::Status CheckDiscard(const std::vector<DecisionTarget>& targets, int64_t micro_batch, int64_t attempt,
                                   const std::optional<SessionId>& session);
  // A commit of what FindPending() has found: adds it, or puts it in its place in the order. Needs the compute locks of all heads
  // concerned.
  static absl::Status CarryOut(const std::vector<DecisionTarget>& targets, int64_t micro_batch, PendingContribution& pending,
                               const CommitArguments& arguments, const CommitFactor& factor);
  // AddGradient() once its arguments are known to be right, but for what follows in the order. Null if contributions wait that are
  // to be added first.
  absl::StatusOr<std::optional<bool>> AddOwnPart(const StepKey& key, int64_t micro_batch, int64_t attempt, const Digest& digest,
                                                 const GradientPart& part, const std::function<bool()>& cancelled,
                                                 const WaitLimits& limits);
  // Deterministic mode; head_ordered.cc. Contributions are added in ascending id.
  bool in_order() const { return limits_.deterministic && spec_.trainable; }
  bool IsItsTurn(const StepKey& key, int64_t micro_batch) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex_);
  // Puts a contribution in its place in all of these heads. With their state locks held.
  static void WaitInOrder(const std::vector<Head*>& heads, int64_t micro_batch, const HeldRows& held,
                          const CommitArguments& arguments);
  std::shared_ptr<const WaitingAddition> NextInOrder() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex_);
  // Adds those whose turn has come, one after the other; with no lock held. An engine failure, or a teacher that is no longer what
  // it was, makes the head LOST; any other error leaves what waits as it is.
  absl::Status AddInOrder(const WaitLimits& limits) ABSL_LOCKS_EXCLUDED(compute_mutex_, state_mutex_);
  // AddInOrder() for several heads, but for those that file calls have; only what made one LOST is an error.
  static absl::Status AddInOrder(const std::vector<Head*>& heads);
  // Null if contributions wait that the sealed step is to have first.
  absl::StatusOr<std::optional<ApplyReply>> TryApply(const StepKey& key, const std::optional<ExpectedMicroBatches>& expected,
                                                     const ApplyArguments& arguments, const WaitLimits& limits);

  // After an engine call that changes the head: an engine failure makes the head LOST. Returns `status`.
  absl::Status AfterChange(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(compute_mutex_);
  void MarkLost(const absl::Status& cause) ABSL_SHARED_LOCKS_REQUIRED(compute_mutex_);
  // Swaps the shadow in; the sealed step is to be closed then.
  absl::Status WriteShadow() ABSL_EXCLUSIVE_LOCKS_REQUIRED(compute_mutex_);
  // Save(), with the lock held.
  absl::StatusOr<SavedCheckpoint> SaveLocked(const std::optional<Epoch>& epoch, checkpoint::CheckpointStore& store,
                                             const std::string& checkpoint_name, bool overwrite)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(compute_mutex_);
  // Weights, optimizer state and step from a checkpoint. With `comes_back` a trainable head is RESTORED then, else READY.
  absl::Status LoadCheckpoint(checkpoint::CheckpointStore& store, const std::string& checkpoint_name, bool comes_back)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(compute_mutex_);

  const HeadName name_;
  const HeadSpec spec_;
  const HeadLimits limits_;
  const absl::Time create_time_;
  LossEngine& engine_;
  std::atomic<int64_t> last_use_nanos_;

  // Engine work and everything that changes the head. Taken before state_mutex_; of several heads by ComputeLocks. State is written
  // only with both held, so a holder of this one alone may rely on what it has read: but for `retired_`, the attempts that wait,
  // the counts of calls, and what Settle() and DropSession() drop, which only concern contributions that can no longer be decided.
  // Calls that share it change only what each reads again under state_mutex_: the records and pending contributions of
  // their own micro-batches, and, when the engine fails one of them, whether the head is LOST. Weights, versions, epoch and step
  // stay as they are meanwhile, and nothing that is pending is committed.
  mutable absl::Mutex compute_mutex_ ABSL_ACQUIRED_BEFORE(state_mutex_);
  mutable absl::Mutex state_mutex_;
  // Passed before the compute lock is waited for.
  mutable HeadGate gate_;
  // Woken with state_mutex_ held.
  mutable scheduler::WaitList opened_;   // a step has been opened, or none will be
  mutable scheduler::WaitList changed_;  // the ledger, the epoch or the state has changed

  // The pointer is fixed; calls other than spec(), plan(), shards() and the sizes need compute_mutex_.
  const std::unique_ptr<EngineHead> engine_head_;
  WeightTensors tensors_;                                         // but for its checks, needs compute_mutex_
  mutable StepTransactions steps_ ABSL_GUARDED_BY(state_mutex_);  // mutable for Settle()
  WeightRecord weights_ ABSL_GUARDED_BY(state_mutex_);
  Epoch epoch_ ABSL_GUARDED_BY(state_mutex_);
  std::vector<Epoch> recovers_epochs_ ABSL_GUARDED_BY(state_mutex_);  // belong to epoch_
  HeadState state_ ABSL_GUARDED_BY(state_mutex_) = HeadState::kLoading;
  std::string lost_cause_ ABSL_GUARDED_BY(state_mutex_);
  std::string restored_checkpoint_ ABSL_GUARDED_BY(state_mutex_);
  std::string restore_note_ ABSL_GUARDED_BY(state_mutex_);
  bool retired_ ABSL_GUARDED_BY(state_mutex_) = false;
  int64_t running_calls_ ABSL_GUARDED_BY(state_mutex_) = 0;  // submissions that wait or compute
  int64_t use_count_ ABSL_GUARDED_BY(state_mutex_) = 0;      // HeadUse objects
};

// A call's use of a head that it has found, for as long as it may come to work on it: the head is in use meanwhile, and if it is
// deleted all the same its memory stays its tenant's. Not for what is answered at once.
class HeadUse {
 public:
  HeadUse() = default;
  explicit HeadUse(std::shared_ptr<Head> head);
  HeadUse(HeadUse&& other) noexcept = default;
  HeadUse& operator=(HeadUse&& other) noexcept;
  ~HeadUse();

  const std::shared_ptr<Head>& head() const { return head_; }
  Head& operator*() const { return *head_; }
  Head* operator->() const { return head_.get(); }

 private:
  void End();

  std::shared_ptr<Head> head_;  // null: of none
};

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_HEAD_H_
