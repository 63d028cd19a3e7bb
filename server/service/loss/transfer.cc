#include "server/service/loss/transfer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/service/request/field_check.h"

namespace headwater::service {
namespace {

std::vector<transport::RowTensor> RowsOf(const std::vector<Transfer::Tensor>& tensors) {
  std::vector<transport::RowTensor> rows;
  for (const Transfer::Tensor& tensor : tensors) rows.push_back(tensor.rows);
  return rows;
}

absl::Status TransferEnded() {
  return MakeError(ErrorReason::kTransferNotFound, "the transfer's primary stream has ended; what became of it is told there");
}

}  // namespace

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
