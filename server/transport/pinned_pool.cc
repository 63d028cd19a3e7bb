#include "server/transport/pinned_pool.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "server/observability/monotonic_clock.h"

namespace headwater::transport {

template <typename IsTooMuch>
void PinnedPool::Shrink(Freed* freed, IsTooMuch&& is_too_much) {
  std::list<Idle>& idle = state_->idle;
  while (!idle.empty() && is_too_much()) {
    state_->idle_bytes -= idle.front().memory->bytes();
    freed->push_back(std::move(idle.front().memory));
    idle.pop_front();
  }
}

absl::StatusOr<std::shared_ptr<PinnedBlock>> PinnedPool::Allocate(int64_t bytes) {
  const int64_t size = RoundUp(bytes);
  State& state = *state_;
  std::unique_ptr<HostMemory> memory;
  Freed freed;
  {
    absl::MutexLock lock(&state.mutex);
    // The block that was used last: its pages are the likeliest to be in a cache.
    const auto found =
        std::find_if(state.idle.rbegin(), state.idle.rend(), [&](const Idle& idle) { return idle.memory->bytes() == size; });
    if (found != state.idle.rend()) {
      memory = std::move(found->memory);
      state.idle.erase(std::next(found).base());
      state.idle_bytes -= size;
    } else {
      const int64_t most = std::max<int64_t>(0, capacity_bytes_ - state.used_bytes - size);
      Shrink(&freed, [&] { return state.idle_bytes > most; });
    }
    state.used_bytes += size;
  }
  freed.clear();
  if (memory == nullptr) {
    auto made = engine_.AllocateHostMemory(size);
    if (!made.ok() && idle_bytes() > 0) {
      Trim(absl::InfiniteFuture());  // perhaps that is what is missing
      made = engine_.AllocateHostMemory(size);
    }
    if (!made.ok()) {
      absl::MutexLock lock(&state.mutex);
      state.used_bytes -= size;
      return made.status();
    }
    memory = *std::move(made);
  }
  return std::make_shared<PinnedBlock>(state_, std::move(memory), bytes);
}

PinnedBlock::~PinnedBlock() {
  const int64_t size = memory_->bytes();
  absl::MutexLock lock(&pool_->mutex);
  pool_->used_bytes -= size;
  if (pool_->closed) {
    static_cast<void>(memory_.release());  // never freed: its engine is gone
    return;
  }
  pool_->idle.push_back({std::move(memory_), observability::MonotonicNow()});
  pool_->idle_bytes += size;
}

void PinnedPool::Trim(absl::Time since) {
  Freed freed;
  absl::MutexLock lock(&state_->mutex);
  Shrink(&freed, [&] { return state_->idle.front().since < since; });
}

PinnedPool::~PinnedPool() {
  constexpr absl::Duration kPatience = absl::Seconds(5);
  const absl::Time give_up = observability::MonotonicNow() + kPatience;
  Freed freed;
  absl::MutexLock lock(&state_->mutex);
  for (absl::Duration left = kPatience; state_->used_bytes > 0 && left > absl::ZeroDuration();) {
    state_->mutex.AwaitWithTimeout(absl::Condition(
                                       +[](int64_t* used) { return *used == 0; }, &state_->used_bytes),
                                   left);
    left = give_up - observability::MonotonicNow();
  }
  state_->closed = true;
  Shrink(&freed, [] { return true; });
}

int64_t PinnedPool::RoundUp(int64_t bytes) {
  if (bytes <= kLeastBytes) return kLeastBytes;
  // Eight sizes between a power of two and the next.
  const int64_t step = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes - 1))) / 8;
  return (bytes + step - 1) / step * step;
}

}  // namespace headwater::transport
