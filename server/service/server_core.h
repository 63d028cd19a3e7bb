// ServerCore: the engine, the books and the budgets that all handlers share, and the server's phase. Knows no gRPC.
#ifndef HEADWATER_SERVER_SERVICE_SERVER_CORE_H_
#define HEADWATER_SERVER_SERVICE_SERVER_CORE_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "headwater/kernels/engine.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/guard/call_guard.h"
#include "server/guard/connection_gate.h"
#include "server/guard/stream_watchdog.h"
#include "server/heads/head_name.h"
#include "server/heads/head_registry.h"
#include "server/heads/session_registry.h"
#include "server/observability/call_trace.h"
#include "server/observability/metrics.h"
#include "server/observability/monotonic_clock.h"
#include "server/observability/repeated_task.h"
#include "server/scheduler/waiting.h"
#include "server/scheduler/work_queue.h"
#include "server/service/access/access.h"
#include "server/service/call/call_threads.h"
#include "server/service/head/upload_store.h"
#include "server/service/loss/transfer_registry.h"
#include "server/service/server_options.h"
#include "server/transport/byte_budget.h"
#include "server/transport/descriptor_socket.h"
#include "server/transport/pinned_pool.h"
#include "server/transport/region_registry.h"
#include "server/transport/teacher_join.h"

namespace headwater::service {

// The version that GetServerInfo reports.
const char* ServerVersion();

// The checkpoint name of heads that are saved when the server drains.
inline constexpr char kDrainCheckpoint[] = "drain";

// The parts that all handlers share. Every part is constant, or thread-safe by itself. A part that heads hold on to goes after
// them: the engine last of all, and the budgets of what they keep.
struct ServerParts {
  ServerParts(const ServerOptions& server_options, std::unique_ptr<LossEngine> loss_engine);

  const ServerOptions options;
  const std::unique_ptr<LossEngine> engine;
  observability::Metrics metrics;
  std::unique_ptr<observability::TraceWriter> traces;  // null: no call is traced
  observability::BusyClock busy;                       // while a micro-batch is in the engine, or what it adds
  transport::FairBudget in_flight;
  transport::ByteBudget held;  // rows of HELD contributions
  transport::PinnedPool rows;  // of micro-batches, in and out
  UploadStore uploads;
  std::unique_ptr<const AccessControl> access;
  std::unique_ptr<checkpoint::CheckpointStore> checkpoints;  // null: not configured
  transport::RegionRegistry regions;
  transport::TeacherJoin join;                               // before the heads: what is undecided holds on to rows of it
  std::unique_ptr<transport::DescriptorSocket> descriptors;  // null: not configured
  heads::HeadRegistry registry;
  heads::SessionRegistry sessions;
  scheduler::WorkQueue queue;
  scheduler::WaitingCalls waiting;
  guard::SlowUploads slow_uploads;
  const std::shared_ptr<std::deque<guard::ConnectionGate>> gates;  // one for each group of ports; all are there before any starts
  const std::shared_ptr<guard::CallBacklog> backlog;
  std::atomic<int64_t> abandoned_calls{0};  // ComputeLoss in progress whose client has gone
  std::atomic<int64_t> reading_threads{0};  // that read streams (ReadAll)
  guard::StreamWatchdog watchdog;
  TransferRegistry transfers;
  const heads::Epoch incarnation;
  const absl::Time start_time;
  CallThreads operations;  // unary calls that may wait, while they do not
  CallThreads file_calls;  // those of them that read or write files
  CallThreads calls;       // one for each ComputeLoss
  CallThreads senders;     // begin to send what the engine has got ready
};

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

  // The bytes of the memory budget, and those left in it beside the heads that exist.
  int64_t BudgetBytes() const;
  int64_t AvailableBytes() const { return std::max<int64_t>(0, BudgetBytes() - engine->planned_bytes()); }
  // The client of a connection has cancelled a call.
  void CountCancelled(const std::string& peer);

 private:
  ServerCore(const ServerOptions& server_options, std::unique_ptr<LossEngine> loss_engine);
  // At each scrape of the metrics.
  void SetGauges();
  void LoseEngine(const absl::Status& health);
  // Ends or frees joins, stripes, memory, uploads, sessions and heads that are no longer used.
  void EndSessions();
  void EndIdleHeads();
  void TrimHeapWhenIdle();

  mutable absl::Mutex phase_mutex_;
  Phase phase_ ABSL_GUARDED_BY(phase_mutex_) = Phase::kStarting;
  int64_t calls_in_progress_ ABSL_GUARDED_BY(phase_mutex_) = 0;
  scheduler::WaitList idle_;                              // woken when there are none
  std::atomic<bool> is_lost_{false};                      // lost() without the lock, for calls that look often
  absl::Status lost_ ABSL_GUARDED_BY(phase_mutex_);       // not OK in Phase::kLost
  absl::Time last_busy_ = observability::MonotonicNow();  // of TrimHeapWhenIdle(), like the next two
  bool heap_trimmed_ = false;
  int64_t idle_row_bytes_ = 0;
  std::function<void(const absl::Status&)> on_lost_;  // null: the engine is not watched
  std::once_flag lost_once_;
  std::optional<observability::RepeatedTask> end_sessions_, end_idle_heads_, engine_watch_;  // last: they use the members above
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_SERVER_CORE_H_
