// gRPC handlers of headwater.v1.SessionService.
#ifndef HEADWATER_SERVER_SERVICE_SESSION_SERVICE_H_
#define HEADWATER_SERVER_SERVICE_SESSION_SERVICE_H_

#include "headwater/v1/session_service.grpc.pb.h"
#include "server/service/call/rpc_scope.h"
#include "server/service/server_core.h"

namespace headwater::service {

class SessionServiceImpl final : public v1::SessionService::WithCallbackMethod_UnregisterSharedMemory<v1::SessionService::Service> {
 public:
  // The core must outlive the service.
  explicit SessionServiceImpl(const Entrance& entrance) : entrance_(entrance), core_(entrance.core) {}

  grpc::Status GetServerInfo(grpc::ServerContext* context, const v1::GetServerInfoRequest* request,
                             v1::ServerInfo* response) override;
  grpc::Status OpenSession(grpc::ServerContext* context, const v1::OpenSessionRequest* request,
                           v1::OpenSessionResponse* response) override;
  grpc::Status KeepAlive(grpc::ServerContext* context, const v1::KeepAliveRequest* request,
                         v1::KeepAliveResponse* response) override;
  grpc::Status CloseSession(grpc::ServerContext* context, const v1::CloseSessionRequest* request,
                            v1::CloseSessionResponse* response) override;
  grpc::Status RegisterSharedMemory(grpc::ServerContext* context, const v1::RegisterSharedMemoryRequest* request,
                                    v1::RegisterSharedMemoryResponse* response) override;
  grpc::ServerUnaryReactor* UnregisterSharedMemory(grpc::CallbackServerContext* context,
                                                   const v1::UnregisterSharedMemoryRequest* request,
                                                   v1::UnregisterSharedMemoryResponse* response) override;

 private:
  const Entrance entrance_;
  ServerCore& core_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_SESSION_SERVICE_H_
