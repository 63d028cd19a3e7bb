#include "client/cpp/src/retried_call.h"

#include <exception>
#include <functional>
#include <memory>
#include <optional>
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
      retry_(connection_->MakeRetry(deadline, Repeat::kSafe)) {}

void RetriedCall::Cancel() {
  cancel_.request_stop();
  std::function<void()> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (context_ != nullptr) context_->TryCancel();
    waiting = connection_->row_transport().beginnings().Withdraw(this);
  }
  CancelAttempt();
  if (waiting) {  // as in RowsCall::Cancel()
    try {
      connection_->row_transport().endings().Run(this, waiting);
    } catch (const std::exception&) {
      waiting();
    }
  }
  connection_->timers().Hurry(this);
  connection_->waiting().Hurry(this);
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
    absl::StatusOr<std::string> id = connection_->session().Id(Until());
    if (!id.ok()) return Failed(id.status());
    session_id_ = *std::move(id);
  }
  if (mode_ == CallMode::kNormal) {
    if (!connection_->replay_log().TryEnter(heads_)) return AwaitRecovery([this] { BeginOnTimer(); });
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
  if (mode_ == CallMode::kNormal && recovery_count_ < kMaxRecoveries && MayRecover(connection_->replay_log(), status)) {
    ++recovery_count_;
    return RecoverFrom(status);
  }
  if (cancelled()) return SetError(status);
  std::chrono::nanoseconds delay{0};
  if (in_session_ && session_loss_count_ < kMaxSessionLosses && ErrorReason(status) == "SESSION_NOT_FOUND") {
    ++session_loss_count_;
    connection_->session().Forget(session_id_);
  } else if (const auto back_off = retry_.AfterFailure(status); back_off.has_value()) {
    delay = *back_off;
  } else {
    return SetError(status);
  }
  BeginAfter(delay);
}

void RetriedCall::BeginAfter(std::chrono::nanoseconds delay) {
  // Under the lock, so that Cancel() either is seen here or finds the task, which takes it first: until it is released the call
  // cannot end.
  std::lock_guard<std::mutex> lock(mutex_);
  connection_->timers().Run(this, cancelled() ? std::chrono::nanoseconds(0) : delay, [this] { BeginOnTimer(); });
}

void RetriedCall::BeginOnTimer() {
  {
    std::lock_guard<std::mutex> begun(mutex_);
    // To wait for a session would hold up everybody's timers.
    if (in_session_ && !cancelled() && BeginOnWorker()) return;
  }
  Begin();
}

void RetriedCall::AwaitRecovery(std::function<void()> go_on) {
  if (!Until().Check().ok()) return SetError(EndedInRecovery(Until()));
  std::lock_guard<std::mutex> lock(mutex_);  // as in BeginAfter()
  const std::chrono::nanoseconds left =
      cancelled() ? std::chrono::nanoseconds(0) : retry_.deadline() - std::chrono::system_clock::now();
  connection_->waiting().Run(this, left, [this, go_on = std::move(go_on)] {
    { std::lock_guard<std::mutex> begun(mutex_); }
    go_on();
  });
  // The recovery may have ended before the task was there to be hurried.
  if (!connection_->replay_log().recovering()) connection_->waiting().Hurry(this);
}

void RetriedCall::RecoverFrom(const absl::Status& cause) {
  if (!Until().Check().ok()) return SetError(EndedInRecovery(Until()));
  if (IsRecovered(heads_)) return BeginAfter(std::chrono::nanoseconds(0));
  std::optional<ReplayLog::Gate> gate = connection_->replay_log().TryClose();
  if (!gate.has_value()) {
    return AwaitRecovery([this, cause] { GoOn([&] { RecoverFrom(cause); }); });
  }
  const auto closed = std::make_shared<ReplayLog::Gate>(*std::move(gate));
  std::lock_guard<std::mutex> lock(mutex_);  // as in BeginAfter()
  connection_->recoveries().Run(this, std::chrono::nanoseconds(0), [this, cause, closed] {
    { std::lock_guard<std::mutex> begun(mutex_); }
    GoOn([&] {
      absl::Status recovered = Recover(*connection_, std::move(*closed), heads_, cause, Until());
      recovered.ok() ? BeginAfter(std::chrono::nanoseconds(0)) : SetError(std::move(recovered));
    });
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
