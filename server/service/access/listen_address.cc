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

namespace headwater::service {
namespace {

constexpr char kUnix[] = "unix:";

absl::Status NoOwner(const char* what, const std::string& name) {
  return absl::InvalidArgumentError(absl::StrCat("unix_socket_owner: there is no ", what, " \"", name, "\""));
}

}  // namespace

absl::Status CheckListenAddress(const std::string& address) {
  if (IsUnixAddress(address) && !SocketPath(address).empty()) return absl::OkStatus();
  // Others than unix: have no permissions (unix-abstract:), or are not what a server listens on.
  const size_t colon = address.rfind(':');
  int port = 0;
  if (colon != std::string::npos && colon > 0 && !absl::StartsWith(address, "unix") && !absl::StrContains(address, "/") &&
      absl::SimpleAtoi(address.substr(colon + 1), &port) && port >= 0 && port <= 65535) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("expected host:port or unix:PATH, got \"", address, "\""));
}

bool IsUnixAddress(const std::string& address) { return absl::StartsWith(address, kUnix); }

std::string SocketPath(const std::string& address) {
  const std::string path = address.substr(sizeof(kUnix) - 1);
  return absl::StartsWith(path, "//") ? path.substr(2) : path;
}

std::pair<std::string, int> HostAndPort(const std::string& address) {
  const size_t colon = address.rfind(':');
  int port = 0;
  if (!absl::SimpleAtoi(address.substr(colon + 1), &port)) port = 0;
  return {address.substr(0, colon), port};
}

bool IsLocalAddress(const std::string& address) {
  if (IsUnixAddress(address)) return true;
  const std::string host = address.substr(0, address.rfind(':'));
  return host == "localhost" || host == "[::1]" || host == "::1" || absl::StartsWith(host, "127.");
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

absl::Status SetSocketAccess(const std::string& address, const SocketAccess& access) {
  const std::string path = SocketPath(address);
  const auto cannot = [&](const char* what) {
    return absl::UnavailableError(absl::StrCat(address, ": cannot set ", what, ": ", std::strerror(errno)));
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
