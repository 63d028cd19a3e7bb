#include "server/service/compute_loss_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/guard/slow_uploads.h"
#include "server/observability/monotonic_clock.h"
#include "server/service/compute_loss_call.h"
#include "server/service/field_check.h"
#include "server/service/message_order.h"
#include "server/service/retry_after.h"

namespace headwater::service {

using observability::RpcMethod;

namespace {

// What is told of a call that ends without its answer once ComputeLossCall::computed().
constexpr char kWasComputed[] = "; it had been computed: GetStep tells whether its micro-batch is in";

}  // namespace

RawReactor* ComputeLossStream::Start(ServerCore& core, grpc::CallbackServerContext& context) noexcept {
  const auto stream = std::make_shared<ComputeLossStream>(core, context);
  RawReactor* const reactor = stream->Own();
  // Nobody's message is waited for who may not call.
  const auto caller =
      core.access->Authorize(FindAccessRow(RpcMethod::kComputeLoss), PortRole::kData, AuthorizationOf(context.client_metadata()));
  if (!caller.ok()) {
    stream->taken_.store(true);
    stream->Finish(RunRpc(core, context, RpcMethod::kComputeLoss, [&](RpcScope&) { return caller.status(); }));
    return reactor;
  }
  stream->Allow([access = core.access.get(), caller = *caller] { return access->Recheck(caller); });
  stream->Read(/*watched=*/true);
  return reactor;
}

void ComputeLossStream::Run() {
  std::optional<grpc::ByteBuffer> last;
  grpc::Status status = RunRpc(core(), context(), RpcMethod::kComputeLoss, [&](RpcScope& scope) { return Serve(scope, &last); });
  if (progress_.exchange(Progress::kEnded) == Progress::kAbandoned) core().abandoned_calls.fetch_sub(1);
  const bool succeeded = status.ok();
  if (!succeeded) last.reset();
  Finish(std::move(status), std::move(last));
  if (transfer_ != nullptr) transfer_->End(succeeded);
}

absl::Status ComputeLossStream::Serve(RpcScope& scope, std::optional<grpc::ByteBuffer>* last) {
  auto header = Header();
  if (!header.ok()) return header.status();
  std::optional<guard::SlowUploads::Place> upload;
  ComputeLossCall call(core(), scope.caller(), scope.client(), scope.wait_limits(), {scope.request_id(), scope.trace()});
  absl::Status status = call.Accept(*header);
  scope.set_head(call.head_name());
  if (status.ok()) {
    transfer_ = call.transfer();
    upload.emplace(core().slow_uploads, std::shared_ptr<transport::RowExchange>(transfer_, &transfer_->exchange()),
                   observability::MonotonicNow());
    status = transfer_->Join(std::static_pointer_cast<RowStream>(shared_from_this()), 0);
    if (status.ok()) status = call.Run();
  }
  if (status.ok()) {
    v1::ComputeLossResponse response;
    call.FillSummary(response.mutable_summary());
    last->emplace(EncodeMessage(response));
  }
  // Rows of the gradient may be lost with a stripe after the commit.
  if (HasReason(status, ErrorReason::kStripeLost) && call.computed()) {
    status =
        MakeError(ErrorReason::kStripeLost, absl::StrCat(std::string(status.message()), kWasComputed), GetErrorMetadata(status));
  }
  if (status.ok() || !scope.Cancelled()) return status;
  // No client brings this about; its heads may be lost, and that nothing was added would not be true.
  if (HasReason(status, ErrorReason::kEngineFailed)) return status;
  // Whatever was met first, that the client is gone, or was sent away, is why.
  const absl::Status why = why_ended();
  if (!why.ok()) return why;
  return scope.CancelledError(call.computed() ? kWasComputed : "; nothing was added");
}

absl::StatusOr<v1::MicroBatchHeader> ComputeLossStream::Header() {
  v1::ComputeLossRequest request;
  const bool parsed = first_->Parse(&request);
  first_.reset();
  if (absl::Status lost = core().lost(); !lost.ok()) return lost;
  if (!parsed) return FieldError(ErrorReason::kProtocolViolation, "message", "a message of the API", "other bytes");
  HEADWATER_RETURN_IF_ERROR(CheckHeaderFirst(request));
  return std::move(*request.mutable_header());
}

absl::Status ComputeLossStream::EndWithoutHeader(RpcScope& scope) {
  if (absl::Status why = why_ended(); !why.ok()) return why;
  // A stream that is cut ends like one that is half-closed; which it was is known a moment later, when nobody hears it any more.
  if (gone() || scope.Cancelled()) return scope.CancelledError();
  core().CountCancelled(context().peer());  // it may have been; and if not, a call that says nothing is no better
  return CheckHeaderSeen(false);
}

void ComputeLossStream::OnFirstMessage(bool ok, grpc::ByteBuffer* message) {
  if (taken_.exchange(true)) return;
  if (!ok) {
    return Finish(RunRpc(core(), context(), RpcMethod::kComputeLoss, [this](RpcScope& scope) { return EndWithoutHeader(scope); }));
  }
  const auto self = std::static_pointer_cast<ComputeLossStream>(shared_from_this());
  first_.emplace(message);
  if (core().calls.TryRun([self] { self->Run(); })) return;
  core().slow_uploads.GiveWay(observability::MonotonicNow());
  const int most = core().options.max_threads;
  Finish(RunRpc(core(), context(), RpcMethod::kComputeLoss, [most](RpcScope&) {
    return MakeError(ErrorReason::kQueueFull,
                     absl::StrCat("each ComputeLoss holds a thread: expected at most ", most,
                                  " at once (max_threads), and that many are in progress; try again"),
                     {{"limit", "max_threads"}, {"maximum", absl::StrCat(most)}, {kRetryAfterMsKey, "100"}});
  }));
}

bool ComputeLossStream::OnEnded(const absl::Status& why) {
  if (taken_.exchange(true)) return false;
  Finish(RunRpc(core(), context(), RpcMethod::kComputeLoss, [&](RpcScope&) { return why; }));
  return true;
}

void ComputeLossStream::OnStreamGone(Transfer* transfer) {
  if (transfer == nullptr) return;  // nobody waits: the read that is in progress ends by itself
  transfer->exchange().Break(MakeError(ErrorReason::kCancelled, "the client cancelled the call, or went away"));
  Progress running = Progress::kRunning;
  if (progress_.compare_exchange_strong(running, Progress::kAbandoned)) core().abandoned_calls.fetch_add(1);
}

}  // namespace headwater::service
