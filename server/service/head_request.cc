#include "server/service/head_request.h"

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/engine.h"
#include "headwater/kernels/error.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/group/head_spec_codec.h"
#include "server/service/field_check.h"
#include "server/transport/region_registry.h"

namespace headwater::service {
namespace {

absl::Status DecodeTransform(const v1::LogitTransform& transform, const std::string& field, HeadSpec* spec) {
  LogitTransform& decoded = spec->transform;
  decoded.valid_vocab_size = spec->vocab_size;
  ReadFields(transform, decoded);
  HEADWATER_RETURN_IF_ERROR(
      CheckNumber(field + ".logit_scale", decoded.logit_scale, decoded.logit_scale != 0, "a finite number other than 0"));
  if (decoded.softcap.has_value()) {
    HEADWATER_RETURN_IF_ERROR(CheckNumber(field + ".softcap", *decoded.softcap, *decoded.softcap > 0, "a finite number > 0"));
  }
  return CheckRange(field + ".valid_vocab_size", decoded.valid_vocab_size, 1, spec->vocab_size);
}

absl::Status CheckFraction(const std::string& field, double value, bool one_allowed) {
  return CheckNumber(field, value, value >= 0 && (one_allowed ? value <= 1 : value < 1),
                     one_allowed ? "a number in [0, 1]" : "a number in [0, 1)");
}

absl::StatusOr<OptimizerSpec> DecodeOptimizer(const v1::OptimizerSpec& optimizer, const std::string& field) {
  switch (optimizer.optimizer_case()) {
    case v1::OptimizerSpec::kAdamw: {
      AdamWSpec spec;
      ReadFields(optimizer.adamw(), spec);
      HEADWATER_RETURN_IF_ERROR(CheckFraction(field + ".adamw.beta1", spec.beta1, false));
      HEADWATER_RETURN_IF_ERROR(CheckFraction(field + ".adamw.beta2", spec.beta2, false));
      HEADWATER_RETURN_IF_ERROR(CheckNotNegative(field + ".adamw.epsilon", spec.epsilon));
      HEADWATER_RETURN_IF_ERROR(CheckNotNegative(field + ".adamw.weight_decay", spec.weight_decay));
      return OptimizerSpec(spec);
    }
    case v1::OptimizerSpec::kSgd: {
      SgdSpec spec;
      ReadFields(optimizer.sgd(), spec);
      HEADWATER_RETURN_IF_ERROR(CheckFraction(field + ".sgd.momentum", spec.momentum, false));
      HEADWATER_RETURN_IF_ERROR(CheckFraction(field + ".sgd.dampening", spec.dampening, true));
      HEADWATER_RETURN_IF_ERROR(CheckNotNegative(field + ".sgd.weight_decay", spec.weight_decay));
      if (spec.nesterov && (spec.momentum == 0 || spec.dampening != 0)) {
        return FieldError(ErrorReason::kInvalidCombination, field + ".sgd.nesterov",
                          "false, because it needs momentum > 0 and dampening = 0", "true");
      }
      return OptimizerSpec(spec);
    }
    case v1::OptimizerSpec::OPTIMIZER_NOT_SET:
      break;
  }
  return MissingField(field + ".optimizer", "adamw or sgd");
}

absl::StatusOr<HeadSpec> DecodeSpec(const v1::HeadSpec& spec, const std::string& field, const Limits& limits) {
  HeadSpec decoded;
  decoded.vocab_size = spec.vocab_size();
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast(field + ".vocab_size", decoded.vocab_size, 1));
  HEADWATER_RETURN_IF_ERROR(CheckLimit(field + ".vocab_size", decoded.vocab_size, "max_vocab_size", limits.max_vocab_size));
  decoded.hidden_size = spec.hidden_size();
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast(field + ".hidden_size", decoded.hidden_size, 1));
  HEADWATER_RETURN_IF_ERROR(CheckLimit(field + ".hidden_size", decoded.hidden_size, "max_hidden_size", limits.max_hidden_size));
  auto data_type = DecodeFloatType(spec.data_type(), field + ".data_type");
  if (!data_type.ok()) return data_type.status();
  decoded.data_type = *data_type;
  decoded.has_bias = spec.has_bias();
  HEADWATER_RETURN_IF_ERROR(DecodeTransform(spec.transform(), field + ".transform", &decoded));
  decoded.trainable = spec.trainable();
  if (spec.has_optimizer()) {
    auto optimizer = DecodeOptimizer(spec.optimizer(), field + ".optimizer");
    if (!optimizer.ok()) return optimizer.status();
    if (!decoded.trainable) {
      return FieldError(ErrorReason::kInvalidCombination, field + ".optimizer", "nothing, because the head is frozen",
                        "an optimizer");
    }
    decoded.optimizer = *optimizer;
  }
  decoded.staging_slots = spec.has_staging_slots() ? spec.staging_slots() : (decoded.trainable ? 1 : 0);
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast(field + ".staging_slots", decoded.staging_slots, 0));
  HEADWATER_RETURN_IF_ERROR(
      CheckLimit(field + ".staging_slots", decoded.staging_slots, "max_staging_slots", limits.max_staging_slots));
  if (!decoded.trainable && decoded.staging_slots > 0) {
    return FieldError(ErrorReason::kInvalidCombination, field + ".staging_slots", "0, because the head is frozen",
                      absl::StrCat(decoded.staging_slots));
  }
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast(field + ".low_rank", spec.low_rank(), 0));
  if (spec.low_rank() != 0) return FeatureNotBuilt(field + ".low_rank", "low_rank");
  switch (spec.parallelism()) {
    case v1::PARALLELISM_UNSPECIFIED:
    case v1::PARALLELISM_VOCABULARY:
      decoded.parallelism = Parallelism::kVocabulary;
      break;
    case v1::PARALLELISM_ROWS:
      decoded.parallelism = Parallelism::kRows;
      break;
    default:
      return FieldError(ErrorReason::kInvalidField, field + ".parallelism", "PARALLELISM_VOCABULARY or PARALLELISM_ROWS",
                        absl::StrCat(static_cast<int>(spec.parallelism())));
  }
  decoded.initial_step = spec.initial_step();
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast(field + ".initial_step", decoded.initial_step, 0));
  return decoded;
}

absl::StatusOr<HeadTensor> DecodeTensorKind(v1::HeadTensor tensor, const std::string& field) {
  switch (tensor) {
    case v1::HEAD_TENSOR_WEIGHT:
      return HeadTensor::kWeight;
    case v1::HEAD_TENSOR_BIAS:
      return HeadTensor::kBias;
    case v1::HEAD_TENSOR_UNSPECIFIED:
      return MissingField(field, "WEIGHT or BIAS");
    default:
      return FieldError(ErrorReason::kInvalidField, field, "WEIGHT or BIAS", absl::StrCat(static_cast<int>(tensor)));
  }
}

absl::StatusOr<heads::ExpectedMicroBatches> DecodeExpected(const v1::ExpectedMicroBatches& expected, const std::string& field,
                                                           const Limits& limits) {
  switch (expected.expectation_case()) {
    case v1::ExpectedMicroBatches::kCount:
      HEADWATER_RETURN_IF_ERROR(CheckAtLeast(field + ".count", expected.count(), 0));
      HEADWATER_RETURN_IF_ERROR(
          CheckLimit(field + ".count", expected.count(), "max_step_micro_batches", limits.max_step_micro_batches));
      return heads::ExpectedMicroBatches(expected.count());
    case v1::ExpectedMicroBatches::kIds: {
      const auto& ids = expected.ids().ids();
      HEADWATER_RETURN_IF_ERROR(
          CheckLimit(field + ".ids.ids", ids.size(), "max_step_micro_batches", limits.max_step_micro_batches));
      std::set<int64_t> distinct;
      for (int i = 0; i < ids.size(); ++i) {
        const std::string id_field = absl::StrCat(field, ".ids.ids[", i, "]");
        HEADWATER_RETURN_IF_ERROR(CheckAtLeast(id_field, ids[i], 0));
        if (!distinct.insert(ids[i]).second) {
          return FieldError(ErrorReason::kInvalidField, id_field, "distinct ids", absl::StrCat(ids[i], " twice"));
        }
      }
      return heads::ExpectedMicroBatches(std::vector<int64_t>(ids.begin(), ids.end()));
    }
    case v1::ExpectedMicroBatches::EXPECTATION_NOT_SET:
      break;
  }
  return MissingField(field, "a count or ids");
}

template <typename Request>
absl::StatusOr<StepRequest> DecodeStepRequest(const Request& request) {
  auto head = DecodeHeadStep(request.has_head(), request.head(), "head", /*step_required=*/true);
  if (!head.ok()) return head.status();
  return StepRequest{head->head, {*head->epoch, *head->step}, 1};
}

absl::StatusOr<HeadAtEpoch> DecodeHeadAtRequiredEpoch(const std::string& name, const std::string& epoch) {
  auto head = DecodeHeadName(name, "name");
  if (!head.ok()) return head.status();
  auto decoded = DecodeEpoch(epoch, "epoch");
  if (!decoded.ok()) return decoded.status();
  return HeadAtEpoch{*std::move(head), *decoded};
}

absl::StatusOr<HeadAtEpoch> DecodeHeadAtOptionalEpoch(const std::string& name, const std::string& epoch) {
  auto head = DecodeHeadName(name, "name");
  if (!head.ok()) return head.status();
  auto decoded = DecodeOptionalEpoch(epoch, "epoch");
  if (!decoded.ok()) return decoded.status();
  return HeadAtEpoch{*std::move(head), *decoded};
}

absl::StatusOr<int64_t> DecodePageSize(int32_t page_size) {
  constexpr int64_t kDefaultPageSize = 100;
  constexpr int64_t kMaxPageSize = 1000;
  HEADWATER_RETURN_IF_ERROR(CheckRange("page_size", page_size, 0, kMaxPageSize));
  return page_size == 0 ? kDefaultPageSize : page_size;
}

absl::Status MadeUpPageToken(const std::string& token) {
  return FieldError(ErrorReason::kInvalidField, "page_token", "the next_page_token of an earlier page", Quoted(token));
}

absl::Status CheckCheckpointName(const std::string& checkpoint) {
  if (checkpoint.empty()) return MissingField("checkpoint", "a name");
  if (checkpoint::IsValidCheckpointName(checkpoint)) return absl::OkStatus();
  return FieldError(ErrorReason::kInvalidName, "checkpoint", "a name that matches [A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?",
                    Quoted(checkpoint));
}

}  // namespace

absl::StatusOr<CreateRequest> DecodeCreate(const v1::CreateHeadRequest& request, const Limits& limits) {
  auto name = DecodeHeadName(request.name(), "name");
  if (!name.ok()) return name.status();
  if (!request.has_spec()) return MissingField("spec", "what the head is");
  auto spec = DecodeSpec(request.spec(), "spec", limits);
  if (!spec.ok()) return spec.status();
  heads::IfExists if_exists = heads::IfExists::kFail;
  switch (request.if_exists()) {
    case v1::IF_EXISTS_UNSPECIFIED:
    case v1::IF_EXISTS_FAIL:
      break;
    case v1::IF_EXISTS_ATTACH_IF_SAME_SPEC:
      if_exists = heads::IfExists::kAttachIfSameSpec;
      break;
    default:
      return FieldError(ErrorReason::kInvalidField, "if_exists", "FAIL or ATTACH_IF_SAME_SPEC",
                        absl::StrCat(static_cast<int>(request.if_exists())));
  }
  return CreateRequest{*std::move(name), *std::move(spec), request.validate_only(), if_exists};
}

absl::StatusOr<ListRequest> DecodeList(const v1::ListHeadsRequest& request) {
  auto tenant = heads::ParseTenantName(request.parent(), "parent");
  if (!tenant.ok()) return tenant.status();
  auto page_size = DecodePageSize(request.page_size());
  if (!page_size.ok()) return page_size.status();
  if (!request.page_token().empty() && !heads::ParseHeadName(request.page_token(), "page_token").ok()) {
    return MadeUpPageToken(request.page_token());
  }
  return ListRequest{*tenant, request.page_token(), *page_size};
}

absl::StatusOr<HeadAtEpoch> DecodeDelete(const v1::DeleteHeadRequest& request) {
  return DecodeHeadAtOptionalEpoch(request.name(), request.epoch());
}

absl::StatusOr<TakeRequest> DecodeTake(const v1::TakeHeadRequest& request) {
  auto head = DecodeHeadAtOptionalEpoch(request.name(), request.epoch());
  if (!head.ok()) return head.status();
  TakeRequest decoded{std::move(head->name), head->epoch, {}};
  const auto& recovers = request.recovers_epochs();
  if (recovers.size() > kMaxRecoversEpochs) {
    return FieldError(ErrorReason::kInvalidField, "recovers_epochs", absl::StrCat("at most ", kMaxRecoversEpochs, " epochs"),
                      absl::StrCat(recovers.size(), " epochs"));
  }
  for (int i = 0; i < recovers.size(); ++i) {
    auto epoch = DecodeEpoch(recovers[i], absl::StrCat("recovers_epochs[", i, "]"));
    if (!epoch.ok()) return epoch.status();
    decoded.recovers_epochs.push_back(*epoch);
  }
  return decoded;
}

absl::StatusOr<UploadRequest> DecodeUploadHeader(const v1::UploadWeightsHeader& header) {
  constexpr size_t kMaxUploadIdBytes = 64;
  UploadRequest decoded;
  auto name = DecodeHeadName(header.name(), "header.name");
  if (!name.ok()) return name.status();
  decoded.name = *std::move(name);
  auto epoch = DecodeEpoch(header.epoch(), "header.epoch");
  if (!epoch.ok()) return epoch.status();
  decoded.epoch = *epoch;
  decoded.upload_id = header.upload_id();
  if (decoded.upload_id.empty()) return MissingField("header.upload_id", "1 to 64 bytes");
  if (decoded.upload_id.size() > kMaxUploadIdBytes) {
    return FieldError(ErrorReason::kInvalidField, "header.upload_id", "1 to 64 bytes",
                      absl::StrCat(decoded.upload_id.size(), " bytes"));
  }
  auto tensor = DecodeTensorKind(header.tensor(), "header.tensor");
  if (!tensor.ok()) return tensor.status();
  decoded.tensor = *tensor;
  auto data_type = DecodeFloatType(header.data_type(), "header.data_type");
  if (!data_type.ok()) return data_type.status();
  decoded.data_type = *data_type;
  decoded.total_bytes = header.total_bytes();
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("header.total_bytes", decoded.total_bytes, 1));
  decoded.checksum = header.checksum();
  if (!decoded.checksum.empty() && decoded.checksum.size() != 16) {
    return FieldError(ErrorReason::kInvalidField, "header.checksum", "16 bytes, or nothing",
                      absl::StrCat(decoded.checksum.size(), " bytes"));
  }
  if (header.has_closes_step()) {
    HEADWATER_RETURN_IF_ERROR(CheckAtLeast("header.closes_step", header.closes_step(), 0));
    decoded.closes_step = header.closes_step();
  }
  return decoded;
}

absl::StatusOr<LoadRequest> DecodeLoad(const v1::LoadWeightsRequest& request) {
  constexpr size_t kMaxTextBytes = 1024;
  auto head = DecodeHeadAtRequiredEpoch(request.name(), request.epoch());
  if (!head.ok()) return head.status();
  if (request.path().empty()) return MissingField("path", "a file or folder under the server's load root");
  const std::pair<const char*, const std::string*> texts[] = {
      {"path", &request.path()}, {"weight_tensor", &request.weight_tensor()}, {"bias_tensor", &request.bias_tensor()}};
  for (const auto& [field, text] : texts) {
    if (text->size() > kMaxTextBytes) {
      return FieldError(ErrorReason::kInvalidField, field, absl::StrCat("at most ", kMaxTextBytes, " bytes"),
                        absl::StrCat(text->size(), " bytes"));
    }
    if (text->find('\0') != std::string::npos) {
      return FieldError(ErrorReason::kInvalidField, field, "text without a zero byte", Quoted(*text));
    }
  }
  bool leaves_root = request.path().front() == '/';
  for (size_t begin = 0; begin <= request.path().size();) {
    const size_t end = std::min(request.path().find('/', begin), request.path().size());
    leaves_root = leaves_root || request.path().compare(begin, end - begin, "..") == 0;
    begin = end + 1;
  }
  if (leaves_root) {
    return FieldError(ErrorReason::kInvalidField, "path", "a relative path without `..`", Quoted(request.path()));
  }
  return LoadRequest{std::move(head->name), *head->epoch, request.path(), request.weight_tensor(), request.bias_tensor()};
}

absl::StatusOr<DownloadWeightsRequest> DecodeDownloadWeights(const v1::DownloadWeightsRequest& request) {
  DownloadWeightsRequest decoded;
  auto head = DecodeHeadAtOptionalEpoch(request.name(), request.epoch());
  if (!head.ok()) return head.status();
  decoded.name = std::move(head->name);
  decoded.epoch = head->epoch;
  auto tensor = DecodeTensorKind(request.tensor(), "tensor");
  if (!tensor.ok()) return tensor.status();
  decoded.tensor = *tensor;
  if (request.data_type() != v1::DATA_TYPE_UNSPECIFIED) {
    auto data_type = DecodeFloatType(request.data_type(), "data_type");
    if (!data_type.ok()) return data_type.status();
    decoded.data_type = *data_type;
  }
  decoded.offset_bytes = request.offset_bytes();
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("offset_bytes", decoded.offset_bytes, 0));
  if (request.has_expected_weight_version()) {
    HEADWATER_RETURN_IF_ERROR(CheckAtLeast("expected_weight_version", request.expected_weight_version(), 0));
    decoded.expected_weight_version = request.expected_weight_version();
  }
  return decoded;
}

absl::StatusOr<DownloadGradientRequest> DecodeDownloadGradient(const v1::DownloadGradientRequest& request) {
  auto step = DecodeStepRequest(request);
  if (!step.ok()) return step.status();
  auto tensor = DecodeTensorKind(request.tensor(), "tensor");
  if (!tensor.ok()) return tensor.status();
  const double factor = request.has_gradient_factor() ? request.gradient_factor() : 1;
  HEADWATER_RETURN_IF_ERROR(CheckFactor("gradient_factor", factor));
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("offset_bytes", request.offset_bytes(), 0));
  return DownloadGradientRequest{std::move(step->name), step->key,
                                 *tensor == HeadTensor::kWeight ? HeadTensor::kGradWeight : HeadTensor::kGradBias, factor,
                                 request.offset_bytes()};
}

absl::StatusOr<HeadAtEpoch> DecodeGetStep(const v1::GetStepRequest& request) {
  auto head = DecodeHeadStep(request.has_head(), request.head(), "head", /*step_required=*/false);
  if (!head.ok()) return head.status();
  if (!head->epoch.has_value()) return MissingField("head.head_epoch", "the head's epoch, 16 bytes");
  return HeadAtEpoch{head->head, head->epoch};
}

absl::StatusOr<SealRequest> DecodeSeal(const v1::SealStepRequest& request, const Limits& limits) {
  auto step = DecodeStepRequest(request);
  if (!step.ok()) return step.status();
  if (!request.has_expected()) return MissingField("expected", "a count or ids");
  auto expected = DecodeExpected(request.expected(), "expected", limits);
  if (!expected.ok()) return expected.status();
  return SealRequest{std::move(step->name), step->key, *std::move(expected), request.wait()};
}

absl::StatusOr<ApplyRequest> DecodeApply(const v1::ApplyOptimizerStepRequest& request, const Limits& limits) {
  auto step = DecodeStepRequest(request);
  if (!step.ok()) return step.status();
  ApplyRequest decoded{std::move(step->name), step->key, std::nullopt, {}};
  if (request.has_expected()) {
    auto expected = DecodeExpected(request.expected(), "expected", limits);
    if (!expected.ok()) return expected.status();
    decoded.expected = *std::move(expected);
  }
  heads::ApplyArguments& arguments = decoded.arguments;
  if (!request.has_learning_rate()) return MissingField("learning_rate", "a number >= 0 that is finite in float32");
  arguments.learning_rate = request.learning_rate();
  HEADWATER_RETURN_IF_ERROR(CheckNotNegative("learning_rate", arguments.learning_rate));
  arguments.gradient_factor = request.has_gradient_factor() ? request.gradient_factor() : 1;
  HEADWATER_RETURN_IF_ERROR(CheckFactor("gradient_factor", arguments.gradient_factor));
  // Without it, 0 and infinity say alike that nothing is clipped, as trainers' options have it.
  if (request.has_max_grad_norm() && request.max_grad_norm() != 0 &&
      request.max_grad_norm() != std::numeric_limits<double>::infinity()) {
    HEADWATER_RETURN_IF_ERROR(CheckNumber("max_grad_norm", request.max_grad_norm(), request.max_grad_norm() > 0,
                                          "a number > 0, or 0 or infinity for no clipping"));
    arguments.max_grad_norm = request.max_grad_norm();
  }
  arguments.other_grad_norm_squared = request.other_grad_norm_squared();
  HEADWATER_RETURN_IF_ERROR(CheckNumber("other_grad_norm_squared", arguments.other_grad_norm_squared,
                                        arguments.other_grad_norm_squared >= 0, "a finite number >= 0"));
  if (request.has_weight_decay()) {
    HEADWATER_RETURN_IF_ERROR(CheckNotNegative("weight_decay", request.weight_decay()));
    arguments.weight_decay = request.weight_decay();
  }
  if (request.has_beta1()) {
    HEADWATER_RETURN_IF_ERROR(CheckFraction("beta1", request.beta1(), false));
    arguments.beta1 = request.beta1();
  }
  if (request.has_beta2()) {
    HEADWATER_RETURN_IF_ERROR(CheckFraction("beta2", request.beta2(), false));
    arguments.beta2 = request.beta2();
  }
  if (request.has_epsilon()) {
    HEADWATER_RETURN_IF_ERROR(CheckNotNegative("epsilon", request.epsilon()));
    arguments.epsilon = request.epsilon();
  }
  if (request.has_momentum()) {
    HEADWATER_RETURN_IF_ERROR(CheckFraction("momentum", request.momentum(), false));
    arguments.momentum = request.momentum();
  }
  return decoded;
}

absl::StatusOr<StepRequest> DecodeDiscardGradient(const v1::DiscardGradientRequest& request) { return DecodeStepRequest(request); }

absl::StatusOr<StepRequest> DecodeGradientNorm(const v1::GetGradientNormRequest& request) {
  auto step = DecodeStepRequest(request);
  if (!step.ok()) return step;
  step->factor = request.has_gradient_factor() ? request.gradient_factor() : 1;
  HEADWATER_RETURN_IF_ERROR(CheckFactor("gradient_factor", step->factor));
  return step;
}

absl::StatusOr<CheckpointRequest> DecodeSave(const v1::SaveCheckpointRequest& request) {
  auto head = DecodeHeadAtOptionalEpoch(request.name(), request.epoch());
  if (!head.ok()) return head.status();
  HEADWATER_RETURN_IF_ERROR(CheckCheckpointName(request.checkpoint()));
  return CheckpointRequest{std::move(head->name), head->epoch, request.checkpoint(), request.overwrite()};
}

absl::StatusOr<ListCheckpointsRequest> DecodeListCheckpoints(const v1::ListCheckpointsRequest& request) {
  auto name = DecodeHeadName(request.name(), "name");
  if (!name.ok()) return name.status();
  auto page_size = DecodePageSize(request.page_size());
  if (!page_size.ok()) return page_size.status();
  ListCheckpointsRequest decoded{*std::move(name), std::nullopt, *page_size};
  if (request.page_token().empty()) return decoded;
  if (!checkpoint::IsValidCheckpointName(request.page_token())) return MadeUpPageToken(request.page_token());
  decoded.after = request.page_token();
  return decoded;
}

absl::StatusOr<CheckpointRequest> DecodeRestore(const v1::RestoreCheckpointRequest& request) {
  auto head = DecodeHeadAtRequiredEpoch(request.name(), request.epoch());
  if (!head.ok()) return head.status();
  HEADWATER_RETURN_IF_ERROR(CheckCheckpointName(request.checkpoint()));
  return CheckpointRequest{std::move(head->name), head->epoch, request.checkpoint(), false};
}

absl::StatusOr<CheckpointRequest> DecodeDeleteCheckpoint(const v1::DeleteCheckpointRequest& request) {
  auto name = DecodeHeadName(request.name(), "name");
  if (!name.ok()) return name.status();
  HEADWATER_RETURN_IF_ERROR(CheckCheckpointName(request.checkpoint()));
  return CheckpointRequest{*std::move(name), std::nullopt, request.checkpoint(), false};
}

absl::StatusOr<GradientRequest> DecodeAddGradientHeader(const v1::AddGradientHeader& header) {
  auto head = DecodeHeadStep(header.has_head(), header.head(), "header.head", /*step_required=*/true);
  if (!head.ok()) return head.status();
  GradientRequest decoded;
  decoded.name = std::move(head->head);
  decoded.key = {*head->epoch, *head->step};
  auto micro_batch = DecodeMicroBatchId(header.has_micro_batch(), header.micro_batch(), "header.micro_batch");
  if (!micro_batch.ok()) return micro_batch.status();
  decoded.micro_batch = *micro_batch;
  decoded.attempt = header.attempt();
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("header.attempt", decoded.attempt, 0));
  decoded.row_start = header.row_start();
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("header.row_start", decoded.row_start, 0));
  decoded.row_count = header.row_count();
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("header.row_count", decoded.row_count, 1));
  decoded.factor = header.has_factor() ? header.factor() : 1;
  HEADWATER_RETURN_IF_ERROR(CheckFactor("header.factor", decoded.factor));
  auto session = DecodeOptionalSession(header.session_id(), "header.session_id");
  if (!session.ok()) return session.status();
  decoded.session = *session;
  return decoded;
}

absl::StatusOr<OpenSessionRequest> DecodeOpenSession(const v1::OpenSessionRequest& request, const Limits& limits) {
  constexpr size_t kMaxClientNameBytes = 128;
  constexpr int64_t kMaxDurationSeconds = 315576000000;  // as google.protobuf.Duration allows
  constexpr absl::Duration kDefaultLease = absl::Seconds(30);
  if (request.client_name().size() > kMaxClientNameBytes) {
    return FieldError(ErrorReason::kInvalidField, "client_name", "at most 128 bytes",
                      absl::StrCat(request.client_name().size(), " bytes"));
  }
  OpenSessionRequest decoded = {request.client_name(), std::min(kDefaultLease, limits.max_session_lease)};
  if (!request.has_lease()) return decoded;
  HEADWATER_RETURN_IF_ERROR(CheckRange("lease.seconds", request.lease().seconds(), 0, kMaxDurationSeconds));
  HEADWATER_RETURN_IF_ERROR(CheckRange("lease.nanos", request.lease().nanos(), 0, 999999999));
  decoded.lease = absl::Seconds(request.lease().seconds()) + absl::Nanoseconds(request.lease().nanos());
  if (decoded.lease > absl::ZeroDuration()) return decoded;
  return FieldError(ErrorReason::kInvalidField, "lease", "a duration > 0", "0 s");
}

namespace {

absl::StatusOr<DeviceHandle> DecodeHandle(const std::string& bytes, const char* field) {
  DeviceHandle handle;
  if (bytes.size() != handle.size()) {
    return FieldError(ErrorReason::kInvalidField, field, absl::StrCat(handle.size(), " bytes"),
                      absl::StrCat(bytes.size(), " bytes"));
  }
  std::copy(bytes.begin(), bytes.end(), handle.begin());
  return handle;
}

absl::StatusOr<DeviceSource> DecodeDeviceSource(const v1::RegisterSharedMemoryRequest& request) {
  auto memory = DecodeHandle(request.cuda_ipc_handle(), "cuda_ipc_handle");
  if (!memory.ok()) return memory.status();
  DeviceSource source = {*memory, std::nullopt};
  if (request.cuda_event_handle().empty()) return source;
  auto event = DecodeHandle(request.cuda_event_handle(), "cuda_event_handle");
  if (!event.ok()) return event.status();
  source.event = *event;
  return source;
}

}  // namespace

absl::StatusOr<RegisterRequest> DecodeRegisterSharedMemory(const v1::RegisterSharedMemoryRequest& request) {
  RegisterRequest decoded;
  auto session = DecodeSession(request.session_id(), "session_id");
  if (!session.ok()) return session.status();
  decoded.session = *session;
  switch (request.source_case()) {
    case v1::RegisterSharedMemoryRequest::kDescriptorToken:
      if (request.descriptor_token().empty()) return MissingField("descriptor_token", "the token that the socket answered");
      decoded.source = DescriptorSource{request.descriptor_token()};
      break;
    case v1::RegisterSharedMemoryRequest::kSharedMemoryName:
      if (!transport::IsRegionName(request.shared_memory_name())) {
        return FieldError(ErrorReason::kInvalidName, "shared_memory_name", "`headwater-` and 1 to 200 of [A-Za-z0-9._-]",
                          Quoted(request.shared_memory_name()));
      }
      decoded.source = NamedSource{request.shared_memory_name()};
      break;
    case v1::RegisterSharedMemoryRequest::kCudaIpcHandle: {
      auto source = DecodeDeviceSource(request);
      if (!source.ok()) return source.status();
      decoded.source = *source;
      break;
    }
    case v1::RegisterSharedMemoryRequest::SOURCE_NOT_SET:
      return MissingField("source", "descriptor_token, shared_memory_name or cuda_ipc_handle");
  }
  const bool on_device = std::holds_alternative<DeviceSource>(decoded.source);
  if (!on_device && !request.cuda_event_handle().empty()) {
    return FieldError(ErrorReason::kInvalidCombination, "cuda_event_handle", "nothing without cuda_ipc_handle", "an event");
  }
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("size_bytes", request.size_bytes(), 1));
  HEADWATER_RETURN_IF_ERROR(CheckRange("offset_bytes", request.offset_bytes(), 0,
                                       on_device ? 0 : std::numeric_limits<int64_t>::max() - request.size_bytes()));
  decoded.size_bytes = request.size_bytes();
  decoded.offset_bytes = request.offset_bytes();
  return decoded;
}

absl::StatusOr<UnregisterRequest> DecodeUnregisterSharedMemory(const v1::UnregisterSharedMemoryRequest& request) {
  auto session = DecodeSession(request.session_id(), "session_id");
  if (!session.ok()) return session.status();
  if (request.region_id().empty()) return MissingField("region_id", "the id that RegisterSharedMemory answered");
  return UnregisterRequest{*session, request.region_id()};
}

}  // namespace headwater::service
