#include "server/service/access/access.h"

#include <cstddef>
#include <iterator>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::service {
namespace {

constexpr AccessRow kRows[] = {
#define HEADWATER_ACCESS_ROW(service, name, needs) {"/headwater.v1." #service "Service/" #name, Permission::needs},
    HEADWATER_RPC_METHODS(HEADWATER_ACCESS_ROW)  // in the order of RpcMethod
#undef HEADWATER_ACCESS_ROW
    // Probes of an orchestrator have no token, and learn only whether the server serves.
    {"/grpc.health.v1.Health/Check", Permission::kNone},
    {"/grpc.health.v1.Health/Watch", Permission::kNone},
    // The second is what newer versions of gRPC serve beside the first.
    {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", Permission::kToken},
    {"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Permission::kToken},
};

const char* PermissionName(Permission permission) {
  constexpr const char* kNames[] = {"none", "token", "read", "compute", "admin"};
  return kNames[static_cast<size_t>(permission)];
}

// Whether a permission follows from the patterns of a token: `holds(patterns)` says so of compute and of admin.
template <typename Holds>
bool Follows(Permission needs, const TokenGrant& grant, Holds holds) {
  return needs == Permission::kNone || needs == Permission::kToken || (needs != Permission::kAdmin && holds(grant.compute)) ||
         (needs != Permission::kCompute && holds(grant.admin));
}

// The token of "Bearer TOKEN"; empty if that is not what came.
absl::string_view BearerToken(absl::string_view authorization) {
  constexpr absl::string_view kScheme = "bearer ";
  if (!absl::StartsWithIgnoreCase(authorization, kScheme)) return {};
  return absl::StripAsciiWhitespace(authorization.substr(kScheme.size()));
}

absl::Status Unauthenticated(const char* got) {
  return MakeError(ErrorReason::kUnauthenticated,
                   absl::StrCat("expected a token of this server in the metadata \"authorization: Bearer TOKEN\", got ", got),
                   {{"expected", "a token"}, {"actual", got}});
}

// Whether the token allows such calls, on some head at least.
bool AllowsSome(const AccessRow* row, const TokenGrant& grant) {
  // An upload may turn out to be the administrator's.
  if (row == FindAccessRow(observability::RpcMethod::kUploadWeights) && !grant.admin.empty()) return true;
  return Follows(row->needs, grant, [](const std::vector<std::string>& patterns) { return !patterns.empty(); });
}

}  // namespace

absl::Span<const AccessRow> AccessTable() { return kRows; }

const AccessRow* FindAccessRow(absl::string_view path) {
  const auto* const row = absl::c_find_if(kRows, [path](const AccessRow& one) { return path == one.path; });
  return row == std::end(kRows) ? nullptr : row;
}

const AccessRow* FindAccessRow(observability::RpcMethod method) { return &kRows[static_cast<size_t>(method)]; }

absl::Status Caller::Denied(Permission needs, const std::string& head) const {
  ErrorMetadata metadata = {{"permission", PermissionName(needs)}, {"method", row_->path}};
  if (!head.empty()) metadata["head"] = head;
  return MakeError(ErrorReason::kPermissionDenied,
                   absl::StrCat(row_->path, " needs the permission ", PermissionName(needs), head.empty() ? "" : " on ", head,
                                ", which this token does not have"),
                   std::move(metadata));
}

absl::Status Caller::CheckHead(const heads::HeadName& name, Permission needs) const {
  if (!free_) {
    if (grant_ == nullptr) return Denied(needs, "");
    if (name.tenant != grant_->tenant) return heads::HeadNotFound(name);
    const auto matches = [&](const std::string& pattern) { return MatchesPattern(pattern, name.head); };
    if (!Follows(needs, *grant_, [&](const auto& patterns) { return absl::c_any_of(patterns, matches); })) {
      return Denied(needs, name.ToString());
    }
  }
  return CheckPort(needs);
}

absl::Status Caller::CheckPort(Permission needs) const {
  if (needs != Permission::kAdmin || role_ != PortRole::kData) return absl::OkStatus();
  return MakeError(ErrorReason::kPermissionDenied,
                   absl::StrCat(row_->path, " needs a port that takes admin calls (admin_listen_addresses), and this one does not"),
                   {{"permission", PermissionName(needs)}, {"method", row_->path}, {"expected", "admin_listen_addresses"}});
}

absl::StatusOr<std::shared_ptr<heads::Head>> Caller::Find(const heads::HeadRegistry& registry, const heads::HeadName& name) const {
  HEADWATER_RETURN_IF_ERROR(CheckHead(name));
  return registry.Find(name);
}

absl::Status Caller::CheckTenant(const std::string& tenant) const {
  if (free_ || (grant_ != nullptr && grant_->tenant == tenant)) return absl::OkStatus();
  return MakeError(
      ErrorReason::kPermissionDenied,
      absl::StrCat(row_->path, ": expected the token's tenant, tenants/", Caller::tenant(), ", got another"),
      {{"permission", PermissionName(row_->needs)}, {"method", row_->path}, {"expected", "tenants/" + Caller::tenant()}});
}

absl::StatusOr<std::unique_ptr<AccessControl>> AccessControl::Create(const std::string& token_file) {
  auto access = std::make_unique<AccessControl>();
  if (token_file.empty()) return access;
  HEADWATER_ASSIGN_OR_RETURN(access->tokens_, TokenFile::Open(token_file));
  return access;
}

absl::StatusOr<Caller> AccessControl::Authorize(const AccessRow* row, PortRole role,
                                                const std::vector<absl::string_view>& authorization) const {
  if (row == nullptr) {
    return MakeError(ErrorReason::kPermissionDenied, "this server's access table does not know the call, so nobody may make it");
  }
  Caller caller;
  caller.role_ = role;
  caller.row_ = row;
  caller.free_ = tokens_ == nullptr;
  if (!caller.free_ && row->needs != Permission::kNone) {
    if (authorization.empty()) return Unauthenticated("none");
    if (authorization.size() > 1) return Unauthenticated("several");
    const absl::string_view token = BearerToken(authorization.front());
    if (token.empty()) return Unauthenticated("another form of it");
    caller.version_ = tokens_->version();  // before: a grant that is newer than this is looked at once more
    caller.grant_ = tokens_->Find(token);
    if (caller.grant_ == nullptr) return Unauthenticated("one that it does not know");
    if (!AllowsSome(row, *caller.grant_)) return caller.Denied(row->needs, "");
  }
  HEADWATER_RETURN_IF_ERROR(caller.CheckPort(row->needs));
  return caller;
}

absl::Status AccessControl::Recheck(const Caller& caller) const {
  if (caller.grant_ == nullptr || tokens_->version() == caller.version_) return absl::OkStatus();
  const std::shared_ptr<const TokenGrant> grant = tokens_->FindSha256(caller.grant_->sha256);
  if (grant == nullptr) return Unauthenticated("one that it does not know any more");
  if (grant->tenant != caller.grant_->tenant || !AllowsSome(caller.row_, *grant)) return caller.Denied(caller.row_->needs, "");
  return absl::OkStatus();
}

}  // namespace headwater::service
