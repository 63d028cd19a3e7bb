#include "client/ctl/command_top_view.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "client/ctl/output.h"
#include "client/ctl/table.h"
#include "headwater/client/client.h"

namespace headwater::ctl {
namespace {

constexpr const char* kPhases[] = {"upload", "queue", "compute", "download", "commit"};

// "1.23k", "45.6", "0".
std::string FormatRate(double rate) {
  static constexpr const char* kUnits[] = {"", "k", "M", "G", "T", "P"};
  size_t unit = 0;
  while (rate >= 999.5 && unit + 1 < std::size(kUnits)) {
    rate /= 1000;
    ++unit;
  }
  return absl::StrCat(rate == 0 ? "0" : absl::StrFormat("%.3g", rate), kUnits[unit]);
}

std::string FormatSeconds(double seconds) {
  if (seconds < 1e-3) return absl::StrFormat("%.0f us", seconds * 1e6);
  return seconds < 1 ? absl::StrFormat("%.1f ms", seconds * 1e3) : absl::StrFormat("%.2f s", seconds);
}

std::string FormatShare(double share) { return absl::StrFormat("%.0f %%", 100 * share); }

std::string FormatByteRate(double rate) { return absl::StrCat(FormatBytes(static_cast<int64_t>(rate)), "/s"); }

// "a 1, b 2"; `none` without any.
std::string ListRates(const std::map<std::string, double>& rates, const char* none) {
  std::string text;
  for (const auto& [name, rate] : rates) {
    if (rate > 0) absl::StrAppend(&text, text.empty() ? "" : ", ", name, " ", FormatRate(rate));
  }
  return text.empty() ? none : text;
}

std::string HeadsText(const absl::StatusOr<std::vector<client::HeadInfo>>& heads) {
  if (!heads.ok()) return absl::StrCat("heads: ", Printable(std::string(heads.status().message())), "\n");
  if (heads->empty()) return "no heads\n";
  Table table({"HEAD", "STATE", ">VOCAB", ">HIDDEN", "KIND", ">STEP", ">VERSION", ">MEMORY"});
  for (const client::HeadInfo& head : *heads) {
    table.AddRow({head.name, client::HeadStateName(head.state), FormatCount(head.spec.vocab_size),
                  FormatCount(head.spec.hidden_size), head.spec.trainable ? "trainable" : "frozen",
                  head.open_step.has_value() ? absl::StrCat(*head.open_step) : "-", absl::StrCat(head.weight_version),
                  FormatBytes(head.memory_plan.total_bytes)});
  }
  return table.ToString();
}

}  // namespace

TopFigures FiguresOf(const MetricsPage& before, const MetricsPage& after, double seconds, double now) {
  const auto increase = [&](const std::string& name, const std::map<std::string, std::string>& labels = {}) {
    const double last = after.Sum(name, labels).value_or(0);
    const double first = before.Sum(name, labels).value_or(0);
    return last >= first ? last - first : last;
  };
  const auto rate = [&](const std::string& name, const std::map<std::string, std::string>& labels = {}) {
    return increase(name, labels) / seconds;
  };
  const auto gauge = [&](const std::string& name) { return after.Sum(name).value_or(0); };
  const auto mean = [&](const std::string& name) -> std::optional<double> {
    const double count = increase(name + "_count");
    if (count <= 0) return std::nullopt;
    return increase(name + "_sum") / count;
  };

  TopFigures figures;
  figures.seconds = seconds;
  figures.serving = gauge("headwater_serving") == 1;
  figures.version = after.Label("headwater_build_info", "version");
  figures.engine = after.Label("headwater_build_info", "engine");
  if (const auto start = after.Sum("process_start_time_seconds")) figures.uptime_s = std::max(0.0, now - *start);
  figures.tokens = rate("headwater_tokens_total");
  figures.steps = rate("headwater_steps_total");
  figures.contributions = rate("headwater_commits_total");
  figures.non_finite_rows = rate("headwater_non_finite_rows_total");
  for (const auto& [outcome, total] : after.SumBy("headwater_micro_batches_total", "outcome")) {
    figures.micro_batches[outcome] = rate("headwater_micro_batches_total", {{"outcome", outcome}});
  }
  for (const auto& [reason, total] : after.SumBy("headwater_refusals_total", "reason")) {
    const double refused = rate("headwater_refusals_total", {{"reason", reason}});
    if (refused > 0) figures.refusals[reason] = refused;
  }
  for (const auto& [transport, total] : after.SumBy("headwater_transport_micro_batches_total", "transport")) {
    figures.transports[transport] = {rate("headwater_transport_micro_batches_total", {{"transport", transport}}),
                                     rate("headwater_bytes_total", {{"transport", transport}, {"direction", "in"}}),
                                     rate("headwater_bytes_total", {{"transport", transport}, {"direction", "out"}})};
  }
  for (const char* phase : kPhases) {
    if (const auto taken = mean(absl::StrCat("headwater_", phase, "_seconds"))) figures.phase_seconds[phase] = *taken;
  }
  const double busy_seconds = increase("headwater_compute_busy_seconds_total");
  figures.busy = std::min(1.0, busy_seconds / seconds);
  if (busy_seconds > 0) {
    figures.product_flops = increase("headwater_product_flops_total") / busy_seconds;
    const double product_rate = gauge("headwater_product_flops_per_second");
    if (product_rate > 0) figures.floor = *figures.product_flops / product_rate;
  }
  for (const auto& [rank, total] : after.SumBy("headwater_rank_seconds_total", "rank")) {
    int64_t number = 0;
    if (!absl::SimpleAtoi(rank, &number)) continue;
    const auto share = [&, &name = rank](const char* activity) {
      return std::min(1.0, rate("headwater_rank_seconds_total", {{"rank", name}, {"activity", activity}}));
    };
    figures.ranks[number] = {share("compute"), share("wait"), share("communicate")};
  }
  figures.chunk_fill = mean("headwater_token_chunk_fill_ratio");
  figures.queue_depth = gauge("headwater_queue_depth");
  figures.max_queue_depth = gauge("headwater_max_queue_depth");
  figures.waiting_calls = gauge("headwater_waiting_calls");
  figures.waiting_contributions = gauge("headwater_waiting_contributions");
  figures.in_flight_bytes = gauge("headwater_in_flight_bytes");
  figures.max_in_flight_bytes = gauge("headwater_max_in_flight_bytes");
  figures.connections = gauge("headwater_connections");
  figures.sessions = gauge("headwater_sessions");
  figures.resident_bytes = gauge("process_resident_memory_bytes");
  figures.budget_bytes = gauge("headwater_memory_budget_bytes");
  figures.planned_bytes = gauge("headwater_memory_planned_bytes");
  for (const auto& [purpose, bytes] : after.SumBy("headwater_memory_planned_bytes", "purpose")) {
    if (bytes > 0) figures.planned_by_purpose[purpose] = bytes;
  }
  return figures;
}

std::string TopText(const std::string& server, const TopFigures& figures,
                    const absl::StatusOr<std::vector<client::HeadInfo>>& heads) {
  const auto bytes = [](double value) { return FormatBytes(static_cast<int64_t>(value)); };
  const auto count = [](double value) { return FormatCount(static_cast<int64_t>(value)); };

  Table summary({"", ""});
  summary.AddRow({"server", absl::StrCat(server, "  ", figures.serving ? "SERVING" : "NOT_SERVING", "  ", figures.version, ", ",
                                         figures.engine, "  up ",
                                         absl::FormatDuration(absl::Seconds(static_cast<int64_t>(figures.uptime_s))))});
  summary.AddRow({"throughput", absl::StrCat(FormatRate(figures.tokens), " tokens/s, ", FormatRate(figures.contributions),
                                             " contributions/s, ", FormatRate(figures.steps), " steps/s")});
  summary.AddRow({"micro-batches/s", ListRates(figures.micro_batches, "none")});
  std::string engine = absl::StrCat(FormatShare(figures.busy), " busy");
  if (figures.product_flops.has_value()) absl::StrAppend(&engine, ", ", FormatRate(*figures.product_flops), " FLOP/s while busy");
  if (figures.floor.has_value()) absl::StrAppend(&engine, " = ", FormatShare(*figures.floor), " of the floor");
  if (figures.chunk_fill.has_value()) absl::StrAppend(&engine, ", chunks ", FormatShare(*figures.chunk_fill), " full");
  summary.AddRow({"engine", engine});
  for (const auto& [rank, shares] : figures.ranks) {
    summary.AddRow({absl::StrCat("rank ", rank), absl::StrCat(FormatShare(shares.compute), " computes, ", FormatShare(shares.wait),
                                                              " waits, ", FormatShare(shares.communicate), " communicates")});
  }
  std::string times;
  for (const char* phase : kPhases) {
    const auto taken = figures.phase_seconds.find(phase);
    if (taken == figures.phase_seconds.end()) continue;
    absl::StrAppend(&times, times.empty() ? "" : ", ", phase, " ", FormatSeconds(taken->second));
  }
  summary.AddRow({"a micro-batch", times.empty() ? "none" : times});
  summary.AddRow({"queue", absl::StrCat(count(figures.queue_depth), " of ", count(figures.max_queue_depth), " wait; ",
                                        count(figures.waiting_calls), " calls wait for a step, ",
                                        count(figures.waiting_contributions), " contributions for lower ids")});
  summary.AddRow({"in flight", absl::StrCat(bytes(figures.in_flight_bytes), " of ", bytes(figures.max_in_flight_bytes), "; ",
                                            count(figures.connections), " connections, ", count(figures.sessions), " sessions")});
  std::string purposes;
  for (const auto& [purpose, planned] : figures.planned_by_purpose) {
    absl::StrAppend(&purposes, purposes.empty() ? ": " : ", ", purpose, " ", bytes(planned));
  }
  summary.AddRow({"device memory", absl::StrCat(bytes(figures.planned_bytes), " of ", bytes(figures.budget_bytes), purposes)});
  summary.AddRow({"host memory", absl::StrCat(bytes(figures.resident_bytes), " resident")});
  summary.AddRow({"refused/s", ListRates(figures.refusals, "none")});
  if (figures.non_finite_rows > 0) summary.AddRow({"NOT FINITE", absl::StrCat(FormatRate(figures.non_finite_rows), " rows/s")});

  Table transports({"TRANSPORT", ">MICRO-BATCHES/S", ">IN", ">OUT"});
  for (const auto& [transport, traffic] : figures.transports) {
    transports.AddRow(
        {transport, FormatRate(traffic.micro_batches), FormatByteRate(traffic.bytes_in), FormatByteRate(traffic.bytes_out)});
  }
  return absl::StrCat(summary.ToString(), "\n", transports.ToString(), "\n", HeadsText(heads));
}

nlohmann::json TopJson(const std::string& server, const TopFigures& figures,
                       const absl::StatusOr<std::vector<client::HeadInfo>>& heads) {
  const auto or_null = [](const std::optional<double>& value) {
    return value.has_value() ? nlohmann::json(*value) : nlohmann::json(nullptr);
  };
  nlohmann::json transports = nlohmann::json::object();
  for (const auto& [transport, traffic] : figures.transports) {
    transports[transport] = {{"micro_batches_per_s", traffic.micro_batches},
                             {"bytes_in_per_s", traffic.bytes_in},
                             {"bytes_out_per_s", traffic.bytes_out}};
  }
  nlohmann::json ranks = nlohmann::json::array();
  for (const auto& [rank, shares] : figures.ranks) {
    ranks.push_back({{"rank", rank}, {"compute", shares.compute}, {"wait", shares.wait}, {"communicate", shares.communicate}});
  }
  nlohmann::json head_list = nullptr;
  nlohmann::json heads_error = nullptr;
  if (heads.ok()) {
    head_list = nlohmann::json::array();
    for (const client::HeadInfo& head : *heads) head_list.push_back(ToJson(head));
  } else {
    heads_error = ToJson(heads.status());
  }
  return {{"server", server},
          {"seconds", figures.seconds},
          {"serving", figures.serving},
          {"version", figures.version},
          {"engine", figures.engine},
          {"uptime_s", figures.uptime_s},
          {"tokens_per_s", figures.tokens},
          {"steps_per_s", figures.steps},
          {"contributions_per_s", figures.contributions},
          {"non_finite_rows_per_s", figures.non_finite_rows},
          {"micro_batches_per_s", figures.micro_batches},
          {"refusals_per_s", figures.refusals},
          {"transports", transports},
          {"phase_seconds", figures.phase_seconds},
          {"busy", figures.busy},
          {"ranks", ranks},
          {"product_flops_per_busy_s", or_null(figures.product_flops)},
          {"floor_utilization", or_null(figures.floor)},
          {"chunk_fill", or_null(figures.chunk_fill)},
          {"queue_depth", figures.queue_depth},
          {"max_queue_depth", figures.max_queue_depth},
          {"waiting_calls", figures.waiting_calls},
          {"waiting_contributions", figures.waiting_contributions},
          {"in_flight_bytes", figures.in_flight_bytes},
          {"max_in_flight_bytes", figures.max_in_flight_bytes},
          {"connections", figures.connections},
          {"sessions", figures.sessions},
          {"memory",
           {{"resident_bytes", figures.resident_bytes},
            {"budget_bytes", figures.budget_bytes},
            {"planned_bytes", figures.planned_bytes},
            {"planned_by_purpose", figures.planned_by_purpose}}},
          {"heads", head_list},
          {"heads_error", heads_error}};
}

}  // namespace headwater::ctl
