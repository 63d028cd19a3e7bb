// LossEngine: the interface of the mathematics.
//
// One interface, several engines (CpuEngine here, CudaEngine in an optional module library), one set of tests. The engine owns
// device memory, the split of a head over shards, the gradient accumulator, staging slots, optimizer state and digests. Steps,
// epochs and callers belong to server/heads. Formulas: docs/math.md.
//
// Threads. LossEngine's and EngineHead's const methods may be called from any thread. Methods that compute or change a head
// (Compute, Commit, WriteTensor, ApplyOptimizer, ...) block until done, with one exception. Compute() and Commit() may still add to
// accumulators and slots after they return. This needs nothing of the caller's, and every later call sees it done. Calls may
// overlap; the engine serializes them where the hardware needs it. Callers (server/heads) keep conflicting calls on one head apart.
// A write of the weights or the optimizer's state conflicts with every other call. Two calls on the accumulator or the slots
// conflict. Compute() calls without staging may overlap on one head too. The engine computes them one after the other, or small
// ones together, each with its own result. Their order, and so the accumulator's last bits, is then not defined.
//
// Determinism. Same inputs, same plan, same machine: bitwise the same outputs.
//
// Groups. Several engines, each perhaps on its own device or in its own process, can hold one shard of every head each
// (EngineOptions::group). Differences for each such engine, a rank:
//   - All ranks get the same calls in the same order, one at a time, with equal arguments except as listed here. Compute(), and
//     calls that change a head, are collective: each rank's call waits for the others', and their two phases (ShardPhase) are the
//     group's. A rank refuses invalid arguments before it waits for another.
//   - Loss sums, per-token outputs and grad_hidden are complete on rank 0 and undefined on other ranks. These get memory for the
//     same outputs, so that every rank computes what all need. With EngineGroup::shared_views, host memory of grad_hidden is the
//     same on all ranks, and each may write its part of it before rank 0 returns.
//   - RowFlow: each rank has its own, or none has. AwaitRows() and Decide() are called on every rank, and return the same on all
//     of them; digest_rows may be set on rank 0 only. GradHiddenReady() is only called on rank 0.
//   - PlanHead(), EngineHead::plan() and planned_bytes() are about the rank's own shard; token_chunk_rows is the same on all
//     ranks. EngineHead::shards() lists all shards.
//   - ReadTensor() fills the rank's own part of the range and leaves the rest of `out` unchanged. It is not collective and may be
//     called on one rank only. WriteTensor() and AddToGradient() take the rank's own part of the range and ignore the rest. They
//     are collective, but ranks may be given different ranges, even empty ones, that cover the elements to write together.
//   - ComputeGradientStats() is about the rank's own shard, and not collective. The group's are the sums in rank order.
//   - kShardNotReady is returned on all ranks, and names the first shard that was not ready in `shard`. After kEngineFailed on
//     any rank the group is lost: the communicator is aborted, health() fails on every rank, and new engines are needed.
//
// Heads with Parallelism::kRows in a group. Each rank has a replica: all of the weights, an accumulator and staging slots of its
// own. The head's gradient is the sum of the accumulators. A rank holds its shard (EngineHead::shards()) of the fp32 masters and
// the optimizer state. Differences for such heads:
//   - Compute() and StagedContribution::Commit() are calls on one rank, which computes and returns all of it like a single
//     engine; ranks may do so at the same time. All heads of a call, teachers too, must be of this kind (kInvalidCombination).
//   - Other changes of a head are collective as for all heads. WriteTensor() of weights, masters and the accumulator gets the
//     same whole range on every rank. Each element of the accumulator is written on the rank whose shard has it, and set to 0 on
//     the others.
//   - ReduceGradient() sums the accumulators: until the next contribution, each rank's shard is the gradient's. It must precede
//     ComputeGradientStats() and ApplyOptimizer(). ApplyOptimizer() sends the new weights to all ranks.
//   - ReadTensor() of the accumulator reads the rank's own.
//   - CreateHead() and PlanHead() refuse it in deterministic mode (kInvalidCombination): sums must not depend on the assignment
//     of micro-batches to ranks.
#ifndef HEADWATER_KERNELS_ENGINE_H_
#define HEADWATER_KERNELS_ENGINE_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "headwater/kernels/types.h"

namespace headwater {

// 128 bits that identify a micro-batch's header and rows; see digest.h.
using Digest = std::array<uint8_t, 16>;

// The place of a call's tensor. kDevice: device memory, complete when the call is made, or when its flow or event reports it.
// Memory of the engine's own device (devices()[0]) is used in place, another device's is copied. kInvalidField from engines without
// a device, and for memory of the other kind.
enum class MemorySpace { kHost, kDevice };

// Rows of a two-dimensional tensor; row-major and contiguous. The memory stays the caller's. Page-locked host memory is copied
// without a detour.
struct RowsView {
  const void* data = nullptr;  // [row_count, column_count]; may be null if row_count == 0
  int64_t row_count = 0;
  int64_t column_count = 0;
  DataType data_type = DataType::kFloat32;
  MemorySpace memory = MemorySpace::kHost;
};

// Writable rows.
struct MutableRowsView {
  void* data = nullptr;
  int64_t row_count = 0;
  int64_t column_count = 0;
  DataType data_type = DataType::kFloat32;
  MemorySpace memory = MemorySpace::kHost;
};

class Communicator;
class DigestBuilder;
class EngineHead;

// Rows that arrive, and a gradient that leaves, while their micro-batch is computed. The caller implements it.
class RowFlow {
 public:
  virtual ~RowFlow() = default;
  // Returns once rows [0, row_end) of `hidden`, and their rows of each term's `teacher_hidden`, have come. `row_end` ascends.
  // Called on Compute()'s thread, which holds the device meanwhile: return an error for rows that are too late. An error ends the
  // computation, which returns it and adds nothing.
  virtual absl::Status AwaitRows(int64_t row_end) = 0;
  // The last moment at which an error ends the computation with nothing added. Called exactly once in a computation that succeeds,
  // after AwaitRows() of all rows and before anything is added to an accumulator. `rows`: the rows' sum for the digest, if
  // MicroBatch::digest_rows, else null; valid during the call. On Compute()'s thread.
  virtual absl::Status Decide(const DigestBuilder* rows) = 0;
  // Rows [0, row_end) of grad_hidden are final, in host memory. `row_end` ascends up to all rows before Compute() returns; not
  // called for grad_hidden in device memory. Any thread, including the device driver's own: must neither wait nor call the engine.
  virtual void GradHiddenReady(int64_t row_end) = 0;
};

// Work on a device of another process that an engine can wait for; see LossEngine::OpenDeviceEvent().
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
};

// One loss over rows [row_start, row_start + row_count) of a micro-batch.
struct LossTerm {
  EngineHead* head = nullptr;
  int64_t row_start = 0;
  int64_t row_count = 0;
  absl::Span<const int32_t> targets;  // [row_count]; may be empty for JSD without hard loss and top-k: no row is ignored
  int32_t ignore_index = kDefaultIgnoreIndex;
  absl::Span<const float> token_weights;  // [row_count], or empty: all 1
  // Factors of each row's entropy and lse in the objective, [row_count], or empty: all 0. Cross entropy with backward only.
  // LossSums exclude them.
  absl::Span<const float> entropy_factors;
  absl::Span<const float> lse_factors;
  double loss_scale = 1.0;  // of the three
  std::variant<CrossEntropySpec, JsdSpec, TopKSpec> loss;
  // tau: 0 (exact gradient), or in [kSmallestGradientResolution, 1]. A row's gradient entries below its resolution q become 0 or q,
  // without bias (docs/math.md, "Gradient resolution"); losses and outputs stay bitwise the same. With backward only.
  // kInvalidCombination with factors of entropy and lse, a hard loss beside a divergence, a top-k teacher, or smoothing with a
  // softcap.
  double gradient_resolution = 0;
  // The seed of the draws, which are hashed with row and column. Derive it from the term's permanent name (head, step, micro-batch,
  // index of the term): repeats then draw the same, other steps and terms do not.
  uint64_t dither_seed = 0;
  EngineHead* teacher_head = nullptr;  // JSD only
  RowsView teacher_hidden;             // JSD only: [row_count, teacher_head's hidden_size]

  // Per-token outputs, [row_count] each, or null if not asked for. Ignored rows get 0, argmax -1;
  // without targets, target_log_probability is 0. A top-k teacher's term has token_loss alone.
  float* token_loss = nullptr;
  float* lse = nullptr;
  float* target_log_probability = nullptr;
  float* entropy = nullptr;
  int32_t* argmax = nullptr;
  float* mean_logits = nullptr;       // of u over the valid vocabulary
  float* log_sum_sq_probs = nullptr;  // ln sum_v p_v^2
};
// Names of a term's options, of its tensors and of its outputs, for codecs; the outputs in the order of headwater.v1.TokenOutput.
#define HEADWATER_TERM_OPTIONS row_start, row_count, ignore_index, loss_scale, gradient_resolution
#define HEADWATER_TERM_TENSORS targets, token_weights, entropy_factors, lse_factors
#define HEADWATER_TOKEN_OUTPUTS token_loss, HEADWATER_LOGIT_OUTPUTS
#define HEADWATER_LOGIT_OUTPUTS lse, target_log_probability, entropy, argmax, mean_logits, log_sum_sq_probs

// The destination of the weight's gradient.
enum class GradWeightMode {
  kNone,        // not computed: forward only, frozen heads, replays
  kAccumulate,  // DIRECT: added to the accumulator in place
  kStage,       // STAGED: kept in a staging slot until StagedContribution::Commit() or its destruction
};

// The input of Compute().
struct MicroBatch {
  RowsView hidden;
  absl::Span<const LossTerm> terms;  // at least one
  bool backward = false;             // false: loss and per-token outputs only; grad_hidden must be null, grad_weight kNone
  MutableRowsView grad_hidden;       // data null: not computed. Rows no term covers, and ignored rows, get 0
  double grad_hidden_scale = 1.0;
  GradWeightMode grad_weight = GradWeightMode::kNone;  // for the terms whose head is trainable
  // Return kNonFiniteValues instead of a result if any row's loss or gradient is not finite. No contribution is left; outputs may
  // have been written. Not with kAccumulate (kInvalidCombination): its products may have begun.
  bool refuse_non_finite = false;

  // Not null: `hidden` and each `teacher_hidden` may be incomplete, and are read only as the flow reports. Such a call is never
  // computed together with others. Must outlive the call.
  RowFlow* flow = nullptr;
  // The engine sums up the rows it reads for the digest (streams as in digest.h) and hands the sum to RowFlow::Decide(). Needs a
  // flow (kInvalidCombination).
  bool digest_rows = false;
  // Not null: device memory of this call is read and written only after the event's work. Made by this engine.
  const DeviceEvent* after = nullptr;
  // Names the work in the device's profilers; a string that outlives the call. Null: it has no name.
  const char* label = nullptr;
};

// The effect of dithering on a term's gradient G of the logits, before token weights, class weights and scales.
struct GradientDither {
  int64_t entry_count = 0;   // entries below their row's resolution
  double squared_error = 0;  // expected squared distance of the dithered G from the exact one
  double squared_norm = 0;   // of the exact G
};

// Sums over a term's valid rows; nats, without loss_scale.
struct LossSums {
  double loss_sum = 0;  // = soft + hard + z
  double soft_loss_sum = 0;
  double hard_loss_sum = 0;
  double z_loss_sum = 0;
  double token_weight_sum = 0;
  double target_weight_sum = 0;  // sum of token_weight * class_weight[target]
  int64_t valid_token_count = 0;
  // Expected error of the logits of HeadSpec::int8_teacher; 0 of an exact teacher's. A mean over columns of the first shard, and
  // over rows of a weight other than 0.
  double teacher_mean_square_error = 0;
  int64_t non_finite_row_count = 0;
  GradientDither dither;  // zeros without gradient_resolution
};

// EngineObserver: observes the calls in progress in an engine. Any thread.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  // A call begins on this thread, and ends. `name`: the method's, a literal. BeginCall() returns the number for EndCall().
  virtual uint64_t BeginCall(const char* name) = 0;
  virtual void EndCall(uint64_t call) = 0;
  // A call enters its caller's RowFlow, and returns.
  virtual void EnterFlow() {}
  virtual void LeaveFlow() {}
  // An error makes health() fail. `progress`: LossEngine::progress(). Called by every health() of a healthy engine.
  virtual absl::Status Check(int64_t /*progress*/) { return absl::OkStatus(); }
};

// A call, while this lives. `observer`: null for an engine without one.
class ObservedCall {
 public:
  ObservedCall(EngineObserver* observer, const char* name)
      : observer_(observer), call_(observer == nullptr ? 0 : observer->BeginCall(name)) {}
  ~ObservedCall() {
    if (observer_ != nullptr) observer_->EndCall(call_);
  }
  ObservedCall(const ObservedCall&) = delete;
  ObservedCall& operator=(const ObservedCall&) = delete;

 private:
  EngineObserver* const observer_;
  const uint64_t call_;
};

// A contribution in staging slots, not in the accumulators. Destroying it uncommitted frees the slots and changes nothing else;
// this may overlap other calls on its heads. Must not outlive the heads it belongs to.
class StagedContribution {
 public:
  virtual ~StagedContribution() = default;
  // Adds factor x contribution to the accumulators of all its heads, and frees the slots. At most once. Decided once for all
  // shards: kShardNotReady if a shard could not begin. Then nothing has changed, the slots are still taken, and Commit() may be
  // called again. After that only kEngineFailed: the heads are lost then. kInvalidField, with nothing changed, for a factor that is
  // not finite in fp32.
  absl::Status Commit(double factor) {
    const ObservedCall call(observer_, "Commit");
    return DoCommit(factor);
  }

 private:
  friend class LossEngine;
  virtual absl::Status DoCommit(double factor) = 0;

  EngineObserver* observer_ = nullptr;  // its engine's
};

// The result of a micro-batch.
struct MicroBatchResult {
  std::vector<LossSums> terms;                 // one for each term
  std::unique_ptr<StagedContribution> staged;  // with kStage and at least one trainable head
};

// Squared norm and number of non-finite elements of an accumulator (weight and bias together).
struct GradientStats {
  double norm_squared = 0;  // fp64 sum over all shards; without any factor
  int64_t non_finite_count = 0;
};

// One optimizer update.
struct OptimizerStep {
  double learning_rate = 0;
  double gradient_multiplier = 1;  // gradient_factor x clip factor
  OptimizerSpec settings;          // the head's optimizer with this step's overrides; same alternative as the head's
  int64_t update_count = 1;        // 1 for the first update: AdamW's bias correction
};

// A head on an engine: weights, accumulator, staging slots, optimizer state, split over shards.
class EngineHead {
 public:
  virtual ~EngineHead() = default;
  virtual const HeadSpec& spec() const = 0;
  virtual const MemoryPlan& plan() const = 0;
  virtual absl::Span<const VocabShard> shards() const = 0;

  // Elements of a tensor, 0 if this head does not have it.
  virtual int64_t ElementCount(HeadTensor tensor) const = 0;
  // Type in which ReadTensor and WriteTensor move it: the storage type for weight and bias, else fp32.
  virtual DataType TensorDataType(HeadTensor tensor) const = 0;

  // Copies elements [element_start, element_start + element_count) out, across shards. `out` has room for them.
  absl::Status ReadTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const {
    const ObservedCall call(observer_, "ReadTensor");
    return DoReadTensor(tensor, element_start, element_count, out);
  }
  // Copies elements in. Writing kWeight or kBias sets a separate master to the same values; writing kMasterWeight or kMasterBias
  // sets the stored tensor to its rounding (nearest even). A range of several shards is decided once for all of them, as
  // StagedContribution::Commit().
  absl::Status WriteTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in) {
    const ObservedCall call(observer_, "WriteTensor");
    return DoWriteTensor(tensor, element_start, element_count, in);
  }

  // Sets the accumulator to 0 (an exact 0 everywhere, whatever it held). Decided once for all shards, as
  // StagedContribution::Commit().
  absl::Status ZeroGradient() {
    const ObservedCall call(observer_, "ZeroGradient");
    return DoZeroGradient();
  }
  // Adds factor x `in` to elements [element_start, element_start + element_count) of the accumulator kGradWeight or kGradBias.
  // The sum is fp32(gradient + fp32(fp32(factor) * in)): two roundings to nearest even, never fused. Non-finite values are added
  // too. kInvalidField for another tensor or a factor that is not finite in fp32, kChunkOutOfRange. Decided once for all shards, as
  // StagedContribution::Commit().
  absl::Status AddToGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, double factor, const float* in) {
    const ObservedCall call(observer_, "AddToGradient");
    return DoAddToGradient(tensor, element_start, element_count, factor, in);
  }
  // Sums the accumulators of several ranks (Parallelism::kRows in a group; otherwise without effect). Each rank's shard becomes the
  // gradient's; the rest becomes 0. The order depends only on the group: rank order on the CPU, NCCL's on GPUs. Decided once for
  // all shards, as StagedContribution::Commit().
  absl::Status ReduceGradient() {
    const ObservedCall call(observer_, "ReduceGradient");
    return DoReduceGradient();
  }
  // Sets optimizer state to 0. Decided once for all shards, as StagedContribution::Commit().
  absl::Status ResetOptimizerState() {
    const ObservedCall call(observer_, "ResetOptimizerState");
    return DoResetOptimizerState();
  }
  absl::StatusOr<GradientStats> ComputeGradientStats() const {
    const ObservedCall call(observer_, "ComputeGradientStats");
    return DoComputeGradientStats();
  }
  // Updates the weights from the accumulator, then sets the accumulator to 0. kOptimizerNotConfigured without an optimizer;
  // kInvalidCombination for another kind than the head's, or momentum for a head planned without it; kInvalidField. Decided once
  // for all shards, as StagedContribution::Commit().
  absl::Status ApplyOptimizer(const OptimizerStep& step) {
    const ObservedCall call(observer_, "ApplyOptimizer");
    return DoApplyOptimizer(step);
  }

  // Staging slots that are free now.
  virtual int32_t FreeStagingSlots() const = 0;
  // Whether Compute() with staging may overlap other Compute() calls on this head. A call that finds no slot then has not used its
  // flow, and may be repeated.
  virtual bool StagesConcurrently() const { return false; }

 private:
  friend class LossEngine;
  // Each implements the public method of that name.
  virtual absl::Status DoReadTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const = 0;
  virtual absl::Status DoWriteTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in) = 0;
  virtual absl::Status DoZeroGradient() = 0;
  virtual absl::Status DoAddToGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, double factor,
                                       const float* in) = 0;
  virtual absl::Status DoReduceGradient() { return absl::OkStatus(); }
  virtual absl::Status DoResetOptimizerState() = 0;
  virtual absl::StatusOr<GradientStats> DoComputeGradientStats() const = 0;
  virtual absl::Status DoApplyOptimizer(const OptimizerStep& step) = 0;

  EngineObserver* observer_ = nullptr;  // its engine's
};

// The two phases of work that changes a head on several shards. Every shard prepares, which may fail and changes nothing; then the
// shards exchange their results, and all of them act, or none does.
enum class ShardPhase { kPrepare, kAct };

// The group that an engine is a rank of; see the top of this file.
struct EngineGroup {
  int32_t rank = 0;
  int32_t world_size = 1;  // > 1: the engine holds shard `rank` of every head and no other
  // Connects only the group's engines, with the same rank and world size, for decisions and small numbers; a CPU engine's only
  // communicator. Other code may call nothing but Abort().
  std::shared_ptr<Communicator> communicator;
  std::string device_group_id;  // the bytes of an ncclUniqueId for engines on GPUs, the same on all ranks; else empty
  bool shared_views = false;    // all ranks are threads of one process and get views of the same host memory
};

// The library that multiplies bf16 rows by bf16 weights on the CPU engine. OpenBLAS multiplies in fp32, after a conversion. oneDNN
// takes bf16 operands, which rounds the gradient of the logits to bf16 (docs/math.md, "Precision").
enum class Bfloat16Products { kAuto, kOpenBlas, kOneDnn };

// The settings of an engine, from flags. All ranks of a group need equal settings for the division of work: shard_count,
// shard_weights, workspace_bytes, token_chunk_rows, thread_count, deterministic and bfloat16_products.
struct EngineOptions {
  EngineGroup group;
  int32_t shard_count = 1;             // >= 1; a head with fewer rows gets as many shards as it has rows. A group's: its world size
  std::vector<int64_t> shard_weights;  // relative sizes of the shards (> 0), for uneven splits; empty: even
  int64_t memory_budget_bytes = 0;     // for all heads; 0: 80 % of the device's memory (of the cgroup's limit on the CPU)
  int64_t workspace_bytes = 0;         // for each shard group; 0: the engine's default. The largest token chunk follows from it
  int64_t token_chunk_rows = 0;        // 0: from the workspace; else exactly this many rows at once (tests)
  int32_t thread_count = 0;            // CPU threads over all shards that the engine holds; 0: the cores this process may use
  // For tests that make a shard fail; null in production. Called at the beginning of each phase of such work, and of every
  // Compute(). Runs on each shard's own thread, concurrently: an error is that shard's failure.
  std::function<absl::Status(ShardPhase phase, int32_t rank)> shard_probe;

  // Results are independent of other calls: no micro-batch is computed together with another, and each grad_weight product runs
  // with its own micro-batch. Rows are cut the same way wherever tensors lie, and algorithms are not searched by time. Engines
  // without these optimizations ignore it.
  bool deterministic = false;

  // CPU only. kAuto: oneDNN if the library is present, the processor has instructions for bf16, and oneDNN is faster. Deterministic
  // mode and ranks of a group do not measure its speed. options() of an engine has the choice.
  Bfloat16Products bfloat16_products = Bfloat16Products::kAuto;

  // CUDA only; other engines ignore the following.
  int32_t device_index = 0;          // of the GPU, as CUDA counts the visible ones
  std::string algorithm_cache_path;  // file that keeps the products' algorithms from start to start; empty: none is kept
  bool timed_search = true;          // false: algorithms as the library proposes them, so that two starts run the same ones
  bool portable_kernels = false;     // true: only what every supported GPU runs, also on Hopper
  // Called once, on any thread, when the device is lost (health()). Must not call the engine.
  std::function<void(const absl::Status&)> on_device_lost;
};

// A device that holds heads.
struct EngineDevice {
  std::string name;   // "cpu", "cuda:0"
  std::string model;  // as the vendor calls it
  int64_t memory_budget_bytes = 0;
  std::array<uint8_t, 16> uuid{};  // a GPU's, as its driver reports it; else zeros
};

// Host memory that the engine uses without copies; page-locked by engines with a device. Must not outlive its engine.
class HostMemory {
 public:
  virtual ~HostMemory() = default;
  virtual void* data() const = 0;
  virtual int64_t bytes() const = 0;
};

// Another process's device memory, mapped here until it is destroyed. Must not outlive its engine.
class DeviceRegion {
 public:
  virtual ~DeviceRegion() = default;
  virtual void* data() const = 0;  // for RowsView with MemorySpace::kDevice
  virtual int64_t bytes() const = 0;
};

// An interprocess handle of CUDA, as cudaIpcGetMemHandle() and cudaIpcGetEventHandle() make them.
using DeviceHandle = std::array<uint8_t, 64>;

// An engine. Heads must be destroyed before it.
class LossEngine {
 public:
  virtual ~LossEngine() = default;
  // Sets the observer, before the first call. It sees all calls, also those of the engine's heads and contributions.
  void Observe(std::shared_ptr<EngineObserver> observer) { observer_ = std::move(observer); }

  virtual std::string name() const = 0;  // "cpu", "cuda"
  virtual std::vector<EngineDevice> devices() const = 0;
  virtual const EngineOptions& options() const = 0;  // with defaults filled in

  // Plans a head's memory. Allocates nothing. InvalidArgument for a spec that ValidateHeadSpec() refuses.
  virtual absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec) const = 0;
  // Allocates a head: weights are unset (reads give 0), accumulator and optimizer state 0. kMemoryBudgetExceeded, with the plan in
  // the message, if the plan exceeds `memory_budget_bytes` less what living heads have planned.
  absl::StatusOr<std::unique_ptr<EngineHead>> CreateHead(const HeadSpec& spec);
  // Sum of the living heads' plans.
  virtual int64_t planned_bytes() const = 0;

  // kEngineFailed once the device can compute nothing any more (an error that CUDA does not recover from). Every call fails then,
  // and only a new process helps. Any thread.
  absl::Status health() const {
    absl::Status health = DoHealth();
    return health.ok() && observer_ != nullptr ? observer_->Check(progress()) : health;
  }

  // Rises while a long computation makes progress; an engine without long calls may return 0. Any thread.
  virtual int64_t progress() const { return 0; }

  // Computes one micro-batch. Checks sizes, types and targets before anything is changed, so that it never accesses memory out of
  // bounds, and fails with the reasons of error.h. kStagingFull if kStage finds no slot; kShardNotReady if a shard could not begin
  // (outputs may have been written). A failure after that is kEngineFailed; with kAccumulate the heads are lost then. The engine
  // continues: the failed work affects nothing else.
  absl::StatusOr<MicroBatchResult> Compute(const MicroBatch& micro_batch);

  // Adds the rows of `streams` to `digest`: stream i of the digest is streams[i]; streams without data are skipped. Host and device
  // memory. From any thread, also during other calls.
  absl::Status DigestRows(absl::Span<const RowsView> streams, const DeviceEvent* after, DigestBuilder* digest) {
    const ObservedCall call(observer_.get(), "DigestRows");
    return DoDigestRows(streams, after, digest);
  }
  // Copies rows to `out`, host memory with room for all of them. Host and device memory. From any thread, also during other calls.
  absl::Status CopyRows(const RowsView& rows, const DeviceEvent* after, void* out) {
    const ObservedCall call(observer_.get(), "CopyRows");
    return DoCopyRows(rows, after, out);
  }

  // `bytes` (>= 1) of host memory, aligned to 64 bytes, uninitialised. kMemoryBudgetExceeded without memory. Slow: frequent callers
  // keep and reuse it.
  absl::StatusOr<std::unique_ptr<HostMemory>> AllocateHostMemory(int64_t bytes) {
    const ObservedCall call(observer_.get(), "AllocateHostMemory");
    return DoAllocateHostMemory(bytes);
  }
  // Prepares [data, data + bytes) of this process's memory for use like AllocateHostMemory()'s, until the result is destroyed. Must
  // stay mapped until then. kMemoryBudgetExceeded if it cannot be page-locked.
  absl::StatusOr<std::unique_ptr<HostMemory>> RegisterHostMemory(void* data, int64_t bytes) {
    const ObservedCall call(observer_.get(), "RegisterHostMemory");
    return DoRegisterHostMemory(data, bytes);
  }
  // Opens another process's device memory of `bytes` bytes by its handle. kFeatureNotBuilt without a device. kInvalidField, saying
  // why, if the handle cannot be opened here or its allocation has fewer bytes. Causes: another host, an invisible device, or a
  // process namespace that is not shared.
  absl::StatusOr<std::unique_ptr<DeviceRegion>> OpenDeviceMemory(const DeviceHandle& handle, int64_t bytes) {
    const ObservedCall call(observer_.get(), "OpenDeviceMemory");
    return DoOpenDeviceMemory(handle, bytes);
  }
  // Opens another process's event, with the errors of OpenDeviceMemory(). A call waits for the work recorded when it begins.
  absl::StatusOr<std::unique_ptr<DeviceEvent>> OpenDeviceEvent(const DeviceHandle& handle) {
    const ObservedCall call(observer_.get(), "OpenDeviceEvent");
    return DoOpenDeviceEvent(handle);
  }

 protected:
  // Each implements the public method of that name.
  virtual absl::StatusOr<std::unique_ptr<EngineHead>> DoCreateHead(const HeadSpec& spec) = 0;
  virtual absl::StatusOr<MicroBatchResult> DoCompute(const MicroBatch& micro_batch) = 0;
  virtual absl::Status DoHealth() const { return absl::OkStatus(); }
  virtual absl::Status DoDigestRows(absl::Span<const RowsView> streams, const DeviceEvent* after, DigestBuilder* digest);
  virtual absl::Status DoCopyRows(const RowsView& rows, const DeviceEvent* after, void* out);
  virtual absl::StatusOr<std::unique_ptr<HostMemory>> DoAllocateHostMemory(int64_t bytes);
  virtual absl::StatusOr<std::unique_ptr<HostMemory>> DoRegisterHostMemory(void* data, int64_t bytes);
  virtual absl::StatusOr<std::unique_ptr<DeviceRegion>> DoOpenDeviceMemory(const DeviceHandle& handle, int64_t bytes);
  virtual absl::StatusOr<std::unique_ptr<DeviceEvent>> DoOpenDeviceEvent(const DeviceHandle& handle);

 private:
  std::shared_ptr<EngineObserver> observer_;
};

// Checks ranges and combinations (docs/math.md). FieldError(kInvalidField / kInvalidCombination); fields have the names of
// headwater.v1.HeadSpec behind `path`, which is empty or ends with a dot.
absl::Status ValidateHeadSpec(const HeadSpec& spec, const std::string& path = "");
// Checks an optimizer's settings alone, for a step's overrides. Errors as ValidateHeadSpec().
absl::Status ValidateOptimizerSpec(const OptimizerSpec& optimizer, const std::string& path = "");

// Runs a small CE and JSD with known results on the engine; for health and start-up. Creates and destroys tiny heads.
absl::Status SelfTest(LossEngine& engine);

// The engine for CPUs, without an accelerator.
absl::StatusOr<std::unique_ptr<LossEngine>> CreateCpuEngine(const EngineOptions& options);

// The engine for NVIDIA GPUs, from the module library libheadwater_cuda.so. HEADWATER_CUDA_MODULE names its path; if unset, the
// module is searched beside the program and in the Python package headwater_cuda13 (kernels/core/engine_module.cc).
// kFeatureNotBuilt, saying why, without the module or a usable GPU (sm_80 or newer). kMemoryBudgetExceeded if the budget exceeds
// the GPU's memory.
absl::StatusOr<std::unique_ptr<LossEngine>> CreateCudaEngine(const EngineOptions& options);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_ENGINE_H_
