#include "server/service/request/head_request.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/util/time_util.h"
#include "headwater/kernels/error.h"
#include "proto/headwater/v1/spec_codec.h"
#include "server/service/request/field_check.h"
#include "server/transport/region_registry.h"

namespace headwater::service {
namespace {

using google::protobuf::util::TimeUtil;

HEADWATER_FIELDS(v1::StepTotals, heads::StepTotals, micro_batch_count, valid_token_count, loss_sum, token_weight_sum,
                 non_finite_row_count)
HEADWATER_FIELDS(v1::Step, heads::StepRecord, step, state)
HEADWATER_FIELDS(v1::VocabShard, VocabShard, vocab_start, vocab_end, device)
HEADWATER_FIELDS(v1::Head, heads::HeadInfo, state, weight_version, open_step, weight_checksum, restored_checkpoint)
HEADWATER_FIELDS(v1::Checkpoint, checkpoint::CheckpointInfo, step, total_bytes)

// Rounded up.
int64_t WholeSeconds(absl::Duration duration) { return absl::ToInt64Seconds(absl::Ceil(duration, absl::Seconds(1))); }

// Ranges are for Head::Apply().
HEADWATER_FIELDS(v1::ApplyOptimizerStepRequest, heads::ApplyArguments, learning_rate, gradient_factor, max_grad_norm,
                 other_grad_norm_squared, weight_decay, beta1, beta2, epsilon, momentum)

// Decodes a spec, and checks what ValidateHeadSpec() cannot: limits, and what only the message has.
absl::StatusOr<HeadSpec> DecodeSpec(const v1::HeadSpec& spec, const Limits& limits) {
  HEADWATER_RETURN_IF_ERROR(CheckLimit("spec.vocab_size", spec.vocab_size(), "max_vocab_size", limits.max_vocab_size));
  HEADWATER_RETURN_IF_ERROR(CheckLimit("spec.hidden_size", spec.hidden_size(), "max_hidden_size", limits.max_hidden_size));
  HEADWATER_RETURN_IF_ERROR(CheckLimit("spec.staging_slots", spec.staging_slots(), "max_staging_slots", limits.max_staging_slots));
  HEADWATER_RETURN_IF_ERROR(DecodeFloatType(spec.data_type(), "spec.data_type").status());
  if (spec.has_optimizer() && spec.optimizer().optimizer_case() == v1::OptimizerSpec::OPTIMIZER_NOT_SET) {
    return MissingField("spec.optimizer.optimizer", "adamw or sgd");
  }
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("spec.low_rank", spec.low_rank(), 0));
  if (spec.low_rank() != 0) return FeatureNotBuilt("spec.low_rank", "low_rank");
  HeadSpec decoded = DecodeHeadSpec(spec);
  HEADWATER_RETURN_IF_ERROR(ValidateHeadSpec(decoded, "spec."));
  return decoded;
}

absl::StatusOr<HeadTensor> DecodeTensorKind(v1::HeadTensor tensor, const std::string& field) {
  if (tensor == v1::HEAD_TENSOR_UNSPECIFIED) return MissingField(field, "WEIGHT or BIAS");
  if (v1::HeadTensor_IsValid(tensor)) return tensor == v1::HEAD_TENSOR_WEIGHT ? HeadTensor::kWeight : HeadTensor::kBias;
  return InvalidField(field, "WEIGHT or BIAS", absl::StrCat(static_cast<int>(tensor)));
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
        if (!distinct.insert(ids[i]).second) return InvalidField(id_field, "distinct ids", absl::StrCat(ids[i], " twice"));
      }
      return heads::ExpectedMicroBatches(std::vector<int64_t>(ids.begin(), ids.end()));
    }
    case v1::ExpectedMicroBatches::EXPECTATION_NOT_SET:
      break;
  }
  return MissingField(field, "a count or ids");
}

absl::StatusOr<int64_t> DecodePageSize(int32_t page_size) {
  constexpr int64_t kDefaultPageSize = 100;
  constexpr int64_t kMaxPageSize = 1000;
  HEADWATER_RETURN_IF_ERROR(CheckRange("page_size", page_size, 0, kMaxPageSize));
  return page_size == 0 ? kDefaultPageSize : page_size;
}

absl::Status MadeUpPageToken(const std::string& token) {
  return InvalidField("page_token", "the next_page_token of an earlier page", Quoted(token));
}

}  // namespace

absl::StatusOr<HeadAtEpoch> DecodeHeadAtEpoch(const std::string& name, const std::string& epoch, bool epoch_required) {
  HEADWATER_ASSIGN_OR_RETURN(HeadAtEpoch decoded, DecodeHead(name, "name", epoch, "epoch"));
  if (epoch_required && !decoded.epoch.has_value()) return MissingField("epoch", "the head's epoch, 16 bytes");
  return decoded;
}

absl::StatusOr<HeadAtEpoch> DecodeCheckpoint(const std::string& name, const std::string& epoch, bool epoch_required,
                                             const std::string& checkpoint) {
  HEADWATER_ASSIGN_OR_RETURN(auto head, DecodeHeadAtEpoch(name, epoch, epoch_required));
  if (checkpoint.empty()) return MissingField("checkpoint", "a name");
  if (checkpoint::IsValidCheckpointName(checkpoint)) return head;
  return FieldError(ErrorReason::kInvalidName, "checkpoint", "a name that matches [A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?",
                    Quoted(checkpoint));
}

absl::StatusOr<CreateRequest> DecodeCreate(const v1::CreateHeadRequest& request, const Limits& limits) {
  HEADWATER_ASSIGN_OR_RETURN(auto name, DecodeHeadName(request.name(), "name"));
  if (!request.has_spec()) return MissingField("spec", "what the head is");
  HEADWATER_ASSIGN_OR_RETURN(auto spec, DecodeSpec(request.spec(), limits));
  if (!v1::IfExists_IsValid(request.if_exists())) {
    return InvalidField("if_exists", "FAIL or ATTACH_IF_SAME_SPEC", absl::StrCat(static_cast<int>(request.if_exists())));
  }
  const bool attaches = request.if_exists() == v1::IF_EXISTS_ATTACH_IF_SAME_SPEC;
  return CreateRequest{std::move(name), std::move(spec), attaches ? heads::IfExists::kAttachIfSameSpec : heads::IfExists::kFail};
}

absl::StatusOr<ListRequest> DecodeList(const v1::ListHeadsRequest& request) {
  HEADWATER_ASSIGN_OR_RETURN(auto tenant, heads::ParseTenantName(request.parent(), "parent"));
  HEADWATER_ASSIGN_OR_RETURN(auto page_size, DecodePageSize(request.page_size()));
  if (!request.page_token().empty() && !heads::ParseHeadName(request.page_token(), "page_token").ok()) {
    return MadeUpPageToken(request.page_token());
  }
  return ListRequest{tenant, page_size};
}

absl::StatusOr<TakeRequest> DecodeTake(const v1::TakeHeadRequest& request) {
  HEADWATER_ASSIGN_OR_RETURN(auto head, DecodeHeadAtEpoch(request.name(), request.epoch()));
  TakeRequest decoded{std::move(head), {}};
  const auto& recovers = request.recovers_epochs();
  if (recovers.size() > kMaxRecoversEpochs) {
    return InvalidField("recovers_epochs", absl::StrCat("at most ", kMaxRecoversEpochs, " epochs"),
                        absl::StrCat(recovers.size(), " epochs"));
  }
  for (int i = 0; i < recovers.size(); ++i) {
    HEADWATER_ASSIGN_OR_RETURN(auto epoch, DecodeEpoch(recovers[i], absl::StrCat("recovers_epochs[", i, "]")));
    decoded.recovers_epochs.push_back(epoch);
  }
  return decoded;
}

absl::StatusOr<UploadRequest> DecodeUploadHeader(const v1::UploadWeightsHeader& header) {
  constexpr size_t kMaxUploadIdBytes = 64;
  UploadRequest decoded;
  HEADWATER_ASSIGN_OR_RETURN(decoded.name, DecodeHeadName(header.name(), "header.name"));
  HEADWATER_ASSIGN_OR_RETURN(decoded.epoch, DecodeEpoch(header.epoch(), "header.epoch"));
  decoded.upload_id = header.upload_id();
  if (decoded.upload_id.empty()) return MissingField("header.upload_id", "1 to 64 bytes");
  if (decoded.upload_id.size() > kMaxUploadIdBytes) {
    return InvalidField("header.upload_id", "1 to 64 bytes", absl::StrCat(decoded.upload_id.size(), " bytes"));
  }
  HEADWATER_ASSIGN_OR_RETURN(decoded.tensor, DecodeTensorKind(header.tensor(), "header.tensor"));
  HEADWATER_ASSIGN_OR_RETURN(decoded.data_type, DecodeFloatType(header.data_type(), "header.data_type"));
  HEADWATER_ASSIGN_OR_RETURN(decoded.total_bytes, AtLeast("header.total_bytes", header.total_bytes(), 1));
  decoded.checksum = header.checksum();
  if (!decoded.checksum.empty() && decoded.checksum.size() != 16) {
    return InvalidField("header.checksum", "16 bytes, or nothing", absl::StrCat(decoded.checksum.size(), " bytes"));
  }
  HEADWATER_ASSIGN_OR_RETURN(decoded.closes_step,
                             OptionalNumber("header.closes_step", header.has_closes_step(), header.closes_step()));
  return decoded;
}

absl::StatusOr<HeadAtEpoch> DecodeLoad(const v1::LoadWeightsRequest& request) {
  constexpr size_t kMaxTextBytes = 1024;
  HEADWATER_ASSIGN_OR_RETURN(auto head, DecodeHeadAtEpoch(request.name(), request.epoch(), /*epoch_required=*/true));
  if (request.path().empty()) return MissingField("path", "a file or folder under the server's load root");
  const std::pair<const char*, const std::string*> texts[] = {
      {"path", &request.path()}, {"weight_tensor", &request.weight_tensor()}, {"bias_tensor", &request.bias_tensor()}};
  for (const auto& [field, text] : texts) {
    if (text->size() > kMaxTextBytes) {
      return InvalidField(field, absl::StrCat("at most ", kMaxTextBytes, " bytes"), absl::StrCat(text->size(), " bytes"));
    }
    if (text->find('\0') != std::string::npos) return InvalidField(field, "text without a zero byte", Quoted(*text));
  }
  const std::vector<absl::string_view> folders = absl::StrSplit(request.path(), '/');
  const bool leaves_root = folders.front().empty() || absl::c_linear_search(folders, "..");
  if (leaves_root) return InvalidField("path", "a relative path without `..`", Quoted(request.path()));
  return head;
}

absl::StatusOr<DownloadWeightsRequest> DecodeDownloadWeights(const v1::DownloadWeightsRequest& request) {
  HEADWATER_ASSIGN_OR_RETURN(auto head, DecodeHeadAtEpoch(request.name(), request.epoch()));
  DownloadWeightsRequest decoded{std::move(head)};
  HEADWATER_ASSIGN_OR_RETURN(decoded.tensor, DecodeTensorKind(request.tensor(), "tensor"));
  if (request.data_type() != v1::DATA_TYPE_UNSPECIFIED) {
    HEADWATER_ASSIGN_OR_RETURN(decoded.data_type, DecodeFloatType(request.data_type(), "data_type"));
  }
  HEADWATER_ASSIGN_OR_RETURN(decoded.offset_bytes, AtLeast("offset_bytes", request.offset_bytes(), 0));
  HEADWATER_ASSIGN_OR_RETURN(
      decoded.expected_weight_version,
      OptionalNumber("expected_weight_version", request.has_expected_weight_version(), request.expected_weight_version()));
  return decoded;
}

absl::StatusOr<DownloadGradientRequest> DecodeDownloadGradient(const v1::DownloadGradientRequest& request) {
  HEADWATER_ASSIGN_OR_RETURN(auto step, DecodeHeadAtStep(request.has_head(), request.head(), "head"));
  HEADWATER_ASSIGN_OR_RETURN(auto tensor, DecodeTensorKind(request.tensor(), "tensor"));
  HEADWATER_ASSIGN_OR_RETURN(auto factor, FactorOrOne("gradient_factor", request.has_gradient_factor(), request.gradient_factor()));
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("offset_bytes", request.offset_bytes(), 0));
  return DownloadGradientRequest{std::move(step), tensor, factor, request.offset_bytes()};
}

absl::StatusOr<HeadAtEpoch> DecodeGetStep(const v1::GetStepRequest& request) {
  HEADWATER_ASSIGN_OR_RETURN(auto head, DecodeHeadStep(request.has_head(), request.head(), "head"));
  if (!head.epoch.has_value()) return MissingField("head.head_epoch", "the head's epoch, 16 bytes");
  return head;
}

absl::StatusOr<SealRequest> DecodeSeal(const v1::SealStepRequest& request, const Limits& limits) {
  HEADWATER_ASSIGN_OR_RETURN(auto step, DecodeHeadAtStep(request.has_head(), request.head(), "head"));
  if (!request.has_expected()) return MissingField("expected", "a count or ids");
  HEADWATER_ASSIGN_OR_RETURN(auto expected, DecodeExpected(request.expected(), "expected", limits));
  return SealRequest{std::move(step), std::move(expected)};
}

absl::StatusOr<ApplyRequest> DecodeApply(const v1::ApplyOptimizerStepRequest& request, const Limits& limits) {
  HEADWATER_ASSIGN_OR_RETURN(auto step, DecodeHeadAtStep(request.has_head(), request.head(), "head"));
  ApplyRequest decoded{std::move(step), std::nullopt, {}};
  if (request.has_expected()) {
    HEADWATER_ASSIGN_OR_RETURN(decoded.expected, DecodeExpected(request.expected(), "expected", limits));
  }
  if (!request.has_learning_rate()) return MissingField("learning_rate", "a number >= 0 that is finite in float32");
  ReadFields(request, decoded.arguments);
  // 0 and infinity say alike that nothing is clipped, as trainers' options have it.
  std::optional<double>& most = decoded.arguments.max_grad_norm;
  if (most == 0 || most == std::numeric_limits<double>::infinity()) most.reset();
  return decoded;
}

absl::StatusOr<GradientNormRequest> DecodeGradientNorm(const v1::GetGradientNormRequest& request) {
  HEADWATER_ASSIGN_OR_RETURN(auto step, DecodeHeadAtStep(request.has_head(), request.head(), "head"));
  HEADWATER_ASSIGN_OR_RETURN(auto factor, FactorOrOne("gradient_factor", request.has_gradient_factor(), request.gradient_factor()));
  return GradientNormRequest{std::move(step), factor};
}

absl::StatusOr<ListCheckpointsRequest> DecodeListCheckpoints(const v1::ListCheckpointsRequest& request) {
  HEADWATER_ASSIGN_OR_RETURN(auto name, DecodeHeadName(request.name(), "name"));
  HEADWATER_ASSIGN_OR_RETURN(auto page_size, DecodePageSize(request.page_size()));
  if (!request.page_token().empty() && !checkpoint::IsValidCheckpointName(request.page_token())) {
    return MadeUpPageToken(request.page_token());
  }
  return ListCheckpointsRequest{std::move(name), page_size};
}

absl::StatusOr<GradientRequest> DecodeAddGradientHeader(const v1::AddGradientHeader& header) {
  HEADWATER_ASSIGN_OR_RETURN(auto step, DecodeHeadAtStep(header.has_head(), header.head(), "header.head"));
  GradientRequest decoded{std::move(step)};
  HEADWATER_ASSIGN_OR_RETURN(decoded.micro_batch,
                             DecodeMicroBatchId(header.has_micro_batch(), header.micro_batch(), "header.micro_batch"));
  HEADWATER_ASSIGN_OR_RETURN(decoded.attempt, AtLeast("header.attempt", header.attempt(), 0));
  HEADWATER_ASSIGN_OR_RETURN(decoded.row_start, AtLeast("header.row_start", header.row_start(), 0));
  HEADWATER_ASSIGN_OR_RETURN(decoded.row_count, AtLeast("header.row_count", header.row_count(), 1));
  HEADWATER_ASSIGN_OR_RETURN(decoded.factor, FactorOrOne("header.factor", header.has_factor(), header.factor()));
  HEADWATER_ASSIGN_OR_RETURN(decoded.session, DecodeOptionalSession(header.session_id(), "header.session_id"));
  return decoded;
}

absl::StatusOr<absl::Duration> DecodeOpenSession(const v1::OpenSessionRequest& request, const Limits& limits) {
  constexpr size_t kMaxClientNameBytes = 128;
  constexpr int64_t kMaxDurationSeconds = 315576000000;  // as google.protobuf.Duration allows
  constexpr absl::Duration kDefaultLease = absl::Seconds(30);
  if (request.client_name().size() > kMaxClientNameBytes) {
    return InvalidField("client_name", "at most 128 bytes", absl::StrCat(request.client_name().size(), " bytes"));
  }
  if (!request.has_lease()) return std::min(kDefaultLease, limits.max_session_lease);
  HEADWATER_RETURN_IF_ERROR(CheckRange("lease.seconds", request.lease().seconds(), 0, kMaxDurationSeconds));
  HEADWATER_RETURN_IF_ERROR(CheckRange("lease.nanos", request.lease().nanos(), 0, 999999999));
  const absl::Duration lease = absl::Seconds(request.lease().seconds()) + absl::Nanoseconds(request.lease().nanos());
  if (lease > absl::ZeroDuration()) return lease;
  return InvalidField("lease", "a duration > 0", "0 s");
}

namespace {

absl::StatusOr<DeviceHandle> DecodeHandle(const std::string& bytes, const char* field) {
  DeviceHandle handle;
  if (bytes.size() != handle.size()) {
    return InvalidField(field, absl::StrCat(handle.size(), " bytes"), absl::StrCat(bytes.size(), " bytes"));
  }
  std::copy(bytes.begin(), bytes.end(), handle.begin());
  return handle;
}

}  // namespace

absl::StatusOr<RegisterRequest> DecodeRegisterSharedMemory(const v1::RegisterSharedMemoryRequest& request) {
  RegisterRequest decoded;
  HEADWATER_ASSIGN_OR_RETURN(decoded.session, DecodeSession(request.session_id(), "session_id"));
  switch (request.source_case()) {
    case v1::RegisterSharedMemoryRequest::kDescriptorToken:
      if (request.descriptor_token().empty()) return MissingField("descriptor_token", "the token that the socket answered");
      break;
    case v1::RegisterSharedMemoryRequest::kSharedMemoryName:
      if (!transport::IsRegionName(request.shared_memory_name())) {
        return FieldError(ErrorReason::kInvalidName, "shared_memory_name", "`headwater-` and 1 to 200 of [A-Za-z0-9._-]",
                          Quoted(request.shared_memory_name()));
      }
      break;
    case v1::RegisterSharedMemoryRequest::kCudaIpcHandle: {
      HEADWATER_ASSIGN_OR_RETURN(decoded.device, DecodeHandle(request.cuda_ipc_handle(), "cuda_ipc_handle"));
      break;
    }
    case v1::RegisterSharedMemoryRequest::SOURCE_NOT_SET:
      return MissingField("source", "descriptor_token, shared_memory_name or cuda_ipc_handle");
  }
  const bool on_device = decoded.device.has_value();
  if (!request.cuda_event_handle().empty()) {
    if (!on_device) return InvalidCombination("cuda_event_handle", "nothing without cuda_ipc_handle", "an event");
    HEADWATER_ASSIGN_OR_RETURN(decoded.event, DecodeHandle(request.cuda_event_handle(), "cuda_event_handle"));
  }
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("size_bytes", request.size_bytes(), 1));
  HEADWATER_RETURN_IF_ERROR(CheckRange("offset_bytes", request.offset_bytes(), 0,
                                       on_device ? 0 : std::numeric_limits<int64_t>::max() - request.size_bytes()));
  decoded.size_bytes = request.size_bytes();
  decoded.offset_bytes = request.offset_bytes();
  return decoded;
}

absl::StatusOr<heads::SessionId> DecodeUnregisterSharedMemory(const v1::UnregisterSharedMemoryRequest& request) {
  HEADWATER_ASSIGN_OR_RETURN(auto session, DecodeSession(request.session_id(), "session_id"));
  if (request.region_id().empty()) return MissingField("region_id", "the id that RegisterSharedMemory answered");
  return session;
}

void EncodeDuration(absl::Duration duration, google::protobuf::Duration* out) {
  // A clock that was set back must not give a negative duration.
  *out = TimeUtil::NanosecondsToDuration(absl::ToInt64Nanoseconds(std::max(duration, absl::ZeroDuration())));
}

void EncodeTime(absl::Time time, google::protobuf::Timestamp* out) {
  *out = TimeUtil::NanosecondsToTimestamp(absl::ToUnixNanos(time));
}

void EncodePlan(const MemoryPlan& plan, int64_t available_bytes, v1::MemoryPlan* out) {
  std::vector<MemoryPlan::Item> items = plan.items;
  std::stable_sort(items.begin(), items.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  for (const MemoryPlan::Item& item : items) {
    v1::MemoryItem* const encoded = out->add_items();
    encoded->set_purpose(item.purpose);
    encoded->set_total_bytes(item.bytes);
  }
  out->set_total_bytes(plan.total_bytes);
  out->set_available_bytes(available_bytes);
  out->set_token_chunk_rows(plan.token_chunk_rows);
}

void EncodeShards(const std::vector<VocabShard>& shards, v1::Head* out) {
  for (const VocabShard& shard : shards) WriteFields(shard, *out->add_shards());
}

void EncodeHead(const heads::HeadInfo& info, int64_t available_bytes, v1::Head* out) {
  out->set_name(info.name.ToString());
  EncodeHeadSpec(info.spec, out->mutable_spec());
  out->set_epoch(info.epoch.data(), info.epoch.size());
  for (const heads::Epoch& epoch : info.recovers_epochs) out->add_recovers_epochs(epoch.data(), epoch.size());
  WriteFields(info, *out);
  EncodeShards(info.shards, out);
  EncodePlan(info.plan, available_bytes, out->mutable_memory_plan());
  EncodeTime(info.create_time, out->mutable_create_time());
}

std::vector<v1::Checkpoint> EncodeCheckpoints(const checkpoint::CheckpointStore::Catalogue& catalogue) {
  std::vector<v1::Checkpoint> checkpoints;
  for (const checkpoint::CheckpointInfo& info : catalogue.newest_first) {
    v1::Checkpoint& checkpoint = checkpoints.emplace_back();
    checkpoint.set_checkpoint(info.name);
    WriteFields(info, checkpoint);
    if (info.save_time_s > 0) checkpoint.mutable_save_time()->set_seconds(info.save_time_s);
  }
  for (const std::string& name : catalogue.damaged) {
    v1::Checkpoint& checkpoint = checkpoints.emplace_back();
    checkpoint.set_checkpoint(name);
    checkpoint.set_damaged(true);
  }
  return checkpoints;
}

void EncodeTotals(const heads::StepTotals& totals, v1::StepTotals* out) { WriteFields(totals, *out); }

void EncodeStep(const heads::StepRecord& record, v1::Step* out) {
  WriteFields(record, *out);
  for (const auto& [id, micro_batch] : record.micro_batches) {
    v1::MicroBatchState* const encoded = out->add_micro_batches();
    encoded->set_micro_batch(id);
    // If only an attempt's announcement is there, that attempt.
    encoded->set_attempt(micro_batch.state == heads::ContributionState::kNone ? micro_batch.fence_attempt : micro_batch.attempt);
    encoded->set_state(static_cast<v1::ContributionState>(micro_batch.state));
    if (micro_batch.digest.has_value()) encoded->set_digest(micro_batch.digest->data(), micro_batch.digest->size());
    encoded->set_valid_token_count(micro_batch.counts.valid_token_count);
    encoded->set_factor(micro_batch.factor.factor);
    encoded->set_form(static_cast<v1::ContributionForm>(micro_batch.form));
  }
  EncodeTotals(record.Totals(), out->mutable_totals());
}

void EncodeLimits(const Limits& limits, v1::Limits* out) {
#define HEADWATER_ENCODE_Count(name) out->set_##name(limits.name);
#define HEADWATER_ENCODE_Bytes(name) out->set_##name(limits.name);
#define HEADWATER_ENCODE_Time(name) out->set_##name##_s(WholeSeconds(limits.name));
#define HEADWATER_ENCODE_LIMIT(unit, name, ...) HEADWATER_ENCODE_##unit(name)
  HEADWATER_LIMITS(HEADWATER_ENCODE_LIMIT)
#undef HEADWATER_ENCODE_LIMIT
#undef HEADWATER_ENCODE_Count
#undef HEADWATER_ENCODE_Bytes
#undef HEADWATER_ENCODE_Time
}

}  // namespace headwater::service
