// `top`: the activity of a server, refreshed repeatedly.
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "absl/flags/declare.h"
#include "absl/flags/flag.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/core/link/target.h"
#include "client/ctl/arguments.h"
#include "client/ctl/command.h"
#include "client/ctl/command_top_view.h"
#include "client/ctl/connection.h"
#include "client/ctl/metrics_page.h"
#include "client/ctl/table.h"
#include "server/flags/flag_types.h"

ABSL_FLAG(
    std::string, metrics, "",
    "host:port of the server's --metrics_address; if not given: port 9464 of --server's host, of this host for a Unix socket");
ABSL_FLAG(headwater::DurationFlag, interval, absl::Seconds(2), "time between two looks, at least 100ms; rates are over it");
ABSL_FLAG(bool, once, false, "look twice, print once, and end");
ABSL_DECLARE_FLAG(headwater::DurationFlag, connect_timeout);

namespace headwater::ctl {
namespace {

constexpr char kDefaultPort[] = ":9464";
constexpr char kWhereMetricsAre[] = "does headwaterd serve metrics there (--metrics_address)? --metrics says where to look";
constexpr absl::Duration kShortestInterval = absl::Milliseconds(100);
// ANSI: to the top left, erase to the end of the line, erase the rest below.
constexpr char kHome[] = "\x1b[H";
constexpr char kEraseLine[] = "\x1b[K\n";
constexpr char kEraseBelow[] = "\x1b[J";

std::string MetricsAddress() {
  const std::string given = absl::GetFlag(FLAGS_metrics);
  if (!given.empty()) return given;
  const std::string server = ServerAddress();
  if (client::internal::IsUnix(server)) return absl::StrCat("127.0.0.1", kDefaultPort);
  const std::string host = client::internal::HostOf(server);
  return absl::StrCat(absl::StrContains(host, ":") ? absl::StrCat("[", host, "]") : host, kDefaultPort);
}

// A page, and when it came.
struct Look {
  MetricsPage page;
  absl::Time time;
};

absl::StatusOr<Look> LookNow(const std::string& address) {
  const auto text = FetchMetrics(address, absl::GetFlag(FLAGS_connect_timeout));
  if (!text.ok()) {
    if (absl::IsInvalidArgument(text.status())) return UsageError(absl::StrCat("--metrics: ", text.status().message()));
    return WithHint(text.status(), kWhereMetricsAre);
  }
  const absl::Time time = absl::Now();
  auto page = MetricsPage::Parse(*text);
  if (!page.ok()) return WithHint(page.status(), kWhereMetricsAre);
  if (!page->Sum("headwater_serving").has_value()) {
    return WithHint(absl::UnavailableError(absl::StrCat("http://", address, "/metrics is not headwaterd's")), kWhereMetricsAre);
  }
  return Look{*std::move(page), time};
}

bool IsTerminal() {
  const char* const kind = std::getenv("TERM");
  return isatty(STDOUT_FILENO) == 1 && kind != nullptr && std::string(kind) != "dumb";
}

// On a terminal over the former text, else below it.
void Show(const std::string& text, bool terminal) {
  if (terminal) {
    PrintRaw(absl::StrCat(kHome, absl::StrReplaceAll(Printable(text, /*lines=*/true), {{"\n", kEraseLine}}), kEraseBelow));
  } else {
    PrintRaw(absl::StrCat(Printable(text, /*lines=*/true), "\n"));
  }
}

absl::StatusOr<ExitCode> RunTop(client::Client& client, const std::vector<std::string>&, Output& output) {
  const absl::Duration interval = absl::GetFlag(FLAGS_interval);
  if (interval < kShortestInterval) {
    return UsageError(absl::StrCat("--interval: expected at least 100ms, got ", absl::FormatDuration(interval)));
  }
  const bool once = absl::GetFlag(FLAGS_once);
  const bool terminal = !once && !output.json() && IsTerminal();
  const std::string address = MetricsAddress();
  auto before = LookNow(address);
  if (!before.ok()) return before.status();
  do {
    absl::SleepFor(interval);
    auto after = LookNow(address);
    if (!after.ok()) {
      // A person at a terminal sees the server come back; a script gets the error.
      if (!terminal) return after.status();
      Show(absl::StrCat(Printable(std::string(after.status().message())), "\n"), terminal);
      continue;
    }
    const auto heads = client.ListHeads();
    const nlohmann::json figures = TopJson(ServerAddress(), before->page, after->page,
                                           absl::ToDoubleSeconds(std::max(after->time - before->time, kShortestInterval)),
                                           absl::ToDoubleSeconds(after->time - absl::UnixEpoch()), heads);
    if (output.json()) {
      output.Print("", figures);
    } else {
      Show(TopText(figures, heads), terminal);
    }
    before = std::move(after);
  } while (!once && OutputError() == 0);  // stop when the output cannot be printed
  return kExitOk;
}

}  // namespace

Command TopCommand() {
  return {
      .name = "top",
      .summary = "shows what the server is doing, again and again",
      .help =
          "Throughput, engine, times of a micro-batch, queue, memory, transports and the tenant's heads. Figures are those of\n"
          "the metrics (docs/metrics.md), which the server must serve (--metrics_address); heads are asked for as `heads` does.\n"
          "On a terminal each look takes the place of the last one, until Ctrl-C; otherwise, and with --json, they follow each\n"
          "other.\n",
      .flags = {"metrics", "interval", "once"},
      .run = RunTop};
}

}  // namespace headwater::ctl
