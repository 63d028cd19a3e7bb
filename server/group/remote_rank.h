// RemoteRank: a rank in another process, behind the link by which it has joined.
#ifndef HEADWATER_SERVER_GROUP_REMOTE_RANK_H_
#define HEADWATER_SERVER_GROUP_REMOTE_RANK_H_

#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/group/rank.h"
#include "server/group/rank_link.h"

namespace headwater::group {

class RemoteRank final : public Rank {
 public:
  // The worker is ready. It is taken to have hung when nothing has come from it for `silence_timeout`, counted in looks (health())
  // of at most a second each: a leader that was stopped for a while has not heard its workers either. `shares_rows`: those of
  // Compute() come to it by another rank of its process.
  RemoteRank(int32_t rank, EngineDevice device, std::shared_ptr<RankLink> link, absl::Duration silence_timeout, bool shares_rows);

  EngineDevice device() const override { return device_; }
  absl::Status health() override;
  void Abort(const absl::Status& reason) override { link_->Break(reason); }
  int64_t progress() const override { return link_->alive().progress(); }
  RankTimes times() const override;
  absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec) override;
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
  absl::StatusOr<RankResult> Compute(const RankCall& call) override;
  absl::StatusOr<RankResult> ComputeWhole(const RankCall& call) override;
  absl::Status Commit(uint64_t contribution, double factor) override;

 private:
  int64_t ElementBytesOf(uint64_t head, HeadTensor tensor) const;
  // Sends a command and waits for its answer, which is an error if the worker says so.
  absl::StatusOr<v1::RankReply> Ask(const v1::JoinResponse& command);
  absl::Status Tell(const v1::JoinResponse& command) { return Ask(command).status(); }
  absl::StatusOr<v1::RankReply> AwaitReply();
  absl::Status WrongAnswer(const char* what) const;
  absl::Status SendData(int32_t stream, const void* data, int64_t bytes);
  // Rows [row_start, row_end) of all streams.
  absl::Status SendRows(const MicroBatch& micro_batch, int64_t row_start, int64_t row_end);
  absl::Status SendAllRows(const RankCall& call);
  absl::Status SendDecision(RankFlow& flow);
  // The answer to ComputeWhole(), with the outputs, of which rows are told to the micro-batch's flow as they come.
  absl::StatusOr<v1::RankReply> AwaitOutputs(const MicroBatch& micro_batch);

  const int32_t rank_;
  const EngineDevice device_;
  const std::shared_ptr<RankLink> link_;
  const absl::Duration silence_timeout_;
  const bool shares_rows_;
  std::map<uint64_t, DataType> data_types_;  // of the heads' storage
  absl::Mutex mutex_;
  int64_t heard_ ABSL_GUARDED_BY(mutex_) = -1;  // messages at the last look
  absl::Time last_look_ ABSL_GUARDED_BY(mutex_);
  absl::Duration silence_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_REMOTE_RANK_H_
