#include "server/service/server_core.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "headwater/kernels/error.h"
#include "server/service/retry_after.h"

namespace headwater::service {

const char* ServerVersion() { return HEADWATER_VERSION; }

absl::StatusOr<std::unique_ptr<ServerCore>> ServerCore::Create(const ServerOptions& options, std::unique_ptr<LossEngine> engine) {
  if (absl::Status status = ValidateLimits(options.limits); !status.ok()) return status;
  std::unique_ptr<checkpoint::CheckpointStore> checkpoints;
  if (!options.checkpoint_directory.empty()) {
    auto opened = checkpoint::CheckpointStore::Open(options.checkpoint_directory);
    if (!opened.ok()) return opened.status();
    checkpoints = *std::move(opened);
  }
  std::unique_ptr<ServerCore> core(new ServerCore(options, std::move(engine)));
  core->checkpoints = std::move(checkpoints);
  return core;
}

ServerCore::ServerCore(const ServerOptions& server_options, std::unique_ptr<LossEngine> loss_engine)
    : options(server_options),
      engine(std::move(loss_engine)),
      metrics(ServerVersion(), engine->name()),
      registry(*engine, options.limits.max_heads, heads::HeadLimits{options.limits.max_step_micro_batches}),
      queue(options.limits.max_queue_depth),
      in_flight(options.limits.max_in_flight_bytes),
      uploads(options.limits.max_upload_bytes),
      watchdog(options.stream_idle_timeout),
      incarnation(heads::NewEpoch()),
      start_time(absl::Now()) {
  metrics.SetGaugeSource([this] { return ReadGauges(); });
}

ServerCore::~ServerCore() { metrics.SetGaugeSource(nullptr); }

ServerCore::Admission::~Admission() {
  if (core_ == nullptr) return;
  absl::MutexLock lock(&core_->phase_mutex_);
  --core_->calls_in_progress_;
}

absl::StatusOr<ServerCore::Admission> ServerCore::Admit() {
  absl::MutexLock lock(&phase_mutex_);
  if (phase_ == Phase::kStarting) {
    return MakeError(ErrorReason::kStarting, "the server is starting: expected a server whose health is SERVING; try again",
                     {{kRetryAfterMsKey, "500"}});
  }
  if (phase_ == Phase::kDraining) {
    return MakeError(ErrorReason::kDraining, "the server is shutting down and takes no new calls; try another, or later",
                     {{kRetryAfterMsKey, "1000"}});
  }
  ++calls_in_progress_;
  return Admission(this);
}

void ServerCore::SetPhase(Phase phase) {
  absl::MutexLock lock(&phase_mutex_);
  phase_ = phase;
}

bool ServerCore::AwaitIdle(absl::Time deadline) {
  absl::MutexLock lock(&phase_mutex_);
  return phase_mutex_.AwaitWithDeadline(absl::Condition(
                                            +[](int64_t* calls) { return *calls == 0; }, &calls_in_progress_),
                                        deadline);
}

int64_t ServerCore::AvailableBytes() const {
  int64_t budget = 0;
  for (const EngineDevice& device : engine->devices()) budget += device.memory_budget_bytes;
  return std::max<int64_t>(0, budget - engine->planned_bytes());
}

observability::GaugeReadings ServerCore::ReadGauges() const {
  observability::GaugeReadings readings;
  readings.queue_depth = queue.depth();
  readings.in_flight_bytes = in_flight.reserved_bytes();
  readings.upload_bytes = uploads.reserved_bytes();
  for (const EngineDevice& device : engine->devices()) readings.memory_budget_bytes += device.memory_budget_bytes;
  for (const auto& head : registry.List(heads::kDefaultTenant, "", options.limits.max_heads)) {
    ++readings.head_count;
    for (const MemoryPlan::Item& item : head->Describe().plan.items) readings.planned_bytes[item.purpose] += item.bytes;
  }
  absl::MutexLock lock(&phase_mutex_);
  readings.serving = phase_ == Phase::kServing;
  return readings;
}

}  // namespace headwater::service
