#include "server/group/ranks/rank_codec.h"

#include <algorithm>
#include <cstring>
#include <variant>

#include "headwater/kernels/return_if_error.h"
#include "proto/headwater/v1/error_metadata.h"
#include "proto/headwater/v1/term_codec.h"

namespace headwater::group {
namespace {

// The bit of the first per-token output in RankCompute.Term.outputs.
constexpr int32_t kFirstOutput = 1 << v1::TOKEN_OUTPUT_LOSS;

bool IsDataType(int type) { return type >= 1 && type <= 3; }

}  // namespace

absl::Status Malformed(const char* what) {
  return MakeError(ErrorReason::kEngineFailed, std::string("the leader's message is malformed: ") + what);
}

void EncodeStatus(const absl::Status& status, v1::RankStatus* out) {
  out->set_code(static_cast<int32_t>(status.code()));
  if (status.ok()) return;
  out->set_reason(static_cast<int32_t>(GetErrorReason(status)));
  out->set_message(std::string(status.message()));
  v1::SetErrorMetadata(GetErrorMetadata(status), out->mutable_metadata());
}

absl::Status DecodeStatus(const v1::RankStatus& status) {
  if (status.code() == 0) return absl::OkStatus();
  ErrorMetadata metadata(status.metadata().begin(), status.metadata().end());
  const bool known = status.reason() >= 0 && status.reason() <= static_cast<int32_t>(ErrorReason::kNotSessionOwner);
  return MakeError(known ? static_cast<ErrorReason>(status.reason()) : ErrorReason::kInternal, status.message(),
                   std::move(metadata));
}

void EncodeLossSums(const LossSums& sums, v1::LossTermResult* out) {
  WriteFields(sums, *out->mutable_sums());
  out->set_non_finite_row_count(sums.non_finite_row_count);
  WriteFields(sums.dither, *out->mutable_dither());
}

LossSums DecodeLossSums(const v1::LossTermResult& result) {
  LossSums sums;
  ReadFields(result.sums(), sums);
  sums.non_finite_row_count = result.non_finite_row_count();
  ReadFields(result.dither(), sums.dither);
  return sums;
}

std::vector<Output> OutputsOf(const MicroBatch& micro_batch) {
  std::vector<Output> outputs;
  const auto add = [&outputs](auto* data, int64_t count) {
    if (data != nullptr) outputs.push_back({reinterpret_cast<char*>(data), count * static_cast<int64_t>(sizeof(*data))});
  };
  const MutableRowsView& grad_hidden = micro_batch.grad_hidden;
  add(static_cast<char*>(grad_hidden.data), grad_hidden.row_count * grad_hidden.column_count * ElementBytes(grad_hidden.data_type));
  for (const LossTerm& term : micro_batch.terms) {
    EachOutput(term, [&](auto* data) { add(data, term.row_count); });
  }
  return outputs;
}

void EncodeCompute(const MicroBatch& micro_batch, absl::FunctionRef<uint64_t(const EngineHead*)> id_of, v1::RankCompute* out) {
  out->set_row_count(micro_batch.hidden.row_count);
  out->set_hidden_size(micro_batch.hidden.column_count);
  out->set_data_type(static_cast<v1::DataType>(micro_batch.hidden.data_type));
  WriteFields(micro_batch, *out);
  out->set_wants_grad_hidden(micro_batch.grad_hidden.data != nullptr);
  out->set_grad_hidden_type(static_cast<v1::DataType>(micro_batch.grad_hidden.data_type));
  out->set_flow(micro_batch.flow != nullptr);
  for (const LossTerm& term : micro_batch.terms) {
    v1::RankCompute::Term* const to = out->add_terms();
    to->set_head(id_of(term.head));
    to->set_teacher_head(id_of(term.teacher_head));
    WriteTerm(term, to->mutable_term());
    to->set_teacher_hidden_size(term.teacher_hidden.column_count);
    to->set_teacher_data_type(static_cast<v1::DataType>(term.teacher_hidden.data_type));
    int32_t bit = kFirstOutput;
    EachOutput(term, [&](const auto* data) {
      if (data != nullptr) to->set_outputs(to->outputs() | bit);
      bit <<= 1;
    });
    to->set_dither_seed(term.dither_seed);
  }
}

const void* ReceivedCall::AddStream(int64_t row_start, int64_t row_count, int64_t row_bytes) {
  Stream& stream = streams_.emplace_back(Stream{nullptr, row_start, row_count, row_bytes});
  stream.data = rows_.Take<char>(stream.bytes());
  return stream.data;
}

absl::StatusOr<std::unique_ptr<ReceivedCall>> ReceivedCall::Decode(v1::RankCompute received,
                                                                   absl::FunctionRef<EngineHead*(uint64_t)> head_of) {
  std::unique_ptr<ReceivedCall> call(new ReceivedCall());
  call->message_ = std::move(received);
  const v1::RankCompute& message = call->message_;
  if (message.row_count() < 0 || message.hidden_size() < 0 || !IsDataType(message.data_type())) return Malformed("rows");
  MicroBatch& micro_batch = call->micro_batch_;
  RowsView& hidden = micro_batch.hidden;
  hidden.row_count = message.row_count();
  hidden.column_count = message.hidden_size();
  hidden.data_type = static_cast<DataType>(message.data_type());
  hidden.data = call->AddStream(0, hidden.row_count, hidden.column_count * ElementBytes(hidden.data_type));
  ReadFields(message, micro_batch);
  if (message.wants_grad_hidden()) {
    if (!IsDataType(message.grad_hidden_type())) return Malformed("grad_hidden");
    const DataType type = static_cast<DataType>(message.grad_hidden_type());
    micro_batch.grad_hidden = {call->outputs_.Take<char>(hidden.row_count * hidden.column_count * ElementBytes(type)),
                               hidden.row_count, hidden.column_count, type, MemorySpace::kHost};
  }
  for (const v1::RankCompute::Term& from : message.terms()) {
    LossTerm& term = call->terms_.emplace_back(ReadTerm(from.term()));
    term.head = head_of(from.head());
    term.teacher_head = head_of(from.teacher_head());
    if (term.row_start < 0 || term.row_count < 0) return Malformed("a term's rows");
    term.dither_seed = from.dither_seed();
    if (std::holds_alternative<JsdSpec>(term.loss)) {
      if (from.teacher_hidden_size() < 0 || !IsDataType(from.teacher_data_type())) return Malformed("a teacher's rows");
      RowsView& teacher = term.teacher_hidden;
      teacher.row_count = term.row_count;
      teacher.column_count = from.teacher_hidden_size();
      teacher.data_type = static_cast<DataType>(from.teacher_data_type());
      teacher.data = call->AddStream(term.row_start, term.row_count, teacher.column_count * ElementBytes(teacher.data_type));
    } else {
      call->streams_.emplace_back();
    }
    int32_t bit = kFirstOutput;
    EachOutput(term, [&]<typename T>(T*& data) {
      if ((from.outputs() & bit) != 0) data = call->outputs_.Take<T>(term.row_count);
      bit <<= 1;
    });
  }
  micro_batch.terms = call->terms_;
  HEADWATER_RETURN_IF_ERROR(call->rows_.status());
  HEADWATER_RETURN_IF_ERROR(call->outputs_.status());
  return call;
}

absl::Status ReceivedCall::AddRows(int32_t number, const std::string& data) {
  if (number < 0 || static_cast<size_t>(number) >= streams_.size()) return Malformed("a stream that there is not");
  Stream& stream = streams_[static_cast<size_t>(number)];
  const int64_t bytes = static_cast<int64_t>(data.size());
  if (bytes > stream.bytes() - stream.bytes_here) return Malformed("more rows than there are");
  std::memcpy(stream.data + stream.bytes_here, data.data(), data.size());
  stream.bytes_here += bytes;
  return absl::OkStatus();
}

absl::Status ReceivedCall::ShareRowsOf(const ReceivedCall& other) {
  const auto same = [](const Stream& a, const Stream& b) { return a.row_count == b.row_count && a.row_bytes == b.row_bytes; };
  if (!std::equal(streams_.begin(), streams_.end(), other.streams_.begin(), other.streams_.end(), same)) {
    return Malformed("other rows than its neighbour's");
  }
  micro_batch_.hidden.data = other.micro_batch_.hidden.data;
  for (size_t i = 0; i < terms_.size(); ++i) terms_[i].teacher_hidden.data = other.terms_[i].teacher_hidden.data;
  for (Stream& stream : streams_) stream.bytes_here = stream.bytes();  // no own rows will come
  rows_ = CallMemory();
  return absl::OkStatus();
}

int64_t ReceivedCall::rows_here() const {
  int64_t here = micro_batch_.hidden.row_count;
  for (const Stream& stream : streams_) {
    const int64_t whole = stream.row_bytes == 0 ? stream.row_count : stream.bytes_here / stream.row_bytes;
    if (whole < stream.row_count) here = std::min(here, stream.row_start + whole);
  }
  return here;
}

}  // namespace headwater::group
