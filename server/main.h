// The parts of headwaterd: its flags (main_flags.cc), its engine (main_engine.cc), its start and end (main_lifecycle.cc), and its
// life as a worker (main_worker.cc).
//
// The main thread takes signals when it is ready to. SIGTERM, SIGINT and SIGHUP end the process, SIGUSR2 is the process's own, and
// SIGUSR1 is ignored. All threads block them from the start, so that a signal stays pending until the main thread waits for it. The
// start also opens /dev/null for each of stdin, stdout and stderr that is closed.
#ifndef HEADWATER_SERVER_MAIN_H_
#define HEADWATER_SERVER_MAIN_H_

#include <signal.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/declare.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "headwater/kernels/engine.h"
#include "server/flags/flag_types.h"
#include "server/group/restarter.h"
#include "server/service/server.h"
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

// ---- flags: their effects, their help, and the checks of single flags

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

// ---- start and end

// Wakes the main thread: the device is lost, or a worker is leaving.
inline constexpr int kWakeSignal = SIGUSR2;

// All signals of the main thread.
sigset_t MainSignals();

// Ignores signals from broken outputs: SIGPIPE when a reader is gone, SIGXFSZ when a log has reached the limit of a file's size.
// Called once, at the beginning of main().
void OutliveReaders();

// Waits for a signal that ends the process, or for kWakeSignal when `is_due`. Logs other signals: event=signal_ignored.
int AwaitSignal(const sigset_t& signals, const std::function<bool()>& is_due);

bool IsEndSignal(int signal_number);

// Whether a signal that ends the process is pending.
bool IsAskedToEnd();
// Calls `action` on a thread of its own once such a signal is pending, which stays pending. Fails without a descriptor for it.
absl::Status WhenAskedToEnd(std::function<void()> action);

// Any thread.
void WakeMainThread();

// Sends this process SIGTERM when its parent, the process `parent`, ends. InvalidArgument if `parent` is not its parent;
// Unavailable without pidfd_open() (before Linux 5.3). The kernel's own PR_SET_PDEATHSIG follows the thread that has forked.
absl::Status EndWithParent(int32_t parent);

// An operator's signal was taken: the process ends and does not restart, whatever becomes of its engine.
inline std::atomic<bool> g_is_ending{false};
// Restarts a leader or a worker.
group::Restarter& Restart();

// Prints to stderr why the process ends. Returns its status, 1.
int Fail(absl::string_view message);

// Reports the server's addresses: on stdout, and in --port_file, which is renamed in so that a reader never sees half of it.
absl::Status Announce(const service::Server& server);

// Ends the process at once, or restarts it if it is a group's leader or worker. Destroys nothing: destructors that use a lost
// device may wait or fail.
[[noreturn]] void EndLost();
// Calls EndLost() after --device_lost_grace, even if a call, or the main thread, never returns from the device. Logs `note` then,
// unless it is empty. Any thread; only the first call has an effect, and returns true.
bool EndLostInTime(const std::string& note);

// A worker is to end, and stays for a while.
inline std::atomic<bool> g_worker_is_leaving{false};

// Runs a worker (--join) until one of MainSignals() ends the process. Returns only for flags that conflict: InvalidArgument.
absl::Status Join(const sigset_t& signals);

// ---- the engine, with those of other processes and of several GPUs

struct ChosenEngine {
  std::unique_ptr<LossEngine> engine;
  std::string note;  // why it is not a faster one, and what its products run on; empty if it is
};

// The engine that the flags select. With --workers it is a group's, which goes into `options`; the server waits for its workers.
// InvalidArgument for flags that conflict. With --engine=auto it is CUDA if its module is there and finds a usable GPU, else the
// CPU, and the note says why.
absl::StatusOr<ChosenEngine> MakeEngine(const EngineOptions& engine, service::ServerOptions* options);

// InvalidArgument for an --engine other than "auto", "cpu" and "cuda".
absl::Status CheckEngineChoice(const std::string& choice);

// The file where the CUDA engine keeps its products' algorithms, from a flag: a path as it is, or none if empty. With "auto" it is
// headwater/cublaslt.json in $XDG_CACHE_HOME, else in ~/.cache, or none if neither is known.
std::string AlgorithmCachePath(const std::string& choice);

}  // namespace headwater

#endif  // HEADWATER_SERVER_MAIN_H_
