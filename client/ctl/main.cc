// headwaterctl: looks at a Headwater server and administers its heads.
#include <unistd.h>

#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/arguments.h"
#include "client/ctl/command.h"
#include "client/ctl/connection.h"
#include "client/ctl/table.h"

ABSL_FLAG(bool, json, false, "print one JSON document instead of text");

namespace headwater::ctl {
namespace {

constexpr char kExitCodes[] =
    "Exit codes: 0 done; 1 the server refused, is not healthy or cannot be reached; 2 the command line is wrong.\n";

std::string GeneralHelp(const std::vector<Command>& commands) {
  Table table({"", "", ""}, {Table::Align::kLeft, Table::Align::kLeft, Table::Align::kLeft});
  for (const Command& command : commands) {
    table.AddRow({"", absl::StrCat(command.name, command.synopsis.empty() ? "" : " ", command.synopsis), command.summary});
  }
  table.AddRow({"", "help [COMMAND]", "explains a command and its flags"});
  return absl::StrCat(
      "headwaterctl [flags] COMMAND [arguments]: looks at a Headwater server and administers its heads.\n"
      "headwaterctl --version: prints this program's version.\n\nCommands:\n",
      table.ToString(), "\nFlags of every command:\n", DescribeFlags(kCommonFlags), "\n", kExitCodes);
}

std::string CommandHelp(const Command& command) {
  return absl::StrCat("headwaterctl ", command.name, command.synopsis.empty() ? "" : " ", command.synopsis, ": ", command.summary,
                      ".\n\n", command.help, command.flags.empty() ? "" : "\nFlags:\n", DescribeFlags(command.flags),
                      "\nFlags of every command:\n", DescribeFlags(kCommonFlags), "\n", kExitCodes);
}

int ReportUsage(const std::string& message) {
  std::cerr << "headwaterctl: " << message << "\nhint: `headwaterctl help` lists commands and flags\n";
  return kExitUsage;
}

const Command* FindCommand(const std::vector<Command>& commands, const std::string& name) {
  for (const Command& command : commands) {
    if (command.name == name) return &command;
  }
  return nullptr;
}

int RunCommand(const Command& command, const std::vector<std::string>& arguments) {
  Output output(absl::GetFlag(FLAGS_json));
  if (command.first_argument_is_server && !arguments.empty()) SetServerAddress(arguments[0]);
  absl::StatusOr<client::Client> client = Connect();
  if (IsUsageError(client.status())) return ReportUsage(std::string(client.status().message()));
  if (!client.ok()) {
    output.PrintError(client.status());
    return kExitFailed;
  }
  const absl::StatusOr<ExitCode> exit_code = command.run(*client, arguments, output);
  if (exit_code.ok()) return *exit_code;
  if (IsUsageError(exit_code.status())) return ReportUsage(std::string(exit_code.status().message()));
  output.PrintError(exit_code.status());
  return kExitFailed;
}

int Main(const std::vector<std::string>& arguments) {
  const std::vector<Command> commands = {HealthCommand(), InfoCommand(),   HeadsCommand(), TakeCommand(),  LoadCommand(),
                                         SaveCommand(),   DeleteCommand(), PlanCommand(),  BenchCommand(), TopCommand()};
  absl::StatusOr<CommandLine> line = ParseArguments(arguments);
  if (!line.ok()) return ReportUsage(std::string(line.status().message()));
  if (line->version) {
    std::cout << "headwaterctl " HEADWATER_VERSION "\n";
    return kExitOk;
  }
  if (line->positional.empty()) {
    if (!line->help) return ReportUsage("a command is missing");
    std::cout << GeneralHelp(commands);
    return kExitOk;
  }
  std::string name = line->positional[0];
  if (name == "help") {
    if (line->positional.size() == 1) {
      std::cout << GeneralHelp(commands);
      return kExitOk;
    }
    name = line->positional[1];
    if (name == "help") {
      std::cout << GeneralHelp(commands);
      return kExitOk;
    }
    line->help = true;
  }
  const Command* const command = FindCommand(commands, name);
  if (command == nullptr) return ReportUsage(absl::StrCat("there is no command `", name, "`"));
  if (line->help) {
    std::cout << CommandHelp(*command);
    return kExitOk;
  }
  if (absl::Status status = SetFlags(*line, *command); !status.ok()) return ReportUsage(std::string(status.message()));
  return RunCommand(*command, {line->positional.begin() + 1, line->positional.end()});
}

}  // namespace
}  // namespace headwater::ctl

int main(int argc, char** argv) {
  const int exit_code = headwater::ctl::Main({argv + 1, argv + argc});
  std::cout.flush();
  std::cerr.flush();
  // Nothing is destroyed: gRPC and TLS end their threads in the background, which would meet what is gone already.
  _exit(exit_code);
}
