#include "server/group/group_engine.h"

#include <algorithm>
#include <thread>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/communicator.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "kernels/core/head_base.h"
#include "kernels/core/micro_batch_check.h"
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
      : HeadBase(spec, std::move(plan), std::move(shard_rows), device), core_(std::move(core)), id_(id) {}
  ~GroupHead() override {
    core_->planned_bytes -= plan().total_bytes;
    core_->Release({}, {id_});
  }

  uint64_t id() const { return id_; }
  const GroupCore& core() const { return *core_; }

  absl::Status ReadTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const override {
    HEADWATER_RETURN_IF_ERROR(CheckRange(tensor, element_start, element_count));
    const int64_t element_bytes = ElementBytes(TensorDataType(tensor));
    return InTurn([&](size_t rank) {
      const Piece piece = PieceOf(static_cast<int32_t>(rank), tensor, element_start, element_count);
      if (piece.count == 0) return absl::OkStatus();
      return core_->rank(rank).ReadTensor(id_, tensor, element_start + piece.offset, piece.count,
                                          static_cast<char*>(out) + piece.offset * element_bytes);
    });
  }

  absl::Status WriteTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in) override {
    HEADWATER_RETURN_IF_ERROR(CheckRange(tensor, element_start, element_count));
    const int64_t element_bytes = ElementBytes(TensorDataType(tensor));
    return InTurn([&](size_t rank) {
      const Piece piece = PieceOf(static_cast<int32_t>(rank), tensor, element_start, element_count);
      return core_->rank(rank).WriteTensor(id_, tensor, element_start + piece.offset, piece.count,
                                           static_cast<const char*>(in) + piece.offset * element_bytes);
    });
  }

  absl::Status ZeroGradient() override {
    return InTurn([&](size_t rank) { return core_->rank(rank).ZeroGradient(id_); });
  }

  absl::Status AddToGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, double factor,
                             const float* in) override {
    float alpha = 0;
    HEADWATER_RETURN_IF_ERROR(CheckAddToGradient(tensor, element_start, element_count, factor, &alpha));
    return InTurn([&](size_t rank) {
      const Piece piece = PieceOf(static_cast<int32_t>(rank), tensor, element_start, element_count);
      return core_->rank(rank).AddToGradient(id_, tensor, element_start + piece.offset, piece.count, factor, in + piece.offset);
    });
  }

  absl::Status ResetOptimizerState() override {
    return InTurn([&](size_t rank) { return core_->rank(rank).ResetOptimizerState(id_); });
  }

  absl::StatusOr<GradientStats> ComputeGradientStats() const override {
    std::vector<GradientStats> parts(shard_rows().size());
    HEADWATER_RETURN_IF_ERROR(InTurn([&](size_t rank) {
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
    return InTurn([&](size_t rank) { return core_->rank(rank).ApplyOptimizer(id_, step); });
  }

 private:
  absl::Status InTurn(RankThreads::Program program) const {
    const GroupCore::Turn turn(*core_);
    return turn.status().ok() ? core_->OnAll(program) : turn.status();
  }

  const std::shared_ptr<GroupCore> core_;
  const uint64_t id_;
};

class GroupContribution final : public StagedContribution {
 public:
  GroupContribution(std::shared_ptr<GroupCore> core, uint64_t id, std::vector<StagingSlot> slots)
      : core_(std::move(core)), id_(id), slots_(std::move(slots)) {}
  ~GroupContribution() override {
    if (!committed_) core_->Release({id_}, {});
  }

  absl::Status Commit(double factor) override {
    if (committed_) return MakeError(ErrorReason::kInternal, "the contribution was committed before");
    float alpha = 0;
    HEADWATER_RETURN_IF_ERROR(ToFactor(factor, &alpha));
    const GroupCore::Turn turn(*core_);
    HEADWATER_RETURN_IF_ERROR(turn.status());
    absl::Status status = core_->OnAll([&](size_t rank) { return core_->rank(rank).Commit(id_, factor); });
    if (HasReason(status, ErrorReason::kShardNotReady)) return status;
    committed_ = true;
    slots_.clear();
    return status;
  }

 private:
  const std::shared_ptr<GroupCore> core_;
  const uint64_t id_;
  std::vector<StagingSlot> slots_;
  bool committed_ = false;
};

uint64_t IdOf(const EngineHead* head) { return head == nullptr ? 0 : static_cast<const GroupHead*>(head)->id(); }

// A slot of each head that a contribution has a part for.
std::vector<StagingSlot> TakeSlotsOf(const MicroBatch& micro_batch) {
  std::vector<StagingSlot> slots;
  for (const LossTerm& term : micro_batch.terms) {
    auto* const head = static_cast<GroupHead*>(term.head);
    const auto has = [head](const StagingSlot& slot) { return slot.head() == head; };
    if (head->spec().trainable && std::none_of(slots.begin(), slots.end(), has)) slots.emplace_back(head);
  }
  return slots;
}

}  // namespace

GroupEngine::GroupEngine(std::string name, EngineOptions options, bool shared_budget)
    : name_(std::move(name)), options_(std::move(options)), shared_budget_(shared_budget), core_(std::make_shared<GroupCore>()) {}

GroupEngine::~GroupEngine() = default;

void GroupEngine::Form(std::vector<std::unique_ptr<Rank>> ranks) { core_->Form(std::move(ranks)); }

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
  std::vector<TermHeads> heads;
  for (const LossTerm& term : micro_batch.terms) {
    const bool jsd = std::holds_alternative<JsdSpec>(term.loss);
    heads.push_back({IdOf(term.head), jsd ? IdOf(term.teacher_head) : 0});
  }
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
    if (rank == 0 && flow != nullptr) flow->End(result.status());
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
    result.staged = std::make_unique<GroupContribution>(core_, contribution, TakeSlotsOf(micro_batch));
  }
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
  const int32_t threads =
      options.thread_count > 0 ? options.thread_count : static_cast<int32_t>(std::thread::hardware_concurrency());
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
