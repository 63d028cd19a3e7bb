#include "server/group/group_engine.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/communicator.h"
#include "headwater/kernels/digest.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/machine_limits.h"
#include "headwater/kernels/return_if_error.h"
#include "kernels/core/head_base.h"
#include "kernels/core/head_tensors.h"
#include "kernels/core/micro_batch_check.h"
#include "kernels/core/micro_batch_plan.h"
#include "kernels/core/optimizer_step.h"
#include "kernels/core/saturating.h"
#include "kernels/core/shard_layout.h"
#include "server/group/group_flow.h"
#include "server/group/local_rank.h"

namespace headwater::group {
namespace {

class GroupHead final : public HeadBase {
 public:
  GroupHead(std::shared_ptr<GroupCore> core, uint64_t id, const HeadSpec& spec, MemoryPlan plan, std::vector<RowRange> shard_rows,
            const std::string& device)
      : HeadBase(spec, std::move(plan), std::move(shard_rows), device, SlotsOf(spec, core->size())),
        core_(std::move(core)),
        id_(id) {}
  ~GroupHead() override {
    core_->planned_bytes -= plan().total_bytes;
    core_->Release({}, {id_});
  }

  uint64_t id() const { return id_; }
  const GroupCore& core() const { return *core_; }
  // Each rank has all of it, and staging slots of its own.
  bool is_replicated() const { return spec().parallelism == Parallelism::kRows; }
  // A slot on one rank, if one is free there; of a head that is replicated.
  StagingSlot TakeSlotOn(size_t rank) {
    const int32_t first = static_cast<int32_t>(rank) * spec().staging_slots;
    return StagingSlot(this, first, first + spec().staging_slots);
  }
  // Something is added on one rank: the ranks' gradients are to be summed up again. In a turn.
  void NoteContribution() { is_reduced_.store(false); }

  bool StagesConcurrently() const override { return is_replicated(); }

  absl::Status ReadTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const override {
    HEADWATER_RETURN_IF_ERROR(CheckRange(tensor, element_start, element_count));
    if (is_replicated() && IsStored(tensor)) {
      // The first rank has it too, and is the nearest.
      GroupCore::RankTurn turn(*core_, 0);
      HEADWATER_RETURN_IF_ERROR(turn.status());
      return turn.Run([&](Rank& rank) { return rank.ReadTensor(id_, tensor, element_start, element_count, out); });
    }
    const int64_t element_bytes = ElementBytes(TensorDataType(tensor));
    return InTurn(IsGradient(tensor), [&](size_t rank) {
      const Piece piece = PieceOf(static_cast<int32_t>(rank), tensor, element_start, element_count);
      if (piece.count == 0) return absl::OkStatus();
      return core_->rank(rank).ReadTensor(id_, tensor, element_start + piece.offset, piece.count,
                                          static_cast<char*>(out) + piece.offset * element_bytes);
    });
  }

  absl::Status WriteTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in) override {
    HEADWATER_RETURN_IF_ERROR(CheckRange(tensor, element_start, element_count));
    const int64_t element_bytes = ElementBytes(TensorDataType(tensor));
    const bool to_all = is_replicated() && (IsStored(tensor) || IsMaster(tensor) || IsGradient(tensor));
    return InTurn(kAsItIs, [&](size_t rank) {
      const Piece piece = to_all ? Piece{element_start, element_count, 0}
                                 : PieceOf(static_cast<int32_t>(rank), tensor, element_start, element_count);
      return core_->rank(rank).WriteTensor(id_, tensor, element_start + piece.offset, piece.count,
                                           static_cast<const char*>(in) + piece.offset * element_bytes);
    });
  }

  absl::Status ZeroGradient() override {
    return InTurn(kAsItIs, [&](size_t rank) { return core_->rank(rank).ZeroGradient(id_); });
  }

  absl::Status ReduceGradient() override {
    return InTurn(kReduced, [](size_t) { return absl::OkStatus(); });
  }

  absl::Status AddToGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, double factor,
                             const float* in) override {
    float alpha = 0;
    HEADWATER_RETURN_IF_ERROR(CheckAddToGradient(tensor, element_start, element_count, factor, &alpha));
    return InTurn(kAsItIs, [&](size_t rank) {
      const Piece piece = PieceOf(static_cast<int32_t>(rank), tensor, element_start, element_count);
      return core_->rank(rank).AddToGradient(id_, tensor, element_start + piece.offset, piece.count, factor, in + piece.offset);
    });
  }

  absl::Status ResetOptimizerState() override {
    return InTurn(kAsItIs, [&](size_t rank) { return core_->rank(rank).ResetOptimizerState(id_); });
  }

  absl::StatusOr<GradientStats> ComputeGradientStats() const override {
    std::vector<GradientStats> parts(shard_rows().size());
    HEADWATER_RETURN_IF_ERROR(InTurn(kReduced, [&](size_t rank) {
      absl::StatusOr<GradientStats> part = core_->rank(rank).ComputeGradientStats(id_);
      if (part.ok()) parts[rank] = *part;
      return part.status();
    }));
    GradientStats total;
    for (const GradientStats& part : parts) {
      total.norm_squared += part.norm_squared;
      total.non_finite_count += part.non_finite_count;
    }
    return total;
  }

  absl::Status ApplyOptimizer(const OptimizerStep& step) override {
    HEADWATER_RETURN_IF_ERROR(CheckOptimizerStep(spec(), step));
    return InTurn(kReduced, [&](size_t rank) { return core_->rank(rank).ApplyOptimizer(id_, step); });
  }

 private:
  // Whether a call wants the gradient to be summed up before.
  static constexpr bool kAsItIs = false;
  static constexpr bool kReduced = true;

  static int32_t SlotsOf(const HeadSpec& spec, size_t ranks) {
    return spec.parallelism == Parallelism::kRows ? spec.staging_slots * static_cast<int32_t>(ranks) : spec.staging_slots;
  }
  static bool IsGradient(HeadTensor tensor) { return tensor == HeadTensor::kGradWeight || tensor == HeadTensor::kGradBias; }
  // What is stored for computing, under whatever name.
  bool IsStored(HeadTensor tensor) const {
    return tensor == HeadTensor::kWeight || tensor == HeadTensor::kBias || (IsMaster(tensor) && !HasSeparateMaster(spec()));
  }

  absl::Status InTurn(bool reduced, RankThreads::Program program) const {
    const GroupCore::Turn turn(*core_);
    HEADWATER_RETURN_IF_ERROR(turn.status());
    if (reduced && is_replicated() && !is_reduced_.load()) {
      HEADWATER_RETURN_IF_ERROR(core_->OnAll([&](size_t rank) { return core_->rank(rank).ReduceGradient(id_); }));
      is_reduced_.store(true);
    }
    return core_->OnAll(program);
  }

  const std::shared_ptr<GroupCore> core_;
  const uint64_t id_;
  mutable std::atomic<bool> is_reduced_{true};  // each rank's shard of the gradient is the sum; the rest is 0
};

class GroupContribution final : public StagedContribution {
 public:
  // `rank`: which has it; none: all.
  GroupContribution(std::shared_ptr<GroupCore> core, std::optional<size_t> rank, uint64_t id, std::vector<StagingSlot> slots)
      : core_(std::move(core)), rank_(rank), id_(id), slots_(std::move(slots)) {}
  ~GroupContribution() override {
    if (!committed_) core_->Release({id_}, {});
  }

  absl::Status Commit(double factor) override {
    if (committed_) return MakeError(ErrorReason::kInternal, "the contribution was committed before");
    float alpha = 0;
    HEADWATER_RETURN_IF_ERROR(ToFactor(factor, &alpha));
    absl::Status status = rank_.has_value() ? CommitOnRank(factor) : CommitOnAll(factor);
    if (HasReason(status, ErrorReason::kShardNotReady)) return status;
    committed_ = true;
    slots_.clear();
    return status;
  }

 private:
  absl::Status CommitOnAll(double factor) {
    const GroupCore::Turn turn(*core_);
    HEADWATER_RETURN_IF_ERROR(turn.status());
    return core_->OnAll([&](size_t rank) { return core_->rank(rank).Commit(id_, factor); });
  }

  absl::Status CommitOnRank(double factor) {
    GroupCore::RankTurn turn(*core_, *rank_);
    HEADWATER_RETURN_IF_ERROR(turn.status());
    for (const StagingSlot& slot : slots_) static_cast<GroupHead*>(slot.head())->NoteContribution();
    return turn.Run([&](Rank& rank) { return rank.Commit(id_, factor); });
  }

  const std::shared_ptr<GroupCore> core_;
  const std::optional<size_t> rank_;
  const uint64_t id_;
  std::vector<StagingSlot> slots_;
  bool committed_ = false;
};

uint64_t IdOf(const EngineHead* head) { return head == nullptr ? 0 : static_cast<const GroupHead*>(head)->id(); }

// The trainable heads of a micro-batch.
std::vector<GroupHead*> TargetsOf(const MicroBatch& micro_batch) {
  std::vector<GroupHead*> heads;
  for (const LossTerm& term : micro_batch.terms) {
    auto* const head = static_cast<GroupHead*>(term.head);
    if (head->spec().trainable && std::find(heads.begin(), heads.end(), head) == heads.end()) heads.push_back(head);
  }
  return heads;
}

// A slot of each head that a contribution has a part for.
std::vector<StagingSlot> TakeSlotsOf(const MicroBatch& micro_batch) {
  std::vector<StagingSlot> slots;
  for (GroupHead* head : TargetsOf(micro_batch)) slots.emplace_back(head);
  return slots;
}

// The same on one rank; false, and none taken, if one of the heads has none left there.
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

// The caller's flow, all of whose rows have been awaited, as one rank sees it.
class WholeFlow final : public RowFlow {
 public:
  // `rows`: for Decide(), or null.
  WholeFlow(RowFlow& flow, const DigestBuilder* rows) : flow_(flow), rows_(rows) {}
  absl::Status AwaitRows(int64_t) override { return absl::OkStatus(); }
  absl::Status Decide(const DigestBuilder*) override { return flow_.Decide(rows_); }
  void GradHiddenReady(int64_t row_end) override { flow_.GradHiddenReady(row_end); }

 private:
  RowFlow& flow_;
  const DigestBuilder* const rows_;
};

}  // namespace

GroupEngine::GroupEngine(std::string name, EngineOptions options, bool shared_budget)
    : name_(std::move(name)), options_(std::move(options)), shared_budget_(shared_budget), core_(std::make_shared<GroupCore>()) {}

GroupEngine::~GroupEngine() = default;

void GroupEngine::Form(std::vector<std::unique_ptr<Rank>> ranks) {
  loads_ = std::make_unique<RankLoads>(ranks.size());
  core_->Form(std::move(ranks));
}

std::vector<EngineDevice> GroupEngine::devices() const {
  std::vector<EngineDevice> devices;
  if (!core_->formed()) return devices;
  for (size_t rank = 0; rank < core_->size(); ++rank) {
    devices.push_back(core_->rank(rank).device());
    if (shared_budget_) devices.back().memory_budget_bytes = rank == 0 ? options_.memory_budget_bytes : 0;
  }
  return devices;
}

int64_t GroupEngine::progress() const {
  if (!core_->formed()) return 0;
  int64_t sum = 0;
  for (size_t rank = 0; rank < core_->size(); ++rank) sum += core_->rank(rank).progress();
  return sum;
}

std::vector<RankTimes> GroupEngine::rank_times() const {
  std::vector<RankTimes> times;
  if (!core_->formed()) return times;
  for (size_t rank = 0; rank < core_->size(); ++rank) times.push_back(core_->rank(rank).times());
  return times;
}

absl::StatusOr<MemoryPlan> GroupEngine::PlanOnAll(const HeadSpec& spec) const {
  std::vector<MemoryPlan> plans(core_->size());
  HEADWATER_RETURN_IF_ERROR(core_->OnAll([&](size_t rank) {
    absl::StatusOr<MemoryPlan> plan = core_->rank(rank).PlanHead(spec);
    if (plan.ok()) plans[rank] = *std::move(plan);
    return plan.status();
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

absl::StatusOr<std::unique_ptr<EngineHead>> GroupEngine::CreateHead(const HeadSpec& spec) {
  HEADWATER_RETURN_IF_ERROR(ValidateHeadSpec(spec));
  const GroupCore::Turn turn(*core_);
  HEADWATER_RETURN_IF_ERROR(turn.status());
  absl::StatusOr<MemoryPlan> plan = PlanOnAll(spec);
  if (!plan.ok()) return plan.status();
  if (const int64_t free_bytes = options_.memory_budget_bytes - planned_bytes(); shared_budget_ && plan->total_bytes > free_bytes) {
    return MakeError(ErrorReason::kMemoryBudgetExceeded,
                     absl::StrCat("the head needs ", plan->ToString(), " (", plan->total_bytes, " bytes), and ", free_bytes, " of ",
                                  options_.memory_budget_bytes, " bytes are free"),
                     {{"requestedBytes", absl::StrCat(plan->total_bytes)},
                      {"availableBytes", absl::StrCat(free_bytes)},
                      {"budgetBytes", absl::StrCat(options_.memory_budget_bytes)}});
  }
  // A rank may have no room where others have: then all give back what they have made.
  const uint64_t id = core_->NewId();
  std::vector<absl::Status> created(core_->size());
  HEADWATER_RETURN_IF_ERROR(core_->OnAll([&](size_t rank) {
    created[rank] = core_->rank(rank).CreateHead(id, spec);
    return HasReason(created[rank], ErrorReason::kEngineFailed) ? created[rank] : absl::OkStatus();
  }));
  for (size_t rank = 0; rank < created.size(); ++rank) {
    if (created[rank].ok()) continue;
    core_->Release({}, {id});
    return MakeError(GetErrorReason(created[rank]), absl::StrCat("rank ", rank, ": ", std::string(created[rank].message())),
                     GetErrorMetadata(created[rank]));
  }
  core_->planned_bytes += plan->total_bytes;  // given back by the head's destructor
  return std::make_unique<GroupHead>(core_, id, spec, *std::move(plan),
                                     SplitVocab(spec.vocab_size, options_.shard_count, options_.shard_weights),
                                     core_->rank(0).device().name);
}

absl::StatusOr<MicroBatchResult> GroupEngine::Compute(const MicroBatch& micro_batch) {
  HEADWATER_RETURN_IF_ERROR(CheckHeads(micro_batch, [this](const EngineHead& head) {
    const auto* own = dynamic_cast<const GroupHead*>(&head);
    return own != nullptr && &own->core() == core_.get();
  }));
  // All that could be refused is refused here: the ranks never meet over a call that one of them does not take.
  HEADWATER_RETURN_IF_ERROR(CheckMicroBatch(micro_batch, /*has_device=*/false));
  if (name_ != "cpu") {
    HEADWATER_RETURN_IF_ERROR(RefuseTopK(micro_batch, "a group of GPUs"));
    HEADWATER_RETURN_IF_ERROR(RefuseResolution(micro_batch, [](const LossTerm& term) {
      return term.head->spec().parallelism == Parallelism::kVocabulary ? "a head on several GPUs" : nullptr;
    }));
  }
  std::vector<TermHeads> heads;
  for (const LossTerm& term : micro_batch.terms) {
    const bool jsd = std::holds_alternative<JsdSpec>(term.loss);
    heads.push_back({IdOf(term.head), jsd ? IdOf(term.teacher_head) : 0});
  }
  const absl::StatusOr<Parallelism> parallelism = ParallelismOf(micro_batch);
  if (!parallelism.ok()) return parallelism.status();
  if (*parallelism == Parallelism::kRows) return ComputeWhole(micro_batch, heads);
  int64_t rows_here = 0;
  if (micro_batch.flow != nullptr && name_ == "cpu") {
    // There is no copying that could be hidden under products, and nobody else need wait for these rows.
    HEADWATER_RETURN_IF_ERROR(micro_batch.flow->AwaitRows(micro_batch.hidden.row_count));
    rows_here = micro_batch.hidden.row_count;
  }
  const GroupCore::Turn turn(*core_);
  HEADWATER_RETURN_IF_ERROR(turn.status());
  std::unique_ptr<GroupFlow> flow;
  if (micro_batch.flow != nullptr) flow = std::make_unique<GroupFlow>(*micro_batch.flow, rows_here);
  const uint64_t contribution = core_->NewId();
  std::vector<RankResult> results(core_->size());
  const absl::Status status = core_->OnAllAsFirst([&](size_t rank) {
    RankCall call;
    call.micro_batch = micro_batch;
    call.heads = heads;
    call.contribution = contribution;
    call.flow = flow.get();
    if (flow != nullptr) call.micro_batch.flow = flow.get();
    absl::StatusOr<RankResult> result = core_->rank(rank).Compute(call);
    // The others wait in the flow for the first rank, however that ends.
    const absl::Status without_a_word = absl::InternalError("the first rank has ended without a word");
    if (rank == 0 && flow != nullptr) flow->End(result.ok() ? without_a_word : result.status());
    if (result.ok()) results[rank] = *std::move(result);
    return result.status();
  });
  if (!status.ok()) {
    core_->Release({contribution}, {});  // what other ranks may have staged
    return status;
  }
  MicroBatchResult result;
  result.terms = std::move(results.front().terms);
  if (results.front().staged) {
    result.staged = std::make_unique<GroupContribution>(core_, std::nullopt, contribution, TakeSlotsOf(micro_batch));
  }
  return result;
}

absl::StatusOr<MicroBatchResult> GroupEngine::ComputeWhole(const MicroBatch& micro_batch, const std::vector<TermHeads>& heads) {
  const int64_t row_count = micro_batch.hidden.row_count;
  const std::vector<GroupHead*> targets = TargetsOf(micro_batch);
  std::optional<RankLoads::Share> share;
  std::vector<StagingSlot> slots;
  if (micro_batch.grad_weight == GradWeightMode::kStage && !targets.empty()) {
    loads_->Give(
        row_count, [&](size_t rank) { return TakeSlotsOn(rank, targets, &slots); }, &share);
    if (!share.has_value()) return StagingFull(targets);
  }
  // Before a rank is taken: nobody else need wait for these rows.
  DigestBuilder rows;
  std::optional<WholeFlow> flow;
  if (micro_batch.flow != nullptr) {
    HEADWATER_RETURN_IF_ERROR(micro_batch.flow->AwaitRows(row_count));
    if (micro_batch.digest_rows) HEADWATER_RETURN_IF_ERROR(DigestRows(StreamsOf(micro_batch), nullptr, &rows));
    flow.emplace(*micro_batch.flow, micro_batch.digest_rows ? &rows : nullptr);
  }
  if (!share.has_value())
    loads_->Give(
        row_count, [](size_t) { return true; }, &share);
  RankCall call;
  call.micro_batch = micro_batch;
  call.micro_batch.flow = flow.has_value() ? &*flow : nullptr;
  call.micro_batch.digest_rows = false;
  call.heads = heads;
  call.contribution = core_->NewId();
  MicroBatchResult result;
  bool staged = false;
  absl::Status status;
  {
    GroupCore::RankTurn turn(*core_, share->rank());
    HEADWATER_RETURN_IF_ERROR(turn.status());
    if (micro_batch.grad_weight == GradWeightMode::kAccumulate) {
      for (GroupHead* head : targets) head->NoteContribution();
    }
    status = turn.Run([&](Rank& rank) {
      absl::StatusOr<RankResult> computed = rank.ComputeWhole(call);
      if (!computed.ok()) return computed.status();
      result.terms = std::move(computed->terms);
      staged = computed->staged;
      return absl::OkStatus();
    });
  }
  if (!status.ok()) {
    if (!slots.empty()) core_->Release({call.contribution}, {});  // what may have been staged before the group was lost
    return status;
  }
  if (staged) result.staged = std::make_unique<GroupContribution>(core_, share->rank(), call.contribution, std::move(slots));
  return result;
}

LossEngine* GroupEngine::first_engine() const { return core_->formed() ? core_->rank(0).local_engine() : nullptr; }

absl::StatusOr<std::unique_ptr<HostMemory>> GroupEngine::AllocateHostMemory(int64_t bytes) {
  LossEngine* const engine = first_engine();
  return engine == nullptr ? LossEngine::AllocateHostMemory(bytes) : engine->AllocateHostMemory(bytes);
}

absl::StatusOr<std::unique_ptr<HostMemory>> GroupEngine::RegisterHostMemory(void* data, int64_t bytes) {
  LossEngine* const engine = first_engine();
  return engine == nullptr ? LossEngine::RegisterHostMemory(data, bytes) : engine->RegisterHostMemory(data, bytes);
}

absl::StatusOr<std::unique_ptr<LossEngine>> CreateLocalCpuGroup(const EngineOptions& options) {
  const int32_t world_size = options.shard_count;
  if (world_size < 1) return CreateCpuEngine(options);  // which refuses it
  EngineOptions one = options;
  const int32_t threads = options.thread_count > 0 ? options.thread_count : ComputeThreads();
  if (options.thread_count >= 0) one.thread_count = std::max(1, threads / world_size);
  std::vector<std::unique_ptr<Rank>> ranks;
  auto communicators = MakeInProcessCommunicators(world_size);
  EngineOptions filled;
  for (int32_t rank = 0; rank < world_size; ++rank) {
    one.group.rank = rank;
    one.group.world_size = world_size;
    one.group.communicator = std::move(communicators[static_cast<size_t>(rank)]);
    one.group.shared_views = true;
    absl::StatusOr<std::unique_ptr<LossEngine>> engine = CreateCpuEngine(one);
    if (!engine.ok()) return engine.status();
    if (rank == 0) filled = (*engine)->options();
    ranks.push_back(std::make_unique<LocalRank>(*std::move(engine)));
  }
  filled.group = EngineGroup();
  filled.thread_count = std::max(filled.thread_count * world_size, options.thread_count);
  auto group = std::make_unique<GroupEngine>("cpu", filled, /*shared_budget=*/true);
  group->Form(std::move(ranks));
  return std::unique_ptr<LossEngine>(std::move(group));
}

}  // namespace headwater::group
