// TokenFile: the bearer tokens that a server knows, from a file that is read again when it changes. docs/security.md has the
// format.
#ifndef HEADWATER_SERVER_SERVICE_ACCESS_TOKEN_FILE_H_
#define HEADWATER_SERVER_SERVICE_ACCESS_TOKEN_FILE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/observability/repeated_task.h"

namespace headwater::service {

// The file's entry for one token.
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

class TokenFile {
 public:
  // The file is looked at every second. InvalidArgument if it cannot be read or is malformed, or if others than its owner's
  // group may write it.
  static absl::StatusOr<std::unique_ptr<TokenFile>> Open(const std::string& path);
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;

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

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_ACCESS_TOKEN_FILE_H_
