// StreamTeacher: a teacher's rows, for trainers that join them.
#ifndef HEADWATER_SERVER_SERVICE_LOSS_STREAM_TEACHER_CALL_H_
#define HEADWATER_SERVER_SERVICE_LOSS_STREAM_TEACHER_CALL_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/sync_stream.h>

#include "absl/status/status.h"
#include "headwater/v1/loss_service.pb.h"
#include "server/service/call/rpc_scope.h"
#include "server/service/server_core.h"

namespace headwater::service {

// One stream, from its header to its end: when this returns OK all rows are kept, and trainers can have them.
absl::Status StreamTeacher(ServerCore& core, grpc::ServerContext& context, RpcScope& scope,
                           grpc::ServerReader<v1::StreamTeacherRequest>& reader, v1::StreamTeacherResponse* response);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_LOSS_STREAM_TEACHER_CALL_H_
