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
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cpu/thread_pool.h"
#include "server/group/ranks/rank.h"

namespace headwater::group {

// The state that a group's engine, heads and contributions share: ranks, order of calls, and health. A call is made on all ranks,
// exclusively (Turn), or on one of them, beside calls on others (RankTurn); group_core.cc.
class GroupCore {
 public:
  using Program = absl::FunctionRef<absl::Status(size_t rank)>;

  GroupCore() : releaser_([this] { ReleaseInTurn(); }) {}
  ~GroupCore();  // where ranks may hang, not before Dismiss()

  // Once: the ranks, in order.
  void Form(std::vector<Rank> ranks);
  bool formed() const { return formed_.load(std::memory_order_acquire); }
  size_t size() const { return formed() ? ranks_.size() : 0; }
  // Only once formed.
  const Rank& rank(size_t index) const { return ranks_[index]; }
  LossEngine& engine(size_t index) const { return *ranks_[index].engine; }

  // kEngineFailed once the group is lost. A failing health() of a rank loses the group. Any thread.
  absl::Status health();
  // Loses the group: every call of every rank, now or later, fails. The first reason stays. Any thread.
  void Lose(const absl::Status& reason);
  // Gives the ranks up without a failure: health() keeps its result from now on.
  void Dismiss();
  bool dismissed() const { return dismissed_.load(); }

  // A scoped lock for a call on all ranks: no other call is made meanwhile. kStarting before the group is formed.
  class ABSL_SCOPED_LOCKABLE Turn {
   public:
    explicit Turn(GroupCore& core) ABSL_EXCLUSIVE_LOCK_FUNCTION(core.turn_mutex_) ABSL_NO_THREAD_SAFETY_ANALYSIS;
    ~Turn() ABSL_UNLOCK_FUNCTION() ABSL_NO_THREAD_SAFETY_ANALYSIS {}
    // Not OK: no call can be made.
    const absl::Status& status() const { return status_; }

   private:
    GroupCore& core_;
    const absl::MutexLock lock_;
    absl::Status status_;
  };

  // A lock for a call on one rank: waits for calls on all ranks and for others on this one. Only once formed.
  class RankTurn {
   public:
    RankTurn(GroupCore& core, size_t rank) ABSL_NO_THREAD_SAFETY_ANALYSIS;
    // Not OK: no call can be made.
    const absl::Status& status() const { return status_; }
    // Runs `call` and returns its status, or the group's error if that is lost. kEngineFailed from the rank loses the group.
    absl::Status Run(absl::FunctionRef<absl::Status()> call);

   private:
    GroupCore& core_;
    const size_t rank_;
    const absl::ReaderMutexLock turn_lock_;
    const absl::MutexLock rank_lock_;
    absl::Status status_;
  };

  // Calls program(rank) for every rank at the same time, in a Turn, and returns their common result. OK if all succeed. The group
  // is lost, and its error returned, if a rank fails (kEngineFailed), or if its answer differs from the first rank's. Else returns
  // the status of the first rank, or of the rank that was not ready (kShardNotReady). With `first_may_refuse`, the first rank may
  // refuse alone, and its answer counts: the others cannot know.
  absl::Status OnAll(Program program, bool first_may_refuse = false);

  // Takes heads or contributions that the ranks no longer need, by rank; null: none. Destroys each before the next call on its
  // rank, or once no call is made: a device must not free memory during collectives. Keeps their order. Never waits for the ranks.
  template <typename T>
  void Release(std::vector<std::unique_ptr<T>> objects) {
    absl::MutexLock lock(&release_mutex_);
    for (size_t rank = 0; rank < objects.size(); ++rank) {
      if (objects[rank] != nullptr) releases_[rank].push_back(std::move(objects[rank]));
    }
  }

  std::atomic<int64_t> planned_bytes{0};  // of the living heads, over all ranks

 private:
  void FlushReleases() ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_mutex_);
  void ReleaseInTurn();
  // Called with the right to call the rank.
  void FlushReleasesOf(size_t rank);
  absl::Status lost() const;

  std::vector<Rank> ranks_;
  std::unique_ptr<cpu::ThreadPool> threads_;  // one for each rank; the caller's is the first
  std::atomic<bool> formed_{false};
  std::atomic<bool> dismissed_{false};
  absl::Mutex turn_mutex_;
  std::vector<std::unique_ptr<absl::Mutex>> rank_mutexes_;  // each held for a call on that rank alone
  absl::Mutex release_mutex_;
  std::vector<std::vector<std::shared_ptr<void>>> releases_ ABSL_GUARDED_BY(release_mutex_);  // by rank
  mutable absl::Mutex lost_mutex_;
  absl::Status lost_ ABSL_GUARDED_BY(lost_mutex_);
  absl::Status last_health_ ABSL_GUARDED_BY(lost_mutex_);  // when it was dismissed
  bool stopping_ ABSL_GUARDED_BY(release_mutex_) = false;
  std::thread releaser_;  // last: it uses the members above
};

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
