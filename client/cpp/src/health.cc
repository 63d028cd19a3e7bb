#include "client/cpp/src/health.h"

#include <google/protobuf/empty.pb.h>
#include <google/protobuf/unknown_field_set.h>

#include "client/cpp/src/calls.h"

namespace headwater::client::internal {
absl::StatusOr<HealthStatus> CheckHealth(Core& core, const std::string& service, const CallOptions& options) {
  google::protobuf::Empty request;  // message HealthCheckRequest { string service = 1; }
  const google::protobuf::Reflection& reflection = *google::protobuf::Empty::GetReflection();
  if (!service.empty()) reflection.MutableUnknownFields(&request)->AddLengthDelimited(1, service);
  const auto response = Run<google::protobuf::Empty>(core, "/grpc.health.v1.Health/Check", request, DeadlineOf(core, options));
  if (response.status().code() == absl::StatusCode::kNotFound) return HealthStatus::kServiceUnknown;
  if (!response.ok()) return response.status();
  // message HealthCheckResponse { ServingStatus status = 1; }
  const google::protobuf::UnknownFieldSet& fields = reflection.GetUnknownFields(*response);
  HealthStatus status = HealthStatus::kUnknown;
  for (int i = 0; i < fields.field_count(); ++i) {
    const google::protobuf::UnknownField& field = fields.field(i);
    if (field.number() == 1 && field.type() == google::protobuf::UnknownField::TYPE_VARINT) {
      status = static_cast<HealthStatus>(field.varint());
    }
  }
  return status;
}

}  // namespace headwater::client::internal
