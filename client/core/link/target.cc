#include "client/core/link/target.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/core/link/error.h"

namespace headwater::client::internal {

namespace {

constexpr char kUnix[] = "unix:";
constexpr char kUnixAbstract[] = "unix-abstract:";
// The longest path that a sockaddr_un holds, beside the zero byte at a path's end or before an abstract name.
constexpr size_t kMostPathBytes = sizeof(sockaddr_un{}.sun_path) - 1;

absl::Status InvalidTarget(const std::string& target, const std::string& expected) {
  return MakeLocalError(v1::ERROR_REASON_INVALID_FIELD, absl::StatusCode::kInvalidArgument,
                        absl::StrCat("target: expected ", expected, ", got \"", target, "\""),
                        {{"field", "target"}, {"expected", expected}, {"actual", target}});
}

absl::Status CheckUnixTarget(const std::string& target, absl::string_view name, bool is_path) {
  if (is_path && absl::ConsumePrefix(&name, "//") && !absl::StartsWith(name, "/")) {
    return InvalidTarget(target, absl::StrCat("unix:PATH (behind unix:// a host would stand; the path may be unix:/", name,
                                              " or, relative, unix:", name, ")"));
  }
  if (name.size() <= kMostPathBytes) return absl::OkStatus();
  return InvalidTarget(target, absl::StrCat(is_path ? "a socket's path" : "an abstract socket's name", " of at most ",
                                            kMostPathBytes, " bytes (it has ", name.size(), ")"));
}

}  // namespace

// gRPC takes anything, and would wait for it.
absl::Status CheckTarget(const std::string& target) {
  absl::string_view rest = target;
  bool valid = false;
  const bool is_path = absl::ConsumePrefix(&rest, kUnix);
  if (is_path || absl::ConsumePrefix(&rest, kUnixAbstract)) {
    if (!rest.empty()) return CheckUnixTarget(target, rest, is_path);
  } else {
    if (absl::ConsumePrefix(&rest, "dns:") && absl::ConsumePrefix(&rest, "//")) {
      rest.remove_prefix(std::min(rest.size(), rest.find('/') + 1));  // an authority
    } else if (!absl::ConsumePrefix(&rest, "ipv4:")) {
      absl::ConsumePrefix(&rest, "ipv6:");
    }
    const size_t colon = rest.rfind(':');
    const absl::string_view host = rest.substr(0, colon);
    int port = 0;
    const bool bracketed = absl::StartsWith(host, "[") && absl::EndsWith(host, "]") && host.size() > 2;
    valid = colon != absl::string_view::npos && absl::SimpleAtoi(rest.substr(colon + 1), &port) && port >= 1 && port <= 65535 &&
            (bracketed || (!host.empty() && host.find_first_of(":/, ") == absl::string_view::npos));
  }
  if (valid) return absl::OkStatus();
  return InvalidTarget(target,
                       "host:port (an IPv6 host in brackets, before it dns:, ipv4: or ipv6: if need be), unix:PATH or "
                       "unix-abstract:NAME");
}

bool IsUnix(absl::string_view target) { return absl::StartsWith(target, kUnix) || absl::StartsWith(target, kUnixAbstract); }

std::string ToGrpcTarget(const std::string& target) {
  if (!IsUnix(target)) return target;
  const size_t name = target.find(':') + 1;
  std::string result = target.substr(0, name);
  for (const char c : target.substr(name)) {
    if (absl::ascii_isalnum(static_cast<unsigned char>(c)) || absl::StrContains("/-._~", c)) {
      result.push_back(c);
    } else {
      absl::StrAppend(&result, "%", absl::Hex(static_cast<unsigned char>(c), absl::kZeroPad2));
    }
  }
  return result;
}

std::string HostOf(absl::string_view target) {
  for (const absl::string_view scheme : {"dns:", "ipv4:", "ipv6:"}) absl::ConsumePrefix(&target, scheme);
  target.remove_prefix(target.rfind('/') == absl::string_view::npos ? 0 : target.rfind('/') + 1);
  if (absl::StartsWith(target, "[")) return std::string(target.substr(1, target.find(']') - 1));
  const size_t colon = target.find(':');
  return std::string(colon == target.rfind(':') ? target.substr(0, colon) : target);  // more than one: a bare IPv6 address
}

}  // namespace headwater::client::internal
