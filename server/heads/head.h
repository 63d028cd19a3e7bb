// Head: one LM head's transactions. Ties the ledger (what is in the step) to the engine (the numbers).
//
// Thread-safe. Two locks: `compute_mutex_` serializes engine work and everything that changes the head, `state_mutex_` is held for
// moments only. So Describe(), GetSteps(), CheckSubmission() and a duplicate's kMicroBatchInProgress are answered at once while
// another call computes; all other methods wait for it. Nothing here knows gRPC; errors carry reasons (error.h).
//
// Every call answers, in this order: kHeadNotFound after Retire(); kHeadNotTrainable where a step is named and the head is frozen;
// kEpochFenced; kStepLost while the head is LOST; kWeightsNotLoaded while it is LOADING. A head is LOST when the engine failed
// (kEngineFailed, kInternal) while its accumulator, weights or optimizer state were being changed: what they hold is unknown.
// Everything staged is dropped then, and every call but SetTensor(s) and Restore is refused until one of those gives the head a new
// epoch. An engine that fails before it changes anything (a staged or forward-only computation, a read) leaves the head as it was.
#ifndef HEADWATER_SERVER_HEADS_HEAD_H_
#define HEADWATER_SERVER_HEADS_HEAD_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
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
#include "server/heads/head_name.h"
#include "server/heads/step_ledger.h"

namespace headwater::checkpoint {
class CheckpointStore;
}

namespace headwater::heads {

// The values are those of headwater.v1.HeadState.
enum class HeadState : int32_t { kLoading = 1, kReady = 2, kLost = 3 };

// A snapshot for GetHead.
struct HeadInfo {
  HeadName name;
  HeadSpec spec;
  Epoch epoch;
  HeadState state;
  int64_t weight_version;
  std::optional<int64_t> open_step;  // trainable heads
  std::vector<VocabShard> shards;
  MemoryPlan plan;
  absl::Time create_time;
  std::string weight_checksum;  // XXH3-128 (canonical) of the stored weight when it was set from outside: 16 bytes, or empty
};

// The step that a call is about.
struct StepKey {
  Epoch epoch;
  int64_t step = 0;
};

class Head;

// One loss term of a submission, with owned data; the head pointers are resolved names.
struct SubmittedTerm {
  std::shared_ptr<Head> head;
  std::optional<Epoch> head_epoch;  // required for a trainable head in a backward call
  std::optional<int64_t> step;      // likewise
  std::optional<int64_t> expected_weight_version;
  std::shared_ptr<Head> teacher_head;  // JSD
  std::optional<Epoch> teacher_head_epoch;
  std::optional<int64_t> expected_teacher_weight_version;
  LossTerm term;  // spans and pointers into memory that the caller keeps until Submit() returns;
                  // `head`, `teacher_head` and their pointers are filled in by Submit()
};

// A micro-batch, complete: header decoded and all rows there.
struct Submission {
  std::vector<SubmittedTerm> terms;
  std::optional<int64_t> micro_batch;  // absent: nothing is added (forward only, frozen head)
  int64_t attempt = 0;
  bool backward = false;
  bool explicit_commit = false;
  bool first_wins = false;  // on_mismatch
  bool refuse_non_finite = false;
  RowsView hidden;
  MutableRowsView grad_hidden;  // data null: not wanted
  double grad_hidden_scale = 1;
  Digest digest{};  // of canonical header and rows
};

// What became of it.
struct SubmissionOutcome {
  std::vector<LossSums> terms;
  std::vector<int64_t> weight_versions;          // one for each term
  std::vector<int64_t> teacher_weight_versions;  // 0 without teacher
  ContributionState state = ContributionState::kNone;
  ContributionForm form = ContributionForm::kNone;
  bool replayed = false;
  bool payload_differs = false;
  std::optional<int64_t> step;
};

// Arguments of ApplyOptimizerStep; compared member by member to tell a replay from a conflict.
struct ApplyArguments {
  double learning_rate = 0;                                             // finite, >= 0
  double gradient_factor = 1;                                           // finite
  std::optional<double> max_grad_norm;                                  // > 0
  double other_grad_norm_squared = 0;                                   // finite, >= 0
  std::optional<double> weight_decay, beta1, beta2, epsilon, momentum;  // overrides
  bool operator==(const ApplyArguments&) const = default;
};

struct ApplyReply {
  int64_t open_step = 0;
  int64_t weight_version = 0;
  double global_grad_norm = 0;
  double gradient_norm_squared = 0;
  double clip_factor = 1;
  StepTotals totals;
  bool replayed = false;
};

struct SealReply {
  StepTotals totals;
  GradientStats stats;
  bool replayed = false;
};

struct HeadLimits {
  int64_t max_step_micro_batches = 1 << 20;  // records of one step, tombstones included
};

// Brings elements [element_start, element_start + element_count) of a tensor; called in ascending order, without gaps.
using TensorSource = std::function<absl::Status(int64_t element_start, int64_t element_count, void* out)>;

// One tensor that SetTensors() sets.
struct TensorUpdate {
  HeadTensor tensor = HeadTensor::kWeight;  // kWeight or kBias
  DataType data_type = DataType::kFloat32;  // of what `source` brings: the storage type or fp32
  TensorSource source;
};

class Head {
 public:
  // Plans, admits and allocates. Engine errors pass through. `engine` must outlive the head.
  static absl::StatusOr<std::shared_ptr<Head>> Create(const HeadName& name, const HeadSpec& spec, LossEngine& engine,
                                                      const HeadLimits& limits);

  const HeadName& name() const { return name_; }
  const HeadSpec& spec() const { return spec_; }
  HeadInfo Describe() const;
  // kEpochFenced (with both epochs in hex, and openStep) unless `epoch` is the head's.
  absl::Status CheckEpoch(const Epoch& epoch) const;

  // ---- micro-batches -------------------------------------------------------------------------------------------------
  // Everything that can be refused before the rows have arrived; changes nothing. Static: a submission may name several heads.
  static absl::Status CheckSubmission(const Submission& submission);
  // Computes and, where it adds something, commits or stages. Locks all heads of the submission (ordered by address).
  // `cancelled` is asked once more just before the point from which the submission can no longer be aborted; true ends it with
  // kCancelled and nothing changed.
  static absl::StatusOr<SubmissionOutcome> Submit(const Submission& submission, LossEngine& engine,
                                                  const std::function<bool()>& cancelled);
  // True if this call committed it, false if an equal call had.
  absl::StatusOr<bool> Commit(const StepKey& key, int64_t micro_batch, int64_t attempt, double factor);
  // True if something was dropped.
  absl::StatusOr<bool> Discard(const StepKey& key, int64_t micro_batch, int64_t attempt);

  // ---- steps ---------------------------------------------------------------------------------------------------------
  absl::StatusOr<std::pair<StepRecord, std::optional<StepRecord>>> GetSteps(const Epoch& epoch) const;
  absl::StatusOr<SealReply> Seal(const StepKey& key, const ExpectedMicroBatches& expected);
  // Needs a sealed step, or `expected` to seal the open one first (kMissingField without it); the step stays sealed if the update
  // is then refused (kNonFiniteGradient). With `expected` for a sealed step the expectation must hold. Replay: the last closed step
  // with equal arguments gets the stored reply; `expected` is compared only if both calls gave it. Anything else for the last
  // closed step is kStepConflict. kOptimizerNotConfigured; kInvalidCombination for overrides that the head's optimizer does not
  // have; kInvalidField for values out of range.
  absl::StatusOr<ApplyReply> Apply(const StepKey& key, const std::optional<ExpectedMicroBatches>& expected,
                                   const ApplyArguments& arguments);
  // Returns {open step, replayed}.
  absl::StatusOr<std::pair<int64_t, bool>> DiscardGradient(const StepKey& key);
  absl::StatusOr<GradientStats> GradientNorm(const StepKey& key) const;  // without factor
  // Copies accumulator elements out as fp32; `tensor` is kGradWeight or kGradBias (kWeight and kBias mean the same). Fails with
  // kStepMismatch when the step has moved on between two calls.
  absl::Status ReadGradient(const StepKey& key, HeadTensor tensor, int64_t element_start, int64_t element_count, float* out) const;

  // ---- weights -------------------------------------------------------------------------------------------------------
  // Sets a whole tensor (kWeight or kBias), in the storage type or fp32 (rounded to nearest even for storage, kept whole in the
  // master weights). Becomes READY when all tensors are there; a READY or LOST head gets a new epoch, version + 1 and an empty
  // step, uncommitted contributions are dropped, and optimizer state starts again from 0 (Restore brings weights together with
  // theirs). kEpochFenced for a stale epoch; kDataTypeMismatch, kDataLengthMismatch, kInvalidField.
  absl::Status SetTensor(const Epoch& epoch, HeadTensor tensor, DataType data_type, const void* data, int64_t byte_count);
  // The same for one or two tensors in one change, read from sources in pieces of at most kTensorPieceBytes. If a source fails, its
  // error comes back; the head is as before if that was the first piece, else LOADING if it was, else LOST.
  absl::Status SetTensors(const Epoch& epoch, const std::vector<TensorUpdate>& updates);
  // Copies elements of kWeight or kBias (storage type), kMasterWeight or kMasterBias (fp32). kWeightVersionMismatch if `version` is
  // given and not the current one.
  absl::Status ReadWeights(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out,
                           std::optional<int64_t> version) const;

  // ---- checkpoints ---------------------------------------------------------------------------------------------------
  struct SavedCheckpoint {
    int64_t step = 0;
    int64_t total_bytes = 0;
  };
  // Writes weights, optimizer state and the open step's number; contributions of the open step are not part of it. `epoch` is
  // required for a trainable head.
  absl::StatusOr<SavedCheckpoint> Save(const std::optional<Epoch>& epoch, checkpoint::CheckpointStore& store,
                                       const std::string& checkpoint_name, bool overwrite);
  // Sets weights, optimizer state and step; a new epoch, version + 1, an empty open step. If the checkpoint is not there, damaged
  // or of another spec, the head is as before.
  absl::Status Restore(const Epoch& epoch, checkpoint::CheckpointStore& store, const std::string& checkpoint_name);

  // True if there are uncommitted contributions, running calls or a non-empty open step.
  bool InUse() const;
  // Called when the head leaves the registry: later calls that still hold it answer kHeadNotFound. Waits for a running call, then
  // drops what is staged.
  void Retire();
  // Retires unless `epoch` is given and stale (kEpochFenced) or the head is in use and `force` is not set (kHeadInUse). Decided at
  // once, without waiting for a running call; what is staged goes with the head.
  absl::Status TryRetire(const std::optional<Epoch>& epoch, bool force);

 private:
  // What a finished Apply() was asked and answered.
  struct AppliedStep {
    ApplyArguments arguments;
    std::optional<ExpectedMicroBatches> expected;
    ApplyReply reply;
  };
  // What a call needs the head to be.
  enum class Need { kAnyState, kNotLost, kReady };

  Head(const HeadName& name, const HeadSpec& spec, const HeadLimits& limits, std::unique_ptr<EngineHead> engine_head);

  // The checks that every call begins with. `epoch` null: not checked.
  absl::Status Check(const Epoch* epoch, Need need, bool for_step) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex_);
  // The same with the lock taken for a moment.
  absl::Status LockAndCheck(const Epoch* epoch, Need need, bool for_step) const ABSL_LOCKS_EXCLUDED(state_mutex_);
  // The same for a call on the open or sealed step.
  absl::Status CheckOpenStep(const StepKey& key) const ABSL_LOCKS_EXCLUDED(state_mutex_);
  // kChunkOutOfRange; kInvalidField if the head does not have the tensor.
  absl::Status CheckElements(HeadTensor tensor, int64_t element_start, int64_t element_count) const;
  absl::Status EpochError(const Epoch& epoch) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex_);
  bool InUseLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex_);

  // The head whose accumulator a submission adds to; null if there is none.
  static Head* TargetOf(const Submission& submission);
  static absl::Status CheckTerm(const Submission& submission, size_t index, const Head* target);
  absl::Status CheckAsStudent(const SubmittedTerm& term, bool is_target, const Submission& submission) const;
  absl::Status CheckAsTeacher(const SubmittedTerm& term) const;
  // Computes under the compute locks of all heads that `submission` names; `target` may be null.
  static absl::StatusOr<SubmissionOutcome> SubmitLocked(const Submission& submission, Head* target, LossEngine& engine,
                                                        const std::function<bool()>& cancelled);
  // Settles what a computation that adds to this head has yielded: commits, stages or aborts.
  absl::Status Settle(const Submission& submission, MicroBatchResult& result, const std::function<bool()>& cancelled)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(compute_mutex_);
  void AbortMicroBatch(int64_t micro_batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(compute_mutex_);

  // After an engine call that changes the head: an engine failure makes the head LOST. Returns `status`.
  absl::Status AfterChange(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(compute_mutex_);
  void MarkLost(const absl::Status& cause) ABSL_EXCLUSIVE_LOCKS_REQUIRED(compute_mutex_);
  absl::Status CheckApply(const ApplyArguments& arguments) const;
  absl::Status CheckUpdates(const std::vector<TensorUpdate>& updates) const;
  // `changed` becomes true just before the first change.
  absl::Status WriteTensors(const std::vector<TensorUpdate>& updates, bool& changed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(compute_mutex_);
  absl::StatusOr<std::string> ChecksumWeight() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(compute_mutex_);
  bool HasAllTensors() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex_) { return has_weight_ && (has_bias_ || !spec_.has_bias); }

  const HeadName name_;
  const HeadSpec spec_;
  const HeadLimits limits_;
  const absl::Time create_time_;

  // Engine work and everything that changes the head. Taken before state_mutex_; of several heads in ascending address. State is
  // written only with both held, so a holder of this one alone may rely on what it has read (but for `retired_`).
  mutable absl::Mutex compute_mutex_ ABSL_ACQUIRED_BEFORE(state_mutex_);
  mutable absl::Mutex state_mutex_;

  // The pointer is fixed; calls other than spec(), plan(), shards() and the sizes need compute_mutex_.
  const std::unique_ptr<EngineHead> engine_head_;
  // By micro-batch. Destroyed before the engine's head, as it must be.
  std::map<int64_t, std::unique_ptr<StagedContribution>> staged_ ABSL_GUARDED_BY(compute_mutex_);

  StepLedger ledger_ ABSL_GUARDED_BY(state_mutex_);
  Epoch epoch_ ABSL_GUARDED_BY(state_mutex_);
  HeadState state_ ABSL_GUARDED_BY(state_mutex_) = HeadState::kLoading;
  std::string lost_cause_ ABSL_GUARDED_BY(state_mutex_);
  bool has_weight_ ABSL_GUARDED_BY(state_mutex_) = false;
  bool has_bias_ ABSL_GUARDED_BY(state_mutex_) = false;
  bool retired_ ABSL_GUARDED_BY(state_mutex_) = false;
  int64_t weight_version_ ABSL_GUARDED_BY(state_mutex_) = 0;
  int64_t update_count_ ABSL_GUARDED_BY(state_mutex_) = 0;
  std::string weight_checksum_ ABSL_GUARDED_BY(state_mutex_);
  std::optional<AppliedStep> last_apply_ ABSL_GUARDED_BY(state_mutex_);
  int64_t running_calls_ ABSL_GUARDED_BY(state_mutex_) = 0;  // submissions that wait or compute
};

// The largest piece in which tensors are read from a source or a checkpoint.
inline constexpr int64_t kTensorPieceBytes = int64_t{8} << 20;

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_HEAD_H_
