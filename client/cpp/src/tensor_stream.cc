#include "client/cpp/src/tensor_stream.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/random_id.h"
#include "headwater/client/future.h"

namespace headwater::client::internal {
namespace {

// XXH3-128, canonical (big-endian), 16 bytes.
std::string Checksum(const TensorView& values) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(values.data, static_cast<size_t>(values.bytes())));
  return std::string(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest));
}

// One stream of an upload: header up, offset down, bytes up, head down.
class UploadCall : public grpc::ClientBidiReactor<v1::UploadWeightsRequest, v1::UploadWeightsResponse> {
 public:
  UploadCall(std::shared_ptr<Connection> connection, const v1::UploadWeightsHeader& header, TensorView values, const Wait& wait,
             std::shared_ptr<FutureState<v1::Head>> state)
      : connection_(std::move(connection)), values_(values), state_(std::move(state)), context_(wait) {
    *request_.mutable_header() = header;
  }

  void Start() {
    connection_->heads().async()->UploadWeights(context_.get(), this);
    StartRead(&response_);
    StartWrite(&request_);
    StartCall();
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return;  // OnDone says why
    {
      std::lock_guard<std::mutex> lock(mutex_);
      header_written_ = true;
      if (!offset_.has_value()) return;  // the answer to the header starts the chunks
    }
    WriteNext();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    bool start_chunks = false;
    if (response_.has_resume_offset_bytes() && !offset_known_) {
      const int64_t offset = response_.resume_offset_bytes();
      if (offset < 0 || offset > values_.bytes()) {
        Fail(absl::StrCat("resume offset ", offset, " of ", values_.bytes(), " bytes"));
        return;
      }
      offset_known_ = true;
      std::lock_guard<std::mutex> lock(mutex_);
      offset_ = offset;
      start_chunks = header_written_;  // else OnWriteDone goes on
    } else if (response_.has_head() && offset_known_ && !head_.has_value()) {
      head_.emplace(std::move(*response_.mutable_head()));
    } else {
      Fail("an upload is answered by its offset, then by the head");
      return;
    }
    StartRead(&response_);
    if (start_chunks) WriteNext();
  }

  void OnDone(const grpc::Status& status) override {
    const std::shared_ptr<FutureState<v1::Head>> state = state_;  // once the result is set this object may be gone
    if (!answer_error_.ok()) {
      state->Set(answer_error_);
    } else if (!status.ok()) {
      state->Set(FromGrpcStatus(status, connection_->target()));
    } else if (!head_.has_value()) {
      state->Set(MakeAnswerError("the upload ended without the head"));
    } else {
      state->Set(*std::move(head_));
    }
  }

 private:
  // Runs on one thread at a time: either the reaction that completed the pair (header written, offset known), or the reaction to
  // the write before.
  void WriteNext() {
    const int64_t left = values_.bytes() - *offset_;
    if (left == 0) {
      if (!half_closed_) StartWritesDone();
      half_closed_ = true;
      return;
    }
    const int64_t bytes = std::min(left, connection_->options().chunk_bytes);
    v1::ByteChunk* chunk = request_.mutable_chunk();
    chunk->set_offset_bytes(*offset_);
    chunk->set_data(static_cast<const unsigned char*>(values_.data) + *offset_, static_cast<size_t>(bytes));
    *offset_ += bytes;
    half_closed_ = bytes == left;
    if (half_closed_) {
      StartWriteLast(&request_, grpc::WriteOptions());
    } else {
      StartWrite(&request_);
    }
  }

  void Fail(const std::string& message) {
    answer_error_ = MakeAnswerError(message);
    context_.get()->TryCancel();
  }

  const std::shared_ptr<Connection> connection_;
  const TensorView values_;
  const std::shared_ptr<FutureState<v1::Head>> state_;
  WaitingContext context_;

  std::mutex mutex_;  // the meeting of OnWriteDone and OnReadDone
  bool header_written_ = false;
  std::optional<int64_t> offset_;  // next byte to send; once set, the writer's alone

  v1::UploadWeightsRequest request_;
  bool half_closed_ = false;

  v1::UploadWeightsResponse response_;
  bool offset_known_ = false;
  std::optional<v1::Head> head_;
  absl::Status answer_error_;
};

absl::Status CheckHeader(const v1::DownloadTensorHeader& header, const TensorBuffer& buffer) {
  const std::vector<int64_t> shape(header.shape().begin(), header.shape().end());
  if (shape != buffer.shape() || header.total_bytes() != buffer.bytes() ||
      static_cast<int32_t>(header.data_type()) != static_cast<int32_t>(buffer.data_type())) {
    return MakeAnswerError(absl::StrCat("a tensor [", absl::StrJoin(shape, ", "), "] of ", header.total_bytes(),
                                        " bytes, expected [", absl::StrJoin(buffer.shape(), ", "), "] of ", buffer.bytes(),
                                        " bytes"));
  }
  return absl::OkStatus();
}

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

absl::Status CheckElements(const std::string& field, const TensorView& values) {
  int64_t bytes = 0;
  if (values.element_count < 0 || __builtin_mul_overflow(values.element_count, int64_t{4}, &bytes)) {
    return InvalidView(v1::ERROR_REASON_INVALID_FIELD, field, "a number of elements >= 0, and bytes below 2^63",
                       absl::StrCat(values.element_count));
  }
  if (values.data == nullptr && bytes > 0) {
    return InvalidView(v1::ERROR_REASON_INVALID_FIELD, field, "memory for the elements", "a null pointer");
  }
  return absl::OkStatus();
}

std::vector<int64_t> ShapeOf(const HeadSpec& spec, HeadTensor tensor) {
  if (tensor == HeadTensor::kBias) return {spec.vocab_size};
  return {spec.vocab_size, spec.hidden_size};
}

Upload::Upload(std::shared_ptr<Connection> connection, HeadTensor tensor, TensorView values)
    : connection_(std::move(connection)), values_(values) {
  header_.set_tensor(static_cast<v1::HeadTensor>(tensor));
  header_.set_data_type(ToProto(values.data_type));
  header_.set_upload_id(RandomHexId());  // so that no client takes up another's upload
  header_.set_total_bytes(values.bytes());
  header_.set_checksum(Checksum(values));
}

absl::StatusOr<v1::Head> Upload::Send(const std::string& name, const std::string& epoch, std::optional<int64_t> closes_step,
                                      const Wait& wait) {
  header_.set_name(name);
  header_.set_epoch(epoch);
  if (closes_step.has_value()) header_.set_closes_step(*closes_step);
  auto state = std::make_shared<FutureState<v1::Head>>();
  UploadCall call(connection_, header_, values_, wait, state);
  call.Start();
  return state->Take();
}

absl::Status ReadTensor(Connection& connection, grpc::ClientContext& context,
                        grpc::ClientReader<v1::DownloadTensorResponse>& reader, TensorBuffer& buffer) {
  v1::DownloadTensorResponse response;
  absl::Status answer_error;
  bool header_seen = false;
  int64_t bytes_received = 0;
  while (answer_error.ok() && reader.Read(&response)) {
    if (!header_seen) {
      answer_error = response.has_header() ? CheckHeader(response.header(), buffer) : MakeAnswerError("no header comes first");
      header_seen = true;
      continue;
    }
    const v1::ByteChunk& chunk = response.chunk();
    if (!response.has_chunk() || chunk.offset_bytes() != bytes_received ||
        static_cast<int64_t>(chunk.data().size()) > buffer.bytes() - bytes_received) {
      answer_error = MakeAnswerError(absl::StrCat("a chunk of ", chunk.data().size(), " bytes at ", chunk.offset_bytes(),
                                                  ", expected it to go on at ", bytes_received, " of ", buffer.bytes()));
      continue;
    }
    std::memcpy(static_cast<unsigned char*>(buffer.data()) + bytes_received, chunk.data().data(), chunk.data().size());
    bytes_received += static_cast<int64_t>(chunk.data().size());
  }
  if (!answer_error.ok()) context.TryCancel();
  const grpc::Status status = reader.Finish();
  if (!answer_error.ok()) return answer_error;
  if (!status.ok()) return FromGrpcStatus(status, connection.target());
  if (bytes_received != buffer.bytes()) {
    return MakeAnswerError(absl::StrCat("the tensor ended after ", bytes_received, " of ", buffer.bytes(), " bytes"));
  }
  return absl::OkStatus();
}

}  // namespace headwater::client::internal
