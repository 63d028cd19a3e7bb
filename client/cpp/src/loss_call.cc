#include "client/cpp/src/loss_call.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/src/convert.h"

namespace headwater::client::internal {
namespace {

absl::Status InvalidView(v1::ErrorReason reason, const std::string& field, const std::string& expected, const std::string& actual) {
  return MakeLocalError(reason, absl::StatusCode::kInvalidArgument, absl::StrCat(field, ": expected ", expected, ", got ", actual),
                        {{"field", field}, {"expected", expected}, {"actual", actual}});
}

absl::Status CheckRows(const std::string& field, const RowsView& rows) {
  if (rows.row_count < 0 || rows.hidden_size < 0) {
    return InvalidView(v1::ERROR_REASON_INVALID_FIELD, field, "sizes >= 0", absl::StrCat(rows.row_count, " x ", rows.hidden_size));
  }
  int64_t bytes = 0;
  if (__builtin_mul_overflow(rows.row_count, rows.hidden_size, &bytes) || __builtin_mul_overflow(bytes, int64_t{4}, &bytes)) {
    return InvalidView(v1::ERROR_REASON_INVALID_FIELD, field, "a size in bytes below 2^63",
                       absl::StrCat(rows.row_count, " x ", rows.hidden_size));
  }
  if (rows.data == nullptr && bytes > 0) {
    return InvalidView(v1::ERROR_REASON_INVALID_FIELD, field, "memory for the rows", "a null pointer");
  }
  return absl::OkStatus();
}

// gRPC calls OnWriteDone and OnReadDone one at a time each, but the two concurrently: the writing half of the members belongs to
// the one, the reading half to the other, and OnDone, which comes last, sees both.
class LossCall : public grpc::ClientBidiReactor<v1::ComputeLossRequest, v1::ComputeLossResponse> {
 public:
  LossCall(std::shared_ptr<Connection> connection, LossInput input, const CallOptions& options,
           std::shared_ptr<FutureState<LossResult>> state)
      : connection_(std::move(connection)), input_(std::move(input)), state_(std::move(state)) {
    context_.set_deadline(connection_->DeadlineOf(options));
    row_count_ = input_.header.row_count();
    AddSource(v1::CHUNK_ROLE_HIDDEN, input_.hidden);
    AddSource(v1::CHUNK_ROLE_TEACHER_HIDDEN, input_.teacher_hidden);
    if (input_.want_grad_hidden) {
      grad_row_bytes_ = input_.hidden.hidden_size * ElementBytes(input_.grad_hidden_data_type);
      if (input_.grad_hidden.empty()) {
        grad_hidden_ = TensorBuffer(input_.grad_hidden_data_type, {row_count_, input_.hidden.hidden_size});
        grad_destination_ = static_cast<unsigned char*>(grad_hidden_.data());
      } else {
        grad_destination_ = input_.grad_hidden.data();
      }
    }
  }

  // The future's state keeps this object until the result is taken.
  void Start() {
    *request_.mutable_header() = std::move(input_.header);
    connection_->loss().async()->ComputeLoss(&context_, this);
    StartRead(&response_);
    Write();
    StartCall();
  }

  void Cancel() { context_.TryCancel(); }

  void OnWriteDone(bool ok) override {
    // Not ok: the server answered before it had read everything, or the connection broke. OnDone tells which.
    if (!ok || sources_.empty()) return;
    FillChunk();
    Write();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (absl::Status status = TakeResponse(); !status.ok()) {
      answer_error_ = std::move(status);
      context_.TryCancel();
      return;
    }
    StartRead(&response_);
  }

  void OnDone(const grpc::Status& status) override {
    // Once the result is set this object may be gone.
    const std::shared_ptr<FutureState<LossResult>> state = state_;
    state->Set(Result(status));
  }

 private:
  struct Source {
    v1::ChunkRole role;
    RowsView rows;
    int64_t next_row = 0;
  };

  void AddSource(v1::ChunkRole role, const RowsView& rows) {
    if (rows.row_count > 0 && rows.hidden_size > 0) sources_.push_back({role, rows});
  }

  // Sends request_, and the end of the stream with the last one.
  void Write() {
    if (sources_.empty()) {
      StartWriteLast(&request_, grpc::WriteOptions());
    } else {
      StartWrite(&request_);
    }
  }

  // The next rows of the first source that has any left.
  void FillChunk() {
    Source& source = sources_.front();
    const int64_t row_bytes = source.rows.row_bytes();
    const int64_t rows =
        std::min(std::max<int64_t>(1, connection_->options().chunk_bytes / row_bytes), source.rows.row_count - source.next_row);
    v1::RowChunk* chunk = request_.mutable_chunk();
    chunk->set_role(source.role);
    chunk->set_row_start(source.next_row);
    chunk->set_row_count(rows);
    chunk->set_data(static_cast<const unsigned char*>(source.rows.data) + source.next_row * row_bytes,
                    static_cast<size_t>(rows * row_bytes));
    source.next_row += rows;
    if (source.next_row == source.rows.row_count) sources_.erase(sources_.begin());
  }

  absl::Status TakeResponse() {
    if (summary_.has_value()) return MakeAnswerError("a message after the summary");
    if (response_.has_summary()) {
      summary_.emplace(std::move(*response_.mutable_summary()));
      return absl::OkStatus();
    }
    if (!response_.has_chunk()) return MakeAnswerError("a message without chunk or summary");
    const v1::RowChunk& chunk = response_.chunk();
    if (grad_destination_ == nullptr || chunk.role() != v1::CHUNK_ROLE_GRAD_HIDDEN) {
      return MakeAnswerError(absl::StrCat("a chunk of role ", v1::ChunkRole_Name(chunk.role()), " that was not asked for"));
    }
    if (chunk.row_start() != rows_received_ || chunk.row_count() < 1 || chunk.row_count() > row_count_ - rows_received_ ||
        chunk.data().size() != static_cast<size_t>(chunk.row_count() * grad_row_bytes_)) {
      return MakeAnswerError(absl::StrCat("grad_hidden rows [", chunk.row_start(), ", +", chunk.row_count(), ") with ",
                                          chunk.data().size(), " bytes, expected them to go on at row ", rows_received_, " of ",
                                          row_count_, " with ", grad_row_bytes_, " bytes a row"));
    }
    std::memcpy(grad_destination_ + rows_received_ * grad_row_bytes_, chunk.data().data(), chunk.data().size());
    rows_received_ += chunk.row_count();
    return absl::OkStatus();
  }

  absl::StatusOr<LossResult> Result(const grpc::Status& status) {
    if (!answer_error_.ok()) return answer_error_;
    if (!status.ok()) return FromGrpcStatus(status, connection_->target());
    if (!summary_.has_value()) return MakeAnswerError("the stream ended without a summary");
    if (grad_destination_ != nullptr && rows_received_ != row_count_) {
      return MakeAnswerError(absl::StrCat("grad_hidden ended after ", rows_received_, " of ", row_count_, " rows"));
    }
    absl::StatusOr<LossResult> result = FromProto(*summary_, row_count_);
    if (result.ok()) result->grad_hidden = std::move(grad_hidden_);
    return result;
  }

  const std::shared_ptr<Connection> connection_;
  LossInput input_;
  const std::shared_ptr<FutureState<LossResult>> state_;
  grpc::ClientContext context_;
  int64_t row_count_ = 0;

  // Writing.
  v1::ComputeLossRequest request_;
  std::vector<Source> sources_;  // with rows left

  // Reading.
  v1::ComputeLossResponse response_;
  absl::Status answer_error_;
  std::optional<v1::MicroBatchSummary> summary_;
  TensorBuffer grad_hidden_;
  unsigned char* grad_destination_ = nullptr;  // null: grad_hidden is not wanted
  int64_t grad_row_bytes_ = 0;
  int64_t rows_received_ = 0;
};

absl::Status CheckInput(const LossInput& input) {
  if (absl::Status status = CheckRows("hidden", input.hidden); !status.ok()) return status;
  if (absl::Status status = CheckRows("teacher_hidden", input.teacher_hidden); !status.ok()) return status;
  if (input.grad_hidden.empty()) return absl::OkStatus();
  if (!input.want_grad_hidden) {
    return InvalidView(v1::ERROR_REASON_INVALID_COMBINATION, "grad_hidden", "no memory, as no gradient was asked for",
                       absl::StrCat(input.grad_hidden.size(), " bytes"));
  }
  const int64_t expected = input.hidden.row_count * input.hidden.hidden_size * ElementBytes(input.grad_hidden_data_type);
  if (static_cast<int64_t>(input.grad_hidden.size()) != expected) {
    return InvalidView(v1::ERROR_REASON_DATA_LENGTH_MISMATCH, "grad_hidden", absl::StrCat(expected, " bytes"),
                       absl::StrCat(input.grad_hidden.size(), " bytes"));
  }
  return absl::OkStatus();
}

}  // namespace

Future<LossResult> StartLossCall(std::shared_ptr<Connection> connection, LossInput input, const CallOptions& options) {
  auto state = std::make_shared<FutureState<LossResult>>();
  if (absl::Status status = CheckInput(input); !status.ok()) {
    state->Set(std::move(status));
  } else {
    auto call = std::make_shared<LossCall>(std::move(connection), std::move(input), options, state);
    state->Keep(call, [raw = call.get()] { raw->Cancel(); });
    call->Start();
  }
  return Future<LossResult>(state);
}

}  // namespace headwater::client::internal
