// LocalRank: a rank on an engine of this process.
#ifndef HEADWATER_SERVER_GROUP_LOCAL_RANK_H_
#define HEADWATER_SERVER_GROUP_LOCAL_RANK_H_

#include <map>
#include <memory>
#include <vector>

#include "server/group/rank.h"
#include "server/observability/busy_clock.h"

namespace headwater::group {

class LocalRank final : public Rank {
 public:
  // `engine` was made with EngineOptions::group.
  explicit LocalRank(std::unique_ptr<LossEngine> engine) : engine_(std::move(engine)) {}

  LossEngine& engine() { return *engine_; }
  // Null for an id that is not there.
  EngineHead* FindHead(uint64_t head) const;

  EngineDevice device() const override { return engine_->devices().front(); }
  LossEngine* local_engine() override { return engine_.get(); }
  absl::Status health() override { return engine_->health(); }
  void Abort(const absl::Status& reason) override;
  int64_t progress() const override { return engine_->progress(); }
  // What waits on a device is computing here: of engines whose ranks meet by the communicator alone.
  RankTimes times() const override;
  absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec) override { return engine_->PlanHead(spec); }
  absl::Status CreateHead(uint64_t head, const HeadSpec& spec) override;
  absl::Status Release(absl::Span<const uint64_t> contributions, absl::Span<const uint64_t> heads) override;
  absl::Status ReadTensor(uint64_t head, HeadTensor tensor, int64_t start, int64_t count, void* out) override;
  absl::Status WriteTensor(uint64_t head, HeadTensor tensor, int64_t start, int64_t count, const void* in) override;
  absl::Status ZeroGradient(uint64_t head) override;
  absl::Status AddToGradient(uint64_t head, HeadTensor tensor, int64_t start, int64_t count, double factor,
                             const float* in) override;
  absl::Status ReduceGradient(uint64_t head) override;
  absl::Status ResetOptimizerState(uint64_t head) override;
  absl::StatusOr<GradientStats> ComputeGradientStats(uint64_t head) override;
  absl::Status ApplyOptimizer(uint64_t head, const OptimizerStep& step) override;
  // The first rank writes to the call's outputs, and its flow is the micro-batch's; others write to memory of their own, or, of
  // grad_hidden, their part (EngineGroup::shared_views).
  absl::StatusOr<RankResult> Compute(const RankCall& call) override;
  absl::StatusOr<RankResult> ComputeWhole(const RankCall& call) override;
  absl::Status Commit(uint64_t contribution, double factor) override;

 private:
  // The terms with this rank's heads.
  std::vector<LossTerm> TermsOf(const RankCall& call) const;
  // Computes, and keeps what is staged.
  absl::StatusOr<RankResult> Run(MicroBatch micro_batch, uint64_t contribution);

  const std::unique_ptr<LossEngine> engine_;
  observability::BusyClock calls_;
  observability::BusyClock flow_waits_;  // of those, in the flow
  std::map<uint64_t, std::unique_ptr<EngineHead>> heads_;
  std::map<uint64_t, std::unique_ptr<StagedContribution>> contributions_;  // go before the heads
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_LOCAL_RANK_H_
