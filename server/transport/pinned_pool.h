// PinnedPool: host memory for tensors on their way between clients and the engine (LossEngine::AllocateHostMemory). Allocation is
// slow, so the pool keeps memory for the next micro-batch.
//
// Sizes are rounded up by at most an eighth, so that micro-batches of about the same size share blocks. The admission of
// micro-batches bounds memory in use. Idle memory is freed when it would not fit beside memory in use, and after a while in any
// case.
#ifndef HEADWATER_SERVER_TRANSPORT_PINNED_POOL_H_
#define HEADWATER_SERVER_TRANSPORT_PINNED_POOL_H_

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "headwater/kernels/engine.h"

namespace headwater::transport {

// Memory that returns to its pool with its last owner, on that owner's thread.
class PinnedBlock {
 public:
  virtual ~PinnedBlock() = default;
  virtual uint8_t* data() const = 0;  // aligned to 64 bytes
  virtual int64_t bytes() const = 0;  // as asked for
};

// Thread-safe.
class PinnedPool {
 public:
  // Keeps idle and used memory together to at most `capacity_bytes` (>= 0) where that is possible: use comes first. `engine` must
  // outlive the pool.
  PinnedPool(LossEngine& engine, int64_t capacity_bytes);
  // Waits up to 5 s for blocks in use. Blocks that are still in use then are never freed, because their engine goes.
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // `bytes` (>= 1), uninitialised. May be slow. kMemoryBudgetExceeded if there is none.
  absl::StatusOr<std::shared_ptr<PinnedBlock>> Allocate(int64_t bytes);
  // Frees what has lain idle since before `since` (of observability::MonotonicNow()).
  void Trim(absl::Time since);

  int64_t used_bytes() const;
  int64_t idle_bytes() const;

  // The smallest block.
  static constexpr int64_t kLeastBytes = 64 << 10;
  // The bytes that a block for `bytes` takes.
  static int64_t RoundUp(int64_t bytes);

 private:
  class State;
  const std::shared_ptr<State> state_;
};

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_PINNED_POOL_H_
