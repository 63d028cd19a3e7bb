#include "server/service/compute_loss_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/service/compute_loss_call.h"
#include "server/service/field_check.h"
#include "server/service/message_order.h"
#include "server/service/retry_after.h"

namespace headwater::service {

using observability::RpcMethod;

RawReactor* ComputeLossStream::Start(ServerCore& core, grpc::CallbackServerContext& context) {
  const auto stream = std::make_shared<ComputeLossStream>(core, context);
  RawReactor* const reactor = stream->Own();
  if (core.calls.TryRun([stream] { stream->Run(); })) return reactor;
  stream->Finish(RunRpc(core, context, RpcMethod::kComputeLoss, [&core](RpcScope&) {
    return MakeError(ErrorReason::kQueueFull,
                     absl::StrCat("each ComputeLoss holds a thread: expected at most ", core.options.max_threads,
                                  " at once (max_threads), and that many are in progress; try again"),
                     {{"limit", "max_threads"}, {"maximum", absl::StrCat(core.options.max_threads)}, {kRetryAfterMsKey, "100"}});
  }));
  return reactor;
}

void ComputeLossStream::Run() {
  v1::ComputeLossResponse last;
  const grpc::Status status =
      RunRpc(core(), context(), RpcMethod::kComputeLoss, [&](RpcScope& scope) { return Serve(scope, &last); });
  if (status.ok()) {
    Finish(status, EncodeMessage(last));
  } else {
    Finish(status);
  }
  if (transfer_ != nullptr) transfer_->End(status.ok());
}

absl::Status ComputeLossStream::Serve(RpcScope& scope, v1::ComputeLossResponse* last) {
  auto header = AwaitHeader(scope);
  if (!header.ok()) return header.status();
  ComputeLossCall call(core(), scope.caller(), scope.client(), scope.wait_limits());
  absl::Status status = call.Accept(*header);
  scope.set_head(call.head_name());
  if (status.ok()) {
    transfer_ = call.transfer();
    status = transfer_->Join(std::static_pointer_cast<RowStream>(shared_from_this()), 0);
    if (status.ok()) status = call.Run();
  }
  if (status.ok()) call.FillSummary(last->mutable_summary());
  // Whatever was met first, that the client is gone is why.
  return status.ok() || !scope.Cancelled() ? status : scope.CancelledError();
}

absl::StatusOr<v1::MicroBatchHeader> ComputeLossStream::AwaitHeader(RpcScope& scope) {
  Read(/*watched=*/true);
  absl::MutexLock lock(&mutex_);
  while (!first_done_) first_came_.Wait(&mutex_);
  if (!first_.has_value()) {
    // A stream that is cut ends like one that is half-closed; which it was is known a moment later.
    if (gone() || scope.Cancelled()) return scope.CancelledError();
    return CheckHeaderSeen(false);
  }
  v1::ComputeLossRequest request;
  const bool parsed = first_->Parse(&request);
  first_.reset();
  if (absl::Status lost = core().lost(); !lost.ok()) return lost;
  if (!parsed) return FieldError(ErrorReason::kProtocolViolation, "message", "a message of the API", "other bytes");
  HEADWATER_RETURN_IF_ERROR(CheckHeaderFirst(request));
  return std::move(*request.mutable_header());
}

void ComputeLossStream::OnFirstMessage(bool ok, grpc::ByteBuffer* message) {
  absl::MutexLock lock(&mutex_);
  if (ok) first_.emplace(message);
  first_done_ = true;
  first_came_.Signal();
}

void ComputeLossStream::OnStreamGone(Transfer* transfer) {
  if (transfer != nullptr) {
    transfer->exchange().Break(
        MakeError(ErrorReason::kCancelled, "the client cancelled the call, or went away; nothing was added"));
    return;
  }
  absl::MutexLock lock(&mutex_);
  first_done_ = true;
  first_came_.Signal();
}

}  // namespace headwater::service
