// Access control: every call of every service passes AccessControl::Authorize() before anything is done for it, and what it names
// passes its Caller.
#ifndef HEADWATER_SERVER_SERVICE_ACCESS_ACCESS_H_
#define HEADWATER_SERVER_SERVICE_ACCESS_ACCESS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "server/heads/head.h"
#include "server/heads/head_name.h"
#include "server/heads/head_registry.h"
#include "server/observability/metrics.h"
#include "server/observability/repeated_task.h"

namespace headwater::service {

// The token file's entry for one token.
struct TokenGrant {
  std::string name;                  // for logs
  std::array<uint8_t, 32> sha256{};  // of the token's bytes
  std::string tenant;                // all that the token can see
  std::vector<std::string> compute;  // patterns of ids of heads, `*` being any characters
  std::vector<std::string> admin;    // patterns of ids of heads
};

using TokenGrants = std::vector<std::shared_ptr<const TokenGrant>>;

// Whether the id of a head matches `pattern`.
bool MatchesPattern(absl::string_view pattern, absl::string_view id);

// kFileCorrupt, with the place and what was expected there. Never quotes a value, which could be a token put in the wrong place.
absl::StatusOr<TokenGrants> ParseTokens(const std::string& text);

// The bearer tokens that a server knows, from a file that is read again when it changes. docs/security.md has the format.
class TokenFile {
 public:
  // The file is looked at every second. InvalidArgument if it cannot be read or is malformed, or if others than its owner's
  // group may write it.
  static absl::StatusOr<std::unique_ptr<TokenFile>> Open(const std::string& path);

  // Null if the token is not known. Takes as long for any token of that length.
  std::shared_ptr<const TokenGrant> Find(absl::string_view token) const;
  // Find() by the token's SHA-256.
  std::shared_ptr<const TokenGrant> FindSha256(const std::array<uint8_t, 32>& sha256) const;
  // Rises when other contents are taken, before they can be found.
  int64_t version() const { return version_.load(); }

 private:
  TokenFile(std::string path, std::string text, TokenGrants grants);
  // Takes the file's present contents; keeps the earlier ones if these are of no use.
  void Reload();

  const std::string path_;
  std::string text_;     // of look_: what the grants are from
  std::string trouble_;  // of look_: what was logged last
  std::atomic<int64_t> version_{1};
  mutable absl::Mutex mutex_;
  std::shared_ptr<const TokenGrants> grants_ ABSL_GUARDED_BY(mutex_);
  observability::RepeatedTask look_;  // last: it uses the members above
};

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
