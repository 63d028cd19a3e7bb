// Head: one LM head's transactions. Ties the open step to the engine's numbers.
//
// Its parts: StepTransactions has the ledger, pending contributions and their order. WeightTensors and WeightRecord have tensors,
// versions and checkpoints. Calls on several heads are functions of submit.h.
//
// Thread-safe. The sequencer (docs/adr/0033-one-sequencer.md) decides which calls may use a head at once. Describe(), GetSteps()
// and all checks answer while other calls compute. A call that computes waits in a fair queue, as its WaitLimits allow. When they
// end the wait it has changed nothing, except that Seal() and Apply() may have sealed the step in deterministic mode. Errors carry
// reasons (error.h).
//
// Every call fails with the first of these errors that applies. Errors: kHeadNotFound after Retire(); kHeadNotTrainable where a
// step is named and the head is frozen; kStepLost while the head is RESTORED and the call names an epoch or a step; kEpochFenced;
// kStepLost while the head is LOST; kWeightsNotLoaded while it is LOADING.
//
// A head is LOST when the engine failed (kEngineFailed, kInternal) while its accumulator, weights or optimizer state were being
// changed: their values are unknown. Everything undecided is dropped, and every call except SetTensor(s) and Restore is refused
// until one of those gives the head a new epoch. A failure before any change leaves the head as it was: a staged or forward-only
// computation, one whose rows were awaited, a read, kShardNotReady. Computations beside the failed one end with kStepLost. A head
// is RESTORED when the server has brought it back from a checkpoint. Take(), Restore() and SetTensor(s) with the current epoch make
// it READY.
//
// In deterministic mode (HeadLimits::deterministic, docs/adr/0016-deterministic-mode.md) contributions are added in ascending id.
// One that is committed before its turn waits in an OrderedWindow. Computations on a head do not overlap.
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
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "headwater/kernels/digest.h"
#include "headwater/kernels/engine.h"
#include "headwater/kernels/error.h"
#include "server/heads/head_name.h"
#include "server/heads/session_registry.h"
#include "server/heads/steps/step_calls.h"
#include "server/heads/steps/step_transactions.h"
#include "server/heads/steps/submit.h"
#include "server/heads/weights/weight_tensors.h"
#include "server/scheduler/sequencer.h"
#include "server/scheduler/waiting.h"

namespace headwater::checkpoint {
class CheckpointStore;
}

namespace headwater::heads {

using scheduler::AsLongAsItTakes;
using scheduler::Turn;
using scheduler::WaitLimits;

enum class Need { kAnyState, kNotLost, kReady };

// How a call uses a head (docs/adr/0033-one-sequencer.md).
inline constexpr scheduler::Uses kReadsWeights = {scheduler::Use::kShared, scheduler::Use::kNone};
// Saves of one head follow each other.
inline constexpr scheduler::Uses kSaves = {scheduler::Use::kShared, scheduler::Use::kNone, scheduler::Use::kExclusive};
inline constexpr scheduler::Uses kSharesGradient = {scheduler::Use::kShared, scheduler::Use::kShared};
inline constexpr scheduler::Uses kChangesGradient = {scheduler::Use::kShared, scheduler::Use::kExclusive};
inline constexpr scheduler::Uses kWritesWeights = {scheduler::Use::kExclusive, scheduler::Use::kExclusive};

// Completes "the call ..." in messages about a call that waits for its heads.
inline constexpr char kWaitsForHead[] = "waited for its turn on the head";

// After an engine's failure the numbers that it was changing are unknown.
inline bool IsEngineFailure(const absl::Status& status) {
  return HasReason(status, ErrorReason::kEngineFailed) || HasReason(status, ErrorReason::kInternal);
}

// A head's state and the checks that its calls share. For server/heads alone; others use Head.
class HeadCore {
 public:
  const HeadName& name() const { return name_; }
  const HeadSpec& spec() const { return spec_; }

  // All changing state is read and written in turns of the sequencer. While a call holds an admission to compute, epoch, step,
  // version and state stay as they are, except for changes by:
  //   - a call that shares the accumulator: records and pending contributions of its own micro-batches, and the loss of the head;
  //   - Retire, and the end of a session, which wait for no admission;
  //   - beside a call that only reads the weights: every call that does not write them.

  // The checks that every call begins with, in the order of the errors above. Without `expected` the epoch is not checked.
  absl::Status Check(const std::optional<Epoch>& expected, Need need, bool for_step) const;
  // In a turn, like all that follow unless they say otherwise.
  absl::Status LostError() const;
  // kHeadNotFound for a call that still holds a head that has been deleted. Not only in a turn.
  absl::Status DeletedError() const;
  // kStepConflict: the last closed step, `step`, was closed by `what` and not by an equal call.
  absl::Status StepConflict(int64_t step, const char* what) const;
  // kWeightVersionMismatch, naming `field` if it is not null, unless `expected` is absent or the weights' version.
  absl::Status CheckVersion(const std::optional<int64_t>& expected, const char* field = nullptr) const;
  // How a computation uses a head to which it adds nothing. In deterministic mode it is not computed together with others: that
  // would show in the last bits. Not only in a turn.
  scheduler::Uses reads() const { return deterministic ? kChangesGradient : kReadsWeights; }
  // Adds a use of the head to the needs of an operation, unless they have one, which must include it: targets come before teachers.
  void AddNeed(const scheduler::Uses& uses, scheduler::Needs& needs) const;
  // Waits for this use of the head alone. The error of the limits; kHeadNotFound once the head has been retired. Not in a turn.
  absl::StatusOr<scheduler::Admission> Admit(scheduler::Uses uses, const WaitLimits& wait) const;
  // Wakes calls that wait for micro-batches or their turn; StepChanged() wakes all that wait for the step. After the change.
  void MicroBatchChanged() { micro_batch_changed->WakeAll(); }
  void StepChanged();
  // The contribution whose turn it is to be added, or null.
  std::shared_ptr<const WaitingAddition> NextInOrder() const;
  // Closes the step, with everything that belonged to it alone.
  absl::Status CloseStep(int64_t step, StepState how);
  // Whether a micro-batch of this step need not wait for a predecessor in order.
  bool IsItsTurn(const StepKey& key, int64_t micro_batch) const;
  // Restarts at a step: new epoch, nothing known, READY.
  void StartAfresh(int64_t step);
  // After an engine call that changes the head: an engine failure makes the head LOST. Returns `status`. Not only in a turn.
  absl::Status AfterChange(const absl::Status& status);
  void MarkLost(const absl::Status& cause);

  const bool deterministic;  // HeadLimits::deterministic
  LossEngine& engine;
  const std::shared_ptr<scheduler::Sequencer> sequencer_owner;
  scheduler::Sequencer& sequencer = *sequencer_owner;
  const std::shared_ptr<scheduler::Record> record = std::make_shared<scheduler::Record>();
  const std::unique_ptr<EngineHead> on_engine;  // calls other than spec(), plan(), shards() and the sizes need an admission
  WeightTensors tensors;                        // needs an admission, except for its checks

  mutable StepTransactions steps;  // checks, too, settle what another head has dropped
  WeightRecord weights;
  const std::shared_ptr<scheduler::WaitList> micro_batch_changed = std::make_shared<scheduler::WaitList>();
  scheduler::WaitList step_changed;
  Epoch current_epoch = NewEpoch();
  std::vector<Epoch> recovers_epochs;  // belong to `current_epoch`
  HeadState state = HeadState::kLoading;
  std::string state_cause;  // the failure of a LOST head, the checkpoint of a RESTORED one
  bool retired = false;
  int64_t running_calls = 0;  // submissions that wait or compute

 protected:
  HeadCore(const HeadName& name, const HeadSpec& spec, const HeadLimits& head_limits, LossEngine& head_engine,
           std::shared_ptr<scheduler::Sequencer> head_sequencer, std::unique_ptr<EngineHead> head_on_engine);
  ~HeadCore() = default;

  absl::Status EpochError(const Epoch& named) const;

  const HeadName name_;
  const HeadSpec spec_;
};

class Head : public HeadCore {
 public:
  // Plans, admits and allocates. Engine errors pass through. `engine` must outlive the head; `sequencer` is one for all its heads.
  static absl::StatusOr<std::shared_ptr<Head>> Create(const HeadName& name, const HeadSpec& spec, LossEngine& engine,
                                                      const HeadLimits& limits, std::shared_ptr<scheduler::Sequencer> sequencer);
  ~Head();

  int64_t token_chunk_rows() const { return on_engine->plan().token_chunk_rows; }  // MemoryPlan::token_chunk_rows of its plan
  HeadInfo Describe() const;
  // kEpochFenced (with both epochs in hex, and openStep) if `epoch` is given and not the head's. kStepLost if the head has been
  // restored since; kHeadNotFound once it has been retired.
  absl::Status CheckEpoch(const std::optional<Epoch>& epoch) const;
  // When a call last named the head, by the registry's clock.
  void Touch(absl::Time now) { last_use_nanos_.store(absl::ToUnixNanos(now), std::memory_order_relaxed); }
  absl::Time last_use() const { return absl::FromUnixNanos(last_use_nanos_.load(std::memory_order_relaxed)); }

  // ---- waits -----------------------------------------------------------------------------------------------------------
  // Waits until the step is open if the call names the open step + 1; else returns OK at once. OK as well at the step's deadline:
  // the call itself then fails with kStepMismatch. Other errors of Wait().
  absl::Status AwaitStep(const StepKey& key, const WaitLimits& limits);
  // Waits for the predecessors of an AddGradient() in deterministic mode. It is refused before (kOrderedWindowFull), because its
  // rows are not kept; it adds them first. OK as well at the step's deadline. Other errors of Wait().
  absl::Status AwaitTurn(const StepKey& key, int64_t micro_batch, const WaitLimits& limits) const;

  // ---- the trainer's own part of a step --------------------------------------------------------------------------------
  // Returns the errors of AddGradient() that do not depend on the bytes, before they arrive.
  absl::Status CheckAddGradient(const StepKey& key, int64_t micro_batch, int64_t attempt, int64_t row_start,
                                int64_t row_count) const;
  // Adds a trainer's own part as a committed contribution. True if this call added it, false for a repeat with the same digest.
  absl::StatusOr<bool> AddGradient(const StepKey& key, int64_t micro_batch, int64_t attempt, const Digest& digest,
                                   const GradientPart& part, const std::function<bool()>& cancelled,
                                   const WaitLimits& limits = AsLongAsItTakes());
  // Drops what a session that has ended left undecided; a tombstone stays for each. Returns how many micro-batches this call
  // dropped. Never waits: one thread ends all sessions. Contributions stay that running calls of the session commit or add. The
  // session ends once more after the last of these calls, and drops the rest.
  int64_t DropSession(const SessionId& session);

  // ---- steps ---------------------------------------------------------------------------------------------------------
  absl::StatusOr<std::pair<StepRecord, std::optional<StepRecord>>> GetSteps(const Epoch& epoch) const;
  // With `wait`: while the step takes micro-batches, waits for those that are missing or undecided.
  absl::StatusOr<SealReply> Seal(const StepKey& key, const ExpectedMicroBatches& expected, const WaitLimits& wait = {},
                                 const WaitLimits& limits = AsLongAsItTakes());
  // Needs a sealed step, or `expected` to seal the open one first (kMissingField without it). The step stays sealed if the update
  // is then refused (kNonFiniteGradient). With `expected` for a sealed step the expectation must hold. Replay: the last closed step
  // with equal arguments gets the stored reply; `expected` is compared only if both calls gave it. Anything else for the last
  // closed step is kStepConflict. kOptimizerNotConfigured; kInvalidCombination for overrides that the head's optimizer does not
  // have; kInvalidField for values out of range.
  absl::StatusOr<ApplyReply> Apply(const StepKey& key, const std::optional<ExpectedMicroBatches>& expected,
                                   const ApplyArguments& arguments, const WaitLimits& limits = AsLongAsItTakes());
  // Returns {open step, replayed}.
  absl::StatusOr<std::pair<int64_t, bool>> DiscardGradient(const StepKey& key, const WaitLimits& limits = AsLongAsItTakes());
  // Takes one tensor of the weights that close a sealed step. When the head has all of its tensors they are swapped in whole, the
  // step is REPLACED and step + 1 is open. A repeat of a tensor that the last closed step was replaced with gets the same answer.
  // kStepMismatch, kStepNotSealed, kStepConflict; and the errors of SetTensor(). The epoch and the optimizer state stay.
  absl::StatusOr<ReplaceReply> Replace(const StepKey& key, const ShadowTensor& tensor,
                                       const WaitLimits& limits = AsLongAsItTakes());
  // Drops a tensor that waits for the others, if it is the one at `data`: its room is needed. The step needs all of them again
  // then. False if it does not wait here, or a call changes the weights or is to change them.
  bool DropShadow(const void* data);
  // Starts a new run: a new epoch, an empty open step. kEpochFenced if `epoch` is given and not the head's; kHeadNotTrainable;
  // kStepLost for a head that is LOST. Every call that makes an epoch returns the head as it leaves it: a former owner must not
  // learn the epoch of a later Take(). `recovered` are those of the new owner from before a restart of the server; Describe()
  // reports them as long as the new epoch lasts.
  absl::StatusOr<HeadInfo> Take(const std::optional<Epoch>& epoch, std::vector<Epoch> recovered = {},
                                const WaitLimits& limits = AsLongAsItTakes());
  // Without factor.
  absl::StatusOr<GradientStats> GradientNorm(const StepKey& key, const WaitLimits& limits = AsLongAsItTakes()) const;
  // Copies accumulator elements out as fp32; `tensor` is kGradWeight or kGradBias (kWeight and kBias mean the same). Fails with
  // kStepMismatch when the step has moved on between two calls.
  absl::Status ReadGradient(const StepKey& key, HeadTensor tensor, int64_t element_start, int64_t element_count, float* out,
                            const WaitLimits& limits = AsLongAsItTakes()) const;

  // ---- weights -------------------------------------------------------------------------------------------------------
  // Sets a whole tensor (kWeight or kBias), in the storage type or fp32 (rounded to nearest even for storage, kept whole in the
  // master weights). The head is READY when all tensors are there. A READY or LOST head gets a new epoch, version + 1 and an empty
  // step. Its uncommitted contributions are dropped; its optimizer state restarts from 0 (Restore brings weights together with
  // theirs). kEpochFenced for a stale epoch; kDataTypeMismatch, kDataLengthMismatch, kInvalidField.
  absl::StatusOr<HeadInfo> SetTensor(const Epoch& epoch, HeadTensor tensor, DataType data_type, const void* data,
                                     int64_t byte_count, const WaitLimits& limits = AsLongAsItTakes());
  // SetTensor() for one or two tensors in one change, read from sources in pieces of at most checkpoint::kPieceBytes. Sources that
  // are not in memory are first read through, without holding up other calls. An error then is returned, and leaves the head as
  // before. If a source fails after that, a LOADING head stays so without the tensors of this call, and the error is the source's.
  // Any other head is LOST (kEngineFailed).
  absl::StatusOr<HeadInfo> SetTensors(const Epoch& epoch, const std::vector<TensorUpdate>& updates,
                                      const WaitLimits& limits = AsLongAsItTakes());
  // Copies elements of kWeight or kBias (storage type), kMasterWeight or kMasterBias (fp32). `version` and `epoch`, if given, must
  // be current: kWeightVersionMismatch; kEpochFenced, or kStepLost of a RESTORED head.
  absl::Status ReadWeights(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out,
                           std::optional<int64_t> version, const std::optional<Epoch>& epoch = std::nullopt,
                           const WaitLimits& limits = AsLongAsItTakes()) const;

  // ---- checkpoints ---------------------------------------------------------------------------------------------------
  // Writes weights, optimizer state and the number of the step that is open when the save begins. Contributions of that step are
  // not part of it. `epoch` is required for a trainable head.
  absl::StatusOr<SavedCheckpoint> Save(const std::optional<Epoch>& epoch, checkpoint::CheckpointStore& store,
                                       const std::string& checkpoint_name, bool overwrite,
                                       const WaitLimits& limits = AsLongAsItTakes());
  // Save(), replacing a checkpoint of that name, for a READY head that has changed since its last save; true if it was saved.
  // kDeadlineExceeded if it has changed and cannot begin before `deadline`, or, unless it `waits`, at once.
  absl::StatusOr<bool> SaveIfChanged(checkpoint::CheckpointStore& store, const std::string& checkpoint_name, absl::Time deadline,
                                     bool waits);
  // Sets weights, optimizer state and step; a new epoch, version + 1, an empty open step. If the checkpoint is absent, damaged or
  // of another spec, the head is as before. A checkpoint saved where sums are made in another order is noted in
  // HeadInfo::restore_note; deterministic mode refuses it (kCheckpointSpecMismatch). A new head that has not been saved yet
  // continues the checkpoint's run (CheckpointStore::Continue()). With `comes_back`, for a head that was just created because the
  // server restarted, the epoch is not checked, and a trainable head is RESTORED then.
  absl::StatusOr<HeadInfo> Restore(const Epoch& epoch, checkpoint::CheckpointStore& store, const std::string& checkpoint_name,
                                   const WaitLimits& limits = AsLongAsItTakes(), bool comes_back = false);
  // One of the head's checkpoints was removed: errors do not name it any more, and SaveIfChanged() does not count on it.
  void CheckpointRemoved(const checkpoint::CheckpointStore& store);

  // ---- its end -------------------------------------------------------------------------------------------------------
  // True if there are uncommitted contributions, running calls (submissions, and HeadUse objects) or a non-empty open step.
  bool InUse() const;
  // Changes the number of its HeadUse objects, and returns it.
  int64_t CountUses(int64_t change);
  // Called when the head leaves the registry: later calls that still hold it answer kHeadNotFound. Waits for the calls that use it,
  // then drops what is staged.
  void Retire();
  // Retires unless `epoch` is given and stale (kEpochFenced) or the head is in use and `force` is not set (kHeadInUse). Decided at
  // once, without waiting for a running call; what is staged goes with the head.
  absl::Status TryRetire(const std::optional<Epoch>& epoch, bool force);

 private:
  using HeadCore::HeadCore;
  // Ends every wait for the head, now and from now on.
  void MarkRetired();

  std::string restore_note_;
  int64_t use_count_ = 0;  // HeadUse objects
  const absl::Time create_time_ = absl::Now();
  std::atomic<int64_t> last_use_nanos_{absl::ToUnixNanos(create_time_)};
};

// A call's use of a head that it has found and may still work on. The head is in use meanwhile. If it is deleted nevertheless, its
// memory still counts as its tenant's. Calls that are answered at once need none.
class HeadUse {
 public:
  HeadUse() = default;
  explicit HeadUse(std::shared_ptr<Head> head);  // not null

  const std::shared_ptr<Head>& head() const { return head_; }
  Head& operator*() const { return *head_; }
  Head* operator->() const { return head_.get(); }

 private:
  std::shared_ptr<Head> head_;        // null: of none
  std::shared_ptr<const void> ends_;  // ends the use with the last of its copies
};

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_HEAD_H_
