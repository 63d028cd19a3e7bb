// From gRPC's status to absl::Status, with reason and metadata as payloads.
#ifndef HEADWATER_CLIENT_CORE_LINK_ERROR_H_
#define HEADWATER_CLIENT_CORE_LINK_ERROR_H_

#include <grpcpp/support/status.h>

#include <map>
#include <string>

#include "absl/status/status.h"
#include "headwater/v1/error.pb.h"

namespace headwater::client::internal {

// `status` must not be OK. `target` is named where the connection, not the server, failed.
absl::Status FromGrpcStatus(const grpc::Status& status, const std::string& target);

// An error that this side found.
absl::Status MakeLocalError(v1::ErrorReason reason, absl::StatusCode code, const std::string& message,
                            const std::map<std::string, std::string>& metadata = {});

// FAILED_PRECONDITION / TRANSPORT_UNAVAILABLE with a sentence.
absl::Status TransportUnavailable(const std::string& why);

// The server's answer does not follow the protocol.
absl::Status MakeAnswerError(const std::string& message);

// The error's text, without its code.
inline std::string Sentence(const absl::Status& status) { return std::string(status.message()); }

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_LINK_ERROR_H_
