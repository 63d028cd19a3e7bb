// What the core does beside its typed faces: turns, abandoned micro-batches, closing, waiting that ends with the program.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
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
using testing::HasSubstr;

constexpr char kCompute[] = "/headwater.v1.LossService/ComputeLoss";
constexpr char kHead[] = "tenants/default/heads/h";

class ClientCore : public testing::Test {
 protected:
  ClientCore() {
    server_.compute_loss = [this](grpc::ServerContext*, ScriptedServer::LossStream* stream) {
      v1::ComputeLossRequest request;
      stream->Read(&request);
      Note("loss " + std::to_string(request.header().micro_batch()));
      const int now = ++under_way_;
      for (int most = most_; now > most && !most_.compare_exchange_weak(most, now);) {
      }
      while (held_) std::this_thread::sleep_for(milliseconds(1));
      --under_way_;
      v1::ComputeLossResponse response;
      response.mutable_summary()->add_terms();
      response.mutable_summary()->set_state(v1::CONTRIBUTION_STATE_COMMITTED);
      stream->Write(response);
      return grpc::Status::OK;
    };
    server_.discard = [this](const v1::DiscardMicroBatchRequest& request) {
      Note("discard " + std::to_string(request.micro_batch()) + "." + std::to_string(request.attempt()));
      std::lock_guard<std::mutex> lock(mutex_);
      return discard_status_;
    };
    server_.seal = [this](const v1::SealStepRequest&) {
      Note("seal");
      return grpc::Status::OK;
    };
  }
  ~ClientCore() override { held_ = false; }

  void Connect(const std::function<void(ClientOptions&)>& change = [](ClientOptions&) {}) {
    ClientOptions options = {.timeout = seconds(10),
                             .retry = {.max_attempts = 2, .initial_backoff = milliseconds(1), .max_backoff = milliseconds(1)},
                             .transport = Transport::kGrpc};
    options.on_notice = [](const std::string&) {};
    change(options);
    auto core = Core::Open(server_.target(), options);
    ASSERT_TRUE(core.ok()) << core.status();
    core_ = *std::move(core);
  }

  v1::HeadStep Step() {
    v1::HeadStep step;
    step.set_head(kHead);
    step.set_head_epoch(std::string(16, 'e'));
    step.set_step(0);
    return step;
  }

  // A call that is under way.
  struct Started {
    std::shared_ptr<Call> call;
    std::shared_ptr<FutureState<Answer>> state;
    ~Started() {
      if (call != nullptr) call->Cancel();
    }
  };
  template <typename Message>
  std::unique_ptr<Started> Start(const Message& message, bool is_background = false) {
    Request request = core_->MakeRequest(std::make_unique<Message>(message), {}, DeadlineIn(seconds(20)));
    request.is_background = is_background;
    auto started = std::make_unique<Started>();
    started->state = std::make_shared<FutureState<Answer>>();
    started->call = core_->NewCall(std::move(request),
                                   [state = started->state](absl::StatusOr<Answer> answer) { state->Set(std::move(answer)); });
    started->call->Start();
    return started;
  }
  std::unique_ptr<Started> StartLoss(int64_t micro_batch) {
    v1::MicroBatchHeader header;
    header.set_micro_batch(micro_batch);
    header.set_compute_mode(v1::COMPUTE_MODE_FORWARD_BACKWARD);
    header.set_return_grad_hidden(false);
    *header.add_terms()->mutable_head() = Step();
    return Start(header);
  }
  std::unique_ptr<Started> StartSeal() {
    v1::SealStepRequest seal;
    *seal.mutable_head() = Step();
    return Start(seal);
  }
  v1::DiscardMicroBatchRequest Discard(int64_t micro_batch) {
    v1::DiscardMicroBatchRequest request;
    *request.add_heads() = Step();
    request.set_micro_batch(micro_batch);
    return request;
  }

  void Note(const std::string& what) {
    std::lock_guard<std::mutex> lock(mutex_);
    noted_.push_back(what);
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
  std::atomic<bool> held_ = false;
  std::atomic<int> under_way_ = 0;
  std::atomic<int> most_ = 0;
  grpc::Status discard_status_;
  std::mutex mutex_;
  std::vector<std::string> noted_;
  std::shared_ptr<Core> core_;
};

TEST_F(ClientCore, SixteenMicroBatchesAreUnderWayAndOtherCallsDoNotWaitForThem) {
  Connect();
  held_ = true;
  std::vector<std::unique_ptr<Started>> losses;
  for (int i = 0; i < 40; ++i) losses.push_back(StartLoss(i));
  while (under_way_ < 16) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_TRUE(StartSeal()->state->Take().ok());
  // One that waits is cancelled without having been sent.
  losses[39]->call->Cancel();
  EXPECT_EQ(losses[39]->state->Take().status().code(), absl::StatusCode::kCancelled);
  held_ = false;
  for (int i = 0; i < 39; ++i) EXPECT_TRUE(losses[static_cast<size_t>(i)]->state->Take().ok()) << i;
  EXPECT_EQ(most_, 16);
  EXPECT_EQ(server_.CallsOf("ComputeLoss").size(), 39U);
}

TEST_F(ClientCore, ASealWaitsUntilWhatWasAbandonedIsDiscarded) {
  Connect();
  EXPECT_TRUE(StartLoss(3)->state->Take().ok());
  core_->abandoned().Add(Discard(3));
  core_->abandoned().Add(Discard(4));
  EXPECT_TRUE(StartSeal()->state->Take().ok());
  EXPECT_THAT(noted(), ElementsAre("loss 3", "discard 3.0", "discard 4.0", "seal"));
}

TEST_F(ClientCore, WhatCouldNotBeDiscardedIsTriedOnceMoreByWhoWaitsForIt) {
  Connect();
  AnswerDiscards(ErrorWithReason(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED"));
  core_->abandoned().Add(Discard(3));
  while (noted().empty() || core_->abandoned().Mark(Discard(3)) == 1) std::this_thread::sleep_for(milliseconds(5));
  EXPECT_TRUE(StartSeal()->state->Take().ok());
  EXPECT_EQ(noted().back(), "seal");
  EXPECT_GE(noted().size(), 3U);
  // What is gone by itself is not tried again.
  AnswerDiscards(ErrorWithReason(grpc::StatusCode::FAILED_PRECONDITION, "STEP_MISMATCH"));
  EXPECT_TRUE(StartSeal()->state->Take().ok());
  EXPECT_EQ(core_->abandoned().Mark(Discard(3)), -1);
}

}  // namespace
}  // namespace headwater::e2e
