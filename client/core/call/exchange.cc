#include "client/core/call/exchange.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>

#include <optional>

#include "client/core/core.h"
#include "client/core/rows/tensor_exchanges.h"
#include "client/core/rows/transfer/micro_batch_transfer.h"
#include "client/core/rows/transfer/teacher_transfer.h"

namespace headwater::client::internal {
namespace {

std::string StringOf(const grpc::ByteBuffer& buffer) {
  std::string bytes;
  std::vector<grpc::Slice> slices;
  if (!buffer.Valid() || !buffer.Dump(&slices).ok()) return bytes;
  bytes.reserve(buffer.Length());
  for (const grpc::Slice& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return bytes;
}

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
    done(Answer{.message = StringOf(response_)});
  }

  Core& core_;
  grpc::GenericStub stub_;
  const std::string path_;
  AttemptContext context_;
  grpc::ByteBuffer request_;
  grpc::ByteBuffer response_;
  Done done_;
};

class LossExchange : public Exchange {
 public:
  LossExchange(Core& core, const v1::MicroBatchHeader& header, const CallMemory& memory)
      : transfer_(core.row_transport(), MakeTensors(header, memory)) {}

  void Start(const google::protobuf::Message& request, Deadline deadline, Done done) override {
    if (!own_.ok()) return done(own_.status());
    transfer_.StartAttempt(static_cast<const v1::MicroBatchHeader&>(request), deadline,
                           [this, done = std::move(done)](absl::StatusOr<MicroBatchAnswer> answer) {
                             const Done once = done;  // with it this object may go
                             if (!answer.ok()) return once(answer.status());
                             once(Ended(*std::move(answer)));
                           });
  }
  void Cancel() override { transfer_.Cancel(); }

 private:
  absl::StatusOr<Answer> Ended(MicroBatchAnswer answer) {
    Answer result{.message = std::move(answer.summary)};
    // `transport` is the last field, and absent where the server does not say it: what follows an encoded message is part of it.
    v1::MicroBatchSummary path;
    path.set_transport(answer.transport);
    if (!SaysTransport(result.message)) result.message += path.SerializeAsString();
    result.data = *std::move(own_);
    return result;
  }
  static bool SaysTransport(const std::string& message) {
    v1::MicroBatchSummary summary;
    return !summary.ParseFromString(message) || !summary.transport().empty();
  }

  CallTensors MakeTensors(const v1::MicroBatchHeader& header, const CallMemory& memory) {
    CallTensors tensors;
    tensors.hidden = memory.rows;
    tensors.teacher_hidden = memory.teachers;
    tensors.teacher_hidden.resize(static_cast<size_t>(header.terms_size()));
    tensors.cuda_stream = memory.cuda_stream;
    if (!WantsGradHidden(header)) return tensors;
    tensors.grad_row_bytes = header.hidden_size() * ElementBytes(static_cast<DataType>(GradHiddenType(header)));
    tensors.grad_hidden = const_cast<void*>(memory.result.data);
    tensors.grad_memory = memory.result.memory;
    if (tensors.grad_hidden == nullptr) {
      own_ = Bytes::Allocate(memory.rows.row_count * tensors.grad_row_bytes, "gradients");
      if (own_.ok()) tensors.grad_hidden = own_->data();
    }
    return tensors;
  }

  absl::StatusOr<Bytes> own_ = Bytes();  // of gradients, where the caller gives no memory
  MicroBatchTransfer transfer_;
};

class TeacherExchange : public Exchange {
 public:
  TeacherExchange(Core& core, const CallMemory& memory) : transfer_(core.row_transport(), memory.rows, memory.cuda_stream) {}

  void Start(const google::protobuf::Message& request, Deadline deadline, Done done) override {
    transfer_.StartAttempt(static_cast<const v1::StreamTeacherHeader&>(request), deadline,
                           [done = std::move(done)](absl::StatusOr<std::string> answer) {
                             const Done once = done;
                             if (!answer.ok()) return once(answer.status());
                             once(Answer{.message = *std::move(answer)});
                           });
  }
  void Cancel() override { transfer_.Cancel(); }

 private:
  TeacherTransfer transfer_;
};

}  // namespace

bool WantsGradHidden(const v1::MicroBatchHeader& header) {
  return header.has_return_grad_hidden() ? header.return_grad_hidden() : header.compute_mode() == v1::COMPUTE_MODE_FORWARD_BACKWARD;
}

v1::DataType GradHiddenType(const v1::MicroBatchHeader& header) {
  return header.grad_hidden_data_type() == v1::DATA_TYPE_UNSPECIFIED ? header.data_type() : header.grad_hidden_data_type();
}

std::unique_ptr<Exchange> MakeExchange(Core& core, const Method& method, const google::protobuf::Message& request,
                                       const CallMemory& memory) {
  switch (method.shape) {
    case Shape::kUnary:
      break;
    case Shape::kLoss:
      return std::make_unique<LossExchange>(core, static_cast<const v1::MicroBatchHeader&>(request), memory);
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
