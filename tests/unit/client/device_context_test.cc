// The client's hold on a CUDA context, and its reads of device memory, on a driver that only counts. The owner of device memory may
// release the context before the client ends, as a program does that frees its rows first.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "client/core/rows/memory/cuda_driver.h"
#include "client/core/rows/memory/device_memory.h"

namespace headwater::client::internal {
namespace {

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
