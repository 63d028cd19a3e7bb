// gRPC handlers of headwater.v1.SessionService.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "headwater/v1/session_service.grpc.pb.h"
#include "server/observability/logging.h"
#include "server/service/request/canonical_header.h"
#include "server/service/request/head_request.h"
#include "server/service/services.h"

namespace headwater::service {
namespace {

using observability::Log;
using observability::LogLevel;

// The features that work here, by stable names.
std::vector<std::string> Features(const ServerCore& core) {
  std::vector<std::string> features = {
      "cross_entropy", "jensen_shannon", "teacher_hidden",   "explicit_commit", "staged",    "held",   "token_factors",
      "several_terms", "attempts",       "replay",           "first_wins",      "wait",      "adamw",  "sgd",
      "add_gradient",  "closes_step",    "resumable_upload", "download",        "take_head", "attach", "tenants",
      "sessions",      "entropy_factors"};
  for (std::string& name : LaterOptions()) features.push_back(std::move(name));
  if (core.checkpoints != nullptr) features.push_back("checkpoints");
  // Not built for several GPUs.
  if (core.engine->name() != "cuda" || core.engine->devices().size() == 1) features.push_back("top_k_teacher");
  if (!core.options.load_root.empty()) features.push_back("load_weights");
  if (core.descriptors != nullptr || core.options.named_regions) features.push_back("shared_memory");
  // Several GPUs take their rows from host memory.
  if (core.engine->name() == "cuda" && core.engine->devices().size() == 1) features.push_back("cuda_ipc");
  return features;
}

absl::StatusOr<std::string> Register(ServerCore& core, const v1::RegisterSharedMemoryRequest& message,
                                     const RegisterRequest& request) {
  if (message.has_descriptor_token()) {
    if (core.descriptors == nullptr) {
      return MakeError(ErrorReason::kStorageNotConfigured,
                       "descriptor_token: this server has no descriptor socket: start it with --descriptor_socket",
                       {{"field", "descriptor_token"}, {"expected", "--descriptor_socket"}});
    }
    HEADWATER_ASSIGN_OR_RETURN(auto memory, core.descriptors->Take(message.descriptor_token()));
    return core.regions.AddDescriptor(request.session, std::move(memory), request.offset_bytes, request.size_bytes);
  }
  if (request.device.has_value())
    return core.regions.AddDevice(request.session, *request.device, request.event, request.size_bytes);
  if (!core.options.named_regions) {
    return MakeError(ErrorReason::kStorageNotConfigured,
                     "shared_memory_name: this server takes no named regions: start it with --named_regions",
                     {{"field", "shared_memory_name"}, {"expected", "--named_regions"}});
  }
  return core.regions.AddNamed(request.session, message.shared_memory_name(), request.offset_bytes, request.size_bytes);
}

absl::Status GetServerInfo(RpcScope& scope, const v1::GetServerInfoRequest&, v1::ServerInfo* response) {
  const ServerCore& core = scope.core();
  response->set_version(ServerVersion());
  response->set_incarnation(core.incarnation.data(), core.incarnation.size());
  response->set_engine(core.engine->name());
  response->set_engine_note(core.options.engine_note);
  const std::vector<EngineDevice> devices = core.engine->devices();
  for (const EngineDevice& device : devices) {
    v1::Device* const encoded = response->add_devices();
    encoded->set_name(device.name);
    encoded->set_model(device.model);
    encoded->set_memory_budget_bytes(device.memory_budget_bytes);
    if (device.uuid != decltype(device.uuid){}) encoded->set_uuid(device.uuid.data(), device.uuid.size());
  }
  // With several devices only the sum is known.
  if (devices.size() == 1) response->mutable_devices(0)->set_memory_planned_bytes(core.engine->planned_bytes());
  EncodeLimits(core.options.limits, response->mutable_limits());
  for (const std::string& feature : Features(core)) response->add_features(feature);
  EncodeTime(core.start_time, response->mutable_start_time());
  if (core.descriptors != nullptr) response->set_descriptor_socket(core.descriptors->path());
  response->set_named_regions(core.options.named_regions);
  response->set_deterministic(core.options.deterministic);
  return absl::OkStatus();
}

absl::Status OpenSession(RpcScope& scope, const v1::OpenSessionRequest& request, v1::OpenSessionResponse* response) {
  ServerCore& core = scope.core();
  HEADWATER_ASSIGN_OR_RETURN(auto lease, DecodeOpenSession(request, core.options.limits));
  std::vector<heads::SessionRegistry::Expired> expired;
  auto grant = core.sessions.Open(request.client_name(), lease, &expired);
  core.CountExpiredSessions(expired);
  if (!grant.ok()) return grant.status();
  Log(LogLevel::kInfo, "session_opened", {{"client", request.client_name()}, {"lease_s", absl::ToDoubleSeconds(grant->lease)}});
  response->set_session_id(grant->id.data(), grant->id.size());
  EncodeDuration(grant->lease, response->mutable_lease());
  return absl::OkStatus();
}

absl::Status KeepAlive(RpcScope& scope, const v1::KeepAliveRequest& request, v1::KeepAliveResponse* response) {
  HEADWATER_ASSIGN_OR_RETURN(auto session, DecodeSession(request.session_id(), "session_id"));
  HEADWATER_ASSIGN_OR_RETURN(auto lease, scope.core().sessions.Renew(session));
  EncodeDuration(lease, response->mutable_lease());
  return absl::OkStatus();
}

absl::Status CloseSession(RpcScope& scope, const v1::CloseSessionRequest& request, v1::CloseSessionResponse*) {
  HEADWATER_ASSIGN_OR_RETURN(auto session, DecodeSession(request.session_id(), "session_id"));
  if (scope.core().sessions.Close(session)) {
    scope.core().metrics.Count(observability::Metric::kSessionEnds, 1, observability::SessionEnd::kClosed);
  }
  return absl::OkStatus();
}

absl::Status RegisterSharedMemory(RpcScope& scope, const v1::RegisterSharedMemoryRequest& request,
                                  v1::RegisterSharedMemoryResponse* response) {
  HEADWATER_ASSIGN_OR_RETURN(auto decoded, DecodeRegisterSharedMemory(request));
  // If the session ends meanwhile, the end of this use drops the region.
  HEADWATER_ASSIGN_OR_RETURN(scope.session(), scope.core().UseSession(decoded.session));
  HEADWATER_ASSIGN_OR_RETURN(auto id, Register(scope.core(), request, decoded));
  response->set_region_id(std::move(id));
  return absl::OkStatus();
}

class SessionServiceImpl final : public v1::SessionService::WithCallbackMethod_UnregisterSharedMemory<v1::SessionService::Service> {
 public:
  explicit SessionServiceImpl(const Entrance& entrance) : entrance_(entrance) {}

 private:
  HEADWATER_CALL(GetServerInfo, const v1::GetServerInfoRequest, v1::ServerInfo)
  HEADWATER_CALL(OpenSession, const v1::OpenSessionRequest, v1::OpenSessionResponse)
  HEADWATER_CALL(KeepAlive, const v1::KeepAliveRequest, v1::KeepAliveResponse)
  HEADWATER_CALL(CloseSession, const v1::CloseSessionRequest, v1::CloseSessionResponse)
  HEADWATER_CALL(RegisterSharedMemory, const v1::RegisterSharedMemoryRequest, v1::RegisterSharedMemoryResponse)

  // Keeps the region's end between its tries.
  grpc::ServerUnaryReactor* UnregisterSharedMemory(grpc::CallbackServerContext* context,
                                                   const v1::UnregisterSharedMemoryRequest* request,
                                                   v1::UnregisterSharedMemoryResponse*) override {
    return UnaryCall::Start(entrance_, context, observability::RpcMethod::kUnregisterSharedMemory,
                            [request, end = std::shared_ptr<transport::RegionEnd>()](RpcScope& scope) mutable -> absl::Status {
                              if (end == nullptr) {
                                HEADWATER_ASSIGN_OR_RETURN(auto session, DecodeUnregisterSharedMemory(*request));
                                HEADWATER_ASSIGN_OR_RETURN(auto use, scope.core().UseSession(session));
                                HEADWATER_ASSIGN_OR_RETURN(end, scope.core().regions.Remove(session, request->region_id()));
                                scope.session() = std::move(use);
                              }
                              return end->Await(scope.wait_limits());
                            });
  }

  const Entrance entrance_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeSessionService(const Entrance& entrance) {
  return std::make_unique<SessionServiceImpl>(entrance);
}

}  // namespace headwater::service
