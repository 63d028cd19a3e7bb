#include "client/core/rows/transfer/micro_batch_transfer.h"

#include <algorithm>
#include <utility>

#include "client/core/link/error.h"
#include "client/core/link/random_id.h"
#include "headwater/client/error.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {
namespace {

constexpr char kComputeLoss[] = "/headwater.v1.LossService/ComputeLoss";
// To copy so many bytes takes less time than to wake a thread for it.
constexpr int64_t kQuickBytes = 16 << 10;
// Waits until then wait for nothing.
constexpr Deadline kNever{};

int64_t BytesOf(const RowsView& rows) { return HasRows(rows) ? rows.bytes() : 0; }

}  // namespace

MicroBatchTransfer::MicroBatchTransfer(RowTransport& transport, const v1::MicroBatchHeader& header, CallMemory memory)
    : RowsCall(transport), memory_(std::move(memory)) {
  memory_.teachers.resize(static_cast<size_t>(header.terms_size()));
  RowsView& result = memory_.result;
  if (!WantsGradHidden(header)) {
    result.data = nullptr;
    return;
  }
  result.row_count = memory_.rows.row_count;
  result.hidden_size = header.hidden_size();
  result.data_type = static_cast<DataType>(GradHiddenType(header));
  if (result.data != nullptr) return;
  own_ = Bytes::Allocate(result.bytes(), "gradients");
  result.memory = Memory::kHost;
  if (own_.ok()) result.data = own_->data();
}

int64_t MicroBatchTransfer::bytes_up() const {
  int64_t bytes = BytesOf(memory_.rows);
  for (const RowsView& rows : memory_.teachers) bytes += BytesOf(rows);
  return bytes;
}

int64_t MicroBatchTransfer::bytes_down() const { return BytesOf(memory_.result); }

bool MicroBatchTransfer::is_small() const { return bytes_up() + bytes_down() <= kQuickBytes; }

void MicroBatchTransfer::Start(const google::protobuf::Message& request, Deadline deadline, Done done) {
  if (!own_.ok()) return done(own_.status());
  header_ = static_cast<const v1::MicroBatchHeader&>(request);
  SetAttempt(deadline, std::move(done));
  session_given_ = !header_.session_id().empty();
  repeated_ = false;
  const bool is_quick = !memory_.on_device() && (transport().options().transport == Transport::kGrpc || is_small());
  if (!is_quick || !Until().Check().ok() || !Place(kNever).ok() || !TryConnect(stream_bytes_up(), stream_bytes_down())) {
    return RunBeginning([this] { return Begin(); });
  }
  if (absl::Status status = SendAll(); !status.ok()) Deliver(std::move(status));
}

absl::Status MicroBatchTransfer::Begin() {
  HEADWATER_RETURN_IF_ERROR(Until().Check());
  HEADWATER_RETURN_IF_ERROR(Place(Until()));
  HEADWATER_RETURN_IF_ERROR(Connect(stream_bytes_up(), stream_bytes_down()));
  return SendAll();
}

absl::Status MicroBatchTransfer::BeginAgain() {
  absl::Status status = placement_->Renew(session_given_ ? header_.session_id() : "", Until());
  if (!status.ok()) {
    placement_.reset();
    return status;
  }
  header_.set_session_id(placement_->session_id());
  return Begin();
}

absl::Status MicroBatchTransfer::Place(const Wait& wait) {
  const Transport demanded = transport().options().transport;
  // Without rows there is nothing to share, whatever is demanded.
  if (demanded == Transport::kGrpc || !HasRows(memory_.rows)) return absl::OkStatus();
  absl::Status status;
  if (header_.commit_mode() == v1::COMMIT_MODE_EXPLICIT && header_.session_id().empty()) {
    status = TransportUnavailable("an explicit micro-batch without a session cannot name shared memory");
  } else if (placement_.has_value()) {
    if (!header_.session_id().empty() && placement_->session_id() != header_.session_id()) {
      status = placement_->Renew(header_.session_id(), wait);
    }
  } else {
    absl::StatusOr<Placement> placement = transport().memory().Place(memory_, header_.session_id(), demanded, wait);
    if (placement.ok()) {
      placement_.emplace(*std::move(placement));
      transport().SetWhyNotBetter(placement_->why_not_better());
    }
    status = placement.status();
  }
  if (status.ok()) return status;
  placement_.reset();
  const std::string reason = ErrorReason(status);
  // The end of the wait says nothing about the path, and ends the attempt on any.
  if (absl::Status ended = wait.Check(); !ended.ok() && reason != "TRANSPORT_UNAVAILABLE") return ended;
  // A session that is gone is replaced by those who opened it.
  if (demanded != Transport::kAuto || reason == "SESSION_NOT_FOUND") return status;
  transport().SetWhyNotBetter(Sentence(status));
  return absl::OkStatus();
}

absl::Status MicroBatchTransfer::SendAll() { return placement_.has_value() ? SendPlaced() : SendRows(); }

absl::Status MicroBatchTransfer::SendPlaced() {
  header_.set_session_id(placement_->session_id());
  *header_.mutable_hidden_rows() = placement_->reads()[0].shared;
  size_t next = 1;
  for (size_t i = 0; i < memory_.teachers.size(); ++i) {
    if (!HasRows(memory_.teachers[i])) continue;
    *header_.mutable_terms(static_cast<int>(i))->mutable_teacher_hidden()->mutable_rows() = placement_->reads()[next++].shared;
  }
  if (placement_->write().has_value()) *header_.mutable_grad_hidden_rows() = placement_->write()->shared;
  SendRequest({});
  return absl::OkStatus();
}

absl::Status MicroBatchTransfer::SendRows() {
  // Left by an earlier try of this attempt by shared memory.
  if (!session_given_) header_.clear_session_id();
  ClearTransfer(header_);
  TransferRequest request;
  const auto add = [&](v1::ChunkRole role, int32_t term_index, const RowsView& view, int64_t first_row) -> absl::Status {
    if (!HasRows(view)) return absl::OkStatus();
    OutgoingRows& rows = request.rows.emplace_back();
    rows = {role, term_index, nullptr, view.row_count, view.row_bytes(), first_row};
    return BringToHost(view, memory_.cuda_stream, &rows);
  };
  HEADWATER_RETURN_IF_ERROR(add(v1::CHUNK_ROLE_HIDDEN, 0, memory_.rows, 0));
  for (size_t i = 0; i < memory_.teachers.size(); ++i) {
    const int64_t first_row = header_.terms(static_cast<int>(i)).row_start();
    HEADWATER_RETURN_IF_ERROR(add(v1::CHUNK_ROLE_TEACHER_HIDDEN, static_cast<int32_t>(i), memory_.teachers[i], first_row));
  }
  if (const RowsView& result = memory_.result; result.data != nullptr) {
    request.grad_hidden = static_cast<unsigned char*>(const_cast<void*>(result.data));
    request.grad_row_count = result.row_count;
    request.grad_row_bytes = result.row_bytes();
    if (result.on_device() && bytes_down() > 0) {
      HEADWATER_RETURN_IF_ERROR(PrepareGradCopy(&request));
    }
  }
  if (stripes() > 1) {
    request.transfer_id = RandomId();
    header_.set_transfer_id(request.transfer_id);
    header_.set_stripe_count(stripes());
  }
  SendRequest(std::move(request));
  return absl::OkStatus();
}

void MicroBatchTransfer::SendRequest(TransferRequest request) {
  v1::ComputeLossRequest first;
  *first.mutable_header() = header_;
  request.method = kComputeLoss;
  request.first_message = first.SerializeAsString();
  streams_ = stripes();
  Send(std::move(request));
}

absl::Status MicroBatchTransfer::PrepareGradCopy(TransferRequest* request) {
  if (!grad_copy_.has_value()) {
    HEADWATER_ASSIGN_OR_RETURN(grad_copy_, Allocate(memory_.result.data, bytes_down()));
  }
  HEADWATER_ASSIGN_OR_RETURN(grad_context_, transport().memory().ContextOf(memory_.result.data));
  // The stream may be used otherwise while the call is under way: later work of the stream must not hold the gradient up.
  HEADWATER_RETURN_IF_ERROR(grad_context_->Record(static_cast<CuStream>(memory_.cuda_stream)));
  request->grad_hidden = grad_copy_->data;
  // Rows are passed on as they come, if that makes gRPC's threads wait for nothing.
  if (grad_copy_->page_locked) {
    request->on_grad_rows = [this, device = static_cast<const unsigned char*>(memory_.result.data)](int64_t first, int64_t count) {
      return grad_context_->CopyAfterEvent(const_cast<unsigned char*>(device) + first, grad_copy_->data + first, count);
    };
  }
  return absl::OkStatus();
}

bool MicroBatchTransfer::EndBlocks(const TransferResult& result) const {
  return memory_.on_device() || (placement_.has_value() && !(result.status.ok() && is_small()));
}

void MicroBatchTransfer::Ended(TransferResult result) {
  placement_.has_value() ? EndedPlaced(std::move(result)) : EndedByRows(std::move(result));
}

void MicroBatchTransfer::EndedByRows(TransferResult result) {
  // A failed attempt waits, too: the copy that it has begun writes the caller's memory.
  absl::Status copied = grad_context_ != nullptr ? FinishGradCopy(result.status.ok()) : absl::OkStatus();
  if (result.no_stripes && !repeated_ && !cancelled()) {
    repeated_ = true;
    return RunBeginning([this] { return Begin(); });
  }
  if (!result.status.ok()) return Deliver(std::move(result.status));
  if (!copied.ok()) return Deliver(std::move(copied));
  Succeed(std::move(result.answer), "grpc");
}

absl::Status MicroBatchTransfer::FinishGradCopy(bool answered) {
  if (!grad_copy_->page_locked) {
    if (!answered) return absl::OkStatus();
    absl::Status status = grad_context_->CopyAfterEvent(const_cast<void*>(memory_.result.data), grad_copy_->data, bytes_down());
    if (!status.ok()) return status;
  }
  return grad_context_->AwaitCopies();
}

void MicroBatchTransfer::EndedPlaced(TransferResult result) {
  if (result.status.ok()) {
    const char* const path = TransportName(placement_->path());
    if (absl::Status status = placement_->Finish(); !status.ok()) return Deliver(std::move(status));
    return Succeed(std::move(result.answer), path);
  }
  if (!result.answered) {
    placement_->Abandon();
    placement_.reset();
    return Deliver(std::move(result.status));
  }
  const std::string reason = ErrorReason(result.status);
  if ((reason == "REGION_NOT_FOUND" || reason == "SESSION_NOT_FOUND") && !repeated_ && !cancelled()) {
    repeated_ = true;
    if (reason == "SESSION_NOT_FOUND") transport().memory().Forget(header_.session_id());
    if (reason == "REGION_NOT_FOUND" || !session_given_) return RunBeginning([this] { return BeginAgain(); });
  }
  Deliver(std::move(result.status));
}

void MicroBatchTransfer::Succeed(std::string summary, const char* path) {
  transport().Count(path, memory_.on_device(), bytes_up() + bytes_down(), streams_);
  placement_.reset();
  Deliver(Answer{.bytes = std::move(summary), .data = *std::move(own_), .transport = path});
}

}  // namespace headwater::client::internal
