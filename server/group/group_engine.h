// GroupEngine: several ranks as one engine.
//
// Callers see a LossEngine whose heads have as many shards as the group has ranks. One lock orders the calls, each call runs on all
// ranks at the same time, and rank 0's results count. Ranks are threads of this process, other processes, or both. Micro-batches of
// replicated heads (Parallelism::kRows) are computed by one rank each, several at the same time. The rank with the fewest rows to
// compute takes the next one.
//
// The group is lost for good when a rank fails, is gone or is reported as hung. health() reports it, every call fails, and a new
// group is needed. So a rank's failure in the middle of a change costs all heads, not only that call's.
#ifndef HEADWATER_SERVER_GROUP_GROUP_ENGINE_H_
#define HEADWATER_SERVER_GROUP_GROUP_ENGINE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "server/group/group_core.h"

namespace headwater::group {

// Chooses the rank for a micro-batch that one of them computes alone, by the rows that each has to compute. Thread-safe.
class RankLoads {
 public:
  explicit RankLoads(size_t ranks) : rows_(ranks, 0) {}

  // Gives `rows` rows to the rank with the fewest, the first of equals, for which takes(rank) returns true. Each rank is asked at
  // most once, in that order. nullopt: all refuse.
  std::optional<size_t> Give(int64_t rows, absl::FunctionRef<bool(size_t rank)> takes) {
    absl::MutexLock lock(&mutex_);
    std::vector<size_t> order(rows_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [this](size_t a, size_t b) ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return rows_[a] < rows_[b]; });
    const auto found = std::find_if(order.begin(), order.end(), takes);
    if (found == order.end()) return std::nullopt;
    rows_[*found] += LoadOf(rows);
    return *found;
  }
  // The rank has them no longer.
  void Return(size_t rank, int64_t rows) {
    absl::MutexLock lock(&mutex_);
    rows_[rank] -= LoadOf(rows);
  }

 private:
  static int64_t LoadOf(int64_t rows) { return std::max<int64_t>(rows, 1); }  // a call without rows counts too

  absl::Mutex mutex_;
  std::vector<int64_t> rows_ ABSL_GUARDED_BY(mutex_);  // by rank
};

class GroupEngine final : public LossEngine {
 public:
  // Has no ranks until Form(): calls that compute or make a head fail with kStarting. `options` are the group's: shard_count ranks,
  // with the defaults that callers see before Form() filled in.
  GroupEngine(std::string name, EngineOptions options);

  // Sets the ranks in order, the first of which must be in this process. Called once.
  void Form(std::vector<Rank> ranks);
  // Gives the ranks up without a failure: health() keeps its result; later calls fail.
  void Dismiss() { core_->Dismiss(); }
  bool dismissed() const { return core_->dismissed(); }

  std::string name() const override { return name_; }
  std::vector<EngineDevice> devices() const override;
  const EngineOptions& options() const override { return options_; }
  absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec) const override;
  absl::StatusOr<std::unique_ptr<EngineHead>> DoCreateHead(const HeadSpec& spec) override;
  int64_t planned_bytes() const override { return core_->planned_bytes.load(); }
  absl::Status DoHealth() const override { return core_->health(); }
  int64_t progress() const override;
  // By rank; none before Form(). Any thread.
  std::vector<RankTimes> rank_times() const;
  absl::StatusOr<MicroBatchResult> DoCompute(const MicroBatch& micro_batch) override;
  // Allocates on the first rank, which serves all of them.
  absl::StatusOr<std::unique_ptr<HostMemory>> DoAllocateHostMemory(int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<HostMemory>> DoRegisterHostMemory(void* data, int64_t bytes) override;

 private:
  absl::StatusOr<MemoryPlan> PlanOnAll(const HeadSpec& spec) const;
  // Computes on one rank, which has all of the heads.
  absl::StatusOr<MicroBatchResult> ComputeWhole(const MicroBatch& micro_batch);

  const std::string name_;
  const EngineOptions options_;
  const std::shared_ptr<GroupCore> core_;
  std::unique_ptr<RankLoads> loads_;  // of the replicated heads' micro-batches; set by Form()
};

// A group of CUDA engines on threads of this process: options.shard_count (2 or more) ranks on consecutive GPUs from
// options.device_index. Each rank has the whole memory budget. Errors of CreateCudaEngine() and MakeCudaGroupId().
absl::StatusOr<std::unique_ptr<LossEngine>> CreateLocalCudaGroup(const EngineOptions& options);

// The shards of a head of `vocab_size` (>= 1) rows on `engine`, in the order of the rows, each with its device.
std::vector<VocabShard> PlanShards(const LossEngine& engine, int64_t vocab_size);

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_GROUP_ENGINE_H_
