#include "server/transport/pinned_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "headwater/kernels/engine.h"
#include "headwater/kernels/error.h"
#include "server/observability/monotonic_clock.h"
#include "tests/unit/forwarding_engine.h"

namespace headwater::transport {
namespace {

// An engine that does nothing but give memory, and counts it.
class MemoryEngine final : public headwater::testing::ForwardingEngine {
 public:
  MemoryEngine() : ForwardingEngine(nullptr) {}
  absl::StatusOr<std::unique_ptr<HostMemory>> DoAllocateHostMemory(int64_t bytes) override {
    ++allocations;
    if (held_bytes + bytes > capacity_bytes) return MakeError(ErrorReason::kMemoryBudgetExceeded, "none is left");
    auto memory = LossEngine::DoAllocateHostMemory(bytes);
    if (!memory.ok()) return memory.status();
    held_bytes += bytes;
    return std::unique_ptr<HostMemory>(std::make_unique<Counted>(*std::move(memory), &held_bytes));
  }

  std::atomic<int64_t> capacity_bytes{int64_t{1} << 40};
  std::atomic<int64_t> held_bytes{0};
  std::atomic<int64_t> allocations{0};

 private:
  class Counted final : public HostMemory {
   public:
    Counted(std::unique_ptr<HostMemory> memory, std::atomic<int64_t>* held) : memory_(std::move(memory)), held_(held) {}
    ~Counted() override { *held_ -= memory_->bytes(); }
    void* data() const override { return memory_->data(); }
    int64_t bytes() const override { return memory_->bytes(); }

   private:
    const std::unique_ptr<HostMemory> memory_;
    std::atomic<int64_t>* const held_;
  };
};

constexpr int64_t kMiB = 1 << 20;

TEST(PinnedPool, RoundsUpByAtMostAnEighth) {
  EXPECT_EQ(PinnedPool::RoundUp(1), PinnedPool::kLeastBytes);
  EXPECT_EQ(PinnedPool::RoundUp(64 * kMiB), 64 * kMiB);
  EXPECT_EQ(PinnedPool::RoundUp(64 * kMiB + 1), 72 * kMiB);
  std::mt19937_64 random(1);
  for (int i = 0; i < 10000; ++i) {
    const int64_t bytes =
        static_cast<int64_t>(random() >> std::uniform_int_distribution<int>(24, 47)(random)) + PinnedPool::kLeastBytes;
    const int64_t rounded = PinnedPool::RoundUp(bytes);
    ASSERT_GE(rounded, bytes);
    ASSERT_LE(rounded, bytes + bytes / 8 + 1) << bytes;
    ASSERT_EQ(PinnedPool::RoundUp(rounded), rounded) << bytes;
  }
}

TEST(PinnedPool, GivesABlockAgainThatCameBack) {
  MemoryEngine engine;
  PinnedPool pool(engine, 100 * kMiB);
  auto block = *pool.Allocate(3 * kMiB - 5);
  EXPECT_EQ(block->bytes(), 3 * kMiB - 5);
  std::memset(block->data(), 1, static_cast<size_t>(block->bytes()));
  EXPECT_EQ(pool.used_bytes(), 3 * kMiB);
  const uint8_t* const data = block->data();
  const std::shared_ptr<PinnedBlock> second_owner = block;
  block.reset();
  EXPECT_EQ(pool.idle_bytes(), 0);
  const_cast<std::shared_ptr<PinnedBlock>&>(second_owner).reset();
  EXPECT_EQ(pool.used_bytes(), 0);
  EXPECT_EQ(pool.idle_bytes(), 3 * kMiB);
  block = *pool.Allocate(3 * kMiB);
  EXPECT_EQ(block->data(), data);
  EXPECT_EQ(engine.allocations, 1);
  EXPECT_EQ(pool.idle_bytes(), 0);
}

TEST(PinnedPool, GivesUpWhatLiesIdleWhereItWouldNotFit) {
  MemoryEngine engine;
  PinnedPool pool(engine, 10 * kMiB);
  {
    const auto a = *pool.Allocate(2 * kMiB);
    const auto b = *pool.Allocate(4 * kMiB);
  }
  EXPECT_EQ(pool.idle_bytes(), 6 * kMiB);
  const auto c = *pool.Allocate(5 * kMiB);
  EXPECT_LE(pool.used_bytes() + pool.idle_bytes(), 10 * kMiB);
  const auto d = *pool.Allocate(8 * kMiB);  // use comes first
  EXPECT_EQ(pool.used_bytes(), 13 * kMiB);
  EXPECT_EQ(pool.idle_bytes(), 0);
  EXPECT_EQ(engine.held_bytes, 13 * kMiB);
}

TEST(PinnedPool, FreesWhatHasLainIdleForLong) {
  MemoryEngine engine;
  PinnedPool pool(engine, 10 * kMiB);
  { const auto old_one = *pool.Allocate(2 * kMiB); }
  const absl::Time between = observability::MonotonicNow();
  absl::SleepFor(absl::Microseconds(10));
  { const auto new_one = *pool.Allocate(1 * kMiB); }
  pool.Trim(between);
  EXPECT_EQ(pool.idle_bytes(), 1 * kMiB);
  EXPECT_EQ(engine.held_bytes, 1 * kMiB);
  pool.Trim(absl::InfiniteFuture());
  EXPECT_EQ(engine.held_bytes, 0);
}

TEST(PinnedPool, UsesIdleMemoryBeforeItSaysThatThereIsNone) {
  MemoryEngine engine;
  engine.capacity_bytes = 4 * kMiB;
  PinnedPool pool(engine, 100 * kMiB);
  { const auto idle = *pool.Allocate(3 * kMiB); }
  const auto block = pool.Allocate(2 * kMiB);
  ASSERT_TRUE(block.ok());
  EXPECT_TRUE(HasReason(pool.Allocate(3 * kMiB).status(), ErrorReason::kMemoryBudgetExceeded));
  EXPECT_EQ(pool.used_bytes(), 2 * kMiB);
  EXPECT_EQ(engine.held_bytes, 2 * kMiB);
}

TEST(PinnedPool, ComesBackToItsLevelFromManyThreads) {
  MemoryEngine engine;
  {
    PinnedPool pool(engine, 64 * kMiB);
    std::vector<std::thread> threads;
    for (uint32_t seed = 0; seed < 4; ++seed) {
      threads.emplace_back([&pool, seed] {
        std::mt19937 random(seed);
        for (int i = 0; i < 500; ++i) {
          const auto block = *pool.Allocate(std::uniform_int_distribution<int64_t>(1, kMiB)(random));
          block->data()[0] = 1;
          block->data()[block->bytes() - 1] = 2;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(pool.used_bytes(), 0);
    EXPECT_EQ(pool.idle_bytes(), engine.held_bytes);
    EXPECT_LE(engine.allocations, 200);
  }
  EXPECT_EQ(engine.held_bytes, 0);
}

TEST(PinnedPool, WaitsForItsBlocksAtTheEnd) {
  MemoryEngine engine;
  std::thread last;
  {
    PinnedPool pool(engine, 64 * kMiB);
    last = std::thread([block = *pool.Allocate(kMiB)]() mutable {
      absl::SleepFor(absl::Milliseconds(20));
      block.reset();
    });
  }
  EXPECT_EQ(engine.held_bytes, 0);
  last.join();
}

}  // namespace
}  // namespace headwater::transport
