// An engine whose device is lost: health tells at once, every call in progress and every new one is answered ENGINE_FAILED,
// whatever it was doing, and the server can be drained. What the process does then is tests/e2e/cpp/cuda_module_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>

#include "headwater/kernels/error.h"
#include "tests/integration/support/open_stream.h"
#include "tests/integration/support/raw_call.h"
#include "tests/integration/support/wire_server.h"

namespace headwater::testing {
namespace {

using ::testing::HasSubstr;

absl::Status Illegal() {
  return MakeError(ErrorReason::kEngineFailed, "an illegal memory access was encountered",
                   {{"cudaError", "cudaErrorIllegalAddress"}});
}

class DeviceLost : public ::testing::Test {
 protected:
  DeviceLost() {
    ServerSetup setup;
    setup.options.on_engine_lost = [this](const absl::Status& lost) {
      health_when_told_ = Health(server_->NewChannel(), "");
      message_ = std::string(lost.message());
      ++told_;
    };
    setup.options.limits.max_queue_depth = 8;
    setup.options.queue_widths = {1, 1};
    server_ = std::make_unique<WireServer>(setup);
  }
  int HealthOf(const std::string& service) { return Health(server_->NewChannel(), service); }
  LossReply Compute(const TestHead& head, int64_t step = 0) {
    return server_->Compute(CrossEntropyHeader(head, step, 0, {1, 2, 3}), Bytes(Random(15, 5, 1)));
  }
  static void ExpectLost(const grpc::Status& status, const char* what) {
    const WireError error = DecodeError(status);
    EXPECT_EQ(error.code, grpc::StatusCode::INTERNAL) << what;
    EXPECT_EQ(error.reason, "ENGINE_FAILED") << what << ": " << error.message;
    EXPECT_THAT(error.message, HasSubstr("the engine's device is lost")) << what;
    EXPECT_THAT(error.message, HasSubstr("an illegal memory access was encountered")) << what;
    EXPECT_EQ(error.at("cudaError"), "cudaErrorIllegalAddress") << what;
  }

  std::atomic<int> told_{0};
  std::atomic<int> health_when_told_{0};
  std::string message_;  // read after told_
  std::unique_ptr<WireServer> server_;
};

TEST_F(DeviceLost, HealthTellsBeforeTheCallThatMetItIsAnswered) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  EXPECT_EQ(ReasonOf(Compute(head).status), "OK");
  EXPECT_EQ(HealthOf("headwater.v1.LossService"), 1);
  server_->gate().Lose(Illegal());
  ExpectLost(Compute(head).status, "the call that meets it");
  for (const char* service :
       {"", "headwater.v1.LossService", "headwater.v1.HeadService", "headwater.v1.SessionService", "headwater.v1.GroupService"}) {
    EXPECT_EQ(HealthOf(service), 2) << service;
  }
  EXPECT_TRUE(Await([&] { return told_ == 1; }));  // by the watch that met it too, if that was a moment earlier
  EXPECT_EQ(health_when_told_, 2);
  EXPECT_EQ(server_->MetricLine("headwater_serving"), "headwater_serving 0");
  v1::Head unused;
  ExpectLost(server_->Create("tenants/default/heads/other", SmallSpec(), &unused), "a new call");
  EXPECT_TRUE(server_->Call(&Sessions::GetServerInfo, {}).ok());  // tells about itself to the end
  EXPECT_TRUE(server_->server().Drain(absl::Seconds(5)));
  EXPECT_EQ(told_, 1);
  EXPECT_THAT(message_, HasSubstr("illegal memory access"));
}

TEST_F(DeviceLost, AFailureThatTheDeviceSurvivesIsTheCallsAlone) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  server_->gate().FailNext(MakeError(ErrorReason::kEngineFailed, "shard 0 failed"));
  const WireError error = DecodeError(Compute(head).status);
  EXPECT_EQ(error.reason, "ENGINE_FAILED");
  EXPECT_THAT(error.message, HasSubstr("shard 0 failed"));
  EXPECT_EQ(told_, 0);
  EXPECT_EQ(HealthOf(""), 1);
}

// One call in the engine, one in the queue, one that waits for the next step, one seal, and one that still uploads.
TEST_F(DeviceLost, EveryCallInProgressIsAnswered) {
  const TestHead computing = server_->MakeHead("computing", SmallSpec());
  const TestHead queued = server_->MakeHead("queued", SmallSpec());
  const TestHead waiting = server_->MakeHead("waiting", SmallSpec());
  const TestHead uploading = server_->MakeHead("uploading", SmallSpec());

  const std::string row = Bytes(Random(5, 1, 1));
  OpenStream upload(server_->loss(), CrossEntropyHeader(uploading, 0, 0, {1, 2, 3}), row, 1);
  ASSERT_TRUE(server_->AwaitInFlight());

  server_->gate().Close();
  std::thread in_engine([&] { ExpectLost(Compute(computing).status, "in the engine"); });
  server_->gate().AwaitWaiting();
  std::thread in_queue([&] { ExpectLost(Compute(queued).status, "in the queue"); });
  std::thread for_step([&] { ExpectLost(Compute(waiting, 1).status, "waiting for the next step"); });
  std::thread for_seal([&] {
    v1::SealStepRequest request;
    *request.mutable_head() = server_->At(waiting, 0);
    request.mutable_expected()->mutable_ids()->add_ids(3);
    request.set_wait(true);
    ExpectLost(server_->Call(&Heads::SealStep, request), "a seal that waits");
  });
  EXPECT_TRUE(server_->AwaitMetric("headwater_queue_depth", 1));
  EXPECT_TRUE(server_->AwaitMetric("headwater_waiting_calls", 2));

  // The gate stays closed: only the call in the engine has to wait for it.
  server_->gate().Lose(Illegal());
  in_queue.join();
  for_step.join();
  for_seal.join();
  upload.Send(HiddenChunk(row, 1, 1));
  ExpectLost(upload.End(), "in the middle of an upload");
  server_->gate().Open();
  in_engine.join();
  EXPECT_TRUE(Await([&] { return told_ == 1; }));
}

TEST_F(DeviceLost, WhileTheServerStarts) {
  ServerSetup setup;
  setup.ready = false;
  WireServer server(setup);
  server.gate().Lose(Illegal());
  EXPECT_FALSE(server.server().BecomeReady().ok());
  EXPECT_EQ(Health(server.NewChannel(), ""), 2);
}

}  // namespace
}  // namespace headwater::testing
