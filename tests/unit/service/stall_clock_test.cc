// StallClock: when an engine is taken to be stuck, by a clock that the test turns.
#include "server/service/stall_clock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "absl/time/time.h"
#include "headwater/kernels/error.h"
#include "tests/integration/support/gated_engine.h"

namespace headwater::service {
namespace {

using ::headwater::testing::Gate;
using ::headwater::testing::GatedEngine;
using ::testing::HasSubstr;

class Stall : public ::testing::Test {
 protected:
  Stall() {
    EngineOptions options;
    options.thread_count = 1;
    engine_ = std::make_unique<GatedEngine>(*CreateCpuEngine(options), gate_);
    engine_->Observe(std::make_shared<StallClock>(absl::Seconds(3), [this] { return absl::FromUnixSeconds(seconds_.load()); }));
  }
  ~Stall() override {
    gate_->Open();
    if (call_.joinable()) call_.join();
  }
  // A self-test that stands in its first Compute().
  void BeginToCompute() {
    gate_->Close();
    call_ = std::thread([this] { EXPECT_TRUE(SelfTest(*engine_).ok()); });
    gate_->AwaitWaiting();
    EXPECT_TRUE(engine_->health().ok());  // sees the call
  }
  bool HealthyAfter(int64_t seconds) {
    seconds_ += seconds;
    return engine_->health().ok();
  }

  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  std::atomic<int64_t> seconds_{1000};
  std::unique_ptr<GatedEngine> engine_;
  std::thread call_;
};

TEST_F(Stall, IsStuckWhenACallGetsNoFurtherForTheWholeTime) {
  BeginToCompute();
  EXPECT_TRUE(HealthyAfter(1));
  EXPECT_TRUE(HealthyAfter(1));
  EXPECT_FALSE(HealthyAfter(1));
  const absl::Status health = engine_->health();
  EXPECT_EQ(GetErrorReason(health), ErrorReason::kEngineFailed);
  EXPECT_THAT(std::string(health.message()), HasSubstr("Compute has got no further for 3s"));
  gate_->Open();
  call_.join();
  EXPECT_FALSE(HealthyAfter(1));  // for good
}

TEST_F(Stall, GettingOnBeginsTheTimeAnew) {
  BeginToCompute();
  EXPECT_TRUE(HealthyAfter(1));
  EXPECT_TRUE(HealthyAfter(1));
  gate_->GetOn();
  EXPECT_TRUE(HealthyAfter(1));
  EXPECT_TRUE(HealthyAfter(1));
  EXPECT_TRUE(HealthyAfter(1));
  EXPECT_FALSE(HealthyAfter(1));
}

TEST_F(Stall, TheProcessMayHaveBeenStopped) {
  BeginToCompute();
  EXPECT_TRUE(HealthyAfter(3600));  // one look, which counts as a second
  EXPECT_TRUE(HealthyAfter(3600));
  EXPECT_FALSE(HealthyAfter(3600));
}

TEST_F(Stall, AnEngineWithoutWorkIsNot) {
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(HealthyAfter(1));
  EXPECT_TRUE(SelfTest(*engine_).ok());
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(HealthyAfter(1));
}

TEST_F(Stall, ALostDeviceIsToldAsTheEngineTellsIt) {
  gate_->Lose(MakeError(ErrorReason::kEngineFailed, "an illegal memory access was encountered"));
  EXPECT_THAT(std::string(engine_->health().message()), HasSubstr("illegal memory access"));
}

TEST(CpuEngineProgress, RisesWhileItComputes) {
  EngineOptions options;
  options.thread_count = 1;
  const auto engine = *CreateCpuEngine(options);
  const int64_t before = engine->progress();
  EXPECT_TRUE(SelfTest(*engine).ok());
  EXPECT_GT(engine->progress(), before);
}

}  // namespace
}  // namespace headwater::service
