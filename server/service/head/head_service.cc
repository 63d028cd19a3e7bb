// gRPC handlers of headwater.v1.HeadService.
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/digest.h"
#include "headwater/v1/head_service.grpc.pb.h"
#include "proto/headwater/v1/spec_codec.h"
#include "server/checkpoint/weights_reader.h"
#include "server/group/group_engine.h"
#include "server/observability/logging.h"
#include "server/scheduler/waiting.h"
#include "server/service/call/stream_io.h"
#include "server/service/head/upload_store.h"
#include "server/service/request/canonical_header.h"
#include "server/service/request/field_check.h"
#include "server/service/request/head_request.h"
#include "server/service/services.h"
#include "server/transport/byte_budget.h"

namespace headwater::service {
namespace {

using observability::Log;
using observability::LogLevel;
using observability::RpcMethod;

HEADWATER_FIELDS(v1::ApplyOptimizerStepResponse, heads::ApplyReply, open_step, weight_version, global_grad_norm,
                 gradient_norm_squared, clip_factor, replayed)

// Finds the head that a decoded request names, and names it in the log. For what is answered at once.
absl::StatusOr<std::shared_ptr<heads::Head>> FindHead(RpcScope& scope, const heads::HeadName& name) {
  scope.set_head(name.ToString());
  return scope.caller().Find(scope.core().registry, name);
}

// FindHead() for a request that works on the head, which is the call's first.
absl::StatusOr<heads::Head*> UseHead(RpcScope& scope, const heads::HeadName& name) {
  if (scope.heads().empty()) {
    HEADWATER_ASSIGN_OR_RETURN(auto head, FindHead(scope, name));
    scope.heads().emplace_back(std::move(head));
  }
  return &*scope.heads().front();
}

// UseHead() for a request about a step of the head: waits if that step is the next one.
template <typename Request>
absl::StatusOr<heads::Head*> UseHeadAtStep(RpcScope& scope, const Request& request) {
  auto head = UseHead(scope, request.name);
  if (!head.ok()) return head;
  HEADWATER_RETURN_IF_ERROR((*head)->AwaitStep(request.key, scope.wait_limits()));
  return head;
}

// Bounds of a seal's wait for micro-batches: it ends early enough for the answer to name the missing ones.
scheduler::WaitLimits SealWait(RpcScope& scope) {
  scheduler::WaitLimits wait = scope.wait_limits().ForStep();
  wait.deadline = std::min(wait.deadline, scheduler::WaitEnd(scope.start_time(), scope.wait_limits().deadline));
  return wait;
}

absl::Status StorageNotConfigured(const char* flag) {
  return MakeError(ErrorReason::kStorageNotConfigured,
                   std::string("expected a server that was started with --") + flag + ", got one without",
                   {{"expected", std::string("--") + flag}, {"actual", "not set"}});
}

// ---- handlers, one for each call --------------------------------------------------------------------------------------

absl::Status CreateHead(RpcScope& scope, const v1::CreateHeadRequest& request, v1::CreateHeadResponse* response) {
  HEADWATER_ASSIGN_OR_RETURN(auto create, DecodeCreate(request, scope.core().options.limits));
  scope.set_head(create.name.ToString());
  HEADWATER_RETURN_IF_ERROR(scope.caller().CheckTenant(create.name.tenant));
  HEADWATER_RETURN_IF_ERROR(scope.caller().CheckHead(create.name));
  if (request.validate_only()) {
    HEADWATER_ASSIGN_OR_RETURN(auto plan, scope.core().engine->PlanHead(create.spec));
    response->mutable_head()->set_name(create.name.ToString());
    EncodeHeadSpec(create.spec, response->mutable_head()->mutable_spec());
    EncodePlan(plan, scope.core().AvailableBytes(), response->mutable_head()->mutable_memory_plan());
    EncodeShards(group::PlanShards(*scope.core().engine, create.spec.vocab_size), response->mutable_head());
    return absl::OkStatus();
  }
  HEADWATER_ASSIGN_OR_RETURN(auto made, scope.core().registry.Create(create.name, create.spec, create.if_exists,
                                                                     scope.core().checkpoints.get(), scope.wait_limits()));
  EncodeHead(made.head->Describe(), scope.core().AvailableBytes(), response->mutable_head());
  response->set_created(made.created);
  return absl::OkStatus();
}

absl::Status GetHead(RpcScope& scope, const v1::GetHeadRequest& request, v1::Head* response) {
  HEADWATER_ASSIGN_OR_RETURN(auto name, DecodeHeadName(request.name(), "name"));
  HEADWATER_ASSIGN_OR_RETURN(auto head, FindHead(scope, name));
  EncodeHead(head->Describe(), scope.core().AvailableBytes(), response);
  return absl::OkStatus();
}

absl::Status ListHeads(RpcScope& scope, const v1::ListHeadsRequest& request, v1::ListHeadsResponse* response) {
  HEADWATER_ASSIGN_OR_RETURN(auto list, DecodeList(request));
  const std::string tenant = request.parent().empty() ? scope.caller().tenant() : list.tenant;
  HEADWATER_RETURN_IF_ERROR(scope.caller().CheckTenant(tenant));
  auto heads = scope.core().registry.List(tenant, request.page_token(), scope.core().options.limits.max_heads);
  std::erase_if(heads, [&scope](const auto& head) { return !scope.caller().CheckHead(head->name()).ok(); });
  const size_t count = std::min(heads.size(), static_cast<size_t>(list.page_size));
  for (size_t i = 0; i < count; ++i) EncodeHead(heads[i]->Describe(), scope.core().AvailableBytes(), response->add_heads());
  if (heads.size() > count) response->set_next_page_token(heads[count - 1]->name().ToString());
  return absl::OkStatus();
}

absl::Status DeleteHead(RpcScope& scope, const v1::DeleteHeadRequest& request, v1::DeleteHeadResponse*) {
  HEADWATER_ASSIGN_OR_RETURN(auto head, DecodeHeadAtEpoch(request.name(), request.epoch()));
  scope.set_head(head.name.ToString());
  HEADWATER_RETURN_IF_ERROR(scope.caller().CheckHead(head.name));
  const absl::Status deleted = scope.core().registry.Delete(head.name, head.epoch, request.force(), scope.core().checkpoints.get());
  scope.core().queue.WakeAll();  // a micro-batch of the head waits for its rows no longer
  return deleted;
}

absl::Status TakeHead(RpcScope& scope, const v1::TakeHeadRequest& request, v1::Head* response) {
  HEADWATER_ASSIGN_OR_RETURN(auto take, DecodeTake(request));
  HEADWATER_ASSIGN_OR_RETURN(auto head, UseHead(scope, take.name));
  HEADWATER_ASSIGN_OR_RETURN(auto taken, head->Take(take.epoch, std::move(take.recovers_epochs), scope.wait_limits()));
  EncodeHead(taken, scope.core().AvailableBytes(), response);
  return absl::OkStatus();
}

// Whether the head has the tensor, and moves it in that type. `prefix`: of the fields' paths.
absl::Status CheckTensor(const HeadSpec& spec, HeadTensor tensor, DataType data_type, const std::string& prefix) {
  if (tensor == HeadTensor::kBias && !spec.has_bias) {
    return InvalidCombination(prefix + "tensor", "WEIGHT, because the head has no bias", "BIAS");
  }
  if (data_type == spec.data_type || data_type == DataType::kFloat32) return absl::OkStatus();
  return FieldError(ErrorReason::kDataTypeMismatch, prefix + "data_type",
                    absl::StrCat("float32 or the storage type ", DataTypeName(spec.data_type)), DataTypeName(data_type));
}

// The errors of Replace() that do not depend on the bytes.
absl::Status CheckClosesStep(RpcScope& scope, heads::Head& head, const UploadRequest& request) {
  if (!request.closes_step.has_value()) return absl::OkStatus();
  const heads::StepKey key = {request.epoch, *request.closes_step};
  HEADWATER_RETURN_IF_ERROR(head.AwaitStep(key, scope.wait_limits()));
  HEADWATER_ASSIGN_OR_RETURN(const auto steps, head.GetSteps(request.epoch));
  const auto& [open, last_closed] = steps;
  if (key.step == open.step) {
    if (open.state == heads::StepState::kSealed) return absl::OkStatus();
    return MakeError(ErrorReason::kStepNotSealed,
                     absl::StrCat("header.closes_step: expected a step that is sealed, got step ", key.step, ", which is open"),
                     {{"field", "header.closes_step"}, {"expected", "a sealed step"}, {"actual", absl::StrCat(key.step)}});
  }
  if (last_closed.has_value() && key.step == last_closed->step) return absl::OkStatus();  // a repeat, perhaps
  return MakeError(ErrorReason::kStepMismatch,
                   absl::StrCat("header.closes_step: expected the step ", open.step, " that is open or sealed, got ", key.step),
                   {{"field", "header.closes_step"},
                    {"expected", absl::StrCat(open.step)},
                    {"actual", absl::StrCat(key.step)},
                    {"openStep", absl::StrCat(open.step)}});
}

// Finds the head of an upload, and checks the header against it.
absl::StatusOr<heads::Head*> UseUploadHead(RpcScope& scope, const UploadRequest& request) {
  scope.set_head(request.name.ToString());
  const bool outside = !request.closes_step.has_value();
  HEADWATER_RETURN_IF_ERROR(scope.caller().CheckHead(request.name, outside ? kUploadOutsideStep : Permission::kCompute));
  HEADWATER_ASSIGN_OR_RETURN(auto found, scope.core().registry.Find(request.name));
  heads::Head& head = *scope.heads().emplace_back(std::move(found));
  HEADWATER_RETURN_IF_ERROR(head.CheckEpoch(request.epoch));
  const HeadSpec& spec = head.spec();
  HEADWATER_RETURN_IF_ERROR(CheckTensor(spec, request.tensor, request.data_type, "header."));
  const bool bias = request.tensor == HeadTensor::kBias;
  const int64_t expected_bytes = spec.vocab_size * (bias ? 1 : spec.hidden_size) * ElementBytes(request.data_type);
  if (request.total_bytes != expected_bytes) {
    return FieldError(ErrorReason::kDataLengthMismatch, "header.total_bytes", absl::StrCat(expected_bytes),
                      absl::StrCat(request.total_bytes));
  }
  HEADWATER_RETURN_IF_ERROR(CheckClosesStep(scope, head, request));
  return &head;
}

// Sets the tensor, or puts it into the head's shadow. Returns the head as it is then: of the epoch that this made, or kept.
absl::StatusOr<heads::HeadInfo> UseTensor(RpcScope& scope, heads::Head& head, const UploadRequest& request,
                                          std::shared_ptr<const uint8_t> bytes) {
  if (!request.closes_step.has_value()) {
    return head.SetTensor(request.epoch, request.tensor, request.data_type, bytes.get(), request.total_bytes, scope.wait_limits());
  }
  const heads::ShadowTensor shadow = {request.tensor, request.data_type, std::move(bytes), request.total_bytes};
  HEADWATER_ASSIGN_OR_RETURN(auto replaced, head.Replace({request.epoch, *request.closes_step}, shadow, scope.wait_limits()));
  if (replaced.closed && !replaced.replayed) {
    scope.core().metrics.Count(observability::Metric::kSteps, 1, observability::StepOutcome::kReplaced);
  }
  return std::move(replaced.head);
}

// The first answer is the offset to continue from, the second the head. An incomplete upload stays, for resuming.
absl::Status UploadWeights(RpcScope& scope, grpc::ServerReaderWriter<v1::UploadWeightsResponse, v1::UploadWeightsRequest>& stream) {
  MessageReader<v1::UploadWeightsRequest> messages(scope, stream);
  HEADWATER_ASSIGN_OR_RETURN(const v1::UploadWeightsHeader header, messages.ReadHeader());
  HEADWATER_ASSIGN_OR_RETURN(const UploadRequest request, DecodeUploadHeader(header));
  HEADWATER_ASSIGN_OR_RETURN(heads::Head* const head, UseUploadHead(scope, request));
  HEADWATER_ASSIGN_OR_RETURN(UploadStore::Lease upload, scope.core().uploads.Open(scope.heads().front().head(), request));
  v1::UploadWeightsResponse response;
  response.set_resume_offset_bytes(upload.received_bytes());
  if (!stream.Write(response)) return scope.CancelledError();
  HEADWATER_RETURN_IF_ERROR(messages.ReadChunks([&](const v1::ByteChunk& chunk) -> absl::Status {
    HEADWATER_RETURN_IF_ERROR(CheckByteChunk(scope.core(), chunk));
    return upload.Append(chunk.offset_bytes(), chunk.data());
  }));
  HEADWATER_ASSIGN_OR_RETURN(auto bytes, upload.Complete());
  const absl::StatusOr<heads::HeadInfo> info = UseTensor(scope, *head, request, std::move(bytes));
  // Errors that the client, or time, can put right: the upload can be used again without sending a byte. Any other error uses it
  // up. kQueueFull and kDeadlineExceeded end the wait for the head.
  constexpr ErrorReason kRepeatable[] = {ErrorReason::kEpochFenced, ErrorReason::kStepNotSealed,    ErrorReason::kQueueFull,
                                         ErrorReason::kCancelled,   ErrorReason::kDeadlineExceeded, ErrorReason::kShardNotReady};
  if (info.ok() || !absl::c_linear_search(kRepeatable, GetErrorReason(info.status()))) upload.Drop();
  HEADWATER_RETURN_IF_ERROR(info.status());
  EncodeHead(*info, scope.core().AvailableBytes(), response.mutable_head());
  return stream.Write(response) ? absl::OkStatus() : scope.CancelledError();
}

absl::Status LoadWeights(RpcScope& scope, const v1::LoadWeightsRequest& request, v1::Head* response) {
  HEADWATER_ASSIGN_OR_RETURN(auto load, DecodeLoad(request));
  HEADWATER_ASSIGN_OR_RETURN(auto head, UseHead(scope, load.name));
  HEADWATER_RETURN_IF_ERROR(head->CheckEpoch(*load.epoch));
  if (scope.core().options.load_root.empty()) return StorageNotConfigured("load_root");
  HEADWATER_ASSIGN_OR_RETURN(
      auto reader, checkpoint::WeightsReader::Open(scope.core().options.load_root, request.path(), request.weight_tensor(),
                                                   request.bias_tensor(), head->spec()));
  std::vector<heads::TensorUpdate> updates;
  for (const HeadTensor tensor : {HeadTensor::kWeight, HeadTensor::kBias}) {
    if (tensor == HeadTensor::kBias && !reader->has_bias()) continue;
    updates.push_back(
        {tensor, reader->data_type(tensor), [&reader, tensor](int64_t element_start, int64_t element_count, void* out) {
           return reader->Read(tensor, element_start, element_count, out);
         }});
  }
  // The thread waits for the head: a second try would read the file through again.
  HEADWATER_ASSIGN_OR_RETURN(auto loaded, head->SetTensors(*load.epoch, updates, scope.thread_limits()));
  EncodeHead(loaded, scope.core().AvailableBytes(), response);
  return absl::OkStatus();
}

// One download: its header, and where the elements come from.
struct TensorStream {
  v1::DownloadTensorHeader header;
  DataType data_type = DataType::kFloat32;
  int64_t offset_bytes = 0;  // where to begin
  // Writes elements [element_start, element_start + element_count) to `out`.
  std::function<absl::Status(int64_t element_start, int64_t element_count, void* out)> read;
};

// Fills in the header of a tensor of `head`, except its version; `data_type` is set.
absl::Status Describe(const heads::Head& head, HeadTensor tensor, int64_t offset_bytes, TensorStream* stream) {
  const HeadSpec& spec = head.spec();
  HEADWATER_RETURN_IF_ERROR(CheckTensor(spec, tensor, stream->data_type, ""));
  v1::DownloadTensorHeader& header = stream->header;
  header.set_data_type(static_cast<v1::DataType>(stream->data_type));
  header.add_shape(spec.vocab_size);
  if (tensor == HeadTensor::kWeight) header.add_shape(spec.hidden_size);
  const int64_t element_bytes = ElementBytes(stream->data_type);
  header.set_total_bytes(spec.vocab_size * (tensor == HeadTensor::kWeight ? spec.hidden_size : 1) * element_bytes);
  stream->offset_bytes = offset_bytes;
  HEADWATER_RETURN_IF_ERROR(CheckRange("offset_bytes", offset_bytes, 0, header.total_bytes()));
  if (offset_bytes % element_bytes == 0) return absl::OkStatus();
  return InvalidField("offset_bytes", absl::StrCat("a multiple of ", element_bytes), absl::StrCat(offset_bytes));
}

// Sends the header, then chunks in order.
absl::Status SendTensor(RpcScope& scope, const TensorStream& stream, grpc::ServerWriter<v1::DownloadTensorResponse>& responses) {
  constexpr int64_t kChunkBytes = 1 << 20;
  ServerCore& core = scope.core();
  ClientWatch watch(scope);
  const auto write = [&](const v1::DownloadTensorResponse& message) {
    return Watched(watch, [&] { return responses.Write(message); });
  };
  const absl::Status gone = MakeError(ErrorReason::kCancelled, "the client cancelled the download, or went away");
  const int64_t element_bytes = ElementBytes(stream.data_type);
  const int64_t chunk_elements = std::max<int64_t>(1, std::min(kChunkBytes, core.options.limits.max_chunk_bytes) / element_bytes);
  const int64_t element_count = stream.header.total_bytes() / element_bytes;
  v1::DownloadTensorResponse response;
  bool header_sent = false;
  int64_t element = stream.offset_bytes / element_bytes;
  do {
    // The first read comes before the header, so that an error is not preceded by anything.
    const int64_t count = std::min(chunk_elements, element_count - element);
    std::string data(static_cast<size_t>(count * element_bytes), '\0');
    HEADWATER_RETURN_IF_ERROR(stream.read(element, count, data.data()));
    if (!header_sent) {
      *response.mutable_header() = stream.header;
      if (!write(response)) return gone;
      header_sent = true;
    }
    if (count == 0) break;
    response.mutable_chunk()->set_offset_bytes(element * element_bytes);
    response.mutable_chunk()->set_data(std::move(data));
    core.metrics.Count(observability::Metric::kBytes, count * element_bytes, observability::Direction::kOut);
    if (!write(response)) return gone;
    element += count;
  } while (element < element_count);
  return absl::OkStatus();
}

absl::Status DownloadWeights(RpcScope& scope, const v1::DownloadWeightsRequest& message,
                             grpc::ServerWriter<v1::DownloadTensorResponse>* writer) {
  HEADWATER_ASSIGN_OR_RETURN(const auto request, DecodeDownloadWeights(message));
  HEADWATER_ASSIGN_OR_RETURN(heads::Head* const head, UseHead(scope, request.name));
  const HeadSpec& spec = head->spec();
  TensorStream stream;
  stream.data_type = request.data_type.value_or(spec.data_type);
  HEADWATER_RETURN_IF_ERROR(Describe(*head, request.tensor, request.offset_bytes, &stream));
  const heads::HeadInfo info = head->Describe();
  if (info.state == heads::HeadState::kLoading) {
    return MakeError(ErrorReason::kWeightsNotLoaded, absl::StrCat(info.name.ToString(), ": expected weights, got none yet"),
                     {{"head", info.name.ToString()}});
  }
  stream.header.set_weight_version(info.weight_version);
  HeadTensor tensor = request.tensor;
  if (stream.data_type != spec.data_type) {
    tensor = tensor == HeadTensor::kBias ? HeadTensor::kMasterBias : HeadTensor::kMasterWeight;
  }
  // The first chunk checks the version and the epoch that the client expects; all of them that the weights do not change on the
  // way.
  const int64_t version = request.expected_weight_version.value_or(info.weight_version);
  stream.read = [&, tensor, version](int64_t element_start, int64_t element_count, void* out) {
    return head->ReadWeights(tensor, element_start, element_count, out, version, request.epoch, scope.wait_limits());
  };
  return SendTensor(scope, stream, *writer);
}

absl::Status DownloadGradient(RpcScope& scope, const v1::DownloadGradientRequest& message,
                              grpc::ServerWriter<v1::DownloadTensorResponse>* writer) {
  HEADWATER_ASSIGN_OR_RETURN(const auto request, DecodeDownloadGradient(message));
  HEADWATER_ASSIGN_OR_RETURN(heads::Head* const head, UseHeadAtStep(scope, request));
  TensorStream stream;
  HEADWATER_RETURN_IF_ERROR(head->CheckEpoch(request.key.epoch));
  HEADWATER_RETURN_IF_ERROR(Describe(*head, request.tensor, request.offset_bytes, &stream));
  stream.header.set_weight_version(head->Describe().weight_version);
  const HeadTensor gradient = request.tensor == HeadTensor::kWeight ? HeadTensor::kGradWeight : HeadTensor::kGradBias;
  stream.read = [&](int64_t element_start, int64_t element_count, void* out) {
    float* const values = static_cast<float*>(out);
    HEADWATER_RETURN_IF_ERROR(head->ReadGradient(request.key, gradient, element_start, element_count, values, scope.wait_limits()));
    if (request.factor != 1) {
      // In fp64 and rounded once: what the optimizer would see.
      for (int64_t i = 0; i < element_count; ++i) values[i] = static_cast<float>(request.factor * static_cast<double>(values[i]));
    }
    return absl::OkStatus();
  };
  return SendTensor(scope, stream, *writer);
}

absl::Status GetStep(RpcScope& scope, const v1::GetStepRequest& request, v1::GetStepResponse* response) {
  HEADWATER_ASSIGN_OR_RETURN(auto decoded, DecodeGetStep(request));
  HEADWATER_ASSIGN_OR_RETURN(auto head, FindHead(scope, decoded.name));
  HEADWATER_ASSIGN_OR_RETURN(auto steps, head->GetSteps(*decoded.epoch));
  EncodeStep(steps.first, response->mutable_open());
  if (steps.second.has_value()) EncodeStep(*steps.second, response->mutable_last_closed());
  return absl::OkStatus();
}

absl::Status SealStep(RpcScope& scope, const v1::SealStepRequest& request, v1::SealStepResponse* response) {
  HEADWATER_ASSIGN_OR_RETURN(auto seal, DecodeSeal(request, scope.core().options.limits));
  HEADWATER_ASSIGN_OR_RETURN(auto head, UseHeadAtStep(scope, seal));
  HEADWATER_ASSIGN_OR_RETURN(
      auto reply,
      head->Seal(seal.key, seal.expected, request.wait() ? SealWait(scope) : scheduler::WaitLimits(), scope.wait_limits()));
  EncodeTotals(reply.totals, response->mutable_totals());
  response->set_gradient_norm_squared(reply.stats.norm_squared);
  response->set_non_finite_count(reply.stats.non_finite_count);
  response->set_replayed(reply.replayed);
  return absl::OkStatus();
}

absl::Status ApplyOptimizerStep(RpcScope& scope, const v1::ApplyOptimizerStepRequest& request,
                                v1::ApplyOptimizerStepResponse* response) {
  HEADWATER_ASSIGN_OR_RETURN(auto apply, DecodeApply(request, scope.core().options.limits));
  HEADWATER_ASSIGN_OR_RETURN(auto head, UseHeadAtStep(scope, apply));
  HEADWATER_ASSIGN_OR_RETURN(auto reply, head->Apply(apply.key, apply.expected, apply.arguments, scope.wait_limits()));
  if (!reply.replayed) scope.core().metrics.Count(observability::Metric::kSteps, 1, observability::StepOutcome::kApplied);
  WriteFields(reply, *response);
  EncodeTotals(reply.totals, response->mutable_totals());
  return absl::OkStatus();
}

absl::Status DiscardGradient(RpcScope& scope, const v1::DiscardGradientRequest& request, v1::DiscardGradientResponse* response) {
  HEADWATER_ASSIGN_OR_RETURN(auto step, DecodeHeadAtStep(request.has_head(), request.head(), "head"));
  HEADWATER_ASSIGN_OR_RETURN(auto head, UseHeadAtStep(scope, step));
  HEADWATER_ASSIGN_OR_RETURN(auto reply, head->DiscardGradient(step.key, scope.wait_limits()));
  if (!reply.second) scope.core().metrics.Count(observability::Metric::kSteps, 1, observability::StepOutcome::kDiscarded);
  response->set_open_step(reply.first);
  response->set_replayed(reply.second);
  return absl::OkStatus();
}

absl::Status GetGradientNorm(RpcScope& scope, const v1::GetGradientNormRequest& request, v1::GetGradientNormResponse* response) {
  HEADWATER_ASSIGN_OR_RETURN(auto step, DecodeGradientNorm(request));
  HEADWATER_ASSIGN_OR_RETURN(auto head, UseHeadAtStep(scope, step));
  HEADWATER_ASSIGN_OR_RETURN(auto stats, head->GradientNorm(step.key, scope.wait_limits()));
  response->set_gradient_norm_squared(stats.norm_squared * step.factor * step.factor);
  response->set_non_finite_count(stats.non_finite_count);
  return absl::OkStatus();
}

// The header is checked against the head before any byte is taken. When this returns OK the rows are committed.
absl::Status AddGradient(RpcScope& scope, grpc::ServerReader<v1::AddGradientRequest>& reader, v1::AddGradientResponse* response) {
  ServerCore& core = scope.core();
  const Limits& limits = core.options.limits;
  MessageReader<v1::AddGradientRequest> messages(scope, reader);
  HEADWATER_ASSIGN_OR_RETURN(const v1::AddGradientHeader header, messages.ReadHeader());
  HEADWATER_ASSIGN_OR_RETURN(const GradientRequest request, DecodeAddGradientHeader(header));
  scope.set_head(request.name.ToString());
  HEADWATER_ASSIGN_OR_RETURN(scope.session(), core.UseSession(request.session));
  HEADWATER_ASSIGN_OR_RETURN(heads::Head* const head, UseHead(scope, request.name));
  const HeadSpec& spec = head->spec();
  HEADWATER_RETURN_IF_ERROR(CheckRange("header.row_start", request.row_start, 0, spec.vocab_size - 1));
  HEADWATER_RETURN_IF_ERROR(CheckRange("header.row_count", request.row_count, 1, spec.vocab_size - request.row_start));
  HEADWATER_RETURN_IF_ERROR(head->AwaitStep(request.key, scope.wait_limits()));
  HEADWATER_RETURN_IF_ERROR(head->AwaitTurn(request.key, request.micro_batch, scope.wait_limits()));
  HEADWATER_RETURN_IF_ERROR(
      head->CheckAddGradient(request.key, request.micro_batch, request.attempt, request.row_start, request.row_count));
  const int64_t row_bytes = spec.hidden_size * int64_t{sizeof(float)};
  const int64_t total_bytes = request.row_count * row_bytes;
  HEADWATER_RETURN_IF_ERROR(CheckLimit("header.row_count", total_bytes, "max_micro_batch_bytes", limits.max_micro_batch_bytes));
  HEADWATER_RETURN_IF_ERROR(CheckLimit("header.row_count", total_bytes, "max_in_flight_bytes", limits.max_in_flight_bytes));
  transport::ByteBudget::Reservation reservation;
  HEADWATER_RETURN_IF_ERROR(core.ReserveInFlight(scope.client(), total_bytes, "the gradient", &reservation));
  transport::GrowingBuffer rows(total_bytes);
  HEADWATER_RETURN_IF_ERROR(messages.ReadChunks([&](const v1::ByteChunk& chunk) -> absl::Status {
    HEADWATER_RETURN_IF_ERROR(CheckByteChunk(core, chunk));
    return AppendBytes(rows, chunk.offset_bytes(), chunk.data(), total_bytes, "the gradient");
  }));
  HEADWATER_RETURN_IF_ERROR(CheckAllBytes(rows, total_bytes));
  DigestBuilder digest;
  digest.AddRows(0, request.row_start, request.row_count, row_bytes, rows.data());
  heads::GradientPart part;
  part.row_start = request.row_start;
  part.row_count = request.row_count;
  part.data = reinterpret_cast<const float*>(rows.data());
  part.factor = request.factor;
  HEADWATER_ASSIGN_OR_RETURN(const bool added,
                             head->AddGradient(
                                 request.key, request.micro_batch, request.attempt, digest.Finish(CanonicalHeader(request)), part,
                                 [&scope] { return scope.wait_limits().waiter->cancelled(); }, scope.wait_limits()));
  if (added) core.metrics.Count(observability::Metric::kCommits);
  response->set_replayed(!added);
  return absl::OkStatus();
}

absl::Status SaveCheckpoint(RpcScope& scope, const v1::SaveCheckpointRequest& request, v1::SaveCheckpointResponse* response) {
  HEADWATER_ASSIGN_OR_RETURN(auto save,
                             DecodeCheckpoint(request.name(), request.epoch(), /*epoch_required=*/false, request.checkpoint()));
  HEADWATER_ASSIGN_OR_RETURN(auto head, UseHead(scope, save.name));
  if (head->spec().trainable && !save.epoch.has_value()) return MissingField("epoch", "the head's epoch, because it is trainable");
  if (scope.core().checkpoints == nullptr) return StorageNotConfigured("checkpoint_directory");
  HEADWATER_ASSIGN_OR_RETURN(auto saved, head->Save(save.epoch, *scope.core().checkpoints, request.checkpoint(),
                                                    request.overwrite(), scope.wait_limits()));
  response->set_checkpoint(request.checkpoint());
  response->set_step(saved.step);
  response->set_total_bytes(saved.total_bytes);
  return absl::OkStatus();
}

absl::Status ListCheckpoints(RpcScope& scope, const v1::ListCheckpointsRequest& request, v1::ListCheckpointsResponse* response) {
  HEADWATER_ASSIGN_OR_RETURN(auto list, DecodeListCheckpoints(request));
  scope.set_head(list.name.ToString());
  HEADWATER_RETURN_IF_ERROR(scope.caller().CheckHead(list.name));
  if (scope.core().checkpoints == nullptr) return StorageNotConfigured("checkpoint_directory");
  HEADWATER_ASSIGN_OR_RETURN(auto catalogue, scope.core().checkpoints->ListNewestFirst(list.name.tenant, list.name.head));
  const std::vector<v1::Checkpoint> checkpoints = EncodeCheckpoints(catalogue);
  auto next = checkpoints.begin();
  if (const std::string& after = request.page_token(); !after.empty()) {
    const auto last =
        absl::c_find_if(checkpoints, [&](const v1::Checkpoint& checkpoint) { return checkpoint.checkpoint() == after; });
    if (last == checkpoints.end()) {
      return FieldError(ErrorReason::kInvalidField, "page_token", "a checkpoint that is still there; list them again",
                        Quoted(after));
    }
    next = last + 1;
  }
  const auto end = next + std::min<int64_t>(list.page_size, checkpoints.end() - next);
  response->mutable_checkpoints()->Assign(next, end);
  if (end != checkpoints.end()) response->set_next_page_token((end - 1)->checkpoint());
  return absl::OkStatus();
}

absl::Status RestoreCheckpoint(RpcScope& scope, const v1::RestoreCheckpointRequest& request, v1::Head* response) {
  HEADWATER_ASSIGN_OR_RETURN(auto restore,
                             DecodeCheckpoint(request.name(), request.epoch(), /*epoch_required=*/true, request.checkpoint()));
  HEADWATER_ASSIGN_OR_RETURN(auto head, UseHead(scope, restore.name));
  HEADWATER_RETURN_IF_ERROR(head->CheckEpoch(*restore.epoch));
  if (scope.core().checkpoints == nullptr) return StorageNotConfigured("checkpoint_directory");
  HEADWATER_ASSIGN_OR_RETURN(auto restored,
                             head->Restore(*restore.epoch, *scope.core().checkpoints, request.checkpoint(), scope.wait_limits()));
  if (!restored.restore_note.empty()) {
    Log(LogLevel::kWarning, "checkpoint_restored",
        {{"head", restored.name.ToString()}, {"checkpoint", request.checkpoint()}, {"note", restored.restore_note}});
  }
  EncodeHead(restored, scope.core().AvailableBytes(), response);
  return absl::OkStatus();
}

absl::Status DeleteCheckpoint(RpcScope& scope, const v1::DeleteCheckpointRequest& request, v1::DeleteCheckpointResponse* response) {
  HEADWATER_ASSIGN_OR_RETURN(auto remove, DecodeCheckpoint(request.name(), "", /*epoch_required=*/false, request.checkpoint()));
  scope.set_head(remove.name.ToString());
  HEADWATER_RETURN_IF_ERROR(scope.caller().CheckHead(remove.name));
  if (scope.core().checkpoints == nullptr) return StorageNotConfigured("checkpoint_directory");
  HEADWATER_ASSIGN_OR_RETURN(auto removed,
                             scope.core().checkpoints->Remove(remove.name.tenant, remove.name.head, request.checkpoint()));
  if (auto head = scope.core().registry.Find(remove.name); head.ok() && removed)
    (*head)->CheckpointRemoved(*scope.core().checkpoints);
  response->set_deleted(removed);
  return absl::OkStatus();
}

// Calls that may wait come by callbacks.
using HeadServiceBase = v1::HeadService::WithCallbackMethod_CreateHead<
    v1::HeadService::WithCallbackMethod_DeleteHead<v1::HeadService::WithCallbackMethod_TakeHead<
        v1::HeadService::WithCallbackMethod_LoadWeights<v1::HeadService::WithCallbackMethod_SealStep<
            v1::HeadService::WithCallbackMethod_ApplyOptimizerStep<v1::HeadService::WithCallbackMethod_DiscardGradient<
                v1::HeadService::WithCallbackMethod_GetGradientNorm<v1::HeadService::WithCallbackMethod_SaveCheckpoint<
                    v1::HeadService::WithCallbackMethod_RestoreCheckpoint<v1::HeadService::Service>>>>>>>>>>;

class HeadServiceImpl final : public HeadServiceBase {
 public:
  explicit HeadServiceImpl(const Entrance& entrance) : entrance_(entrance) {}

 private:
  HEADWATER_WAITING_CALL(CreateHead, v1::CreateHeadRequest, v1::CreateHeadResponse)
  HEADWATER_CALL(GetHead, const v1::GetHeadRequest, v1::Head)
  HEADWATER_CALL(ListHeads, const v1::ListHeadsRequest, v1::ListHeadsResponse)
  HEADWATER_WAITING_CALL(DeleteHead, v1::DeleteHeadRequest, v1::DeleteHeadResponse)
  HEADWATER_WAITING_CALL(TakeHead, v1::TakeHeadRequest, v1::Head)
  HEADWATER_WAITING_CALL(LoadWeights, v1::LoadWeightsRequest, v1::Head)
  HEADWATER_CALL(DownloadWeights, const v1::DownloadWeightsRequest, grpc::ServerWriter<v1::DownloadTensorResponse>)
  HEADWATER_CALL(GetStep, const v1::GetStepRequest, v1::GetStepResponse)
  HEADWATER_WAITING_CALL(SealStep, v1::SealStepRequest, v1::SealStepResponse)
  HEADWATER_WAITING_CALL(ApplyOptimizerStep, v1::ApplyOptimizerStepRequest, v1::ApplyOptimizerStepResponse)
  HEADWATER_WAITING_CALL(DiscardGradient, v1::DiscardGradientRequest, v1::DiscardGradientResponse)
  HEADWATER_CALL(DownloadGradient, const v1::DownloadGradientRequest, grpc::ServerWriter<v1::DownloadTensorResponse>)
  HEADWATER_WAITING_CALL(GetGradientNorm, v1::GetGradientNormRequest, v1::GetGradientNormResponse)
  HEADWATER_CALL(AddGradient, grpc::ServerReader<v1::AddGradientRequest>, v1::AddGradientResponse)
  HEADWATER_WAITING_CALL(SaveCheckpoint, v1::SaveCheckpointRequest, v1::SaveCheckpointResponse)
  HEADWATER_CALL(ListCheckpoints, const v1::ListCheckpointsRequest, v1::ListCheckpointsResponse)
  HEADWATER_WAITING_CALL(RestoreCheckpoint, v1::RestoreCheckpointRequest, v1::Head)
  HEADWATER_CALL(DeleteCheckpoint, const v1::DeleteCheckpointRequest, v1::DeleteCheckpointResponse)
  grpc::Status UploadWeights(grpc::ServerContext* context,
                             grpc::ServerReaderWriter<v1::UploadWeightsResponse, v1::UploadWeightsRequest>* stream) override {
    return RunRpc(entrance_, *context, RpcMethod::kUploadWeights,
                  [stream](RpcScope& scope) { return service::UploadWeights(scope, *stream); });
  }

  const Entrance entrance_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeHeadService(const Entrance& entrance) { return std::make_unique<HeadServiceImpl>(entrance); }

}  // namespace headwater::service
