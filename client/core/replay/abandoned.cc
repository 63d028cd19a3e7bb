#include "client/core/replay/abandoned.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <string>
#include <utility>

#include "client/core/call/messages.h"
#include "client/core/core.h"

namespace headwater::client::internal {
namespace {

// Whether the contribution may still exist: otherwise its step is closed or its head is deleted.
bool MayBeThere(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsCancelled(status) ||
         absl::IsResourceExhausted(status);
}

}  // namespace

void Abandoned::Add(v1::DiscardMicroBatchRequest request) {
  std::lock_guard<std::mutex> lock(mutex_);
  left_.push_back(std::move(request));
  BeginPass();
}

int64_t Abandoned::Mark(const google::protobuf::Message& message) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (left_.empty()) return -1;
  }
  std::set<std::string> heads;
  ForEachHead(message, [&](const NamedHead& head) { heads.insert(head.name); });
  std::lock_guard<std::mutex> lock(mutex_);
  const bool concerned = std::any_of(left_.begin(), left_.end(), [&](const v1::DiscardMicroBatchRequest& request) {
    return std::any_of(request.heads().begin(), request.heads().end(),
                       [&](const v1::HeadStep& head) { return heads.contains(head.head()); });
  });
  if (!concerned) return -1;
  BeginPass();
  return passes_ + 1;
}

bool Abandoned::IsSettled(int64_t pass) {
  std::lock_guard<std::mutex> lock(mutex_);
  return passes_ >= pass;
}

void Abandoned::Stop() {
  std::unique_lock<std::mutex> lock(mutex_);
  stopping_ = true;
  changed_.wait(lock, [this] { return !is_calling_; });
}

void Abandoned::BeginPass() {
  if (in_pass_) return;
  in_pass_ = true;
  core_.timers().Run(this, std::chrono::nanoseconds(0), [this] { DiscardNext(); });
}

void Abandoned::DiscardNext() {
  std::shared_ptr<Call> call;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return;
    Request request{.method = &MethodOf(left_.front()),
                    .message = std::make_unique<v1::DiscardMicroBatchRequest>(left_.front()),
                    .deadline = DeadlineIn(core_.options().timeout),
                    .is_background = true};
    is_calling_ = true;
    // Not kept beyond the core's life, which ends with Stop().
    call = call_ = std::make_shared<Call>(std::shared_ptr<Core>(std::shared_ptr<void>(), &core_), std::move(request),
                                          CallMode::kNormal, [this](const absl::StatusOr<Answer>& answer) {
                                            std::lock_guard<std::mutex> ended(mutex_);
                                            is_calling_ = false;
                                            changed_.notify_all();
                                            if (stopping_) return;
                                            // On another thread: this one is deep inside the call.
                                            core_.timers().Run(this, std::chrono::nanoseconds(0),
                                                               [this, status = answer.status()] { Discarded(status); });
                                          });
  }
  call->Start();
}

void Abandoned::Discarded(const absl::Status& status) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    call_.reset();
    if (!MayBeThere(status)) {
      left_.pop_front();
      if (!left_.empty()) {
        core_.timers().Run(this, std::chrono::nanoseconds(0), [this] { DiscardNext(); });
        return;
      }
    }
    in_pass_ = false;
    ++passes_;
  }
  core_.waiting().HurryAll();
}

}  // namespace headwater::client::internal
