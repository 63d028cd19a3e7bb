// A subcommand of headwaterctl.
#ifndef HEADWATER_CLIENT_CTL_COMMAND_H_
#define HEADWATER_CLIENT_CTL_COMMAND_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/ctl/output.h"
#include "headwater/client/client.h"

namespace headwater::ctl {

// Exit codes of the program.
enum ExitCode {
  kExitOk = 0,
  kExitFailed = 1,  // the server refused, is not healthy, or cannot be reached, a head is not as expected, or the output was lost
  kExitUsage = 2,   // the command line is wrong; nothing was sent
};

// A subcommand. `run` gets the positional arguments behind the command's name, as many as `synopsis` says. It prints its result to
// `output` and returns an exit code, or the error that ended it.
struct Command {
  std::string name;
  std::string synopsis{};                 // a word for each argument; optional ones, which come last, stand in brackets
  std::string summary;                    // one line, in the list of commands
  std::string help;                       // paragraphs behind the summary
  std::vector<std::string> flags{};       // that it takes, besides the ones that all commands take
  bool first_argument_is_server = false;  // the first argument, if there is one, is --server
  std::function<absl::StatusOr<ExitCode>(client::Client& client, const std::vector<std::string>& arguments, Output& output)> run;
};

Command HealthCommand();
Command InfoCommand();
// The commands for the server's heads.
std::vector<Command> HeadCommands();
Command LoadCommand();
Command VerifyCommand();
Command ExportCommand();
Command PlanCommand();
Command BenchCommand();
Command TopCommand();

}  // namespace headwater::ctl

#endif  // HEADWATER_CLIENT_CTL_COMMAND_H_
