#include "server/service/loss/transfer_rows_stream.h"

#include <string>
#include <utility>

#include "headwater/kernels/error.h"
#include "headwater/v1/loss_service.pb.h"
#include "server/service/request/field_check.h"
#include "server/service/request/loss_request.h"
#include "server/service/request/message_order.h"

namespace headwater::service {

RawReactor* TransferRowsStream::Start(ServerCore& core, grpc::CallbackServerContext& context) noexcept {
  const auto stream = std::make_shared<TransferRowsStream>(core, context);
  RawReactor* const reactor = stream->Own();
  if (absl::Status status = stream->scope_.Begin(/*always=*/false); !status.ok()) {
    stream->End(std::move(status));
    return reactor;
  }
  stream->Allow(stream->scope_.AllowedStill());
  stream->Read(/*watched=*/true);
  return reactor;
}

TransferRowsStream::TransferRowsStream(ServerCore& core, grpc::CallbackServerContext& context)
    : RowStream(core, context), scope_(core, context, observability::RpcMethod::kTransferRows) {}

void TransferRowsStream::End(absl::Status status) {
  if (!ended_.exchange(true)) Answer(std::move(status));
}

void TransferRowsStream::Answer(std::optional<absl::Status> status) {
  Finish(scope_.Finish(status.has_value() ? *std::move(status) : scope_.CancelledError()));
}

void TransferRowsStream::OnFirstMessage(bool ok, grpc::ByteBuffer* message) {
  if (!ok) return End(gone() ? scope_.CancelledError() : CheckHeaderSeen(false));
  v1::TransferRowsRequest request;
  if (!ReceivedMessage(message).Parse(&request)) {
    return End(FieldError(ErrorReason::kProtocolViolation, "message", "a message of the API", "other bytes"));
  }
  if (absl::Status status = CheckHeaderFirst(request); !status.ok()) return End(std::move(status));
  const auto header = DecodeTransferRowsHeader(request.header());
  if (!header.ok()) return End(header.status());
  FindTransfer(header->transfer, header->stripe_index);
}

void TransferRowsStream::FindTransfer(const TransferId& id, int32_t index) {
  {
    absl::MutexLock lock(&mutex_);
    if (ended_.load()) return;
    id_ = id;
  }
  const auto self = std::static_pointer_cast<TransferRowsStream>(shared_from_this());
  const int64_t number = core().transfers.Find(id, [self, index](absl::StatusOr<std::shared_ptr<Transfer>> transfer) {
    absl::Status status = transfer.ok() ? (*transfer)->Join(self, index) : transfer.status();
    if (!status.ok()) self->End(std::move(status));
  });
  {
    absl::MutexLock lock(&mutex_);
    number_ = number;
  }
  if (gone()) OnStreamGone(nullptr);  // it may have gone before there was a number to leave with
}

void TransferRowsStream::OnStreamGone(Transfer* transfer) {
  std::optional<TransferId> id;
  int64_t number = 0;
  {
    absl::MutexLock lock(&mutex_);
    id = id_;
    number = number_;
  }
  if (id.has_value() && number != 0) core().transfers.Leave(*id, number);
  if (transfer != nullptr) transfer->OnStripeLost();
  if (!ended_.exchange(true)) Answer(std::nullopt);
}

void TransferRowsStream::OnRefused(const absl::Status& status) { End(status); }

bool TransferRowsStream::OnEnded(const absl::Status& why) {
  {
    absl::MutexLock lock(&mutex_);
    // A transfer that knows of the stream must also learn that it is gone.
    if (id_.has_value() || ended_.exchange(true)) return false;
  }
  Answer(why);
  return true;
}

void TransferRowsStream::OnTransferEnd(bool succeeded) {
  if (absl::Status refused = refusal(); !refused.ok()) return End(std::move(refused));  // it may be why the transfer ends
  End(succeeded ? absl::OkStatus()
                : MakeError(ErrorReason::kStripeLost, "the transfer has failed; why is told by its primary stream"));
}

}  // namespace headwater::service
