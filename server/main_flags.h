// The flags of headwaterd: their effects, their help, and the checks of single flags.
#ifndef HEADWATER_SERVER_MAIN_FLAGS_H_
#define HEADWATER_SERVER_MAIN_FLAGS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/flags/declare.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "server/flags/flag_types.h"
#include "server/service/server_options.h"

// Flags that are read outside of the options.
ABSL_DECLARE_FLAG(std::string, algorithm_cache);
ABSL_DECLARE_FLAG(int32_t, device);
ABSL_DECLARE_FLAG(headwater::DurationFlag, device_lost_grace);
ABSL_DECLARE_FLAG(headwater::DurationFlag, drain_timeout);
ABSL_DECLARE_FLAG(std::string, engine);
ABSL_DECLARE_FLAG(int32_t, gpus);
ABSL_DECLARE_FLAG(std::string, group_listen_host);
ABSL_DECLARE_FLAG(std::string, join);
ABSL_DECLARE_FLAG(std::string, join_ca);
ABSL_DECLARE_FLAG(std::string, join_token_file);
ABSL_DECLARE_FLAG(std::string, log_format);
ABSL_DECLARE_FLAG(std::string, log_level);
ABSL_DECLARE_FLAG(std::string, log_level_file);
ABSL_DECLARE_FLAG(headwater::BytesFlag, memory_budget_bytes);
ABSL_DECLARE_FLAG(int32_t, parent_pid);
ABSL_DECLARE_FLAG(std::string, port_file);
ABSL_DECLARE_FLAG(bool, print_flags_doc);
ABSL_DECLARE_FLAG(bool, print_metrics_doc);
ABSL_DECLARE_FLAG(headwater::DurationFlag, rank_timeout);
ABSL_DECLARE_FLAG(std::string, tls_certificate);
ABSL_DECLARE_FLAG(std::string, tls_key);
ABSL_DECLARE_FLAG(int32_t, workers);

namespace headwater {

// Sets the flags and returns the other arguments, the program's name first. Ends the process with status 0 for --help, which prints
// the flags by section, and for --version. Ends it with status 1, and a hint at --help, for an unknown flag or an invalid value.
std::vector<char*> ParseFlags(int argc, char** argv);
// A Markdown table for each section: the tables in docs/flags.md.
std::string FlagsDocument();

// Options made from the flags. InvalidArgument, with the flag's name, for an invalid value.
absl::StatusOr<EngineOptions> EngineOptionsFromFlags();
absl::StatusOr<service::ServerOptions> ServerOptionsFromFlags();

// Checks of a server's and a worker's flags: --device, --gpus and --memory_budget_bytes; --algorithm_cache; the times for ending.
absl::Status CheckDevices();
absl::Status CheckAlgorithmCache();
absl::Status CheckEnd();
// OK if the flag's path is empty, or a readable file; else InvalidArgument with the system's reason.
absl::Status CheckReadable(const char* flag, const std::string& path);

}  // namespace headwater

#endif  // HEADWATER_SERVER_MAIN_FLAGS_H_
