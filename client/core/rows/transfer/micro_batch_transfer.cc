#include "client/core/rows/transfer/micro_batch_transfer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/core/link/error.h"
#include "client/core/link/random_id.h"
#include "headwater/client/error.h"

namespace headwater::client::internal {
namespace {

constexpr char kComputeLoss[] = "/headwater.v1.LossService/ComputeLoss";
// To copy so many bytes takes less time than to wake a thread for it.
constexpr int64_t kQuickBytes = 16 << 10;
// Waits until then wait for nothing.
constexpr Deadline kNever{};

bool HasRows(const RowsView& rows) { return rows.row_count > 0 && rows.hidden_size > 0 && rows.data != nullptr; }

int64_t BytesOf(const RowsView& rows) { return HasRows(rows) ? rows.row_count * rows.row_bytes() : 0; }

RowsMemory MemoryOf(const RowsView& rows) { return {const_cast<void*>(rows.data), BytesOf(rows), rows.memory == Memory::kCuda}; }

v1::SharedRows ToProto(const PlacedRows& rows) {
  v1::SharedRows result;
  result.set_region_id(rows.region_id);
  result.set_offset_bytes(rows.offset_bytes);
  return result;
}

PathDemand DemandOf(Transport transport) {
  if (transport == Transport::kSharedMemory) return PathDemand::kSharedMemory;
  if (transport == Transport::kCudaIpc) return PathDemand::kCudaIpc;
  return PathDemand::kBest;
}

absl::Status TransportUnavailable(const std::string& why) {
  return MakeLocalError(v1::ERROR_REASON_TRANSPORT_UNAVAILABLE, absl::StatusCode::kFailedPrecondition, why);
}

}  // namespace

int64_t CallTensors::bytes_up() const {
  int64_t bytes = BytesOf(hidden);
  for (const RowsView& rows : teacher_hidden) bytes += BytesOf(rows);
  return bytes;
}

bool MicroBatchTransfer::on_device() const {
  return tensors_.hidden.memory == Memory::kCuda || (tensors_.grad_hidden != nullptr && tensors_.grad_memory == Memory::kCuda) ||
         std::any_of(tensors_.teacher_hidden.begin(), tensors_.teacher_hidden.end(),
                     [](const RowsView& rows) { return HasRows(rows) && rows.memory == Memory::kCuda; });
}

void MicroBatchTransfer::StartAttempt(v1::MicroBatchHeader header, Deadline deadline, Done done) {
  header_ = std::move(header);
  deadline_ = deadline;
  done_ = std::move(done);
  session_given_ = !header_.session_id().empty();
  repeated_ = false;
  const bool is_quick = !on_device() && (transport().options().transport == Transport::kGrpc || IsSmall());
  if (!is_quick || !CheckWanted(deadline).ok() || !Place(kNever).ok() || !TryConnect(stream_bytes_up(), stream_bytes_down())) {
    return RunBeginning([this] { Begin(); });
  }
  if (absl::Status status = SendAll(); !status.ok()) Deliver(std::move(status));
}

void MicroBatchTransfer::Begin() {
  absl::Status status = CheckWanted(deadline_);
  if (status.ok()) status = Place(deadline_);
  if (status.ok()) status = Connect(stream_bytes_up(), stream_bytes_down(), deadline_);
  if (status.ok()) status = SendAll();
  if (!status.ok()) Deliver(std::move(status));
}

bool MicroBatchTransfer::IsSmall() const { return tensors_.bytes_up() + tensors_.bytes_down() <= kQuickBytes; }

void MicroBatchTransfer::BeginAgain() {
  absl::Status status = placement_->Renew(session_given_ ? header_.session_id() : "", Until(deadline_));
  if (!status.ok()) {
    placement_.reset();
    return Deliver(std::move(status));
  }
  header_.set_session_id(placement_->session_id());
  Begin();
}

absl::Status MicroBatchTransfer::Place(Deadline until) {
  const Transport demanded = transport().options().transport;
  // Without rows there is nothing to share, whatever is demanded.
  if (demanded == Transport::kGrpc || !HasRows(tensors_.hidden)) return absl::OkStatus();
  absl::Status status;
  if (header_.commit_mode() == v1::COMMIT_MODE_EXPLICIT && header_.session_id().empty()) {
    status = TransportUnavailable("an explicit micro-batch without a session cannot name shared memory");
  } else if (placement_.has_value()) {
    if (!header_.session_id().empty() && placement_->session_id() != header_.session_id()) {
      status = placement_->Renew(header_.session_id(), Until(until));
    }
  } else {
    CallRows rows;
    rows.reads.push_back(MemoryOf(tensors_.hidden));
    for (const RowsView& teacher : tensors_.teacher_hidden) {
      if (HasRows(teacher)) rows.reads.push_back(MemoryOf(teacher));
    }
    if (tensors_.grad_hidden != nullptr) {
      rows.write = RowsMemory{tensors_.grad_hidden, tensors_.bytes_down(), tensors_.grad_memory == Memory::kCuda};
    }
    rows.stream = tensors_.cuda_stream;
    absl::StatusOr<Placement> placement = transport().memory().Place(rows, header_.session_id(), DemandOf(demanded), Until(until));
    if (placement.ok()) {
      placement_.emplace(*std::move(placement));
      transport().SetWhyNotBetter(placement_->why_not_better());
    }
    status = placement.status();
  }
  if (status.ok()) return status;
  placement_.reset();
  const std::string reason = ErrorReason(status);
  // What has ended the wait says nothing of the path, and ends the attempt on any.
  if (absl::Status wanted = CheckWanted(until); !wanted.ok() && reason != "TRANSPORT_UNAVAILABLE") return wanted;
  // A session that is gone is replaced by those who opened it.
  if (demanded != Transport::kAuto || reason == "SESSION_NOT_FOUND") return status;
  transport().SetWhyNotBetter(Sentence(status));
  return absl::OkStatus();
}

absl::Status MicroBatchTransfer::SendAll() {
  if (!placement_.has_value()) return SendRows();
  SendPlaced();
  return absl::OkStatus();
}

void MicroBatchTransfer::SendPlaced() {
  header_.set_session_id(placement_->session_id());
  *header_.mutable_hidden_rows() = ToProto(placement_->reads()[0]);
  size_t next = 1;
  for (size_t i = 0; i < tensors_.teacher_hidden.size(); ++i) {
    if (!HasRows(tensors_.teacher_hidden[i])) continue;
    *header_.mutable_terms(static_cast<int>(i))->mutable_teacher_hidden()->mutable_rows() = ToProto(placement_->reads()[next++]);
  }
  if (placement_->write().has_value()) *header_.mutable_grad_hidden_rows() = ToProto(*placement_->write());
  SendRequest({});
}

absl::Status MicroBatchTransfer::SendRows() {
  // What an earlier try of this attempt by shared memory has left.
  if (!session_given_) header_.clear_session_id();
  header_.clear_hidden_rows();
  header_.clear_grad_hidden_rows();
  for (v1::LossTerm& term : *header_.mutable_terms()) {
    if (term.has_teacher_hidden()) term.mutable_teacher_hidden()->clear_rows();
  }
  TransferRequest request;
  const auto add = [&](v1::ChunkRole role, int64_t term_index, const RowsView& view, int64_t first_row) -> absl::Status {
    if (!HasRows(view)) return absl::OkStatus();
    OutgoingRows& rows = request.rows.emplace_back();
    rows = {role, term_index, nullptr, view.row_count, view.row_bytes(), first_row};
    return BringToHost(view, tensors_.cuda_stream, &rows);
  };
  if (absl::Status status = add(v1::CHUNK_ROLE_HIDDEN, 0, tensors_.hidden, 0); !status.ok()) return status;
  for (size_t i = 0; i < tensors_.teacher_hidden.size(); ++i) {
    const int64_t first_row = header_.terms(static_cast<int>(i)).row_start();
    if (absl::Status status = add(v1::CHUNK_ROLE_TEACHER_HIDDEN, static_cast<int64_t>(i), tensors_.teacher_hidden[i], first_row);
        !status.ok()) {
      return status;
    }
  }
  if (tensors_.grad_hidden != nullptr) {
    request.grad_hidden = static_cast<unsigned char*>(tensors_.grad_hidden);
    if (tensors_.grad_memory == Memory::kCuda && tensors_.bytes_down() > 0) {
      MemoryPaths& memory = transport().memory();
      if (!grad_copy_.has_value()) {
        absl::StatusOr<HostCopy> copy = Allocate(tensors_.grad_hidden, tensors_.bytes_down());
        if (!copy.ok()) return copy.status();
        grad_copy_ = *std::move(copy);
      }
      // The stream may be used otherwise while the call is under way: what it gets later must not hold the gradient up.
      if (absl::Status status = memory.OrderCopies(tensors_.grad_hidden, tensors_.bytes_down(), tensors_.cuda_stream);
          !status.ok()) {
        return status;
      }
      request.grad_hidden = grad_copy_->data();
      // Rows go on as they come, if that makes gRPC's threads wait for nothing.
      if (grad_copy_->page_locked()) {
        request.on_grad_rows = [this, &memory](int64_t first, int64_t count) {
          return memory.CopyToDevice(static_cast<unsigned char*>(tensors_.grad_hidden) + first, grad_copy_->data() + first, count);
        };
      }
    }
    request.grad_row_count = tensors_.hidden.row_count;
    request.grad_row_bytes = tensors_.grad_row_bytes;
  }
  if (stripes() > 1) {
    request.transfer_id = RandomId();
    header_.set_transfer_id(request.transfer_id);
    header_.set_stripe_count(stripes());
  } else {
    header_.clear_transfer_id();
    header_.clear_stripe_count();
  }
  SendRequest(std::move(request));
  return absl::OkStatus();
}

void MicroBatchTransfer::SendRequest(TransferRequest request) {
  v1::ComputeLossRequest first;
  *first.mutable_header() = header_;
  request.method = kComputeLoss;
  request.first_message = first.SerializeAsString();
  request.deadline = deadline_;
  streams_ = stripes();
  Send(std::move(request));
}

void MicroBatchTransfer::Ended(TransferResult result) {
  if (!placement_.has_value() && !on_device()) return EndedByRows(std::move(result));
  if (!on_device() && result.status.ok() && IsSmall()) return EndedPlaced(std::move(result));
  // What follows may copy or call the server, waits for the copies, and `done_` may copy rows of a device.
  result_ = std::move(result);
  RunEnding([this] { placement_.has_value() ? EndedPlaced(std::move(result_)) : EndedByRows(std::move(result_)); });
}

void MicroBatchTransfer::EndedByRows(TransferResult result) {
  // Also of an attempt that failed: what it has begun to copy is the caller's memory.
  absl::Status copied = grad_copy_.has_value() ? FinishGradCopy(result.status.ok()) : absl::OkStatus();
  if (result.no_stripes && !repeated_ && !cancelled()) {
    repeated_ = true;
    return RunBeginning([this] { Begin(); });
  }
  if (!result.status.ok()) return Deliver(std::move(result.status));
  if (!copied.ok()) return Deliver(std::move(copied));
  Deliver(MicroBatchAnswer{std::move(result.answer), "grpc"});
}

absl::Status MicroBatchTransfer::FinishGradCopy(bool answered) {
  MemoryPaths& memory = transport().memory();
  if (!grad_copy_->page_locked()) {
    if (!answered) return absl::OkStatus();
    absl::Status status = memory.CopyToDevice(tensors_.grad_hidden, grad_copy_->data(), tensors_.bytes_down());
    if (!status.ok()) return status;
  }
  return memory.AwaitCopies(tensors_.grad_hidden, tensors_.bytes_down());
}

void MicroBatchTransfer::EndedPlaced(TransferResult result) {
  if (result.status.ok()) {
    MicroBatchAnswer answer{std::move(result.answer), MemoryPathName(placement_->path())};
    if (absl::Status status = placement_->Finish(); !status.ok()) return Deliver(std::move(status));
    return Deliver(std::move(answer));
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
    if (reason == "REGION_NOT_FOUND" || !session_given_) return RunBeginning([this] { BeginAgain(); });
  }
  Deliver(std::move(result.status));
}

void MicroBatchTransfer::Deliver(absl::StatusOr<MicroBatchAnswer> answer) {
  if (answer.ok()) {
    transport().Count(answer->transport, on_device(), tensors_.bytes_up() + tensors_.bytes_down(), streams_);
    placement_.reset();
  }
  FinishCopies();
  const Done done = std::move(done_);
  done(std::move(answer));
}

}  // namespace headwater::client::internal
