#include "server/service/services.h"

#include <utility>

#include "server/observability/metrics.h"

namespace headwater::service {

using observability::RpcMethod;

namespace {

// Calls that read and write files have threads of their own: the disk may hang.
CallThreads& ThreadsFor(ServerCore& core, RpcMethod method) {
  const bool has_files =
      method == RpcMethod::kLoadWeights || method == RpcMethod::kSaveCheckpoint || method == RpcMethod::kRestoreCheckpoint;
  return has_files ? core.file_calls : core.operations;
}

}  // namespace

grpc::ServerUnaryReactor* UnaryCall::Start(const Entrance& entrance, grpc::CallbackServerContext* context, RpcMethod method,
                                           Body body) {
  auto* const call = new UnaryCall(entrance, *context, method, std::move(body));
  call->Resume();
  return call;
}

UnaryCall::UnaryCall(const Entrance& entrance, grpc::CallbackServerContext& context, RpcMethod method, Body body)
    : Waiter(&entrance.core.waiting),
      threads_(ThreadsFor(entrance.core, method)),
      scope_(std::in_place, entrance, context, method, static_cast<scheduler::Waiter*>(this)),
      body_(std::move(body)) {}

void UnaryCall::Try() noexcept {
  grpc::Status answer;
  {
    const RpcScope::OnThread on_thread(*scope_);
    absl::Status status = std::exchange(begun_, true) ? absl::OkStatus() : scope_->Begin();
    if (status.ok()) status = body_(*scope_);
    while (scheduler::IsParked(status)) {
      if (StaysParked()) return;
      status = body_(*scope_);
    }
    answer = scope_->Finish(std::move(status));
    // Before the client has its answer: what the call has held is free then.
    RunAtEnd();
    body_ = nullptr;
    scope_.reset();
  }
  Finish(std::move(answer));
}

}  // namespace headwater::service
