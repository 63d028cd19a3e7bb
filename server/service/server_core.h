// ServerCore: the state that all handlers share. Knows no gRPC.
#ifndef HEADWATER_SERVER_SERVICE_SERVER_CORE_H_
#define HEADWATER_SERVER_SERVICE_SERVER_CORE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "headwater/kernels/engine.h"
#include "server/heads/session_registry.h"
#include "server/observability/metrics.h"
#include "server/observability/repeated_task.h"
#include "server/scheduler/waiting.h"
#include "server/service/server_options.h"
#include "server/service/server_parts.h"
#include "server/transport/byte_budget.h"

namespace headwater::service {

// The checkpoint name of heads that are saved when the server drains.
inline constexpr char kDrainCheckpoint[] = "drain";

class ServerCore : public ServerParts {
 public:
  enum class Phase { kStarting, kServing, kDraining, kLost };

  static absl::StatusOr<std::unique_ptr<ServerCore>> Create(const ServerOptions& options, std::unique_ptr<LossEngine> engine);
  ~ServerCore();

  // One call that has been accepted: Drain() waits for its end.
  struct EndCall {
    void operator()(ServerCore* core) const;
  };
  using Admission = std::unique_ptr<ServerCore, EndCall>;
  // kStarting before SetPhase(kServing), kDraining after SetPhase(kDraining), lost() once the engine's device is lost.
  absl::StatusOr<Admission> Admit();
  // To kServing or kDraining; without effect once the device is lost.
  void SetPhase(Phase phase);

  // Begins to look at LossEngine::health(), every 50 ms. When the device is lost, all waits here end and lost() says why. Then
  // `on_lost` is called, once, with lost(), on the watch's thread or in CheckEngine(), which it must not call. To be called once,
  // before calls are taken.
  void WatchEngine(std::function<void(const absl::Status&)> on_lost);
  // Waits for `on_lost`, if it runs. No call may be in progress.
  void StopWatchingEngine();
  // Looks at the device now: when this returns and the device is lost, `on_lost` has run. Without effect before WatchEngine().
  void CheckEngine();
  // kEngineFailed, as calls are answered, once the device is lost; OK before.
  absl::Status lost() const;
  // Waits until no accepted call is in progress; false when `deadline` (of observability::MonotonicNow(), like the next one) comes
  // first.
  bool AwaitIdle(absl::Time deadline);

  // Saves the heads that have changed, as kDrainCheckpoint (needs a checkpoint directory); one line of log for each. False if one
  // could not be, or not before `deadline`.
  bool SaveHeads(absl::Time deadline);
  // Sets the metric of bare matrix products: to the options' rate, else, on the CPU engine, to the rate measured now.
  void FindProductRate();
  // Brings back the heads of an earlier server (heads::HeadRegistry::RestoreAll), if the options say so, until `cancelled`; one
  // line of log for each.
  void RestoreHeads(const std::function<bool()>& cancelled);

  // Counts and logs sessions whose lease has ended: a warning for each that has left contributions undecided.
  void CountExpiredSessions(const std::vector<heads::SessionRegistry::Expired>& expired);
  // The call's hold on its session; an empty one without a session. kSessionNotFound.
  absl::StatusOr<heads::SessionRegistry::Use> UseSession(const std::optional<heads::SessionId>& session);
  // kInFlightBytesExceeded, naming `what`, unless `bytes` of tensors are free, beside those kept for clients that were refused
  // before this one.
  absl::Status ReserveInFlight(const std::string& client, int64_t bytes, const char* what,
                               transport::ByteBudget::Reservation* reservation);

  // The bytes left in the memory budget beside the heads that exist.
  int64_t AvailableBytes() const;
  // The core's calls to the ports, on any thread until they are replaced. Null: there are no ports.
  struct PortHooks {
    std::function<int64_t()> count_connections;
    std::function<void(const std::string& peer)> on_cancelled;
  };
  void SetPortHooks(PortHooks hooks);
  // The client of a connection has cancelled a call.
  void CountCancelled(const std::string& peer);

 private:
  class Reaper;

  // At each scrape of the metrics.
  void SetGauges();

  ServerCore(const ServerOptions& server_options, std::unique_ptr<LossEngine> loss_engine);
  void LoseEngine(const absl::Status& health);

  mutable absl::Mutex phase_mutex_;
  Phase phase_ ABSL_GUARDED_BY(phase_mutex_) = Phase::kStarting;
  int64_t calls_in_progress_ ABSL_GUARDED_BY(phase_mutex_) = 0;
  scheduler::WaitList idle_;                         // woken when there are none
  std::atomic<bool> is_lost_{false};                 // lost() without the lock, for calls that look often
  absl::Status lost_ ABSL_GUARDED_BY(phase_mutex_);  // not OK in Phase::kLost
  mutable absl::Mutex hooks_mutex_;
  PortHooks hooks_ ABSL_GUARDED_BY(hooks_mutex_);
  std::function<void(const absl::Status&)> on_lost_;  // null: the engine is not watched
  std::once_flag lost_once_;
  std::unique_ptr<Reaper> reaper_;  // these two last: they use the members above
  std::optional<observability::RepeatedTask> engine_watch_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_SERVER_CORE_H_
