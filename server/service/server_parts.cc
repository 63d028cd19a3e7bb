#include "server/service/server_parts.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::service {

using observability::SessionEnd;

namespace {

// Each sends to one stream at a time until the socket is full; gRPC's threads continue from there.
constexpr int64_t kSenderThreads = 8;
// Threads for calls with files beside those that may wait for their heads, which are a quarter of max_threads.
constexpr int64_t kFileThreads = 2;

// Each rank of a group may compute a large micro-batch of its own, and one more stands at the door.
scheduler::QueueWidths WidthsFor(scheduler::QueueWidths widths, const LossEngine& engine) {
  widths.large = std::max<int64_t>(widths.large, engine.options().shard_count + 1);
  return widths;
}

}  // namespace

const char* ServerVersion() { return HEADWATER_VERSION; }

ServerParts::ServerParts(const ServerOptions& server_options, std::unique_ptr<LossEngine> loss_engine)
    : options(server_options),
      engine(std::move(loss_engine)),
      metrics(ServerVersion(), engine->name()),
      in_flight(options.limits.max_in_flight_bytes),
      held(options.limits.max_held_bytes),
      rows(*engine, options.limits.max_in_flight_bytes),
      uploads(options.limits.max_upload_bytes),
      regions(*engine, transport::RegionLimits{options.limits.max_session_regions, options.limits.max_region_bytes}),
      join(transport::JoinLimits{options.limits.max_join_bytes, options.limits.max_join_wait}, observability::MonotonicNow),
      registry(*engine,
               heads::RegistryLimits{options.limits.max_heads, options.limits.max_heads_per_tenant,
                                     options.limits.max_tenant_memory_bytes},
               heads::HeadLimits{options.limits.max_step_micro_batches, options.deterministic, options.limits.ordered_window}),
      sessions(heads::SessionLimits{options.limits.max_sessions, options.limits.max_session_lease},
               [this](const heads::SessionId& session, heads::SessionRegistry::End how) {
                 const bool closed = how == heads::SessionRegistry::End::kClosed;
                 const int64_t dropped = registry.DropSession(session);
                 metrics.Count(observability::Metric::kSessionDiscards, dropped,
                               closed ? SessionEnd::kClosed : SessionEnd::kExpired);
                 regions.DropOwner(session);
                 join.DropOwner(session);
                 return dropped;
               }),
      queue(options.limits.max_queue_depth, WidthsFor(options.queue_widths, *engine)),
      waiting(options.limits.max_waiting_calls, options.max_threads),
      backlog(std::make_shared<guard::CallBacklog>(options.limits.max_connection_streams + options.max_reset_backlog,
                                                   options.max_cancel_rate)),
      watchdog(options.stream_idle_timeout, options.limits.max_stream_time),
      transfers(options.limits.max_stripe_wait),
      incarnation(heads::NewEpoch()),
      start_time(absl::Now()),
      operations(options.max_threads),
      file_calls(std::max(1, options.max_threads / 4) + kFileThreads),
      calls(options.max_threads),
      senders(kSenderThreads) {}

}  // namespace headwater::service
