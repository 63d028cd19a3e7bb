#include "client/core/link/session.h"

#include <algorithm>

#include "client/core/link/duration.h"
#include "client/core/link/error.h"
#include "headwater/client/error.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {
namespace {

using std::chrono::nanoseconds;

// The least time that a server may take to open a session; a caller that gave up before finds it open afterwards.
constexpr std::chrono::seconds kOpenTimeout{30};
// The least pause between renewals, however short the lease.
constexpr nanoseconds kShortestPause = std::chrono::milliseconds(10);
// How soon a renewal that failed is tried again, if the lease is not much shorter.
constexpr nanoseconds kRetryPause = std::chrono::seconds(1);

// Two renewals may be lost before the lease ends.
nanoseconds RenewalPause(nanoseconds lease) { return std::max(lease / 3, kShortestPause); }

}  // namespace

void Session::Close(Deadline deadline) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    if (call_ != nullptr) call_->TryCancel();
    changed_.notify_all();
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
    const bool mine = !std::exchange(is_wanted_, true);
    if (mine) {
      opening_deadline_ = std::max<Deadline>(wait.deadline, std::chrono::system_clock::now() + kOpenTimeout);
      if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
      changed_.notify_all();
    }
    const int64_t before = opening_count_;
    if (!changed_.wait_until(lock, wait.cancel, wait.deadline, [&] { return opening_count_ > before || stopping_; })) {
      return wait.Ended();
    }
    // Another one's opening may have been made for a deadline that was nearer.
    if (!opening_status_.ok() && (mine || !absl::IsDeadlineExceeded(opening_status_))) return opening_status_;
  }
}

std::string Session::OpenId() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return id_;
}

void Session::Forget(const std::string& id) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (id_ == id) id_.clear();
}

template <typename Request, typename Response>
absl::Status Session::Call(std::unique_lock<std::mutex>& lock, Deadline deadline, const Request& request, Response* response,
                           grpc::Status (v1::SessionService::Stub::*method)(grpc::ClientContext*, const Request&, Response*)) {
  grpc::ClientContext context;
  context.set_deadline(deadline);
  call_ = &context;
  lock.unlock();
  if (stub_ == nullptr) stub_ = v1::SessionService::NewStub(MakeChannel(target_, options_));
  const grpc::Status status = (*stub_.*method)(&context, request, response);
  lock.lock();
  call_ = nullptr;
  return status.ok() ? absl::OkStatus() : FromGrpcStatus(status, target_);
}

void Session::Open(std::unique_lock<std::mutex>& lock) {
  v1::OpenSessionRequest request;
  request.set_client_name(options_.client_name);
  *request.mutable_lease() = ToProto(options_.session_lease);
  v1::OpenSessionResponse response;
  opening_status_ = Call(lock, opening_deadline_, request, &response, &v1::SessionService::Stub::OpenSession);
  if (opening_status_.ok() && response.session_id().empty()) opening_status_ = MakeAnswerError("a session without an id");
  if (opening_status_.ok()) {
    lease_ = FromProto(response.lease());
    id_ = response.session_id();
  }
  is_wanted_ = false;
  ++opening_count_;
  changed_.notify_all();
}

nanoseconds Session::Renew(std::unique_lock<std::mutex>& lock, const std::string& id) {
  v1::KeepAliveRequest request;
  request.set_session_id(id);
  v1::KeepAliveResponse response;
  // A server that hangs is asked again before the lease ends.
  const absl::Status status =
      Call(lock, DeadlineIn(RenewalPause(lease_)), request, &response, &v1::SessionService::Stub::KeepAlive);
  if (status.ok()) {
    if (response.has_lease()) lease_ = FromProto(response.lease());
    return RenewalPause(lease_);
  }
  if (ErrorReason(status) == "SESSION_NOT_FOUND") {
    if (id_ == id) id_.clear();
    lock.unlock();
    on_lost_();
    lock.lock();
  }
  return std::clamp(lease_ / 10, kShortestPause, kRetryPause);
}

void Session::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  nanoseconds pause{0};
  std::string id;  // of the session that `pause` is for
  while (!stopping_) {
    if (id_.empty()) {
      is_wanted_ ? Open(lock) : changed_.wait(lock);
    } else if (id != id_) {
      id = id_;
      pause = RenewalPause(lease_);
    } else if (!changed_.wait_for(lock, pause, [&] { return stopping_ || id_ != id; })) {
      pause = Renew(lock, id);
    }
  }
}

}  // namespace headwater::client::internal
