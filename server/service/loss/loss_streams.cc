// ComputeLoss and TransferRows, as streams of gRPC's callback API.
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/error.h"
#include "headwater/v1/loss_service.pb.h"
#include "server/guard/stream_watchdog.h"
#include "server/observability/monotonic_clock.h"
#include "server/service/call/stream_io.h"
#include "server/service/loss/micro_batch.h"
#include "server/service/loss/transfer.h"
#include "server/service/loss/transfer_registry.h"
#include "server/service/request/chunk_codec.h"
#include "server/service/request/field_check.h"
#include "server/service/request/loss_request.h"

namespace headwater::service {
namespace {

using observability::RpcMethod;

// Ends the message of a call that ends without its answer once AdmittedMicroBatch::computed().
constexpr char kWasComputed[] = "; it had been computed: GetStep tells whether its micro-batch is in";

// The primary stream of a transfer. From its header on a call thread runs it, which waits; gRPC's threads take chunks, and send
// rows of the gradient, meanwhile. A client that sends no header holds no thread.
class ComputeLossStream final : public RowStream {
 public:
  using RowStream::RowStream;

  // Ends the call with `status`, which is an error, unless its thread has begun: false then.
  bool Refuse(const absl::Status& status) {
    if (taken_.exchange(true)) return false;
    Answer([&](RpcScope&) { return status; });
    return true;
  }

 private:
  void OnFirstMessage(bool ok, grpc::ByteBuffer* message) override {
    if (taken_.exchange(true)) return;
    if (!ok) return Answer([this](RpcScope& scope) { return EndWithoutHeader(scope); });
    const auto self = std::static_pointer_cast<ComputeLossStream>(shared_from_this());
    first_.emplace(message);
    if (core().calls.TryRun([self] { self->Run(); })) return;
    core().slow_uploads.GiveWay(observability::MonotonicNow());
    const int most = core().options.max_threads;
    Answer([most](RpcScope&) {
      return MakeError(ErrorReason::kQueueFull,
                       absl::StrCat("each ComputeLoss holds a thread: expected at most ", most,
                                    " at once (max_threads), and that many are in progress; try again"),
                       {{"limit", "max_threads"}, {"maximum", absl::StrCat(most)}, {kRetryAfterMsKey, "100"}});
    });
  }

  void OnStreamGone(Transfer* transfer) override {
    if (transfer == nullptr) return;  // no thread waits: the read in progress ends by itself
    transfer->exchange().Break(MakeError(ErrorReason::kCancelled, "the client cancelled the call, or went away"));
    Progress running = Progress::kRunning;
    if (progress_.compare_exchange_strong(running, Progress::kAbandoned)) core().abandoned_calls.fetch_add(1);
  }

  bool OnEnded(const absl::Status& why) override { return Refuse(why); }

  // Ends the call with the status of `body(scope)`.
  template <typename Body>
  void Answer(Body&& body) {
    Finish(RunRpc(core(), context(), RpcMethod::kComputeLoss, std::forward<Body>(body)));
  }

  // The whole call, on a call thread.
  void Run() {
    std::optional<grpc::ByteBuffer> last;
    grpc::Status status = RunRpc(core(), context(), RpcMethod::kComputeLoss, [&](RpcScope& scope) { return Serve(scope, &last); });
    if (progress_.exchange(Progress::kEnded) == Progress::kAbandoned) core().abandoned_calls.fetch_sub(1);
    const bool succeeded = status.ok();
    if (!succeeded) last.reset();
    Finish(std::move(status), std::move(last));
    if (transfer_ != nullptr) transfer_->End(succeeded);
  }

  absl::Status Serve(RpcScope& scope, std::optional<grpc::ByteBuffer>* last) {
    HEADWATER_ASSIGN_OR_RETURN(auto header, Header());
    std::optional<guard::SlowUploads::Place> upload;
    AdmittedMicroBatch micro_batch(core(), scope);
    absl::Status status = AdmitMicroBatch(std::move(header), micro_batch);
    if (status.ok()) {
      transfer_ = micro_batch.transfer;
      upload.emplace(core().slow_uploads, std::shared_ptr<transport::RowExchange>(transfer_, &transfer_->exchange()),
                     observability::MonotonicNow());
      status = transfer_->Join(std::static_pointer_cast<RowStream>(shared_from_this()), 0);
      if (status.ok()) status = ComputeMicroBatch(micro_batch);
    }
    if (status.ok()) {
      status = DeliverGrad(micro_batch);
    } else {
      core().metrics.CountMicroBatch(OutcomeOf(status));
    }
    if (status.ok()) {
      v1::ComputeLossResponse response;
      const absl::Time sent = observability::MonotonicNow();
      core().metrics.Observe(observability::Metric::kDownloadSeconds, sent - micro_batch.times.engine_end);
      EncodeSummary(micro_batch, sent, response.mutable_summary());
      TraceMicroBatch(micro_batch, sent);
      last->emplace(EncodeMessage(response));
    }
    const bool computed = micro_batch.computed();
    // Rows of the gradient may be lost with a stripe after the commit.
    if (HasReason(status, ErrorReason::kStripeLost) && computed) {
      status =
          MakeError(ErrorReason::kStripeLost, absl::StrCat(std::string(status.message()), kWasComputed), GetErrorMetadata(status));
    }
    if (status.ok() || !scope.Cancelled()) return status;
    // No client causes this. Its heads may be lost, and the text "nothing was added" would not be true.
    if (HasReason(status, ErrorReason::kEngineFailed)) return status;
    // The reason is that the client is gone, or was sent away, whatever error came first.
    const absl::Status why = why_ended();
    if (!why.ok()) return why;
    return scope.CancelledError(computed ? kWasComputed : "; nothing was added");
  }

  absl::StatusOr<v1::MicroBatchHeader> Header() {
    v1::ComputeLossRequest request;
    const absl::Status parsed = first_->Parse(&request);
    first_.reset();
    HEADWATER_RETURN_IF_ERROR(core().lost());
    HEADWATER_RETURN_IF_ERROR(parsed);
    HEADWATER_RETURN_IF_ERROR(CheckHeaderFirst(request));
    return std::move(*request.mutable_header());
  }

  // The whole call of a stream that ends before its header: on gRPC's thread.
  absl::Status EndWithoutHeader(RpcScope& scope) {
    if (absl::Status why = why_ended(); !why.ok()) return why;
    // A cut stream ends like a half-closed one. The difference is known a moment later, too late for this call.
    if (gone() || scope.Cancelled()) return scope.CancelledError();
    core().CountCancelled(context().peer());  // perhaps it was not; a call that sends nothing counts alike
    return NoHeader();
  }

  // Set by the thread that answers the call: the call's own, or the one that finds that there will be none.
  std::atomic<bool> taken_{false};
  // Whether the call is in progress, and whether its client has gone meanwhile.
  enum class Progress { kRunning, kAbandoned, kEnded };
  std::atomic<Progress> progress_{Progress::kRunning};
  std::optional<ReceivedMessage> first_;  // before the call's thread begins, then of it
  std::shared_ptr<Transfer> transfer_;    // of the call's thread, once the header is accepted
};

// A stripe of a transfer. Nothing here waits, so it needs no thread of its own.
class TransferRowsStream final : public RowStream {
 public:
  TransferRowsStream(ServerCore& core, grpc::CallbackServerContext& context)
      : RowStream(core, context), scope_(core, context, observability::RpcMethod::kTransferRows) {}

  void Start() {
    if (absl::Status status = scope_.Begin(); !status.ok()) return End(std::move(status));
    Allow(scope_.AllowedStill());
    Read();
  }

  void OnTransferEnd(bool succeeded) override {
    if (absl::Status refused = refusal(); !refused.ok()) return End(std::move(refused));  // it may be why the transfer ends
    End(succeeded ? absl::OkStatus() : MakeError(ErrorReason::kStripeLost, "the transfer has failed; its primary stream says why"));
  }

 private:
  void OnFirstMessage(bool ok, grpc::ByteBuffer* message) override {
    if (!ok) return End(gone() ? scope_.CancelledError() : NoHeader());
    v1::TransferRowsRequest request;
    if (absl::Status status = ReceivedMessage(message).Parse(&request); !status.ok()) return End(std::move(status));
    if (absl::Status status = CheckHeaderFirst(request); !status.ok()) return End(std::move(status));
    const auto header = DecodeTransferRowsHeader(request.header());
    if (!header.ok()) return End(header.status());
    FindTransfer(header->transfer, header->stripe_index);
  }

  void OnStreamGone(Transfer* transfer) override {
    std::optional<TransferId> id;
    {
      absl::MutexLock lock(&mutex_);
      id = id_;
    }
    if (id.has_value()) core().transfers.Leave(*id, this);
    if (transfer != nullptr) transfer->OnStripeLost();
    if (!ended_.exchange(true)) Finish(scope_.Finish(scope_.CancelledError()));
  }

  void OnRefused(const absl::Status& status) override { End(status); }
  bool OnEnded(const absl::Status& why) override {
    {
      absl::MutexLock lock(&mutex_);
      // A transfer that knows of the stream must also learn that it is gone.
      if (id_.has_value() || ended_.exchange(true)) return false;
    }
    Finish(scope_.Finish(why));
    return true;
  }

  void FindTransfer(const TransferId& id, int32_t index) {
    {
      absl::MutexLock lock(&mutex_);
      if (ended_.load()) return;
      id_ = id;
    }
    const auto self = std::static_pointer_cast<TransferRowsStream>(shared_from_this());
    core().transfers.Find(id, this, [self, index](absl::StatusOr<std::shared_ptr<Transfer>> transfer) {
      absl::Status status = transfer.ok() ? (*transfer)->Join(self, index) : transfer.status();
      if (!status.ok()) self->End(std::move(status));
    });
    if (gone()) OnStreamGone(nullptr);  // it may have gone before it waited
  }

  // Ends the call; only the first time has an effect. gRPC's context is there for the thread that has set `ended_`.
  void End(absl::Status status) {
    if (!ended_.exchange(true)) Finish(scope_.Finish(std::move(status)));
  }

  RpcScope scope_;
  std::atomic<bool> ended_{false};

  absl::Mutex mutex_;
  std::optional<TransferId> id_ ABSL_GUARDED_BY(mutex_);  // once the header was valid
};

}  // namespace

RawReactor* StartComputeLoss(ServerCore& core, grpc::CallbackServerContext& context) {
  const auto stream = std::make_shared<ComputeLossStream>(core, context);
  RawReactor* const reactor = stream->Own();
  // The messages of a client that may not call are not awaited.
  const auto caller =
      core.access->Authorize(FindAccessRow(RpcMethod::kComputeLoss), PortRole::kData, AuthorizationOf(context.client_metadata()));
  if (!caller.ok()) {
    stream->Refuse(caller.status());
    return reactor;
  }
  stream->Allow([access = core.access.get(), caller = *caller] { return access->Recheck(caller); });
  stream->Read();
  return reactor;
}

RawReactor* StartTransferRows(ServerCore& core, grpc::CallbackServerContext& context) {
  const auto stream = std::make_shared<TransferRowsStream>(core, context);
  RawReactor* const reactor = stream->Own();
  stream->Start();
  return reactor;
}

}  // namespace headwater::service
