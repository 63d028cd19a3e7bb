#include "client/core/rows/tensor_exchanges.h"

#define XXH_INLINE_ALL
#include <grpcpp/generic/generic_stub.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/core/core.h"
#include "client/core/link/error.h"
#include "client/core/link/random_id.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {
namespace {

// XXH3-128, canonical (big-endian), 16 bytes.
std::string Checksum(const RowsView& tensor) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(tensor.data, static_cast<size_t>(tensor.bytes())));
  return std::string(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest));
}

// State that the attempts of a call share.
struct Shared {
  Core& core;
  AttemptContext context{};
  std::atomic<int64_t> sent = 0;  // bytes that are on their way
};

// Each attempt is a `Stream(shared, carried, done)`, which is started with its request.
template <typename Stream, typename Carried>
class StreamExchange : public Exchange {
 public:
  StreamExchange(Core& core, Carried carried, int64_t total_bytes)
      : shared_{core}, carried_(std::move(carried)), total_bytes_(total_bytes) {}

  void Start(const google::protobuf::Message& request, Deadline deadline, Done done) override {
    shared_.sent = 0;
    stream_ = std::make_unique<Stream>(shared_, carried_, std::move(done));
    stream_->Start(request, shared_.context.Renew(deadline));
  }
  void Cancel() override { shared_.context.Cancel(); }
  int64_t sent_bytes() const override { return shared_.sent; }
  int64_t total_bytes() const override { return total_bytes_; }

 private:
  Shared shared_;
  const Carried carried_;
  const int64_t total_bytes_;
  std::unique_ptr<Stream> stream_;
};

// One stream of rows that go up: header and chunks up, the answer down. Chunks of an upload begin where the server says.
template <typename Request, typename Response>
class SendingStream : public grpc::ClientBidiReactor<Request, Response> {
 public:
  SendingStream(Shared& shared, const RowsView& rows, Exchange::Done done)
      : shared_(shared), rows_(rows), done_(std::move(done)), stub_(shared.core.channel()) {
    if (!kIsUpload) offset_ = 0;
  }

  void Start(const google::protobuf::Message& header, grpc::ClientContext* context) {
    request_.mutable_header()->CopyFrom(header);
    stub_.PrepareBidiStreamingCall(context, MethodOf(header).path, grpc::StubOptions(), this);
    this->StartRead(&response_);
    this->StartWrite(&request_);
    this->StartCall();
  }

  void OnWriteDone(bool ok) noexcept override {
    if (!ok || half_closed_) return;  // not ok: the server has answered, or the connection broke; OnDone says why
    {
      std::lock_guard<std::mutex> lock(mutex_);
      header_written_ = true;
      if (!offset_.has_value()) return;  // the answer to the header starts the chunks
    }
    WriteNext();
  }

  void OnReadDone(bool ok) noexcept override {
    if (!ok) return;
    bool start_chunks = false;
    answer_error_ = Take(&start_chunks);
    if (!answer_error_.ok()) return shared_.context.End();
    this->StartRead(&response_);
    if (start_chunks) WriteNext();
  }

  void OnDone(const grpc::Status& status) noexcept override {
    const Exchange::Done done = std::move(done_);
    if (!answer_error_.ok()) return done(answer_error_);
    if (!status.ok()) return done(FromGrpcStatus(status, shared_.core.target()));
    if (answer_ == nullptr) return done(MakeAnswerError("the rows are sent, and there is no answer"));
    done(Answer{.message = std::move(answer_)});
  }

 private:
  static constexpr bool kIsUpload = std::is_same_v<Request, v1::UploadWeightsRequest>;

  absl::Status Take(bool* start_chunks) {
    if constexpr (!kIsUpload) {
      answer_ = std::make_unique<Response>(response_);
    } else if (response_.has_resume_offset_bytes() && !offset_known_) {
      const int64_t offset = response_.resume_offset_bytes();
      if (offset < 0 || offset > rows_.bytes()) {
        return MakeAnswerError(absl::StrCat("resume offset ", offset, " of ", rows_.bytes(), " bytes"));
      }
      offset_known_ = true;
      std::lock_guard<std::mutex> lock(mutex_);
      offset_ = offset;
      *start_chunks = header_written_;  // else OnWriteDone continues
    } else if (response_.has_head() && offset_known_ && answer_ == nullptr) {
      answer_ = std::make_unique<v1::Head>(response_.head());
    } else {
      return MakeAnswerError("an upload is answered by its offset, then by the head");
    }
    return absl::OkStatus();
  }

  // Runs on one thread at a time: either the reaction that completed the pair (header written, offset known), or the reaction to
  // the write before.
  void WriteNext() {
    const int64_t bytes = std::min(rows_.bytes() - *offset_, shared_.core.options().chunk_bytes);
    shared_.sent = *offset_;
    half_closed_ = *offset_ + bytes == rows_.bytes();
    if (bytes == 0) return this->StartWritesDone();
    request_.mutable_chunk()->set_offset_bytes(*offset_);
    request_.mutable_chunk()->set_data(static_cast<const unsigned char*>(rows_.data) + *offset_, static_cast<size_t>(bytes));
    *offset_ += bytes;
    if (half_closed_) shared_.sent = *offset_;
    half_closed_ ? this->StartWriteLast(&request_, grpc::WriteOptions()) : this->StartWrite(&request_);
  }

  Shared& shared_;
  const RowsView rows_;
  Exchange::Done done_;
  grpc::TemplatedGenericStub<Request, Response> stub_;

  std::mutex mutex_;  // the meeting of OnWriteDone and OnReadDone
  bool header_written_ = false;
  std::optional<int64_t> offset_;  // next byte to send; once set, the writer's alone

  Request request_;
  bool half_closed_ = false;

  Response response_;
  bool offset_known_ = false;
  std::unique_ptr<google::protobuf::Message> answer_;
  absl::Status answer_error_;
};

// The expected properties of a download.
struct DownloadTarget {
  void* memory;  // null: the library's
  std::vector<int64_t> shape;
  int32_t data_type;
};

v1::HeadTensor TensorOf(const google::protobuf::Message& request) {
  const auto* const weights = dynamic_cast<const v1::DownloadWeightsRequest*>(&request);
  return weights != nullptr ? weights->tensor() : static_cast<const v1::DownloadGradientRequest&>(request).tensor();
}

class DownloadStream : public grpc::ClientReadReactor<v1::DownloadTensorResponse> {
 public:
  DownloadStream(Shared& shared, const DownloadTarget& target, Exchange::Done done)
      : shared_(shared), target_(target), memory_(static_cast<unsigned char*>(target.memory)), done_(std::move(done)) {}

  void Start(const google::protobuf::Message& request, grpc::ClientContext* context) {
    auto& heads = *shared_.core.heads().async();
    if (const auto* weights = dynamic_cast<const v1::DownloadWeightsRequest*>(&request)) {
      heads.DownloadWeights(context, weights, this);
    } else {
      heads.DownloadGradient(context, static_cast<const v1::DownloadGradientRequest*>(&request), this);
    }
    StartRead(&response_);
    StartCall();
  }

  void OnReadDone(bool ok) noexcept override {
    if (!ok) return;  // OnDone says why
    error_ = header_.has_value() ? TakeChunk() : TakeHeader();
    if (!error_.ok()) return shared_.context.End();
    StartRead(&response_);
  }

  void OnDone(const grpc::Status& status) noexcept override {
    const Exchange::Done done = std::move(done_);
    if (!error_.ok()) return done(error_);
    if (!status.ok()) return done(FromGrpcStatus(status, shared_.core.target()));
    if (!header_.has_value() || received_ != header_->total_bytes()) {
      return done(MakeAnswerError(
          absl::StrCat("the tensor ended after ", received_, " of ", header_.has_value() ? header_->total_bytes() : 0, " bytes")));
    }
    done(Answer{.message = std::make_unique<v1::DownloadTensorHeader>(*header_), .data = std::move(own_)});
  }

 private:
  absl::Status TakeHeader() {
    if (!response_.has_header()) return MakeAnswerError("no header comes first");
    const v1::DownloadTensorHeader& header = response_.header();
    const std::vector<int64_t> shape(header.shape().begin(), header.shape().end());
    int64_t bytes = ElementBytes(static_cast<DataType>(header.data_type()));
    bool fits = header.data_type() >= v1::DATA_TYPE_FLOAT32 && header.data_type() <= v1::DATA_TYPE_FLOAT16;
    for (const int64_t size : shape) fits = fits && size >= 0 && !__builtin_mul_overflow(bytes, size, &bytes);
    fits = fits && bytes == header.total_bytes() && (target_.shape.empty() || shape == target_.shape) &&
           (target_.data_type == 0 || header.data_type() == target_.data_type);
    if (!fits) {
      int64_t expected = ElementBytes(static_cast<DataType>(target_.data_type));
      for (const int64_t size : target_.shape) expected *= size;
      return MakeAnswerError(absl::StrCat("a tensor [", absl::StrJoin(shape, ", "), "] of ", header.total_bytes(),
                                          " bytes, expected [", absl::StrJoin(target_.shape, ", "), "] of ", expected, " bytes"));
    }
    if (memory_ == nullptr) {
      HEADWATER_ASSIGN_OR_RETURN(own_, Bytes::Allocate(bytes, "a tensor"));
      memory_ = own_.data();
    }
    header_ = header;
    return absl::OkStatus();
  }

  absl::Status TakeChunk() {
    const v1::ByteChunk& chunk = response_.chunk();
    const int64_t left = header_->total_bytes() - received_;
    if (!response_.has_chunk() || chunk.offset_bytes() != received_ || static_cast<int64_t>(chunk.data().size()) > left) {
      return MakeAnswerError(absl::StrCat("a chunk of ", chunk.data().size(), " bytes at ", chunk.offset_bytes(),
                                          ", expected it to continue at ", received_, " of ", header_->total_bytes()));
    }
    if (!chunk.data().empty()) std::memcpy(memory_ + received_, chunk.data().data(), chunk.data().size());
    received_ += static_cast<int64_t>(chunk.data().size());
    return absl::OkStatus();
  }

  Shared& shared_;
  const DownloadTarget& target_;
  unsigned char* memory_;
  Bytes own_;
  Exchange::Done done_;
  v1::DownloadTensorResponse response_;
  std::optional<v1::DownloadTensorHeader> header_;
  int64_t received_ = 0;
  absl::Status error_;
};

}  // namespace

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

void Describe(const RowsView& tensor, v1::UploadWeightsHeader* header) {
  if (header->upload_id().empty()) header->set_upload_id(RandomHexId());
  header->set_total_bytes(tensor.bytes());
  header->set_checksum(Checksum(tensor));
}

std::unique_ptr<Exchange> MakeUploadExchange(Core& core, const RowsView& tensor) {
  return std::make_unique<StreamExchange<SendingStream<v1::UploadWeightsRequest, v1::UploadWeightsResponse>, RowsView>>(
      core, tensor, tensor.bytes());
}

std::unique_ptr<Exchange> MakeGradientExchange(Core& core, const RowsView& rows) {
  return std::make_unique<StreamExchange<SendingStream<v1::AddGradientRequest, v1::AddGradientResponse>, RowsView>>(core, rows,
                                                                                                                    rows.bytes());
}

std::unique_ptr<Exchange> MakeDownloadExchange(Core& core, const google::protobuf::Message& request, const RowsView& result) {
  DownloadTarget target{const_cast<void*>(result.data), {}, 0};
  if (result.data != nullptr) {
    target.shape = {result.row_count, result.hidden_size};
    if (TensorOf(request) == v1::HEAD_TENSOR_BIAS) target.shape = {result.row_count * result.hidden_size};
    target.data_type = static_cast<int32_t>(result.data_type);
  }
  return std::make_unique<StreamExchange<DownloadStream, DownloadTarget>>(core, std::move(target), 0);
}

}  // namespace headwater::client::internal
