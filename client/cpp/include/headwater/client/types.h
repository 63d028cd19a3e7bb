// The arguments and results of Client's and Head's calls. Plain values; ranges are checked by the server, whose answer names the
// field.
#ifndef HEADWATER_CLIENT_TYPES_H_
#define HEADWATER_CLIENT_TYPES_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/types/span.h"
#include "headwater/client/options.h"
#include "headwater/client/tensor.h"

namespace headwater::client {

template <typename T>
class Future;  // future.h

namespace internal {
struct ContributionKey;
}  // namespace internal

// ---- heads ---------------------------------------------------------------------------------------------------------------

// AdamW in PyTorch's order of operations. "Decoupled Weight Decay Regularization", arXiv:1711.05101.
struct AdamW {
  double beta1 = 0.9;          // [0, 1)
  double beta2 = 0.999;        // [0, 1)
  double epsilon = 1e-8;       // >= 0
  double weight_decay = 0.01;  // >= 0
};

// Stochastic gradient descent as torch.optim.SGD defines it.
struct Sgd {
  double momentum = 0.0;      // [0, 1); 0 plans no momentum buffer
  double dampening = 0.0;     // [0, 1]
  bool nesterov = false;      // needs momentum > 0 and dampening == 0
  double weight_decay = 0.0;  // >= 0
};

// std::monostate: no optimizer on the server.
using Optimizer = std::variant<std::monostate, AdamW, Sgd>;

// How a group of ranks shares a head's work; to a server that is alone both are the same. Values may be added; those of the wire
// API.
enum class Parallelism : int32_t {
  kVocabulary = 1,  // each rank holds a shard of the vocabulary, and all of them compute each micro-batch
  kRows = 2,        // each rank holds all weights; a micro-batch is computed by one rank, several at once by several
};

// `vocabulary`, `rows`, or `unknown`.
const char* ParallelismName(Parallelism parallelism);

// The specification of a head, fixed for its life. Its logits are softcap * tanh(logit_scale * (x . weight^T + bias) / softcap).
struct HeadSpec {
  int64_t vocab_size = 0;                     // >= 1; rows of `weight`
  int64_t hidden_size = 0;                    // >= 1; columns of `weight`
  DataType data_type = DataType::kFloat32;    // storage of weight and bias
  bool has_bias = false;                      // whether there is a bias [vocab_size]
  double logit_scale = 1.0;                   // finite, not 0
  std::optional<double> softcap{};            // > 0; absent: no softcap
  std::optional<int64_t> valid_vocab_size{};  // [1, vocab_size]; columns from here on get probability 0. Absent: vocab_size
  bool trainable = false;                     // whether gradients are accumulated
  Optimizer optimizer{};                      // only with `trainable`
  std::optional<int32_t> staging_slots{};     // EXPLICIT micro-batches that may wait at once. Absent: 1 if trainable, else 0
  int64_t initial_step = 0;                   // >= 0; number of the first open step
  Parallelism parallelism = Parallelism::kVocabulary;
  // For a frozen head of 16 bits: its logits as a teacher come from int8 products, which are faster (docs/math.md, "int8
  // teachers"). TermResult::teacher_mean_square_error has their expected error. FEATURE_NOT_BUILT but on Hopper GPUs.
  bool int8_teacher = false;
};

// A tensor of a head. The values are those of the wire API.
enum class HeadTensor : int32_t {
  kWeight = 1,  // [vocab_size, hidden_size]
  kBias = 2,    // [vocab_size]
};

// Whether a head can be used. Values may be added.
enum class HeadState : int32_t {
  kUnknown = 0,
  kLoading = 1,  // weights (or the bias) are missing
  kReady = 2,
  kLost = 3,      // the engine failed; restore it or set its weights again
  kRestored = 4,  // the server was started again and brought it back from a checkpoint; its steps wait for Head::Take()
};

// `loading`, `ready`, `lost`, `restored`, `unknown`.
const char* HeadStateName(HeadState state);

// Rows [vocab_start, vocab_end) of a head on one device.
struct VocabShard {
  int64_t vocab_start = 0;
  int64_t vocab_end = 0;
  std::string device;
};

// The memory of a head, by purpose.
struct MemoryPlan {
  struct Item {
    std::string purpose;  // "weight", "grad_weight", "optimizer_state", "staging", "workspace", ...
    int64_t bytes = 0;    // over all shards
  };
  std::vector<Item> items;
  int64_t total_bytes = 0;
  int64_t available_bytes = 0;   // free memory of the server's budget, without this head
  int64_t token_chunk_rows = 0;  // rows computed at once
};

// A head as the server describes it.
struct HeadInfo {
  std::string name;   // tenants/{tenant}/heads/{head}
  HeadSpec spec;      // with every default filled in
  std::string epoch;  // 16 bytes; empty for a plan
  HeadState state = HeadState::kUnknown;
  int64_t weight_version = 0;        // rises with every change of weights; 0 before the first
  std::optional<int64_t> open_step;  // absent for a frozen head
  std::vector<VocabShard> shards;
  MemoryPlan memory_plan;
  std::chrono::system_clock::time_point create_time;
  std::string weight_checksum;      // XXH3-128 of the weight's stored bytes when they were last set from outside; may be empty
  std::string restored_checkpoint;  // where a restored head came back from; empty otherwise
};

// ---- loss ----------------------------------------------------------------------------------------------------------------

// Options of one call.
struct CallOptions {
  std::chrono::milliseconds timeout{0};  // for the call with all its repetitions. 0: ClientOptions::timeout; < 0: it is over
  // Calls with tensors in device memory: a CUstream (cudaStream_t) of their device's primary context. The rows are ready, and the
  // memory for gradients is free, when the work that was put into it before the call is done. Null: the default stream.
  void* cuda_stream = nullptr;
};

// When a micro-batch is added to its step.
enum class CommitMode : int32_t {
  kEager = 1,     // by the call itself
  kExplicit = 2,  // by Head::Commit(), with a factor
};

// The answer to a repeat of a micro-batch with other bytes.
enum class OnMismatch : int32_t {
  kConflict = 1,   // ABORTED / MICRO_BATCH_CONFLICT
  kFirstWins = 2,  // computed and answered, nothing added: for a recomputed forward whose last bits differ
};

// The treatment of NaN and infinities in losses and gradients.
enum class NonFinitePolicy : int32_t {
  kReport = 1,  // counted in the result and passed through
  kRefuse = 2,  // FAILED_PRECONDITION / NON_FINITE_VALUES; nothing is added
};

// Cross entropy with PyTorch's joint definition of label smoothing and class weights, plus z_loss * lse^2.
struct CrossEntropyOptions {
  double label_smoothing = 0.0;             // [0, 1]
  double z_loss = 0.0;                      // >= 0
  absl::Span<const float> class_weights{};  // [valid_vocab_size] or [vocab_size], finite; empty: all 1. Copied by the call
  // These two must be left as they are in JsdOptions::hard_loss. A server whose ServerInfo::features lack `temperature`,
  // `token_scaling` or `entropy_factors` is older than this client, and ignores what it does not know.
  double temperature = 1.0;    // > 0; divides the logits in the loss and in all per-token outputs
  bool token_scaling = false;  // multiplies each row's loss and its gradient by the target's probability, as a constant
};

// beta * KL(P||M) + (1 - beta) * KL(Q||M), M = beta P + (1 - beta) Q, P teacher, Q student; beta 0 is KL(P||Q), 1 is KL(Q||P).
struct JsdOptions {
  double beta = 0.5;                 // [0, 1]
  double student_temperature = 1.0;  // > 0
  double teacher_temperature = 1.0;  // > 0
  double hard_loss_weight = 0.0;     // a in [0, 1]: a row's loss is (1 - a) * JSD + a * cross entropy
  CrossEntropyOptions hard_loss{};   // the cross entropy's options; only with hard_loss_weight > 0
  bool truncate_to_common = false;   // renormalize over the columns that both heads have; without it unequal sizes are refused
  std::optional<int64_t> expected_teacher_weight_version{};
};

// Teacher rows that another process sends (Teacher::Stream()): they meet by tenant and key, in either order of arrival.
struct JoinedTeacherOptions {
  std::string join_key;    // 1 to 256 bytes; the teacher's process names the same
  int64_t total_rows = 0;  // >= 1; rows of the joined set
  // [rows of the term]: the index of each row in [0, total_rows). Empty: row i of the term is row i of the set. Copied by the call.
  absl::Span<const int32_t> row_indices{};
  std::optional<DataType> data_type{};  // of the teacher's rows. Absent: the type of the micro-batch's rows
};

// A teacher that is known by k vocabulary ids of each row with their log-probabilities, and by the mass that all other ids have
// together. With JsdOptions::beta 0, and no other option of it but student_temperature; of the per-token outputs, `loss` alone. On
// GPUs: for heads without a softcap on one GPU (FEATURE_NOT_BUILT otherwise). A server whose ServerInfo::features lack
// `top_k_teacher` refuses it.
struct TopKTeacher {
  int32_t k = 0;                        // [1, 1024]
  absl::Span<const int32_t> ids{};      // [rows of the term, k], each at most once in a row; -1: not used. Copied by the call
  absl::Span<const float> log_probs{};  // [rows of the term, k], natural logarithms <= 0. Copied by the call
};

// Per-token outputs, each [row_count].
struct TokenOutputs {
  bool loss = false;                    // nats, before token weight and loss scale
  bool lse = false;                     // log-sum-exp of the student's logits
  bool target_log_probability = false;  // natural log
  bool entropy = false;                 // nats
  bool argmax = false;                  // vocabulary id; -1 for ignored rows
  bool mean_logits = false;             // mean of the logits over the valid vocabulary
  bool log_sum_sq_probs = false;        // natural log of the sum of squared probabilities
};

// Everything about a micro-batch but its loss and its rows.
struct MicroBatchOptions {
  // The open step and the id in it, unique among all trainers (k * world_size + rank). Both are required with a trainable head
  // unless `forward_only`, and must be absent otherwise.
  std::optional<int64_t> step{};
  std::optional<int64_t> micro_batch{};
  bool forward_only = false;  // loss and per-token outputs; no gradients, nothing is added
  // The first attempt's number, >= 0; each repetition takes the next one. Only with `micro_batch`. 0, or a number that repetitions
  // of this client have gone beyond, stands for the one that they have come to. Any other lower number is the server's to refuse.
  int64_t attempt = 0;
  CommitMode commit = CommitMode::kEager;
  // Whether the rows may be kept, to be computed again at commit (HELD), where no staging slot is free. Without it, such a
  // micro-batch is STAGING_FULL, at once where the slots are this client's own. HELD takes a third more work: a head with more
  // HeadSpec::staging_slots is faster.
  bool allow_held = false;
  // CommitOptions::token_factors will come at commit: the rows are kept whatever slots are free. Only with kExplicit.
  bool late_token_factors = false;
  OnMismatch on_mismatch = OnMismatch::kConflict;
  NonFinitePolicy non_finite_policy = NonFinitePolicy::kReport;
  // These six and `expected_weight_version` are the single term's; Head::Multi() takes them from each LossTerm instead.
  int32_t ignore_index = -100;              // target of rows that take no part
  absl::Span<const float> token_weights{};  // [row_count], finite; empty: all 1. Copied by the call
  // The upstream gradients of each row's entropy and lse. The objective is loss_scale * sum of (token_weight * loss +
  // entropy_factor * entropy + lse_factor * lse). [row_count], finite; empty: all 0. Cross
  // entropy with gradients only. The reported sums are of the loss alone. Copied by the call.
  absl::Span<const float> entropy_factors{};
  absl::Span<const float> lse_factors{};
  // A share in [2^-24, 1], or 0 for exact gradients. Entries of a row's gradient of the logits below this share of its missing
  // probability become 0 or that size, at random and without bias. TermResult::dither has the expected error. For trainable heads,
  // with gradients; without factors of entropy and lse, a hard loss, a top-k teacher, and smoothing behind a softcap. On GPUs
  // without label_smoothing, for heads on one GPU. A server whose ServerInfo::features lack `gradient_resolution` ignores it.
  double gradient_resolution = 0.0;
  double loss_scale = 1.0;         // multiplies both gradients, not the reported sums. For a mean: 1 / number of tokens
  double grad_hidden_scale = 1.0;  // multiplies grad_hidden alone
  // Whether the gradient of the rows comes back. Absent: yes, unless `forward_only`, which has none.
  std::optional<bool> return_grad_hidden{};
  std::optional<DataType> grad_hidden_data_type{};  // absent: the type of the rows
  // Where grad_hidden is written, [row_count, hidden_size] of its type; must hold exactly that many bytes and stay valid as the
  // rows do. Empty: the result owns it.
  absl::Span<unsigned char> grad_hidden{};
  Memory grad_hidden_memory = Memory::kHost;  // where `grad_hidden` lies
  TokenOutputs outputs{};
  std::optional<int64_t> expected_weight_version{};  // anything else is FAILED_PRECONDITION / WEIGHT_VERSION_MISMATCH
};

// The state of a contribution. Values may be added.
enum class ContributionState : int32_t {
  kNone = 0,  // nothing to decide
  kInProgress = 1,
  kStaged = 2,     // computed, waits for Commit() or Discard()
  kCommitted = 3,  // in the step's gradient, for good
  kDiscarded = 4,
};

// How a contribution was held until it was decided. Values may be added.
enum class ContributionForm : int32_t { kNone = 0, kDirect = 1, kStaged = 2, kHeld = 3 };

// Where a micro-batch's time went, on the server's clock. The parts may overlap.
struct Timing {
  std::chrono::nanoseconds queue{0};     // from the last row's arrival to the engine's start
  std::chrono::nanoseconds upload{0};    // from the header's arrival to the last row's
  std::chrono::nanoseconds engine{0};    // in the engine
  std::chrono::nanoseconds download{0};  // from the engine's end to the last chunk handed to the transport
};

// How an undecided micro-batch is committed.
struct CommitOptions {
  double factor = 1.0;  // finite in float32; multiplies the contribution: the upstream gradient of the loss
  // [row_count], finite: a factor for each row, beside `factor`. Only for a micro-batch that was computed with
  // late_token_factors, or is held. Copied by the call.
  absl::Span<const float> token_factors{};
};

struct CommitResult {
  bool replayed = false;  // an equal call had committed it before
};

struct DiscardResult {
  bool dropped = false;  // false: there was none, or it had been dropped before
};

// A micro-batch that was computed with CommitMode::kExplicit and waits for its decision: all its heads, the step, the id and the
// attempt. Cheap to copy; thread-safe. Destroying it decides nothing.
class Contribution {
 public:
  // Used by the library.
  explicit Contribution(std::shared_ptr<const internal::ContributionKey> key) : key_(std::move(key)) {}

  // Adds it to the step of each of its heads. Idempotent. MICRO_BATCH_DISCARDED if it was dropped meanwhile (discardedBy).
  Future<CommitResult> Commit(const CommitOptions& commit = {}, const CallOptions& options = {}) const;
  // Drops it in all its heads; a higher attempt may submit it again. Idempotent.
  Future<DiscardResult> Discard(const CallOptions& options = {}) const;

 private:
  std::shared_ptr<const internal::ContributionKey> key_;
};

// The error that gradient_resolution adds to a term's gradient G of the logits, before token weights, class weights and scales. The
// expected relative error of G, a root mean square, is sqrt(squared_error / squared_norm).
struct GradientDither {
  int64_t entry_count = 0;   // entries below their row's resolution
  double squared_error = 0;  // expected squared distance of the dithered G from the exact one
  double squared_norm = 0;   // of the exact G
};

// The result of one loss term. Sums are over its rows whose target is not ignore_index, in nats, without loss_scale.
struct TermResult {
  double loss_sum = 0;           // sum of token_weight * loss: equals the three parts together
  double soft_loss_sum = 0;      // the divergence's share; 0 for cross entropy
  double hard_loss_sum = 0;      // the cross entropy's share, without z-loss
  double z_loss_sum = 0;         // the z-loss's share
  double token_weight_sum = 0;   // sum of the token weights
  double target_weight_sum = 0;  // sum of token_weight * class_weight[target]: PyTorch's divisor for a mean with class weights
  int64_t valid_token_count = 0;
  double teacher_mean_square_error = 0;  // expected of an int8 teacher's logits; 0 of an exact teacher's
  int64_t non_finite_row_count = 0;      // rows with a NaN or an infinity in loss or gradient
  int64_t weight_version = 0;
  int64_t teacher_weight_version = 0;  // 0 without a teacher
  GradientDither dither;               // zeros without gradient_resolution

  std::vector<float> token_loss;  // these seven: [rows of the term], or empty if not asked for
  std::vector<float> lse;
  std::vector<float> target_log_probability;
  std::vector<float> entropy;
  std::vector<int32_t> argmax;
  std::vector<float> mean_logits;
  std::vector<float> log_sum_sq_probs;
};

// The result of a micro-batch besides its terms.
struct MicroBatchResult {
  TensorBuffer grad_hidden;  // [row_count, hidden_size]; empty if it was not asked for or went to the caller's memory
  ContributionState state = ContributionState::kNone;
  ContributionForm form = ContributionForm::kNone;
  bool replayed = false;         // nothing was added: the same key and bytes had been accepted before
  bool payload_differs = false;  // nothing was added: the key had been accepted with other bytes (kFirstWins)
  std::string digest;            // 16 bytes; empty for forward_only
  std::optional<int64_t> step;
  int64_t attempt = 0;  // the one that was answered
  Timing timing;
  std::string transport;                     // path that the rows took: "grpc", "shared_memory" or "cuda_ipc"
  std::optional<Contribution> contribution;  // to commit or discard; absent where there is nothing to decide
};

// The outcome of a micro-batch of one term.
struct LossResult : TermResult, MicroBatchResult {};

// The outcome of a micro-batch of several terms.
struct MultiResult : MicroBatchResult {
  std::vector<TermResult> terms;  // in the order of the call
};

// The result of Teacher::Stream().
struct StreamedRows {
  int64_t row_count = 0;  // rows that the server keeps for the join
};

// ---- steps ---------------------------------------------------------------------------------------------------------------

// The micro-batches that a step must consist of: exactly 0 ... n - 1, or exactly these ids.
using ExpectedMicroBatches = std::variant<int64_t, std::vector<int64_t>>;

// Sums over a step's committed micro-batches.
struct StepTotals {
  int64_t micro_batch_count = 0;
  int64_t valid_token_count = 0;
  double loss_sum = 0;  // nats, without scales and factors
  double token_weight_sum = 0;
  int64_t non_finite_row_count = 0;
};

struct SealOptions {
  // Wait for expected micro-batches that are missing or undecided, until shortly before the call's deadline, instead of failing at
  // once.
  bool wait = false;
};

struct AddGradientResult {
  bool replayed = false;  // an equal call had added it before
};

struct SealResult {
  StepTotals totals;
  double gradient_norm_squared = 0;  // over weight and bias, without gradient_factor
  int64_t non_finite_count = 0;      // elements of the gradient
  bool replayed = false;
};

// Arguments of ApplyOptimizerStep. The same ones again get the stored reply, others STEP_CONFLICT.
struct ApplyOptions {
  double learning_rate = 0;                        // finite in float32, >= 0
  std::optional<ExpectedMicroBatches> expected{};  // needed if the step is still open: it is sealed first
  // Whether a step without micro-batches may be applied: weight decay and the optimizer's moments then change the weights without a
  // gradient. Otherwise INVALID_COMBINATION where `expected` is empty, or was in this handle's Seal(); nothing is sent.
  bool allow_empty = false;
  double gradient_factor = 1.0;  // multiplies the accumulated gradient once, before norm and clipping
  // >= 0: clips by min(1, max_grad_norm / (global norm + 1e-6)). Absent, 0 or infinity: no clipping.
  std::optional<double> max_grad_norm{};
  double other_grad_norm_squared = 0;    // >= 0: the trainer's own part of the global norm, already unscaled
  std::optional<double> weight_decay{};  // these five override the optimizer's settings for this step
  std::optional<double> beta1{};         // AdamW only, as the next two
  std::optional<double> beta2{};
  std::optional<double> epsilon{};
  std::optional<double> momentum{};  // SGD with momentum only
};

struct ApplyResult {
  int64_t open_step = 0;  // the step that is open now
  int64_t weight_version = 0;
  double global_grad_norm = 0;
  double gradient_norm_squared = 0;  // the head's part, times gradient_factor^2, before clipping
  double clip_factor = 1;            // (0, 1]; the trainer multiplies its own gradients by it
  StepTotals totals;
  bool replayed = false;
};

struct DiscardGradientResult {
  int64_t open_step = 0;
  bool replayed = false;
};

struct GradientNormResult {
  double gradient_norm_squared = 0;  // over weight and bias, times gradient_factor^2
  int64_t non_finite_count = 0;
};

// Life of a step. Values may be added.
enum class StepState : int32_t { kUnknown = 0, kOpen = 1, kSealed = 2, kApplied = 3, kDiscarded = 4, kReplaced = 5 };

// The state of one micro-batch within a step.
struct MicroBatchInfo {
  int64_t micro_batch = 0;
  int64_t attempt = 0;
  ContributionState state = ContributionState::kNone;
  std::string digest;  // 16 bytes, or empty
  int64_t valid_token_count = 0;
  double factor = 1;
  ContributionForm form = ContributionForm::kNone;
};

struct StepInfo {
  int64_t step = 0;
  StepState state = StepState::kUnknown;
  std::vector<MicroBatchInfo> micro_batches;  // by ascending id
  StepTotals totals;
};

// The open (or sealed) step and the one before it.
struct StepStates {
  StepInfo open;
  std::optional<StepInfo> last_closed;
};

struct SaveResult {
  std::string checkpoint;
  int64_t step = 0;  // the step that a restored head opens
  int64_t total_bytes = 0;
};

// A checkpoint under a head's name.
struct CheckpointInfo {
  std::string checkpoint;
  int64_t step = 0;  // the step that a restored head opens
  int64_t total_bytes = 0;
  std::optional<std::chrono::system_clock::time_point> save_time;  // absent for those of version 0.1
  bool damaged = false;                                            // it cannot be restored; the other fields are not known
};

// ---- server --------------------------------------------------------------------------------------------------------------

struct DeviceInfo {
  std::string name;   // "cpu", "cuda:0", ...
  std::string model;  // as the vendor calls it
  int64_t memory_budget_bytes = 0;
  int64_t memory_planned_bytes = 0;
  std::string uuid;  // 16 bytes; empty for devices that have none
};

struct ServerInfo {
  std::string version;
  std::string incarnation;  // 16 bytes, new at every start of the process
  std::string engine;       // "cpu" or "cuda"
  std::string engine_note;  // why the engine is not a faster one, and the libraries of its products; may be empty
  std::vector<DeviceInfo> devices;
  // The server's limits, by the names of v1.Limits (`max_micro_batch_rows`, ...). Each is a flag of headwaterd of the same name;
  // durations are in seconds and lack the flag's `_s`. 0 of max_tenant_memory_bytes: no bound.
  std::map<std::string, int64_t> limits;
  std::vector<std::string> features;
  std::chrono::system_clock::time_point start_time;
  std::string descriptor_socket;  // path of the Unix socket that takes memory descriptors; empty: there is none
  bool named_regions = false;     // whether regions may be registered by a name under /dev/shm
  bool deterministic = false;     // whether contributions are added in ascending id
};

// Answer of grpc.health.v1. Values may be added.
enum class HealthStatus : int32_t { kUnknown = 0, kServing = 1, kNotServing = 2, kServiceUnknown = 3 };

}  // namespace headwater::client

#endif  // HEADWATER_CLIENT_TYPES_H_
