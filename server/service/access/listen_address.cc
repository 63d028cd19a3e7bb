#include "server/service/access/listen_address.h"

#include <grp.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace headwater::service {
namespace {

absl::Status NoOwner(const char* what, const std::string& name) {
  return absl::InvalidArgumentError(absl::StrCat("unix_socket_owner: there is no ", what, " \"", name, "\""));
}

}  // namespace

absl::StatusOr<ListenAddress> ParseListenAddress(const std::string& address) {
  ListenAddress parsed;
  absl::string_view path = address;
  if (absl::ConsumePrefix(&path, "unix:")) {
    absl::ConsumePrefix(&path, "//");
    parsed.path = std::string(path);
    if (!path.empty()) return parsed;
  }
  // Others than unix: have no permissions (unix-abstract:), or are not what a server listens on.
  const size_t colon = address.rfind(':');
  if (colon != std::string::npos && colon > 0 && !absl::StartsWith(address, "unix") && !absl::StrContains(address, "/") &&
      absl::SimpleAtoi(address.substr(colon + 1), &parsed.port) && parsed.port >= 0 && parsed.port <= 65535) {
    parsed.host = address.substr(0, colon);
    return parsed;
  }
  return absl::InvalidArgumentError(absl::StrCat("expected host:port or unix:PATH, got \"", address, "\""));
}

bool ListenAddress::is_local() const {
  return is_unix() || host == "localhost" || host == "[::1]" || host == "::1" || absl::StartsWith(host, "127.");
}

absl::StatusOr<SocketAccess> MakeSocketAccess(const std::string& owner, int mode) {
  if (mode < 0 || mode > 0777) {
    return absl::InvalidArgumentError("unix_socket_mode: expected permissions from 0 to 0777, in octal");
  }
  SocketAccess access;
  access.mode = static_cast<mode_t>(mode);
  const size_t colon = owner.find(':');
  const std::string user = owner.substr(0, colon);
  const std::string group = colon == std::string::npos ? "" : owner.substr(colon + 1);
  uint32_t number = 0;
  if (absl::SimpleAtoi(user, &number)) {
    access.user = number;
  } else if (!user.empty()) {
    const passwd* const entry = getpwnam(user.c_str());  // NOLINT(concurrency-mt-unsafe): at the start
    if (entry == nullptr) return NoOwner("user", user);
    access.user = entry->pw_uid;
  }
  if (absl::SimpleAtoi(group, &number)) {
    access.group = number;
  } else if (!group.empty()) {
    const ::group* const entry = getgrnam(group.c_str());  // NOLINT(concurrency-mt-unsafe): at the start
    if (entry == nullptr) return NoOwner("group", group);
    access.group = entry->gr_gid;
  }
  return access;
}

absl::Status SetSocketAccess(const std::string& path, const SocketAccess& access) {
  const auto cannot = [&](const char* what) {
    return absl::UnavailableError(absl::StrCat("unix:", path, ": cannot set ", what, ": ", std::strerror(errno)));
  };
  // The owner first: until then no other user has any permission.
  if ((access.user.has_value() || access.group.has_value()) &&
      lchown(path.c_str(), access.user.value_or(static_cast<uid_t>(-1)), access.group.value_or(static_cast<gid_t>(-1))) != 0) {
    return cannot("unix_socket_owner");
  }
  if (chmod(path.c_str(), access.mode) != 0) return cannot("unix_socket_mode");
  return absl::OkStatus();
}

}  // namespace headwater::service
