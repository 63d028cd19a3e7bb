// What the client holds of a CUDA context, on a driver that only counts: whoever has handed out device memory may let go of the
// context before the client goes, as a program does that frees its rows first.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "client/cpp/src/memory/cuda_driver.h"
#include "client/cpp/src/memory/device_memory.h"

namespace headwater::client::internal {
namespace {

constexpr CuDevice kDevice = 3;

// One device with its primary context and one that a program has made. As in the driver, what belongs to a context goes with it,
// and whoever uses a thing that has gone makes a mistake.
struct FakeDevice {
  int primary_references = 0;
  int made_contexts = 0;  // of the primary one
  bool own_alive = false;
  std::vector<CuContext> stack;
  std::set<void*> alive;  // streams and events, of whichever context
  std::map<void*, CuContext> owner;
  uintptr_t next = 0x1000;
  int mistakes = 0;

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
  }

  FakeDevice device_;
  CudaDriver driver_;
};

TEST_F(DeviceContextTest, APrimaryContextOutlivesThoseWhoLetGoOfItFirst) {
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
  EXPECT_FALSE(device_.Alive(context));  // nothing is held for ever
}

TEST_F(DeviceContextTest, AProgramsOwnContextIsLeftAlone) {
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

}  // namespace
}  // namespace headwater::client::internal
