#include "server/service/loss/row_stream.h"

#include <utility>

#include "server/service/call/stream_io.h"
#include "server/service/loss/transfer.h"

namespace headwater::service {
namespace {

// A message that ParseChunk() leaves to protobuf; `chunk` points into `parsed` then. kProtocolViolation, kMissingField.
absl::Status ParseOddChunk(const ReceivedMessage& received, v1::ComputeLossRequest* parsed, ChunkView* chunk) {
  HEADWATER_RETURN_IF_ERROR(received.Parse(parsed));
  HEADWATER_RETURN_IF_ERROR(CheckNextChunk(*parsed));
  const v1::RowChunk& fields = parsed->chunk();
  const std::string& data = fields.data();
  *chunk = {static_cast<int32_t>(fields.role()), fields.term_index(), fields.row_start(), fields.row_count(), {}, 0};
  chunk->data_bytes = static_cast<int64_t>(data.size());
  if (!data.empty()) chunk->data.emplace_back(reinterpret_cast<const uint8_t*>(data.data()), data.size());
  return absl::OkStatus();
}

}  // namespace

bool StreamEnd::Enter() {
  absl::MutexLock lock(&mutex_);
  if (begun_) return false;
  ++starting_;
  return true;
}

bool StreamEnd::Leave() {
  absl::MutexLock lock(&mutex_);
  return --starting_ == 0 && begun_;
}

bool StreamEnd::Begin(grpc::Status end_status, std::optional<grpc::ByteBuffer> message) {
  absl::MutexLock lock(&mutex_);
  if (begun_) return false;
  status = std::move(end_status);
  last_message = std::move(message);
  begun_ = true;
  return starting_ == 0;
}

void StreamEnd::UnlessBegun(absl::FunctionRef<void()> run) {
  absl::MutexLock lock(&mutex_);
  if (!begun_) run();
}

RawReactor* RowStream::Own() {
  self_ = shared_from_this();
  watch_.emplace(&core_.watchdog, [this](const absl::Status& why) {
    if (!OnEnded(why)) guard::EndCall(context_, why);
  });
  return this;
}

void RowStream::Read() {
  if (!end_.Enter()) return;
  if (transfer() == nullptr) watch_->Begin();
  StartRead(&read_message_);
  if (end_.Leave()) FinishNow();
}

bool RowStream::Write(grpc::ByteBuffer message) {
  if (!end_.Enter()) return false;
  written_message_.Swap(&message);
  watch_->Begin();
  StartWrite(&written_message_);
  if (end_.Leave()) FinishNow();
  return true;
}

void RowStream::Carry(std::shared_ptr<Transfer> transfer, int32_t stripe_index) {
  stripe_index_ = stripe_index;
  {
    absl::MutexLock lock(&transfer_mutex_);
    transfer_ = std::move(transfer);
  }
  if (gone()) OnStreamGone(this->transfer().get());  // it may have gone before there was a transfer to notify
  Read();
}

void RowStream::OnChunk(Transfer& transfer) {
  absl::Status status;
  {
    const ReceivedMessage received(&read_message_);
    ChunkView chunk;
    v1::ComputeLossRequest parsed;  // a TransferRowsRequest's chunk has the same number
    if (!received.ParseChunk(&chunk)) status = ParseOddChunk(received, &parsed, &chunk);
    if (status.ok()) status = transfer.Take(chunk, stripe_index_);
  }
  if (status.ok()) return Read();
  {
    // Before the transfer ends, and this stream with it.
    absl::MutexLock lock(&transfer_mutex_);
    refusal_ = status;
  }
  transfer.OnRefused(status);
  OnRefused(status);
}

void RowStream::Pump() {
  const std::shared_ptr<Transfer> transfer = this->transfer();
  if (transfer == nullptr) return;
  // Asked again after `writing_` is false: a Pump() in between for new rows has found it true.
  while (!writing_.exchange(true)) {
    std::optional<grpc::ByteBuffer> message = transfer->NextGradMessage();
    if (message.has_value()) {
      if (Write(*std::move(message))) return;
      transfer->OnWritten(false);  // the stream has ended, and the rows with it
      return;
    }
    writing_.store(false);
    if (!transfer->exchange().has_grad()) return;
  }
}

void RowStream::Finish(grpc::Status status, std::optional<grpc::ByteBuffer> last_message) {
  if (end_.Begin(std::move(status), std::move(last_message))) FinishNow();
}

void RowStream::FinishNow() {
  // Kept here: gRPC may be done with the call, and the object be gone, before the calls below return.
  const std::shared_ptr<RowStream> alive = shared_from_this();
  watch_->Begin();  // before: OnDone() takes the watch away
  if (end_.last_message.has_value()) {
    StartWriteAndFinish(&*end_.last_message, grpc::WriteOptions(), std::move(end_.status));
  } else {
    RawReactor::Finish(std::move(end_.status));
  }
}

void RowStream::OnReadDone(bool ok) noexcept {
  const std::shared_ptr<Transfer> transfer = this->transfer();
  if (transfer == nullptr) {
    EndWatch();
    OnFirstMessage(ok, &read_message_);
  } else if (ok) {
    OnChunk(*transfer);
  } else {
    transfer->OnHalfClosed();
  }
}

void RowStream::OnWriteDone(bool ok) noexcept {
  EndWatch();
  writing_.store(false);
  transfer()->OnWritten(ok);
  if (ok) Pump();
}

void RowStream::OnCancel() noexcept {
  gone_.store(true);
  OnStreamGone(transfer().get());
}

void RowStream::OnDone() noexcept {
  watch_.reset();  // waits for one that is cancelling the call just now
  const std::shared_ptr<RowStream> share = std::move(self_);
}

}  // namespace headwater::service
