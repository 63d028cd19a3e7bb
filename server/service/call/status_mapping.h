// The one place where errors become gRPC statuses.
#ifndef HEADWATER_SERVER_SERVICE_CALL_STATUS_MAPPING_H_
#define HEADWATER_SERVER_SERVICE_CALL_STATUS_MAPPING_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace headwater::service {

// Code and message of `status`, and in grpc-status-details-bin an RpcStatus with one ErrorInfo and, if the metadata says
// `retryAfterMs`, one RetryInfo. An error without a reason, which our own code does not make, is INTERNAL with a general text: its
// own text belongs into the log. Texts are cut so that the trailers stay below gRPC's default of 8 KiB.
grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_CALL_STATUS_MAPPING_H_
