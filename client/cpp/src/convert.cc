#include "client/cpp/src/convert.h"

#include <chrono>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/core/call/messages.h"
#include "client/core/link/duration.h"
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

std::chrono::system_clock::time_point FromProto(const google::protobuf::Timestamp& time) {
  return std::chrono::system_clock::time_point(std::chrono::duration_cast<std::chrono::system_clock::duration>(
      std::chrono::seconds(time.seconds()) + std::chrono::nanoseconds(time.nanos())));
}

MemoryPlan FromProto(const v1::MemoryPlan& plan) {
  MemoryPlan result;
  for (const v1::MemoryItem& item : plan.items()) result.items.push_back({item.purpose(), item.total_bytes()});
  result.total_bytes = plan.total_bytes();
  result.available_bytes = plan.available_bytes();
  result.token_chunk_rows = plan.token_chunk_rows();
  return result;
}

// Copies one per-token output, if it is there.
template <typename T>
absl::Status ReadOutput(const char* name, bool present, const v1::Tensor& tensor, v1::DataType type, int64_t row_count,
                        std::vector<T>& values) {
  if (!present) return absl::OkStatus();
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
  const v1::LossSums& sums = term.sums();
  TermResult result;
  result.loss_sum = sums.loss_sum();
  result.soft_loss_sum = sums.soft_loss_sum();
  result.hard_loss_sum = sums.hard_loss_sum();
  result.z_loss_sum = sums.z_loss_sum();
  result.token_weight_sum = sums.token_weight_sum();
  result.target_weight_sum = sums.target_weight_sum();
  result.valid_token_count = sums.valid_token_count();
  result.non_finite_row_count = term.non_finite_row_count();
  result.weight_version = term.weight_version();
  result.teacher_weight_version = term.teacher_weight_version();
  for (const absl::Status& status :
       {ReadOutput("token_loss", term.has_token_loss(), term.token_loss(), v1::DATA_TYPE_FLOAT32, row_count, result.token_loss),
        ReadOutput("lse", term.has_lse(), term.lse(), v1::DATA_TYPE_FLOAT32, row_count, result.lse),
        ReadOutput("target_log_probability", term.has_target_log_probability(), term.target_log_probability(),
                   v1::DATA_TYPE_FLOAT32, row_count, result.target_log_probability),
        ReadOutput("entropy", term.has_entropy(), term.entropy(), v1::DATA_TYPE_FLOAT32, row_count, result.entropy),
        ReadOutput("argmax", term.has_argmax(), term.argmax(), v1::DATA_TYPE_INT32, row_count, result.argmax),
        ReadOutput("mean_logits", term.has_mean_logits(), term.mean_logits(), v1::DATA_TYPE_FLOAT32, row_count, result.mean_logits),
        ReadOutput("log_sum_sq_probs", term.has_log_sum_sq_probs(), term.log_sum_sq_probs(), v1::DATA_TYPE_FLOAT32, row_count,
                   result.log_sum_sq_probs)}) {
    if (!status.ok()) return status;
  }
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
  result.set_vocab_size(spec.vocab_size);
  result.set_hidden_size(spec.hidden_size);
  result.set_data_type(ToProto(spec.data_type));
  result.set_has_bias(spec.has_bias);
  v1::LogitTransform* transform = result.mutable_transform();
  transform->set_logit_scale(spec.logit_scale);
  if (spec.softcap.has_value()) transform->set_softcap(*spec.softcap);
  if (spec.valid_vocab_size.has_value()) transform->set_valid_vocab_size(*spec.valid_vocab_size);
  result.set_trainable(spec.trainable);
  if (const AdamW* adamw = std::get_if<AdamW>(&spec.optimizer)) {
    v1::AdamW* proto = result.mutable_optimizer()->mutable_adamw();
    proto->set_beta1(adamw->beta1);
    proto->set_beta2(adamw->beta2);
    proto->set_epsilon(adamw->epsilon);
    proto->set_weight_decay(adamw->weight_decay);
  } else if (const Sgd* sgd = std::get_if<Sgd>(&spec.optimizer)) {
    v1::Sgd* proto = result.mutable_optimizer()->mutable_sgd();
    proto->set_momentum(sgd->momentum);
    proto->set_dampening(sgd->dampening);
    proto->set_nesterov(sgd->nesterov);
    proto->set_weight_decay(sgd->weight_decay);
  }
  if (spec.staging_slots.has_value()) result.set_staging_slots(*spec.staging_slots);
  result.set_initial_step(spec.initial_step);
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
  result.set_label_smoothing(options.label_smoothing);
  result.set_z_loss(options.z_loss);
  if (!options.class_weights.empty()) *result.mutable_class_weights() = ToProto(options.class_weights);
  if (options.temperature != 1) result.set_temperature(options.temperature);
  result.set_token_scaling(options.token_scaling);
  return result;
}

v1::JensenShannonLoss ToProto(const JsdOptions& options) {
  v1::JensenShannonLoss result;
  result.set_beta(options.beta);
  result.set_student_temperature(options.student_temperature);
  result.set_teacher_temperature(options.teacher_temperature);
  result.set_hard_loss_weight(options.hard_loss_weight);
  const CrossEntropyOptions& hard = options.hard_loss;
  // Options that were set without a weight for them are sent, so that the server refuses them instead of this side dropping them.
  const bool hard_loss_set =
      hard.label_smoothing != 0 || hard.z_loss != 0 || !hard.class_weights.empty() || hard.temperature != 1 || hard.token_scaling;
  if (options.hard_loss_weight != 0 || hard_loss_set) *result.mutable_hard_loss() = ToProto(hard);
  if (options.truncate_to_common) result.set_vocab_alignment(v1::VOCAB_ALIGNMENT_TRUNCATE_TO_COMMON);
  return result;
}

HeadSpec FromProto(const v1::HeadSpec& spec) {
  HeadSpec result;
  result.vocab_size = spec.vocab_size();
  result.hidden_size = spec.hidden_size();
  result.data_type = static_cast<DataType>(spec.data_type());
  result.has_bias = spec.has_bias();
  const v1::LogitTransform& transform = spec.transform();
  if (transform.has_logit_scale()) result.logit_scale = transform.logit_scale();
  if (transform.has_softcap()) result.softcap = transform.softcap();
  if (transform.has_valid_vocab_size()) result.valid_vocab_size = transform.valid_vocab_size();
  result.trainable = spec.trainable();
  if (spec.optimizer().has_adamw()) {
    const v1::AdamW& proto = spec.optimizer().adamw();
    AdamW adamw;
    if (proto.has_beta1()) adamw.beta1 = proto.beta1();
    if (proto.has_beta2()) adamw.beta2 = proto.beta2();
    if (proto.has_epsilon()) adamw.epsilon = proto.epsilon();
    if (proto.has_weight_decay()) adamw.weight_decay = proto.weight_decay();
    result.optimizer = adamw;
  } else if (spec.optimizer().has_sgd()) {
    const v1::Sgd& proto = spec.optimizer().sgd();
    result.optimizer = Sgd{proto.momentum(), proto.dampening(), proto.nesterov(), proto.weight_decay()};
  }
  if (spec.has_staging_slots()) result.staging_slots = spec.staging_slots();
  result.initial_step = spec.initial_step();
  if (spec.parallelism() != v1::PARALLELISM_UNSPECIFIED) result.parallelism = static_cast<Parallelism>(spec.parallelism());
  return result;
}

CheckpointInfo FromProto(const v1::Checkpoint& checkpoint) {
  CheckpointInfo result{checkpoint.checkpoint(), checkpoint.step(), checkpoint.total_bytes(), std::nullopt, checkpoint.damaged()};
  if (checkpoint.has_save_time()) result.save_time = FromProto(checkpoint.save_time());
  return result;
}

HeadInfo FromProto(const v1::Head& head) {
  HeadInfo result;
  result.name = head.name();
  result.spec = FromProto(head.spec());
  result.epoch = head.epoch();
  result.state = static_cast<client::HeadState>(head.state());
  result.weight_version = head.weight_version();
  if (head.has_open_step()) result.open_step = head.open_step();
  for (const v1::VocabShard& shard : head.shards()) {
    result.shards.push_back({shard.vocab_start(), shard.vocab_end(), shard.device()});
  }
  result.memory_plan = FromProto(head.memory_plan());
  result.create_time = FromProto(head.create_time());
  result.weight_checksum = head.weight_checksum();
  result.restored_checkpoint = head.restored_checkpoint();
  return result;
}

StepTotals FromProto(const v1::StepTotals& totals) {
  return {totals.micro_batch_count(), totals.valid_token_count(), totals.loss_sum(), totals.token_weight_sum(),
          totals.non_finite_row_count()};
}

StepInfo FromProto(const v1::Step& step) {
  StepInfo result;
  result.step = step.step();
  result.state = static_cast<StepState>(step.state());
  for (const v1::MicroBatchState& micro_batch : step.micro_batches()) {
    result.micro_batches.push_back({micro_batch.micro_batch(), micro_batch.attempt(),
                                    static_cast<ContributionState>(micro_batch.state()), micro_batch.digest(),
                                    micro_batch.valid_token_count(), micro_batch.factor(),
                                    static_cast<ContributionForm>(micro_batch.form())});
  }
  result.totals = FromProto(step.totals());
  return result;
}

ServerInfo FromProto(const v1::ServerInfo& info) {
  ServerInfo result;
  result.version = info.version();
  result.incarnation = info.incarnation();
  result.engine = info.engine();
  result.engine_note = info.engine_note();
  for (const v1::Device& device : info.devices()) {
    result.devices.push_back(
        {device.name(), device.model(), device.memory_budget_bytes(), device.memory_planned_bytes(), device.uuid()});
  }
  const google::protobuf::Descriptor& limits = *info.limits().GetDescriptor();
  for (int i = 0; i < limits.field_count(); ++i) {
    const std::string& name = limits.field(i)->name();
    result.limits[name] = GetInteger(info.limits(), name.c_str()).value_or(0);
  }
  result.features.assign(info.features().begin(), info.features().end());
  result.start_time = FromProto(info.start_time());
  result.descriptor_socket = info.descriptor_socket();
  result.named_regions = info.named_regions();
  result.deterministic = info.deterministic();
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
  result.state = static_cast<ContributionState>(summary.state());
  result.form = static_cast<ContributionForm>(summary.form());
  result.replayed = summary.replayed();
  result.payload_differs = summary.payload_differs();
  result.digest = summary.digest();
  if (summary.has_step()) result.step = summary.step();
  const v1::Timing& timing = summary.timing();
  result.timing = {FromProto(timing.queue()), FromProto(timing.upload()), FromProto(timing.engine()), FromProto(timing.download())};
  result.transport = summary.transport();
  return result;
}

}  // namespace headwater::client::internal
