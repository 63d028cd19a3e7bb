// What the core does beside its typed faces: contributions that a caller has abandoned are discarded before its step is sealed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/core/core.h"
#include "headwater/client/error.h"
#include "headwater/client/future.h"
#include "tests/e2e/cpp/support/scripted_server.h"

namespace headwater::e2e {
namespace {

using namespace client;
using namespace client::internal;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ElementsAre;

// A core, and a server that notes what it is asked to do.
class ClientCore : public testing::Test {
 protected:
  ClientCore() {
    server_.discard = [this](const v1::DiscardMicroBatchRequest& request) {
      std::lock_guard<std::mutex> lock(mutex_);
      noted_.push_back("discard " + std::to_string(request.micro_batch()));
      return discard_status_;
    };
    server_.seal = [this](const v1::SealStepRequest&) {
      std::lock_guard<std::mutex> lock(mutex_);
      noted_.push_back("seal");
      return grpc::Status::OK;
    };
    ClientOptions options = {.timeout = seconds(10),
                             .retry = {.max_attempts = 2, .initial_backoff = milliseconds(1), .max_backoff = milliseconds(1)},
                             .transport = Transport::kGrpc};
    core_ = *Core::Open(server_.target(), options);
  }

  static v1::HeadStep Step() {
    v1::HeadStep step;
    step.set_head("tenants/default/heads/h");
    step.set_head_epoch(std::string(16, 'e'));
    step.set_step(0);
    return step;
  }
  static v1::DiscardMicroBatchRequest Discard(int64_t micro_batch) {
    v1::DiscardMicroBatchRequest request;
    *request.add_heads() = Step();
    request.set_micro_batch(micro_batch);
    return request;
  }
  absl::Status Seal() {
    auto request = std::make_unique<v1::SealStepRequest>();
    *request->mutable_head() = Step();
    const auto state = std::make_shared<FutureState<Answer>>();
    const auto call = core_->NewCall(core_->MakeRequest(std::move(request), {}, DeadlineIn(seconds(20))),
                                     [state](absl::StatusOr<Answer> answer) { state->Set(std::move(answer)); });
    call->Start();
    return state->Take().status();
  }
  void AnswerDiscards(const grpc::Status& status) {
    std::lock_guard<std::mutex> lock(mutex_);
    discard_status_ = status;
  }
  std::vector<std::string> noted() {
    std::lock_guard<std::mutex> lock(mutex_);
    return noted_;
  }

  ScriptedServer server_;
  std::mutex mutex_;
  grpc::Status discard_status_;
  std::vector<std::string> noted_;
  std::shared_ptr<Core> core_;
};

TEST_F(ClientCore, ASealWaitsUntilWhatWasAbandonedIsDiscarded) {
  core_->abandoned().Add(Discard(3));
  core_->abandoned().Add(Discard(4));
  EXPECT_TRUE(Seal().ok());
  EXPECT_THAT(noted(), ElementsAre("discard 3", "discard 4", "seal"));
}

TEST_F(ClientCore, WhatCouldNotBeDiscardedIsTriedOnceMoreByWhoWaitsForIt) {
  AnswerDiscards(ErrorWithReason(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED"));
  core_->abandoned().Add(Discard(3));
  while (noted().empty() || core_->abandoned().Mark(Discard(3)) == 1) std::this_thread::sleep_for(milliseconds(5));
  EXPECT_TRUE(Seal().ok());
  EXPECT_EQ(noted().back(), "seal");
  EXPECT_GE(noted().size(), 3U);
  // What is gone by itself is not tried again.
  AnswerDiscards(ErrorWithReason(grpc::StatusCode::FAILED_PRECONDITION, "STEP_MISMATCH"));
  EXPECT_TRUE(Seal().ok());
  EXPECT_EQ(core_->abandoned().Mark(Discard(3)), -1);
}

}  // namespace
}  // namespace headwater::e2e
