// The access table: which permission every RPC needs, of this server's services and of those that gRPC brings along. An RPC without
// a row is refused.
#ifndef HEADWATER_SERVER_SERVICE_ACCESS_ACCESS_TABLE_H_
#define HEADWATER_SERVER_SERVICE_ACCESS_ACCESS_TABLE_H_

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/observability/metrics.h"

namespace headwater::service {

// The permission that a call needs. Without tokens on the server every caller has all of them.
enum class Permission {
  kNone,     // nothing: also without a token
  kToken,    // a token that the server knows
  kRead,     // compute or admin, on the head that the call names
  kCompute,  // compute, on every head that the call names
  kAdmin,    // admin, on every head that the call names; where admin has ports of its own, only on those
};

// `read`, `compute`, ... The pointer is static.
const char* PermissionName(Permission permission);

struct AccessRow {
  const char* path;  // "/package.Service/Method"
  Permission needs;
};

absl::Span<const AccessRow> AccessTable();
// Null without a row.
const AccessRow* FindAccessRow(absl::string_view path);
const AccessRow* FindAccessRow(observability::RpcMethod method);

// The permission of an UploadWeights that closes no step: it sets weights from outside. Its row is for the trainer's optimizer.
inline constexpr Permission kUploadOutsideStep = Permission::kAdmin;

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_ACCESS_ACCESS_TABLE_H_
