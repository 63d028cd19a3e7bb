// The executors of an engine: one thread, its helpers and one communicator rank for each shard.
#ifndef HEADWATER_KERNELS_CPU_SHARD_EXECUTOR_H_
#define HEADWATER_KERNELS_CPU_SHARD_EXECUTOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "headwater/kernels/communicator.h"
#include "kernels/cpu/thread_pool.h"

namespace headwater::cpu {

// What the code of one shard runs with.
struct ShardContext {
  int32_t rank;
  Communicator& communicator;
  ThreadPool& pool;
};

// Runs the same program on all shards. With one shard the caller's thread is the executor. One Run() at a time.
class ShardExecutors {
 public:
  // Splits `thread_count` threads over `shard_count` executors; each gets at least one.
  ShardExecutors(int32_t shard_count, int32_t thread_count);

  int32_t shard_count() const { return static_cast<int32_t>(communicators_.size()); }
  int32_t threads_per_shard() const { return pools_.front()->thread_count(); }
  // Runs `program` on every shard and returns the first rank's error. A rank that fails or throws aborts the communicator, so
  // that no other waits for it; from then on every Run() fails (kEngineFailed).
  absl::Status Run(const std::function<absl::Status(const ShardContext&)>& program);

 private:
  absl::Status RunOne(int32_t rank, const std::function<absl::Status(const ShardContext&)>& program);

  std::vector<std::unique_ptr<Communicator>> communicators_;
  std::vector<std::unique_ptr<ThreadPool>> pools_;
  ThreadPool ranks_;  // one thread a rank
  absl::Status failure_;
};

}  // namespace headwater::cpu

#endif  // HEADWATER_KERNELS_CPU_SHARD_EXECUTOR_H_
