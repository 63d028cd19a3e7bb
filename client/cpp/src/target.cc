#include "client/cpp/src/target.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/cpp/src/error.h"

namespace headwater::client::internal {

// gRPC takes anything, and WaitForConnected() would wait for it.
absl::Status CheckTarget(const std::string& target) {
  absl::string_view rest = target;
  bool valid = false;
  if (absl::ConsumePrefix(&rest, "unix:") || absl::ConsumePrefix(&rest, "unix-abstract:")) {
    valid = !rest.empty();
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
  constexpr char kExpected[] =
      "host:port (an IPv6 host in brackets, before it dns:, ipv4: or ipv6: if need be), unix:PATH or "
      "unix-abstract:NAME";
  return MakeLocalError(v1::ERROR_REASON_INVALID_FIELD, absl::StatusCode::kInvalidArgument,
                        absl::StrCat("target: expected ", kExpected, ", got \"", target, "\""),
                        {{"field", "target"}, {"expected", kExpected}, {"actual", target}});
}

bool IsUnix(absl::string_view target) { return absl::StartsWith(target, "unix:") || absl::StartsWith(target, "unix-abstract:"); }

std::string HostOf(absl::string_view target) {
  for (const absl::string_view scheme : {"dns:", "ipv4:", "ipv6:"}) absl::ConsumePrefix(&target, scheme);
  target.remove_prefix(target.rfind('/') == absl::string_view::npos ? 0 : target.rfind('/') + 1);
  if (absl::StartsWith(target, "[")) return std::string(target.substr(1, target.find(']') - 1));
  const size_t colon = target.find(':');
  return std::string(colon == target.rfind(':') ? target.substr(0, colon) : target);  // more than one: a bare IPv6 address
}

}  // namespace headwater::client::internal
