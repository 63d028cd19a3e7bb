// `health` and `info`: the server itself.

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/ctl/command.h"
#include "client/ctl/table.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::ctl {
namespace {

using client::HealthStatus;

const char* HealthName(HealthStatus status) { return NameOf(status, {"UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"}); }

absl::StatusOr<ExitCode> RunHealth(client::Client& client, const std::vector<std::string>& arguments, Output& output) {
  const std::string service = arguments.empty() ? "" : arguments[0];
  HEADWATER_ASSIGN_OR_RETURN(HealthStatus status, client.CheckHealth(service));
  output.Print(absl::StrCat(HealthName(status), "\n"), {{"service", service}, {"status", HealthName(status)}});
  return status == HealthStatus::kServing ? kExitOk : kExitFailed;
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
    // With several devices the server does not know how much of a plan each has.
    const bool known = info.devices.size() == 1 || device.memory_planned_bytes > 0;
    devices.AddRow({device.name, FormatBytes(device.memory_budget_bytes), known ? FormatBytes(device.memory_planned_bytes) : "-",
                    device.model});
  }
  Table limits({"LIMIT", ">VALUE", ">"});
  for (const auto& [name, value] : info.limits) {
    const bool bytes = name.find("_bytes") != std::string::npos;
    limits.AddRow({name, FormatCount(value), bytes ? FormatBytes(value) : ""});
  }
  return absl::StrCat(server.ToString(), "\n", devices.ToString(), "\n", limits.ToString());
}

absl::StatusOr<ExitCode> RunInfo(client::Client& client, const std::vector<std::string>&, Output& output) {
  HEADWATER_ASSIGN_OR_RETURN(client::ServerInfo info, client.GetServerInfo());
  const std::string start_time = absl::FormatTime(absl::FromChrono(info.start_time), absl::UTCTimeZone());
  output.Print(InfoText(info, start_time), {{"version", info.version},
                                            {"incarnation", FormatHex(info.incarnation)},
                                            {"engine", info.engine},
                                            {"engine_note", info.engine_note},
                                            {"start_time", start_time},
                                            {"descriptor_socket", info.descriptor_socket},
                                            {"named_regions", info.named_regions},
                                            {"deterministic", info.deterministic},
                                            {"devices", info.devices},
                                            {"limits", info.limits},
                                            {"features", info.features}});
  return kExitOk;
}

}  // namespace

Command HealthCommand() {
  return {.name = "health",
          .synopsis = "[SERVICE]",
          .summary = "prints whether the server is ready for work",
          .help =
              "Prints SERVING, NOT_SERVING, SERVICE_UNKNOWN or UNKNOWN; exits with 0 only if it is SERVING. SERVICE is a full\n"
              "service name such as headwater.v1.LossService; without it the server as a whole is asked.\n",
          .run = RunHealth};
}

Command InfoCommand() {
  return {
      .name = "info",
      .summary = "prints version, engine, devices, limits and features of the server",
      .help = "Each limit is a flag of headwaterd of the same name; durations are in seconds here (`_s`) and take a unit there.\n",
      .run = RunInfo};
}

}  // namespace headwater::ctl
