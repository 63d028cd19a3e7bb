#include <cstdlib>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "headwater/kernels/device_group_id.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/machine_limits.h"
#include "headwater/kernels/product_rate.h"
#include "headwater/kernels/return_if_error.h"
#include "server/group/group_assembly.h"
#include "server/group/ranks/rank_codec.h"
#include "server/group/ranks/rank_worker.h"
#include "server/main.h"
#include "server/service/limits.h"
#include "server/service/server_core.h"

namespace headwater {
namespace {

// The part of --max_threads that the workers' calls must leave free.
constexpr int32_t kThreadsBesideWorkers = 8;
// The least --max_message_bytes: a worker sends a piece of a tensor in one message, with other fields.
constexpr int64_t kLeastWorkerMessageBytes = 2 * group::kDataBytes;
// The least --engine_stall_timeout, as a multiple of --rank_timeout.
constexpr int64_t kLeastStalls = 2;
// The largest --min_ping_interval, as a part of the workers' ping interval: a late ping may be followed by one in time.
constexpr double kLongestMinPingInterval = 0.5;
// The time for ranks with GPUs to connect and make their engines: first contexts on many GPUs are slow.
constexpr absl::Duration kCudaSetupTimeout = absl::Minutes(2);

// Wakes the main thread. Any thread, any number of times.
void OnWorkerLeaving() {
  if (!g_worker_is_leaving.exchange(true)) WakeMainThread();
}

// `error`, the reason why an engine is not available, with the flag --engine before its sentence.
absl::Status EngineError(const absl::Status& error) {
  return MakeError(GetErrorReason(error), absl::StrCat("--engine=", absl::GetFlag(FLAGS_engine), ": ", error.message()),
                   GetErrorMetadata(error));
}

// The engine of one device, by --engine. With "auto" it is CUDA if its module is there and finds a usable GPU, else the CPU. Wrong
// options (kMemoryBudgetExceeded, kInvalidField) are no reason to fall back.
absl::StatusOr<ChosenEngine> ChooseEngine(const EngineOptions& options) {
  const std::string choice = absl::GetFlag(FLAGS_engine);
  HEADWATER_RETURN_IF_ERROR(CheckEngineChoice(choice));
  std::string note = "running on the CPU, as --engine=cpu says";
  if (choice != "cpu") {
    auto engine = CreateCudaEngine(options);
    if (engine.ok()) return ChosenEngine{*std::move(engine), ""};
    if (choice == "cuda" || !HasReason(engine.status(), ErrorReason::kFeatureNotBuilt)) return EngineError(engine.status());
    note = absl::StrCat("running on the CPU: ", engine.status().message());
  }
  HEADWATER_ASSIGN_OR_RETURN(auto engine, CreateCpuEngine(options));
  note += "; " + DescribeCpuProducts(engine->options().bfloat16_products, options.bfloat16_products);
  return ChosenEngine{std::move(engine), note};
}

// The value of an environment variable that must be an absolute path to count; empty without one.
std::string AbsolutePath(const char* variable) {
  const char* const value = std::getenv(variable);
  return value != nullptr && value[0] == '/' ? value : "";
}

// The engine of a leader, whose workers the server waits for.
absl::StatusOr<ChosenEngine> MakeGroup(const EngineOptions& engine, service::ServerOptions* options) {
  HEADWATER_RETURN_IF_ERROR(CheckEngineChoice(absl::GetFlag(FLAGS_engine)));
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
    if (!id.ok()) return EngineError(id.status());
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
  // A hanging rank is detected first, and the leader learns a worker's progress only from its heartbeats.
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
  HEADWATER_ASSIGN_OR_RETURN(auto made, group::GroupAssembly::Create(std::move(assembly)));
  options->group = std::move(made);
  const int32_t workers = absl::GetFlag(FLAGS_workers);
  const std::string note = is_cuda
                               ? absl::StrCat("running on ", engine.shard_count, " GPUs, ", workers, " of them of other processes")
                               : absl::StrCat("running on the CPU, as a group of ", workers + 1, " processes");
  return ChosenEngine{options->group->TakeEngine(), note};
}

}  // namespace

absl::Status CheckEngineChoice(const std::string& choice) {
  if (choice == "auto" || choice == "cpu" || choice == "cuda") return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--engine: expected auto, cpu or cuda, got \"", choice, "\""));
}

std::string AlgorithmCachePath(const std::string& choice) {
  if (choice != "auto") return choice;
  constexpr char kFile[] = "/headwater/cublaslt.json";
  if (const std::string cache = AbsolutePath("XDG_CACHE_HOME"); !cache.empty()) return cache + kFile;
  if (const std::string home = AbsolutePath("HOME"); !home.empty()) return home + "/.cache" + kFile;
  return "";
}

absl::StatusOr<ChosenEngine> MakeEngine(const EngineOptions& engine, service::ServerOptions* options) {
  if (absl::GetFlag(FLAGS_workers) > 0) return MakeGroup(engine, options);
  if (absl::GetFlag(FLAGS_gpus) <= 1) return ChooseEngine(engine);
  auto gpus = group::CreateLocalCudaGroup(engine);
  if (!gpus.ok()) return EngineError(gpus.status());
  return ChosenEngine{*std::move(gpus), ""};
}

}  // namespace headwater
