#include "client/cpp/src/retried_call.h"

#include <exception>
#include <functional>
#include <utility>

#include "headwater/client/error.h"

namespace headwater::client::internal {
namespace {

// How often a call opens a session anew: more means that the server forgets them as fast.
constexpr int kMaxSessionLosses = 3;

}  // namespace

RetriedCall::RetriedCall(std::shared_ptr<Connection> connection, HeadUses heads, bool in_session, Deadline deadline, CallMode mode)
    : connection_(std::move(connection)),
      heads_(std::move(heads)),
      in_session_(in_session),
      mode_(mode),
      retry_(connection_->options().retry, deadline, Repeat::kSafe) {}

void RetriedCall::Cancel() {
  cancel_.request_stop();
  std::function<void()> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (context_ != nullptr) context_->TryCancel();
    waiting = connection_->row_transport().beginnings().Withdraw(this);
  }
  CancelAttempt();
  if (waiting) connection_->row_transport().endings().Run(this, std::move(waiting));  // as of RowsCall::Cancel()
  connection_->timers().Hurry(this);
}

absl::Status RetriedCall::CancelledError() const {
  return MakeLocalError(v1::ERROR_REASON_CANCELLED, absl::StatusCode::kCancelled, "the call was cancelled");
}

void RetriedCall::Begin() {
  GoOn([this] { TryBegin(); });
}

void RetriedCall::TryBegin() {
  if (cancelled()) return SetError(CancelledError());
  if (in_session_) {
    absl::StatusOr<std::string> id = connection_->session().Id({retry_.deadline(), cancel_.get_token()});
    if (!id.ok()) return Failed(id.status());
    session_id_ = *std::move(id);
  }
  if (mode_ == CallMode::kNormal) {
    if (!connection_->replay_log().TryEnter(heads_)) {
      connection_->recoveries().Run(this, std::chrono::nanoseconds(0), [this] {
        GoOn([this] {
          absl::Status late = connection_->replay_log().WaitForRecovery(retry_.deadline());
          late.ok() ? Begin() : SetError(std::move(late));
        });
      });
      return;
    }
    entered_ = true;
    for (HeadUse& use : heads_) use.epoch = use.state->epoch();
  }
  ++attempt_count_;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    context_ = std::make_unique<grpc::ClientContext>();
    context_->set_deadline(retry_.deadline());
    if (cancelled()) context_->TryCancel();
  }
  StartAttempt();
}

void RetriedCall::Leave() {
  if (entered_) connection_->replay_log().Leave(heads_);
  entered_ = false;
}

void RetriedCall::Succeeded() { Leave(); }

void RetriedCall::Failed(absl::Status status) {
  Leave();
  React([&] { GoOnAfter(status); }, [&](const absl::Status&) { SetError(std::move(status)); });  // which says more
}

void RetriedCall::GoOnAfter(const absl::Status& status) {
  if (cancelled()) return SetError(status);
  if (mode_ == CallMode::kNormal && recovery_count_ < kMaxRecoveries && MayRecover(connection_->replay_log(), status)) {
    ++recovery_count_;
    connection_->recoveries().Run(this, std::chrono::nanoseconds(0), [this, status] {
      GoOn([&] {
        absl::Status recovered = Recover(*connection_, heads_, status, retry_.deadline(), [this] { return cancelled(); });
        recovered.ok() ? Begin() : SetError(std::move(recovered));
      });
    });
    return;
  }
  std::chrono::nanoseconds delay{0};
  if (in_session_ && session_loss_count_ < kMaxSessionLosses && ErrorReason(status) == "SESSION_NOT_FOUND") {
    ++session_loss_count_;
    connection_->session().Forget(session_id_);
  } else if (const auto back_off = retry_.AfterFailure(status); back_off.has_value()) {
    delay = *back_off;
  } else {
    return SetError(status);
  }
  // Under the lock, so that Cancel() either is seen here or finds the task, which takes it first: until it is released the call
  // cannot end.
  std::lock_guard<std::mutex> lock(mutex_);
  connection_->timers().Run(this, cancelled() ? std::chrono::nanoseconds(0) : delay, [this] {
    {
      std::lock_guard<std::mutex> begun(mutex_);
      // To wait for a session would hold up everybody's timers.
      if (in_session_ && !cancelled() && BeginOnWorker()) return;
    }
    Begin();
  });
}

bool RetriedCall::BeginOnWorker() {
  try {
    connection_->row_transport().endings().Prepare();  // for Cancel()
    connection_->row_transport().beginnings().Run(this, [this] {
      { std::lock_guard<std::mutex> begun(mutex_); }
      Begin();
    });
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

}  // namespace headwater::client::internal
