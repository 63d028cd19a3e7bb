// TransferRows, as a stream of gRPC's callback API.
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/error.h"
#include "headwater/v1/loss_service.pb.h"
#include "server/service/call/stream_io.h"
#include "server/service/loss/transfer.h"
#include "server/service/loss/transfer_registry.h"
#include "server/service/request/field_check.h"
#include "server/service/request/loss_request.h"

namespace headwater::service {
namespace {

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
    End(succeeded ? absl::OkStatus()
                  : MakeError(ErrorReason::kStripeLost, "the transfer has failed; why is told by its primary stream"));
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

RawReactor* StartTransferRows(ServerCore& core, grpc::CallbackServerContext& context) {
  const auto stream = std::make_shared<TransferRowsStream>(core, context);
  RawReactor* const reactor = stream->Own();
  stream->Start();
  return reactor;
}

}  // namespace headwater::service
