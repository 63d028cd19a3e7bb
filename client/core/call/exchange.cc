#include "client/core/call/exchange.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>

#include <algorithm>

#include "client/core/core.h"
#include "client/core/rows/tensor_exchanges.h"
#include "client/core/rows/transfer/chunk_wire.h"
#include "client/core/rows/transfer/micro_batch_transfer.h"
#include "client/core/rows/transfer/rows_call.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {
namespace {

class UnaryExchange : public Exchange {
 public:
  UnaryExchange(Core& core, const char* path) : core_(core), stub_(core.channel()), path_(path) {}

  void Start(const google::protobuf::Message& request, Deadline deadline, Done done) override {
    const grpc::Slice slice(request.SerializeAsString());
    request_ = grpc::ByteBuffer(&slice, 1);
    response_.Clear();
    done_ = std::move(done);
    stub_.UnaryCall(context_.Renew(deadline), path_, grpc::StubOptions(), &request_, &response_,
                    [this](const grpc::Status& status) noexcept { Ended(status); });
  }
  void Cancel() override { context_.Cancel(); }

 private:
  void Ended(const grpc::Status& status) {
    const Done done = std::move(done_);
    if (!status.ok()) return done(FromGrpcStatus(status, core_.target()));
    done(Answer{.bytes = StringOf(response_)});
  }

  Core& core_;
  grpc::GenericStub stub_;
  const std::string path_;
  AttemptContext context_;
  grpc::ByteBuffer request_;
  grpc::ByteBuffer response_;
  Done done_;
};

// One stream of teacher rows for a join. It goes by gRPC: a teacher is limited by its own computing.
class TeacherExchange : public RowsCall {
 public:
  TeacherExchange(Core& core, const CallMemory& memory)
      : RowsCall(core.row_transport()), rows_(memory.rows), cuda_stream_(memory.cuda_stream) {}

  void Start(const google::protobuf::Message& request, Deadline deadline, Done done) override {
    *first_.mutable_header() = static_cast<const v1::StreamTeacherHeader&>(request);
    SetAttempt(deadline, std::move(done));
    RunBeginning([this] { return Begin(); });
  }

 private:
  absl::Status Begin() {
    HEADWATER_RETURN_IF_ERROR(Connect(0, 0));
    TransferRequest request;
    request.method = "/headwater.v1.LossService/StreamTeacher";
    request.first_message = first_.SerializeAsString();
    request.answer_is_message = true;
    if (rows_.bytes() > 0) {
      OutgoingRows& rows = request.rows.emplace_back();
      rows = {v1::CHUNK_ROLE_TEACHER_HIDDEN, 0, nullptr, rows_.row_count, rows_.row_bytes(), 0};
      HEADWATER_RETURN_IF_ERROR(BringToHost(rows_, cuda_stream_, &rows));
    }
    Send(std::move(request));
    return absl::OkStatus();
  }
  void Ended(TransferResult result) override {
    if (!result.status.ok()) return Deliver(std::move(result.status));
    Deliver(Answer{.bytes = std::move(result.answer)});
  }
  bool EndBlocks(const TransferResult&) const override { return rows_.on_device(); }

  const RowsView rows_;
  void* const cuda_stream_;
  v1::StreamTeacherRequest first_;
};

}  // namespace

bool CallMemory::on_device() const {
  return rows.on_device() || (result.data != nullptr && result.on_device()) ||
         std::any_of(teachers.begin(), teachers.end(),
                     [](const RowsView& teacher) { return HasRows(teacher) && teacher.on_device(); });
}

absl::StatusOr<std::unique_ptr<google::protobuf::Message>> CopyOf(const google::protobuf::Message& message) {
  std::unique_ptr<google::protobuf::Message> copy;
  absl::Status copied = WithMemoryFor(static_cast<int64_t>(message.ByteSizeLong()), "a message", [&] {
    copy.reset(message.New());
    copy->CopyFrom(message);
    return absl::OkStatus();
  });
  if (!copied.ok()) return copied;
  return copy;
}

bool WantsGradHidden(const v1::MicroBatchHeader& header) {
  return header.has_return_grad_hidden() ? header.return_grad_hidden() : header.compute_mode() == v1::COMPUTE_MODE_FORWARD_BACKWARD;
}

v1::DataType GradHiddenType(const v1::MicroBatchHeader& header) {
  return header.grad_hidden_data_type() == v1::DATA_TYPE_UNSPECIFIED ? header.data_type() : header.grad_hidden_data_type();
}

void ClearTransfer(v1::MicroBatchHeader& header) {
  header.clear_transfer_id();
  header.clear_stripe_count();
  header.clear_hidden_rows();
  header.clear_grad_hidden_rows();
  for (v1::LossTerm& term : *header.mutable_terms()) {
    if (term.has_teacher_hidden()) term.mutable_teacher_hidden()->clear_rows();
  }
}

std::unique_ptr<Exchange> MakeExchange(Core& core, const Method& method, const google::protobuf::Message& request,
                                       const CallMemory& memory) {
  switch (method.shape) {
    case Shape::kUnary:
      break;
    case Shape::kLoss:
      return std::make_unique<MicroBatchTransfer>(core.row_transport(), static_cast<const v1::MicroBatchHeader&>(request), memory);
    case Shape::kTeacher:
      return std::make_unique<TeacherExchange>(core, memory);
    case Shape::kGradient:
      return MakeGradientExchange(core, memory.rows);
    case Shape::kUpload:
      return MakeUploadExchange(core, memory.rows);
    case Shape::kDownload:
      return MakeDownloadExchange(core, request, memory.result);
  }
  return std::make_unique<UnaryExchange>(core, method.path);
}

}  // namespace headwater::client::internal
