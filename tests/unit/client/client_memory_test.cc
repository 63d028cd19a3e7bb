// The client's memory for shared rows: blocks, regions, and copies by several threads. A driver that only counts stands in for
// CUDA: for the client's hold on a context, and for its reads of device memory. The owner of device memory may release the context
// before the client ends, as a program does that frees its rows first.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/core/rows/memory/arena.h"
#include "client/core/rows/memory/copy_threads.h"
#include "client/core/rows/memory/cuda_driver.h"
#include "client/core/rows/memory/device_memory.h"
#include "client/core/rows/memory/shared_region.h"

namespace headwater::client::internal {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kMegabyte = int64_t{1} << 20;

class PlainBacking final : public Backing {
 public:
  explicit PlainBacking(int64_t bytes) : memory_(static_cast<size_t>(bytes)) {}
  uint8_t* data() const override { return const_cast<uint8_t*>(memory_.data()); }
  int64_t bytes() const override { return static_cast<int64_t>(memory_.size()); }

 private:
  std::vector<uint8_t> memory_;
};

class Arenas : public ::testing::Test {
 protected:
  std::unique_ptr<Arena> Make(int64_t max_bytes, int64_t first_bytes) {
    return std::make_unique<Arena>(
        max_bytes, first_bytes,
        [this](int64_t bytes) -> absl::StatusOr<std::shared_ptr<const Backing>> {
          if (refuse_) return absl::UnavailableError("none");
          ++made_;
          return std::make_shared<PlainBacking>(bytes);
        },
        [this](Backings backings) { dropped_ += static_cast<int>(backings.size()); });
  }
  bool refuse_ = false;
  int made_ = 0;
  int dropped_ = 0;
};

TEST_F(Arenas, ReuseTheirMemory) {
  const auto arena = Make(64 * kMegabyte, 2 * kMegabyte);
  for (int i = 0; i < 1000; ++i) {
    auto first = arena->Allocate(100 + i);
    auto second = arena->Allocate(kMegabyte);
    ASSERT_TRUE(first.ok() && second.ok());
    EXPECT_EQ((*first)->offset() % Arena::kAlignment, 0);
  }
  EXPECT_EQ(made_, 1);
  EXPECT_EQ(arena->backing_bytes(), 2 * kMegabyte);
}

TEST_F(Arenas, BlocksNeverOverlapAndFreedOnesAreMerged) {
  const auto arena = Make(32 * kMegabyte, 4 * kMegabyte);
  std::mt19937 generator(7);
  std::vector<std::shared_ptr<Arena::Block>> blocks;
  for (int round = 0; round < 3000; ++round) {
    if (generator() % 2 == 0 || blocks.empty()) {
      auto block = arena->Allocate(1 + static_cast<int64_t>(generator() % (300 * 1024)));
      if (block.ok()) blocks.push_back(*block);
    } else {
      blocks.erase(blocks.begin() + static_cast<int64_t>(generator() % blocks.size()));
    }
    if (round % 100 != 0) continue;
    std::vector<std::pair<uint8_t*, int64_t>> ranges;
    for (const auto& block : blocks) ranges.emplace_back(block->data(), block->bytes());
    std::sort(ranges.begin(), ranges.end());
    for (size_t i = 1; i < ranges.size(); ++i) ASSERT_LE(ranges[i - 1].first + ranges[i - 1].second, ranges[i].first);
    EXPECT_LE(arena->backing_bytes(), 32 * kMegabyte);
  }
  blocks.clear();
  auto whole = arena->Allocate(4 * kMegabyte);  // the first backing in one piece again
  EXPECT_TRUE(whole.ok());
}

TEST_F(Arenas, GrowAndAreBounded) {
  const auto arena = Make(16 * kMegabyte, 2 * kMegabyte);
  std::vector<std::shared_ptr<Arena::Block>> blocks;
  for (int i = 0; i < 16; ++i) {
    auto block = arena->Allocate(kMegabyte);
    ASSERT_TRUE(block.ok()) << i;
    blocks.push_back(*block);
  }
  EXPECT_EQ(arena->backing_bytes(), 16 * kMegabyte);
  EXPECT_LE(made_, 4);  // each as large as all before
  EXPECT_EQ(arena->Allocate(1).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(arena->Allocate(17 * kMegabyte).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(arena->Allocate(0).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(arena->Allocate(-1).status().code(), absl::StatusCode::kResourceExhausted);
  blocks.pop_back();
  EXPECT_TRUE(arena->Allocate(kMegabyte).ok());
  // Empty memory makes room for blocks that fit nowhere.
  blocks.clear();
  EXPECT_TRUE(arena->Allocate(15 * kMegabyte).ok());
  EXPECT_GT(dropped_, 0);
  EXPECT_LE(arena->backing_bytes(), 16 * kMegabyte);
}

TEST_F(Arenas, FindTheirBlocksByAddress) {
  const auto arena = Make(16 * kMegabyte, 2 * kMegabyte);
  const auto block = *arena->Allocate(kMegabyte);
  EXPECT_EQ(arena->Find(block->data(), kMegabyte), block->backing());
  EXPECT_EQ(arena->Find(block->data() + 5, 7), block->backing());
  EXPECT_EQ(arena->Find(block->backing()->data(), 2 * kMegabyte + 1), nullptr);
  EXPECT_EQ(arena->Find(block->backing()->data() + 2 * kMegabyte, 1), nullptr);
  const int elsewhere = 0;
  EXPECT_EQ(arena->Find(&elsewhere, sizeof(elsewhere)), nullptr);
}

TEST_F(Arenas, RetiredMemoryIsNotUsedAgain) {
  const auto arena = Make(16 * kMegabyte, 2 * kMegabyte);
  auto first = *arena->Allocate(kPage);
  const std::shared_ptr<const Backing> backing = first->backing();
  arena->Retire(*backing);
  const auto second = *arena->Allocate(kPage);
  EXPECT_NE(second->backing(), backing);
  EXPECT_EQ(arena->Find(first->data(), 1), backing);  // it is still there for those who have it
  EXPECT_EQ(dropped_, 0);
  first.reset();
  EXPECT_EQ(dropped_, 1);
  EXPECT_EQ(arena->backing_bytes(), 2 * kMegabyte);
  arena->Retire(*backing);  // unknown now
  second->backing();
}

TEST_F(Arenas, MayEndBeforeTheirBlocks) {
  auto arena = Make(16 * kMegabyte, 2 * kMegabyte);
  auto block = *arena->Allocate(kPage);
  arena.reset();
  std::memset(block->data(), 1, kPage);
  block.reset();
  EXPECT_EQ(dropped_, 0);
  arena = Make(16 * kMegabyte, 2 * kMegabyte);
  block = *arena->Allocate(kPage);
  block.reset();
  arena.reset();
  EXPECT_EQ(dropped_, 1);
}

TEST_F(Arenas, SayWhyThereIsNoMemory) {
  const auto arena = Make(16 * kMegabyte, 2 * kMegabyte);
  refuse_ = true;
  EXPECT_EQ(arena->Allocate(kPage).status().code(), absl::StatusCode::kUnavailable);
  refuse_ = false;
  EXPECT_TRUE(arena->Allocate(kPage).ok());
}

TEST(Arena, IsThreadSafe) {
  std::atomic<int64_t> made{0};
  Arena arena(
      64 * kMegabyte, kMegabyte,
      [&](int64_t bytes) -> absl::StatusOr<std::shared_ptr<const Backing>> {
        made += bytes;
        return std::make_shared<PlainBacking>(bytes);
      },
      [&](Backings backings) {
        for (const auto& backing : backings) made -= backing->bytes();
      });
  std::vector<std::thread> threads;
  std::atomic<bool> torn{false};
  for (uint8_t number = 1; number <= 4; ++number) {
    threads.emplace_back([&, number] {
      for (int i = 0; i < 300; ++i) {
        auto block = arena.Allocate(kPage * (1 + i % 20));
        if (!block.ok()) continue;
        std::memset((*block)->data(), number, static_cast<size_t>((*block)->bytes()));
        if (i % 50 == 0) arena.Retire(*(*block)->backing());
        std::this_thread::yield();
        const uint8_t* const data = (*block)->data();
        if (!std::all_of(data, data + (*block)->bytes(), [&](uint8_t byte) { return byte == number; })) torn = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(torn);
  EXPECT_EQ(made, arena.backing_bytes());
}

TEST(SharedRegion, IsSealedAndAllocated) {
  const auto region = SharedRegion::Make(3 * kMegabyte, false);
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_EQ(fcntl((*region)->fd(), F_GET_SEALS) & (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL),
            F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  struct stat status {};
  ASSERT_EQ(fstat((*region)->fd(), &status), 0);
  EXPECT_EQ(status.st_size, 3 * kMegabyte);
  EXPECT_GE(status.st_blocks * 512, 3 * kMegabyte);
  EXPECT_EQ(std::count((*region)->data(), (*region)->data() + 3 * kMegabyte, 0), 3 * kMegabyte);
  EXPECT_NE(ftruncate((*region)->fd(), 0), 0);
  EXPECT_EQ((*region)->name(), "");
}

TEST(SharedRegion, NamedFileIsRemovedWithItsObject) {
  auto region = SharedRegion::Make(kMegabyte, true);
  ASSERT_TRUE(region.ok()) << region.status();
  const std::string path = "/dev/shm/" + (*region)->name();
  EXPECT_EQ((*region)->name().substr(0, 10), "headwater-");
  struct stat status {};
  ASSERT_EQ(stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  *region = nullptr;
  EXPECT_NE(stat(path.c_str(), &status), 0);
}

TEST(SharedRegion, UndoesPageLockingBeforeItIsUnmapped) {
  auto region = *SharedRegion::Make(kMegabyte, false);
  const uint8_t* const data = region->data();
  bool mapped_at_end = false;
  int locks = 0;
  const auto lock = [&]() -> std::function<void()> {
    ++locks;
    return [&] { mapped_at_end = msync(const_cast<uint8_t*>(data), kPage, MS_ASYNC) == 0; };
  };
  EXPECT_TRUE(region->LockOnce(lock));
  EXPECT_TRUE(region->LockOnce(lock));
  EXPECT_EQ(locks, 1);
  region.reset();
  EXPECT_TRUE(mapped_at_end);
}

TEST(SharedRegion, FailedPageLockingIsNotRetried) {
  const auto region = *SharedRegion::Make(kMegabyte, false);
  int tries = 0;
  const auto lock = [&]() -> std::function<void()> {
    ++tries;
    return nullptr;
  };
  EXPECT_FALSE(region->LockOnce(lock));
  EXPECT_FALSE(region->LockOnce(lock));
  EXPECT_EQ(tries, 1);
}

Wait Soon() { return std::chrono::system_clock::now() + std::chrono::seconds(30); }

TEST(SharedRegion, ReportsSocketErrors) {
  const auto region = *SharedRegion::Make(kMegabyte, false);
  const absl::Status none = PassDescriptor("/tmp/headwater-no-such-socket", region->fd(), region->bytes(), "", Soon()).status();
  EXPECT_THAT(std::string(none.message()), ::testing::HasSubstr("cannot be reached from here: No such file"));
  const absl::Status longer = PassDescriptor(std::string(200, '/'), region->fd(), region->bytes(), "", Soon()).status();
  EXPECT_THAT(std::string(longer.message()), ::testing::HasSubstr("too long"));
}

TEST(CopyThreads, CopyEverythingOnce) {
  CopyThreads copies(4);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    callers.emplace_back([&, seed] {
      std::mt19937 generator(seed);
      for (const int64_t bytes : {int64_t{0}, int64_t{1}, 4 * kMegabyte - 1, 4 * kMegabyte, 9 * kMegabyte + 5, 33 * kMegabyte}) {
        std::vector<uint8_t> from(static_cast<size_t>(bytes));
        for (uint8_t& byte : from) byte = static_cast<uint8_t>(generator());
        std::vector<uint8_t> to(static_cast<size_t>(bytes) + 1, 9);
        copies.Copy(to.data(), from.data(), bytes);
        if (!std::equal(from.begin(), from.end(), to.begin()) || to.back() != 9) ++wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
  CopyThreads alone(1);
  std::vector<uint8_t> from(9 * kMegabyte, 3);
  std::vector<uint8_t> to(9 * kMegabyte);
  alone.Copy(to.data(), from.data(), 9 * kMegabyte);
  EXPECT_EQ(from, to);
}

TEST(CudaDriver, ReportsWhyItIsMissing) {
  const auto driver = CudaDriver::Get();
  if (driver.ok()) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_THAT(std::string(driver.status().message()), ::testing::StartsWith("NVIDIA's driver"));
  EXPECT_EQ(CudaDriver::Get().status(), driver.status());
}

constexpr CuDevice kDevice = 3;

// One device with its primary context and one that a program has made. As in the driver, a context's objects end with it, and any
// use of them afterwards is an error. No copy is made before a thread waits for the event behind it.
struct FakeDevice {
  struct Copy {
    CuDevicePointer to;
    CuDevicePointer from;
    size_t bytes;
  };
  int primary_references = 0;
  int made_contexts = 0;  // of the primary one
  bool own_alive = false;
  std::vector<CuContext> stack;
  std::set<void*> alive;  // streams and events, of whichever context
  std::map<void*, CuContext> owner;
  uintptr_t next = 0x1000;
  int mistakes = 0;
  std::vector<Copy> enqueued;
  std::map<CuEvent, size_t> recorded;  // how many copies come before it
  size_t done = 0;
  size_t fails_at = SIZE_MAX;  // waiting for so many

  CuContext primary() const { return reinterpret_cast<CuContext>(uintptr_t{0x10}); }
  CuContext own() const { return reinterpret_cast<CuContext>(uintptr_t{0x20}); }
  bool Alive(CuContext context) const { return context == primary() ? primary_references > 0 : own_alive; }

  CuResult Retain(CuContext* context) {
    if (primary_references++ == 0) ++made_contexts;
    *context = primary();
    return 0;
  }
  CuResult Release() {
    if (primary_references == 0) ++mistakes;
    if (--primary_references == 0) {
      for (const auto& [thing, context] : owner) {
        if (context == primary()) alive.erase(thing);
      }
    }
    return 0;
  }
  template <typename Thing>
  CuResult Create(Thing* thing) {
    *thing = reinterpret_cast<Thing>(next++);
    alive.insert(*thing);
    owner[*thing] = stack.back();
    return 0;
  }
  CuResult Destroy(void* thing) {
    if (alive.erase(thing) == 0) ++mistakes;
    return 0;
  }
  CuResult RunCopies(size_t count) {
    for (; done < count; ++done) {
      const Copy& copy = enqueued[done];
      std::memcpy(reinterpret_cast<void*>(copy.to), reinterpret_cast<const void*>(copy.from), copy.bytes);
    }
    return count >= fails_at ? 700 : 0;
  }
};

FakeDevice* device = nullptr;

class DeviceContextTest : public testing::Test {
 protected:
  DeviceContextTest() {
    device = &device_;
    driver_.CtxPushCurrent = [](CuContext context) {
      if (!device->Alive(context)) ++device->mistakes;
      device->stack.push_back(context);
      return 0;
    };
    driver_.CtxPopCurrent = [](CuContext*) {
      device->stack.pop_back();
      return 0;
    };
    driver_.CtxGetDevice = [](CuDevice* ordinal) {
      *ordinal = kDevice;
      return device->stack.empty() ? 201 : 0;
    };
    driver_.DevicePrimaryCtxGetState = [](CuDevice ordinal, unsigned* flags, int* active) {
      *flags = 0;
      *active = device->primary_references > 0 ? 1 : 0;
      return ordinal == kDevice ? 0 : 101;
    };
    driver_.DevicePrimaryCtxRetain = [](CuContext* context, CuDevice ordinal) {
      return ordinal == kDevice ? device->Retain(context) : 101;
    };
    driver_.DevicePrimaryCtxRelease = [](CuDevice ordinal) { return ordinal == kDevice ? device->Release() : 101; };
    driver_.EventCreate = [](CuEvent* event, unsigned) { return device->Create(event); };
    driver_.EventDestroy = [](CuEvent event) { return device->Destroy(event); };
    driver_.IpcGetEventHandle = [](CuIpcHandle*, CuEvent) { return 0; };
    driver_.StreamCreate = [](CuStream* stream, unsigned) { return device->Create(stream); };
    driver_.StreamDestroy = [](CuStream stream) { return device->Destroy(stream); };
    driver_.MemcpyAsync = [](CuDevicePointer to, CuDevicePointer from, size_t bytes, CuStream) {
      device->enqueued.push_back({to, from, bytes});
      return 0;
    };
    driver_.EventRecord = [](CuEvent event, CuStream) {
      device->recorded[event] = device->enqueued.size();
      return 0;
    };
    driver_.EventSynchronize = [](CuEvent event) { return device->RunCopies(device->recorded.at(event)); };
    driver_.StreamSynchronize = [](CuStream) { return device->RunCopies(device->enqueued.size()); };
    driver_.GetErrorName = [](CuResult, const char** name) {
      *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
      return 0;
    };
  }

  FakeDevice device_;
  CudaDriver driver_;
};

TEST_F(DeviceContextTest, PrimaryContextOutlivesEarlierReleases) {
  CuContext context = nullptr;
  ASSERT_EQ(driver_.DevicePrimaryCtxRetain(&context, kDevice), 0);
  auto made = DeviceContext::Make(driver_, context);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(device_.alive.size(), 2u);  // the event and the stream
  ASSERT_EQ(driver_.DevicePrimaryCtxRelease(kDevice), 0);
  EXPECT_TRUE(device_.Alive(context));
  made->reset();
  EXPECT_EQ(device_.mistakes, 0);
  EXPECT_TRUE(device_.alive.empty());
  EXPECT_FALSE(device_.Alive(context));  // nothing is held forever
}

TEST_F(DeviceContextTest, ProgramsOwnContextIsLeftAlone) {
  device_.own_alive = true;
  for (const int references : {0, 1}) {
    device_.primary_references = references;
    {
      const auto made = DeviceContext::Make(driver_, device_.own());
      ASSERT_TRUE(made.ok()) << made.status();
      EXPECT_EQ(device_.primary_references, references);
    }
    EXPECT_EQ(device_.primary_references, references);
  }
  EXPECT_EQ(device_.made_contexts, 0);  // which takes hundreds of megabytes
  EXPECT_EQ(device_.mistakes, 0);
  EXPECT_TRUE(device_.alive.empty());
}

class DeviceReadTest : public DeviceContextTest {
 protected:
  DeviceReadTest() {
    device_.own_alive = true;
    context_ = *DeviceContext::Make(driver_, device_.own());
    for (size_t i = 0; i < from_.size(); ++i) from_[i] = static_cast<char>(i * 7 / 5);
  }
  ~DeviceReadTest() override {
    context_.reset();
    EXPECT_EQ(device_.mistakes, 0);
    EXPECT_TRUE(device_.alive.empty());
  }
  absl::StatusOr<std::unique_ptr<DeviceRead>> Begin() {
    return DeviceRead::Begin(context_, nullptr, to_.data(), from_.data(), static_cast<int64_t>(from_.size()));
  }

  static constexpr size_t kPiece = DeviceRead::kPieceBytes;
  std::shared_ptr<DeviceContext> context_;
  std::vector<char> from_ = std::vector<char>(2 * kPiece + 5);
  std::vector<char> to_ = std::vector<char>(from_.size());
};

TEST_F(DeviceReadTest, WaitsForTheNeededPieces) {
  const auto read = Begin();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(device_.enqueued.size(), 3u);
  EXPECT_EQ(device_.done, 1u);
  EXPECT_TRUE((*read)->Await(kPiece).ok());
  EXPECT_EQ(device_.done, 1u);
  EXPECT_TRUE((*read)->Await(kPiece + 1).ok());
  EXPECT_EQ(device_.done, 2u);
  EXPECT_TRUE((*read)->Await(static_cast<int64_t>(from_.size())).ok());
  EXPECT_EQ(to_, from_);
}

TEST_F(DeviceReadTest, ReleasesTheMemoryWhenAllHasArrived) {
  auto read = Begin();
  ASSERT_TRUE(read.ok()) << read.status();
  read->reset();
  EXPECT_EQ(device_.done, 3u);
}

TEST_F(DeviceReadTest, ReportsTheFailedCall) {
  device_.fails_at = 2;
  const auto read = Begin();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE((*read)->Await(1).ok());
  EXPECT_EQ((*read)->AwaitAll().message(), "cuEventSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS");
  device_.fails_at = 1;
  EXPECT_EQ(Begin().status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(device_.done, device_.enqueued.size());
}

}  // namespace
}  // namespace headwater::client::internal
