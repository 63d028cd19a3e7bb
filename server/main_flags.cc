#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <iostream>
#include <map>
#include <system_error>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "headwater/kernels/return_if_error.h"
#include "server/main.h"
#include "server/service/limits.h"
#include "server/service/server_core.h"

namespace headwater {
namespace {

using TakeOption = void (*)(service::ServerOptions& options);

// A section of --help and of docs/flags.md.
struct Section {
  const char* title;
  std::map<std::string, const absl::CommandLineFlag*> flags;
};
std::vector<Section>& Sections() {
  static auto* const sections = new std::vector<Section>();
  return *sections;
}
std::vector<TakeOption>& OptionTakers() {
  static auto* const takers = new std::vector<TakeOption>();
  return *takers;
}

// Static objects among the flags: the begin of a section, and the place in it of the flag before.
struct FlagSection {
  explicit FlagSection(const char* title) { Sections().push_back({title, {}}); }
};
struct FlagEntry {
  explicit FlagEntry(const char* name, TakeOption take = nullptr) {
    Sections().back().flags[name] = absl::FindCommandLineFlag(name);
    if (take != nullptr) OptionTakers().push_back(take);
  }
};

}  // namespace
}  // namespace headwater

// A flag; a flag for the field `field` of ServerOptions; a flag for the field of its own name.
#define HEADWATER_FLAG(type, name, default_value, help) \
  ABSL_FLAG(type, name, default_value, help);           \
  static const headwater::FlagEntry entry_##name(#name);
#define HEADWATER_OPTION_FLAG(type, name, field, default_value, help) \
  ABSL_FLAG(type, name, default_value, help);                         \
  static const headwater::FlagEntry entry_##name(                     \
      #name, [](headwater::service::ServerOptions& options) { options.field = absl::GetFlag(FLAGS_##name); });
#define HEADWATER_SERVER_FLAG(type, name, default_value, help) HEADWATER_OPTION_FLAG(type, name, name, default_value, help)

static const headwater::FlagSection kAddressesFlags("Addresses");
HEADWATER_SERVER_FLAG(
    std::vector<std::string>, listen_addresses, {"127.0.0.1:50051"},
    "comma-separated addresses to serve on: host:port (port 0 picks one; 0.0.0.0 and [::] are all addresses of IPv4 and "
    "IPv6) or unix:PATH");
HEADWATER_FLAG(
    std::string, port_file, "",
    "file that gets the addresses served on, one a line, those for admin last, once the server is ready; empty: none. They "
    "are also printed on stdout");
HEADWATER_SERVER_FLAG(
    std::string, metrics_address, "127.0.0.1:9464",
    "host:port of the Prometheus endpoint /metrics (port 0 picks one); 0.0.0.0 and [::] are all addresses of IPv4 and IPv6; "
    "empty: none");
HEADWATER_SERVER_FLAG(bool, reflection, false, "serve gRPC server reflection");
HEADWATER_FLAG(
    std::string, unix_socket_mode, "0600",
    "permissions of the Unix sockets among --listen_addresses and --admin_listen_addresses, in octal; to connect needs to write");
HEADWATER_SERVER_FLAG(std::string, unix_socket_owner, "",
                      "USER, USER:GROUP or :GROUP, by name or number, that those sockets are given to; empty: the process's own");
HEADWATER_SERVER_FLAG(
    std::string, descriptor_socket, "",
    "path of a Unix socket that takes descriptors of shared memory from clients of this host (docs/api.md, \"Shared memory\"); "
    "empty: none");
HEADWATER_FLAG(std::string, descriptor_socket_mode, "0600", "permissions of that socket, in octal");
HEADWATER_SERVER_FLAG(bool, descriptor_socket_any_user, false,
                      "take descriptors also from processes of other users than the server's own and root");
HEADWATER_SERVER_FLAG(
    bool, named_regions, false,
    "let clients register files under /dev/shm whose names begin with headwater-; every client of the server can then read "
    "and write every such file that the server's user can; slower than descriptors");
static const headwater::FlagSection kAccessFlags("Access");
HEADWATER_SERVER_FLAG(
    std::vector<std::string>, admin_listen_addresses, {},
    "comma-separated addresses as in --listen_addresses that take every call; with any, --listen_addresses take no call that "
    "needs the permission admin; empty: no ports of its own for admin");
HEADWATER_SERVER_FLAG(
    std::string, tls_certificate, "",
    "file with the certificate chain, in PEM, of all host:port addresses but --metrics_address; read again when it changes; "
    "empty: no TLS");
HEADWATER_SERVER_FLAG(std::string, tls_key, "",
                      "file with the key of --tls_certificate, in PEM, without a passphrase; read again when it changes");
HEADWATER_SERVER_FLAG(
    std::string, tls_client_ca, "",
    "file with certificates of authorities, in PEM: clients must show a certificate that one of them has signed (mTLS); "
    "read again when it changes; empty: none is asked for");
HEADWATER_SERVER_FLAG(
    std::string, token_file, "",
    "file with the tokens that calls must come with, and what each allows (docs/security.md); read again when it changes; "
    "empty: every call is allowed");
static const headwater::FlagSection kEngineFlags("Engine");
HEADWATER_FLAG(
    std::string, engine, "auto",
    "auto, cpu or cuda; auto is cuda where it can be had, else cpu; with --workers cpu, and with --join the other server's");
HEADWATER_FLAG(int32_t, device, 0, "index of the GPU, or of the first of --gpus, as CUDA counts the visible ones; --engine=cuda");
HEADWATER_FLAG(std::string, algorithm_cache, "auto",
               "file that keeps what the CUDA engine found out about the fastest matrix products, from start to start; auto: "
               "headwater/cublaslt.json in $XDG_CACHE_HOME, else in ~/.cache; empty: none is kept");
HEADWATER_FLAG(
    bool, timed_search, true,
    "try the matrix products out when a head is created, and take the fastest; without it the CUDA engine takes those that the "
    "library proposes, the same ones at every start");
HEADWATER_SERVER_FLAG(
    bool, deterministic, false,
    "add contributions in ascending id, each by a computation of its own, so that the bits of a step's gradient do not depend on "
    "the order in which they came, on retries, restarts or the number of trainers (docs/guarantees.md, \"Deterministic mode\"); "
    "micro-batches take 4/3 of the engine's time; switches --timed_search off");
HEADWATER_FLAG(int32_t, shards, 1, "vocabulary shards of each head, at least 1");
HEADWATER_FLAG(
    int32_t, gpus, 1,
    "GPUs of this machine, from --device on, that hold a shard of each head each and compute together, with --workers or --join "
    "also with those of other processes; --engine=cuda");
HEADWATER_FLAG(std::vector<std::string>, shard_weights, {},
               "relative sizes of the shards, as many as --shards, or as --gpus and --workers together; empty: even");
HEADWATER_FLAG(int32_t, threads, 0,
               "CPU threads of the engine over all shards, or of each rank with --workers; 0: as many as the affinity mask and the "
               "control group's CPU quota allow, a part of a processor as one; --engine=cpu");
HEADWATER_FLAG(headwater::BytesFlag, memory_budget_bytes, 0,
               "memory of all heads, in bytes, on each of --gpus; 0: 80 % of the device's (of the cgroup's limit on the CPU)");
HEADWATER_FLAG(headwater::BytesFlag, workspace_bytes, 0,
               "working memory of the engine, in bytes: for each head with --engine=cpu, for all heads of a GPU together with "
               "--engine=cuda; 0: the engine's default");
static const headwater::FlagSection kSeveralFlags("Several processes as one server");
HEADWATER_FLAG(
    int32_t, workers, 0,
    "ranks of other processes that join this one (--join) and hold a shard of each head: a process on the CPU is one, one with "
    "--engine=cuda as many as its --gpus; the server is SERVING once all of them are there; 0: none (docs/groups.md)");
HEADWATER_SERVER_FLAG(
    std::string, worker_token, "",
    "name of the token in --token_file that workers join with; it needs the permission admin; empty: none may, if there is a "
    "--token_file");
HEADWATER_FLAG(
    std::string, join, "",
    "host:port, or unix:PATH, of a server with --workers that this process joins, again and again, until it is ended; of the other "
    "flags only those named join_, --group_listen_host, --engine, --device, --gpus, --algorithm_cache, --memory_budget_bytes, "
    "--device_lost_grace, --drain_timeout, --tls_certificate and --tls_key (which the worker shows) and the ones of the log count "
    "then");
HEADWATER_FLAG(std::string, join_ca, "",
               "file with the certificates, in PEM, that the other server's must be signed by; empty: no TLS");
HEADWATER_FLAG(std::string, join_token_file, "",
               "file with the token for --join, whose name the other server's --worker_token is; empty: none");
HEADWATER_FLAG(
    std::string, group_listen_host, "0.0.0.0",
    "IP address at which the ranks of a group reach this process, at a port of the system's choice; 0.0.0.0 and [::] are all "
    "addresses of IPv4 and IPv6; what they send each other there is neither encrypted nor signed");
HEADWATER_FLAG(headwater::DurationFlag, rank_timeout, absl::Seconds(5),
               "a worker from which nothing has come for so long is lost, at least 1s");
static const headwater::FlagSection kStorageFlags("Storage");
HEADWATER_SERVER_FLAG(std::string, checkpoint_directory, "",
                      "where checkpoints are kept; made if it is not there; empty: no checkpoints");
HEADWATER_SERVER_FLAG(
    bool, restore_heads, true,
    "bring back at the start every head that was saved in --checkpoint_directory and not deleted, from its newest checkpoint");
HEADWATER_SERVER_FLAG(
    int64_t, keep_checkpoints, headwater::service::ServerOptions{}.keep_checkpoints,
    "checkpoints of a head that stay among those whose names differ only in the number at their end (step-100, step-200); "
    "older ones are removed when a newer one is on the disk; 0: all stay");
HEADWATER_SERVER_FLAG(
    bool, drain_checkpoint, false,
    "after SIGTERM, SIGINT or SIGHUP, save the heads that have changed since they were last saved, as checkpoint drain, within "
    "--drain_timeout, half of which is kept for that");
HEADWATER_SERVER_FLAG(std::string, load_root, "",
                      "folder that LoadWeights may read from, which must be there; empty: LoadWeights is refused");
static const headwater::FlagSection kLimitsFlags("Limits");
#define HEADWATER_LIMIT_FLAG(unit, name, default_value, minimum, maximum, help) \
  HEADWATER_OPTION_FLAG(headwater::service::unit##Limit::Flag, name, limits.name, default_value, help)
HEADWATER_LIMITS(HEADWATER_LIMIT_FLAG)
#undef HEADWATER_LIMIT_FLAG
#define HEADWATER_SETTING_FLAG(unit, name, default_value, minimum, maximum, help) \
  HEADWATER_SERVER_FLAG(headwater::service::unit##Limit::Flag, name, default_value, help)
HEADWATER_SERVER_SETTINGS(HEADWATER_SETTING_FLAG)
#undef HEADWATER_SETTING_FLAG
HEADWATER_SERVER_FLAG(bool, idle_head_checkpoint, false,
                      "save such a head first, as idle-STEP in --checkpoint_directory; one that cannot be saved stays");
static const headwater::FlagSection kOperationFlags("Operation");
HEADWATER_FLAG(
    headwater::DurationFlag, drain_timeout, absl::Seconds(30),
    "how long accepted calls may go on after SIGTERM, SIGINT or SIGHUP, > 0; with --join, how long the other server may take to "
    "save what the group holds, at least its own");
HEADWATER_FLAG(
    headwater::DurationFlag, device_lost_grace, absl::Seconds(5),
    "how long calls in progress may take to be answered once the engine's device is lost, from 0 to 1h; then the process ends, "
    "with status 75, or restarts in place, with --workers or --join");
HEADWATER_FLAG(int32_t, parent_pid, 0,
               "process that has started this one: when it ends, however that happens, this one drains as after SIGTERM; 0: none");
HEADWATER_SERVER_FLAG(
    double, product_tflops, 0,
    "what bare matrix products reach on this machine, in TFLOP/s: what the metrics measure utilisation against; 0: measured at "
    "the start with --engine=cpu, not known with --engine=cuda");
HEADWATER_FLAG(std::string, log_level, "info", "debug, info, warning, error or off");
HEADWATER_FLAG(
    std::string, log_level_file, "",
    "file whose only word is the level instead, read every second, so that it can be changed while the server runs; while it is "
    "not there, or empty, --log_level holds; empty: none");
HEADWATER_SERVER_FLAG(
    std::string, trace_dir, "",
    "folder for Chrome traces of micro-batches and steps: a file for each call whose metadata traceparent says that its trace is "
    "recorded (docs/operations.md, \"Traces\"); made if it is not there; empty: none");
HEADWATER_SERVER_FLAG(int64_t, max_trace_files, headwater::service::ServerOptions{}.max_trace_files,
                      "files that stay in --trace_dir, at least 1; the oldest go");
HEADWATER_FLAG(std::string, log_format, "text", "text (key=value) or json; one line for each event, on stderr");
HEADWATER_FLAG(bool, print_metrics_doc, false, "print docs/metrics.md and exit");
HEADWATER_FLAG(bool, print_flags_doc, false, "print the table of flags in docs/flags.md and exit");

namespace headwater {
namespace {

constexpr int32_t kMaxWorkers = 255;
constexpr int32_t kMaxGpus = 64;
constexpr int32_t kMaxRanks = 256;  // the most shards of an engine

absl::Status PathError(const char* flag, const char* what, const std::string& path, int error) {
  return absl::InvalidArgumentError(absl::StrCat("--", flag, ": ", what, " ", path, ": ", std::strerror(error)));
}

bool IsFolder(const std::string& path) {
  struct stat info = {};
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

absl::Status CheckAtLeast(const char* flag, int64_t value, int64_t least) {
  if (value >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, ": expected >= ", least, ", got ", value));
}

absl::StatusOr<int> ParseMode(const char* flag, const std::string& text) {
  int mode = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), mode, 8);
  if (error == std::errc() && end == text.data() + text.size() && mode >= 0 && mode <= 0777) return mode;
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": expected permissions from 0 to 0777, in octal, got \"", text, "\""));
}

// A writable file, existing or not: it is replaced by a file that is made beside it. Empty: no file.
absl::Status CheckReplaceable(const char* flag, const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  if (IsFolder(path)) return PathError(flag, "cannot write", path, EISDIR);
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
  if (access(folder.c_str(), W_OK | X_OK) != 0) return PathError(flag, "cannot write into the folder of", path, errno);
  return absl::OkStatus();
}

constexpr size_t kHelpColumns = 100;

// The words wrapped into lines, each after the indent.
std::string Wrapped(const std::string& text, const std::string& indent) {
  std::string lines;
  size_t column = kHelpColumns;
  for (const absl::string_view word : absl::StrSplit(text, ' ')) {
    if (column + 1 + word.size() > kHelpColumns) {
      absl::StrAppend(&lines, lines.empty() ? "" : "\n", indent, word);
      column = indent.size() + word.size();
    } else {
      absl::StrAppend(&lines, " ", word);
      column += 1 + word.size();
    }
  }
  return lines + "\n";
}

std::string FlagsHelp() {
  std::string text;
  for (const Section& section : Sections()) {
    absl::StrAppend(&text, text.empty() ? "" : "\n", section.title, "\n\n");
    for (const auto& [name, flag] : section.flags) {
      absl::StrAppend(&text, "  --", name, "=", flag->DefaultValue(), "\n", Wrapped(flag->Help(), "      "));
    }
  }
  return text;
}

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

// Called by exit(). `is_parsed`: a bool, whether the flags are known.
void PointAtHelp(int status, void* is_parsed) {
  if (status != 0 && !*static_cast<const bool*>(is_parsed)) std::cerr << "headwaterd: see headwaterd --help\n";
}

}  // namespace

std::vector<char*> ParseFlags(int argc, char** argv) {
  // Abseil's own help has no sections, and ends with status 1.
  if (WantsHelp(argc, argv)) {
    std::cout << kUsage << "\n\n" << FlagsHelp() << std::flush;
    exit(0);
  }
  // Abseil's own version text describes its build by the distribution.
  absl::FlagsUsageConfig usage;
  usage.version_string = [] { return absl::StrCat("headwaterd ", service::ServerVersion(), "\n"); };
  absl::SetFlagsUsageConfig(usage);
  // Abseil ends the process itself for an unknown flag or an invalid value.
  static bool is_parsed = false;
  on_exit(PointAtHelp, &is_parsed);
  std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  is_parsed = true;
  return rest;
}

std::string FlagsDocument() {
  std::string text;
  for (const Section& section : Sections()) {
    absl::StrAppend(&text, text.empty() ? "" : "\n", "**", section.title, "**\n\n| Flag | Default | Meaning |\n|---|---|---|\n");
    for (const auto& [name, flag] : section.flags) {
      const std::string default_value = flag->DefaultValue();
      const std::string shown = default_value.empty() ? "empty" : absl::StrCat("`", default_value, "`");
      absl::StrAppend(&text, "| `--", name, "` | ", shown, " | ", flag->Help(), " |\n");
    }
  }
  return text;
}

absl::Status CheckReadable(const char* flag, const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  if (access(path.c_str(), R_OK) != 0) return PathError(flag, "cannot read", path, errno);
  return IsFolder(path) ? PathError(flag, "cannot read", path, EISDIR) : absl::OkStatus();
}

absl::Status CheckDevices() {
  const int32_t gpus = absl::GetFlag(FLAGS_gpus);
  if (gpus < 1 || gpus > kMaxGpus) {
    return absl::InvalidArgumentError(absl::StrCat("--gpus: expected 1 to ", kMaxGpus, ", got ", gpus));
  }
  if (gpus > 1 && absl::GetFlag(FLAGS_engine) != "cuda") {
    return absl::InvalidArgumentError("--gpus: expected --engine=cuda with more than one");
  }
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("device", absl::GetFlag(FLAGS_device), 0));
  return CheckAtLeast("memory_budget_bytes", absl::GetFlag(FLAGS_memory_budget_bytes), 0);
}

absl::Status CheckAlgorithmCache() {
  const std::string path = absl::GetFlag(FLAGS_algorithm_cache);
  return path == "auto" || absl::GetFlag(FLAGS_engine) == "cpu" ? absl::OkStatus() : CheckReplaceable("algorithm_cache", path);
}

absl::StatusOr<EngineOptions> EngineOptionsFromFlags() {
  EngineOptions options;
  const int32_t workers = absl::GetFlag(FLAGS_workers);
  const int32_t gpus = absl::GetFlag(FLAGS_gpus);
  options.shard_count = workers > 0 ? workers + gpus : gpus > 1 ? gpus : absl::GetFlag(FLAGS_shards);
  options.thread_count = absl::GetFlag(FLAGS_threads);
  options.memory_budget_bytes = absl::GetFlag(FLAGS_memory_budget_bytes);
  options.workspace_bytes = absl::GetFlag(FLAGS_workspace_bytes);
  for (const std::string& text : absl::GetFlag(FLAGS_shard_weights)) {
    int64_t weight = 0;
    if (!absl::SimpleAtoi(text, &weight) || weight < 1) {
      return absl::InvalidArgumentError("--shard_weights: expected numbers >= 1, got \"" + text + "\"");
    }
    options.shard_weights.push_back(weight);
  }
  if (workers < 0 || workers > kMaxWorkers) {
    return absl::InvalidArgumentError(absl::StrCat("--workers: expected 0 to ", kMaxWorkers, ", got ", workers));
  }
  if (workers > 0 && absl::GetFlag(FLAGS_shards) != 1) {
    return absl::InvalidArgumentError("--workers: expected --shards=1 with it: each rank holds one shard");
  }
  HEADWATER_RETURN_IF_ERROR(CheckDevices());
  if (gpus > 1 && absl::GetFlag(FLAGS_shards) != 1) {
    return absl::InvalidArgumentError("--gpus: expected --shards=1 with more than one: each GPU holds one shard");
  }
  if (workers > 0 && workers + gpus > kMaxRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("--workers: expected at most ", kMaxRanks, " together with --gpus, got ", workers, " and ", gpus));
  }
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("shards", options.shard_count, 1));
  if (!options.shard_weights.empty() && options.shard_weights.size() != static_cast<size_t>(options.shard_count)) {
    return absl::InvalidArgumentError(absl::StrCat("--shard_weights: expected ", options.shard_count,
                                                   " numbers, one for each shard, got ", options.shard_weights.size()));
  }
  options.device_index = absl::GetFlag(FLAGS_device);
  HEADWATER_RETURN_IF_ERROR(CheckAlgorithmCache());
  options.algorithm_cache_path = AlgorithmCachePath(absl::GetFlag(FLAGS_algorithm_cache));
  options.deterministic = absl::GetFlag(FLAGS_deterministic);
  options.timed_search = absl::GetFlag(FLAGS_timed_search) && !options.deterministic;
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("threads", options.thread_count, 0));
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("workspace_bytes", options.workspace_bytes, 0));
  return options;
}

absl::Status CheckEnd() {
  if (const absl::Duration timeout = absl::GetFlag(FLAGS_drain_timeout); timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("--drain_timeout: expected a duration > 0, got " + absl::FormatDuration(timeout));
  }
  const absl::Duration grace = absl::GetFlag(FLAGS_device_lost_grace);
  if (grace >= absl::ZeroDuration() && grace <= absl::Hours(1)) return absl::OkStatus();
  return absl::InvalidArgumentError("--device_lost_grace: expected a duration from 0 to 1h, got " + absl::FormatDuration(grace));
}

absl::StatusOr<service::ServerOptions> ServerOptionsFromFlags() {
  service::ServerOptions options;
  for (const TakeOption& take : OptionTakers()) take(options);
  HEADWATER_ASSIGN_OR_RETURN(auto descriptor_mode,
                             ParseMode("descriptor_socket_mode", absl::GetFlag(FLAGS_descriptor_socket_mode)));
  options.descriptor_socket_mode = descriptor_mode;
  HEADWATER_ASSIGN_OR_RETURN(auto unix_mode, ParseMode("unix_socket_mode", absl::GetFlag(FLAGS_unix_socket_mode)));
  options.unix_socket_mode = unix_mode;
  if (!options.worker_token.empty() && (absl::GetFlag(FLAGS_workers) == 0 || options.token_file.empty())) {
    return absl::InvalidArgumentError("--worker_token: expected --workers and --token_file with it");
  }
  HEADWATER_RETURN_IF_ERROR(CheckReplaceable("port_file", absl::GetFlag(FLAGS_port_file)));
  return options;
}

}  // namespace headwater
