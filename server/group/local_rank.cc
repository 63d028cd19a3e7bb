#include "server/group/local_rank.h"

#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "headwater/kernels/communicator.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/group/call_memory.h"
#include "server/group/rank_follower.h"

namespace headwater::group {
namespace {

absl::Status NoSuchHead(uint64_t head) {
  return MakeError(ErrorReason::kEngineFailed, "the rank has no head " + std::to_string(head));
}

// Measures how long the engine waits in a flow.
class MeasuredFlow final : public RowFlow {
 public:
  MeasuredFlow(RowFlow& flow, observability::BusyClock& clock) : flow_(flow), clock_(clock) {}
  absl::Status AwaitRows(int64_t row_end) override {
    const observability::BusyClock::Work waiting(clock_);
    return flow_.AwaitRows(row_end);
  }
  absl::Status Decide(const DigestBuilder* rows) override {
    const observability::BusyClock::Work waiting(clock_);
    return flow_.Decide(rows);
  }
  void GradHiddenReady(int64_t row_end) override { flow_.GradHiddenReady(row_end); }

 private:
  RowFlow& flow_;
  observability::BusyClock& clock_;
};

}  // namespace

EngineHead* LocalRank::FindHead(uint64_t head) const {
  const auto found = heads_.find(head);
  return found == heads_.end() ? nullptr : found->second.get();
}

void LocalRank::Abort(const absl::Status& reason) {
  if (const auto& communicator = engine_->options().group.communicator; communicator != nullptr) communicator->Abort(reason);
}

RankTimes LocalRank::times() const {
  RankTimes times;
  times.waiting = flow_waits_.total();
  if (const auto& communicator = engine_->options().group.communicator; communicator != nullptr) {
    const CommunicatorTimes collectives = communicator->times();
    times.waiting += absl::FromChrono(collectives.waiting);
    times.communicating = absl::FromChrono(collectives.communicating);
  }
  // Looked at last, so that it is never less than its parts.
  times.computing = calls_.total() - times.waiting - times.communicating;
  return times;
}

absl::Status LocalRank::CreateHead(uint64_t head, const HeadSpec& spec) {
  absl::StatusOr<std::unique_ptr<EngineHead>> created = engine_->CreateHead(spec);
  if (!created.ok()) return created.status();
  heads_[head] = *std::move(created);
  return absl::OkStatus();
}

absl::Status LocalRank::Release(absl::Span<const uint64_t> contributions, absl::Span<const uint64_t> heads) {
  for (const uint64_t id : contributions) contributions_.erase(id);
  for (const uint64_t id : heads) heads_.erase(id);
  return absl::OkStatus();
}

absl::Status LocalRank::ReadTensor(uint64_t head, HeadTensor tensor, int64_t start, int64_t count, void* out) {
  const observability::BusyClock::Work call(calls_);
  EngineHead* const found = FindHead(head);
  return found == nullptr ? NoSuchHead(head) : found->ReadTensor(tensor, start, count, out);
}

absl::Status LocalRank::WriteTensor(uint64_t head, HeadTensor tensor, int64_t start, int64_t count, const void* in) {
  const observability::BusyClock::Work call(calls_);
  EngineHead* const found = FindHead(head);
  return found == nullptr ? NoSuchHead(head) : found->WriteTensor(tensor, start, count, in);
}

absl::Status LocalRank::ZeroGradient(uint64_t head) {
  const observability::BusyClock::Work call(calls_);
  EngineHead* const found = FindHead(head);
  return found == nullptr ? NoSuchHead(head) : found->ZeroGradient();
}

absl::Status LocalRank::AddToGradient(uint64_t head, HeadTensor tensor, int64_t start, int64_t count, double factor,
                                      const float* in) {
  const observability::BusyClock::Work call(calls_);
  EngineHead* const found = FindHead(head);
  return found == nullptr ? NoSuchHead(head) : found->AddToGradient(tensor, start, count, factor, in);
}

absl::Status LocalRank::ReduceGradient(uint64_t head) {
  const observability::BusyClock::Work call(calls_);
  EngineHead* const found = FindHead(head);
  return found == nullptr ? NoSuchHead(head) : found->ReduceGradient();
}

absl::Status LocalRank::ResetOptimizerState(uint64_t head) {
  const observability::BusyClock::Work call(calls_);
  EngineHead* const found = FindHead(head);
  return found == nullptr ? NoSuchHead(head) : found->ResetOptimizerState();
}

absl::StatusOr<GradientStats> LocalRank::ComputeGradientStats(uint64_t head) {
  const observability::BusyClock::Work call(calls_);
  EngineHead* const found = FindHead(head);
  if (found == nullptr) return NoSuchHead(head);
  return found->ComputeGradientStats();
}

absl::Status LocalRank::ApplyOptimizer(uint64_t head, const OptimizerStep& step) {
  const observability::BusyClock::Work call(calls_);
  EngineHead* const found = FindHead(head);
  return found == nullptr ? NoSuchHead(head) : found->ApplyOptimizer(step);
}

std::vector<LossTerm> LocalRank::TermsOf(const RankCall& call) const {
  std::vector<LossTerm> terms(call.micro_batch.terms.begin(), call.micro_batch.terms.end());
  for (size_t i = 0; i < terms.size(); ++i) {
    terms[i].head = FindHead(call.heads[i].head);
    terms[i].teacher_head = FindHead(call.heads[i].teacher);
  }
  return terms;
}

absl::StatusOr<RankResult> LocalRank::Run(MicroBatch micro_batch, uint64_t contribution) {
  const observability::BusyClock::Work work(calls_);
  std::optional<MeasuredFlow> measured;
  if (micro_batch.flow != nullptr) micro_batch.flow = &measured.emplace(*micro_batch.flow, flow_waits_);
  absl::StatusOr<MicroBatchResult> result = engine_->Compute(micro_batch);
  if (!result.ok()) return result.status();
  RankResult summary;
  summary.terms = std::move(result->terms);
  summary.staged = result->staged != nullptr;
  if (summary.staged) contributions_[contribution] = std::move(result->staged);
  return summary;
}

absl::StatusOr<RankResult> LocalRank::ComputeWhole(const RankCall& call) {
  MicroBatch micro_batch = call.micro_batch;
  const std::vector<LossTerm> terms = TermsOf(call);
  micro_batch.terms = terms;
  return Run(micro_batch, call.contribution);
}

absl::StatusOr<RankResult> LocalRank::Compute(const RankCall& call) {
  const EngineGroup& group = engine_->options().group;
  MicroBatch micro_batch = call.micro_batch;
  std::vector<LossTerm> terms = TermsOf(call);
  CallMemory scratch;  // outputs that nobody looks at; pages that are not written take none
  const auto replace = [&scratch](int64_t count, auto** output) {
    using Value = std::remove_pointer_t<std::remove_pointer_t<decltype(output)>>;
    if (*output != nullptr) *output = static_cast<Value*>(scratch.Take(count * static_cast<int64_t>(sizeof(Value))));
  };
  std::unique_ptr<Follower> follower;
  if (group.rank > 0) {
    for (LossTerm& term : terms) {
      replace(term.row_count, &term.token_loss);
      replace(term.row_count, &term.lse);
      replace(term.row_count, &term.target_log_probability);
      replace(term.row_count, &term.entropy);
      replace(term.row_count, &term.argmax);
      replace(term.row_count, &term.mean_logits);
      replace(term.row_count, &term.log_sum_sq_probs);
    }
    MutableRowsView& out = micro_batch.grad_hidden;
    if (out.data != nullptr && !group.shared_views) {
      out.memory = MemorySpace::kHost;
      out.data = scratch.Take(out.row_count * out.column_count * ElementBytes(out.data_type));
    }
    HEADWATER_RETURN_IF_ERROR(scratch.status());
    micro_batch.digest_rows = false;
    if (call.flow != nullptr) micro_batch.flow = (follower = std::make_unique<Follower>(*call.flow)).get();
  }
  micro_batch.terms = terms;
  return Run(micro_batch, call.contribution);
}

absl::Status LocalRank::Commit(uint64_t contribution, double factor) {
  const observability::BusyClock::Work call(calls_);
  const auto found = contributions_.find(contribution);
  if (found == contributions_.end()) {
    return MakeError(ErrorReason::kEngineFailed, "the rank has no contribution " + std::to_string(contribution));
  }
  absl::Status status = found->second->Commit(factor);
  if (!HasReason(status, ErrorReason::kShardNotReady)) contributions_.erase(found);
  return status;
}

}  // namespace headwater::group
