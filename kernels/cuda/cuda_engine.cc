#include "kernels/cuda/cuda_engine.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "headwater/kernels/error.h"
#include "kernels/core/engine_options_check.h"
#include "kernels/core/micro_batch_check.h"
#include "kernels/core/micro_batch_plan.h"
#include "kernels/cuda/caller_memory.h"
#include "kernels/cuda/computation/computation.h"
#include "kernels/cuda/computation/deferred_grad_weight.h"
#include "kernels/cuda/computation/expected_rows.h"
#include "kernels/cuda/computation/row_digester.h"
#include "kernels/cuda/computation/staged_contribution.h"
#include "kernels/cuda/computation/term_form.h"
#include "kernels/cuda/cuda_head.h"
#include "kernels/cuda/device_group.h"
#include "kernels/cuda/engine_core.h"
#include "kernels/cuda/foreign_memory.h"
#include "kernels/cuda/head_plan.h"
#include "kernels/cuda/products/algorithm_search.h"

namespace headwater::cuda {
namespace {

// Micro-batches of up to this many rows are computed together with others that wait.
constexpr int64_t kMaxJoinedRows = 1024;

// Bytes of a slot that a term's part of a chunk takes: see Computation::RunWork().
int64_t KeptBytes(const TermRun& term, int64_t rows) {
  const int64_t padded = PaddedWidth(term.head->spec().hidden_size);
  const int64_t element_bytes = BytesOf(term.MatrixElement());
  Workspace workspace;
  workspace.TakeBytes(rows * ProductStride(term.head->shard_weights(0).columns) * term.MatrixPitch(term.FormOf(rows)));
  for (int i = 0; i < 2; ++i) workspace.TakeBytes(rows * padded * element_bytes);
  for (int i = 0; i < 4; ++i) workspace.TakeBytes(rows * 4);
  workspace.TakeBytes((rows + 1) * 4);
  workspace.TakeBytes(8);
  return workspace.used();
}

// A micro-batch and where its tensors are. Memory on another device counts as host memory here.
struct PlacedMicroBatch {
  PlacedMicroBatch() = default;
  PlacedMicroBatch(const PlacedMicroBatch&) = delete;  // micro_batch may point into terms
  PlacedMicroBatch& operator=(const PlacedMicroBatch&) = delete;
  absl::Status Place(const MicroBatch& of_caller, const EngineCore& core);

  MicroBatch micro_batch;
  std::vector<LossTerm> terms;  // the micro-batch's, if it needs its own
  cuda::Place hidden = cuda::Place::kPageable;
  cuda::Place grad_hidden = cuda::Place::kPageable;
  std::vector<cuda::Place> teachers;  // by term
};

absl::Status PlacedMicroBatch::Place(const MicroBatch& of_caller, const EngineCore& core) {
  micro_batch = of_caller;
  const auto place = [&core](const std::string& field, const void* data, MemorySpace* memory, cuda::Place* out) {
    const absl::StatusOr<cuda::Place> found = PlaceOf(data, *memory, core, field);
    if (!found.ok()) return found.status();
    *out = *found;
    if (*found == cuda::Place::kOtherDevice) *memory = MemorySpace::kHost;
    return absl::OkStatus();
  };
  HEADWATER_RETURN_IF_ERROR(place("hidden", micro_batch.hidden.data, &micro_batch.hidden.memory, &hidden));
  HEADWATER_RETURN_IF_ERROR(place("grad_hidden", micro_batch.grad_hidden.data, &micro_batch.grad_hidden.memory, &grad_hidden));
  teachers.assign(of_caller.terms.size(), cuda::Place::kPageable);
  for (size_t i = 0; i < of_caller.terms.size(); ++i) {
    const RowsView& teacher = of_caller.terms[i].teacher_hidden;
    MemorySpace memory = teacher.memory;
    HEADWATER_RETURN_IF_ERROR(place("terms[" + std::to_string(i) + "].teacher_hidden", teacher.data, &memory, &teachers[i]));
    if (memory == teacher.memory) continue;
    if (terms.empty()) terms.assign(of_caller.terms.begin(), of_caller.terms.end());
    terms[i].teacher_hidden.memory = memory;
  }
  if (!terms.empty()) micro_batch.terms = terms;
  return absl::OkStatus();
}

// The values that ranks of a group exchange about a micro-batch before they compute it, each by its place.
enum CutValue : size_t { kRowsInPlace, kRows, kSliceRows, kRowsCome, kGradientLeaves, kAwaitsAllRows, kCheck, kCutValues };

// A number that is another one for almost any other call; exact as a double.
double CheckOf(const MicroBatch& micro_batch, const std::vector<TermRun>& terms) {
  uint64_t check = 14695981039346656037u;
  const auto add = [&check](int64_t value) { check = (check ^ static_cast<uint64_t>(value)) * 1099511628211u; };
  add(micro_batch.hidden.row_count);
  add(micro_batch.hidden.column_count);
  add(static_cast<int64_t>(micro_batch.hidden.data_type));
  add(micro_batch.backward ? 1 : 0);
  add(micro_batch.grad_hidden.data == nullptr ? 0 : 1);
  add(static_cast<int64_t>(micro_batch.grad_weight));
  add(micro_batch.flow == nullptr ? 0 : 1);
  for (const TermRun& term : terms) {
    add(static_cast<int64_t>(term.large_form));
    add(term.shard_passes ? 1 : 0);
    add(term.teacher == nullptr ? -1 : term.teacher->spec().vocab_size);
    add(term.divergence.common_columns);
    add(term.plan->term->row_start);
    add(term.plan->term->row_count);
    add(term.plan->wants_cross_entropy ? 1 : 0);
    for (const int32_t target : term.plan->term->targets) add(target);
  }
  return static_cast<double>(check >> 12);
}

// A Compute() call.
struct Call {
  Call(const PlacedMicroBatch& batch, DeviceGroup* of_group, bool hopper, bool deterministic)
      : placed(batch), micro_batch(batch.micro_batch), group(of_group), plan(PlanTerms(micro_batch)) {
    terms.reserve(plan.terms.size());
    for (size_t i = 0; i < plan.terms.size(); ++i) {
      terms.push_back(MakeTermRun(micro_batch, &plan.terms[i], hopper, batch.hidden, batch.teachers[i]));
      terms.back().as_on_host = deterministic;
    }
    rows_come = micro_batch.hidden.memory == MemorySpace::kHost;
    gradient_leaves = micro_batch.grad_hidden.memory == MemorySpace::kHost;
  }
  Member member() {
    return {&micro_batch, placed.hidden, placed.grad_hidden, &placed.teachers, &plan,
            &terms,       &staged,       rows_come,          gradient_leaves,  awaits_all_rows};
  }

  const PlacedMicroBatch& placed;
  const MicroBatch& micro_batch;
  DeviceGroup* const group;  // that computes it; null: this engine alone
  MicroBatchPlan plan;
  std::vector<TermRun> terms;
  std::vector<std::unique_ptr<StagedHead>> staged;
  MicroBatchResult result;
  absl::Status status;
  bool needs_whole_workspace = false;
  bool rows_come = false;  // Member's
  bool gradient_leaves = false;
  bool awaits_all_rows = false;
  bool done = false;  // guarded by CudaEngine::calls_mutex_
};

class CudaEngine final : public LossEngine {
 public:
  explicit CudaEngine(std::shared_ptr<EngineCore> core) : core_(std::move(core)) {}

  std::string name() const override { return "cuda"; }
  std::vector<EngineDevice> devices() const override {
    return {{"cuda:" + std::to_string(core_->options().device_index), core_->device_model(), core_->options().memory_budget_bytes,
             core_->device_uuid()}};
  }
  const EngineOptions& options() const override { return core_->options(); }
  int64_t planned_bytes() const override { return core_->planned_bytes(); }
  absl::Status DoHealth() const override { return core_->health(); }

  absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec) const override {
    HEADWATER_RETURN_IF_ERROR(CheckHeadSpec(spec, core_->options(), core_->hopper()));
    return PlanHeadOnCuda(spec, core_->options()).memory;
  }

  absl::StatusOr<std::unique_ptr<EngineHead>> DoCreateHead(const HeadSpec& spec) override {
    HEADWATER_RETURN_IF_ERROR(CheckHeadSpec(spec, core_->options(), core_->hopper()));
    HEADWATER_RETURN_IF_ERROR(core_->health());
    absl::StatusOr<std::unique_ptr<CudaHead>> head = CudaHead::Create(core_, spec, PlanHeadOnCuda(spec, core_->options()));
    if (!head.ok()) return head.status();
    {
      WorkLock lock(*core_);
      HEADWATER_RETURN_IF_ERROR(SearchAlgorithms(*core_, **head));
    }
    return std::unique_ptr<EngineHead>(*std::move(head));
  }

  absl::StatusOr<MicroBatchResult> DoCompute(const MicroBatch& micro_batch) override {
    HEADWATER_RETURN_IF_ERROR(CheckHeads(micro_batch, [this](const EngineHead& head) {
      const auto* own = dynamic_cast<const CudaHead*>(&head);
      return own != nullptr && &own->core() == core_.get();
    }));
    HEADWATER_RETURN_IF_ERROR(CheckMicroBatch(micro_batch, /*has_device=*/true));
    HEADWATER_RETURN_IF_ERROR(CheckTopK(micro_batch));
    HEADWATER_RETURN_IF_ERROR(core_->health());
    if (core_->group() != nullptr) HEADWATER_RETURN_IF_ERROR(ParallelismOf(micro_batch).status());
    DeviceGroup* const group = static_cast<const CudaHead&>(*micro_batch.terms.front().head).group();
    HEADWATER_RETURN_IF_ERROR(
        RefuseResolution(micro_batch, [group](const LossTerm&) { return group != nullptr ? "a head on several GPUs" : nullptr; }));
    core_->MakeCurrent();
    PlacedMicroBatch placed;
    absl::Status ready = placed.Place(micro_batch, *core_);
    if (ready.ok()) ready = AwaitEvent(*core_, micro_batch.after);
    if (!ready.ok()) return group == nullptr ? ready : Refuse(ready, *group);
    Call call(placed, group, core_->hopper(), core_->options().deterministic);
    if (IsSmall(call)) {
      RunWithOthers(&call);
    } else {
      WorkLock lock(*core_);
      RunGroup({&call});
    }
    if (!call.status.ok()) return call.status;
    return std::move(call.result);
  }

  absl::Status DoDigestRows(absl::Span<const RowsView> streams, const DeviceEvent* after, DigestBuilder* digest) override {
    HEADWATER_RETURN_IF_ERROR(core_->health());
    core_->MakeCurrent();
    HEADWATER_RETURN_IF_ERROR(AwaitEvent(*core_, after));
    for (size_t i = 0; i < streams.size(); ++i) {
      const RowsView& rows = streams[i];
      if (rows.data == nullptr) continue;
      const absl::StatusOr<Place> place = PlaceOf(rows.data, rows.memory, *core_, "streams[" + std::to_string(i) + "]");
      if (!place.ok()) return place.status();
      HEADWATER_RETURN_IF_ERROR(core_->digester().Add(rows, *place, 0, rows.row_count, static_cast<int32_t>(i), digest));
    }
    return absl::OkStatus();
  }

  absl::Status DoCopyRows(const RowsView& rows, const DeviceEvent* after, void* out) override {
    if (rows.memory == MemorySpace::kHost) return LossEngine::DoCopyRows(rows, after, out);
    HEADWATER_RETURN_IF_ERROR(core_->health());
    core_->MakeCurrent();
    HEADWATER_RETURN_IF_ERROR(AwaitEvent(*core_, after));
    return CopyFromDevice(*core_, rows, out);
  }

  absl::StatusOr<std::unique_ptr<HostMemory>> DoAllocateHostMemory(int64_t bytes) override {
    return AllocatePageLocked(core_, bytes);
  }
  absl::StatusOr<std::unique_ptr<HostMemory>> DoRegisterHostMemory(void* data, int64_t bytes) override {
    return RegisterPageLocked(core_, data, bytes);
  }
  absl::StatusOr<std::unique_ptr<DeviceRegion>> DoOpenDeviceMemory(const DeviceHandle& handle, int64_t bytes) override {
    return OpenForeignMemory(core_, handle, bytes);
  }
  absl::StatusOr<std::unique_ptr<DeviceEvent>> DoOpenDeviceEvent(const DeviceHandle& handle) override {
    return OpenForeignEvent(core_, handle);
  }

 private:
  // Where top-k teachers are built: on one GPU, for heads without a softcap (top_k_rows.h).
  absl::Status CheckTopK(const MicroBatch& micro_batch) const {
    if (core_->group() != nullptr) return RefuseTopK(micro_batch, "a group of GPUs");
    for (const LossTerm& term : micro_batch.terms) {
      if (!std::holds_alternative<TopKSpec>(term.loss) || !term.head->spec().transform.softcap.has_value()) continue;
      return RefuseTopK(micro_batch, "the CUDA engine, for a head with a softcap,");
    }
    return absl::OkStatus();
  }

  // Whether other calls' rows could be computed with this one's.
  bool IsSmall(const Call& call) const {
    return !core_->options().deterministic && call.micro_batch.flow == nullptr && call.terms.size() == 1 &&
           call.terms.front().large_form == Form::kExponentials && call.micro_batch.hidden.row_count <= kMaxJoinedRows &&
           // A repeat must find the same form, and so the same draws.
           !call.plan.terms.front().dithers && call.micro_batch.grad_weight != GradWeightMode::kStage &&
           call.terms.front().head->merged_shards() == 1 && core_->options().token_chunk_rows == 0;
  }

  // Informs the other ranks that this one cannot compute the call.
  absl::Status Refuse(const absl::Status& reason, DeviceGroup& group) {
    WorkLock lock(*core_);
    const absl::StatusOr<Exchanged> told = group.Exchange(false, std::vector<double>(kCutValues));
    return told.ok() ? reason : told.status();
  }

  // Small calls that wait for the device at the same time are computed together: the first of them to get it takes the others
  // along.
  void RunWithOthers(Call* call) {
    const auto rows_of = [](const Call& one) { return one.micro_batch.hidden.row_count; };
    std::unique_lock<std::mutex> lock(calls_mutex_);
    calls_.push_back(call);
    expected_rows_.Come(rows_of(*call));
    while (!call->done) {
      if (leading_) {
        calls_changed_.wait(lock);
        continue;
      }
      leading_ = true;
      lock.unlock();
      std::vector<Call*> group;
      {
        WorkLock work(*core_);
        // No other thread gives the device work meanwhile, so the wait ends.
        expected_rows_.Await([this] { return core_->is_busy(); });
        group = TakeGroup();
        RunGroup(group);
      }
      lock.lock();
      leading_ = false;
      int64_t rows = 0;
      for (Call* member : group) {
        member->done = true;
        rows += rows_of(*member);
      }
      expected_rows_.Go(static_cast<int64_t>(group.size()), rows);
      calls_changed_.notify_all();
    }
  }

  // The call that has waited longest, and those that can be computed with it.
  std::vector<Call*> TakeGroup() {
    std::lock_guard<std::mutex> lock(calls_mutex_);
    std::vector<Call*> group;
    std::vector<Member> members;
    int64_t rows = 0;
    for (auto next = calls_.begin(); next != calls_.end();) {
      Call* call = *next;
      if (group.empty() || rows < kMaxExponentialRows) {
        call->status = CutIntoChunks(call);
        members.push_back(call->member());
        const bool fits =
            group.empty() || (call->status.ok() && group.front()->status.ok() && CanJoin(members.front(), members.back()) &&
                              rows + call->micro_batch.hidden.row_count <= kMaxExponentialRows &&
                              JoinedBytes(members) <= core_->workspace().bytes());
        if (fits) {
          rows += call->micro_batch.hidden.row_count;
          group.push_back(call);
          next = calls_.erase(next);
          continue;
        }
        members.pop_back();
        call->plan.chunks.clear();
      }
      ++next;
    }
    return group;
  }

  // Computes calls that can be computed together, and leaves their results or errors with them. For the holder of the work lock.
  void RunGroup(const std::vector<Call*>& group) {
    const absl::Status status = TryGroup(group);
    for (Call* call : group) {
      if (call->status.ok()) call->status = status;
      if (call->status.ok()) call->status = FinishTerms(&call->plan, &call->result.terms);
      if (call->status.ok() && !call->staged.empty()) {
        call->result.staged = std::make_unique<CudaStagedContribution>(core_, std::move(call->staged));
      }
      call->staged.clear();
    }
  }

  absl::Status TryGroup(const std::vector<Call*>& group) {
    HEADWATER_RETURN_IF_ERROR(core_->health());
    if (group.front()->group != nullptr) return TryOnRank(group.front());
    std::vector<Member> members;
    bool whole = false;
    for (Call* call : group) {
      if (call->plan.chunks.empty() && call->status.ok()) call->status = CutIntoChunks(call);
      HEADWATER_RETURN_IF_ERROR(call->status);
      HEADWATER_RETURN_IF_ERROR(TakeSlots(&call->plan));
      call->staged = Stage(&call->plan, call->terms);
      BeginOutputs(&call->plan);
      members.push_back(call->member());
      whole = whole || call->needs_whole_workspace;
    }
    if (group.size() > 1) {
      const int64_t bytes = core_->workspace().bytes();
      whole = JoinedBytes(members) > bytes - DeferredGradWeight::ShareOf(bytes);
    }
    absl::Status interruption;
    const absl::Status status = core_->RunAlone([&] { return Run(group, members, whole, &interruption); });
    return status.ok() ? interruption : status;
  }

  // On one rank of a group: with all others at the same time, who cut the rows alike.
  absl::Status TryOnRank(Call* call) {
    absl::Status ready = core_->Prepare([](int32_t) { return absl::OkStatus(); });
    ChunkLimits limits;
    if (ready.ok()) ready = FindLimits(call, &limits);
    HEADWATER_RETURN_IF_ERROR(AgreeOnLimits(ready, &limits, call));
    PlanCall(limits, call);
    if (call->micro_batch.grad_weight == GradWeightMode::kStage) {
      HEADWATER_RETURN_IF_ERROR(call->group->Agree(TakeSlots(&call->plan)));
    }
    call->staged = Stage(&call->plan, call->terms);
    BeginOutputs(&call->plan);
    absl::Status interruption;
    const absl::Status status =
        core_->Act([&] { return Run({call}, {call->member()}, call->needs_whole_workspace, &interruption); });
    return status.ok() ? interruption : status;
  }

  // Exchanges the limits by which a call's rows are cut, and makes them equal on all ranks: the fewest rows that fit on any. Rows
  // go in slices only if all ranks have chosen the same ones. `ready`: whether this rank can compute it at all.
  absl::Status AgreeOnLimits(const absl::Status& ready, ChunkLimits* limits, Call* call) const {
    const MicroBatch& micro_batch = call->micro_batch;
    const int64_t slice_rows = SliceRowsOf(call->terms);
    const int64_t bytes = BytesForChunks(*call);
    std::vector<TermRun> uncut = call->terms;
    const int64_t in_place = slice_rows == 0 ? limits->max_rows : FitChunksInPlace(micro_batch, bytes, &uncut);
    bool device_streams = micro_batch.hidden.memory == MemorySpace::kDevice;
    for (const LossTerm& term : micro_batch.terms) {
      device_streams =
          device_streams || (term.teacher_hidden.data != nullptr && term.teacher_hidden.memory == MemorySpace::kDevice);
    }
    std::vector<double> mine(kCutValues);
    mine[kRowsInPlace] = static_cast<double>(in_place);
    mine[kRows] = static_cast<double>(limits->max_rows);
    mine[kSliceRows] = static_cast<double>(slice_rows);
    mine[kRowsCome] = call->rows_come ? 1 : 0;
    mine[kGradientLeaves] = call->gradient_leaves ? 1 : 0;
    mine[kAwaitsAllRows] = micro_batch.digest_rows && device_streams ? 1 : 0;
    mine[kCheck] = CheckOf(micro_batch, call->terms);
    const absl::StatusOr<Exchanged> exchanged = call->group->Exchange(ready.ok(), mine);
    if (!exchanged.ok()) return exchanged.status();
    HEADWATER_RETURN_IF_ERROR(ready);
    if (exchanged->first_failed >= 0) {
      const std::string shard = std::to_string(exchanged->first_failed);
      return MakeError(ErrorReason::kShardNotReady, "shard " + shard + " could not begin, and nothing was changed: it says why",
                       {{"shard", shard}});
    }
    const auto any = [&](CutValue value) {
      return std::any_of(exchanged->values.begin(), exchanged->values.end(), [&](const auto& rank) { return rank[value] != 0; });
    };
    const auto least = [&](CutValue value) {
      double found = mine[value];
      for (const std::vector<double>& rank : exchanged->values) found = std::min(found, rank[value]);
      return static_cast<int64_t>(found);
    };
    const auto same = [&](CutValue value) {
      return std::all_of(exchanged->values.begin(), exchanged->values.end(),
                         [&](const auto& rank) { return rank[value] == mine[value]; });
    };
    if (!same(kCheck)) {
      return MakeError(ErrorReason::kInternal, "the ranks of the group were given different micro-batches");
    }
    call->rows_come = any(kRowsCome);
    call->gradient_leaves = any(kGradientLeaves);
    call->awaits_all_rows = any(kAwaitsAllRows);
    if (same(kRows) && same(kSliceRows)) return absl::OkStatus();
    if (slice_rows > 0) call->terms = std::move(uncut);
    limits->max_rows = least(kRowsInPlace);
    return absl::OkStatus();
  }

  // For RunDecided() and Act().
  absl::Status Run(const std::vector<Call*>& group, const std::vector<Member>& members, bool whole, absl::Status* interruption) {
    if (whole) HEADWATER_RETURN_IF_ERROR(core_->deferred().Flush());
    for (Call* call : group) HEADWATER_RETURN_IF_ERROR(ClearSlots(call->staged));
    Computation computation(*core_, members, whole);
    const absl::Status run = computation.Run();
    if (!computation.interrupted()) return run;
    // Not the engine's failure: its caller wants no more.
    *interruption = run;
    return absl::OkStatus();
  }

  // Plans the chunks, and finds out whether they need the whole workspace, including the part of rows that wait for their product.
  absl::Status CutIntoChunks(Call* call) const {
    ChunkLimits limits;
    HEADWATER_RETURN_IF_ERROR(FindLimits(call, &limits));
    const int64_t needed = PlanCall(limits, call);
    // Where the workspace could not be allocated again after another head's: few rows may take a form that needs more than many.
    const int64_t bytes = core_->workspace().bytes();
    return needed <= bytes ? absl::OkStatus() : WorkspaceTooSmall(bytes, needed);
  }

  // The part of the workspace by which rows are cut: all of it. In deterministic mode it is the part that the call's own heads have
  // planned. The largest of all heads sizes the workspace, and other heads come and go.
  int64_t BytesForChunks(const Call& call) const {
    const int64_t bytes = core_->workspace().bytes();
    if (!core_->options().deterministic) return bytes;
    int64_t planned = 0;
    for (const TermRun& term : call.terms) {
      planned = std::max(planned, term.head->chunk_bytes());
      if (term.teacher != nullptr) planned = std::max(planned, term.teacher->chunk_bytes());
    }
    return std::min(bytes, planned);
  }

  // Chooses how many rows are computed at once.
  absl::Status FindLimits(Call* call, ChunkLimits* found) const {
    const MicroBatch& micro_batch = call->micro_batch;
    std::vector<TermRun>& terms = call->terms;
    const int64_t bytes = BytesForChunks(*call);
    ChunkLimits& limits = *found;
    limits.grain = kRowGrain;
    limits.exact = core_->options().token_chunk_rows > 0;
    const int64_t batch_rows = std::max<int64_t>(micro_batch.hidden.row_count, 1);
    if (limits.exact) {
      limits.max_rows = core_->options().token_chunk_rows;
      if (ChunkBytes(terms, micro_batch, std::min(limits.max_rows, batch_rows)) > bytes) limits.max_rows = 0;
    } else {
      limits.max_rows = FitChunks(micro_batch, bytes, &terms);
    }
    if (limits.max_rows == 0) {
      const int64_t needed = ChunkBytes(terms, micro_batch, limits.exact ? core_->options().token_chunk_rows : 1);
      return WorkspaceTooSmall(bytes, needed);
    }
    if (MostHostRows(static_cast<int64_t>(terms.size())) == 0) {
      return MakeError(ErrorReason::kMemoryBudgetExceeded,
                       "the engine's page-locked memory of " + std::to_string(EngineCore::kBounceBytes) +
                           " bytes has no room for a row of " + std::to_string(terms.size()) + " terms; give it fewer at once");
    }
    return absl::OkStatus();
  }

  static absl::Status WorkspaceTooSmall(int64_t bytes, int64_t needed) {
    return MakeError(ErrorReason::kMemoryBudgetExceeded,
                     "the workspace has " + std::to_string(bytes) + " bytes, and a chunk of this micro-batch needs " +
                         std::to_string(needed) + "; give the engine a larger workspace",
                     {{"requestedBytes", std::to_string(needed)}, {"availableBytes", std::to_string(bytes)}});
  }

  // Returns the bytes that the largest chunk takes.
  int64_t PlanCall(ChunkLimits limits, Call* call) const {
    limits.max_rows = std::min(limits.max_rows, MostHostRows(static_cast<int64_t>(call->terms.size())));
    call->plan.chunks.clear();  // of a plan that memory did not suffice to take
    PlanChunks(limits, &call->plan);
    int64_t rows = 0;
    for (const Chunk& chunk : call->plan.chunks) rows = std::max(rows, static_cast<int64_t>(chunk.batch_rows.size()));
    const int64_t bytes = core_->workspace().bytes(), needed = ChunkBytes(call->terms, call->micro_batch, rows);
    const bool lists =
        std::any_of(call->terms.begin(), call->terms.end(), [&](const TermRun& term) { return Computation::MayList(term, rows); });
    call->needs_whole_workspace = lists || needed > bytes - DeferredGradWeight::ShareOf(bytes);
    return needed;
  }

  // One entry for each slot of the plan, which gives its slots away.
  static std::vector<std::unique_ptr<StagedHead>> Stage(MicroBatchPlan* plan, const std::vector<TermRun>& terms) {
    std::vector<std::unique_ptr<StagedHead>> staged;
    for (PlannedSlot& planned : plan->slots) {
      auto head = std::make_unique<StagedHead>();
      head->head = static_cast<CudaHead*>(planned.slot.head());
      head->slot = std::move(planned.slot);
      int64_t kept_bytes = 0;
      for (const Chunk& chunk : plan->chunks) {
        for (const TermChunk& part : chunk.terms) {
          const TermRun& term = terms[part.term];
          if (chunk.backward && term.head == head->head) kept_bytes += KeptBytes(term, static_cast<int64_t>(part.rows.size()));
        }
      }
      const DeviceMemory& memory = head->head->staging_memory(0, head->slot.index());
      head->keeps_rows = head->head->shard_count() == 1 && kept_bytes <= memory.bytes();
      if (head->keeps_rows) head->space = Workspace(memory.As<void>(), memory.bytes());
      staged.push_back(std::move(head));
    }
    return staged;
  }

  // A slot that gets products is added to from 0 on.
  absl::Status ClearSlots(const std::vector<std::unique_ptr<StagedHead>>& staged) {
    for (const auto& head : staged) {
      if (head->keeps_rows) continue;
      for (int32_t rank = 0; rank < head->head->shard_count(); ++rank) {
        const DeviceMemory& memory = head->head->staging_memory(rank, head->slot.index());
        if (memory.bytes() == 0) continue;
        HEADWATER_RETURN_IF_ERROR(
            core_->Check(cudaMemsetAsync(memory.As<void>(), 0, static_cast<size_t>(memory.bytes()), core_->stream()),
                         "clearing a staging slot"));
      }
    }
    return absl::OkStatus();
  }

  const std::shared_ptr<EngineCore> core_;

  std::mutex calls_mutex_;
  std::condition_variable calls_changed_;
  std::vector<Call*> calls_;  // small ones that wait, in order of arrival; guarded by calls_mutex_
  bool leading_ = false;      // a caller is about to compute some of them; guarded by calls_mutex_
  ExpectedRows expected_rows_{kMaxExponentialRows};
};

}  // namespace

absl::StatusOr<std::unique_ptr<LossEngine>> CreateEngine(const EngineOptions& options) {
  HEADWATER_RETURN_IF_ERROR(CheckEngineOptions(options));
  absl::StatusOr<std::shared_ptr<EngineCore>> core = EngineCore::Create(options);
  if (!core.ok()) return core.status();
  return std::unique_ptr<LossEngine>(std::make_unique<CudaEngine>(*std::move(core)));
}

}  // namespace headwater::cuda
