#include "server/group/rank_codec.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <variant>

#include "headwater/kernels/error.h"
#include "proto/headwater/v1/error_metadata.h"
#include "server/group/head_spec_codec.h"

namespace headwater {

HEADWATER_FIELDS(v1::RankCompute::CrossEntropy, CrossEntropySpec, label_smoothing, z_loss, temperature, token_scaling)
HEADWATER_FIELDS(v1::RankCompute::Term, JsdSpec, beta, student_temperature, teacher_temperature, hard_loss_weight,
                 truncate_to_common)

}  // namespace headwater

namespace headwater::group {
namespace {

// Bits of RankCompute.Term.outputs.
enum WantedOutput : int32_t {
  kTokenLoss = 1,
  kLse = 2,
  kTargetLogProbability = 4,
  kEntropy = 8,
  kArgmax = 16,
  kMeanLogits = 32,
  kLogSumSqProbs = 64,
};

template <typename T>
void EncodeSpan(absl::Span<const T> values, std::string* out) {
  out->assign(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

template <typename T>
absl::Span<const T> DecodeSpan(const std::string& bytes, std::deque<std::vector<T>>* memory) {
  std::vector<T>& values = memory->emplace_back(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

bool IsDataType(int type) { return type >= 1 && type <= 3; }

void EncodeCrossEntropy(const CrossEntropySpec& spec, v1::RankCompute::CrossEntropy* out) {
  WriteFields(spec, *out);
  EncodeSpan(spec.class_weights, out->mutable_class_weights());
}

CrossEntropySpec DecodeCrossEntropy(const v1::RankCompute::CrossEntropy& message, std::deque<std::vector<float>>* memory) {
  CrossEntropySpec spec;
  ReadFields(message, spec);
  spec.class_weights = DecodeSpan<float>(message.class_weights(), memory);
  return spec;
}

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

void EncodeLossSums(const LossSums& sums, v1::RankLossSums* out) {
  out->set_loss_sum(sums.loss_sum);
  out->set_soft_loss_sum(sums.soft_loss_sum);
  out->set_hard_loss_sum(sums.hard_loss_sum);
  out->set_z_loss_sum(sums.z_loss_sum);
  out->set_token_weight_sum(sums.token_weight_sum);
  out->set_target_weight_sum(sums.target_weight_sum);
  out->set_valid_token_count(sums.valid_token_count);
  out->set_non_finite_row_count(sums.non_finite_row_count);
  out->mutable_dither()->set_entry_count(sums.dither.entry_count);
  out->mutable_dither()->set_squared_error(sums.dither.squared_error);
  out->mutable_dither()->set_squared_norm(sums.dither.squared_norm);
}

LossSums DecodeLossSums(const v1::RankLossSums& sums) {
  LossSums result;
  result.loss_sum = sums.loss_sum();
  result.soft_loss_sum = sums.soft_loss_sum();
  result.hard_loss_sum = sums.hard_loss_sum();
  result.z_loss_sum = sums.z_loss_sum();
  result.token_weight_sum = sums.token_weight_sum();
  result.target_weight_sum = sums.target_weight_sum();
  result.valid_token_count = sums.valid_token_count();
  result.non_finite_row_count = sums.non_finite_row_count();
  result.dither = {sums.dither().entry_count(), sums.dither().squared_error(), sums.dither().squared_norm()};
  return result;
}

std::vector<Output> OutputsOf(const MicroBatch& micro_batch) {
  std::vector<Output> outputs;
  const auto add = [&outputs](void* data, int64_t count, int64_t element_bytes) {
    if (data != nullptr) outputs.push_back({static_cast<char*>(data), count * element_bytes});
  };
  const MutableRowsView& grad_hidden = micro_batch.grad_hidden;
  add(grad_hidden.data, grad_hidden.row_count * grad_hidden.column_count, ElementBytes(grad_hidden.data_type));
  for (const LossTerm& term : micro_batch.terms) {
    for (float* const output : {term.token_loss, term.lse, term.target_log_probability, term.entropy}) {
      add(output, term.row_count, sizeof(float));
    }
    add(term.argmax, term.row_count, sizeof(int32_t));
    add(term.mean_logits, term.row_count, sizeof(float));
    add(term.log_sum_sq_probs, term.row_count, sizeof(float));
  }
  return outputs;
}

void EncodeCompute(const RankCall& call, v1::RankCompute* out) {
  const MicroBatch& micro_batch = call.micro_batch;
  out->set_row_count(micro_batch.hidden.row_count);
  out->set_hidden_size(micro_batch.hidden.column_count);
  out->set_data_type(static_cast<v1::DataType>(micro_batch.hidden.data_type));
  out->set_backward(micro_batch.backward);
  out->set_wants_grad_hidden(micro_batch.grad_hidden.data != nullptr);
  out->set_grad_hidden_type(static_cast<v1::DataType>(micro_batch.grad_hidden.data_type));
  out->set_grad_hidden_scale(micro_batch.grad_hidden_scale);
  out->set_grad_weight(static_cast<int32_t>(micro_batch.grad_weight));
  out->set_refuse_non_finite(micro_batch.refuse_non_finite);
  out->set_flow(micro_batch.flow != nullptr);
  out->set_contribution(call.contribution);
  for (size_t i = 0; i < micro_batch.terms.size(); ++i) {
    const LossTerm& term = micro_batch.terms[i];
    v1::RankCompute::Term* const to = out->add_terms();
    to->set_head(call.heads[i].head);
    to->set_row_start(term.row_start);
    to->set_row_count(term.row_count);
    EncodeSpan(term.targets, to->mutable_targets());
    to->set_ignore_index(term.ignore_index);
    EncodeSpan(term.token_weights, to->mutable_token_weights());
    EncodeSpan(term.entropy_factors, to->mutable_entropy_factors());
    EncodeSpan(term.lse_factors, to->mutable_lse_factors());
    to->set_gradient_resolution(term.gradient_resolution);
    to->set_dither_seed(term.dither_seed);
    to->set_loss_scale(term.loss_scale);
    if (const auto* jsd = std::get_if<JsdSpec>(&term.loss)) {
      to->set_jsd(true);
      to->set_teacher_head(call.heads[i].teacher);
      WriteFields(*jsd, *to);
      to->set_teacher_hidden_size(term.teacher_hidden.column_count);
      to->set_teacher_data_type(static_cast<v1::DataType>(term.teacher_hidden.data_type));
      EncodeCrossEntropy(jsd->hard_loss, to->mutable_cross_entropy());
    } else if (const auto* top_k = std::get_if<TopKSpec>(&term.loss)) {
      to->set_top_k(top_k->k);
      EncodeSpan(top_k->ids, to->mutable_top_k_ids());
      EncodeSpan(top_k->log_probs, to->mutable_top_k_log_probs());
      to->set_student_temperature(top_k->student_temperature);
    } else {
      EncodeCrossEntropy(std::get<CrossEntropySpec>(term.loss), to->mutable_cross_entropy());
    }
    to->set_outputs((term.token_loss != nullptr ? kTokenLoss : 0) | (term.lse != nullptr ? kLse : 0) |
                    (term.target_log_probability != nullptr ? kTargetLogProbability : 0) |
                    (term.entropy != nullptr ? kEntropy : 0) | (term.argmax != nullptr ? kArgmax : 0) |
                    (term.mean_logits != nullptr ? kMeanLogits : 0) | (term.log_sum_sq_probs != nullptr ? kLogSumSqProbs : 0));
  }
}

const void* ReceivedCall::AddStream(int64_t row_start, int64_t row_count, int64_t row_bytes) {
  Stream& stream = streams_.emplace_back();
  stream.row_start = row_start;
  stream.row_count = row_count;
  stream.row_bytes = row_bytes;
  absl::StatusOr<PlannedBytes> memory = AllocateOnRank(row_count * row_bytes);
  streams_status_.Update(memory.status());
  if (memory.ok()) stream.memory = *std::move(memory);
  return stream.memory.get();
}

template <typename T>
T* ReceivedCall::AddOutput(int64_t count) {
  return static_cast<T*>(outputs_.Take(count * static_cast<int64_t>(sizeof(T))));
}

absl::StatusOr<std::unique_ptr<ReceivedCall>> ReceivedCall::Decode(const v1::RankCompute& message) {
  if (message.row_count() < 0 || message.hidden_size() < 0 || !IsDataType(message.data_type())) return Malformed("rows");
  std::unique_ptr<ReceivedCall> call(new ReceivedCall());
  call->is_whole_ = message.whole();
  MicroBatch& micro_batch = call->micro_batch_;
  RowsView& hidden = micro_batch.hidden;
  hidden.row_count = message.row_count();
  hidden.column_count = message.hidden_size();
  hidden.data_type = static_cast<DataType>(message.data_type());
  hidden.data = call->AddStream(0, hidden.row_count, hidden.column_count * ElementBytes(hidden.data_type));
  micro_batch.backward = message.backward();
  if (message.wants_grad_hidden()) {
    if (!IsDataType(message.grad_hidden_type())) return Malformed("grad_hidden");
    const DataType type = static_cast<DataType>(message.grad_hidden_type());
    micro_batch.grad_hidden = {call->AddOutput<char>(hidden.row_count * hidden.column_count * ElementBytes(type)), hidden.row_count,
                               hidden.column_count, type, MemorySpace::kHost};
  }
  micro_batch.grad_hidden_scale = message.grad_hidden_scale();
  micro_batch.grad_weight = static_cast<GradWeightMode>(message.grad_weight());
  micro_batch.refuse_non_finite = message.refuse_non_finite();
  for (const v1::RankCompute::Term& from : message.terms()) {
    LossTerm& term = call->terms_.emplace_back();
    call->heads_.push_back({from.head(), from.teacher_head()});
    term.row_start = from.row_start();
    term.row_count = from.row_count();
    if (term.row_start < 0 || term.row_count < 0) return Malformed("a term's rows");
    term.targets = DecodeSpan<int32_t>(from.targets(), &call->targets_);
    term.ignore_index = from.ignore_index();
    term.token_weights = DecodeSpan<float>(from.token_weights(), &call->floats_);
    term.entropy_factors = DecodeSpan<float>(from.entropy_factors(), &call->floats_);
    term.lse_factors = DecodeSpan<float>(from.lse_factors(), &call->floats_);
    term.gradient_resolution = from.gradient_resolution();
    term.dither_seed = from.dither_seed();
    term.loss_scale = from.loss_scale();
    if (from.jsd()) {
      JsdSpec jsd;
      ReadFields(from, jsd);
      jsd.hard_loss = DecodeCrossEntropy(from.cross_entropy(), &call->floats_);
      term.loss = jsd;
      if (from.teacher_hidden_size() < 0 || !IsDataType(from.teacher_data_type())) return Malformed("a teacher's rows");
      RowsView& teacher = term.teacher_hidden;
      teacher.row_count = term.row_count;
      teacher.column_count = from.teacher_hidden_size();
      teacher.data_type = static_cast<DataType>(from.teacher_data_type());
      teacher.data = call->AddStream(term.row_start, term.row_count, teacher.column_count * ElementBytes(teacher.data_type));
    } else {
      if (from.top_k() != 0) {
        term.loss = TopKSpec{from.top_k(), DecodeSpan<int32_t>(from.top_k_ids(), &call->targets_),
                             DecodeSpan<float>(from.top_k_log_probs(), &call->floats_), from.student_temperature()};
      } else {
        term.loss = DecodeCrossEntropy(from.cross_entropy(), &call->floats_);
      }
      call->streams_.emplace_back();
    }
    const auto wanted = [&](WantedOutput output) { return (from.outputs() & output) != 0; };
    if (wanted(kTokenLoss)) term.token_loss = call->AddOutput<float>(term.row_count);
    if (wanted(kLse)) term.lse = call->AddOutput<float>(term.row_count);
    if (wanted(kTargetLogProbability)) term.target_log_probability = call->AddOutput<float>(term.row_count);
    if (wanted(kEntropy)) term.entropy = call->AddOutput<float>(term.row_count);
    if (wanted(kArgmax)) term.argmax = call->AddOutput<int32_t>(term.row_count);
    if (wanted(kMeanLogits)) term.mean_logits = call->AddOutput<float>(term.row_count);
    if (wanted(kLogSumSqProbs)) term.log_sum_sq_probs = call->AddOutput<float>(term.row_count);
  }
  call->contribution_ = message.contribution();
  call->has_flow_ = message.flow();
  absl::Status memory = call->streams_status_;
  memory.Update(call->outputs_.status());
  if (!memory.ok()) return memory;
  return call;
}

RankCall ReceivedCall::ToCall(RowFlow* flow) {
  RankCall call;
  call.micro_batch = micro_batch_;
  call.micro_batch.terms = terms_;
  call.micro_batch.flow = flow;
  call.heads = heads_;
  call.contribution = contribution_;
  return call;
}

absl::Status ReceivedCall::AddRows(int32_t number, const std::string& data) {
  if (number < 0 || static_cast<size_t>(number) >= streams_.size()) return Malformed("a stream that there is not");
  Stream& stream = streams_[static_cast<size_t>(number)];
  const int64_t bytes = static_cast<int64_t>(data.size());
  if (bytes > stream.row_count * stream.row_bytes - stream.bytes_here) return Malformed("more rows than there are");
  std::memcpy(stream.memory.get() + stream.bytes_here, data.data(), data.size());
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
  for (Stream& stream : streams_) {
    stream.memory.reset();
    stream.bytes_here = stream.row_count * stream.row_bytes;  // none of its own come
  }
  return absl::OkStatus();
}

int64_t ReceivedCall::rows_here() const {
  int64_t here = row_count();
  for (const Stream& stream : streams_) {
    const int64_t whole = stream.row_bytes == 0 ? stream.row_count : stream.bytes_here / stream.row_bytes;
    if (whole < stream.row_count) here = std::min(here, stream.row_start + whole);
  }
  return here;
}

}  // namespace headwater::group
