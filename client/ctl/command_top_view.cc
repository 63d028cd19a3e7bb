#include "client/ctl/command_top_view.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

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

// Keys of the document, and the metrics that they are.
constexpr std::pair<const char*, const char*> kRates[] = {
    {"tokens_per_s", "headwater_tokens_total"},
    {"steps_per_s", "headwater_steps_total"},
    {"contributions_per_s", "headwater_commits_total"},
    {"non_finite_rows_per_s", "headwater_non_finite_rows_total"},
};
constexpr std::pair<const char*, const char*> kGauges[] = {
    {"queue_depth", "headwater_queue_depth"},         {"max_queue_depth", "headwater_max_queue_depth"},
    {"waiting_calls", "headwater_waiting_calls"},     {"waiting_contributions", "headwater_waiting_contributions"},
    {"in_flight_bytes", "headwater_in_flight_bytes"}, {"max_in_flight_bytes", "headwater_max_in_flight_bytes"},
    {"connections", "headwater_connections"},         {"sessions", "headwater_sessions"},
};
constexpr std::pair<const char*, const char*> kMemory[] = {
    {"resident_bytes", "process_resident_memory_bytes"},
    {"budget_bytes", "headwater_memory_budget_bytes"},
    {"planned_bytes", "headwater_memory_planned_bytes"},
};

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

// "a 1, b 2"; "none" without any.
std::string ListRates(const nlohmann::json& rates) {
  std::string text;
  for (const auto& [name, rate] : rates.items()) {
    if (rate > 0) absl::StrAppend(&text, text.empty() ? "" : ", ", name, " ", FormatRate(rate));
  }
  return text.empty() ? "none" : text;
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

nlohmann::json TopJson(const std::string& server, const MetricsPage& before, const MetricsPage& after, double seconds, double now,
                       const absl::StatusOr<std::vector<client::HeadInfo>>& heads) {
  using Labels = std::map<std::string, std::string>;
  using nlohmann::json;
  const auto increase = [&](const std::string& name, const Labels& labels = {}) {
    const double last = after.Sum(name, labels).value_or(0);
    const double first = before.Sum(name, labels).value_or(0);
    return last >= first ? last - first : last;
  };
  const auto rate = [&](const std::string& name, const Labels& labels = {}) { return increase(name, labels) / seconds; };
  const auto gauge = [&](const std::string& name) { return after.Sum(name).value_or(0); };
  // The average of a histogram, or null without observations.
  const auto mean = [&](const std::string& name) -> json {
    const double count = increase(name + "_count");
    return count > 0 ? json(increase(name + "_sum") / count) : json(nullptr);
  };

  json figures = {{"server", server},
                  {"seconds", seconds},
                  {"serving", gauge("headwater_serving") == 1},
                  {"version", after.Label("headwater_build_info", "version")},
                  {"engine", after.Label("headwater_build_info", "engine")},
                  {"uptime_s", std::max(0.0, now - after.Sum("process_start_time_seconds").value_or(now))},
                  {"chunk_fill", mean("headwater_token_chunk_fill_ratio")},
                  {"heads_error", nullptr},
                  {"heads", nullptr}};
  for (const char* object : {"micro_batches_per_s", "refusals_per_s", "transports", "phase_seconds"})
    figures[object] = json::object();
  for (const auto& [key, metric] : kRates) figures[key] = rate(metric);
  for (const auto& [key, metric] : kGauges) figures[key] = gauge(metric);
  for (const auto& [key, metric] : kMemory) figures["memory"][key] = gauge(metric);
  for (const auto& [outcome, total] : after.SumBy("headwater_micro_batches_total", "outcome")) {
    figures["micro_batches_per_s"][outcome] = rate("headwater_micro_batches_total", {{"outcome", outcome}});
  }
  for (const auto& [reason, total] : after.SumBy("headwater_refusals_total", "reason")) {
    const double refused = rate("headwater_refusals_total", {{"reason", reason}});
    if (refused > 0) figures["refusals_per_s"][reason] = refused;
  }
  for (const auto& [transport, total] : after.SumBy("headwater_transport_micro_batches_total", "transport")) {
    figures["transports"][transport] = {
        {"micro_batches_per_s", rate("headwater_transport_micro_batches_total", {{"transport", transport}})},
        {"bytes_in_per_s", rate("headwater_bytes_total", {{"transport", transport}, {"direction", "in"}})},
        {"bytes_out_per_s", rate("headwater_bytes_total", {{"transport", transport}, {"direction", "out"}})}};
  }
  for (const char* phase : kPhases) {
    if (json taken = mean(absl::StrCat("headwater_", phase, "_seconds")); !taken.is_null()) figures["phase_seconds"][phase] = taken;
  }
  const double busy_seconds = increase("headwater_compute_busy_seconds_total");
  const double product_rate = gauge("headwater_product_flops_per_second");
  figures["busy"] = std::min(1.0, busy_seconds / seconds);
  figures["product_flops_per_busy_s"] = figures["floor_utilization"] = nullptr;
  if (busy_seconds > 0) {
    const double flops = increase("headwater_product_flops_total") / busy_seconds;
    figures["product_flops_per_busy_s"] = flops;
    if (product_rate > 0) figures["floor_utilization"] = flops / product_rate;  // the machine's own rate is known
  }
  std::map<int64_t, json> ranks;
  for (const auto& [rank, total] : after.SumBy("headwater_rank_seconds_total", "rank")) {
    int64_t number = 0;
    if (!absl::SimpleAtoi(rank, &number)) continue;
    ranks[number]["rank"] = number;
    for (const char* activity : {"compute", "wait", "communicate"}) {
      ranks[number][activity] = std::min(1.0, rate("headwater_rank_seconds_total", {{"rank", rank}, {"activity", activity}}));
    }
  }
  figures["ranks"] = json::array();
  for (auto& [number, shares] : ranks) figures["ranks"].push_back(std::move(shares));
  figures["memory"]["planned_by_purpose"] = json::object();
  for (const auto& [purpose, bytes] : after.SumBy("headwater_memory_planned_bytes", "purpose")) {
    if (bytes > 0) figures["memory"]["planned_by_purpose"][purpose] = bytes;
  }
  if (!heads.ok()) {
    figures["heads_error"] = ToJson(heads.status());
    return figures;
  }
  figures["heads"] = *heads;
  return figures;
}

std::string TopText(const nlohmann::json& figures, const absl::StatusOr<std::vector<client::HeadInfo>>& heads) {
  const nlohmann::json& memory = figures["memory"];
  const auto bytes = [](double value) { return FormatBytes(static_cast<int64_t>(value)); };
  const auto count = [&](const char* key) { return FormatCount(static_cast<int64_t>(figures[key].get<double>())); };
  const auto rate = [&](const char* key) { return FormatRate(figures[key]); };

  Table summary({"", ""});
  summary.AddRow({"server", absl::StrCat(figures["server"].get<std::string>(), "  ", figures["serving"] ? "SERVING" : "NOT_SERVING",
                                         "  ", figures["version"].get<std::string>(), ", ", figures["engine"].get<std::string>(),
                                         "  up ", absl::FormatDuration(absl::Seconds(figures["uptime_s"].get<int64_t>())))});
  summary.AddRow({"throughput", absl::StrCat(rate("tokens_per_s"), " tokens/s, ", rate("contributions_per_s"), " contributions/s, ",
                                             rate("steps_per_s"), " steps/s")});
  summary.AddRow({"micro-batches/s", ListRates(figures["micro_batches_per_s"])});
  std::string engine = absl::StrCat(FormatShare(figures["busy"]), " busy");
  if (const auto& flops = figures["product_flops_per_busy_s"]; !flops.is_null()) {
    absl::StrAppend(&engine, ", ", FormatRate(flops), " FLOP/s while busy");
  }
  if (const auto& floor = figures["floor_utilization"]; !floor.is_null()) {
    absl::StrAppend(&engine, " = ", FormatShare(floor), " of the floor");
  }
  if (const auto& fill = figures["chunk_fill"]; !fill.is_null()) absl::StrAppend(&engine, ", chunks ", FormatShare(fill), " full");
  summary.AddRow({"engine", engine});
  for (const auto& rank : figures["ranks"]) {
    summary.AddRow({absl::StrCat("rank ", rank["rank"].get<int64_t>()),
                    absl::StrCat(FormatShare(rank["compute"]), " computes, ", FormatShare(rank["wait"]), " waits, ",
                                 FormatShare(rank["communicate"]), " communicates")});
  }
  std::string times;
  for (const char* phase : kPhases) {
    if (!figures["phase_seconds"].contains(phase)) continue;
    absl::StrAppend(&times, times.empty() ? "" : ", ", phase, " ", FormatSeconds(figures["phase_seconds"][phase]));
  }
  summary.AddRow({"a micro-batch", times.empty() ? "none" : times});
  summary.AddRow(
      {"queue", absl::StrCat(count("queue_depth"), " of ", count("max_queue_depth"), " wait; ", count("waiting_calls"),
                             " calls wait for a step, ", count("waiting_contributions"), " contributions for lower ids")});
  summary.AddRow({"in flight", absl::StrCat(bytes(figures["in_flight_bytes"]), " of ", bytes(figures["max_in_flight_bytes"]), "; ",
                                            count("connections"), " connections, ", count("sessions"), " sessions")});
  std::string purposes;
  for (const auto& [purpose, planned] : memory["planned_by_purpose"].items()) {
    absl::StrAppend(&purposes, purposes.empty() ? ": " : ", ", purpose, " ", bytes(planned));
  }
  summary.AddRow({"device memory", absl::StrCat(bytes(memory["planned_bytes"]), " of ", bytes(memory["budget_bytes"]), purposes)});
  summary.AddRow({"host memory", absl::StrCat(bytes(memory["resident_bytes"]), " resident")});
  summary.AddRow({"refused/s", ListRates(figures["refusals_per_s"])});
  if (figures["non_finite_rows_per_s"] > 0) {
    summary.AddRow({"NOT FINITE", absl::StrCat(rate("non_finite_rows_per_s"), " rows/s")});
  }

  Table transports({"TRANSPORT", ">MICRO-BATCHES/S", ">IN", ">OUT"});
  for (const auto& [transport, traffic] : figures["transports"].items()) {
    transports.AddRow({transport, FormatRate(traffic["micro_batches_per_s"]), FormatByteRate(traffic["bytes_in_per_s"]),
                       FormatByteRate(traffic["bytes_out_per_s"])});
  }
  return absl::StrCat(summary.ToString(), "\n", transports.ToString(), "\n", HeadsText(heads));
}

}  // namespace headwater::ctl
