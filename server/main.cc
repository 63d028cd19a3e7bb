// headwaterd: wiring.
#include <malloc.h>
#include <signal.h>

#include <cstdint>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "headwater/kernels/engine.h"
#include "headwater/kernels/error.h"
#include "server/group/group_assembly.h"
#include "server/guard/connection_gate.h"
#include "server/main_flags.h"
#include "server/main_leader.h"
#include "server/main_lifecycle.h"
#include "server/main_worker.h"
#include "server/observability/log_level_file.h"
#include "server/observability/logging.h"
#include "server/observability/memory_end.h"
#include "server/observability/metrics.h"
#include "server/service/grpc_log.h"
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
  // The engine reports the loss, or the server notices it, whichever comes first.
  engine_options->on_device_lost = OnDeviceLost;
  options->on_engine_lost = OnDeviceLost;
  auto chosen = MakeEngine(*engine_options, &*options);
  if (!chosen.ok()) return Fail(std::string(chosen.status().message()));
  options->engine_note = chosen->note;
  const int64_t connections = options->limits.max_connections * (options->admin_listen_addresses.empty() ? 1 : 2);
  if (const int64_t room = guard::MakeRoomForConnections(connections); room < guard::DescriptorsFor(connections)) {
    observability::Log(observability::LogLevel::kWarning, "few_descriptors",
                       {{"limit", room},
                        {"needed", guard::DescriptorsFor(connections)},
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
  if (is_group) {  // its workers must be able to find the leader
    if (absl::Status announced = Announce(**server); !announced.ok()) return Fail(std::string(announced.message()));
    Restart().KeepAddresses((*server)->addresses(), (*server)->admin_addresses(), options->metrics_address,
                            (*server)->metrics_port());
  }
  if (is_group) {
    const absl::Status watched = WhenAskedToEnd([group = options->group] { group->GiveUp(); });
    if (!watched.ok()) return Fail(std::string(watched.message()));
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
    // The other workers, and a replacement, join the restarted leader. An operator's signal is taken after the restart.
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
  if (rest.size() > 1) return headwater::Fail(std::string("unexpected argument \"") + rest[1] + "\"; see --help");
  if (absl::GetFlag(FLAGS_print_metrics_doc)) {
    std::cout << headwater::observability::MetricsDocument();
    return 0;
  }
  if (absl::GetFlag(FLAGS_print_flags_doc)) {
    std::cout << headwater::FlagsDocument();
    return 0;
  }
  return headwater::Serve();
}
