#include "server/service/head/head_service.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "proto/headwater/v1/spec_codec.h"
#include "server/checkpoint/weights_reader.h"
#include "server/group/group_engine.h"
#include "server/observability/logging.h"
#include "server/service/call/rpc_scope.h"
#include "server/service/call/unary_call.h"
#include "server/service/head/add_gradient_call.h"
#include "server/service/head/tensor_stream.h"
#include "server/service/head/upload_call.h"
#include "server/service/loss/stream_io.h"
#include "server/service/request/field_check.h"
#include "server/service/request/head_request.h"
#include "server/service/request/proto_encoding.h"
#include "server/transport/answer_time.h"

namespace headwater::service {
namespace {

using observability::Log;
using observability::LogLevel;
using observability::RpcMethod;

// The first `count` heads of a tenant after `after` that the caller may see, by name.
std::vector<std::shared_ptr<heads::Head>> ListHeadsFor(const Caller& caller, const heads::HeadRegistry& registry,
                                                       const std::string& tenant, std::string after, int64_t count) {
  std::vector<std::shared_ptr<heads::Head>> seen;
  while (true) {
    const int64_t wanted = count - static_cast<int64_t>(seen.size());
    const auto heads = registry.List(tenant, after, wanted);
    for (const auto& head : heads) {
      if (caller.CheckHead(head->name()).ok()) seen.push_back(head);
    }
    if (static_cast<int64_t>(heads.size()) < wanted || static_cast<int64_t>(seen.size()) == count) return seen;
    after = heads.back()->name().ToString();
  }
}

// Finds the head that a decoded request names, and names it in the log. For what is answered at once.
absl::StatusOr<std::shared_ptr<heads::Head>> FindHead(ServerCore& core, RpcScope& scope, const heads::HeadName& name) {
  scope.set_head(name.ToString());
  return scope.caller().Find(core.registry, name);
}

// FindHead() for a request that works on the head, which is the call's first.
absl::StatusOr<heads::Head*> UseHead(ServerCore& core, RpcScope& scope, const heads::HeadName& name) {
  scope.set_head(name.ToString());
  if (scope.heads().empty()) {
    HEADWATER_ASSIGN_OR_RETURN(auto head, scope.caller().Find(core.registry, name));
    scope.heads().emplace_back(std::move(head));
  }
  return &*scope.heads().front();
}

// UseHead() for a request about a step of the head: waits if that step is the next one.
template <typename Request>
absl::StatusOr<heads::Head*> UseHeadAtStep(ServerCore& core, RpcScope& scope, const Request& request) {
  auto head = UseHead(core, scope, request.name);
  if (!head.ok()) return head;
  HEADWATER_RETURN_IF_ERROR((*head)->AwaitStep(request.key, scope.wait_limits()));
  return head;
}

// Bounds of a seal's wait for micro-batches: it ends early enough for the answer to name the missing ones.
scheduler::WaitLimits SealWait(RpcScope& scope) {
  scheduler::WaitLimits wait = scope.wait_limits().ForStep();
  wait.deadline = std::min(wait.deadline, transport::WaitEnd(scope.start_time(), scope.deadline()));
  return wait;
}

absl::Status SendDownload(ServerCore& core, grpc::ServerContext& context, RpcScope& scope,
                          const absl::StatusOr<TensorStream>& stream, grpc::ServerWriter<v1::DownloadTensorResponse>& responses) {
  if (!stream.ok()) return stream.status();
  WatchedWriter writer(core, context, scope, responses);
  return SendTensor(*stream, core.options.limits.max_chunk_bytes, [&](const v1::DownloadTensorResponse& response) {
    core.metrics.CountBytes(observability::Direction::kOut, static_cast<int64_t>(response.chunk().data().size()));
    return writer.Write(response);
  });
}

absl::Status StorageNotConfigured(const char* flag) {
  return MakeError(ErrorReason::kStorageNotConfigured,
                   std::string("expected a server that was started with --") + flag + ", got one without",
                   {{"expected", std::string("--") + flag}, {"actual", "not set"}});
}

}  // namespace

grpc::ServerUnaryReactor* HeadServiceImpl::CreateHead(grpc::CallbackServerContext* context, const v1::CreateHeadRequest* request,
                                                      v1::CreateHeadResponse* response) {
  return UnaryCall::Start(entrance_, context, RpcMethod::kCreateHead, [=, this](RpcScope& scope) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto create, DecodeCreate(*request, core_.options.limits));
    scope.set_head(create.name.ToString());
    HEADWATER_RETURN_IF_ERROR(scope.caller().CheckTenant(create.name.tenant));
    HEADWATER_RETURN_IF_ERROR(scope.caller().CheckHead(create.name));
    if (create.validate_only) {
      HEADWATER_ASSIGN_OR_RETURN(auto plan, core_.engine->PlanHead(create.spec));
      response->mutable_head()->set_name(create.name.ToString());
      EncodeHeadSpec(create.spec, response->mutable_head()->mutable_spec());
      EncodePlan(plan, core_.AvailableBytes(), response->mutable_head()->mutable_memory_plan());
      EncodeShards(group::PlanShards(*core_.engine, create.spec.vocab_size), response->mutable_head());
      return absl::OkStatus();
    }
    HEADWATER_ASSIGN_OR_RETURN(
        auto made, core_.registry.Create(create.name, create.spec, create.if_exists, core_.checkpoints.get(), scope.wait_limits()));
    EncodeHead(made.head->Describe(), core_.AvailableBytes(), response->mutable_head());
    response->set_created(made.created);
    return absl::OkStatus();
  });
}

grpc::Status HeadServiceImpl::GetHead(grpc::ServerContext* context, const v1::GetHeadRequest* request, v1::Head* response) {
  return RunRpc(entrance_, *context, RpcMethod::kGetHead, [&](RpcScope& scope) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto name, DecodeHeadName(request->name(), "name"));
    HEADWATER_ASSIGN_OR_RETURN(auto head, FindHead(core_, scope, name));
    EncodeHead(head->Describe(), core_.AvailableBytes(), response);
    return absl::OkStatus();
  });
}

grpc::Status HeadServiceImpl::ListHeads(grpc::ServerContext* context, const v1::ListHeadsRequest* request,
                                        v1::ListHeadsResponse* response) {
  return RunRpc(entrance_, *context, RpcMethod::kListHeads, [&](RpcScope& scope) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto list, DecodeList(*request));
    const std::string& tenant = request->parent().empty() ? scope.caller().tenant() : list.tenant;
    HEADWATER_RETURN_IF_ERROR(scope.caller().CheckTenant(tenant));
    // One more than a page, to know whether there is a next one.
    const auto heads = ListHeadsFor(scope.caller(), core_.registry, tenant, list.after, list.page_size + 1);
    const size_t count = std::min(heads.size(), static_cast<size_t>(list.page_size));
    for (size_t i = 0; i < count; ++i) EncodeHead(heads[i]->Describe(), core_.AvailableBytes(), response->add_heads());
    if (heads.size() > count) response->set_next_page_token(heads[count - 1]->name().ToString());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* HeadServiceImpl::DeleteHead(grpc::CallbackServerContext* context, const v1::DeleteHeadRequest* request,
                                                      v1::DeleteHeadResponse*) {
  return UnaryCall::Start(entrance_, context, RpcMethod::kDeleteHead, [=, this](RpcScope& scope) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto head, DecodeDelete(*request));
    scope.set_head(head.name.ToString());
    HEADWATER_RETURN_IF_ERROR(scope.caller().CheckHead(head.name));
    const absl::Status deleted = core_.registry.Delete(head.name, head.epoch, request->force(), core_.checkpoints.get());
    core_.queue.WakeAll();  // a micro-batch of the head waits for its rows no longer
    return deleted;
  });
}

grpc::ServerUnaryReactor* HeadServiceImpl::TakeHead(grpc::CallbackServerContext* context, const v1::TakeHeadRequest* request,
                                                    v1::Head* response) {
  return UnaryCall::Start(entrance_, context, RpcMethod::kTakeHead, [=, this](RpcScope& scope) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto take, DecodeTake(*request));
    HEADWATER_ASSIGN_OR_RETURN(auto head, UseHead(core_, scope, take.name));
    HEADWATER_ASSIGN_OR_RETURN(auto taken, head->Take(take.epoch, std::move(take.recovers_epochs), scope.wait_limits()));
    EncodeHead(taken, core_.AvailableBytes(), response);
    return absl::OkStatus();
  });
}

grpc::Status HeadServiceImpl::UploadWeights(grpc::ServerContext* context,
                                            grpc::ServerReaderWriter<v1::UploadWeightsResponse, v1::UploadWeightsRequest>* stream) {
  return RunRpc(entrance_, *context, RpcMethod::kUploadWeights, [&](RpcScope& scope) -> absl::Status {
    UploadCall call(core_, scope.caller(), scope.wait_limits());
    HEADWATER_RETURN_IF_ERROR(
        (ReadAll<v1::UploadWeightsRequest>(core_, *context, scope, *stream, [&](v1::UploadWeightsRequest* message) {
          v1::UploadWeightsResponse response;
          const absl::Status status = call.OnMessage(message, &response);
          scope.set_head(call.head_name());
          const bool answer = response.message_case() != v1::UploadWeightsResponse::MESSAGE_NOT_SET;
          return !status.ok() || !answer || stream->Write(response) ? status : scope.CancelledError();
        })));
    v1::UploadWeightsResponse response;
    HEADWATER_RETURN_IF_ERROR(call.Finish(&response));
    return stream->Write(response) ? absl::OkStatus() : scope.CancelledError();
  });
}

grpc::ServerUnaryReactor* HeadServiceImpl::LoadWeights(grpc::CallbackServerContext* context, const v1::LoadWeightsRequest* request,
                                                       v1::Head* response) {
  return UnaryCall::Start(entrance_, context, RpcMethod::kLoadWeights, [=, this](RpcScope& scope) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto load, DecodeLoad(*request));
    HEADWATER_ASSIGN_OR_RETURN(auto head, UseHead(core_, scope, load.name));
    HEADWATER_RETURN_IF_ERROR(head->CheckEpoch(load.epoch));
    if (core_.options.load_root.empty()) return StorageNotConfigured("load_root");
    HEADWATER_ASSIGN_OR_RETURN(auto reader, checkpoint::WeightsReader::Open(core_.options.load_root, load.path, load.weight_tensor,
                                                                            load.bias_tensor, head->spec()));
    std::vector<heads::TensorUpdate> updates;
    for (const HeadTensor tensor : {HeadTensor::kWeight, HeadTensor::kBias}) {
      if (tensor == HeadTensor::kBias && !reader->has_bias()) continue;
      updates.push_back(
          {tensor, reader->data_type(tensor), [&reader, tensor](int64_t element_start, int64_t element_count, void* out) {
             return reader->Read(tensor, element_start, element_count, out);
           }});
    }
    // The thread waits for the head: a second try would read the file through again.
    HEADWATER_ASSIGN_OR_RETURN(auto loaded, head->SetTensors(load.epoch, updates, scope.thread_limits()));
    EncodeHead(loaded, core_.AvailableBytes(), response);
    return absl::OkStatus();
  });
}

grpc::Status HeadServiceImpl::DownloadWeights(grpc::ServerContext* context, const v1::DownloadWeightsRequest* request,
                                              grpc::ServerWriter<v1::DownloadTensorResponse>* writer) {
  return RunRpc(entrance_, *context, RpcMethod::kDownloadWeights, [&](RpcScope& scope) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto download, DecodeDownloadWeights(*request));
    HEADWATER_RETURN_IF_ERROR(UseHead(core_, scope, download.name).status());
    return SendDownload(core_, *context, scope, OpenWeights(scope.heads().front().head(), download, scope.wait_limits()), *writer);
  });
}

grpc::Status HeadServiceImpl::GetStep(grpc::ServerContext* context, const v1::GetStepRequest* request,
                                      v1::GetStepResponse* response) {
  return RunRpc(entrance_, *context, RpcMethod::kGetStep, [&](RpcScope& scope) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto decoded, DecodeGetStep(*request));
    HEADWATER_ASSIGN_OR_RETURN(auto head, FindHead(core_, scope, decoded.name));
    HEADWATER_ASSIGN_OR_RETURN(auto steps, head->GetSteps(*decoded.epoch));
    EncodeStep(steps.first, response->mutable_open());
    if (steps.second.has_value()) EncodeStep(*steps.second, response->mutable_last_closed());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* HeadServiceImpl::SealStep(grpc::CallbackServerContext* context, const v1::SealStepRequest* request,
                                                    v1::SealStepResponse* response) {
  return UnaryCall::Start(entrance_, context, RpcMethod::kSealStep, [=, this](RpcScope& scope) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto seal, DecodeSeal(*request, core_.options.limits));
    HEADWATER_ASSIGN_OR_RETURN(auto head, UseHeadAtStep(core_, scope, seal));
    HEADWATER_ASSIGN_OR_RETURN(auto reply, head->Seal(seal.key, seal.expected,
                                                      seal.wait ? SealWait(scope) : scheduler::WaitLimits(), scope.wait_limits()));
    EncodeTotals(reply.totals, response->mutable_totals());
    response->set_gradient_norm_squared(reply.stats.norm_squared);
    response->set_non_finite_count(reply.stats.non_finite_count);
    response->set_replayed(reply.replayed);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* HeadServiceImpl::ApplyOptimizerStep(grpc::CallbackServerContext* context,
                                                              const v1::ApplyOptimizerStepRequest* request,
                                                              v1::ApplyOptimizerStepResponse* response) {
  return UnaryCall::Start(entrance_, context, RpcMethod::kApplyOptimizerStep, [=, this](RpcScope& scope) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto apply, DecodeApply(*request, core_.options.limits));
    HEADWATER_ASSIGN_OR_RETURN(auto head, UseHeadAtStep(core_, scope, apply));
    HEADWATER_ASSIGN_OR_RETURN(auto reply, head->Apply(apply.key, apply.expected, apply.arguments, scope.wait_limits()));
    if (!reply.replayed) core_.metrics.CountStep(observability::StepOutcome::kApplied);
    response->set_open_step(reply.open_step);
    response->set_weight_version(reply.weight_version);
    response->set_global_grad_norm(reply.global_grad_norm);
    response->set_gradient_norm_squared(reply.gradient_norm_squared);
    response->set_clip_factor(reply.clip_factor);
    EncodeTotals(reply.totals, response->mutable_totals());
    response->set_replayed(reply.replayed);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* HeadServiceImpl::DiscardGradient(grpc::CallbackServerContext* context,
                                                           const v1::DiscardGradientRequest* request,
                                                           v1::DiscardGradientResponse* response) {
  return UnaryCall::Start(entrance_, context, RpcMethod::kDiscardGradient, [=, this](RpcScope& scope) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto step, DecodeDiscardGradient(*request));
    HEADWATER_ASSIGN_OR_RETURN(auto head, UseHeadAtStep(core_, scope, step));
    HEADWATER_ASSIGN_OR_RETURN(auto reply, head->DiscardGradient(step.key, scope.wait_limits()));
    if (!reply.second) core_.metrics.CountStep(observability::StepOutcome::kDiscarded);
    response->set_open_step(reply.first);
    response->set_replayed(reply.second);
    return absl::OkStatus();
  });
}

grpc::Status HeadServiceImpl::DownloadGradient(grpc::ServerContext* context, const v1::DownloadGradientRequest* request,
                                               grpc::ServerWriter<v1::DownloadTensorResponse>* writer) {
  return RunRpc(entrance_, *context, RpcMethod::kDownloadGradient, [&](RpcScope& scope) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto download, DecodeDownloadGradient(*request));
    HEADWATER_RETURN_IF_ERROR(UseHeadAtStep(core_, scope, download).status());
    return SendDownload(core_, *context, scope, OpenGradient(scope.heads().front().head(), download, scope.wait_limits()), *writer);
  });
}

grpc::ServerUnaryReactor* HeadServiceImpl::GetGradientNorm(grpc::CallbackServerContext* context,
                                                           const v1::GetGradientNormRequest* request,
                                                           v1::GetGradientNormResponse* response) {
  return UnaryCall::Start(entrance_, context, RpcMethod::kGetGradientNorm, [=, this](RpcScope& scope) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto step, DecodeGradientNorm(*request));
    HEADWATER_ASSIGN_OR_RETURN(auto head, UseHeadAtStep(core_, scope, step));
    HEADWATER_ASSIGN_OR_RETURN(auto stats, head->GradientNorm(step.key, scope.wait_limits()));
    response->set_gradient_norm_squared(stats.norm_squared * step.factor * step.factor);
    response->set_non_finite_count(stats.non_finite_count);
    return absl::OkStatus();
  });
}

grpc::Status HeadServiceImpl::AddGradient(grpc::ServerContext* context, grpc::ServerReader<v1::AddGradientRequest>* reader,
                                          v1::AddGradientResponse* response) {
  return RunRpc(entrance_, *context, RpcMethod::kAddGradient, [&](RpcScope& scope) -> absl::Status {
    AddGradientCall call(core_, scope.caller(), scope.client(), scope.wait_limits());
    HEADWATER_RETURN_IF_ERROR(
        (ReadAll<v1::AddGradientRequest>(core_, *context, scope, *reader, [&](v1::AddGradientRequest* message) {
          const absl::Status status = call.OnMessage(message);
          scope.set_head(call.head_name());
          return status;
        })));
    return call.Finish(response);
  });
}

grpc::ServerUnaryReactor* HeadServiceImpl::SaveCheckpoint(grpc::CallbackServerContext* context,
                                                          const v1::SaveCheckpointRequest* request,
                                                          v1::SaveCheckpointResponse* response) {
  return UnaryCall::Start(entrance_, context, RpcMethod::kSaveCheckpoint, [=, this](RpcScope& scope) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto save, DecodeSave(*request));
    HEADWATER_ASSIGN_OR_RETURN(auto head, UseHead(core_, scope, save.name));
    if (head->spec().trainable && !save.epoch.has_value())
      return MissingField("epoch", "the head's epoch, because it is trainable");
    if (core_.checkpoints == nullptr) return StorageNotConfigured("checkpoint_directory");
    HEADWATER_ASSIGN_OR_RETURN(auto saved,
                               head->Save(save.epoch, *core_.checkpoints, save.checkpoint, save.overwrite, scope.wait_limits()));
    response->set_checkpoint(save.checkpoint);
    response->set_step(saved.step);
    response->set_total_bytes(saved.total_bytes);
    return absl::OkStatus();
  });
}

grpc::Status HeadServiceImpl::ListCheckpoints(grpc::ServerContext* context, const v1::ListCheckpointsRequest* request,
                                              v1::ListCheckpointsResponse* response) {
  return RunRpc(entrance_, *context, RpcMethod::kListCheckpoints, [&](RpcScope& scope) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto list, DecodeListCheckpoints(*request));
    scope.set_head(list.name.ToString());
    HEADWATER_RETURN_IF_ERROR(scope.caller().CheckHead(list.name));
    if (core_.checkpoints == nullptr) return StorageNotConfigured("checkpoint_directory");
    HEADWATER_ASSIGN_OR_RETURN(auto catalogue, core_.checkpoints->ListNewestFirst(list.name.tenant, list.name.head));
    const std::vector<v1::Checkpoint> checkpoints = EncodeCheckpoints(catalogue);
    auto next = checkpoints.begin();
    if (list.after.has_value()) {
      const auto last = std::find_if(checkpoints.begin(), checkpoints.end(),
                                     [&](const v1::Checkpoint& checkpoint) { return checkpoint.checkpoint() == *list.after; });
      if (last == checkpoints.end()) {
        return FieldError(ErrorReason::kInvalidField, "page_token", "a checkpoint that is still there; list them again",
                          Quoted(*list.after));
      }
      next = last + 1;
    }
    const auto end = next + std::min<int64_t>(list.page_size, checkpoints.end() - next);
    response->mutable_checkpoints()->Assign(next, end);
    if (end != checkpoints.end()) response->set_next_page_token((end - 1)->checkpoint());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* HeadServiceImpl::RestoreCheckpoint(grpc::CallbackServerContext* context,
                                                             const v1::RestoreCheckpointRequest* request, v1::Head* response) {
  return UnaryCall::Start(entrance_, context, RpcMethod::kRestoreCheckpoint, [=, this](RpcScope& scope) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto restore, DecodeRestore(*request));
    HEADWATER_ASSIGN_OR_RETURN(auto head, UseHead(core_, scope, restore.name));
    HEADWATER_RETURN_IF_ERROR(head->CheckEpoch(*restore.epoch));
    if (core_.checkpoints == nullptr) return StorageNotConfigured("checkpoint_directory");
    HEADWATER_ASSIGN_OR_RETURN(auto restored,
                               head->Restore(*restore.epoch, *core_.checkpoints, restore.checkpoint, scope.wait_limits()));
    if (!restored.restore_note.empty()) {
      Log(LogLevel::kWarning, "checkpoint_restored",
          {{"head", restored.name.ToString()}, {"checkpoint", restore.checkpoint}, {"note", restored.restore_note}});
    }
    EncodeHead(restored, core_.AvailableBytes(), response);
    return absl::OkStatus();
  });
}

grpc::Status HeadServiceImpl::DeleteCheckpoint(grpc::ServerContext* context, const v1::DeleteCheckpointRequest* request,
                                               v1::DeleteCheckpointResponse* response) {
  return RunRpc(entrance_, *context, RpcMethod::kDeleteCheckpoint, [&](RpcScope& scope) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto remove, DecodeDeleteCheckpoint(*request));
    scope.set_head(remove.name.ToString());
    HEADWATER_RETURN_IF_ERROR(scope.caller().CheckHead(remove.name));
    if (core_.checkpoints == nullptr) return StorageNotConfigured("checkpoint_directory");
    HEADWATER_ASSIGN_OR_RETURN(auto removed, core_.checkpoints->Remove(remove.name.tenant, remove.name.head, remove.checkpoint));
    if (auto head = core_.registry.Find(remove.name); head.ok() && removed) (*head)->CheckpointRemoved(*core_.checkpoints);
    response->set_deleted(removed);
    return absl::OkStatus();
  });
}

}  // namespace headwater::service
