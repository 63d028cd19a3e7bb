// headwaterd: flags, signals, wiring.
#include <malloc.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "headwater/kernels/device_group_id.h"
#include "headwater/kernels/engine.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/machine_limits.h"
#include "headwater/kernels/return_if_error.h"
#include "server/flags/flag_types.h"
#include "server/group/group_assembly.h"
#include "server/group/join_leader.h"
#include "server/group/local_cuda_group.h"
#include "server/group/rank_codec.h"
#include "server/group/restarter.h"
#include "server/heads/epoch.h"
#include "server/main_flag_checks.h"
#include "server/main_signals.h"
#include "server/main_usage.h"
#include "server/observability/line_writer.h"
#include "server/observability/log_level_file.h"
#include "server/observability/logging.h"
#include "server/observability/memory_end.h"
#include "server/observability/metrics.h"
#include "server/observability/monotonic_clock.h"
#include "server/service/engine_choice.h"
#include "server/service/flags_document.h"
#include "server/service/grpc_log.h"
#include "server/service/limits.h"
#include "server/service/listen_address.h"
#include "server/service/server.h"
#include "server/service/server_core.h"
#include "server/transport/connection_gate.h"

static const headwater::service::FlagSection kAddressesFlags("Addresses");
ABSL_FLAG(std::vector<std::string>, listen_addresses, {"127.0.0.1:50051"},
          "comma-separated addresses to serve on: host:port (port 0 picks one; 0.0.0.0 and [::] are all addresses of IPv4 and "
          "IPv6) or unix:PATH");
ABSL_FLAG(std::string, port_file, "",
          "file that gets the addresses served on, one a line, those for admin last, once the server is ready; empty: none. They "
          "are also "
          "printed on stdout");
ABSL_FLAG(std::string, metrics_address, "127.0.0.1:9464",
          "host:port of the Prometheus endpoint /metrics (port 0 picks one); 0.0.0.0 and [::] are all addresses of IPv4 and IPv6; "
          "empty: none");
ABSL_FLAG(bool, reflection, false, "serve gRPC server reflection");
ABSL_FLAG(
    std::string, unix_socket_mode, "0600",
    "permissions of the Unix sockets among --listen_addresses and --admin_listen_addresses, in octal; to connect needs to write");
ABSL_FLAG(std::string, unix_socket_owner, "",
          "USER, USER:GROUP or :GROUP, by name or number, that those sockets are given to; empty: the process's own");
ABSL_FLAG(
    std::string, descriptor_socket, "",
    "path of a Unix socket that takes descriptors of shared memory from clients of this host (docs/api.md, \"Shared memory\"); "
    "empty: none");
ABSL_FLAG(std::string, descriptor_socket_mode, "0600", "permissions of that socket, in octal");
ABSL_FLAG(bool, descriptor_socket_any_user, false,
          "take descriptors also from processes of other users than the server's own and root");
ABSL_FLAG(bool, named_regions, false,
          "let clients register files under /dev/shm whose names begin with headwater-; every client of the server can then read "
          "and write every such file that the server's user can; slower than descriptors");
static const headwater::service::FlagSection kAccessFlags("Access");
ABSL_FLAG(std::vector<std::string>, admin_listen_addresses, {},
          "comma-separated addresses as in --listen_addresses that take every call; with any, --listen_addresses take no call that "
          "needs the permission admin; empty: no ports of its own for admin");
ABSL_FLAG(std::string, tls_certificate, "",
          "file with the certificate chain, in PEM, of all host:port addresses but --metrics_address; read again when it changes; "
          "empty: no TLS");
ABSL_FLAG(std::string, tls_key, "",
          "file with the key of --tls_certificate, in PEM, without a passphrase; read again when it changes");
ABSL_FLAG(std::string, tls_client_ca, "",
          "file with certificates of authorities, in PEM: clients must show a certificate that one of them has signed (mTLS); "
          "read again when it changes; empty: none is asked for");
ABSL_FLAG(std::string, token_file, "",
          "file with the tokens that calls must come with, and what each allows (docs/security.md); read again when it changes; "
          "empty: every call is allowed");
static const headwater::service::FlagSection kEngineFlags("Engine");
ABSL_FLAG(std::string, engine, "auto",
          "auto, cpu or cuda; auto is cuda where it can be had, else cpu; with --workers cpu, and with --join the other server's");
ABSL_FLAG(int32_t, device, 0, "index of the GPU, or of the first of --gpus, as CUDA counts the visible ones; --engine=cuda");
ABSL_FLAG(std::string, algorithm_cache, "auto",
          "file that keeps what the CUDA engine found out about the fastest matrix products, from start to start; auto: "
          "headwater/cublaslt.json in $XDG_CACHE_HOME, else in ~/.cache; empty: none is kept");
ABSL_FLAG(
    bool, timed_search, true,
    "try the matrix products out when a head is created, and take the fastest; without it the CUDA engine takes those that the "
    "library proposes, the same ones at every start");
ABSL_FLAG(
    bool, deterministic, false,
    "add contributions in ascending id, each by a computation of its own, so that the bits of a step's gradient do not depend on "
    "the order in which they came, on retries, restarts or the number of trainers (docs/guarantees.md, \"Deterministic mode\"); "
    "micro-batches take 4/3 of the engine's time; switches --timed_search off");
ABSL_FLAG(int32_t, shards, 1, "vocabulary shards of each head, at least 1");
ABSL_FLAG(
    int32_t, gpus, 1,
    "GPUs of this machine, from --device on, that hold a shard of each head each and compute together, with --workers or --join "
    "also with those of other processes; --engine=cuda");
ABSL_FLAG(std::vector<std::string>, shard_weights, {},
          "relative sizes of the shards, as many as --shards, or as --gpus and --workers together; empty: even");
ABSL_FLAG(int32_t, threads, 0,
          "CPU threads of the engine over all shards, or of each rank with --workers; 0: as many as the affinity mask and the "
          "control group's CPU quota allow, a part of a processor as one; --engine=cpu");
ABSL_FLAG(headwater::BytesFlag, memory_budget_bytes, 0,
          "memory of all heads, in bytes, on each of --gpus; 0: 80 % of the device's (of the cgroup's limit on the CPU)");
ABSL_FLAG(headwater::BytesFlag, workspace_bytes, 0,
          "working memory of the engine, in bytes: for each head with --engine=cpu, for all heads of a GPU together with "
          "--engine=cuda; 0: the engine's default");
static const headwater::service::FlagSection kSeveralFlags("Several processes as one server");
ABSL_FLAG(
    int32_t, workers, 0,
    "ranks of other processes that join this one (--join) and hold a shard of each head: a process on the CPU is one, one with "
    "--engine=cuda as many as its --gpus; the server is SERVING once all of them are there; 0: none (docs/groups.md)");
ABSL_FLAG(std::string, worker_token, "",
          "name of the token in --token_file that workers join with; it needs the permission admin; empty: none may, if there is a "
          "--token_file");
ABSL_FLAG(
    std::string, join, "",
    "host:port, or unix:PATH, of a server with --workers that this process joins, again and again, until it is ended; of the other "
    "flags only those named join_, --group_listen_host, --engine, --device, --gpus, --algorithm_cache, --memory_budget_bytes, "
    "--device_lost_grace, --drain_timeout, --tls_certificate and --tls_key (which the worker shows) and the ones of the log count "
    "then");
ABSL_FLAG(std::string, join_ca, "", "file with the certificates, in PEM, that the other server's must be signed by; empty: no TLS");
ABSL_FLAG(std::string, join_token_file, "",
          "file with the token for --join, whose name the other server's --worker_token is; empty: none");
ABSL_FLAG(std::string, group_listen_host, "0.0.0.0",
          "IP address at which the ranks of a group reach this process, at a port of the system's choice; 0.0.0.0 and [::] are all "
          "addresses of IPv4 and IPv6; what they send each other there is neither encrypted nor signed");
ABSL_FLAG(headwater::DurationFlag, rank_timeout, absl::Seconds(5),
          "a worker from which nothing has come for so long is lost, at least 1s");
static const headwater::service::FlagSection kStorageFlags("Storage");
ABSL_FLAG(std::string, checkpoint_directory, "", "where checkpoints are kept; made if it is not there; empty: no checkpoints");
ABSL_FLAG(
    bool, restore_heads, true,
    "bring back at the start every head that was saved in --checkpoint_directory and not deleted, from its newest checkpoint");
ABSL_FLAG(int64_t, keep_checkpoints, headwater::service::ServerOptions{}.keep_checkpoints,
          "checkpoints of a head that stay among those whose names differ only in the number at their end (step-100, step-200); "
          "older ones are removed when a newer one is on the disk; 0: all stay");
ABSL_FLAG(
    bool, drain_checkpoint, false,
    "after SIGTERM, SIGINT or SIGHUP, save the heads that have changed since they were last saved, as checkpoint drain, within "
    "--drain_timeout, half of which is kept for that");
ABSL_FLAG(std::string, load_root, "", "folder that LoadWeights may read from, which must be there; empty: LoadWeights is refused");
static const headwater::service::FlagSection kLimitsFlags("Limits");
#define HEADWATER_LIMIT_FLAG(unit, name, default_value, minimum, maximum, help) \
  ABSL_FLAG(headwater::service::unit##Limit::Flag, name, default_value, help);
HEADWATER_LIMITS(HEADWATER_LIMIT_FLAG)
#undef HEADWATER_LIMIT_FLAG
ABSL_FLAG(
    int32_t, max_threads, headwater::service::ServerOptions{}.max_threads,
    "calls that hold a thread, at least 8: that many ComputeLoss, one more of which is answered QUEUE_FULL, and that many of all "
    "others, one more of which is answered RESOURCE_EXHAUSTED by gRPC itself, without a reason");
ABSL_FLAG(int32_t, max_pollers, headwater::service::ServerOptions{}.max_pollers, "threads that wait for new calls, at least 1");
ABSL_FLAG(headwater::DurationFlag, stream_idle_timeout, headwater::service::ServerOptions{}.stream_idle_timeout,
          "a stream whose client sends nothing, or takes no answer, for so long is cancelled");
ABSL_FLAG(
    double, max_cancel_rate, headwater::service::ServerOptions{}.max_cancel_rate,
    "calls a second that the clients of one host may cancel, and ten times as many at once; beyond that, a host:port connection is "
    "closed at the 17th call that its client cancels");
ABSL_FLAG(
    int32_t, max_reset_backlog, headwater::service::ServerOptions{}.max_reset_backlog,
    "calls of one host:port connection that may wait for the server although its client has reset them: with more than these and "
    "--max_connection_streams, the connection is closed");
ABSL_FLAG(
    headwater::DurationFlag, engine_stall_timeout, headwater::service::ServerOptions{}.engine_stall_timeout,
    "an engine that computes and gets no further for so long is stuck: the process ends as when the device is lost; with --workers "
    "at least twice --rank_timeout; 0: never");
ABSL_FLAG(headwater::DurationFlag, idle_head_timeout, headwater::service::ServerOptions{}.idle_head_timeout,
          "a head that no call has named for so long is deleted, whatever its open step holds; 0: never");
ABSL_FLAG(bool, idle_head_checkpoint, false,
          "save such a head first, as idle-STEP in --checkpoint_directory; one that cannot be saved stays");
static const headwater::service::FlagSection kOperationFlags("Operation");
ABSL_FLAG(
    headwater::DurationFlag, drain_timeout, absl::Seconds(30),
    "how long accepted calls may go on after SIGTERM, SIGINT or SIGHUP, > 0; with --join, how long the other server may take to "
    "save what the group holds, at least its own");
ABSL_FLAG(
    headwater::DurationFlag, device_lost_grace, absl::Seconds(5),
    "how long calls in progress may take to be answered once the engine's device is lost, from 0 to 1h; then the process ends, "
    "with status 75, or restarts in place, with --workers or --join");
ABSL_FLAG(int32_t, parent_pid, 0,
          "process that has started this one: when it ends, however that happens, this one drains as after SIGTERM; 0: none");
ABSL_FLAG(
    double, product_tflops, 0,
    "what bare matrix products reach on this machine, in TFLOP/s: what the metrics measure utilisation against; 0: measured at "
    "the start with --engine=cpu, not known with --engine=cuda");
ABSL_FLAG(std::string, log_level, "info", "debug, info, warning, error or off");
ABSL_FLAG(
    std::string, log_level_file, "",
    "file whose only word is the level instead, read every second, so that it can be changed while the server runs; while it is "
    "not there, or empty, --log_level holds; empty: none");
ABSL_FLAG(
    std::string, trace_dir, "",
    "folder for Chrome traces of micro-batches and steps: a file for each call whose metadata traceparent says that its trace is "
    "recorded (docs/operations.md, \"Traces\"); made if it is not there; empty: none");
ABSL_FLAG(int64_t, max_trace_files, headwater::service::ServerOptions{}.max_trace_files,
          "files that stay in --trace_dir, at least 1; the oldest go");
ABSL_FLAG(std::string, log_format, "text", "text (key=value) or json; one line for each event, on stderr");
ABSL_FLAG(bool, print_metrics_doc, false, "print docs/metrics.md and exit");
ABSL_FLAG(bool, print_flags_doc, false, "print the table of flags in docs/flags.md and exit");

namespace headwater {
namespace {

// The engine's device was lost; EX_TEMPFAIL of sysexits.h: what comes after may work.
constexpr int kDeviceLostStatus = 75;

constexpr int32_t kMaxWorkers = 255;
constexpr int32_t kMaxGpus = 64;
constexpr int32_t kMaxRanks = 256;  // as many as an engine takes shards
// Of --max_threads, for calls beside those of the workers.
constexpr int32_t kThreadsBesideWorkers = 8;
// Of --max_message_bytes: a worker sends a piece of a tensor in one message, and what goes with it.
constexpr int64_t kLeastWorkerMessageBytes = 2 * group::kDataBytes;
// Of --engine_stall_timeout, in --rank_timeout.
constexpr int64_t kLeastStalls = 2;
// Of --min_ping_interval, in what workers leave between two pings: one may come late, and the next one not.
constexpr double kLongestMinPingInterval = 0.5;
// For ranks whose leader waits as long as it takes.
constexpr absl::Duration kLongestStall = absl::Hours(1000);
// How long a worker waits until it tries to join again, and a leader whose group could not be formed until it begins anew.
constexpr absl::Duration kJoinInterval = absl::Milliseconds(300);
constexpr absl::Duration kFormingPause = absl::Milliseconds(300);
// How long ranks with GPUs may take to meet, and to make their engines: a first context on each of many GPUs takes its time.
constexpr absl::Duration kCudaSetupTimeout = absl::Minutes(2);
// How long a leader that has lost its group tells new calls so, before it begins anew: they would find nobody there otherwise.
constexpr absl::Duration kLastAnswers = absl::Milliseconds(500);

// An operator's signal was taken: the process ends, and does not begin anew, whatever becomes of its engine.
std::atomic<bool>& IsEnding() {
  static std::atomic<bool> is_ending{false};
  return is_ending;
}

group::Restarter& Restart() {
  static group::Restarter* const restarter = new group::Restarter();
  return *restarter;
}

int Fail(const std::string& message) {
  observability::LineWriter(STDERR_FILENO).Write(absl::StrCat("headwaterd: ", message, "\n"));
  return 1;
}

// --device, --gpus and --memory_budget_bytes, of a server and of a worker.
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

// --algorithm_cache, of a server and of a worker.
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
  options.algorithm_cache_path = service::AlgorithmCachePath(absl::GetFlag(FLAGS_algorithm_cache));
  options.deterministic = absl::GetFlag(FLAGS_deterministic);
  options.timed_search = absl::GetFlag(FLAGS_timed_search) && !options.deterministic;
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("threads", options.thread_count, 0));
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("workspace_bytes", options.workspace_bytes, 0));
  return options;
}

// How long it may take to end.
absl::Status CheckEnd() {
  HEADWATER_RETURN_IF_ERROR(CheckPositive("drain_timeout", absl::GetFlag(FLAGS_drain_timeout)));
  const absl::Duration grace = absl::GetFlag(FLAGS_device_lost_grace);
  if (grace >= absl::ZeroDuration() && grace <= absl::Hours(1)) return absl::OkStatus();
  return absl::InvalidArgumentError("--device_lost_grace: expected a duration from 0 to 1h, got " + absl::FormatDuration(grace));
}

absl::StatusOr<service::ServerOptions> ServerOptionsFromFlags() {
  service::ServerOptions options;
  options.listen_addresses = absl::GetFlag(FLAGS_listen_addresses);
  options.metrics_address = absl::GetFlag(FLAGS_metrics_address);
  options.reflection = absl::GetFlag(FLAGS_reflection);
  options.deterministic = absl::GetFlag(FLAGS_deterministic);
  options.descriptor_socket = absl::GetFlag(FLAGS_descriptor_socket);
  auto descriptor_mode = ParseMode("descriptor_socket_mode", absl::GetFlag(FLAGS_descriptor_socket_mode));
  if (!descriptor_mode.ok()) return descriptor_mode.status();
  options.descriptor_socket_mode = *descriptor_mode;
  auto unix_mode = ParseMode("unix_socket_mode", absl::GetFlag(FLAGS_unix_socket_mode));
  if (!unix_mode.ok()) return unix_mode.status();
  options.unix_socket_mode = *unix_mode;
  options.unix_socket_owner = absl::GetFlag(FLAGS_unix_socket_owner);
  options.admin_listen_addresses = absl::GetFlag(FLAGS_admin_listen_addresses);
  options.tls_certificate = absl::GetFlag(FLAGS_tls_certificate);
  options.tls_key = absl::GetFlag(FLAGS_tls_key);
  options.tls_client_ca = absl::GetFlag(FLAGS_tls_client_ca);
  options.token_file = absl::GetFlag(FLAGS_token_file);
  options.worker_token = absl::GetFlag(FLAGS_worker_token);
  if (!options.worker_token.empty() && (absl::GetFlag(FLAGS_workers) == 0 || options.token_file.empty())) {
    return absl::InvalidArgumentError("--worker_token: expected --workers and --token_file with it");
  }
  options.descriptor_socket_any_user = absl::GetFlag(FLAGS_descriptor_socket_any_user);
  options.named_regions = absl::GetFlag(FLAGS_named_regions);
  options.checkpoint_directory = absl::GetFlag(FLAGS_checkpoint_directory);
  options.restore_heads = absl::GetFlag(FLAGS_restore_heads);
  options.keep_checkpoints = absl::GetFlag(FLAGS_keep_checkpoints);
  options.drain_checkpoint = absl::GetFlag(FLAGS_drain_checkpoint);
  options.load_root = absl::GetFlag(FLAGS_load_root);
  options.idle_head_timeout = absl::GetFlag(FLAGS_idle_head_timeout);
  options.idle_head_checkpoint = absl::GetFlag(FLAGS_idle_head_checkpoint);
#define HEADWATER_TAKE_LIMIT(unit, name, ...) options.limits.name = absl::GetFlag(FLAGS_##name);
  HEADWATER_LIMITS(HEADWATER_TAKE_LIMIT)
#undef HEADWATER_TAKE_LIMIT
  options.max_threads = absl::GetFlag(FLAGS_max_threads);
  options.max_pollers = absl::GetFlag(FLAGS_max_pollers);
  options.stream_idle_timeout = absl::GetFlag(FLAGS_stream_idle_timeout);
  options.max_cancel_rate = absl::GetFlag(FLAGS_max_cancel_rate);
  options.trace_dir = absl::GetFlag(FLAGS_trace_dir);
  options.max_trace_files = absl::GetFlag(FLAGS_max_trace_files);
  options.product_tflops = absl::GetFlag(FLAGS_product_tflops);
  options.max_reset_backlog = absl::GetFlag(FLAGS_max_reset_backlog);
  options.engine_stall_timeout = absl::GetFlag(FLAGS_engine_stall_timeout);
  HEADWATER_RETURN_IF_ERROR(CheckReplaceable("port_file", absl::GetFlag(FLAGS_port_file)));
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("max_threads", options.max_threads, 8));
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("max_pollers", options.max_pollers, 1));
  HEADWATER_RETURN_IF_ERROR(CheckPositive("stream_idle_timeout", options.stream_idle_timeout));
  return options;
}

// Tells where the server is: on stdout, and in --port_file, which is renamed in so that a reader never sees half of it.
absl::Status Announce(const service::Server& server) {
  std::vector<std::string> all = server.addresses();
  std::string lines;
  for (const std::string& address : all) absl::StrAppend(&lines, "listening on ", address, "\n");
  for (const std::string& address : server.admin_addresses()) {
    absl::StrAppend(&lines, "admin on ", address, "\n");
    all.push_back(address);
  }
  const std::string addresses = absl::StrJoin(all, "\n");
  if (server.metrics_port() != 0) absl::StrAppend(&lines, "metrics on port ", server.metrics_port(), "\n");
  observability::LineWriter(STDOUT_FILENO).Write(lines);
  const std::string path = absl::GetFlag(FLAGS_port_file);
  if (path.empty()) return absl::OkStatus();
  const std::string temporary = path + ".tmp";
  std::ofstream file(temporary);
  file << addresses << "\n";
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError("--port_file: cannot write " + path + ": " + std::strerror(errno));
  }
  return absl::OkStatus();
}

// Ends the process as it is; or lets it begin anew, if it is a group's leader or worker, which comes back by itself. Nothing is
// destroyed: what holds a lost device may wait for it, or fail, in its destructor.
[[noreturn]] void EndLost() {
  static absl::Mutex* const first_comer = new absl::Mutex();
  first_comer->Lock();  // for good: whoever comes later waits until the process is gone
  const bool is_worker = !absl::GetFlag(FLAGS_join).empty();
  if (!IsEnding() && (is_worker || absl::GetFlag(FLAGS_workers) > 0)) Restart().BeginAnew();
  _exit(IsEnding() && is_worker ? 0 : kDeviceLostStatus);
}

// A worker is to end, and stays for a while.
std::atomic<bool>& WorkerIsLeaving() {
  static std::atomic<bool> is_leaving{false};
  return is_leaving;
}

// Wakes the main thread. Any thread, any number of times.
void OnWorkerLeaving() {
  if (!WorkerIsLeaving().exchange(true)) WakeMainThread();
}

// Wakes the main thread, and sees to it that the process ends in time even if a call, or the main thread, never comes back from the
// device. Any thread, any number of times.
void OnDeviceLost(const absl::Status&) {
  static std::once_flag once;
  std::call_once(once, [] {
    std::thread([grace = absl::GetFlag(FLAGS_device_lost_grace)] {
      absl::SleepFor(grace);
      observability::Log(observability::LogLevel::kError, "ended", {{"note", "the device is lost; not every call was answered"}});
      EndLost();
    }).detach();
    WakeMainThread();
  });
}

// The engine of a leader, whose workers the server waits for.
absl::StatusOr<service::ChosenEngine> MakeGroup(const EngineOptions& engine, service::ServerOptions* options) {
  HEADWATER_RETURN_IF_ERROR(service::CheckEngineChoice(absl::GetFlag(FLAGS_engine)));
  const bool is_cuda = absl::GetFlag(FLAGS_engine) == "cuda";
  group::AssemblyOptions assembly;
  assembly.workers = absl::GetFlag(FLAGS_workers);
  if (options->max_threads < assembly.workers + kThreadsBesideWorkers) {
    return absl::InvalidArgumentError(absl::StrCat("--max_threads: expected at least ", assembly.workers + kThreadsBesideWorkers,
                                                   ", one for each of --workers and ", kThreadsBesideWorkers, " more, got ",
                                                   options->max_threads));
  }
  if (options->limits.max_message_bytes < kLeastWorkerMessageBytes) {
    return absl::InvalidArgumentError(absl::StrCat("--max_message_bytes: expected at least ", kLeastWorkerMessageBytes,
                                                   " with --workers, got ", options->limits.max_message_bytes));
  }
  if (!options->token_file.empty() && options->worker_token.empty()) {
    return absl::InvalidArgumentError("--worker_token: expected the name of a token of --token_file: no worker may join without");
  }
  assembly.engine = engine;
  if (is_cuda) {
    const absl::StatusOr<std::string> id = MakeCudaGroupId();
    if (!id.ok()) return service::EngineChoiceError("cuda", id.status());
    assembly.engine_name = "cuda";
    assembly.make_engine = CreateCudaEngine;
    assembly.device_group_id = *id;
    assembly.own_ranks = absl::GetFlag(FLAGS_gpus);
    assembly.setup_timeout = kCudaSetupTimeout;
  } else if (assembly.engine.thread_count == 0) {
    assembly.engine.thread_count = ComputeThreads();
  }
  assembly.version = service::ServerVersion();
  assembly.listen_host = absl::GetFlag(FLAGS_group_listen_host);
  assembly.on_worker_leaving = OnWorkerLeaving;
  assembly.silence_timeout = absl::GetFlag(FLAGS_rank_timeout);
  if (assembly.silence_timeout < absl::Seconds(1)) {
    return absl::InvalidArgumentError("--rank_timeout: expected at least 1s, got " +
                                      absl::FormatDuration(assembly.silence_timeout));
  }
  // A rank that hangs is found out first, and the leader hears of a worker's progress only with its signs of life.
  const absl::Duration stall_timeout = options->engine_stall_timeout;
  if (const absl::Duration least = kLeastStalls * assembly.silence_timeout;
      stall_timeout != absl::ZeroDuration() && stall_timeout < least) {
    return absl::InvalidArgumentError(absl::StrCat("--engine_stall_timeout: expected 0, or with --workers at least ", kLeastStalls,
                                                   " times --rank_timeout, ", absl::FormatDuration(least), ", got ",
                                                   absl::FormatDuration(stall_timeout)));
  }
  const absl::Duration longest_interval = kLongestMinPingInterval * group::kWorkerPingInterval;
  if (const absl::Duration interval = options->limits.min_ping_interval; interval > longest_interval) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--min_ping_interval: expected at most ", absl::FormatDuration(longest_interval), " with --workers, which ping every ",
        absl::FormatDuration(group::kWorkerPingInterval), ", got ", absl::FormatDuration(interval)));
  }
  assembly.stall_timeout = stall_timeout == absl::ZeroDuration() ? kLongestStall : std::min(stall_timeout, kLongestStall);
  auto made = group::GroupAssembly::Create(std::move(assembly));
  if (!made.ok()) return made.status();
  options->group = *std::move(made);
  const int32_t workers = absl::GetFlag(FLAGS_workers);
  const std::string note = is_cuda
                               ? absl::StrCat("running on ", engine.shard_count, " GPUs, ", workers, " of them of other processes")
                               : absl::StrCat("running on the CPU, as a group of ", workers + 1, " processes");
  return service::ChosenEngine{options->group->TakeEngine(), note};
}

// The engine of several GPUs.
absl::StatusOr<service::ChosenEngine> MakeGpus(const EngineOptions& options) {
  auto engine = group::CreateLocalCudaGroup(options);
  if (!engine.ok()) return service::EngineChoiceError("cuda", engine.status());
  return service::ChosenEngine{*std::move(engine), ""};
}

// What a device has in this process may stay there when the group has ended, and an error of the device's does: the process begins
// anew, even if what still executes never comes back. Any thread, any number of times.
void LeaveDevices() {
  static std::once_flag once;
  std::call_once(once, [] {
    std::thread([grace = absl::GetFlag(FLAGS_device_lost_grace)] {
      absl::SleepFor(grace);
      EndLost();
    }).detach();
  });
}

// Of a worker's ranks, those that have, or make, an engine in a group.
std::atomic<int32_t>& Members() {
  static std::atomic<int32_t> members{0};
  return members;
}

// One rank of a worker: joins again and again, until the process is to end.
void StayJoined(const group::LeaderAddress& leader, group::WorkerOptions worker) {
  std::atomic<bool> has_device{false};
  bool is_member = false;
  const auto become_member = [&is_member] {
    is_member = true;
    ++Members();
  };
  worker.is_leaving = [] { return IsEnding().load(); };
  worker.on_device_lost = [](const absl::Status&) { LeaveDevices(); };
  worker.make_engine = [&](const EngineOptions& options) {
    become_member();
    return CreateCpuEngine(options);
  };
  worker.make_cuda_engine = [&](const EngineOptions& options) {
    become_member();
    has_device = true;
    return CreateCudaEngine(options);
  };
  worker.on_call_ended = [&has_device] {
    if (has_device) LeaveDevices();
  };
  std::string last;
  while (!IsEnding()) {
    const std::string ended(group::JoinLeader(leader, worker).message());
    if (std::exchange(is_member, false)) --Members();
    if (IsEnding()) return WakeMainThread();
    if (ended != last) {
      observability::Log(observability::LogLevel::kWarning, "left_group",
                         {{"rank_of_process", int64_t{worker.process_index}}, {"message", ended}});
    }
    last = ended;
    absl::SleepFor(kJoinInterval);
    if (has_device) EndLost();
  }
}

// Until no rank of the worker is in a group any more; no longer than --drain_timeout, nor beyond another signal of an operator's.
void AwaitLeave(const sigset_t& signals) {
  const absl::Time deadline = observability::MonotonicNow() + absl::GetFlag(FLAGS_drain_timeout);
  for (absl::Duration left; Members() > 0 && (left = deadline - observability::MonotonicNow()) > absl::ZeroDuration();) {
    const timespec wait = absl::ToTimespec(std::min(left, absl::Hours(1)));
    if (IsEndSignal(sigtimedwait(&signals, nullptr, &wait))) return;  // the last member's end wakes it, too
  }
}

// The process is a worker until it is asked to end.
int Join(const sigset_t& signals) {
  group::LeaderAddress leader;
  leader.address = absl::GetFlag(FLAGS_join);
  leader.ca = absl::GetFlag(FLAGS_join_ca);
  leader.certificate = absl::GetFlag(FLAGS_tls_certificate);
  leader.key = absl::GetFlag(FLAGS_tls_key);
  leader.token_file = absl::GetFlag(FLAGS_join_token_file);
  if (absl::GetFlag(FLAGS_workers) != 0) return Fail("--join: expected no --workers with it");
  if (absl::Status status = service::CheckListenAddress(leader.address); !status.ok()) {
    return Fail("--join: " + std::string(status.message()));
  }
  if (leader.certificate.empty() != leader.key.empty()) return Fail("--tls_certificate and --tls_key: expected both or neither");
  if (!leader.certificate.empty() && leader.ca.empty()) {
    return Fail("--tls_certificate: expected --join_ca with it: without TLS no certificate is shown");
  }
  if (!leader.token_file.empty() && leader.ca.empty() && !service::IsLocalAddress(leader.address)) {
    observability::Log(observability::LogLevel::kWarning, "unprotected",
                       {{"address", leader.address},
                        {"message", "the worker's token, and all rows, can be read on the way to this address: set join_ca"}});
  }
  const std::string engine = absl::GetFlag(FLAGS_engine);
  if (absl::Status status = service::CheckEngineChoice(engine); !status.ok()) return Fail(std::string(status.message()));
  for (absl::Status status : {CheckDevices(), CheckAlgorithmCache(), CheckReadable("join_ca", leader.ca),
                              CheckReadable("join_token_file", leader.token_file),
                              CheckReadable("tls_certificate", leader.certificate), CheckReadable("tls_key", leader.key)}) {
    if (!status.ok()) return Fail(std::string(status.message()));
  }
  if (absl::Status status = CheckEnd(); !status.ok()) return Fail(std::string(status.message()));
  group::WorkerOptions worker;
  worker.version = service::ServerVersion();
  worker.engine = engine;
  worker.process = heads::EpochToHex(heads::NewEpoch());
  worker.process_ranks = absl::GetFlag(FLAGS_gpus);
  if (worker.process_ranks > 1) worker.rows = std::make_shared<group::ProcessRows>();
  worker.algorithm_cache_path = service::AlgorithmCachePath(absl::GetFlag(FLAGS_algorithm_cache));
  worker.leader_host = group::LeaderHost(leader.address);
  worker.listen_host = absl::GetFlag(FLAGS_group_listen_host);
  worker.memory_budget_bytes = absl::GetFlag(FLAGS_memory_budget_bytes);
  for (int32_t index = 0; index < worker.process_ranks; ++index) {
    worker.process_index = index;
    worker.device_index = absl::GetFlag(FLAGS_device) + index;
    std::thread([leader, worker] { StayJoined(leader, worker); }).detach();
  }
  observability::Log(observability::LogLevel::kInfo, "joining", {{"leader", leader.address}});
  const int signal_number = AwaitSignal(signals, [] { return false; });
  IsEnding() = true;
  observability::Log(
      observability::LogLevel::kInfo, "leaving",
      {{"signal", int64_t{signal_number}}, {"timeout_s", absl::ToDoubleSeconds(absl::GetFlag(FLAGS_drain_timeout))}});
  AwaitLeave(signals);
  // It has nothing that it could save, and its leader notices its end at once: the threads are left to themselves.
  _exit(0);
}

int Serve() {
  const sigset_t signals = MainSignals();
  absl::Status logging = observability::ConfigureLogging(absl::GetFlag(FLAGS_log_level), absl::GetFlag(FLAGS_log_format));
  if (!logging.ok()) return Fail(std::string(logging.message()));
  const bool json = absl::GetFlag(FLAGS_log_format) == "json";
  observability::EndWithoutMemory(json ? observability::LogFormat::kJson : observability::LogFormat::kText);
  service::TakeGrpcLog();
  std::optional<observability::LogLevelFile> level_file;
  if (const std::string path = absl::GetFlag(FLAGS_log_level_file); !path.empty()) {
    level_file.emplace(path, absl::GetFlag(FLAGS_log_level));
  }
  if (const int32_t parent = absl::GetFlag(FLAGS_parent_pid); parent != 0) {
    if (absl::Status status = EndWithParent(parent); !status.ok()) return Fail(std::string(status.message()));
  }
  if (!absl::GetFlag(FLAGS_join).empty()) return Join(signals);
  auto engine_options = EngineOptionsFromFlags();
  if (!engine_options.ok()) return Fail(std::string(engine_options.status().message()));
  auto options = ServerOptionsFromFlags();
  if (!options.ok()) return Fail(std::string(options.status().message()));
  const bool is_group = absl::GetFlag(FLAGS_workers) > 0;
  if (absl::Status status = CheckEnd(); !status.ok()) return Fail(std::string(status.message()));
  const absl::Duration grace = absl::GetFlag(FLAGS_device_lost_grace);
  // Whichever comes first: the engine tells it, or the server notices.
  engine_options->on_device_lost = OnDeviceLost;
  options->on_engine_lost = OnDeviceLost;
  auto chosen = is_group                        ? MakeGroup(*engine_options, &*options)
                : absl::GetFlag(FLAGS_gpus) > 1 ? MakeGpus(*engine_options)
                                                : service::ChooseEngine(absl::GetFlag(FLAGS_engine), *engine_options);
  if (!chosen.ok()) return Fail(std::string(chosen.status().message()));
  options->engine_note = chosen->note;
  const int64_t connections = options->limits.max_connections * (options->admin_listen_addresses.empty() ? 1 : 2);
  if (const int64_t room = transport::MakeRoomForConnections(connections); room < transport::DescriptorsFor(connections)) {
    observability::Log(observability::LogLevel::kWarning, "few_descriptors",
                       {{"limit", room},
                        {"needed", transport::DescriptorsFor(connections)},
                        {"message",
                         "max_connections cannot all be open at once: raise the limit of open files (ulimit -n, "
                         "LimitNOFILE), or lower it"}});
  }
  observability::Log(observability::LogLevel::kInfo, "starting",
                     {{"engine", chosen->engine->name()},
                      {"shards", int64_t{engine_options->shard_count}},
                      {"threads", int64_t{chosen->engine->options().thread_count}},
                      {"memory_budget_bytes", chosen->engine->options().memory_budget_bytes},
                      {"note", chosen->note}});
  auto server = service::Server::Start(*options, std::move(chosen->engine));
  if (!server.ok()) return Fail(std::string(server.status().message()));
  if (is_group) {  // whose workers must be able to find it
    if (absl::Status announced = Announce(**server); !announced.ok()) return Fail(std::string(announced.message()));
    Restart().KeepAddresses((*server)->addresses(), (*server)->admin_addresses(), options->metrics_address,
                            (*server)->metrics_port());
  }
  if (absl::Status ready = (*server)->BecomeReady(IsAskedToEnd); !ready.ok()) {
    if (!(*server)->engine().health().ok()) EndLost();
    if (IsAskedToEnd()) return 0;
    if (is_group && !HasReason(ready, ErrorReason::kInvalidCombination)) {
      observability::Log(observability::LogLevel::kError, "not_formed", {{"message", std::string(ready.message())}});
      absl::SleepFor(kFormingPause);
      EndLost();
    }
    return Fail("self-test: " + std::string(ready.message()));
  }
  if (!is_group) {
    if (absl::Status announced = Announce(**server); !announced.ok()) return Fail(std::string(announced.message()));
  }

  const auto is_lost = [&] { return !(*server)->engine().health().ok(); };
  const int signal_number = AwaitSignal(signals, [&] { return is_lost() || WorkerIsLeaving(); });
  if (signal_number == kWakeSignal && !is_lost()) {
    // The others, and who comes in its place, join what begins anew. An operator's signal that comes meanwhile waits for that.
    const absl::Duration timeout = absl::GetFlag(FLAGS_drain_timeout);
    observability::Log(observability::LogLevel::kWarning, "worker_leaving", {{"timeout_s", absl::ToDoubleSeconds(timeout)}});
    (*server)->Drain(timeout);
    EndLost();
  }
  if (signal_number == kWakeSignal) {
    if (is_group) absl::SleepFor(kLastAnswers);
    (*server)->CheckEngine();  // health is NOT_SERVING now, and calls are being answered
    if ((*server)->Drain(grace)) {
      observability::Log(observability::LogLevel::kError, "ended", {{"note", "the device is lost; every call was answered"}});
    }
    EndLost();
  }
  IsEnding() = true;
  observability::Log(
      observability::LogLevel::kInfo, "draining",
      {{"signal", int64_t{signal_number}}, {"timeout_s", absl::ToDoubleSeconds(absl::GetFlag(FLAGS_drain_timeout))}});
  const bool clean = (*server)->Drain(absl::GetFlag(FLAGS_drain_timeout));
  if (!(*server)->engine().health().ok()) EndLost();
  const bool saved = (*server)->heads_saved();
  server->reset();
  if (clean && !saved) return Fail("not every head could be saved; the log says which");
  return clean ? 0 : Fail("the drain timeout passed; calls were cancelled");
}

}  // namespace
}  // namespace headwater

int main(int argc, char** argv) {
  // Large buffers stay in the heap instead of going back to the kernel and being faulted in again at every message: that halves the
  // CPU time of a byte. Few heaps, because messages are freed by other threads than those that receive them, and because each one
  // ends up as large as the largest that any call takes. Large requests are too rare for two locks, and small ones have caches of
  // the threads.
  mallopt(M_MMAP_THRESHOLD, 512 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 64 << 20);
  mallopt(M_ARENA_MAX, 2);
  headwater::OutliveReaders();
  headwater::Restart().KeepArguments(argc, argv);
  // Distributions build Abseil with its search for deadlocks, which costs every lock of gRPC's and of ours a good deal, and is for
  // tests to do.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  const std::vector<char*> rest = headwater::ParseFlags(argc, argv, __FILE__);
  if (rest.size() > 1) return headwater::Fail(std::string("unexpected argument \"") + rest[1] + "\"; see --help");
  if (absl::GetFlag(FLAGS_print_metrics_doc)) {
    std::cout << headwater::observability::MetricsDocument();
    return 0;
  }
  if (absl::GetFlag(FLAGS_print_flags_doc)) {
    std::cout << headwater::service::FlagsDocument(__FILE__);
    return 0;
  }
  return headwater::Serve();
}
