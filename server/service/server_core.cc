#include "server/service/server_core.h"

#include <malloc.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/product_rate.h"
#include "headwater/kernels/return_if_error.h"
#include "server/group/group_assembly.h"
#include "server/observability/logging.h"
#include "server/observability/monotonic_clock.h"
#include "server/service/request/field_check.h"
#include "server/service/stall_clock.h"

namespace headwater::service {

using observability::Log;
using observability::LogLevel;
using observability::Metric;
using observability::MonotonicNow;
using observability::SessionEnd;

namespace {

// How long row memory is kept that no micro-batch has needed.
constexpr absl::Duration kIdleRows = absl::Seconds(30);
// How long the server must be idle until the allocator's free memory goes back to the system.
constexpr absl::Duration kIdleHeap = absl::Seconds(10);
// How late a lease may end.
constexpr absl::Duration kReapInterval = absl::Milliseconds(50);
// Each sends to one stream at a time until the socket is full; gRPC's threads continue from there.
constexpr int64_t kSenderThreads = 8;
// Threads for calls with files beside those that may wait for their heads, which are a quarter of max_threads.
constexpr int64_t kFileThreads = 2;

// Each rank of a group may compute a large micro-batch of its own, and one more stands at the door.
scheduler::QueueWidths WidthsFor(scheduler::QueueWidths widths, const LossEngine& engine) {
  widths.large = std::max<int64_t>(widths.large, engine.options().shard_count + 1);
  return widths;
}

// A mount that is not there should end the start, not each LoadWeights.
absl::Status CheckLoadRoot(const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  struct stat info = {};
  int error = stat(path.c_str(), &info) != 0 ? errno : 0;
  if (error == 0 && !S_ISDIR(info.st_mode)) error = ENOTDIR;
  if (error == 0 && access(path.c_str(), R_OK | X_OK) != 0) error = errno;
  if (error == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("load_root: expected a folder that can be read, got ", path, ": ", std::strerror(error)));
}

}  // namespace

const char* ServerVersion() { return HEADWATER_VERSION; }

absl::StatusOr<std::unique_ptr<ServerCore>> ServerCore::Create(const ServerOptions& options, std::unique_ptr<LossEngine> engine) {
  HEADWATER_RETURN_IF_ERROR(ValidateLimits(options.limits));
  HEADWATER_RETURN_IF_ERROR(ValidateSettings(options));
  if ((options.idle_head_checkpoint || options.drain_checkpoint) && options.checkpoint_directory.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(options.idle_head_checkpoint ? "idle_head_checkpoint" : "drain_checkpoint",
                                                   ": expected a checkpoint_directory with it, got none"));
  }
  if (options.keep_checkpoints < 0) {
    return absl::InvalidArgumentError(absl::StrCat("keep_checkpoints: expected >= 0, got ", options.keep_checkpoints));
  }
  if (options.deterministic && !engine->options().deterministic) {
    return absl::InvalidArgumentError("deterministic: expected an engine that was made with EngineOptions::deterministic");
  }
  HEADWATER_RETURN_IF_ERROR(CheckLoadRoot(options.load_root));
  HEADWATER_ASSIGN_OR_RETURN(auto access, AccessControl::Create(options.token_file));
  std::unique_ptr<checkpoint::CheckpointStore> checkpoints;
  if (!options.checkpoint_directory.empty()) {
    HEADWATER_ASSIGN_OR_RETURN(
        checkpoints,
        checkpoint::CheckpointStore::Open(options.checkpoint_directory, checkpoint::PosixFileSystem(), options.keep_checkpoints));
  }
  if (!(options.product_tflops >= 0) || !std::isfinite(options.product_tflops)) {
    return absl::InvalidArgumentError(absl::StrCat("product_tflops: expected a number >= 0, got ", options.product_tflops));
  }
  if (options.engine_stall_timeout > absl::ZeroDuration()) {
    engine->Observe(std::make_shared<StallClock>(options.engine_stall_timeout));
  }
  std::unique_ptr<ServerCore> core(new ServerCore(options, std::move(engine)));
  core->access = std::move(access);
  core->checkpoints = std::move(checkpoints);
  if (!options.trace_dir.empty()) {
    HEADWATER_ASSIGN_OR_RETURN(core->traces,
                               observability::TraceWriter::Open(options.trace_dir, options.max_trace_files, core->metrics));
  }
  if (!options.descriptor_socket.empty()) {
    transport::DescriptorSocketOptions socket;
    socket.path = options.descriptor_socket;
    socket.mode = options.descriptor_socket_mode;
    socket.any_user = options.descriptor_socket_any_user;
    socket.incarnation = core->incarnation;
    HEADWATER_ASSIGN_OR_RETURN(core->descriptors, transport::DescriptorSocket::Listen(socket));
  }
  core->end_sessions_.emplace(kReapInterval, [core = core.get()] { core->EndSessions(); });
  if (const absl::Duration timeout = options.idle_head_timeout; timeout > absl::ZeroDuration()) {
    // Apart from the sessions, whose leases must not wait until a head has been saved.
    core->end_idle_heads_.emplace(std::clamp(timeout / 4, kReapInterval, absl::Seconds(10)),
                                  [core = core.get()] { core->EndIdleHeads(); });
  }
  return core;
}

void ServerCore::EndSessions() {
  join.Expire();
  transfers.Expire(MonotonicNow());
  rows.Trim(MonotonicNow() - kIdleRows);
  uploads.DropDead();
  TrimHeapWhenIdle();
  CountExpiredSessions(sessions.Expire());
}

void ServerCore::EndIdleHeads() {
  const auto expired = registry.ExpireIdle(options.idle_head_timeout, checkpoints.get(), options.idle_head_checkpoint);
  for (const heads::HeadName& name : expired) Log(LogLevel::kInfo, "idle_head_deleted", {{"head", name.ToString()}});
  metrics.Count(Metric::kExpiredHeads, expired.size());
}

// Once for each time that the server is idle, and once more when the rows' memory has been released. Otherwise memory freed after a
// burst of calls, or of attacks, would stay with the process forever.
void ServerCore::TrimHeapWhenIdle() {
  bool in_use = rows.used_bytes() > 0 || rows.idle_bytes() != idle_row_bytes_;
  idle_row_bytes_ = rows.idle_bytes();
  {
    absl::MutexLock lock(&phase_mutex_);
    in_use = in_use || calls_in_progress_ > 0;
  }
  const absl::Time now = MonotonicNow();
  if (in_use) {
    last_busy_ = now;
    heap_trimmed_ = false;
  } else if (!heap_trimmed_ && now - last_busy_ >= kIdleHeap) {
    malloc_trim(0);
    heap_trimmed_ = true;
  }
}

ServerParts::ServerParts(const ServerOptions& server_options, std::unique_ptr<LossEngine> loss_engine)
    : options(server_options),
      engine(std::move(loss_engine)),
      metrics(ServerVersion(), engine->name()),
      in_flight(options.limits.max_in_flight_bytes),
      held(options.limits.max_held_bytes),
      rows(*engine, options.limits.max_in_flight_bytes),
      uploads(options.limits.max_upload_bytes),
      regions(*engine, transport::RegionLimits{options.limits.max_session_regions, options.limits.max_region_bytes}),
      join(transport::JoinLimits{options.limits.max_join_bytes, options.limits.max_join_wait}, MonotonicNow),
      registry(*engine,
               heads::RegistryLimits{options.limits.max_heads, options.limits.max_heads_per_tenant,
                                     options.limits.max_tenant_memory_bytes},
               heads::HeadLimits{options.limits.max_step_micro_batches, options.deterministic, options.limits.ordered_window}),
      sessions(heads::SessionLimits{options.limits.max_sessions, options.limits.max_session_lease},
               [this](const heads::SessionId& session, const std::string& client, heads::SessionRegistry::End how) {
                 const bool closed = how == heads::SessionRegistry::End::kClosed;
                 const int64_t dropped = registry.DropSession(session);
                 metrics.Count(Metric::kSessionDiscards, dropped, closed ? SessionEnd::kClosed : SessionEnd::kExpired);
                 if (closed && dropped > 0) {
                   Log(LogLevel::kInfo, "session_closed", {{"client", client}, {"dropped_contributions", dropped}});
                 }
                 regions.DropOwner(session);
                 join.DropOwner(session);
                 return dropped;
               }),
      queue(options.limits.max_queue_depth, WidthsFor(options.queue_widths, *engine)),
      waiting(options.limits.max_waiting_calls, options.max_threads),
      gates(std::make_shared<std::deque<guard::ConnectionGate>>()),
      // gRPC may keep the backlog longer than the core is there.
      backlog(std::make_shared<guard::CallBacklog>(options.limits.max_connection_streams + options.max_reset_backlog,
                                                   options.max_cancel_rate,
                                                   [weak = std::weak_ptr(gates)](const std::string& peer) {
                                                     const auto known = weak.lock();
                                                     if (known == nullptr) return;
                                                     for (guard::ConnectionGate& gate : *known) gate.Drop(peer, MonotonicNow());
                                                   })),
      watchdog(options.stream_idle_timeout, options.limits.max_stream_time),
      transfers(options.limits.max_stripe_wait),
      incarnation(heads::NewEpoch()),
      start_time(absl::Now()),
      operations(options.max_threads),
      file_calls(std::max(1, options.max_threads / 4) + kFileThreads),
      calls(options.max_threads),
      senders(kSenderThreads) {
  metrics.Set(Metric::kMaxQueueDepth, options.limits.max_queue_depth);
  metrics.Set(Metric::kMaxInFlightBytes, options.limits.max_in_flight_bytes);
  metrics.Set(Metric::kMaxConnections, options.limits.max_connections);
}

ServerCore::ServerCore(const ServerOptions& server_options, std::unique_ptr<LossEngine> loss_engine)
    : ServerParts(server_options, std::move(loss_engine)) {
  metrics.SetGaugeSource([this] { SetGauges(); });
}

ServerCore::~ServerCore() {
  engine_watch_.reset();
  end_idle_heads_.reset();
  end_sessions_.reset();
  metrics.SetGaugeSource(nullptr);
}

void ServerCore::EndCall::operator()(ServerCore* core) const {
  absl::MutexLock lock(&core->phase_mutex_);
  if (--core->calls_in_progress_ == 0) core->idle_.WakeAll();
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
  if (phase_ == Phase::kLost) return lost_;
  ++calls_in_progress_;
  return Admission(this);
}

void ServerCore::SetPhase(Phase phase) {
  absl::MutexLock lock(&phase_mutex_);
  if (phase_ == Phase::kLost) return;
  phase_ = phase;
  if (phase == Phase::kDraining) waiting.Close();
}

void ServerCore::WatchEngine(std::function<void(const absl::Status&)> on_lost) {
  on_lost_ = std::move(on_lost);
  engine_watch_.emplace(absl::Milliseconds(50), [this] { CheckEngine(); });
}

void ServerCore::StopWatchingEngine() {
  engine_watch_.reset();
  on_lost_ = nullptr;
}

void ServerCore::CheckEngine() {
  if (on_lost_ == nullptr) return;
  const absl::Status health = engine->health();
  if (health.ok()) return;
  // A second caller waits here until the first one's `on_lost_` has run.
  std::call_once(lost_once_, [&] {
    LoseEngine(health);
    on_lost_(lost());
  });
}

void ServerCore::LoseEngine(const absl::Status& health) {
  ErrorMetadata metadata = GetErrorMetadata(health);
  metadata["engine"] = engine->name();
  metadata["serverRestarts"] = "true";  // clients with a replay log wait for that
  absl::MutexLock lock(&phase_mutex_);
  const std::string why(health.message());
  lost_ =
      options.group == nullptr
          ? MakeError(ErrorReason::kEngineFailed,
                      absl::StrCat("the engine's device is lost, and this server ends so that a new one can begin: ", why),
                      std::move(metadata))
          : MakeError(ErrorReason::kStepLost,
                      absl::StrCat("the server's group has lost a rank, and with it what its heads held; it comes back with their "
                                   "newest checkpoints when all ranks are there again: ",
                                   why),
                      std::move(metadata));
  phase_ = Phase::kLost;
  is_lost_.store(true);
  waiting.CancelAll();
  queue.WakeAll();
}

absl::Status ServerCore::lost() const {
  if (!is_lost_.load()) return absl::OkStatus();
  absl::MutexLock lock(&phase_mutex_);
  return lost_;
}

void ServerCore::FindProductRate() {
  constexpr double kTera = 1e12;
  if (options.product_tflops > 0) return metrics.Set(Metric::kProductRate, options.product_tflops * kTera);
  // Without an address the rate is not read; and a group's other machines cannot be measured from here.
  if (options.metrics_address.empty() || engine->name() != "cpu" || options.group != nullptr) return;
  const double rate = MeasureCpuProductRate(engine->options().thread_count);
  metrics.Set(Metric::kProductRate, rate);
  const Bfloat16Products products = engine->options().bfloat16_products;
  const double bf16_rate =
      products == Bfloat16Products::kOneDnn ? MeasureCpuProductRate(engine->options().thread_count, products) : rate;
  Log(LogLevel::kInfo, "product_rate", {{"tflops", rate / kTera}, {"bf16_tflops", bf16_rate / kTera}});
}

void ServerCore::RestoreHeads(const std::function<bool()>& cancelled) {
  if (checkpoints == nullptr || !options.restore_heads) return;
  int64_t restored = 0;
  for (const heads::HeadRegistry::Comeback& comeback : registry.RestoreAll(*checkpoints, cancelled)) {
    const bool is_back = !comeback.checkpoint.empty();
    restored += is_back;
    Log(is_back && comeback.note.empty() ? LogLevel::kInfo : LogLevel::kWarning, is_back ? "head_restored" : "head_not_restored",
        {{"head", comeback.name.ToString()}, {"checkpoint", comeback.checkpoint}, {"note", comeback.note}});
    for (const auto& [checkpoint, why] : comeback.skipped) {
      Log(LogLevel::kWarning, "checkpoint_skipped",
          {{"head", comeback.name.ToString()}, {"checkpoint", checkpoint}, {"note", why}});
    }
    metrics.Count(Metric::kSkippedCheckpoints, comeback.skipped.size());
  }
  metrics.Count(Metric::kRestoredHeads, restored);
}

bool ServerCore::SaveHeads(absl::Time deadline) {
  bool all_saved = true;
  for (const auto& [name, status] : registry.SaveChanged(*checkpoints, kDrainCheckpoint, deadline)) {
    Log(status.ok() ? LogLevel::kInfo : LogLevel::kError, status.ok() ? "head_saved" : "head_not_saved",
        {{"head", name.ToString()}, {"checkpoint", kDrainCheckpoint}, {"note", std::string(status.message())}});
    all_saved = all_saved && status.ok();
  }
  return all_saved;
}

void ServerCore::CountExpiredSessions(const std::vector<heads::SessionRegistry::Expired>& expired) {
  metrics.Count(Metric::kSessionEnds, expired.size(), SessionEnd::kExpired);
  for (const heads::SessionRegistry::Expired& session : expired) {
    // A process that ends without closing its client is common, and harmless unless contributions are lost.
    Log(session.dropped > 0 ? LogLevel::kWarning : LogLevel::kInfo, "session_expired",
        {{"client", session.client_name}, {"dropped_contributions", session.dropped}});
  }
}

absl::StatusOr<heads::SessionRegistry::Use> ServerCore::UseSession(const std::optional<heads::SessionId>& session) {
  if (!session.has_value()) return heads::SessionRegistry::Use();
  return sessions.Begin(*session);
}

absl::Status ServerCore::ReserveInFlight(const std::string& client, int64_t bytes, const char* what,
                                         transport::ByteBudget::Reservation* reservation) {
  if (in_flight.TryReserve(client, bytes, MonotonicNow(), reservation)) return absl::OkStatus();
  slow_uploads.GiveWay(MonotonicNow());
  const int64_t available = in_flight.available_bytes();
  const bool kept = available >= bytes;
  return MakeError(ErrorReason::kInFlightBytesExceeded,
                   absl::StrCat(what, " needs ", bytes, " bytes, and ", available, " of ", in_flight.capacity_bytes(),
                                kept ? " (max_in_flight_bytes) are free but kept for others who have asked before; try again"
                                     : " (max_in_flight_bytes) are free; try again"),
                   {{"limit", "max_in_flight_bytes"},
                    {"maximum", absl::StrCat(in_flight.capacity_bytes())},
                    {"requestedBytes", absl::StrCat(bytes)},
                    {"availableBytes", absl::StrCat(available)},
                    {kRetryAfterMsKey, "50"}});
}

bool ServerCore::AwaitIdle(absl::Time deadline) {
  absl::MutexLock lock(&phase_mutex_);
  while (calls_in_progress_ > 0) {
    if (!Wait(idle_, phase_mutex_, {deadline}, "waited for all others").ok()) return false;
  }
  return true;
}

int64_t ServerCore::BudgetBytes() const {
  int64_t budget = 0;
  for (const EngineDevice& device : engine->devices()) budget += device.memory_budget_bytes;
  return budget;
}

void ServerCore::CountCancelled(const std::string& peer) {
  for (guard::ConnectionGate& gate : *gates) gate.OnCancelled(peer, MonotonicNow());
}

void ServerCore::SetGauges() {
  using observability::RankActivity;
  int64_t connections = 0, refused = 0, dropped = 0;
  for (const guard::ConnectionGate& gate : *gates) {
    connections += gate.connections();
    refused += gate.refused();
    dropped += gate.dropped();
  }
  metrics.Set(Metric::kConnections, connections);
  metrics.Raise(Metric::kRefusedConnections, static_cast<double>(refused));
  metrics.Raise(Metric::kDroppedConnections, static_cast<double>(dropped));
  metrics.Set(Metric::kQueueDepth, queue.depth());
  metrics.Raise(Metric::kComputeBusy, absl::ToDoubleSeconds(busy.total()));
  if (options.group != nullptr) {
    const std::vector<group::RankTimes> ranks = options.group->rank_times();
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      metrics.RaiseRankSeconds(rank, RankActivity::kCompute, ranks[rank].computing);
      metrics.RaiseRankSeconds(rank, RankActivity::kWait, ranks[rank].waiting);
      metrics.RaiseRankSeconds(rank, RankActivity::kCommunicate, ranks[rank].communicating);
    }
  }
  metrics.Set(Metric::kInFlightBytes, in_flight.reserved_bytes());
  metrics.Set(Metric::kUploadBytes, uploads.reserved_bytes());
  metrics.Set(Metric::kMemoryBudget, BudgetBytes());
  metrics.Set(Metric::kHeldBytes, held.reserved_bytes());
  metrics.Set(Metric::kJoinBytes, join.reserved_bytes());
  metrics.Set(Metric::kRowMemory, rows.used_bytes(), observability::RowMemory::kUsed);
  metrics.Set(Metric::kRowMemory, rows.idle_bytes(), observability::RowMemory::kIdle);
  metrics.Set(Metric::kSessions, sessions.size());
  const transport::RegionCounts& mapped = regions.totals();
  for (size_t kind = 0; kind < mapped.regions.size(); ++kind) {
    metrics.Set(Metric::kRegions, mapped.regions[kind].load(), kind);
    metrics.Set(Metric::kRegionBytes, mapped.bytes[kind].load(), kind);
  }
  metrics.Set(Metric::kWaitingCalls, waiting.size());
  metrics.Set(Metric::kAbandonedCalls, abandoned_calls.load());
  absl::Time unsaved_since = absl::InfiniteFuture();
  const auto all_heads = registry.ListAll();
  int64_t waiting_contributions = 0, planned_bytes = 0;
  std::map<std::string, int64_t> planned;  // by purpose
  for (const auto& head : all_heads) {
    const heads::HeadInfo info = head->Describe();
    waiting_contributions += info.waiting_count;
    for (const MemoryPlan::Item& item : info.plan.items) {
      planned[item.purpose] += item.bytes;
      planned_bytes += item.bytes;
    }
    if (info.unsaved_since.has_value()) unsaved_since = std::min(unsaved_since, *info.unsaved_since);
  }
  metrics.Set(Metric::kHeads, all_heads.size());
  metrics.Set(Metric::kWaitingContributions, waiting_contributions);
  if (checkpoints != nullptr) {
    metrics.Set(Metric::kUnsavedChange, absl::ToDoubleSeconds(std::max(absl::ZeroDuration(), MonotonicNow() - unsaved_since)));
  }
  // The CUDA engine has one workspace for all heads, as large as the largest; the CPU engine has one for each.
  if (const int64_t shared_bytes = planned_bytes - engine->planned_bytes(); shared_bytes > 0) {
    int64_t& workspace_bytes = planned["workspace"];
    workspace_bytes -= std::min(workspace_bytes, shared_bytes);
  }
  metrics.SetPlannedBytes(planned);
  absl::MutexLock lock(&phase_mutex_);
  metrics.Set(Metric::kServing, phase_ == Phase::kServing ? 1 : 0);
}

}  // namespace headwater::service
