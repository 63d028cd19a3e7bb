// The executors of an engine: one thread, its helpers and one communicator rank for each shard that it holds.
#ifndef HEADWATER_KERNELS_CPU_SHARD_EXECUTOR_H_
#define HEADWATER_KERNELS_CPU_SHARD_EXECUTOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "headwater/kernels/communicator.h"
#include "headwater/kernels/engine.h"
#include "kernels/cpu/thread_pool.h"

namespace headwater::cpu {

// The resources that one shard's code runs with.
struct ShardContext {
  int32_t rank;
  Communicator& communicator;
  ThreadPool& pool;
};

// Runs the same program on all shards that the engine holds: all of a head's, or, as a rank of a group, its own. With one shard the
// caller's thread is the executor. One call at a time. In a group the other ranks run the same programs, and Run()'s must not use
// the communicator there.
class ShardExecutors {
 public:
  using Work = absl::FunctionRef<absl::Status(const ShardContext&)>;
  // EngineOptions::shard_probe.
  using Probe = std::function<absl::Status(ShardPhase, int32_t)>;

  // Splits `thread_count` threads over `shard_count` executors; each gets at least one. With a `group` there is one executor, for
  // the group's rank, with all threads.
  ShardExecutors(int32_t shard_count, int32_t thread_count, Probe probe = nullptr, std::shared_ptr<Communicator> group = nullptr);
  // One executor for a head that is whole on a rank of a group. It uses the threads of the group's executor, `of_rank`, which must
  // not run at the same time. Its probe is called with that executor's rank.
  explicit ShardExecutors(const ShardExecutors& of_rank);

  // Shards of a head, held here or not.
  int32_t shard_count() const { return shard_count_; }
  // Whether the shard is one of this engine's.
  bool holds(int32_t rank) const { return rank >= first_rank_ && rank < first_rank_ + held_count(); }
  bool is_group() const { return group_ != nullptr; }
  int32_t threads_per_shard() const { return pools_.front()->thread_count(); }

  // Rises with every piece of work that all threads of a shard have done. Any thread.
  int64_t progress() const;
  // kEngineFailed from the moment on when work has failed on a rank of a group. Any thread.
  absl::Status health() const;

  // Runs `work`, which changes nothing that outlives it, on every shard. A rank that fails aborts the communicator, so that no
  // other waits for it. The call then fails with the first such rank's error as kEngineFailed. The ranks then get a new
  // communicator, and later calls are not affected. A group has only one communicator, and is lost.
  absl::Status Run(Work work);

  // Runs work that is decided once for all shards. `prepare` does all that may fail and changes nothing; it must not use the
  // communicator, where the others would wait for one that has failed. Then the ranks exchange whether all are ready. If one is
  // not, none runs `act`, and the call fails as kShardNotReady with the first such rank's error. `act` fails like `work` of Run();
  // its partial changes are then lost.
  absl::Status RunDecided(Work prepare, Work act);

 private:
  int32_t held_count() const { return static_cast<int32_t>(communicators_.size()); }
  void MakeCommunicators();
  // Runs `program` on every shard that is held.
  absl::Status RunHeld(absl::FunctionRef<absl::Status(int32_t)> program);
  ShardContext ContextOf(int32_t rank) const;
  // `program` on this rank; failures as kEngineFailed, the communicator aborted.
  absl::Status RunOne(int32_t rank, Work program);
  // The first phase on this rank.
  absl::Status PrepareOne(int32_t rank, Work prepare);
  absl::Status CallProbe(ShardPhase phase, int32_t rank) const;
  absl::Status Finish(const std::vector<absl::Status>& statuses);

  const Probe probe_;
  const std::shared_ptr<Communicator> group_;  // null: all shards are here
  const int32_t shard_count_;
  const int32_t first_rank_;
  // By shard that is held.
  std::vector<std::shared_ptr<Communicator>> communicators_;
  std::vector<std::shared_ptr<ThreadPool>> pools_;
  ThreadPool ranks_;  // one thread a rank
  mutable std::mutex health_mutex_;
  absl::Status health_;  // guarded by health_mutex_
};

}  // namespace headwater::cpu

#endif  // HEADWATER_KERNELS_CPU_SHARD_EXECUTOR_H_
