// PinnedPool: host memory for tensors on their way between clients and the engine (LossEngine::AllocateHostMemory). Allocation is
// slow, so the pool keeps memory for the next micro-batch.
//
// Sizes are rounded up by at most an eighth, so that micro-batches of about the same size share blocks. The admission of
// micro-batches bounds memory in use. Idle memory is freed when it would not fit beside memory in use, and after a while in any
// case.
#ifndef HEADWATER_SERVER_TRANSPORT_PINNED_POOL_H_
#define HEADWATER_SERVER_TRANSPORT_PINNED_POOL_H_

#include <cstdint>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "headwater/kernels/engine.h"

namespace headwater::transport {

class PinnedBlock;

// Thread-safe.
class PinnedPool {
 public:
  // Keeps idle and used memory together to at most `capacity_bytes` (>= 0) where that is possible: use comes first. `engine` must
  // outlive the pool.
  PinnedPool(LossEngine& engine, int64_t capacity_bytes) : engine_(engine), capacity_bytes_(capacity_bytes) {}
  // Waits up to 5 s for blocks in use. Blocks that are still in use then are never freed, because their engine goes.
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // `bytes` (>= 1), uninitialised. May be slow. kMemoryBudgetExceeded if there is none.
  absl::StatusOr<std::shared_ptr<PinnedBlock>> Allocate(int64_t bytes);
  // Frees what has lain idle since before `since` (of observability::MonotonicNow()).
  void Trim(absl::Time since);

  int64_t used_bytes() const {
    absl::MutexLock lock(&state_->mutex);
    return state_->used_bytes;
  }
  int64_t idle_bytes() const {
    absl::MutexLock lock(&state_->mutex);
    return state_->idle_bytes;
  }

  // The smallest block.
  static constexpr int64_t kLeastBytes = 64 << 10;
  // The bytes that a block for `bytes` takes.
  static int64_t RoundUp(int64_t bytes);

 private:
  friend class PinnedBlock;
  struct Idle {
    std::unique_ptr<HostMemory> memory;
    absl::Time since;
  };
  // Outlives the pool as long as a block does.
  struct State {
    absl::Mutex mutex;
    std::list<Idle> idle ABSL_GUARDED_BY(mutex);  // the longest unused first
    int64_t idle_bytes ABSL_GUARDED_BY(mutex) = 0;
    int64_t used_bytes ABSL_GUARDED_BY(mutex) = 0;
    bool closed ABSL_GUARDED_BY(mutex) = false;
  };
  using Freed = std::vector<std::unique_ptr<HostMemory>>;  // declared before the lock is taken: to free is slow, too

  // Gives up idle memory, the longest unused first, while `is_too_much()`.
  template <typename IsTooMuch>
  void Shrink(Freed* freed, IsTooMuch&& is_too_much) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mutex);

  LossEngine& engine_;
  const int64_t capacity_bytes_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Memory that returns to its pool with its last owner, on that owner's thread.
class PinnedBlock {
 public:
  // Made by PinnedPool::Allocate().
  PinnedBlock(std::shared_ptr<PinnedPool::State> pool, std::unique_ptr<HostMemory> memory, int64_t bytes)
      : pool_(std::move(pool)), memory_(std::move(memory)), bytes_(bytes) {}
  ~PinnedBlock();

  uint8_t* data() const { return static_cast<uint8_t*>(memory_->data()); }  // aligned to 64 bytes
  int64_t bytes() const { return bytes_; }                                  // as asked for

 private:
  const std::shared_ptr<PinnedPool::State> pool_;
  std::unique_ptr<HostMemory> memory_;
  const int64_t bytes_;
};

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_PINNED_POOL_H_
