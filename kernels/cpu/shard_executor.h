// The executors of an engine: one thread, its helpers and one communicator rank for each shard.
#ifndef HEADWATER_KERNELS_CPU_SHARD_EXECUTOR_H_
#define HEADWATER_KERNELS_CPU_SHARD_EXECUTOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "headwater/kernels/communicator.h"
#include "headwater/kernels/engine.h"
#include "kernels/cpu/thread_pool.h"

namespace headwater::cpu {

// What the code of one shard runs with.
struct ShardContext {
  int32_t rank;
  Communicator& communicator;
  ThreadPool& pool;
};

// Runs the same program on all shards. With one shard the caller's thread is the executor. One call at a time.
class ShardExecutors {
 public:
  using Work = absl::FunctionRef<absl::Status(const ShardContext&)>;
  // EngineOptions::shard_probe.
  using Probe = std::function<absl::Status(ShardPhase, int32_t)>;

  // Splits `thread_count` threads over `shard_count` executors; each gets at least one.
  ShardExecutors(int32_t shard_count, int32_t thread_count, Probe probe = nullptr);

  int32_t shard_count() const { return static_cast<int32_t>(communicators_.size()); }
  int32_t threads_per_shard() const { return pools_.front()->thread_count(); }

  // Rises with every piece of work that all threads of a shard have done. Any thread.
  int64_t progress() const;

  // Runs `work`, which changes nothing that outlives it, on every shard. A rank that fails or throws aborts the communicator, so
  // that no other waits for it, and the call fails with the first such rank's error as kEngineFailed. The ranks then get a new
  // communicator: later calls are not affected.
  absl::Status Run(Work work);

  // Runs work that is decided once for all shards. `prepare` does all that may fail and changes nothing; it must not use the
  // communicator, where the others would wait for one that has failed. Then the ranks learn from each other whether all are ready:
  // if not, none runs `act`, and the call fails as kShardNotReady with the first such rank's error. `act` fails like `work` of
  // Run(), and what it changes is lost then.
  absl::Status RunDecided(Work prepare, Work act);

 private:
  ShardContext ContextOf(int32_t rank) const;
  // `program` on this rank; failures and exceptions as kEngineFailed, the communicator aborted.
  absl::Status RunOne(int32_t rank, Work program);
  // The first phase on this rank.
  absl::Status PrepareOne(int32_t rank, Work prepare);
  absl::Status CallProbe(ShardPhase phase, int32_t rank) const;
  absl::Status Finish(const std::vector<absl::Status>& statuses);

  const Probe probe_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
  std::vector<std::unique_ptr<ThreadPool>> pools_;
  ThreadPool ranks_;  // one thread a rank
};

}  // namespace headwater::cpu

#endif  // HEADWATER_KERNELS_CPU_SHARD_EXECUTOR_H_
