// ComputeLoss, as a stream of gRPC's callback API.
#ifndef HEADWATER_SERVER_SERVICE_LOSS_COMPUTE_LOSS_STREAM_H_
#define HEADWATER_SERVER_SERVICE_LOSS_COMPUTE_LOSS_STREAM_H_

#include <grpcpp/server_context.h>

#include "server/service/loss/raw_stream.h"
#include "server/service/server_core.h"

namespace headwater::service {

// Begins one ComputeLoss call; returns its reactor for gRPC.
RawReactor* StartComputeLoss(ServerCore& core, grpc::CallbackServerContext& context) noexcept;

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_LOSS_COMPUTE_LOSS_STREAM_H_
