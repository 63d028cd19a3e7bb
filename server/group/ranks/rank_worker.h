// The worker's end of a group: a rank that executes what its leader commands.
#ifndef HEADWATER_SERVER_GROUP_RANKS_RANK_WORKER_H_
#define HEADWATER_SERVER_GROUP_RANKS_RANK_WORKER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "headwater/kernels/engine.h"
#include "headwater/kernels/error.h"
#include "headwater/v1/group_service.pb.h"
#include "server/group/engines_together.h"
#include "server/group/ranks/rank.h"
#include "server/group/ranks/rank_codec.h"

namespace headwater::group {

struct SharedCall {
  explicit SharedCall(std::shared_ptr<const ReceivedCall> received) : call(std::move(received)), rows(call->rows_here()) {}
  const std::shared_ptr<const ReceivedCall> call;
  RowsHere rows;  // those that may be read
};

// A micro-batch's rows, received by the first rank of a worker's process and read by all of its ranks. One micro-batch is in
// progress: the leader begins the next one when all ranks have answered this one. Thread-safe.
class ProcessRows {
 public:
  // For the first rank. It is part of a group between Open() and Close(). Close() ends all waits.
  void Open() {
    absl::MutexLock lock(&mutex_);
    closed_ = absl::OkStatus();
    id_ = 0;  // another leader restarts the count
  }
  void Close(const absl::Status& why) {
    absl::MutexLock lock(&mutex_);
    closed_.Update(why);
    shared_ = nullptr;
  }
  // A micro-batch begins: the group's `id`-th that all ranks compute. The caller ends its rows.
  void Begin(uint64_t id, std::shared_ptr<SharedCall> shared) {
    absl::MutexLock lock(&mutex_);
    id_ = id;
    shared_ = std::move(shared);
  }

  // For the other ranks: waits until the micro-batch begins.
  absl::StatusOr<std::shared_ptr<SharedCall>> Await(uint64_t id) {
    const auto has_begun = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return id_ >= id || !closed_.ok(); };
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&has_begun));
    if (!closed_.ok()) return closed_;
    if (id_ == id) return shared_;
    return MakeError(ErrorReason::kEngineFailed, "the rank that gets the rows has gone on without this one");
  }

 private:
  absl::Mutex mutex_;
  absl::Status closed_ ABSL_GUARDED_BY(mutex_);
  uint64_t id_ ABSL_GUARDED_BY(mutex_) = 0;  // ascends
  std::shared_ptr<SharedCall> shared_ ABSL_GUARDED_BY(mutex_);
};

inline constexpr absl::Duration kAliveInterval = absl::Milliseconds(500);

// A worker's end of its Join call.
class WorkerChannel {
 public:
  virtual ~WorkerChannel() = default;
  // False once the call has ended. Each by one thread at a time.
  virtual bool Read(v1::JoinResponse* message) = 0;
  virtual bool Write(const v1::JoinRequest& message) = 0;
};

struct WorkerOptions {
  std::string version;                  // of this build
  std::string leader_host;              // host of the leader's communicator, whose port the leader sends; empty: this host
  std::string listen_host = "0.0.0.0";  // where this rank's communicator listens
  std::string engine = "auto";          // "cpu" or "cuda": the leader must have the same; "auto": the leader's
  // For a process with several ranks: a unique name of the process, and this rank's index within it.
  std::string process;
  int32_t process_index = 0;
  int32_t process_ranks = 1;
  std::shared_ptr<ProcessRows> rows;  // shared by the process's ranks; null exactly for a single rank
  // The worker's own: memory_budget_bytes, device_index, algorithm_cache_path and on_device_lost. The others come from the leader.
  EngineOptions engine_options;
  EngineMaker make_engine = CreateCpuEngine;
  EngineMaker make_cuda_engine = CreateCudaEngine;
  absl::Duration alive_interval = kAliveInterval;
  // Whether the process has been asked to end, which is reported to the leader. On a thread of the worker's; null: false.
  std::function<bool()> is_leaving;
  // Called once when the leader has ended the call, or when the engine's health() has failed. Running work is
  // aborted, and returns unless a device hangs. On a thread of the worker's; null: no call.
  std::function<void()> on_call_ended;
};

HEADWATER_FIELDS(v1::RankHello, WorkerOptions, version, engine, process, process_index, process_ranks)

// Joins, makes its engine, and executes commands until the call ends or the group is lost, then destroys all that it made. Returns
// the reason, never OK.
absl::Status RunWorker(WorkerChannel& channel, const WorkerOptions& options);

// ---- over gRPC, for `headwaterd --join`

// The interval of a worker's HTTP/2 pings to its leader: a server must allow it (Limits::min_ping_interval).
inline constexpr absl::Duration kWorkerPingInterval = absl::Seconds(60);

struct LeaderAddress {
  std::string address;           // host:port, or unix:PATH for a leader on this host
  std::string ca;                // PEM file of the authority of the leader's certificate; empty: no TLS
  std::string certificate, key;  // PEM files that the worker shows; empty: none
  std::string token_file;        // file with the worker's token; empty: none
};

// The host of the leader's communicator: that of its address; empty, this host, for a Unix socket.
std::string LeaderHost(const std::string& address);

// Makes one call of Join, to its end. Returns RunWorker()'s reason, or the leader's refusal. Files are read again each time.
// InvalidArgument for unreadable files.
absl::Status JoinLeader(const LeaderAddress& leader, const WorkerOptions& options);

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_RANKS_RANK_WORKER_H_
