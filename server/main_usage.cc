#include "server/main_usage.h"

#include <stdlib.h>

#include <algorithm>
#include <iostream>

#include "absl/flags/parse.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/service/flags_document.h"
#include "server/service/server_core.h"

namespace headwater {
namespace {

constexpr char kUsage[] =
    "headwaterd [flags]: serves LM heads, fused linear losses for trainers.\n"
    "\n"
    "A file with one flag a line is read by --flagfile=PATH; later flags win. Durations are 30 (seconds), 500ms, 2m; sizes\n"
    "are bytes, or 16GiB.\n"
    "SIGTERM, SIGINT and SIGHUP drain: new calls are refused, accepted ones finish, the exit status is 0. It is 1 for what cannot "
    "be\n"
    "begun or finished, and 75 when the engine's device was lost: start a new server then.";

bool WantsHelp(int argc, char** argv) {
  return std::any_of(argv + 1, argv + argc, [](const absl::string_view argument) {
    return argument == "-h" || absl::StartsWith(argument, "-help") || absl::StartsWith(argument, "--help");
  });
}

// Run by exit(). `is_parsed`: a bool, whether the flags are known.
void PointAtHelp(int status, void* is_parsed) {
  if (status != 0 && !*static_cast<const bool*>(is_parsed)) std::cerr << "headwaterd: see headwaterd --help\n";
}

}  // namespace

std::vector<char*> ParseFlags(int argc, char** argv, const char* file_name) {
  // Abseil's own help has no sections, and ends with status 1.
  if (WantsHelp(argc, argv)) {
    std::cout << kUsage << "\n\n" << service::FlagsHelp(file_name) << std::flush;
    exit(0);
  }
  // What Abseil would say to --version is about itself: how the distribution has built it.
  absl::FlagsUsageConfig usage;
  usage.version_string = [] { return absl::StrCat("headwaterd ", service::ServerVersion(), "\n"); };
  absl::SetFlagsUsageConfig(usage);
  // Abseil ends the process itself if a flag is unknown or has no such value.
  static bool is_parsed = false;
  on_exit(PointAtHelp, &is_parsed);
  std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  is_parsed = true;
  return rest;
}

}  // namespace headwater
