// `health` and `info`: the server itself.
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/ctl/command.h"
#include "client/ctl/table.h"

namespace headwater::ctl {
namespace {

using client::HealthStatus;

const char* HealthName(HealthStatus status) {
  switch (status) {
    case HealthStatus::kServing:
      return "SERVING";
    case HealthStatus::kNotServing:
      return "NOT_SERVING";
    case HealthStatus::kServiceUnknown:
      return "SERVICE_UNKNOWN";
    case HealthStatus::kUnknown:
      break;
  }
  return "UNKNOWN";
}

absl::StatusOr<ExitCode> RunHealth(client::Client& client, const std::vector<std::string>& arguments, Output& output) {
  const std::string service = arguments.empty() ? "" : arguments[0];
  absl::StatusOr<HealthStatus> status = client.CheckHealth(service);
  if (!status.ok()) return status.status();
  output.Print(absl::StrCat(HealthName(*status), "\n"), {{"service", service}, {"status", HealthName(*status)}});
  return *status == HealthStatus::kServing ? kExitOk : kExitFailed;
}

std::vector<std::pair<const char*, int64_t>> ListLimits(const client::ServerLimits& limits) {
  return {{"max_message_bytes", limits.max_message_bytes},
          {"max_chunk_bytes", limits.max_chunk_bytes},
          {"max_micro_batch_rows", limits.max_micro_batch_rows},
          {"max_micro_batch_bytes", limits.max_micro_batch_bytes},
          {"max_vocab_size", limits.max_vocab_size},
          {"max_hidden_size", limits.max_hidden_size},
          {"max_heads", limits.max_heads},
          {"max_step_micro_batches", limits.max_step_micro_batches},
          {"max_staging_slots", limits.max_staging_slots},
          {"max_queue_depth", limits.max_queue_depth},
          {"max_in_flight_bytes", limits.max_in_flight_bytes},
          {"max_upload_bytes", limits.max_upload_bytes},
          {"max_sessions", limits.max_sessions},
          {"max_session_lease_s", limits.max_session_lease_s},
          {"max_held_bytes", limits.max_held_bytes},
          {"max_waiting_calls", limits.max_waiting_calls},
          {"max_step_wait_s", limits.max_step_wait_s},
          {"max_heads_per_tenant", limits.max_heads_per_tenant},
          {"max_tenant_memory_bytes", limits.max_tenant_memory_bytes},
          {"max_terms", limits.max_terms},
          {"max_stripes", limits.max_stripes},
          {"max_stripe_wait_s", limits.max_stripe_wait_s},
          {"max_session_regions", limits.max_session_regions},
          {"max_region_bytes", limits.max_region_bytes},
          {"max_join_bytes", limits.max_join_bytes},
          {"max_join_wait_s", limits.max_join_wait_s},
          {"max_connections", limits.max_connections},
          {"max_connection_streams", limits.max_connection_streams},
          {"max_metadata_bytes", limits.max_metadata_bytes},
          {"max_stream_time_s", limits.max_stream_time_s},
          {"max_handshake_time_s", limits.max_handshake_time_s},
          {"max_connection_idle_s", limits.max_connection_idle_s},
          {"min_ping_interval_s", limits.min_ping_interval_s},
          {"max_health_watches", limits.max_health_watches},
          {"ordered_window", limits.ordered_window}};
}

std::string InfoText(const client::ServerInfo& info, const std::string& start_time) {
  Table server({"", ""});
  server.AddRow({"version", info.version});
  server.AddRow({"engine", info.engine_note.empty() ? info.engine : absl::StrCat(info.engine, " (", info.engine_note, ")")});
  server.AddRow({"started", start_time});
  server.AddRow({"incarnation", FormatHex(info.incarnation)});
  std::string features;
  for (const std::string& feature : info.features) absl::StrAppend(&features, features.empty() ? "" : ", ", feature);
  server.AddRow({"features", features});
  server.AddRow({"shared memory", info.descriptor_socket.empty() ? "no descriptor socket" : info.descriptor_socket});
  if (info.named_regions) server.AddRow({"named regions", "allowed"});
  if (info.deterministic) server.AddRow({"deterministic", "contributions are added in ascending id"});

  Table devices({"DEVICE", ">BUDGET", ">PLANNED", "MODEL"});
  for (const client::DeviceInfo& device : info.devices) {
    // Of several devices the server does not know which has how much of a plan.
    const bool known = info.devices.size() == 1 || device.memory_planned_bytes > 0;
    devices.AddRow({device.name, FormatBytes(device.memory_budget_bytes), known ? FormatBytes(device.memory_planned_bytes) : "-",
                    device.model});
  }
  Table limits({"LIMIT", ">VALUE", ">"});
  for (const auto& [name, value] : ListLimits(info.limits)) {
    const bool bytes = std::string(name).find("_bytes") != std::string::npos;
    limits.AddRow({name, FormatCount(value), bytes ? FormatBytes(value) : ""});
  }
  return absl::StrCat(server.ToString(), "\n", devices.ToString(), "\n", limits.ToString());
}

absl::StatusOr<ExitCode> RunInfo(client::Client& client, const std::vector<std::string>&, Output& output) {
  absl::StatusOr<client::ServerInfo> info = client.GetServerInfo();
  if (!info.ok()) return info.status();
  const std::string start_time = absl::FormatTime(absl::FromChrono(info->start_time), absl::UTCTimeZone());
  nlohmann::json devices = nlohmann::json::array();
  for (const client::DeviceInfo& device : info->devices) {
    devices.push_back({{"name", device.name},
                       {"model", device.model},
                       {"memory_budget_bytes", device.memory_budget_bytes},
                       {"memory_planned_bytes", device.memory_planned_bytes}});
  }
  nlohmann::json limits;
  for (const auto& [name, value] : ListLimits(info->limits)) limits[name] = value;
  output.Print(InfoText(*info, start_time), {{"version", info->version},
                                             {"incarnation", FormatHex(info->incarnation)},
                                             {"engine", info->engine},
                                             {"engine_note", info->engine_note},
                                             {"start_time", start_time},
                                             {"descriptor_socket", info->descriptor_socket},
                                             {"named_regions", info->named_regions},
                                             {"deterministic", info->deterministic},
                                             {"devices", devices},
                                             {"limits", limits},
                                             {"features", info->features}});
  return kExitOk;
}

}  // namespace

Command HealthCommand() {
  return {.name = "health",
          .synopsis = "[SERVICE]",
          .summary = "tells whether the server is ready for work",
          .help =
              "Prints SERVING, NOT_SERVING, SERVICE_UNKNOWN or UNKNOWN; exits with 0 only if it is SERVING. SERVICE is a full\n"
              "service name such as headwater.v1.LossService; without it the server as a whole is asked.\n",
          .min_arguments = 0,
          .max_arguments = 1,
          .flags = {},
          .run = RunHealth};
}

Command InfoCommand() {
  return {
      .name = "info",
      .synopsis = "",
      .summary = "prints version, engine, devices, limits and features of the server",
      .help = "Each limit is a flag of headwaterd of the same name; durations are in seconds here (`_s`) and take a unit there.\n",
      .min_arguments = 0,
      .max_arguments = 0,
      .flags = {},
      .run = RunInfo};
}

}  // namespace headwater::ctl
