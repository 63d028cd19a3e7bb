// Rank: one rank of a group as the leader drives it, in this process or in another one.
//
// Calls block until the rank has answered. The leader makes one call of a rank at a time; those that all ranks get, in the order
// that is the group's. health() and Abort() come from any thread. Heads and contributions have the leader's ids, never 0 and never
// used again. What the calls mean, and which ranges of tensors a rank takes: headwater/kernels/engine.h, "Groups".
#ifndef HEADWATER_SERVER_GROUP_RANK_H_
#define HEADWATER_SERVER_GROUP_RANK_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "headwater/kernels/engine.h"

namespace headwater::group {

// Rows that come, and a decision, as a rank that is not the first learns of them.
class RankFlow {
 public:
  virtual ~RankFlow() = default;
  // Waits until more than `have` rows are there; how many.
  virtual absl::StatusOr<int64_t> AwaitMore(int64_t have) = 0;
  // What the first rank was told.
  virtual absl::Status AwaitDecision() = 0;
};

// The heads of a term by id; 0: none.
struct TermHeads {
  uint64_t head = 0;
  uint64_t teacher = 0;
};

struct RankCall {
  MicroBatch micro_batch;             // heads of its terms are not looked at
  absl::Span<const TermHeads> heads;  // one for each term
  RankFlow* flow = nullptr;           // null exactly if micro_batch.flow is
  uint64_t contribution = 0;          // the id of what is staged
};

struct RankResult {
  std::vector<LossSums> terms;  // the first rank's; ComputeWhole(): this rank's
  bool staged = false;
};

// How a rank has spent its time in calls so far. The first rank's waiting includes that for the caller's rows and decision, that of
// the others the leader's.
struct RankTimes {
  absl::Duration computing;
  absl::Duration waiting;        // for other ranks to come to a collective, for rows, for a decision
  absl::Duration communicating;  // in collectives, once all ranks were there
};

class Rank {
 public:
  virtual ~Rank() = default;

  virtual EngineDevice device() const = 0;
  // The rank's engine, if it is in this process; else null.
  virtual LossEngine* local_engine() { return nullptr; }
  // kEngineFailed once the rank can do nothing any more.
  virtual absl::Status health() = 0;
  // Makes the call that is in progress, and all later ones, fail. Idempotent.
  virtual void Abort(const absl::Status& reason) = 0;
  // Rises while the rank gets on.
  virtual int64_t progress() const = 0;
  // As far as it is known here, give or take what passes while one looks. Any thread.
  virtual RankTimes times() const = 0;

  virtual absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec) = 0;
  virtual absl::Status CreateHead(uint64_t head, const HeadSpec& spec) = 0;
  // Contributions first. Ids that the rank does not have are left out.
  virtual absl::Status Release(absl::Span<const uint64_t> contributions, absl::Span<const uint64_t> heads) = 0;

  virtual absl::Status ReadTensor(uint64_t head, HeadTensor tensor, int64_t start, int64_t count, void* out) = 0;
  virtual absl::Status WriteTensor(uint64_t head, HeadTensor tensor, int64_t start, int64_t count, const void* in) = 0;
  virtual absl::Status ZeroGradient(uint64_t head) = 0;
  virtual absl::Status AddToGradient(uint64_t head, HeadTensor tensor, int64_t start, int64_t count, double factor,
                                     const float* in) = 0;
  virtual absl::Status ReduceGradient(uint64_t head) = 0;
  virtual absl::Status ResetOptimizerState(uint64_t head) = 0;
  virtual absl::StatusOr<GradientStats> ComputeGradientStats(uint64_t head) = 0;
  virtual absl::Status ApplyOptimizer(uint64_t head, const OptimizerStep& step) = 0;

  virtual absl::StatusOr<RankResult> Compute(const RankCall& call) = 0;
  // A micro-batch whose heads are replicas (Parallelism::kRows), by this rank alone: it fills in all outputs, and the flow is the
  // micro-batch's own, all of whose rows are there; call.flow is not looked at.
  virtual absl::StatusOr<RankResult> ComputeWhole(const RankCall& call) = 0;
  // The contribution is gone afterwards, unless the answer is kShardNotReady.
  virtual absl::Status Commit(uint64_t contribution, double factor) = 0;
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_RANK_H_
