#include "server/group/group_engine.h"

#include <atomic>
#include <utility>
#include <variant>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/communicator.h"
#include "headwater/kernels/device_group_id.h"
#include "headwater/kernels/digest.h"
#include "headwater/kernels/each_name.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "kernels/core/head_base.h"
#include "kernels/core/head_tensors.h"
#include "kernels/core/micro_batch_check.h"
#include "kernels/core/micro_batch_plan.h"
#include "kernels/core/optimizer_step.h"
#include "kernels/core/saturating.h"
#include "kernels/core/shard_layout.h"
#include "server/group/engines_together.h"
#include "server/group/ranks/rank.h"
#include "server/group/ranks/rank_codec.h"

namespace headwater::group {
namespace {

class GroupHead final : public HeadBase {
 public:
  GroupHead(std::shared_ptr<GroupCore> core, const HeadSpec& spec, MemoryPlan plan, std::vector<RowRange> shard_rows,
            const std::string& device, std::vector<std::unique_ptr<EngineHead>> heads)
      : HeadBase(spec, std::move(plan), std::move(shard_rows), device, SlotsOf(spec, core->size())),
        core_(std::move(core)),
        heads_(std::move(heads)) {}
  ~GroupHead() override {
    core_->planned_bytes -= plan().total_bytes;
    core_->Release(std::move(heads_));
  }

  EngineHead& on(size_t rank) const { return *heads_[rank]; }
  const GroupCore& core() const { return *core_; }
  // Each rank has all of it, and staging slots of its own.
  bool is_replicated() const { return spec().parallelism == Parallelism::kRows; }
  // A slot on one rank, if one is free there; for replicated heads only.
  StagingSlot TakeSlotOn(size_t rank) {
    const int32_t first = static_cast<int32_t>(rank) * spec().staging_slots;
    return StagingSlot(this, first, first + spec().staging_slots);
  }
  // One rank's gradient has changed: the ranks' gradients must be summed up again. In a turn.
  void NoteContribution() { is_reduced_.store(false); }

  bool StagesConcurrently() const override { return is_replicated(); }

  absl::Status DoReadTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const override {
    HEADWATER_RETURN_IF_ERROR(CheckRange(tensor, element_start, element_count));
    if (is_replicated() && IsWholeInReplica(spec(), tensor) && !IsGradient(tensor)) {
      // The first rank has all weights too, and is the nearest.
      GroupCore::RankTurn turn(*core_, 0);
      HEADWATER_RETURN_IF_ERROR(turn.status());
      return turn.Run([&] { return on(0).ReadTensor(tensor, element_start, element_count, out); });
    }
    const int64_t element_bytes = ElementBytes(TensorDataType(tensor));
    return InTurn(IsGradient(tensor), [&](size_t rank) {
      const Piece piece = PieceOf(static_cast<int32_t>(rank), tensor, element_start, element_count);
      if (piece.count == 0) return absl::OkStatus();
      return on(rank).ReadTensor(tensor, element_start + piece.offset, piece.count,
                                 static_cast<char*>(out) + piece.offset * element_bytes);
    });
  }

  absl::Status DoWriteTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in) override {
    HEADWATER_RETURN_IF_ERROR(CheckRange(tensor, element_start, element_count));
    const int64_t element_bytes = ElementBytes(TensorDataType(tensor));
    const bool to_all = is_replicated() && (IsWholeInReplica(spec(), tensor) || IsMaster(tensor));
    return InTurn(kAsItIs, [&](size_t rank) {
      const Piece piece = to_all ? Piece{element_start, element_count, 0}
                                 : PieceOf(static_cast<int32_t>(rank), tensor, element_start, element_count);
      return on(rank).WriteTensor(tensor, element_start + piece.offset, piece.count,
                                  static_cast<const char*>(in) + piece.offset * element_bytes);
    });
  }

  absl::Status DoZeroGradient() override {
    return InTurn(kAsItIs, [&](size_t rank) { return on(rank).ZeroGradient(); });
  }

  absl::Status DoReduceGradient() override {
    return InTurn(kReduced, [](size_t) { return absl::OkStatus(); });
  }

  absl::Status DoAddToGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, double factor,
                               const float* in) override {
    float alpha = 0;
    HEADWATER_RETURN_IF_ERROR(CheckAddToGradient(tensor, element_start, element_count, factor, &alpha));
    return InTurn(kAsItIs, [&](size_t rank) {
      const Piece piece = PieceOf(static_cast<int32_t>(rank), tensor, element_start, element_count);
      return on(rank).AddToGradient(tensor, element_start + piece.offset, piece.count, factor, in + piece.offset);
    });
  }

  absl::Status DoResetOptimizerState() override {
    return InTurn(kAsItIs, [&](size_t rank) { return on(rank).ResetOptimizerState(); });
  }

  absl::StatusOr<GradientStats> DoComputeGradientStats() const override {
    std::vector<GradientStats> parts(shard_rows().size());
    HEADWATER_RETURN_IF_ERROR(InTurn(kReduced, [&](size_t rank) -> absl::Status {
      HEADWATER_ASSIGN_OR_RETURN(parts[rank], on(rank).ComputeGradientStats());
      return absl::OkStatus();
    }));
    GradientStats total;
    for (const GradientStats& part : parts) {
      total.norm_squared += part.norm_squared;
      total.non_finite_count += part.non_finite_count;
    }
    return total;
  }

  absl::Status DoApplyOptimizer(const OptimizerStep& step) override {
    HEADWATER_RETURN_IF_ERROR(CheckOptimizerStep(spec(), step));
    return InTurn(kReduced, [&](size_t rank) { return on(rank).ApplyOptimizer(step); });
  }

 private:
  // Whether a call needs the summed gradient.
  static constexpr bool kAsItIs = false;
  static constexpr bool kReduced = true;

  static int32_t SlotsOf(const HeadSpec& spec, size_t ranks) {
    return spec.parallelism == Parallelism::kRows ? spec.staging_slots * static_cast<int32_t>(ranks) : spec.staging_slots;
  }
  static bool IsGradient(HeadTensor tensor) { return tensor == HeadTensor::kGradWeight || tensor == HeadTensor::kGradBias; }

  absl::Status InTurn(bool reduced, GroupCore::Program program) const {
    const GroupCore::Turn turn(*core_);
    HEADWATER_RETURN_IF_ERROR(turn.status());
    if (reduced && is_replicated() && !is_reduced_.load()) {
      HEADWATER_RETURN_IF_ERROR(core_->OnAll([&](size_t rank) { return on(rank).ReduceGradient(); }));
      is_reduced_.store(true);
    }
    return core_->OnAll(program);
  }

  const std::shared_ptr<GroupCore> core_;
  std::vector<std::unique_ptr<EngineHead>> heads_;  // by rank
  mutable std::atomic<bool> is_reduced_{true};      // each rank's shard of the gradient is the sum; the rest is 0
};

class GroupContribution final : public StagedContribution {
 public:
  // `parts`: by rank; null for a rank without a part. `rank`: computed it alone; nullopt: all ranks did.
  GroupContribution(std::shared_ptr<GroupCore> core, std::optional<size_t> rank,
                    std::vector<std::unique_ptr<StagedContribution>> parts, std::vector<StagingSlot> slots)
      : core_(std::move(core)), rank_(rank), parts_(std::move(parts)), slots_(std::move(slots)) {}
  ~GroupContribution() override { core_->Release(std::move(parts_)); }

 private:
  absl::Status DoCommit(double factor) override {
    if (committed_) return MakeError(ErrorReason::kInternal, "the contribution was committed before");
    float alpha = 0;
    HEADWATER_RETURN_IF_ERROR(ToFactor(factor, &alpha));
    absl::Status status = rank_.has_value() ? CommitOnRank(factor) : CommitOnAll(factor);
    if (HasReason(status, ErrorReason::kShardNotReady)) return status;
    committed_ = true;
    slots_.clear();
    return status;
  }

  absl::Status CommitPart(size_t rank, double factor) {
    absl::Status status = parts_[rank]->Commit(factor);
    if (!HasReason(status, ErrorReason::kShardNotReady)) parts_[rank].reset();
    return status;
  }

  absl::Status CommitOnAll(double factor) {
    const GroupCore::Turn turn(*core_);
    HEADWATER_RETURN_IF_ERROR(turn.status());
    return core_->OnAll([&](size_t rank) { return CommitPart(rank, factor); });
  }

  absl::Status CommitOnRank(double factor) {
    GroupCore::RankTurn turn(*core_, *rank_);
    HEADWATER_RETURN_IF_ERROR(turn.status());
    for (const StagingSlot& slot : slots_) static_cast<GroupHead*>(slot.head())->NoteContribution();
    return turn.Run([&] { return CommitPart(*rank_, factor); });
  }

  const std::shared_ptr<GroupCore> core_;
  const std::optional<size_t> rank_;
  std::vector<std::unique_ptr<StagedContribution>> parts_;
  std::vector<StagingSlot> slots_;
  bool committed_ = false;
};

// A rank's own micro-batch: with its heads in the terms, and memory for what it writes.
class RankMicroBatch {
 public:
  RankMicroBatch(const MicroBatch& micro_batch, size_t rank)
      : micro_batch_(micro_batch), terms_(micro_batch.terms.begin(), micro_batch.terms.end()) {
    for (LossTerm& term : terms_) {
      term.head = &static_cast<GroupHead*>(term.head)->on(rank);
      if (!std::holds_alternative<JsdSpec>(term.loss)) term.teacher_head = nullptr;
      if (term.teacher_head != nullptr) term.teacher_head = &static_cast<GroupHead*>(term.teacher_head)->on(rank);
    }
    micro_batch_.terms = terms_;
  }
  RankMicroBatch(const RankMicroBatch&) = delete;
  RankMicroBatch& operator=(const RankMicroBatch&) = delete;

  // For a rank other than the first: redirects unused outputs. Pages that are not written take no memory. grad_hidden stays with
  // `shared_views` (EngineGroup).
  absl::Status ReplaceOutputs(bool shared_views) {
    for (LossTerm& term : terms_) {
      EachOutput(term, [&]<typename T>(T*& output) {
        if (output != nullptr) output = scratch_.Take<T>(term.row_count);
      });
    }
    MutableRowsView& out = micro_batch_.grad_hidden;
    if (out.data != nullptr && !shared_views) {
      out.memory = MemorySpace::kHost;
      out.data = scratch_.Take<char>(out.row_count * out.column_count * ElementBytes(out.data_type));
    }
    return scratch_.status();
  }

  MicroBatch& operator*() { return micro_batch_; }
  MicroBatch* operator->() { return &micro_batch_; }

 private:
  MicroBatch micro_batch_;
  std::vector<LossTerm> terms_;
  CallMemory scratch_;
};

std::vector<GroupHead*> TargetsOf(const MicroBatch& micro_batch) {
  std::vector<GroupHead*> heads;
  for (const LossTerm& term : micro_batch.terms) {
    auto* const head = static_cast<GroupHead*>(term.head);
    if (head->spec().trainable && std::find(heads.begin(), heads.end(), head) == heads.end()) heads.push_back(head);
  }
  return heads;
}

std::vector<StagingSlot> TakeSlotsOf(const MicroBatch& micro_batch) {
  std::vector<StagingSlot> slots;
  for (GroupHead* head : TargetsOf(micro_batch)) slots.emplace_back(head);
  return slots;
}

// Takes slots on one rank; false, with no slot taken, if a head has none left there.
bool TakeSlotsOn(size_t rank, const std::vector<GroupHead*>& targets, std::vector<StagingSlot>* slots) {
  for (GroupHead* head : targets) {
    slots->push_back(head->TakeSlotOn(rank));
    if (slots->back().taken()) continue;
    slots->clear();
    return false;
  }
  return true;
}

absl::Status StagingFull(const std::vector<GroupHead*>& targets) {
  const std::string count = absl::StrCat(targets.front()->spec().staging_slots);
  return MakeError(ErrorReason::kStagingFull, absl::StrCat("all ", count, " staging slots of the head are taken on every rank"),
                   {{"stagingSlots", count}});
}

}  // namespace

GroupEngine::GroupEngine(std::string name, EngineOptions options)
    : name_(std::move(name)), options_(std::move(options)), core_(std::make_shared<GroupCore>()) {}

void GroupEngine::Form(std::vector<Rank> ranks) {
  loads_ = std::make_unique<RankLoads>(ranks.size());
  core_->Form(std::move(ranks));
}

std::vector<EngineDevice> GroupEngine::devices() const {
  std::vector<EngineDevice> devices;
  for (size_t rank = 0; rank < core_->size(); ++rank) devices.push_back(core_->engine(rank).devices().front());
  return devices;
}

int64_t GroupEngine::progress() const {
  int64_t sum = 0;
  for (size_t rank = 0; rank < core_->size(); ++rank) sum += core_->engine(rank).progress();
  return sum;
}

std::vector<RankTimes> GroupEngine::rank_times() const {
  std::vector<RankTimes> times;
  for (size_t rank = 0; rank < core_->size(); ++rank) times.push_back(core_->rank(rank).times());
  return times;
}

absl::StatusOr<MemoryPlan> GroupEngine::PlanOnAll(const HeadSpec& spec) const {
  std::vector<MemoryPlan> plans(core_->size());
  HEADWATER_RETURN_IF_ERROR(core_->OnAll([&](size_t rank) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(plans[rank], core_->engine(rank).PlanHead(spec));
    return absl::OkStatus();
  }));
  MemoryPlan total = plans.front();
  for (size_t rank = 1; rank < plans.size(); ++rank) {
    for (size_t item = 0; item < total.items.size() && item < plans[rank].items.size(); ++item) {
      total.items[item].bytes = SaturatingAdd(total.items[item].bytes, plans[rank].items[item].bytes);
    }
    total.total_bytes = SaturatingAdd(total.total_bytes, plans[rank].total_bytes);
  }
  return total;
}

absl::StatusOr<MemoryPlan> GroupEngine::PlanHead(const HeadSpec& spec) const {
  HEADWATER_RETURN_IF_ERROR(ValidateHeadSpec(spec));
  const GroupCore::Turn turn(*core_);
  HEADWATER_RETURN_IF_ERROR(turn.status());
  return PlanOnAll(spec);
}

absl::StatusOr<std::unique_ptr<EngineHead>> GroupEngine::DoCreateHead(const HeadSpec& spec) {
  HEADWATER_RETURN_IF_ERROR(ValidateHeadSpec(spec));
  const GroupCore::Turn turn(*core_);
  HEADWATER_RETURN_IF_ERROR(turn.status());
  HEADWATER_ASSIGN_OR_RETURN(MemoryPlan plan, PlanOnAll(spec));
  // A rank may lack memory that others have: then all destroy their heads.
  std::vector<absl::Status> created(core_->size());
  std::vector<std::unique_ptr<EngineHead>> heads(core_->size());
  const absl::Status status = core_->OnAll([&](size_t rank) {
    absl::StatusOr<std::unique_ptr<EngineHead>> head = core_->engine(rank).CreateHead(spec);
    created[rank] = head.status();
    if (head.ok()) heads[rank] = *std::move(head);
    return HasReason(created[rank], ErrorReason::kEngineFailed) ? created[rank] : absl::OkStatus();
  });
  const auto refused = std::find_if(created.begin(), created.end(), [](const absl::Status& one) { return !one.ok(); });
  if (!status.ok() || refused != created.end()) {
    core_->Release(std::move(heads));
    if (!status.ok()) return status;
    return MakeError(GetErrorReason(*refused),
                     absl::StrCat("rank ", refused - created.begin(), ": ", std::string(refused->message())),
                     GetErrorMetadata(*refused));
  }
  core_->planned_bytes += plan.total_bytes;  // given back by the head's destructor
  return std::make_unique<GroupHead>(core_, spec, std::move(plan),
                                     SplitVocab(spec.vocab_size, options_.shard_count, options_.shard_weights),
                                     core_->engine(0).devices().front().name, std::move(heads));
}

absl::StatusOr<MicroBatchResult> GroupEngine::DoCompute(const MicroBatch& micro_batch) {
  HEADWATER_RETURN_IF_ERROR(CheckHeads(micro_batch, [this](const EngineHead& head) {
    const auto* own = dynamic_cast<const GroupHead*>(&head);
    return own != nullptr && &own->core() == core_.get();
  }));
  // All refusals happen here: the ranks never start a call that one of them refuses.
  HEADWATER_RETURN_IF_ERROR(CheckMicroBatch(micro_batch, /*has_device=*/false));
  if (name_ != "cpu") {
    HEADWATER_RETURN_IF_ERROR(RefuseTopK(micro_batch, "a group of GPUs"));
    HEADWATER_RETURN_IF_ERROR(RefuseResolution(micro_batch, [](const LossTerm& term) {
      return term.head->spec().parallelism == Parallelism::kVocabulary ? "a head on several GPUs" : nullptr;
    }));
  }
  HEADWATER_ASSIGN_OR_RETURN(const Parallelism parallelism, ParallelismOf(micro_batch));
  if (parallelism == Parallelism::kRows) return ComputeWhole(micro_batch);
  int64_t rows_here = 0;
  if (micro_batch.flow != nullptr && name_ == "cpu") {
    // There is no copying to hide behind products, and other calls need not wait for these rows.
    HEADWATER_RETURN_IF_ERROR(micro_batch.flow->AwaitRows(micro_batch.hidden.row_count));
    rows_here = micro_batch.hidden.row_count;
  }
  const GroupCore::Turn turn(*core_);
  HEADWATER_RETURN_IF_ERROR(turn.status());
  std::optional<GroupFlow> flow;
  if (micro_batch.flow != nullptr) flow.emplace(*micro_batch.flow, rows_here);
  MicroBatchResult first;
  std::vector<std::unique_ptr<StagedContribution>> staged(core_->size());
  const absl::Status status = core_->OnAll(
      [&](size_t rank) -> absl::Status {
        const Rank& on = core_->rank(rank);
        RankMicroBatch call(micro_batch, rank);
        std::optional<GroupFlow::Follower> follower;
        if (flow.has_value()) call->flow = rank == 0 ? static_cast<RowFlow*>(&*flow) : &follower.emplace(*flow);
        if (rank > 0) {
          call->digest_rows = false;
          if (!on.is_remote) HEADWATER_RETURN_IF_ERROR(call.ReplaceOutputs(on.engine->options().group.shared_views));
        }
        absl::StatusOr<MicroBatchResult> result = on.engine->Compute(*call);
        // The others wait in the flow for the first rank, whatever its result.
        const absl::Status without_a_word = absl::InternalError("the first rank has ended without a word");
        if (rank == 0 && flow.has_value()) flow->End(result.ok() ? without_a_word : result.status());
        if (!result.ok()) return result.status();
        staged[rank] = std::move(result->staged);
        if (rank == 0) first = *std::move(result);
        return absl::OkStatus();
      },
      /*first_may_refuse=*/true);
  if (!status.ok()) {
    core_->Release(std::move(staged));  // other ranks may have staged parts
    return status;
  }
  if (staged.front() != nullptr) {
    first.staged = std::make_unique<GroupContribution>(core_, std::nullopt, std::move(staged), TakeSlotsOf(micro_batch));
  }
  return first;
}

absl::StatusOr<MicroBatchResult> GroupEngine::ComputeWhole(const MicroBatch& micro_batch) {
  const int64_t row_count = micro_batch.hidden.row_count;
  const std::vector<GroupHead*> targets = TargetsOf(micro_batch);
  std::optional<size_t> rank;
  const absl::Cleanup give_back = [&] {
    if (rank.has_value()) loads_->Return(*rank, row_count);
  };
  std::vector<StagingSlot> slots;
  if (micro_batch.grad_weight == GradWeightMode::kStage && !targets.empty()) {
    rank = loads_->Give(row_count, [&](size_t one) { return TakeSlotsOn(one, targets, &slots); });
    if (!rank.has_value()) return StagingFull(targets);
  }
  // Before a rank is chosen: other calls need not wait for these rows.
  DigestBuilder rows;
  std::optional<GroupFlow> flow;
  if (micro_batch.flow != nullptr) {
    HEADWATER_RETURN_IF_ERROR(micro_batch.flow->AwaitRows(row_count));
    if (micro_batch.digest_rows) HEADWATER_RETURN_IF_ERROR(DoDigestRows(StreamsOf(micro_batch), nullptr, &rows));
    flow.emplace(*micro_batch.flow, row_count, micro_batch.digest_rows ? &rows : nullptr);
  }
  if (!rank.has_value()) rank = loads_->Give(row_count, [](size_t) { return true; });
  RankMicroBatch call(micro_batch, *rank);
  call->flow = flow.has_value() ? &*flow : nullptr;
  call->digest_rows = false;
  absl::StatusOr<MicroBatchResult> result = MicroBatchResult();
  absl::Status status;
  {
    GroupCore::RankTurn turn(*core_, *rank);
    HEADWATER_RETURN_IF_ERROR(turn.status());
    if (micro_batch.grad_weight == GradWeightMode::kAccumulate) {
      for (GroupHead* head : targets) head->NoteContribution();
    }
    status = turn.Run([&] {
      result = core_->engine(*rank).Compute(*call);
      return result.status();
    });
  }
  std::vector<std::unique_ptr<StagedContribution>> parts(core_->size());
  if (result.ok()) parts[*rank] = std::move(result->staged);
  if (!status.ok()) {
    core_->Release(std::move(parts));  // parts staged before the group was lost
    return status;
  }
  if (parts[*rank] != nullptr) {
    result->staged = std::make_unique<GroupContribution>(core_, *rank, std::move(parts), std::move(slots));
  }
  return result;
}

absl::StatusOr<std::unique_ptr<HostMemory>> GroupEngine::DoAllocateHostMemory(int64_t bytes) {
  return core_->formed() ? core_->engine(0).AllocateHostMemory(bytes) : LossEngine::DoAllocateHostMemory(bytes);
}

absl::StatusOr<std::unique_ptr<HostMemory>> GroupEngine::DoRegisterHostMemory(void* data, int64_t bytes) {
  return core_->formed() ? core_->engine(0).RegisterHostMemory(data, bytes) : LossEngine::DoRegisterHostMemory(data, bytes);
}

absl::StatusOr<std::unique_ptr<LossEngine>> CreateLocalCudaGroup(const EngineOptions& options) {
  HEADWATER_ASSIGN_OR_RETURN(const std::string id, MakeCudaGroupId());
  auto communicators = MakeInProcessCommunicators(options.shard_count);
  std::vector<EngineOptions> ranks_options;
  for (int32_t rank = 0; rank < options.shard_count; ++rank) {
    EngineOptions& one = ranks_options.emplace_back(OptionsOfRank(options, rank, options.shard_count, id));
    one.group.communicator = std::move(communicators[static_cast<size_t>(rank)]);
    one.group.shared_views = true;
  }
  absl::Mutex mutex;
  EnginesTogether made = MakeEnginesTogether(std::move(ranks_options), nullptr, CreateCudaEngine, {mutex, [] { return false; }});
  HEADWATER_RETURN_IF_ERROR(made.failure.status);
  EngineOptions filled = made.engines.front()->options();
  filled.group = EngineGroup();
  auto group = std::make_unique<GroupEngine>(made.engines.front()->name(), filled);
  std::vector<Rank> ranks;
  for (std::unique_ptr<LossEngine>& engine : made.engines) ranks.push_back(MakeLocalRank(std::move(engine)));
  group->Form(std::move(ranks));
  return std::unique_ptr<LossEngine>(std::move(group));
}

std::vector<VocabShard> PlanShards(const LossEngine& engine, int64_t vocab_size) {
  const std::vector<EngineDevice> devices = engine.devices();
  std::vector<VocabShard> shards;
  for (const RowRange& rows : SplitVocab(vocab_size, engine.options().shard_count, engine.options().shard_weights)) {
    // An engine has a device for each shard, or one for all.
    const size_t device = shards.size() < devices.size() ? shards.size() : 0;
    shards.push_back({rows.start, rows.end, devices.empty() ? "" : devices[device].name});
  }
  return shards;
}

}  // namespace headwater::group
