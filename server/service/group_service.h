// gRPC handlers of headwater.v1.GroupService.
#ifndef HEADWATER_SERVER_SERVICE_GROUP_SERVICE_H_
#define HEADWATER_SERVER_SERVICE_GROUP_SERVICE_H_

#include "headwater/v1/group_service.grpc.pb.h"
#include "server/service/call/rpc_scope.h"

namespace headwater::service {

class GroupServiceImpl final : public v1::GroupService::Service {
 public:
  // The core must outlive the service.
  explicit GroupServiceImpl(const Entrance& entrance) : entrance_(entrance) {}

  // Takes a thread of the calls' for as long as the worker is there.
  grpc::Status Join(grpc::ServerContext* context, grpc::ServerReaderWriter<v1::JoinResponse, v1::JoinRequest>* stream) override;

 private:
  const Entrance entrance_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_GROUP_SERVICE_H_
