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
#include "kernels/cpu/thread_pool.h"
#include "server/group/ranks/rank.h"

namespace headwater::group {

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

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_GROUP_CORE_H_
