// headwaterd: wiring.
#include "server/main.h"

#include <malloc.h>
#include <signal.h>

#include <cstdint>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "headwater/kernels/engine.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/group/group_assembly.h"
#include "server/guard/connection_gate.h"
#include "server/observability/logging.h"
#include "server/observability/metrics.h"
#include "server/service/server.h"

namespace headwater {
namespace {

// The pause before a leader restarts whose group could not be formed.
constexpr absl::Duration kFormingPause = absl::Milliseconds(300);
// How long a leader that has lost its group answers new calls with that error before it restarts and is unreachable.
constexpr absl::Duration kLastAnswers = absl::Milliseconds(500);

// Wakes the main thread. Any thread, any number of times.
void OnDeviceLost(const absl::Status&) {
  if (EndLostInTime("the device is lost; not every call was answered")) WakeMainThread();
}

// Runs the process until its end, and returns its status; or why it cannot begin.
absl::StatusOr<int> Serve() {
  const sigset_t signals = MainSignals();
  HEADWATER_RETURN_IF_ERROR(observability::ConfigureLogging(absl::GetFlag(FLAGS_log_level), absl::GetFlag(FLAGS_log_format)));
  const bool json = absl::GetFlag(FLAGS_log_format) == "json";
  observability::EndWithoutMemory(json ? observability::LogFormat::kJson : observability::LogFormat::kText);
  service::TakeGrpcLog();
  std::optional<observability::LogLevelFile> level_file;
  if (const std::string path = absl::GetFlag(FLAGS_log_level_file); !path.empty()) {
    level_file.emplace(path, absl::GetFlag(FLAGS_log_level));
  }
  if (const int32_t parent = absl::GetFlag(FLAGS_parent_pid); parent != 0) HEADWATER_RETURN_IF_ERROR(EndWithParent(parent));
  if (!absl::GetFlag(FLAGS_join).empty()) return Join(signals);
  HEADWATER_ASSIGN_OR_RETURN(auto engine_options, EngineOptionsFromFlags());
  HEADWATER_ASSIGN_OR_RETURN(auto options, ServerOptionsFromFlags());
  const bool is_group = absl::GetFlag(FLAGS_workers) > 0;
  HEADWATER_RETURN_IF_ERROR(CheckEnd());
  const absl::Duration grace = absl::GetFlag(FLAGS_device_lost_grace);
  // The engine reports the loss, or the server notices it, whichever comes first.
  engine_options.on_device_lost = OnDeviceLost;
  options.on_engine_lost = OnDeviceLost;
  HEADWATER_ASSIGN_OR_RETURN(auto chosen, MakeEngine(engine_options, &options));
  options.engine_note = chosen.note;
  const int64_t connections = options.limits.max_connections * (options.admin_listen_addresses.empty() ? 1 : 2);
  if (const int64_t room = guard::MakeRoomForConnections(connections); room < guard::DescriptorsFor(connections)) {
    observability::Log(observability::LogLevel::kWarning, "few_descriptors",
                       {{"limit", room},
                        {"needed", guard::DescriptorsFor(connections)},
                        {"message",
                         "max_connections cannot all be open at once: raise the limit of open files (ulimit -n, "
                         "LimitNOFILE), or lower it"}});
  }
  observability::Log(observability::LogLevel::kInfo, "starting",
                     {{"engine", chosen.engine->name()},
                      {"shards", int64_t{engine_options.shard_count}},
                      {"threads", int64_t{chosen.engine->options().thread_count}},
                      {"memory_budget_bytes", chosen.engine->options().memory_budget_bytes},
                      {"note", chosen.note}});
  HEADWATER_ASSIGN_OR_RETURN(auto server, service::Server::Start(options, std::move(chosen.engine)));
  if (is_group) {  // its workers must be able to find the leader
    HEADWATER_RETURN_IF_ERROR(Announce(*server));
    Restart().KeepAddresses(server->addresses(), server->admin_addresses(), options.metrics_address, server->metrics_port());
    HEADWATER_RETURN_IF_ERROR(WhenAskedToEnd([group = options.group] { group->GiveUp(); }));
  }
  if (absl::Status ready = server->BecomeReady(IsAskedToEnd); !ready.ok()) {
    if (!server->engine().health().ok()) EndLost();
    if (IsAskedToEnd()) return 0;
    if (is_group && !HasReason(ready, ErrorReason::kInvalidCombination)) {
      observability::Log(observability::LogLevel::kError, "not_formed", {{"message", std::string(ready.message())}});
      absl::SleepFor(kFormingPause);
      EndLost();
    }
    return absl::Status(ready.code(), absl::StrCat("self-test: ", ready.message()));
  }
  if (!is_group) HEADWATER_RETURN_IF_ERROR(Announce(*server));

  const auto is_lost = [&] { return !server->engine().health().ok(); };
  const int signal_number = AwaitSignal(signals, [&] { return is_lost() || g_worker_is_leaving; });
  if (signal_number == kWakeSignal && !is_lost()) {
    // The other workers, and a replacement, join the restarted leader. An operator's signal is taken after the restart.
    const absl::Duration timeout = absl::GetFlag(FLAGS_drain_timeout);
    observability::Log(observability::LogLevel::kWarning, "worker_leaving", {{"timeout_s", absl::ToDoubleSeconds(timeout)}});
    server->Drain(timeout);
    EndLost();
  }
  if (signal_number == kWakeSignal) {
    if (is_group) absl::SleepFor(kLastAnswers);
    server->CheckEngine();  // health is NOT_SERVING now, and calls are being answered
    if (server->Drain(grace)) {
      observability::Log(observability::LogLevel::kError, "ended", {{"note", "the device is lost; every call was answered"}});
    }
    EndLost();
  }
  g_is_ending = true;
  observability::Log(
      observability::LogLevel::kInfo, "draining",
      {{"signal", int64_t{signal_number}}, {"timeout_s", absl::ToDoubleSeconds(absl::GetFlag(FLAGS_drain_timeout))}});
  const bool clean = server->Drain(absl::GetFlag(FLAGS_drain_timeout));
  if (!server->engine().health().ok()) EndLost();
  const bool saved = server->heads_saved();
  server.reset();
  if (clean && !saved) return Fail("not every head could be saved; the log says which");
  return clean ? 0 : Fail("the drain timeout passed; calls were cancelled");
}

}  // namespace
}  // namespace headwater

int main(int argc, char** argv) {
  // Large buffers stay in the heap: returning them to the kernel would fault them in again at every message. That halves the CPU
  // time of a byte. Few heaps, because messages are freed on other threads than they are received on, and because each heap grows
  // to the largest call. Large requests are too rare to contend for two locks, and threads cache small ones.
  mallopt(M_MMAP_THRESHOLD, 512 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 64 << 20);
  mallopt(M_ARENA_MAX, 2);
  headwater::OutliveReaders();
  headwater::Restart().KeepArguments(argc, argv);
  // Distributions build Abseil with deadlock detection, which slows every lock of gRPC's and of ours, and is for tests.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  const std::vector<char*> rest = headwater::ParseFlags(argc, argv);
  if (rest.size() > 1) return headwater::Fail(absl::StrCat("unexpected argument \"", rest[1], "\"; see --help"));
  if (absl::GetFlag(FLAGS_print_metrics_doc)) {
    std::cout << headwater::observability::MetricsDocument();
    return 0;
  }
  if (absl::GetFlag(FLAGS_print_flags_doc)) {
    std::cout << headwater::FlagsDocument();
    return 0;
  }
  const absl::StatusOr<int> status = headwater::Serve();
  return status.ok() ? *status : headwater::Fail(status.status().message());
}
