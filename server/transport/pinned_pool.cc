#include "server/transport/pinned_pool.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <list>
#include <utility>
#include <vector>

#include "server/observability/monotonic_clock.h"

namespace headwater::transport {

// Outlives the pool as long as a block does.
class PinnedPool::State : public std::enable_shared_from_this<State> {
 public:
  State(LossEngine& engine, int64_t capacity_bytes) : engine_(engine), capacity_bytes_(capacity_bytes) {}

  absl::StatusOr<std::shared_ptr<PinnedBlock>> Allocate(int64_t bytes);
  void Trim(absl::Time since);
  void Close();

  int64_t used_bytes() const {
    absl::MutexLock lock(&mutex_);
    return used_bytes_;
  }
  int64_t idle_bytes() const {
    absl::MutexLock lock(&mutex_);
    return idle_bytes_;
  }

 private:
  class Block;
  struct Idle {
    std::unique_ptr<HostMemory> memory;
    absl::Time since;
  };
  using Freed = std::vector<std::unique_ptr<HostMemory>>;  // declared before the lock is taken: to free is slow, too

  void GiveBack(std::unique_ptr<HostMemory> memory);
  // Gives up the longest unused idle memory.
  void GiveUpOldest(Freed* freed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives up idle memory, the longest unused first, until at most `bytes` of it are left.
  void Shrink(int64_t bytes, Freed* freed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  LossEngine& engine_;
  const int64_t capacity_bytes_;
  mutable absl::Mutex mutex_;
  std::list<Idle> idle_ ABSL_GUARDED_BY(mutex_);  // the longest unused first
  int64_t idle_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

class PinnedPool::State::Block final : public PinnedBlock {
 public:
  Block(std::shared_ptr<State> state, std::unique_ptr<HostMemory> memory, int64_t bytes)
      : state_(std::move(state)), memory_(std::move(memory)), bytes_(bytes) {}
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() override { state_->GiveBack(std::move(memory_)); }
  uint8_t* data() const override { return static_cast<uint8_t*>(memory_->data()); }
  int64_t bytes() const override { return bytes_; }

 private:
  const std::shared_ptr<State> state_;
  std::unique_ptr<HostMemory> memory_;
  const int64_t bytes_;
};

absl::StatusOr<std::shared_ptr<PinnedBlock>> PinnedPool::State::Allocate(int64_t bytes) {
  const int64_t size = RoundUp(bytes);
  std::unique_ptr<HostMemory> memory;
  Freed freed;
  {
    absl::MutexLock lock(&mutex_);
    // The block that was used last: its pages are the likeliest to be in a cache.
    const auto found = std::find_if(idle_.rbegin(), idle_.rend(), [&](const Idle& idle) { return idle.memory->bytes() == size; });
    if (found != idle_.rend()) {
      memory = std::move(found->memory);
      idle_.erase(std::next(found).base());
      idle_bytes_ -= size;
    } else {
      Shrink(std::max<int64_t>(0, capacity_bytes_ - used_bytes_ - size), &freed);
    }
    used_bytes_ += size;
  }
  freed.clear();
  if (memory == nullptr) {
    auto made = engine_.AllocateHostMemory(size);
    if (!made.ok()) {
      {
        absl::MutexLock lock(&mutex_);
        Shrink(0, &freed);
      }
      if (!freed.empty()) {  // perhaps that was what was missing
        freed.clear();
        made = engine_.AllocateHostMemory(size);
      }
    }
    if (!made.ok()) {
      absl::MutexLock lock(&mutex_);
      used_bytes_ -= size;
      return made.status();
    }
    memory = *std::move(made);
  }
  return std::shared_ptr<PinnedBlock>(std::make_shared<Block>(shared_from_this(), std::move(memory), bytes));
}

void PinnedPool::State::GiveBack(std::unique_ptr<HostMemory> memory) {
  const int64_t size = memory->bytes();
  absl::MutexLock lock(&mutex_);
  used_bytes_ -= size;
  if (closed_) {
    static_cast<void>(memory.release());  // never freed: its engine is gone
    return;
  }
  idle_.push_back({std::move(memory), observability::MonotonicNow()});
  idle_bytes_ += size;
}

void PinnedPool::State::GiveUpOldest(Freed* freed) {
  idle_bytes_ -= idle_.front().memory->bytes();
  freed->push_back(std::move(idle_.front().memory));
  idle_.pop_front();
}

void PinnedPool::State::Shrink(int64_t bytes, Freed* freed) {
  while (!idle_.empty() && idle_bytes_ > bytes) GiveUpOldest(freed);
}

void PinnedPool::State::Trim(absl::Time since) {
  Freed freed;
  absl::MutexLock lock(&mutex_);
  while (!idle_.empty() && idle_.front().since < since) GiveUpOldest(&freed);
}

void PinnedPool::State::Close() {
  constexpr absl::Duration kPatience = absl::Seconds(5);
  const absl::Time give_up = observability::MonotonicNow() + kPatience;
  Freed freed;
  absl::MutexLock lock(&mutex_);
  for (absl::Duration left = kPatience; used_bytes_ > 0 && left > absl::ZeroDuration();) {
    mutex_.AwaitWithTimeout(absl::Condition(
                                +[](int64_t* used) { return *used == 0; }, &used_bytes_),
                            left);
    left = give_up - observability::MonotonicNow();
  }
  closed_ = true;
  Shrink(0, &freed);
}

PinnedPool::PinnedPool(LossEngine& engine, int64_t capacity_bytes) : state_(std::make_shared<State>(engine, capacity_bytes)) {}

PinnedPool::~PinnedPool() { state_->Close(); }

absl::StatusOr<std::shared_ptr<PinnedBlock>> PinnedPool::Allocate(int64_t bytes) { return state_->Allocate(bytes); }

void PinnedPool::Trim(absl::Time since) { state_->Trim(since); }

int64_t PinnedPool::used_bytes() const { return state_->used_bytes(); }

int64_t PinnedPool::idle_bytes() const { return state_->idle_bytes(); }

int64_t PinnedPool::RoundUp(int64_t bytes) {
  if (bytes <= kLeastBytes) return kLeastBytes;
  // Eight sizes between a power of two and the next.
  const int64_t step = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes - 1))) / 8;
  return (bytes + step - 1) / step * step;
}

}  // namespace headwater::transport
