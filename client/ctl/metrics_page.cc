#include "client/ctl/metrics_page.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "client/core/link/socket.h"

namespace headwater::ctl {
namespace {

constexpr size_t kMostBytes = 16 << 20;

absl::Status Unreachable(const std::string& address, const std::string& why) {
  return absl::UnavailableError(absl::StrCat("cannot get http://", address, "/metrics: ", why));
}

// Connects, sends `request`, and reads until the other side closes.
absl::StatusOr<std::string> Exchange(const addrinfo& to, const std::string& request, absl::Time deadline) {
  client::internal::Socket socket(to.ai_family, SOCK_STREAM, absl::ToChronoTime(deadline));
  const auto failed = [](const char* late) { return absl::UnavailableError(errno == ETIMEDOUT ? late : std::strerror(errno)); };
  if (socket.Connect(to.ai_addr, to.ai_addrlen) != 0) return failed("no answer came in time");
  for (size_t sent = 0; sent < request.size();) {
    const ssize_t count =
        socket.Do(POLLOUT, [&] { return send(socket.fd(), request.data() + sent, request.size() - sent, MSG_NOSIGNAL); });
    if (count < 0) return failed("it took no request in time");
    sent += static_cast<size_t>(count);
  }
  std::string answer;
  std::string buffer(1 << 16, '\0');
  while (answer.size() <= kMostBytes) {
    const ssize_t count = socket.Do(POLLIN, [&] { return recv(socket.fd(), buffer.data(), buffer.size(), 0); });
    if (count < 0) return failed("the answer was not complete in time");
    if (count == 0) return answer;
    answer.append(buffer, 0, static_cast<size_t>(count));
  }
  return absl::UnavailableError("the answer has no end");
}

// Reads `{a="x",b="y"}` at the beginning of `*rest`, if there is one, and takes it away; false if it is malformed.
bool TakeLabels(absl::string_view* rest, std::map<std::string, std::string>* labels) {
  if (!absl::ConsumePrefix(rest, "{")) return true;
  while (!absl::ConsumePrefix(rest, "}")) {
    const size_t equals = rest->find("=\"");
    if (equals == absl::string_view::npos) return false;
    std::string& value = (*labels)[std::string(rest->substr(0, equals))];
    for (rest->remove_prefix(equals + 2); !absl::ConsumePrefix(rest, "\""); rest->remove_prefix(1)) {
      absl::ConsumePrefix(rest, "\\");
      if (rest->empty()) return false;
      value += rest->front();
    }
    absl::ConsumePrefix(rest, ",");
  }
  return true;
}

bool Includes(const std::map<std::string, std::string>& labels, const std::map<std::string, std::string>& wanted) {
  return std::all_of(wanted.begin(), wanted.end(), [&](const auto& entry) {
    const auto found = labels.find(entry.first);
    return found != labels.end() && found->second == entry.second;
  });
}

}  // namespace

absl::StatusOr<std::string> FetchMetrics(const std::string& address, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == address.size()) {
    return absl::InvalidArgumentError(absl::StrCat("expected host:port, got \"", address, "\""));
  }
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (const int error = getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &list); error != 0) {
    return Unreachable(address, gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(list, freeaddrinfo);
  // HTTP 1.0: the answer is not cut into chunks, and ends with the connection. A zone is this host's own name for a link, and is
  // not sent to the other side.
  const size_t zone = host.find('%');
  const std::string told =
      zone == std::string::npos ? address : absl::StrCat("[", host.substr(0, zone), "]", address.substr(colon));
  const std::string request = absl::StrCat("GET /metrics HTTP/1.0\r\nHost: ", told, "\r\nConnection: close\r\n\r\n");
  absl::StatusOr<std::string> answer = absl::UnavailableError("the host has no address");
  for (const addrinfo* to = list; to != nullptr && !answer.ok(); to = to->ai_next) answer = Exchange(*to, request, deadline);
  if (!answer.ok()) return Unreachable(address, std::string(answer.status().message()));
  const size_t body = answer->find("\r\n\r\n");
  const absl::string_view first = absl::string_view(*answer).substr(0, answer->find("\r\n"));
  if (body == std::string::npos || !absl::StartsWith(first, "HTTP/1.")) return Unreachable(address, "the answer is not HTTP");
  const std::vector<absl::string_view> words = absl::StrSplit(first, ' ');
  if (words.size() < 2 || words[1] != "200") return Unreachable(address, absl::StrCat("the answer is ", first));
  return answer->substr(body + 4);
}

absl::StatusOr<MetricsPage> MetricsPage::Parse(absl::string_view text) {
  MetricsPage page;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    absl::string_view rest = absl::StripAsciiWhitespace(line);
    if (rest.empty() || rest.front() == '#') continue;
    const size_t end = rest.find_first_of("{ ");
    Sample sample;
    const std::string name(rest.substr(0, end));
    rest.remove_prefix(std::min(end, rest.size()));
    const bool labels_fit = TakeLabels(&rest, &sample.labels);
    const std::vector<absl::string_view> words = absl::StrSplit(rest, ' ', absl::SkipEmpty());  // value, and perhaps a time
    if (!labels_fit || words.empty() || words.size() > 2 || !absl::SimpleAtod(words[0], &sample.value)) {
      return absl::InvalidArgumentError(absl::StrCat("not a line of a page of metrics: ", line.substr(0, 200)));
    }
    page.samples_[name].push_back(std::move(sample));
  }
  return page;
}

const std::vector<MetricsPage::Sample>& MetricsPage::Family(const std::string& name) const {
  static const auto* const none = new std::vector<Sample>;
  const auto family = samples_.find(name);
  return family == samples_.end() ? *none : family->second;
}

std::optional<double> MetricsPage::Sum(const std::string& name, const std::map<std::string, std::string>& labels) const {
  std::optional<double> sum;
  for (const Sample& sample : Family(name)) {
    if (Includes(sample.labels, labels)) sum = sum.value_or(0) + sample.value;
  }
  return sum;
}

std::map<std::string, double> MetricsPage::SumBy(const std::string& name, const std::string& label) const {
  std::map<std::string, double> sums;
  for (const Sample& sample : Family(name)) {
    if (const auto value = sample.labels.find(label); value != sample.labels.end()) sums[value->second] += sample.value;
  }
  return sums;
}

std::string MetricsPage::Label(const std::string& name, const std::string& label) const {
  const std::vector<Sample>& family = Family(name);
  return family.empty() || !family.front().labels.contains(label) ? "" : family.front().labels.at(label);
}

}  // namespace headwater::ctl
