// Head: one LM head on the server, as this client knows it.
//
// Micro-batch calls return futures, so that several may be under way at once; all other calls block. Every call is bounded by its
// deadline. A failed micro-batch left the head's gradient bitwise as it was, except where the answer was lost on the way
// (UNAVAILABLE, CANCELLED, DEADLINE_EXCEEDED). GetStep() then shows its state, and sending the same rows under the same id again
// adds them at most once. The calls that are repeated automatically are listed in client.h.
#ifndef HEADWATER_CLIENT_HEAD_H_
#define HEADWATER_CLIENT_HEAD_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "headwater/client/future.h"
#include "headwater/client/types.h"

namespace headwater::client {
namespace internal {
class Core;
class HeadHandle;
}  // namespace internal

struct LossTerm;

// A handle: name, spec and the epoch that this client works at. Cheap to copy (copies share the epoch); thread-safe. Destroying
// it does nothing to the head on the server.
//
// The epoch is the one of the last call of this handle that returned a head (create, open, take, upload, load, restore). When
// another run takes the head over, calls fail with ABORTED / EPOCH_FENCED until Client::OpenHead() is called again. Fencing is
// deliberate: a forgotten trainer cannot continue unnoticed.
//
// A call that names the step after the open one waits for it, until its deadline. A fast data-parallel rank therefore need not know
// when another one applies.
class Head {
 public:
  // `tenants/{tenant}/heads/{head}`.
  const std::string& name() const;
  // As created, with every default filled in.
  const HeadSpec& spec() const;
  // 16 bytes.
  std::string epoch() const;
  // Whether the call that gave this handle made the head; false for one that it found. Info() reports its missing parts: the state
  // is kLoading until weights are there.
  bool created() const;

  // ---- micro-batches ----------------------------------------------------------------------------------------------------
  // `hidden` [row_count, hidden_size], after the model's final norm; it and `teacher_hidden` are read until the future is ready or
  // destroyed. `targets` [row_count], global vocabulary ids in [0, valid_vocab_size) or ignore_index, aligned with the rows;
  // copied.

  // Cross entropy of this head's prediction.
  Future<LossResult> CrossEntropy(RowsView hidden, absl::Span<const int32_t> targets, const CrossEntropyOptions& loss,
                                  const MicroBatchOptions& micro_batch, const CallOptions& options = {});
  // Divergence between `teacher`'s prediction and this head's. `teacher_hidden` [row_count, teacher's hidden_size] may be of
  // another type. `targets` may be empty if hard_loss_weight is 0; given, they mark ignored rows.
  Future<LossResult> Jsd(RowsView hidden, const Head& teacher, RowsView teacher_hidden, absl::Span<const int32_t> targets,
                         const JsdOptions& loss, const MicroBatchOptions& micro_batch, const CallOptions& options = {});
  // The same loss, with rows that the teacher's process sends (Teacher::Stream()). Waits for them, until the deadline or the
  // server's max_join_wait: FAILED_PRECONDITION / JOIN_INCOMPLETE names the first one that is missing.
  Future<LossResult> Jsd(RowsView hidden, const Head& teacher, const JoinedTeacherOptions& joined,
                         absl::Span<const int32_t> targets, const JsdOptions& loss, const MicroBatchOptions& micro_batch,
                         const CallOptions& options = {});
  // Forward KL divergence from a teacher that is known by some ids of each row; `loss.beta` must be 0. `targets` may be empty;
  // given, they mark ignored rows.
  Future<LossResult> Jsd(RowsView hidden, const TopKTeacher& teacher, absl::Span<const int32_t> targets, const JsdOptions& loss,
                         const MicroBatchOptions& micro_batch, const CallOptions& options = {});
  // Several losses over one set of rows, which is sent once: several heads (Medusa, multi-token prediction), several teachers. All
  // terms are committed together or none; `grad_hidden` is their sum, taken in fp32. This head is the one of terms that name none;
  // each trainable head has one step, that of `micro_batch` unless its terms say otherwise. All heads must come from one Client.
  Future<MultiResult> Multi(RowsView hidden, absl::Span<const LossTerm> terms, const MicroBatchOptions& micro_batch,
                            const CallOptions& options = {});
  // Adds a micro-batch of this head alone that was computed with CommitMode::kExplicit, times `factor` (finite in float32).
  // Idempotent. For one of several heads use LossResult::contribution.
  Future<CommitResult> Commit(int64_t step, int64_t micro_batch, double factor = 1.0, const CallOptions& options = {});
  Future<CommitResult> Commit(int64_t step, int64_t micro_batch, const CommitOptions& commit, const CallOptions& options = {});
  // Drops an undecided micro-batch of this head alone; a higher attempt may submit it again. Idempotent.
  Future<DiscardResult> Discard(int64_t step, int64_t micro_batch, const CallOptions& options = {});

  // ---- steps ------------------------------------------------------------------------------------------------------------
  // Refuses further micro-batches and returns the totals. Fails, changing nothing, if one is missing, undecided or unexpected;
  // `seal.wait` waits for the first two, until shortly before the deadline of the call.
  absl::StatusOr<SealResult> Seal(int64_t step, const ExpectedMicroBatches& expected, const SealOptions& seal = {},
                                  const CallOptions& options = {});
  // Adds the caller's own part of the weight's gradient (of tied embeddings, say), times `factor`. `rows` [n, hidden_size],
  // float32, in host memory, belong to the weight's rows [row_start, row_start + n), n >= 1. It is a micro-batch of the step, with
  // an id of its own, and committed when this returns. Larger gradients than max_micro_batch_bytes are sent as several.
  absl::StatusOr<AddGradientResult> AddGradient(int64_t step, int64_t micro_batch, RowsView rows, int64_t row_start = 0,
                                                double factor = 1.0, const CallOptions& options = {});
  // Updates the weights and opens step + 1. A non-finite gradient changes nothing (NON_FINITE_GRADIENT). A step without
  // micro-batches is refused unless `apply.allow_empty` (INVALID_COMBINATION).
  absl::StatusOr<ApplyResult> Apply(int64_t step, const ApplyOptions& apply, const CallOptions& options = {});
  // Closes the step without touching the weights, and opens step + 1.
  absl::StatusOr<DiscardGradientResult> DiscardGradient(int64_t step, const CallOptions& options = {});
  // The accumulated gradient, float32, in the tensor's shape, times `gradient_factor`. Seal first if others still submit.
  absl::StatusOr<TensorBuffer> Gradient(int64_t step, HeadTensor tensor = HeadTensor::kWeight, double gradient_factor = 1.0,
                                        const CallOptions& options = {});
  absl::StatusOr<GradientNormResult> GradientNorm(int64_t step, double gradient_factor = 1.0, const CallOptions& options = {});
  // The open and the last closed step: how a client that lost an answer finds out.
  absl::StatusOr<StepStates> GetStep(const CallOptions& options = {});
  // This run takes the head over: a new epoch, which this handle adopts, and an empty open step. Weights, optimizer state and the
  // step's number stay. All others are fenced. Also continues with a head that came back from a checkpoint. `only_if_current`: only
  // if the head is still of this handle's epoch (EPOCH_FENCED otherwise).
  absl::StatusOr<HeadInfo> Take(bool only_if_current = false, const CallOptions& options = {});

  // ---- weights ----------------------------------------------------------------------------------------------------------
  // Sets a whole tensor, of the storage type or float32. Resumes after a cut connection, by RetryPolicy; the bytes are verified by
  // checksum before anything changes. Setting weights of a head that has them gives it a new epoch (this handle takes it over) and
  // drops the open step's contributions. UNAVAILABLE if the connection breaks between the last byte and the answer: the weights
  // may have been taken. Open the head again and compare.
  absl::StatusOr<HeadInfo> UploadWeights(HeadTensor tensor, TensorView values, const CallOptions& options = {});
  // Closes `step`, which must be sealed (STEP_NOT_SEALED), with new weights of a trainer that owns the optimizer. The weights are
  // swapped in whole, and step + 1 opens at the same epoch. `bias` exactly if the head has one (INVALID_COMBINATION otherwise). The
  // same bytes again get the same answer, others STEP_CONFLICT. A failure leaves the sealed step as it was.
  absl::StatusOr<HeadInfo> ReplaceWeights(int64_t step, TensorView weight, std::optional<TensorView> bias = std::nullopt,
                                          const CallOptions& options = {});
  // Lets the server read a safetensors file or a model folder at `path`, relative to its load root. Empty tensor names: the head's
  // tensors by name and shape, and an embedding only where the model's config says tied (LoadWeightsRequest has the rules).
  // WEIGHTS_NOT_FOUND if none can be chosen; CHECKPOINT_SPEC_MISMATCH for another shape, or a bias that the head has no place for.
  absl::StatusOr<HeadInfo> LoadWeights(const std::string& path, const std::string& weight_tensor = "",
                                       const std::string& bias_tensor = "", const CallOptions& options = {});
  // A whole tensor in the storage type, or float32 (with an optimizer: the master weight). A trainable head must be at this
  // handle's epoch. EPOCH_FENCED: another run has taken it over; STEP_LOST: the server has restored an older checkpoint.
  absl::StatusOr<TensorBuffer> DownloadWeights(HeadTensor tensor = HeadTensor::kWeight, CallOptions options = {});
  absl::StatusOr<TensorBuffer> DownloadWeights(HeadTensor tensor, DataType data_type, CallOptions options = {});

  // ---- checkpoints and life ---------------------------------------------------------------------------------------------
  // Saves weights, optimizer state and step as they were when the open step began. ALREADY_EXISTS unless `overwrite`.
  absl::StatusOr<SaveResult> Save(const std::string& checkpoint, bool overwrite = false, const CallOptions& options = {});
  // Sets the head to a checkpoint: a new epoch, which this handle takes over, and an empty open step.
  absl::StatusOr<HeadInfo> Restore(const std::string& checkpoint, const CallOptions& options = {});
  // The head as it is now. Does not take over its epoch.
  absl::StatusOr<HeadInfo> Info(const CallOptions& options = {}) const;
  // Frees the head if it is still of this handle's epoch. `force`: even with undecided contributions or a non-empty open step.
  absl::Status Delete(bool force = false, const CallOptions& options = {});

 private:
  friend class Client;
  friend class internal::HeadHandle;
  explicit Head(std::shared_ptr<internal::HeadHandle> handle);

  std::shared_ptr<internal::HeadHandle> handle_;
};

// One loss over some of a micro-batch's rows, against one head.
struct LossTerm {
  std::variant<CrossEntropyOptions, JsdOptions> loss{};
  std::optional<Head> head{};          // absent: the one that Multi() is called on
  std::optional<int64_t> step{};       // absent: MicroBatchOptions::step if the head is trainable; never for a frozen one
  int64_t row_start = 0;               // the term covers rows [row_start, row_start + row_count)
  std::optional<int64_t> row_count{};  // >= 1; absent: all rows from row_start on
  // The rest is as in Head::CrossEntropy(), Head::Jsd() and MicroBatchOptions, over the term's rows.
  absl::Span<const int32_t> targets{};
  absl::Span<const float> token_weights{};
  absl::Span<const float> entropy_factors{};
  absl::Span<const float> lse_factors{};
  double gradient_resolution = 0.0;
  double loss_scale = 1.0;
  int32_t ignore_index = -100;
  std::optional<Head> teacher{};  // JsdOptions only
  RowsView teacher_hidden{};
  std::optional<JoinedTeacherOptions> joined_teacher{};  // instead of `teacher_hidden`: another process sends the teacher's rows
  std::optional<TopKTeacher> top_k_teacher{};            // instead of `teacher`
  std::optional<int64_t> expected_weight_version{};
};

}  // namespace headwater::client

#endif  // HEADWATER_CLIENT_HEAD_H_
