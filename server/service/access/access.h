// Access control: every call of every service passes AccessControl::Authorize() before anything is done for it, and what it names
// passes its Caller.
#ifndef HEADWATER_SERVER_SERVICE_ACCESS_ACCESS_H_
#define HEADWATER_SERVER_SERVICE_ACCESS_ACCESS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/heads/head.h"
#include "server/heads/head_name.h"
#include "server/heads/head_registry.h"
#include "server/observability/metrics.h"
#include "server/service/access/token_file.h"

namespace headwater::service {

// Metadata key of the token: "Bearer TOKEN".
inline constexpr char kAuthorizationKey[] = "authorization";

enum class PortRole {
  kData,  // no call that needs admin
  kAll,
};

// The permission that a call needs. Without tokens on the server every caller has all of them.
enum class Permission {
  kNone,     // nothing: also without a token
  kToken,    // a token that the server knows
  kRead,     // compute or admin, on the head that the call names
  kCompute,  // compute, on every head that the call names
  kAdmin,    // admin, on every head that the call names; where admin has ports of its own, only on those
};

// The permission of an UploadWeights that closes no step: it sets weights from outside. Its row is for the trainer's optimizer.
inline constexpr Permission kUploadOutsideStep = Permission::kAdmin;

// A row of the access table: the permission that an RPC needs, of this server's services or of those that gRPC brings along.
struct AccessRow {
  const char* path;  // "/package.Service/Method"
  Permission needs;
};
absl::Span<const AccessRow> AccessTable();
// Null without a row: the RPC is refused.
const AccessRow* FindAccessRow(absl::string_view path);
const AccessRow* FindAccessRow(observability::RpcMethod method);

// The caller of a call, as far as this server cares. Copies are cheap.
class Caller {
 public:
  // Has no call: not to be asked.
  Caller() = default;

  // The call's permission on a head. kHeadNotFound, as if there were none, for a head of another tenant. kPermissionDenied for one
  // that the token's patterns leave out, be it there or not.
  absl::Status CheckHead(const heads::HeadName& name) const { return CheckHead(name, row_->needs); }
  // CheckHead() for a call that needs another permission than its row says.
  absl::Status CheckHead(const heads::HeadName& name, Permission needs) const;
  // CheckHead(), then the head. kHeadNotFound, kPermissionDenied.
  absl::StatusOr<std::shared_ptr<heads::Head>> Find(const heads::HeadRegistry& registry, const heads::HeadName& name) const;
  // kPermissionDenied for another tenant than the token's.
  absl::Status CheckTenant(const std::string& tenant) const;

  // The tenant of a call that names none.
  std::string tenant() const { return grant_ != nullptr ? grant_->tenant : heads::kDefaultTenant; }
  // For logs: the token's name; empty without one.
  std::string token_name() const { return grant_ != nullptr ? grant_->name : ""; }

 private:
  friend class AccessControl;
  absl::Status Denied(Permission needs, const std::string& head) const;
  // kPermissionDenied for a call that needs admin, on a port that does not take it.
  absl::Status CheckPort(Permission needs) const;

  std::shared_ptr<const TokenGrant> grant_;  // null: a server without tokens, or a call that needs none
  const AccessRow* row_ = nullptr;           // of the call
  int64_t version_ = 0;                      // of the token file that the grant is from
  bool free_ = false;                        // a server without tokens
  PortRole role_ = PortRole::kData;
};

// Thread-safe.
class AccessControl {
 public:
  // `token_file` empty: every call is allowed. InvalidArgument for a file that cannot be used.
  static absl::StatusOr<std::unique_ptr<AccessControl>> Create(const std::string& token_file);

  // `row` null: an RPC that the table does not know. `authorization` are the values of kAuthorizationKey that came.
  // kUnauthenticated without a known token. kPermissionDenied for a token that allows such calls on no head at all, and for a port
  // that does not take them.
  absl::StatusOr<Caller> Authorize(const AccessRow* row, PortRole role, const std::vector<absl::string_view>& authorization) const;
  // Authorize() again for a call in progress, by the token file's present contents. Costs nothing while those have not changed.
  absl::Status Recheck(const Caller& caller) const;

 private:
  std::unique_ptr<TokenFile> tokens_;  // null: none
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_ACCESS_ACCESS_H_
