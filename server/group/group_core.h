// GroupCore: the state that a group's engine, heads and contributions share: ranks, order of calls, and health. A call is made on
// all ranks, exclusively (Turn), or on one of them, beside calls on others (RankTurn).
#ifndef HEADWATER_SERVER_GROUP_GROUP_CORE_H_
#define HEADWATER_SERVER_GROUP_GROUP_CORE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/group/ranks/rank.h"

namespace headwater::group {

// A thread for each rank but the first, which runs on the caller's.
class RankThreads {
 public:
  using Program = absl::FunctionRef<absl::Status(size_t rank)>;

  explicit RankThreads(size_t count) : statuses_(count) {
    for (size_t rank = 1; rank < count; ++rank) threads_.emplace_back([this, rank] { Main(rank); });
  }
  ~RankThreads() {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    for (std::thread& thread : threads_) thread.join();
  }

  // Runs program(rank) for every rank at the same time, and returns their answers when all have come. One call at a time.
  std::vector<absl::Status> Run(Program program) {
    {
      absl::MutexLock lock(&mutex_);
      program_ = &program;
      running_ = threads_.size();
      ++generation_;
    }
    absl::Status first = program(0);
    const auto done = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return running_ == 0; };
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&done));
    program_ = nullptr;
    statuses_[0] = std::move(first);
    return statuses_;
  }

 private:
  void Main(size_t rank) {
    uint64_t seen = 0;
    const auto called = [this, &seen]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopping_ || generation_ != seen; };
    while (true) {
      const Program* program = nullptr;
      {
        absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(&called));
        if (stopping_) return;
        seen = generation_;
        program = program_;
      }
      absl::Status status = (*program)(rank);
      absl::MutexLock lock(&mutex_);
      statuses_[rank] = std::move(status);
      --running_;
    }
  }

  absl::Mutex mutex_;
  const Program* program_ ABSL_GUARDED_BY(mutex_) = nullptr;
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t running_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<absl::Status> statuses_;  // each by its rank's thread while it runs
  std::vector<std::thread> threads_;
};

class GroupCore {
 public:
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
  absl::Status OnAll(RankThreads::Program program, bool first_may_refuse = false);

  // Takes objects that the ranks no longer need, by rank. Destroys each before the next call on its rank, or once no call is made:
  // a device must not free memory during collectives. Never waits for the ranks.
  void Release(std::vector<std::unique_ptr<StagedContribution>> contributions, std::vector<std::unique_ptr<EngineHead>> heads);

  std::atomic<int64_t> planned_bytes{0};  // of the living heads, over all ranks

 private:
  void FlushReleases() ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_mutex_);
  void ReleaseInTurn();
  // Called with the right to call the rank.
  void FlushReleasesOf(size_t rank);
  absl::Status lost() const;

  std::vector<Rank> ranks_;
  std::unique_ptr<RankThreads> threads_;
  std::atomic<bool> formed_{false};
  std::atomic<bool> dismissed_{false};
  absl::Mutex turn_mutex_;
  std::vector<std::unique_ptr<absl::Mutex>> rank_mutexes_;  // each held for a call on that rank alone
  struct Releases {
    std::vector<std::unique_ptr<EngineHead>> heads;
    std::vector<std::unique_ptr<StagedContribution>> contributions;  // are destroyed before the heads
    bool empty() const { return contributions.empty() && heads.empty(); }
  };
  absl::Mutex release_mutex_;
  std::vector<Releases> releases_ ABSL_GUARDED_BY(release_mutex_);  // by rank
  mutable absl::Mutex lost_mutex_;
  absl::Status lost_ ABSL_GUARDED_BY(lost_mutex_);
  absl::Status last_health_ ABSL_GUARDED_BY(lost_mutex_);  // when it was dismissed
  bool stopping_ ABSL_GUARDED_BY(release_mutex_) = false;
  std::thread releaser_;  // last: it uses the members above
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_GROUP_CORE_H_
