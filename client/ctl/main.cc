// headwaterctl: looks at a Headwater server and administers its heads.
#include <grpc/support/log.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/arguments.h"
#include "client/ctl/command.h"
#include "client/ctl/connection.h"
#include "client/ctl/output.h"
#include "client/ctl/table.h"

ABSL_FLAG(bool, json, false, "print one JSON document instead of text");

namespace headwater::ctl {
namespace {

constexpr char kExitCodes[] =
    "Exit codes: 0 done; 1 the server refused, is not healthy or cannot be reached, a head is not as expected, or the output "
    "could\n"
    "not be written; 2 the command line is wrong.\n";

std::string GeneralHelp(const std::vector<Command>& commands) {
  Table table({"", "", ""});
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

const Command* FindCommand(const std::vector<Command>& commands, const std::string& name) {
  for (const Command& command : commands) {
    if (command.name == name) return &command;
  }
  return nullptr;
}

// `json`: as the command line asks for it, of which nothing need be set yet. `command`: null if it names none.
int ReportUsage(const absl::Status& error, bool json, const Command* command) {
  const std::string hint = command == nullptr ? "`headwaterctl help` lists commands and flags"
                                              : absl::StrCat("`headwaterctl help ", command->name, "` explains it and its flags");
  std::cerr << "headwaterctl: " << error.message() << "\nhint: " << hint << "\n";
  Output(json).Print("", {{"error", ToJson(WithHint(error, hint))}});
  return kExitUsage;
}

// Of a command line that cannot be understood: the first word that is a command's name.
const Command* GuessCommand(const std::vector<Command>& commands, const std::vector<std::string>& arguments) {
  for (const std::string& argument : arguments) {
    if (const Command* const command = FindCommand(commands, argument); command != nullptr) return command;
  }
  return nullptr;
}

int RunCommand(const Command& command, const std::vector<std::string>& arguments, bool json_asked) {
  Output output(absl::GetFlag(FLAGS_json));
  if (command.first_argument_is_server && !arguments.empty()) SetServerAddress(arguments[0]);
  absl::StatusOr<client::Client> client = Connect();
  if (IsUsageError(client.status())) return ReportUsage(client.status(), json_asked, &command);
  if (!client.ok()) {
    output.PrintError(client.status());
    return kExitFailed;
  }
  const absl::StatusOr<ExitCode> exit_code = command.run(*client, arguments, output);
  if (exit_code.ok()) return *exit_code;
  if (IsUsageError(exit_code.status())) return ReportUsage(exit_code.status(), json_asked, &command);
  output.PrintError(exit_code.status());
  return kExitFailed;
}

int Main(const std::vector<std::string>& arguments) {
  std::vector<Command> commands = HeadCommands();
  commands.insert(commands.begin(), {HealthCommand(), InfoCommand()});
  commands.insert(commands.end(), {LoadCommand(), VerifyCommand(), ExportCommand(), PlanCommand(), BenchCommand(), TopCommand()});
  const bool json = AsksForJson(arguments);
  absl::StatusOr<CommandLine> line = ParseArguments(arguments);
  if (!line.ok()) return ReportUsage(line.status(), json, GuessCommand(commands, arguments));
  if (line->version) {
    PrintRaw("headwaterctl " HEADWATER_VERSION "\n");
    return kExitOk;
  }
  std::vector<std::string>& words = line->positional;
  if (!words.empty() && words[0] == "help") {
    line->help = true;
    words.erase(words.begin());
  }
  if (words.empty() && !line->help) return ReportUsage(UsageError("a command is missing"), json, nullptr);
  if (words.empty() || words[0] == "help") {
    PrintRaw(GeneralHelp(commands));
    return kExitOk;
  }
  const std::string& name = words[0];
  const Command* const command = FindCommand(commands, name);
  if (command == nullptr) return ReportUsage(UsageError(absl::StrCat("there is no command `", name, "`")), json, nullptr);
  if (line->help) {
    PrintRaw(CommandHelp(*command));
    return kExitOk;
  }
  if (absl::Status status = SetFlags(*line, *command); !status.ok()) return ReportUsage(status, json, command);
  return RunCommand(*command, {words.begin() + 1, words.end()}, json);
}

// The errors that commands report have gRPC's reasons: its own lines would stand between them, once for each try to connect.
void QuietGrpc() {
  if (std::getenv("GRPC_VERBOSITY") == nullptr && std::getenv("GRPC_TRACE") == nullptr) {
    gpr_set_log_function([](gpr_log_func_args*) {});
  }
}

// The exit code where output was lost: who reads it must not take part of it for all of it. A failure stays what it is.
int WithOutput(int exit_code) {
  if (OutputError() == 0) return exit_code;
  std::cerr << "headwaterctl: the output could not be written: " << std::strerror(OutputError()) << "\n";
  return exit_code == kExitOk ? kExitFailed : exit_code;
}

}  // namespace
}  // namespace headwater::ctl

int main(int argc, char** argv) {
  headwater::ctl::QuietGrpc();
  const int exit_code = headwater::ctl::WithOutput(headwater::ctl::Main({argv + 1, argv + argc}));
  std::cerr.flush();
  // Nothing is destroyed: gRPC and TLS end their threads in the background, which would meet what is gone already.
  _exit(exit_code);
}
