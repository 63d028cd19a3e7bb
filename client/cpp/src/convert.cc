#include "client/cpp/src/convert.h"

#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/core/call/messages.h"
#include "client/core/link/error.h"
#include "client/core/link/name_of.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client {

const char* ParallelismName(Parallelism parallelism) { return internal::NameOf(parallelism, {"unknown", "vocabulary", "rows"}); }

const char* HeadStateName(HeadState state) { return internal::NameOf(state, {"unknown", "loading", "ready", "lost", "restored"}); }

}  // namespace headwater::client

namespace headwater::client::internal {
namespace {

template <typename T>
v1::Tensor MakeTensor(v1::DataType type, absl::Span<const T> values) {
  v1::Tensor tensor;
  tensor.set_data_type(type);
  tensor.add_shape(static_cast<int64_t>(values.size()));
  tensor.set_data(values.data(), values.size() * sizeof(T));
  return tensor;
}

// Copies one per-token output.
template <typename T>
absl::Status ReadOutput(const char* name, const v1::Tensor& tensor, int64_t row_count, std::vector<T>& values) {
  const v1::DataType type = std::is_same_v<T, float> ? v1::DATA_TYPE_FLOAT32 : v1::DATA_TYPE_INT32;
  if (tensor.data_type() != type || tensor.data().size() != static_cast<size_t>(row_count) * sizeof(T)) {
    return MakeAnswerError(absl::StrCat("output ", name, " has ", tensor.data().size(), " bytes of ",
                                        v1::DataType_Name(tensor.data_type()), " for ", row_count, " rows"));
  }
  values.resize(static_cast<size_t>(row_count));
  if (row_count > 0) std::memcpy(values.data(), tensor.data().data(), tensor.data().size());
  return absl::OkStatus();
}

// Sums and per-token outputs of one term.
absl::StatusOr<TermResult> FromProto(const v1::LossTermResult& term, int64_t row_count) {
  auto result = Read<TermResult>(term);
  ReadFields(term.sums(), result);
#define HEADWATER_READ_OUTPUT(name)                                                    \
  if (term.has_##name()) {                                                             \
    HEADWATER_RETURN_IF_ERROR(ReadOutput(#name, term.name(), row_count, result.name)); \
  }
  HEADWATER_EACH(HEADWATER_READ_OUTPUT, token_loss, lse, target_log_probability, entropy, argmax, mean_logits, log_sum_sq_probs)
#undef HEADWATER_READ_OUTPUT
  return result;
}

}  // namespace

std::string FullHeadName(const std::string& tenant, const std::string& name) {
  return name.find('/') == std::string::npos ? absl::StrCat("tenants/", tenant, "/heads/", name) : name;
}

v1::Tensor ToProto(absl::Span<const float> values) { return MakeTensor(v1::DATA_TYPE_FLOAT32, values); }
v1::Tensor ToProto(absl::Span<const int32_t> values) { return MakeTensor(v1::DATA_TYPE_INT32, values); }

v1::HeadSpec ToProto(const HeadSpec& spec) {
  v1::HeadSpec result;
  WriteFields(spec, result);
  WriteFields(spec, *result.mutable_transform());
  if (const AdamW* adamw = std::get_if<AdamW>(&spec.optimizer)) WriteFields(*adamw, *result.mutable_optimizer()->mutable_adamw());
  if (const Sgd* sgd = std::get_if<Sgd>(&spec.optimizer)) WriteFields(*sgd, *result.mutable_optimizer()->mutable_sgd());
  result.set_parallelism(static_cast<v1::Parallelism>(spec.parallelism));
  return result;
}

v1::ExpectedMicroBatches ToProto(const ExpectedMicroBatches& expected) {
  v1::ExpectedMicroBatches result;
  if (const int64_t* count = std::get_if<int64_t>(&expected)) {
    result.set_count(*count);
  } else {
    const std::vector<int64_t>& ids = std::get<std::vector<int64_t>>(expected);
    result.mutable_ids()->mutable_ids()->Assign(ids.begin(), ids.end());
  }
  return result;
}

v1::CrossEntropyLoss ToProto(const CrossEntropyOptions& options) {
  v1::CrossEntropyLoss result;
  WriteFields(options, result);
  if (!options.class_weights.empty()) *result.mutable_class_weights() = ToProto(options.class_weights);
  if (options.temperature != 1) result.set_temperature(options.temperature);
  return result;
}

v1::JensenShannonLoss ToProto(const JsdOptions& options) {
  v1::JensenShannonLoss result;
  WriteFields(options, result);
  const CrossEntropyOptions& hard = options.hard_loss;
  // Options that were set without a weight for them are sent, so that the server refuses them instead of this side dropping them.
  const bool hard_loss_set =
      hard.label_smoothing != 0 || hard.z_loss != 0 || !hard.class_weights.empty() || hard.temperature != 1 || hard.token_scaling;
  if (options.hard_loss_weight != 0 || hard_loss_set) *result.mutable_hard_loss() = ToProto(hard);
  if (options.truncate_to_common) result.set_vocab_alignment(v1::VOCAB_ALIGNMENT_TRUNCATE_TO_COMMON);
  return result;
}

HeadSpec FromProto(const v1::HeadSpec& spec) {
  auto result = Read<HeadSpec>(spec);
  ReadFields(spec.transform(), result);
  if (spec.optimizer().has_adamw()) result.optimizer = Read<AdamW>(spec.optimizer().adamw());
  if (spec.optimizer().has_sgd()) result.optimizer = Read<Sgd>(spec.optimizer().sgd());
  if (spec.parallelism() != v1::PARALLELISM_UNSPECIFIED) result.parallelism = static_cast<Parallelism>(spec.parallelism());
  return result;
}

HeadInfo FromProto(const v1::Head& head) {
  auto result = Read<HeadInfo>(head);
  result.spec = FromProto(head.spec());
  return result;
}

ServerInfo FromProto(const v1::ServerInfo& info) {
  auto result = Read<ServerInfo>(info);
  const google::protobuf::Descriptor& limits = *info.limits().GetDescriptor();
  for (int i = 0; i < limits.field_count(); ++i) {
    const std::string& name = limits.field(i)->name();
    result.limits[name] = GetInteger(info.limits(), name.c_str()).value_or(0);
  }
  return result;
}

absl::StatusOr<MultiResult> FromProto(const v1::MicroBatchSummary& summary, const v1::MicroBatchHeader& header) {
  if (summary.terms_size() != header.terms_size()) {
    return MakeAnswerError(absl::StrCat("the summary has ", summary.terms_size(), " terms, ", header.terms_size(), " were sent"));
  }
  MultiResult result;
  for (int i = 0; i < summary.terms_size(); ++i) {
    const v1::LossTerm& term = header.terms(i);
    const int64_t row_count = term.has_row_count() ? term.row_count() : header.row_count() - term.row_start();
    HEADWATER_ASSIGN_OR_RETURN(TermResult term_result, FromProto(summary.terms(i), row_count));
    result.terms.push_back(std::move(term_result));
  }
  ReadFields(summary, result);
  return result;
}

}  // namespace headwater::client::internal
