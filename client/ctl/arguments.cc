#include "client/ctl/arguments.h"

#include <algorithm>
#include <cstddef>
#include <set>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/marshalling.h"
#include "absl/flags/reflection.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "client/ctl/table.h"

namespace headwater::ctl {
namespace {

constexpr char kUsageErrorUrl[] = "headwaterctl/usage";

// Names of flags in the order of the command line; set once, before any command runs.
std::set<std::string>& GivenFlags() {
  static std::set<std::string>* const given = new std::set<std::string>;
  return *given;
}

bool Contains(const std::vector<std::string>& values, const std::string& value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

}  // namespace

const std::vector<std::string> kCommonFlags = {
    "server", "tenant", "timeout", "connect_timeout", "ca_certificate", "client_certificate", "client_key", "token_file", "json"};

absl::Status UsageError(const std::string& message) {
  absl::Status status = absl::InvalidArgumentError(message);
  status.SetPayload(kUsageErrorUrl, absl::Cord());
  return status;
}

bool IsUsageError(const absl::Status& status) { return status.GetPayload(kUsageErrorUrl).has_value(); }

absl::StatusOr<CommandLine> ParseArguments(const std::vector<std::string>& arguments) {
  CommandLine line;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument == "--") {
      line.positional.insert(line.positional.end(), arguments.begin() + static_cast<std::ptrdiff_t>(i) + 1, arguments.end());
      break;
    }
    if (argument == "--help" || argument == "-h") {
      line.help = true;
      continue;
    }
    if (argument == "--version") {
      line.version = true;
      continue;
    }
    if (argument.size() < 2 || argument[0] != '-') {
      line.positional.push_back(argument);
      continue;
    }
    const size_t dashes = argument[1] == '-' ? 2 : 1;
    const size_t equals = argument.find('=');
    std::string name = argument.substr(dashes, equals == std::string::npos ? equals : equals - dashes);
    std::replace(name.begin(), name.end(), '-', '_');
    const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    if (flag == nullptr && equals == std::string::npos && name.rfind("no", 0) == 0) {
      flag = absl::FindCommandLineFlag(name.substr(2));
      if (flag != nullptr && flag->IsOfType<bool>()) {
        line.flags.push_back({name.substr(2), "false"});
        continue;
      }
      flag = nullptr;
    }
    if (flag == nullptr) return UsageError(absl::StrCat("there is no flag --", name));
    if (equals != std::string::npos) {
      line.flags.push_back({name, argument.substr(equals + 1)});
    } else if (flag->IsOfType<bool>()) {
      line.flags.push_back({name, "true"});
    } else if (++i < arguments.size()) {
      line.flags.push_back({name, arguments[i]});
    } else {
      return UsageError(absl::StrCat("--", name, " needs a value"));
    }
  }
  return line;
}

bool AsksForJson(const std::vector<std::string>& arguments) {
  bool asks = false;
  for (const std::string& argument : arguments) {
    if (argument == "--") break;
    if (argument.size() < 2 || argument[0] != '-') continue;
    const std::string flag = argument.substr(argument[1] == '-' ? 2 : 1);
    std::string error;
    bool value = false;
    if (flag == "json" || flag == "nojson") {
      asks = flag == "json";
    } else if (flag.rfind("json=", 0) == 0 && absl::ParseFlag(flag.substr(5), &value, &error)) {
      asks = value;
    }
  }
  return asks;
}

absl::Status SetFlags(const CommandLine& line, const Command& command) {
  const size_t arguments = line.positional.size() - 1;  // without the command's name
  const std::vector<absl::string_view> words = absl::StrSplit(command.synopsis, ' ', absl::SkipEmpty());
  const auto optional = std::count_if(words.begin(), words.end(), [](absl::string_view word) { return word.front() == '['; });
  if (arguments + static_cast<size_t>(optional) < words.size() || arguments > words.size()) {
    return UsageError(absl::StrCat(command.name, " takes ", command.synopsis.empty() ? "no arguments" : command.synopsis, ", got ",
                                   arguments, arguments == 1 ? " argument" : " arguments"));
  }
  for (const CommandLine::Flag& given : line.flags) {
    if (!Contains(kCommonFlags, given.name) && !Contains(command.flags, given.name)) {
      return UsageError(absl::StrCat("--", given.name, " is not a flag of ", command.name));
    }
    std::string error;
    if (!absl::FindCommandLineFlag(given.name)->ParseFrom(given.value, &error)) {
      return UsageError(absl::StrCat("--", given.name, "=", given.value, " cannot be used: ", error));
    }
    GivenFlags().insert(given.name);
  }
  return absl::OkStatus();
}

std::string DescribeFlags(const std::vector<std::string>& names) {
  Table table({"", "", ""});
  for (const std::string& name : names) {
    const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    const std::string help = flag->Help();
    const std::string default_value = flag->DefaultValue();
    // A default that only stands for "not given" is explained by the help itself.
    const bool shown = !default_value.empty() && default_value != "0" && help.find("not given") == std::string::npos;
    table.AddRow({"", absl::StrCat("--", name), shown ? absl::StrCat(help, " (default: ", default_value, ")") : help});
  }
  return table.ToString();
}

bool FlagGiven(const std::string& name) { return GivenFlags().count(name) > 0; }

}  // namespace headwater::ctl
