#include "server/service/loss/transfer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/service/call/stream_io.h"
#include "server/service/request/field_check.h"

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

std::vector<transport::RowTensor> RowsOf(const std::vector<Transfer::Tensor>& tensors) {
  std::vector<transport::RowTensor> rows;
  for (const Transfer::Tensor& tensor : tensors) rows.push_back(tensor.rows);
  return rows;
}

absl::Status TransferEnded() {
  return MakeError(ErrorReason::kTransferNotFound, "the transfer's primary stream has ended; what became of it is told there");
}

}  // namespace

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

Transfer::Transfer(ServerCore& core, const Options& options, std::vector<Tensor> tensors)
    : core_(core),
      options_(options),
      tensors_(std::move(tensors)),
      exchange_(options.row_count, RowsOf(tensors_)),
      digests_(static_cast<size_t>(options.stripe_count) + 1),
      streams_(static_cast<size_t>(options.stripe_count)) {
  if (options.stripe_count == 1) exchange_.RequireClose();
}

absl::Status Transfer::Join(const std::shared_ptr<RowStream>& stream, int32_t index) {
  {
    absl::MutexLock lock(&mutex_);
    if (ended_) return TransferEnded();
    if (index < 0 || index >= options_.stripe_count) {
      return InvalidField("header.stripe_index", absl::StrCat("an index below the transfer's stripe_count ", options_.stripe_count),
                          absl::StrCat(index));
    }
    std::shared_ptr<RowStream>& place = streams_[static_cast<size_t>(index)];
    if (place != nullptr) {
      return InvalidField("header.stripe_index", "each stripe of a transfer once", absl::StrCat(index));
    }
    place = stream;
    ++joined_;
  }
  stream->Carry(shared_from_this(), index);
  stream->Pump();  // it may have come late, when there is a gradient already
  return absl::OkStatus();
}

std::vector<std::shared_ptr<RowStream>> Transfer::Streams() const {
  absl::MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<RowStream>> streams;
  for (const std::shared_ptr<RowStream>& stream : streams_) {
    if (stream != nullptr) streams.push_back(stream);
  }
  return streams;
}

absl::StatusOr<size_t> Transfer::TensorOf(const ChunkView& chunk) const {
  int32_t digest_stream = 0;
  switch (chunk.role) {
    case v1::CHUNK_ROLE_HIDDEN:
      if (chunk.term_index == 0) break;
      return InvalidField("chunk.term_index", "0, because the rows belong to all terms", absl::StrCat(chunk.term_index));
    case v1::CHUNK_ROLE_TEACHER_HIDDEN:
      if (chunk.term_index < 0 || chunk.term_index >= options_.term_count) {
        return InvalidField("chunk.term_index", absl::StrCat("a term in [0, ", options_.term_count, ")"),
                            absl::StrCat(chunk.term_index));
      }
      digest_stream = 1 + chunk.term_index;
      break;
    case v1::CHUNK_ROLE_UNSPECIFIED:
      return MissingField("chunk.role", "HIDDEN or TEACHER_HIDDEN");
    default:
      return InvalidField("chunk.role", "HIDDEN or TEACHER_HIDDEN", absl::StrCat(chunk.role));
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].digest_stream != digest_stream) continue;
    if (tensors_[i].why_not.empty()) return i;
    return FieldError(ErrorReason::kProtocolViolation, "chunk.role", absl::StrCat("no such chunk, ", tensors_[i].why_not),
                      digest_stream == 0 ? "HIDDEN" : "TEACHER_HIDDEN");
  }
  return FieldError(ErrorReason::kProtocolViolation, "chunk.role",
                    absl::StrCat("HIDDEN, because terms[", chunk.term_index, "] has no teacher_hidden"), "TEACHER_HIDDEN");
}

absl::Status Transfer::Take(const ChunkView& chunk, int32_t index) {
  HEADWATER_RETURN_IF_ERROR(core_.lost());
  HEADWATER_ASSIGN_OR_RETURN(const size_t tensor, TensorOf(chunk));
  HEADWATER_RETURN_IF_ERROR(CheckLimit("chunk.data", chunk.data_bytes, "max_chunk_bytes", core_.options.limits.max_chunk_bytes));
  HEADWATER_ASSIGN_OR_RETURN(uint8_t* const place,
                             exchange_.Claim(tensor, chunk.row_start, chunk.row_count, chunk.data_bytes, "chunk"));
  v1::CopySpans(chunk.data, place);
  if (options_.digest) {
    const Tensor& rows = tensors_[tensor];
    digests_[static_cast<size_t>(index)].AddRows(rows.digest_stream, chunk.row_start, chunk.row_count, rows.rows.row_bytes, place);
  }
  core_.metrics.Count(observability::Metric::kBytes, chunk.data_bytes, observability::Direction::kIn);
  exchange_.Deliver(tensor, chunk.row_start, chunk.row_count);
  return absl::OkStatus();
}

void Transfer::OnHalfClosed() {
  {
    absl::MutexLock lock(&mutex_);
    if (++half_closed_ < options_.stripe_count) return;
  }
  exchange_.CloseInput();
}

void Transfer::OnStripeLost() {
  {
    absl::MutexLock lock(&mutex_);
    if (ended_) return;
  }
  exchange_.Break(
      MakeError(ErrorReason::kStripeLost, "a stream of the transfer broke before the micro-batch was answered; send it again"));
}

void Transfer::End(bool succeeded) {
  std::vector<std::shared_ptr<RowStream>> streams;
  {
    absl::MutexLock lock(&mutex_);
    if (ended_) return;
    ended_ = true;
    streams.swap(streams_);
  }
  exchange_.Break(TransferEnded());
  for (const std::shared_ptr<RowStream>& stream : streams) {
    if (stream != nullptr) stream->OnTransferEnd(succeeded);
  }
}

DigestBuilder Transfer::Digested() const {
  DigestBuilder sum;
  for (const DigestBuilder& digest : digests_) sum.Merge(digest);
  return sum;
}

void Transfer::AddToDigest(size_t tensor, int64_t row_start, int64_t row_count) {
  if (!options_.digest) return;
  const Tensor& rows = tensors_[tensor];
  digests_.back().AddRows(rows.digest_stream, row_start, row_count, rows.rows.row_bytes,
                          rows.rows.data + row_start * rows.rows.row_bytes);
}

// ---- gradient --------------------------------------------------------------------------------------------------------

void Transfer::OpenGrad(int64_t row_count, int64_t row_bytes, const uint8_t* data, std::shared_ptr<const void> owner) {
  constexpr int64_t kLeastBytes = 256 << 10;
  constexpr int64_t kMostBytes = 2 << 20;
  constexpr int64_t kPiecesPerStream = 8;  // enough of them to keep every stream busy to the end
  const int64_t fair = row_count * row_bytes / (kPiecesPerStream * options_.stripe_count);
  const int64_t piece_bytes = std::min(std::clamp(fair, kLeastBytes, kMostBytes), core_.options.limits.max_chunk_bytes);
  grad_ = data;
  grad_row_bytes_ = row_bytes;
  grad_owner_ = std::move(owner);
  exchange_.OpenGrad(row_count, std::max<int64_t>(1, piece_bytes / row_bytes));
}

void Transfer::GradReady(int64_t row_end, bool here) {
  exchange_.GradReady(row_end);
  for (const std::shared_ptr<RowStream>& stream : Streams()) {
    if (here) {
      stream->Pump();
    } else {
      core_.senders.Post([stream] { stream->Pump(); });
    }
  }
}

std::optional<grpc::ByteBuffer> Transfer::NextGradMessage() {
  transport::GradRows rows;
  {
    absl::MutexLock lock(&mutex_);
    rows = exchange_.NextGrad();
    if (rows.row_count == 0) return std::nullopt;
    ++writing_;
  }
  const int64_t bytes = rows.row_count * grad_row_bytes_;
  core_.metrics.Count(observability::Metric::kBytes, bytes, observability::Direction::kOut);
  return EncodeGradChunk(rows.row_start, rows.row_count, grad_ + rows.row_start * grad_row_bytes_, bytes, grad_owner_);
}

void Transfer::OnWritten(bool ok) {
  if (!ok) OnStripeLost();
  {
    absl::MutexLock lock(&mutex_);
    if (--writing_ > 0) return;
  }
  exchange_.Notify();
}

}  // namespace headwater::service
