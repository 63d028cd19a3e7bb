// The command line: positional arguments and flags, checked against what a command takes.
#ifndef HEADWATER_CLIENT_CTL_ARGUMENTS_H_
#define HEADWATER_CLIENT_CTL_ARGUMENTS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/ctl/command.h"

namespace headwater::ctl {

// Flags that every command takes.
extern const std::vector<std::string> kCommonFlags;

// A command line, taken apart. Nothing is set yet.
struct CommandLine {
  struct Flag {
    std::string name;
    std::string value;
  };
  std::vector<std::string> positional;
  std::vector<Flag> flags;
  bool help = false;     // --help or -h
  bool version = false;  // --version
};

// A wrong command line: the program ends with kExitUsage.
absl::Status UsageError(const std::string& message);
bool IsUsageError(const absl::Status& status);

// Takes `--name=value`, `--name value`, `--switch`, `--noswitch`; dashes in names are the same as underscores; everything behind
// `--` is positional. A usage error for a flag that the program does not have, or one without its value.
// absl::ParseCommandLine() is not used because it ends the program by itself, with the exit code of a failure.
absl::StatusOr<CommandLine> ParseArguments(const std::vector<std::string>& arguments);

// True if the command line asks for JSON, however wrong the rest of it is: --json counts behind what cannot be understood, and also
// where it was taken for the value that a flag lacks.
bool AsksForJson(const std::vector<std::string>& arguments);

// Sets the flags. A usage error for a value that cannot be parsed, a flag that `command` does not take (it would be ignored
// otherwise), and a wrong number of positional arguments.
absl::Status SetFlags(const CommandLine& line, const Command& command);

// "  --name  help (default: x)" lines of flags.
std::string DescribeFlags(const std::vector<std::string>& names);

// True if the user gave the flag.
bool FlagGiven(const std::string& name);

}  // namespace headwater::ctl

#endif  // HEADWATER_CLIENT_CTL_ARGUMENTS_H_
