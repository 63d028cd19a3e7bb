#include <time.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "headwater/kernels/engine.h"
#include "headwater/kernels/return_if_error.h"
#include "server/group/ranks/rank_worker.h"
#include "server/heads/head_name.h"
#include "server/main.h"
#include "server/observability/logging.h"
#include "server/observability/monotonic_clock.h"
#include "server/service/access/ports.h"
#include "server/service/server_core.h"

namespace headwater {
namespace {

// The pause between a worker's attempts to join.
constexpr absl::Duration kJoinInterval = absl::Milliseconds(300);

// The worker's ranks that have, or make, an engine in a group.
std::atomic<int32_t> g_members{0};

// One rank of a worker: joins again and again, until the process is to end.
void StayJoined(const group::LeaderAddress& leader, group::WorkerOptions worker) {
  std::atomic<bool> has_device{false};
  bool is_member = false;
  const auto become_member = [&is_member] {
    is_member = true;
    ++g_members;
  };
  worker.is_leaving = [] { return g_is_ending.load(); };
  worker.engine_options.on_device_lost = [](const absl::Status&) { EndLostInTime(""); };
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
    if (has_device) EndLostInTime("");
  };
  std::string last;
  while (!g_is_ending) {
    const std::string ended(group::JoinLeader(leader, worker).message());
    if (std::exchange(is_member, false)) --g_members;
    if (g_is_ending) return WakeMainThread();
    if (ended != last) {
      observability::Log(observability::LogLevel::kWarning, "left_group",
                         {{"rank_of_process", int64_t{worker.process_index}}, {"message", ended}});
    }
    last = ended;
    absl::SleepFor(kJoinInterval);
    if (has_device) EndLost();
  }
}

// Waits until no rank of the worker is in a group, for at most --drain_timeout, or until an operator's next signal.
void AwaitLeave(const sigset_t& signals) {
  const absl::Time deadline = observability::MonotonicNow() + absl::GetFlag(FLAGS_drain_timeout);
  for (absl::Duration left; g_members > 0 && (left = deadline - observability::MonotonicNow()) > absl::ZeroDuration();) {
    const timespec wait = absl::ToTimespec(std::min(left, absl::Hours(1)));
    if (IsEndSignal(sigtimedwait(&signals, nullptr, &wait))) return;  // the last member's end wakes it, too
  }
}

}  // namespace

absl::Status Join(const sigset_t& signals) {
  group::LeaderAddress leader;
  leader.address = absl::GetFlag(FLAGS_join);
  leader.ca = absl::GetFlag(FLAGS_join_ca);
  leader.certificate = absl::GetFlag(FLAGS_tls_certificate);
  leader.key = absl::GetFlag(FLAGS_tls_key);
  leader.token_file = absl::GetFlag(FLAGS_join_token_file);
  if (absl::GetFlag(FLAGS_workers) != 0) return absl::InvalidArgumentError("--join: expected no --workers with it");
  const auto address = service::ParseListenAddress(leader.address);
  if (!address.ok()) return absl::InvalidArgumentError(absl::StrCat("--join: ", address.status().message()));
  if (leader.certificate.empty() != leader.key.empty()) {
    return absl::InvalidArgumentError("--tls_certificate and --tls_key: expected both or neither");
  }
  if (!leader.certificate.empty() && leader.ca.empty()) {
    return absl::InvalidArgumentError("--tls_certificate: expected --join_ca with it: without TLS no certificate is shown");
  }
  if (!leader.token_file.empty() && leader.ca.empty() && !address->is_local()) {
    observability::Log(observability::LogLevel::kWarning, "unprotected",
                       {{"address", leader.address},
                        {"message", "the worker's token, and all rows, can be read on the way to this address: set join_ca"}});
  }
  const std::string engine = absl::GetFlag(FLAGS_engine);
  HEADWATER_RETURN_IF_ERROR(CheckEngineChoice(engine));
  HEADWATER_RETURN_IF_ERROR(CheckDevices());
  HEADWATER_RETURN_IF_ERROR(CheckAlgorithmCache());
  HEADWATER_RETURN_IF_ERROR(CheckReadable("join_ca", leader.ca));
  HEADWATER_RETURN_IF_ERROR(CheckReadable("join_token_file", leader.token_file));
  HEADWATER_RETURN_IF_ERROR(CheckReadable("tls_certificate", leader.certificate));
  HEADWATER_RETURN_IF_ERROR(CheckReadable("tls_key", leader.key));
  HEADWATER_RETURN_IF_ERROR(CheckEnd());
  group::WorkerOptions worker;
  worker.version = service::ServerVersion();
  worker.engine = engine;
  worker.process = heads::EpochToHex(heads::NewEpoch());
  worker.process_ranks = absl::GetFlag(FLAGS_gpus);
  if (worker.process_ranks > 1) worker.rows = std::make_shared<group::ProcessRows>();
  worker.engine_options.algorithm_cache_path = AlgorithmCachePath(absl::GetFlag(FLAGS_algorithm_cache));
  worker.leader_host = group::LeaderHost(leader.address);
  worker.listen_host = absl::GetFlag(FLAGS_group_listen_host);
  worker.engine_options.memory_budget_bytes = absl::GetFlag(FLAGS_memory_budget_bytes);
  for (int32_t index = 0; index < worker.process_ranks; ++index) {
    worker.process_index = index;
    worker.engine_options.device_index = absl::GetFlag(FLAGS_device) + index;
    std::thread([leader, worker] { StayJoined(leader, worker); }).detach();
  }
  observability::Log(observability::LogLevel::kInfo, "joining", {{"leader", leader.address}});
  const int signal_number = AwaitSignal(signals, [] { return false; });
  g_is_ending = true;
  observability::Log(
      observability::LogLevel::kInfo, "leaving",
      {{"signal", int64_t{signal_number}}, {"timeout_s", absl::ToDoubleSeconds(absl::GetFlag(FLAGS_drain_timeout))}});
  AwaitLeave(signals);
  // A worker has nothing to save, and its leader notices its end at once: no thread is joined.
  _exit(0);
}

}  // namespace headwater
