#include "server/service/session_service.h"

#include <string>
#include <vector>

#include "server/observability/logging.h"
#include "server/service/field_check.h"
#include "server/service/head_request.h"
#include "server/service/proto_encoding.h"
#include "server/service/rpc_scope.h"

namespace headwater::service {
namespace {

using observability::Log;
using observability::LogLevel;
using observability::RpcMethod;

// What works, by stable names.
std::vector<std::string> Features(const ServerCore& core) {
  std::vector<std::string> features = {
      "cross_entropy", "jensen_shannon", "teacher_hidden",   "explicit_commit", "staged",    "held",   "token_factors",
      "several_terms", "attempts",       "replay",           "first_wins",      "wait",      "adamw",  "sgd",
      "add_gradient",  "closes_step",    "resumable_upload", "download",        "take_head", "attach", "tenants",
      "sessions"};
  if (core.checkpoints != nullptr) features.push_back("checkpoints");
  if (!core.options.load_root.empty()) features.push_back("load_weights");
  return features;
}

// Validates, then says what is not built.
template <typename Request>
absl::Status Refuse(const Request& request, absl::Status (*validate)(const Request&), const char* field, const char* feature) {
  HEADWATER_RETURN_IF_ERROR(validate(request));
  return FeatureNotBuilt(field, feature);
}

}  // namespace

grpc::Status SessionServiceImpl::GetServerInfo(grpc::ServerContext* context, const v1::GetServerInfoRequest*,
                                               v1::ServerInfo* response) {
  return RunRpc(
      core_, *context, RpcMethod::kGetServerInfo,
      [&](RpcScope&) -> absl::Status {
        response->set_version(ServerVersion());
        response->set_incarnation(core_.incarnation.data(), core_.incarnation.size());
        response->set_engine(core_.engine->name());
        response->set_engine_note(core_.options.engine_note);
        const std::vector<EngineDevice> devices = core_.engine->devices();
        for (const EngineDevice& device : devices) {
          v1::Device* const encoded = response->add_devices();
          encoded->set_name(device.name);
          encoded->set_model(device.model);
          encoded->set_memory_budget_bytes(device.memory_budget_bytes);
        }
        if (devices.size() == 1) response->mutable_devices(0)->set_memory_planned_bytes(core_.engine->planned_bytes());
        EncodeLimits(core_.options.limits, response->mutable_limits());
        for (const std::string& feature : Features(core_)) response->add_features(feature);
        EncodeTime(core_.start_time, response->mutable_start_time());
        return absl::OkStatus();
      },
      /*always=*/true);
}

grpc::Status SessionServiceImpl::OpenSession(grpc::ServerContext* context, const v1::OpenSessionRequest* request,
                                             v1::OpenSessionResponse* response) {
  return RunRpc(core_, *context, RpcMethod::kOpenSession, [&](RpcScope&) -> absl::Status {
    auto open = DecodeOpenSession(*request, core_.options.limits);
    if (!open.ok()) return open.status();
    auto grant = core_.sessions.Open(open->client_name, open->lease);
    if (!grant.ok()) return grant.status();
    Log(LogLevel::kInfo, "session_opened", {{"client", open->client_name}, {"lease_s", absl::ToDoubleSeconds(grant->lease)}});
    response->set_session_id(grant->id.data(), grant->id.size());
    EncodeDuration(grant->lease, response->mutable_lease());
    return absl::OkStatus();
  });
}

grpc::Status SessionServiceImpl::KeepAlive(grpc::ServerContext* context, const v1::KeepAliveRequest* request,
                                           v1::KeepAliveResponse* response) {
  return RunRpc(core_, *context, RpcMethod::kKeepAlive, [&](RpcScope&) -> absl::Status {
    auto session = DecodeSession(request->session_id(), "session_id");
    if (!session.ok()) return session.status();
    auto lease = core_.sessions.Renew(*session);
    if (!lease.ok()) return lease.status();
    EncodeDuration(*lease, response->mutable_lease());
    return absl::OkStatus();
  });
}

grpc::Status SessionServiceImpl::CloseSession(grpc::ServerContext* context, const v1::CloseSessionRequest* request,
                                              v1::CloseSessionResponse*) {
  return RunRpc(core_, *context, RpcMethod::kCloseSession, [&](RpcScope&) -> absl::Status {
    auto session = DecodeSession(request->session_id(), "session_id");
    if (!session.ok()) return session.status();
    if (core_.sessions.Close(*session)) core_.metrics.CountSessionEnds(observability::SessionEnd::kClosed, 1);
    return absl::OkStatus();
  });
}

grpc::Status SessionServiceImpl::RegisterSharedMemory(grpc::ServerContext* context, const v1::RegisterSharedMemoryRequest* request,
                                                      v1::RegisterSharedMemoryResponse*) {
  return RunRpc(core_, *context, RpcMethod::kRegisterSharedMemory, [&](RpcScope&) {
    return Refuse(*request, &ValidateRegisterSharedMemory, "RegisterSharedMemory", "shared_memory");
  });
}

grpc::Status SessionServiceImpl::UnregisterSharedMemory(grpc::ServerContext* context,
                                                        const v1::UnregisterSharedMemoryRequest* request,
                                                        v1::UnregisterSharedMemoryResponse*) {
  return RunRpc(core_, *context, RpcMethod::kUnregisterSharedMemory, [&](RpcScope&) {
    return Refuse(*request, &ValidateUnregisterSharedMemory, "UnregisterSharedMemory", "shared_memory");
  });
}

}  // namespace headwater::service
