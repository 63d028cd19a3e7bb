// ServerParts: the engine, the books and the budgets that all handlers share. Knows no gRPC.
#ifndef HEADWATER_SERVER_SERVICE_SERVER_PARTS_H_
#define HEADWATER_SERVER_SERVICE_SERVER_PARTS_H_

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/time/time.h"
#include "headwater/kernels/engine.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/guard/call_backlog.h"
#include "server/guard/slow_uploads.h"
#include "server/guard/stream_watchdog.h"
#include "server/heads/head_name.h"
#include "server/heads/head_registry.h"
#include "server/heads/session_registry.h"
#include "server/observability/busy_clock.h"
#include "server/observability/call_trace.h"
#include "server/observability/metrics.h"
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

// Every part is constant, or thread-safe by itself. A part that heads hold on to goes after them: the engine last of all, and the
// budgets of what they keep.
struct ServerParts {
  ServerParts(const ServerOptions& server_options, std::unique_ptr<LossEngine> loss_engine);
  ServerParts(const ServerParts&) = delete;
  ServerParts& operator=(const ServerParts&) = delete;

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

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_SERVER_PARTS_H_
