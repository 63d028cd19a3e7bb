#include "client/cpp/src/session.h"

#include <algorithm>

#include "client/cpp/src/convert.h"
#include "client/cpp/src/error.h"
#include "headwater/client/error.h"

namespace headwater::client::internal {
namespace {

using std::chrono::nanoseconds;

// How long the end of a connection may wait for a server that does not answer. The lease ends by itself.
constexpr std::chrono::seconds kCloseTimeout{1};
// However short a lease is granted.
constexpr nanoseconds kShortestPause = std::chrono::milliseconds(10);
// How soon a renewal that failed is tried again, if the lease is not much shorter.
constexpr nanoseconds kRetryPause = std::chrono::seconds(1);

// Two renewals may be lost before the lease ends.
nanoseconds RenewalPause(nanoseconds lease) { return std::max(lease / 3, kShortestPause); }

}  // namespace

Session::~Session() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    if (renewal_ != nullptr) renewal_->TryCancel();
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  if (id_.empty()) return;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kCloseTimeout);
  v1::CloseSessionRequest request;
  request.set_session_id(id_);
  v1::CloseSessionResponse response;
  stub_->CloseSession(&context, request, &response);
}

absl::StatusOr<std::string> Session::Id(Deadline deadline) {
  if (options_.session_lease.count() == 0) return std::string();
  std::lock_guard<std::mutex> one_at_a_time(opening_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!id_.empty()) return id_;
  }
  if (stub_ == nullptr) stub_ = v1::SessionService::NewStub(MakeChannel(target_, options_));
  grpc::ClientContext context;
  context.set_deadline(deadline);
  v1::OpenSessionRequest request;
  request.set_client_name(options_.client_name);
  *request.mutable_lease() = ToProto(options_.session_lease);
  v1::OpenSessionResponse response;
  if (const grpc::Status status = stub_->OpenSession(&context, request, &response); !status.ok()) {
    return FromGrpcStatus(status, target_);
  }
  if (response.session_id().empty()) return MakeAnswerError("a session without an id");
  std::lock_guard<std::mutex> lock(mutex_);
  id_ = response.session_id();
  lease_ = FromProto(response.lease());
  if (!thread_.joinable()) thread_ = std::thread([this] { KeepAlive(); });
  changed_.notify_all();
  return id_;
}

void Session::Forget(const std::string& id) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (id_ == id) id_.clear();
}

void Session::KeepAlive() {
  std::unique_lock<std::mutex> lock(mutex_);
  nanoseconds pause = RenewalPause(lease_);
  while (!stopping_) {
    if (id_.empty()) {
      changed_.wait(lock);
      pause = RenewalPause(lease_);
      continue;
    }
    const std::string id = id_;
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
    } else {
      pause = std::clamp(lease_ / 10, kShortestPause, kRetryPause);
    }
  }
}

}  // namespace headwater::client::internal
