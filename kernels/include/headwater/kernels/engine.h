// LossEngine: where the mathematics runs.
//
// One interface, several engines (CpuEngine here, CudaEngine in a module library that is loaded when it is there), one set of
// tests. The engine owns device memory, the split of a head over shards, the gradient accumulator, staging slots, optimizer state
// and digests. It knows nothing of steps, epochs or who calls: those are server/heads. Formulas: docs/math.md.
//
// Threads. LossEngine's and EngineHead's const methods may be called from any thread. Methods that compute or change a head
// (Compute, Commit, WriteTensor, ApplyOptimizer, ...) block until done, but for what Compute() and Commit() add to accumulators and
// slots: that may go on when it returns, needs nothing of the caller's any more, and is found done by every later call. Calls may
// overlap, and are then serialized by the engine where the hardware needs it, but for those on one head that conflict, which
// server/heads keeps apart: what writes the weights or the optimizer's state with every other call, and two calls on the
// accumulator or the slots. Compute() calls without staging may overlap each other on one head too: the engine computes them one
// after the other, or small ones together, each with its own result. Their order, and so the accumulator's last bits, is then left
// open.
//
// Determinism. Same inputs, same plan, same machine: bitwise the same outputs.
//
// Groups. Several engines, each perhaps on a device or in a process of its own, can hold one shard of every head each
// (EngineOptions::group). What then differs for each of them, a rank:
//   - All ranks get the same calls in the same order, with equal arguments but for what is said here; one call at a time. Calls
//     that change a head, and Compute(), are collective: each rank's waits for the others', and their two phases (ShardPhase) are
//     the group's. A rank that refuses a call for what is wrong with its arguments does so before it meets another.
//   - Loss sums, per-token outputs and grad_hidden are complete on rank 0; what other ranks leave in theirs is not defined. They
//     get memory for the same outputs, so that every rank computes what all need. With EngineGroup::shared_views, host memory of
//     grad_hidden is the same on all ranks, and each may write its part of it before rank 0 returns.
//   - RowFlow: each rank has its own, or none has. AwaitRows() and Decide() are called on every rank, and answer alike on all of
//     them; digest_rows may be set on rank 0 only. GradHiddenReady() is rank 0's.
//   - PlanHead(), EngineHead::plan() and planned_bytes() are about the rank's own shard; token_chunk_rows is the same on all
//     ranks. EngineHead::shards() tells all shards.
//   - ReadTensor() fills what the rank holds of the range and leaves the rest of `out` alone; it is not collective and may be
//     called on one rank only. WriteTensor() and AddToGradient() take what the rank holds of the range and ignore the rest; they
//     are collective, but each rank may be given another range, of no elements even, if together they cover what is to be
//     written.
//   - ComputeGradientStats() is about the rank's own shard, and not collective. The group's are the sums in rank order.
//   - kShardNotReady comes on all ranks, and names the first that was not ready in `shard`. After kEngineFailed on any rank the
//     whole group is lost: the communicator is aborted, health() fails on every rank, and new engines are needed.
//
// Heads with Parallelism::kRows in a group. Each rank has a replica: all of the weights, an accumulator and staging slots of its
// own. The head's gradient is the sum of the accumulators. Of the fp32 masters and the optimizer state a rank holds its shard
// (EngineHead::shards()). What is different for such heads:
//   - Compute() and StagedContribution::Commit() are calls on one rank, which computes and answers all of it, as an engine that is
//     alone; ranks may do so at the same time. All heads of a call, teachers too, must be of this kind (kInvalidCombination).
//   - What else changes a head is collective as for all heads. WriteTensor() of weights, masters and the accumulator is given the
//     same whole range on every rank; the accumulator's elements go to the rank that has them in its shard, to the others goes 0.
//   - ReduceGradient() sums the accumulators up; until another contribution comes, each rank's shard is the gradient's.
//     ComputeGradientStats() and ApplyOptimizer() want it to have been called. ApplyOptimizer() hands the new weights to all ranks.
//   - ReadTensor() of the accumulator reads the rank's own.
//   - CreateHead() and PlanHead() refuse it in deterministic mode (kInvalidCombination), where sums must not depend on which
//     micro-batches a rank is given.
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

// Where a tensor of a call lies. kDevice: device memory, complete when the call is made (or when its flow or event says so): the
// engine's own device's (devices()[0]) is read and written in place, another's is copied in and out. Refused as kInvalidField by
// engines without a device, and where it is not what the memory is.
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

// Rows that come, and a gradient that leaves, while their micro-batch is computed. The caller implements it.
class RowFlow {
 public:
  virtual ~RowFlow() = default;
  // Returns once rows [0, row_end) of `hidden` are there, and those rows of each term's `teacher_hidden` that belong to them.
  // `row_end` ascends. Called by Compute()'s thread, which holds the device meanwhile: a caller whose rows stay away for long
  // returns an error. An error ends the computation, which returns it and has added nothing.
  virtual absl::Status AwaitRows(int64_t row_end) = 0;
  // Called exactly once in a computation that succeeds, before anything is added to an accumulator and after AwaitRows() of all
  // rows: the last moment at which an error ends the computation with nothing added. `rows`: the rows' sum for the digest, if
  // MicroBatch::digest_rows, else null; valid during the call. By Compute()'s thread.
  virtual absl::Status Decide(const DigestBuilder* rows) = 0;
  // Rows [0, row_end) of grad_hidden are final, where the caller's view of them lies in host memory. `row_end` ascends up to all
  // rows before Compute() returns; not called for grad_hidden in device memory. Any thread, the device driver's own among them:
  // must neither wait nor call the engine.
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
  // Factors of each row's entropy and lse in the objective, [row_count], or empty: all 0. Cross entropy with backward only. The
  // sums are the loss's alone.
  absl::Span<const float> entropy_factors;
  absl::Span<const float> lse_factors;
  double loss_scale = 1.0;  // of the three
  std::variant<CrossEntropySpec, JsdSpec, TopKSpec> loss;
  // tau: 0, and the gradient is exact, or in [kSmallestGradientResolution, 1]. With it a row's entries below its resolution q
  // become 0 or q, without bias (docs/math.md, "Gradient resolution"); losses and outputs stay bitwise as they are. With backward
  // only; without factors of entropy and lse, a hard loss beside a divergence, a top-k teacher, and smoothing behind a softcap
  // (kInvalidCombination).
  double gradient_resolution = 0;
  // What the draws are hashed from, beside row and column. A caller makes it of what names the term for good (head, step,
  // micro-batch, index of the term), so that repeats draw alike and other steps and terms do not.
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
#define HEADWATER_TOKEN_OUTPUTS token_loss, lse, target_log_probability, entropy, argmax, mean_logits, log_sum_sq_probs

// Where the weight's gradient goes.
enum class GradWeightMode {
  kNone,        // not computed: forward only, frozen heads, replays
  kAccumulate,  // DIRECT: added to the accumulator in place
  kStage,       // STAGED: kept in a staging slot until StagedContribution::Commit() or its destruction
};

// What to compute.
struct MicroBatch {
  RowsView hidden;
  absl::Span<const LossTerm> terms;  // at least one
  bool backward = false;             // false: loss and per-token outputs only; grad_hidden must be null, grad_weight kNone
  MutableRowsView grad_hidden;       // data null: not computed. Rows no term covers, and ignored rows, get 0
  double grad_hidden_scale = 1.0;
  GradWeightMode grad_weight = GradWeightMode::kNone;  // for the terms whose head is trainable
  // Refuse NaN and infinities: kNonFiniteValues instead of a result if any row's loss or gradient is not finite; no contribution
  // is left (outputs may have been written). Not with kAccumulate (kInvalidCombination): its products may have begun.
  bool refuse_non_finite = false;

  // Not null: `hidden` and each `teacher_hidden` may still be incomplete, and are read only as the flow says. Such a call is never
  // computed together with others. Must outlive the call.
  RowFlow* flow = nullptr;
  // The engine sums up the rows it reads for the digest (streams as in digest.h) and hands the sum to RowFlow::Decide(). Needs a
  // flow (kInvalidCombination).
  bool digest_rows = false;
  // Not null: device memory of this call is read and written only after the work that the event stands for. Of this engine.
  const DeviceEvent* after = nullptr;
  // Names the work in the device's profilers; a string that outlives the call. Null: it has no name.
  const char* label = nullptr;
};

// What dithering did to a term's gradient G of the logits, before token weights, class weights and scales.
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
  int64_t non_finite_row_count = 0;
  GradientDither dither;  // zeros without gradient_resolution
};

// EngineObserver: sees the calls that work in an engine. Any thread.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  // A call begins on this thread, and ends. `name`: the method's, a literal. Returns the number that EndCall() is given.
  virtual uint64_t BeginCall(const char* name) = 0;
  virtual void EndCall(uint64_t call) = 0;
  // A call enters its caller's RowFlow, and comes back.
  virtual void EnterFlow() {}
  virtual void LeaveFlow() {}
  // An error makes health() fail. `progress`: LossEngine::progress(). Called by every health() of an engine that is well.
  virtual absl::Status Check(int64_t /*progress*/) { return absl::OkStatus(); }
};

// A call, while this lives. `observer`: null if nobody looks.
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

// A contribution beside the accumulators, in staging slots. Destroying it uncommitted frees the slots and changes nothing else;
// that alone may happen while other calls work on its heads. Must not outlive the heads it belongs to.
class StagedContribution {
 public:
  virtual ~StagedContribution() = default;
  // Adds factor x contribution to the accumulators of all its heads, and frees the slots. At most once. Decided once for all
  // shards: kShardNotReady if a shard could not begin: then nothing has changed, the slots are still taken, and Commit() may be
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

// What a micro-batch yields.
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
  // The same, in. Writing kWeight or kBias sets a separate master to the same values; writing kMasterWeight or kMasterBias sets
  // the stored tensor to its rounding (nearest even). A range of several shards is decided once for all of them, as
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
  // Adds factor x `in` to elements [element_start, element_start + element_count) of the accumulator, kGradWeight or kGradBias:
  // gradient = fp32(gradient + fp32(fp32(factor) * in)), two roundings to nearest even, never fused. What is not finite in `in`
  // goes into the accumulator. kInvalidField for another tensor or a factor that is not finite in fp32, kChunkOutOfRange. Decided
  // once for all shards, as StagedContribution::Commit().
  absl::Status AddToGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, double factor, const float* in) {
    const ObservedCall call(observer_, "AddToGradient");
    return DoAddToGradient(tensor, element_start, element_count, factor, in);
  }
  // Sums the ranks' accumulators up where they are several (Parallelism::kRows in a group; else nothing is done): each rank's shard
  // becomes the gradient's, and 0 is left in the rest. In an order that depends on the group alone: on the CPU the ranks', on GPUs
  // NCCL's. Decided likewise.
  absl::Status ReduceGradient() {
    const ObservedCall call(observer_, "ReduceGradient");
    return DoReduceGradient();
  }
  // Sets optimizer state to 0. Decided likewise.
  absl::Status ResetOptimizerState() {
    const ObservedCall call(observer_, "ResetOptimizerState");
    return DoResetOptimizerState();
  }
  absl::StatusOr<GradientStats> ComputeGradientStats() const {
    const ObservedCall call(observer_, "ComputeGradientStats");
    return DoComputeGradientStats();
  }
  // Updates the weights from the accumulator, then sets the accumulator to 0. kOptimizerNotConfigured without an optimizer;
  // kInvalidCombination for another kind than the head's, or momentum for a head that was planned without; kInvalidField. Decided
  // once for all shards, as StagedContribution::Commit().
  absl::Status ApplyOptimizer(const OptimizerStep& step) {
    const ObservedCall call(observer_, "ApplyOptimizer");
    return DoApplyOptimizer(step);
  }

  // Staging slots that are not taken now.
  virtual int32_t FreeStagingSlots() const = 0;
  // Whether Compute() with staging may overlap other calls of Compute() on this head. One that finds no slot then has not looked at
  // its flow, and can be made again.
  virtual bool StagesConcurrently() const { return false; }

 private:
  friend class LossEngine;
  // Each does what the public method of that name says.
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

// Work that changes a head on several shards has two phases: every shard prepares, which is all that may fail and changes nothing;
// the shards tell each other; then all of them act, or none does.
enum class ShardPhase { kPrepare, kAct };

// The group that an engine is a rank of; see the top of this file.
struct EngineGroup {
  int32_t rank = 0;
  int32_t world_size = 1;  // > 1: the engine holds shard `rank` of every head and no other
  // Of the group's engines alone, with the same rank and world size: for decisions and small numbers, and all that a CPU engine
  // has. Nobody else may make calls of it but Abort().
  std::shared_ptr<Communicator> communicator;
  std::string device_group_id;  // the bytes of an ncclUniqueId for engines on GPUs, the same on all ranks; else empty
  bool shared_views = false;    // all ranks are threads of one process and get views of the same host memory
};

// The library that multiplies bf16 rows by bf16 weights on the CPU engine. OpenBLAS multiplies in fp32, after a conversion. oneDNN
// takes bf16 operands, which rounds the gradient of the logits to bf16 (docs/math.md, "Precision").
enum class Bfloat16Products { kAuto, kOpenBlas, kOneDnn };

// How an engine is set up; from flags. Ranks of a group have the same values of what decides how work is cut: shard_count,
// shard_weights, workspace_bytes, token_chunk_rows, thread_count and deterministic; and of bfloat16_products.
struct EngineOptions {
  EngineGroup group;
  int32_t shard_count = 1;             // >= 1; a head with fewer rows gets as many shards as it has rows. A group's: its world size
  std::vector<int64_t> shard_weights;  // relative sizes of the shards (> 0), for uneven splits; empty: even
  int64_t memory_budget_bytes = 0;     // for all heads; 0: 80 % of the device's memory (of the cgroup's limit on the CPU)
  int64_t workspace_bytes = 0;         // for each shard group; 0: the engine's default. The largest token chunk follows from it
  int64_t token_chunk_rows = 0;        // 0: from the workspace; else exactly this many rows at once (tests)
  int32_t thread_count = 0;            // CPU threads over all shards that the engine holds; 0: the cores this process may use
  // For tests that make a shard fail; null in production. Called at the beginning of each phase of every such work (Compute()
  // included, whatever it changes) on each shard's own thread, at the same time on several: an error is that shard's failure.
  std::function<absl::Status(ShardPhase phase, int32_t rank)> shard_probe;

  // Nothing that depends on other calls: no micro-batch is computed together with another, each grad_weight product is run with its
  // own micro-batch, rows are cut the same way wherever tensors lie, and algorithms are not searched by time. What an engine does
  // not do anyway it need not look at.
  bool deterministic = false;

  // CPU only. kAuto: oneDNN where the processor has instructions for bf16 and the library is there and is the faster one. Its speed
  // is not measured in deterministic mode, nor by ranks of a group. options() of an engine has the choice.
  Bfloat16Products bfloat16_products = Bfloat16Products::kAuto;

  // CUDA only; other engines do not look at what follows.
  int32_t device_index = 0;          // of the GPU, as CUDA counts the visible ones
  std::string algorithm_cache_path;  // file that keeps the products' algorithms from start to start; empty: none is kept
  bool timed_search = true;          // false: algorithms as the library proposes them, so that two starts run the same ones
  bool portable_kernels = false;     // true: only what every supported GPU runs, also on Hopper
  // Called once, on any thread, when the device is lost (health()). Must not call the engine.
  std::function<void(const absl::Status&)> on_device_lost;
};

// Where heads live.
struct EngineDevice {
  std::string name;   // "cpu", "cuda:0"
  std::string model;  // as the vendor calls it
  int64_t memory_budget_bytes = 0;
  std::array<uint8_t, 16> uuid{};  // of a GPU, as its driver tells it; zeros for what has none
};

// Host memory that the engine reads and writes without a detour; page-locked by engines with a device. Must not outlive its engine.
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
  // Before the first call. The observer sees all calls from then on, also those of the engine's heads and contributions.
  void Observe(std::shared_ptr<EngineObserver> observer) { observer_ = std::move(observer); }

  virtual std::string name() const = 0;  // "cpu", "cuda"
  virtual std::vector<EngineDevice> devices() const = 0;
  virtual const EngineOptions& options() const = 0;  // with defaults filled in

  // What a head would take. Allocates nothing. InvalidArgument for a spec that ValidateHeadSpec() refuses.
  virtual absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec) const = 0;
  // Allocates a head: weights are unset (reads give 0), accumulator and optimizer state 0. kMemoryBudgetExceeded, with the plan in
  // the message, if the plan exceeds `memory_budget_bytes` less what living heads have planned.
  absl::StatusOr<std::unique_ptr<EngineHead>> CreateHead(const HeadSpec& spec);
  // Sum of the living heads' plans.
  virtual int64_t planned_bytes() const = 0;

  // kEngineFailed from the moment on when the device can compute nothing any more (an error that CUDA does not recover from); every
  // call fails with it then, and only a new process helps. Any thread.
  absl::Status health() const {
    absl::Status health = DoHealth();
    return health.ok() && observer_ != nullptr ? observer_->Check(progress()) : health;
  }

  // Rises while a computation that may take long gets on; an engine none of whose calls takes long may leave it at 0. Any thread.
  virtual int64_t progress() const { return 0; }

  // Computes one micro-batch. Checks everything that could make it read or write out of bounds (sizes, types, targets) and fails
  // with the reasons of error.h before anything is changed; kStagingFull if kStage finds no slot; kShardNotReady if a shard could
  // not begin (outputs may have been written). A failure after that is kEngineFailed; with kAccumulate the heads are lost then. The
  // engine itself goes on: what was not part of the failed work is as before.
  absl::StatusOr<MicroBatchResult> Compute(const MicroBatch& micro_batch);

  // Adds the rows of `streams` to `digest`: stream i of the digest is streams[i]; one without data is left out. Host and device
  // memory. From any thread, also while others compute.
  absl::Status DigestRows(absl::Span<const RowsView> streams, const DeviceEvent* after, DigestBuilder* digest) {
    const ObservedCall call(observer_.get(), "DigestRows");
    return DoDigestRows(streams, after, digest);
  }
  // Copies rows to `out`, host memory with room for all of them. Host and device memory. From any thread, also while others
  // compute.
  absl::Status CopyRows(const RowsView& rows, const DeviceEvent* after, void* out) {
    const ObservedCall call(observer_.get(), "CopyRows");
    return DoCopyRows(rows, after, out);
  }

  // `bytes` (>= 1) of host memory, aligned to 64 bytes, uninitialised. kMemoryBudgetExceeded if there is none. Slow: a caller that
  // needs it often keeps it.
  absl::StatusOr<std::unique_ptr<HostMemory>> AllocateHostMemory(int64_t bytes) {
    const ObservedCall call(observer_.get(), "AllocateHostMemory");
    return DoAllocateHostMemory(bytes);
  }
  // Makes [data, data + bytes) of this process's memory as good as AllocateHostMemory()'s, until the result is destroyed, before
  // which it must stay mapped. kMemoryBudgetExceeded if it cannot be page-locked.
  absl::StatusOr<std::unique_ptr<HostMemory>> RegisterHostMemory(void* data, int64_t bytes) {
    const ObservedCall call(observer_.get(), "RegisterHostMemory");
    return DoRegisterHostMemory(data, bytes);
  }
  // Opens another process's device memory of `bytes` bytes by its handle. kFeatureNotBuilt without a device; kInvalidField, saying
  // why, for a handle that cannot be opened here (another host, a device that this process does not see, a process namespace that
  // is not shared) or whose allocation has fewer bytes.
  absl::StatusOr<std::unique_ptr<DeviceRegion>> OpenDeviceMemory(const DeviceHandle& handle, int64_t bytes) {
    const ObservedCall call(observer_.get(), "OpenDeviceMemory");
    return DoOpenDeviceMemory(handle, bytes);
  }
  // The same for an event. Work is waited for as it was when the call that names the event begins.
  absl::StatusOr<std::unique_ptr<DeviceEvent>> OpenDeviceEvent(const DeviceHandle& handle) {
    const ObservedCall call(observer_.get(), "OpenDeviceEvent");
    return DoOpenDeviceEvent(handle);
  }

 protected:
  // Each does what the public method of that name says.
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
// The same for an optimizer's settings alone: a step's overrides.
absl::Status ValidateOptimizerSpec(const OptimizerSpec& optimizer, const std::string& path = "");

// Runs a small CE and JSD with known results on the engine; for health and start-up. Creates and destroys tiny heads.
absl::Status SelfTest(LossEngine& engine);

// The engine that needs no accelerator.
absl::StatusOr<std::unique_ptr<LossEngine>> CreateCpuEngine(const EngineOptions& options);

// The engine for NVIDIA GPUs, out of the module library libheadwater_cuda.so, which is looked for beside the file that this code is
// in, in the Python package headwater_cuda13 beside that file's, and in HEADWATER_CUDA_MODULE (a path) first. kFeatureNotBuilt,
// saying why, if the module or a usable GPU (sm_80 or newer) is not there; kMemoryBudgetExceeded if the budget is more than the GPU
// has.
absl::StatusOr<std::unique_ptr<LossEngine>> CreateCudaEngine(const EngineOptions& options);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_ENGINE_H_
