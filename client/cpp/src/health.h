// grpc.health.v1 without its generated code, which the distributions do not package.
#ifndef HEADWATER_CLIENT_SRC_HEALTH_H_
#define HEADWATER_CLIENT_SRC_HEALTH_H_

#include <string>

#include "absl/status/statusor.h"
#include "client/core/core.h"

namespace headwater::client::internal {

absl::StatusOr<HealthStatus> CheckHealth(Core& core, const std::string& service, const CallOptions& options);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_HEALTH_H_
