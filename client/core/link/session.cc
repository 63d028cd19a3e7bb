#include "client/core/link/session.h"

#include <algorithm>

#include "client/core/link/duration.h"
#include "client/core/link/error.h"
#include "headwater/client/error.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {
namespace {

using std::chrono::nanoseconds;

// How long a server may take to open a session, at least: whoever gave up before finds it open afterwards.
constexpr std::chrono::seconds kOpenTimeout{30};
// However short a lease is granted.
constexpr nanoseconds kShortestPause = std::chrono::milliseconds(10);
// How soon a renewal that failed is tried again, if the lease is not much shorter.
constexpr nanoseconds kRetryPause = std::chrono::seconds(1);

// Two renewals may be lost before the lease ends.
nanoseconds RenewalPause(nanoseconds lease) { return std::max(lease / 3, kShortestPause); }

}  // namespace

void Session::Close(Deadline deadline) {
  std::shared_ptr<Opening> opening;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    if (renewal_ != nullptr) renewal_->TryCancel();
    changed_.notify_all();
    opening = opening_;
  }
  if (opening != nullptr) {
    opening->context.TryCancel();  // without the lock: gRPC may call back at once
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return opening->over; });
  }
  if (thread_.joinable()) thread_.join();
  const std::string id = std::exchange(id_, "");
  if (id.empty()) return;
  grpc::ClientContext context;
  context.set_deadline(deadline);
  v1::CloseSessionRequest request;
  request.set_session_id(id);
  v1::CloseSessionResponse response;
  stub_->CloseSession(&context, request, &response);
}

absl::StatusOr<std::string> Session::Id(const Wait& wait) {
  if (options_.session_lease.count() == 0) return std::string();
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (!id_.empty()) return id_;
    if (stopping_) return absl::FailedPreconditionError("the client is closed");
    HEADWATER_RETURN_IF_ERROR(wait.Check());
    std::shared_ptr<Opening> opening = opening_;
    const bool mine = opening == nullptr || opening->over;
    if (mine) {
      if (stub_ == nullptr) stub_ = v1::SessionService::NewStub(MakeChannel(target_, options_));
      opening = opening_ = std::make_shared<Opening>();
      lock.unlock();  // gRPC may call back at once
      Open(opening.get(), wait.deadline);
      lock.lock();
    }
    if (!changed_.wait_until(lock, wait.cancel, wait.deadline, [&] { return opening->over; })) return wait.Ended();
    if (opening->status.ok()) return opening->response.session_id();
    // Another one's opening may have been made for a deadline that was nearer.
    if (mine || !absl::IsDeadlineExceeded(opening->status)) return opening->status;
  }
}

std::string Session::OpenId() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return id_;
}

void Session::Open(Opening* opening, Deadline deadline) {
  opening->context.set_deadline(std::max<Deadline>(deadline, std::chrono::system_clock::now() + kOpenTimeout));
  opening->request.set_client_name(options_.client_name);
  *opening->request.mutable_lease() = ToProto(options_.session_lease);
  stub_->async()->OpenSession(&opening->context, &opening->request, &opening->response,
                              [this, opening](const grpc::Status& answer) noexcept { Opened(opening, answer); });
}

void Session::Opened(Opening* opening, const grpc::Status& answer) {
  std::lock_guard<std::mutex> lock(mutex_);
  // A session that is not taken ends with its lease.
  opening->status = TakeAnswer(*opening, answer);
  opening->over = true;
  changed_.notify_all();
}

absl::Status Session::TakeAnswer(const Opening& opening, const grpc::Status& answer) {
  if (!answer.ok()) return FromGrpcStatus(answer, target_);
  if (opening.response.session_id().empty()) return MakeAnswerError("a session without an id");
  lease_ = FromProto(opening.response.lease());
  // Before there is an id: one that nobody keeps alive would be used until its lease ends. The thread waits for the lock.
  if (!thread_.joinable()) thread_ = std::thread([this] { KeepAlive(); });
  id_ = opening.response.session_id();
  return absl::OkStatus();
}

void Session::Forget(const std::string& id) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (id_ == id) id_.clear();
}

void Session::KeepAlive() {
  std::unique_lock<std::mutex> lock(mutex_);
  nanoseconds pause{0};
  std::string id;  // of the session that `pause` is for
  while (!stopping_) {
    if (id_.empty()) {
      changed_.wait(lock);
      continue;
    }
    if (id != id_) {
      id = id_;
      pause = RenewalPause(lease_);
    }
    if (changed_.wait_for(lock, pause, [&] { return stopping_ || id_ != id; })) continue;
    grpc::ClientContext context;
    // A server that hangs is asked again before the lease ends.
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::duration_cast<std::chrono::system_clock::duration>(RenewalPause(lease_)));
    v1::KeepAliveRequest request;
    request.set_session_id(id);
    v1::KeepAliveResponse response;
    renewal_ = &context;
    lock.unlock();
    const grpc::Status status = stub_->KeepAlive(&context, request, &response);
    lock.lock();
    renewal_ = nullptr;
    if (status.ok()) {
      if (response.has_lease()) lease_ = FromProto(response.lease());
      pause = RenewalPause(lease_);
    } else if (ErrorReason(FromGrpcStatus(status, target_)) == "SESSION_NOT_FOUND") {
      if (id_ == id) id_.clear();
      lock.unlock();
      on_lost_();
      lock.lock();
    } else {
      pause = std::clamp(lease_ / 10, kShortestPause, kRetryPause);
    }
  }
}

}  // namespace headwater::client::internal
