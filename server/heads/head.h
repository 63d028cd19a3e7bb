// Head: one LM head's transactions. Ties the ledger (what is in the step) to the engine (the numbers), under one lock.
//
// Thread-safe. Methods block while another call works on the same head. Nothing here knows gRPC; errors carry reasons (error.h).
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
  std::string weight_checksum;  // 16 bytes, or empty
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
  std::optional<Epoch> head_epoch;               // required for a trainable head in a backward call
  std::optional<int64_t> step;                   // likewise
  std::optional<int64_t> expected_weight_version;
  std::shared_ptr<Head> teacher_head;            // JSD
  std::optional<Epoch> teacher_head_epoch;
  std::optional<int64_t> expected_teacher_weight_version;
  LossTerm term;                                 // spans and pointers into memory that the caller keeps until Submit() returns;
                                                 // `head`, `teacher_head` and their pointers are filled in by Submit()
};

// A micro-batch, complete: header decoded and all rows there.
struct Submission {
  std::vector<SubmittedTerm> terms;
  std::optional<int64_t> micro_batch;  // absent: nothing is added (forward only, frozen head)
  int64_t attempt = 0;
  bool backward = false;
  bool explicit_commit = false;
  bool first_wins = false;             // on_mismatch
  bool refuse_non_finite = false;
  RowsView hidden;
  MutableRowsView grad_hidden;         // data null: not wanted
  double grad_hidden_scale = 1;
  Digest digest{};                     // of canonical header and rows
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
  double learning_rate = 0;
  double gradient_factor = 1;
  std::optional<double> max_grad_norm;
  double other_grad_norm_squared = 0;
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
  int64_t max_step_micro_batches = 1 << 20;
};

class Head {
 public:
  // Plans, admits and allocates. Engine errors pass through.
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
  absl::StatusOr<ApplyReply> Apply(const StepKey& key, const std::optional<ExpectedMicroBatches>& expected,
                                   const ApplyArguments& arguments);
  // Returns {open step, replayed}.
  absl::StatusOr<std::pair<int64_t, bool>> DiscardGradient(const StepKey& key);
  absl::StatusOr<GradientStats> GradientNorm(const StepKey& key) const;  // without factor
  // Copies accumulator elements out as fp32. Fails with kStepMismatch when the step has moved on between two calls.
  absl::Status ReadGradient(const StepKey& key, HeadTensor tensor, int64_t element_start, int64_t element_count, float* out) const;

  // ---- weights -------------------------------------------------------------------------------------------------------
  // Sets a whole tensor (kWeight or kBias), in the storage type or fp32. Becomes READY when all tensors are there; a READY head
  // gets a new epoch, version + 1 and an empty step, and uncommitted contributions are dropped. kEpochFenced for a stale epoch.
  absl::Status SetTensor(const Epoch& epoch, HeadTensor tensor, DataType data_type, const void* data, int64_t byte_count);
  // kWeightVersionMismatch if `version` is given and not the current one.
  absl::Status ReadWeights(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out,
                           std::optional<int64_t> version) const;

  // ---- checkpoints ---------------------------------------------------------------------------------------------------
  struct SavedCheckpoint {
    int64_t step = 0;
    int64_t total_bytes = 0;
  };
  absl::StatusOr<SavedCheckpoint> Save(const std::optional<Epoch>& epoch, checkpoint::CheckpointStore& store,
                                       const std::string& checkpoint_name, bool overwrite);
  absl::Status Restore(const Epoch& epoch, checkpoint::CheckpointStore& store, const std::string& checkpoint_name);

  // True if there are uncommitted contributions, running calls or a non-empty open step.
  bool InUse() const;
  // Called when the head leaves the registry: later calls that still hold it answer kHeadNotFound.
  void Retire();

 private:
  Head(const HeadName& name, const HeadSpec& spec, const HeadLimits& limits, std::unique_ptr<EngineHead> engine_head);

  const HeadName name_;
  const HeadSpec spec_;
  // The implementation's state follows: mutex, engine head, ledger, staged contributions, epoch, versions, last apply.
};

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_HEAD_H_
