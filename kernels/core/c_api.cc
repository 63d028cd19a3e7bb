// The C ABI over LossEngine: translates structs, keeps exceptions inside, computes nothing.
#include "headwater/kernels/c_api.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "headwater/kernels/engine.h"
#include "headwater/kernels/error.h"

using headwater::DataType;
using headwater::ErrorReason;
using headwater::HeadTensor;
using headwater::MakeError;

struct hw_engine {
  std::unique_ptr<headwater::LossEngine> engine;
};

struct hw_head {
  std::unique_ptr<headwater::EngineHead> head;
};

struct hw_staged {
  std::unique_ptr<headwater::StagedContribution> contribution;
};

struct hw_error {
  int32_t code = 0;
  std::string reason;
  std::string message;
  std::vector<std::pair<std::string, std::string>> metadata;
};

namespace {

// Handed out when there is no memory for an error; made at load time, never freed.
hw_error& OutOfMemoryError() noexcept {
  static hw_error error{static_cast<int32_t>(absl::StatusCode::kResourceExhausted), "MEMORY_BUDGET_EXCEEDED", "out of memory", {}};
  return error;
}
[[maybe_unused]] const hw_error& kOutOfMemoryErrorIsMade = OutOfMemoryError();

// A struct of a newer caller may be longer than ours by at most this.
constexpr int64_t kMaxAppendedBytes = 4096;

hw_error* NewError(const absl::Status& status) noexcept {
  try {
    auto error = std::make_unique<hw_error>();
    error->code = static_cast<int32_t>(status.code());
    error->reason = headwater::ErrorReasonName(headwater::GetErrorReason(status));
    error->message.assign(status.message().data(), status.message().size());
    for (auto& [key, value] : headwater::GetErrorMetadata(status)) error->metadata.emplace_back(key, value);
    return error.release();
  } catch (...) {
    return &OutOfMemoryError();
  }
}

// Runs `body`, which returns absl::Status, and turns what comes of it into the ABI's form.
template <typename Body>
hw_error* Guard(Body&& body) noexcept {
  try {
    try {
      const absl::Status status = body();
      return status.ok() ? nullptr : NewError(status);
    } catch (const std::bad_alloc&) {
      return NewError(MakeError(ErrorReason::kMemoryBudgetExceeded, "the process has no memory left for this call"));
    } catch (const std::exception& exception) {
      return NewError(MakeError(ErrorReason::kInternal, std::string("unexpected exception: ") + exception.what()));
    } catch (...) {
      return NewError(MakeError(ErrorReason::kInternal, "unexpected exception of unknown type"));
    }
  } catch (...) {
    return &OutOfMemoryError();
  }
}

absl::Status MissingArgument(const char* name) {
  return MakeError(ErrorReason::kMissingField, std::string(name) + " is required, NULL came", {{"field", name}});
}

absl::Status InvalidArgument(const std::string& name, const std::string& expected, int64_t actual) {
  return MakeError(ErrorReason::kInvalidField, name + " must be " + expected + ", got " + std::to_string(actual),
                   {{"field", name}, {"expected", expected}, {"actual", std::to_string(actual)}});
}

#define HW_RETURN_IF_ERROR(expression)           \
  do {                                           \
    const absl::Status hw_status = (expression); \
    if (!hw_status.ok()) return hw_status;       \
  } while (false)

#define HW_REQUIRE_ARGUMENT(pointer) \
  if ((pointer) == nullptr) return MissingArgument(#pointer)

// Copies a caller's struct, whose size may be that of a later version.
template <typename Struct>
absl::Status ReadStruct(const Struct* in, const char* name, Struct* out) {
  if (in == nullptr) return MissingArgument(name);
  constexpr int64_t kBytes = sizeof(Struct);
  int64_t caller_bytes = 0;
  std::memcpy(&caller_bytes, in, sizeof(caller_bytes));
  if (caller_bytes < kBytes || caller_bytes > kBytes + kMaxAppendedBytes) {
    return InvalidArgument(std::string(name) + ".struct_bytes", std::to_string(kBytes), caller_bytes);
  }
  const char* bytes = reinterpret_cast<const char*>(in);
  if (std::any_of(bytes + kBytes, bytes + caller_bytes, [](char byte) { return byte != 0; })) {
    return MakeError(ErrorReason::kInvalidField,
                     std::string(name) + " sets a member that this version of the library (ABI " + std::to_string(HW_ABI_VERSION) +
                         ", " + std::to_string(kBytes) + " bytes) does not know",
                     {{"field", name}});
  }
  std::memcpy(out, in, kBytes);
  return absl::OkStatus();
}

// Checks the size of a struct inside a struct.
template <typename Struct>
absl::Status CheckNested(const Struct& nested, const std::string& name) {
  constexpr int64_t kBytes = sizeof(Struct);
  if (nested.struct_bytes == 0 || nested.struct_bytes == kBytes) return absl::OkStatus();
  return InvalidArgument(name + ".struct_bytes", std::to_string(kBytes), nested.struct_bytes);
}

absl::Status ReadDataType(int32_t value, const std::string& name, DataType* out) {
  if (value < 1 || value > 3) return InvalidArgument(name, "1 (float32), 2 (bfloat16) or 3 (float16)", value);
  *out = static_cast<DataType>(value);
  return absl::OkStatus();
}

bool IsHeadTensor(int32_t value) {
  return value >= static_cast<int32_t>(HeadTensor::kWeight) && value <= static_cast<int32_t>(HeadTensor::kMoment2Bias);
}

absl::Status ReadHeadTensor(int32_t value, HeadTensor* out) {
  if (!IsHeadTensor(value)) return InvalidArgument("tensor", "in [1, 10]", value);
  *out = static_cast<HeadTensor>(value);
  return absl::OkStatus();
}

absl::Status ReadOptimizer(const hw_optimizer_spec& in, const std::string& name, headwater::OptimizerSpec* out) {
  HW_RETURN_IF_ERROR(CheckNested(in, name));
  switch (in.kind) {
    case HW_OPTIMIZER_NONE:
      *out = std::monostate{};
      return absl::OkStatus();
    case HW_OPTIMIZER_ADAMW:
      *out = headwater::AdamWSpec{in.beta1, in.beta2, in.epsilon, in.weight_decay};
      return absl::OkStatus();
    case HW_OPTIMIZER_SGD:
      *out = headwater::SgdSpec{in.momentum, in.dampening, in.nesterov != 0, in.weight_decay};
      return absl::OkStatus();
    default:
      return InvalidArgument(name + ".kind", "0 (none), 1 (AdamW) or 2 (SGD)", in.kind);
  }
}

absl::Status ReadHeadSpec(const hw_head_spec* in, headwater::HeadSpec* out) {
  hw_head_spec spec;
  HW_RETURN_IF_ERROR(ReadStruct(in, "spec", &spec));
  out->vocab_size = spec.vocab_size;
  out->hidden_size = spec.hidden_size;
  HW_RETURN_IF_ERROR(ReadDataType(spec.data_type, "spec.data_type", &out->data_type));
  out->has_bias = spec.has_bias != 0;
  out->transform.logit_scale = spec.logit_scale;
  if (spec.softcap != 0) out->transform.softcap = spec.softcap;
  out->transform.valid_vocab_size = spec.valid_vocab_size == 0 ? spec.vocab_size : spec.valid_vocab_size;
  out->trainable = spec.trainable != 0;
  out->staging_slots = spec.staging_slots;
  return ReadOptimizer(spec.optimizer, "spec.optimizer", &out->optimizer);
}

// `head_spec` is that of the head the loss is for: class weights that cover its padding are cut to its valid part.
absl::Status ReadCrossEntropy(const hw_cross_entropy& in, const headwater::HeadSpec& head_spec, const std::string& name,
                              headwater::CrossEntropySpec* out) {
  out->label_smoothing = in.label_smoothing;
  out->z_loss = in.z_loss;
  if ((in.class_weights == nullptr) != (in.class_weight_count == 0) || in.class_weight_count < 0) {
    return InvalidArgument(name + ".class_weight_count", "0 without class_weights, positive with them", in.class_weight_count);
  }
  int64_t count = in.class_weight_count;
  if (count == head_spec.vocab_size) count = head_spec.transform.valid_vocab_size;
  out->class_weights = absl::MakeConstSpan(in.class_weights, static_cast<size_t>(count));
  return absl::OkStatus();
}

absl::Status ReadLoss(const hw_loss_term& term, const headwater::HeadSpec& head_spec, const std::string& name,
                      headwater::LossTerm* out) {
  if ((term.cross_entropy == nullptr) == (term.jsd == nullptr)) {
    return MakeError(ErrorReason::kInvalidCombination, name + " must have exactly one of cross_entropy and jsd", {{"field", name}});
  }
  if (term.cross_entropy != nullptr) {
    hw_cross_entropy spec;
    HW_RETURN_IF_ERROR(ReadStruct(term.cross_entropy, (name + ".cross_entropy").c_str(), &spec));
    return ReadCrossEntropy(spec, head_spec, name + ".cross_entropy", &out->loss.emplace<headwater::CrossEntropySpec>());
  }
  hw_jsd spec;
  HW_RETURN_IF_ERROR(ReadStruct(term.jsd, (name + ".jsd").c_str(), &spec));
  HW_RETURN_IF_ERROR(CheckNested(spec.hard_loss, name + ".jsd.hard_loss"));
  headwater::JsdSpec& jsd = out->loss.emplace<headwater::JsdSpec>();
  jsd.beta = spec.beta;
  jsd.student_temperature = spec.student_temperature;
  jsd.teacher_temperature = spec.teacher_temperature;
  jsd.hard_loss_weight = spec.hard_loss_weight;
  jsd.truncate_to_common = spec.truncate_to_common != 0;
  HW_RETURN_IF_ERROR(ReadCrossEntropy(spec.hard_loss, head_spec, name + ".jsd.hard_loss", &jsd.hard_loss));
  if (term.teacher_head == nullptr) return MissingArgument((name + ".teacher_head").c_str());
  if (term.teacher_hidden == nullptr && term.row_count != 0) return MissingArgument((name + ".teacher_hidden").c_str());
  out->teacher_head = term.teacher_head->head.get();
  out->teacher_hidden.data = term.teacher_hidden;
  out->teacher_hidden.row_count = term.row_count;
  out->teacher_hidden.column_count = out->teacher_head->spec().hidden_size;
  return ReadDataType(term.teacher_data_type, name + ".teacher_data_type", &out->teacher_hidden.data_type);
}

absl::Status ReadTerm(const hw_loss_term* in, const std::string& name, headwater::LossTerm* out) {
  hw_loss_term term;
  HW_RETURN_IF_ERROR(ReadStruct(in, name.c_str(), &term));
  if (term.head == nullptr) return MissingArgument((name + ".head").c_str());
  if (term.row_count < 0) return InvalidArgument(name + ".row_count", "at least 0", term.row_count);
  const size_t row_count = static_cast<size_t>(term.row_count);
  out->head = term.head->head.get();
  out->row_start = term.row_start;
  out->row_count = term.row_count;
  if (term.targets != nullptr) out->targets = absl::MakeConstSpan(term.targets, row_count);
  if (term.token_weights != nullptr) out->token_weights = absl::MakeConstSpan(term.token_weights, row_count);
  out->ignore_index = term.ignore_index;
  out->loss_scale = term.loss_scale;
  out->token_loss = term.token_loss;
  out->lse = term.lse;
  out->target_log_probability = term.target_log_probability;
  out->entropy = term.entropy;
  out->argmax = term.argmax;
  return ReadLoss(term, out->head->spec(), name, out);
}

absl::Status ReadMicroBatch(const hw_micro_batch& in, std::vector<headwater::LossTerm>* terms, headwater::MicroBatch* out) {
  out->hidden = {in.hidden, in.row_count, in.hidden_size, DataType::kFloat32};
  HW_RETURN_IF_ERROR(ReadDataType(in.hidden_data_type, "micro_batch.hidden_data_type", &out->hidden.data_type));
  out->backward = in.backward != 0;
  if (in.grad_hidden != nullptr) {
    out->grad_hidden = {in.grad_hidden, in.row_count, in.hidden_size, DataType::kFloat32};
    HW_RETURN_IF_ERROR(ReadDataType(in.grad_hidden_data_type, "micro_batch.grad_hidden_data_type", &out->grad_hidden.data_type));
  }
  out->grad_hidden_scale = in.grad_hidden_scale;
  switch (in.grad_weight) {
    case HW_GRAD_WEIGHT_NONE:
      out->grad_weight = headwater::GradWeightMode::kNone;
      break;
    case HW_GRAD_WEIGHT_ACCUMULATE:
      out->grad_weight = headwater::GradWeightMode::kAccumulate;
      break;
    case HW_GRAD_WEIGHT_STAGE:
      out->grad_weight = headwater::GradWeightMode::kStage;
      break;
    default:
      return InvalidArgument("micro_batch.grad_weight", "0 (none), 1 (accumulate) or 2 (stage)", in.grad_weight);
  }
  out->refuse_non_finite = in.refuse_non_finite != 0;
  if (in.term_count < 0) return InvalidArgument("micro_batch.term_count", "at least 1", in.term_count);
  if (in.term_count > 0 && in.terms == nullptr) return MissingArgument("micro_batch.terms");
  terms->resize(static_cast<size_t>(in.term_count));
  for (int64_t i = 0; i < in.term_count; ++i) {
    const std::string name = "micro_batch.terms[" + std::to_string(i) + "]";
    const char* first = reinterpret_cast<const char*>(in.terms);
    const auto* term = reinterpret_cast<const hw_loss_term*>(first + i * in.terms->struct_bytes);
    HW_RETURN_IF_ERROR(ReadTerm(term, name, &(*terms)[static_cast<size_t>(i)]));
  }
  out->terms = *terms;
  return absl::OkStatus();
}

hw_loss_sums ToAbi(const headwater::LossSums& sums) {
  return {sums.loss_sum,         sums.soft_loss_sum,     sums.hard_loss_sum,     sums.z_loss_sum,
          sums.token_weight_sum, sums.target_weight_sum, sums.valid_token_count, sums.non_finite_row_count};
}

}  // namespace

extern "C" {

int32_t hw_abi_version(void) { return HW_ABI_VERSION; }

int32_t hw_error_code(const hw_error* error) { return error == nullptr ? 0 : error->code; }

const char* hw_error_reason(const hw_error* error) { return error == nullptr ? "" : error->reason.c_str(); }

const char* hw_error_message(const hw_error* error) { return error == nullptr ? "" : error->message.c_str(); }

int32_t hw_error_metadata_count(const hw_error* error) {
  return error == nullptr ? 0 : static_cast<int32_t>(error->metadata.size());
}

const char* hw_error_metadata_key(const hw_error* error, int32_t index) {
  if (index < 0 || index >= hw_error_metadata_count(error)) return nullptr;
  return error->metadata[static_cast<size_t>(index)].first.c_str();
}

const char* hw_error_metadata_value(const hw_error* error, int32_t index) {
  if (index < 0 || index >= hw_error_metadata_count(error)) return nullptr;
  return error->metadata[static_cast<size_t>(index)].second.c_str();
}

void hw_error_free(hw_error* error) {
  if (error != &OutOfMemoryError()) delete error;
}

hw_error* hw_engine_create(const hw_engine_options* options, hw_engine** out) {
  return Guard([&]() -> absl::Status {
    HW_REQUIRE_ARGUMENT(out);
    *out = nullptr;
    hw_engine_options in;
    HW_RETURN_IF_ERROR(ReadStruct(options, "options", &in));
    const std::string engine_name = in.engine != nullptr ? in.engine : "cpu";
    if (engine_name != "cpu" && engine_name != "cuda") {
      return MakeError(ErrorReason::kInvalidField, "options.engine must be cpu or cuda, got " + engine_name,
                       {{"field", "options.engine"}, {"expected", "cpu or cuda"}, {"actual", engine_name}});
    }
    headwater::EngineOptions engine_options;
    if (in.shard_count != 0) engine_options.shard_count = in.shard_count;
    if (in.shard_weights != nullptr) {
      engine_options.shard_weights.assign(in.shard_weights, in.shard_weights + std::max(engine_options.shard_count, 0));
    }
    engine_options.thread_count = in.thread_count;
    engine_options.memory_budget_bytes = in.memory_budget_bytes;
    engine_options.workspace_bytes = in.workspace_bytes;
    engine_options.token_chunk_rows = in.token_chunk_rows;
    engine_options.device_index = in.device_index;
    engine_options.timed_search = in.no_timed_search == 0;
    if (in.algorithm_cache_path != nullptr) engine_options.algorithm_cache_path = in.algorithm_cache_path;
    absl::StatusOr<std::unique_ptr<headwater::LossEngine>> engine =
        engine_name == "cuda" ? headwater::CreateCudaEngine(engine_options) : headwater::CreateCpuEngine(engine_options);
    if (!engine.ok()) return engine.status();
    *out = new hw_engine{*std::move(engine)};
    return absl::OkStatus();
  });
}

void hw_engine_destroy(hw_engine* engine) { delete engine; }

hw_error* hw_head_create(hw_engine* engine, const hw_head_spec* spec, hw_head** out) {
  return Guard([&]() -> absl::Status {
    HW_REQUIRE_ARGUMENT(out);
    *out = nullptr;
    HW_REQUIRE_ARGUMENT(engine);
    headwater::HeadSpec head_spec;
    HW_RETURN_IF_ERROR(ReadHeadSpec(spec, &head_spec));
    absl::StatusOr<std::unique_ptr<headwater::EngineHead>> head = engine->engine->CreateHead(head_spec);
    if (!head.ok()) return head.status();
    *out = new hw_head{*std::move(head)};
    return absl::OkStatus();
  });
}

void hw_head_destroy(hw_head* head) { delete head; }

hw_error* hw_head_plan(const hw_head* head, int64_t* total_bytes, int64_t* token_chunk_rows) {
  return Guard([&]() -> absl::Status {
    HW_REQUIRE_ARGUMENT(head);
    const headwater::MemoryPlan& plan = head->head->plan();
    if (total_bytes != nullptr) *total_bytes = plan.total_bytes;
    if (token_chunk_rows != nullptr) *token_chunk_rows = plan.token_chunk_rows;
    return absl::OkStatus();
  });
}

int64_t hw_head_element_count(const hw_head* head, int32_t tensor) {
  if (head == nullptr || !IsHeadTensor(tensor)) return 0;
  return head->head->ElementCount(static_cast<HeadTensor>(tensor));
}

int32_t hw_head_tensor_data_type(const hw_head* head, int32_t tensor) {
  if (hw_head_element_count(head, tensor) == 0) return 0;
  return static_cast<int32_t>(head->head->TensorDataType(static_cast<HeadTensor>(tensor)));
}

hw_error* hw_head_read(const hw_head* head, int32_t tensor, int64_t element_start, int64_t element_count, void* out) {
  return Guard([&]() -> absl::Status {
    HW_REQUIRE_ARGUMENT(head);
    HW_REQUIRE_ARGUMENT(out);
    HeadTensor which = HeadTensor::kWeight;
    HW_RETURN_IF_ERROR(ReadHeadTensor(tensor, &which));
    return head->head->ReadTensor(which, element_start, element_count, out);
  });
}

hw_error* hw_head_write(hw_head* head, int32_t tensor, int64_t element_start, int64_t element_count, const void* in) {
  return Guard([&]() -> absl::Status {
    HW_REQUIRE_ARGUMENT(head);
    HW_REQUIRE_ARGUMENT(in);
    HeadTensor which = HeadTensor::kWeight;
    HW_RETURN_IF_ERROR(ReadHeadTensor(tensor, &which));
    return head->head->WriteTensor(which, element_start, element_count, in);
  });
}

hw_error* hw_head_zero_gradient(hw_head* head) {
  return Guard([&]() -> absl::Status {
    HW_REQUIRE_ARGUMENT(head);
    return head->head->ZeroGradient();
  });
}

hw_error* hw_head_add_gradient(hw_head* head, int32_t tensor, int64_t element_start, int64_t element_count, double factor,
                               const float* in) {
  return Guard([&]() -> absl::Status {
    HW_REQUIRE_ARGUMENT(head);
    HW_REQUIRE_ARGUMENT(in);
    HeadTensor which = HeadTensor::kWeight;
    HW_RETURN_IF_ERROR(ReadHeadTensor(tensor, &which));
    return head->head->AddToGradient(which, element_start, element_count, factor, in);
  });
}

hw_error* hw_head_reset_optimizer_state(hw_head* head) {
  return Guard([&]() -> absl::Status {
    HW_REQUIRE_ARGUMENT(head);
    return head->head->ResetOptimizerState();
  });
}

hw_error* hw_head_gradient_stats(const hw_head* head, double* norm_squared, int64_t* non_finite_count) {
  return Guard([&]() -> absl::Status {
    HW_REQUIRE_ARGUMENT(head);
    const absl::StatusOr<headwater::GradientStats> stats = head->head->ComputeGradientStats();
    if (!stats.ok()) return stats.status();
    if (norm_squared != nullptr) *norm_squared = stats->norm_squared;
    if (non_finite_count != nullptr) *non_finite_count = stats->non_finite_count;
    return absl::OkStatus();
  });
}

int32_t hw_head_free_staging_slots(const hw_head* head) { return head == nullptr ? 0 : head->head->FreeStagingSlots(); }

hw_error* hw_head_apply_optimizer(hw_head* head, const hw_optimizer_step* step) {
  return Guard([&]() -> absl::Status {
    HW_REQUIRE_ARGUMENT(head);
    hw_optimizer_step in;
    HW_RETURN_IF_ERROR(ReadStruct(step, "step", &in));
    headwater::OptimizerStep engine_step;
    engine_step.learning_rate = in.learning_rate;
    engine_step.gradient_multiplier = in.gradient_multiplier;
    engine_step.update_count = in.update_count;
    HW_RETURN_IF_ERROR(ReadOptimizer(in.settings, "step.settings", &engine_step.settings));
    return head->head->ApplyOptimizer(engine_step);
  });
}

hw_error* hw_compute(hw_engine* engine, const hw_micro_batch* micro_batch, hw_loss_sums* sums, hw_staged** staged) {
  return Guard([&]() -> absl::Status {
    if (staged != nullptr) *staged = nullptr;
    HW_REQUIRE_ARGUMENT(engine);
    HW_REQUIRE_ARGUMENT(sums);
    hw_micro_batch in;
    HW_RETURN_IF_ERROR(ReadStruct(micro_batch, "micro_batch", &in));
    if (in.grad_weight == HW_GRAD_WEIGHT_STAGE) HW_REQUIRE_ARGUMENT(staged);
    std::vector<headwater::LossTerm> terms;
    headwater::MicroBatch engine_micro_batch;
    HW_RETURN_IF_ERROR(ReadMicroBatch(in, &terms, &engine_micro_batch));
    // Made first, so that nothing can fail once the engine has changed the accumulator.
    auto handle = std::make_unique<hw_staged>();
    absl::StatusOr<headwater::MicroBatchResult> result = engine->engine->Compute(engine_micro_batch);
    if (!result.ok()) return result.status();
    std::transform(result->terms.begin(), result->terms.end(), sums, ToAbi);
    if (result->staged != nullptr) {
      handle->contribution = std::move(result->staged);
      *staged = handle.release();
    }
    return absl::OkStatus();
  });
}

hw_error* hw_staged_commit(hw_staged* staged, double factor) {
  return Guard([&]() -> absl::Status {
    HW_REQUIRE_ARGUMENT(staged);
    const std::unique_ptr<hw_staged> owned(staged);
    return owned->contribution->Commit(factor);
  });
}

void hw_staged_discard(hw_staged* staged) { delete staged; }

}  // extern "C"
