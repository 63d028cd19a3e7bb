// The worker's end of a group: a rank that executes what its leader commands.
#ifndef HEADWATER_SERVER_GROUP_RANKS_RANK_WORKER_H_
#define HEADWATER_SERVER_GROUP_RANKS_RANK_WORKER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "headwater/kernels/engine.h"
#include "headwater/v1/group_service.pb.h"
#include "server/group/engines_together.h"
#include "server/group/ranks/process_rows.h"

namespace headwater::group {

// How often a worker tells that it lives.
inline constexpr absl::Duration kAliveInterval = absl::Milliseconds(500);

// The call by which a worker has joined, as the worker sees it.
class WorkerChannel {
 public:
  virtual ~WorkerChannel() = default;
  // False once the call has ended. Each by one thread at a time.
  virtual bool Read(v1::JoinResponse* message) = 0;
  virtual bool Write(const v1::JoinRequest& message) = 0;
};

struct WorkerOptions {
  std::string version;                  // of this build
  std::string leader_host;              // where the leader's communicator is, at the port that it tells; empty: on this host
  std::string listen_host = "0.0.0.0";  // where this rank's communicator listens
  std::string engine = "auto";          // "cpu" or "cuda": the leader must have the same; "auto": what it has
  // Of a process with several ranks: what tells it from all others, and which of its ranks this one is.
  std::string process;
  int32_t process_index = 0;
  int32_t process_ranks = 1;
  std::shared_ptr<ProcessRows> rows;  // the same for all of them; null exactly if there is one
  // Of the engine, what is the worker's own to say; all else comes from the leader.
  int64_t memory_budget_bytes = 0;
  int32_t device_index = 0;
  std::string algorithm_cache_path;
  std::function<void(const absl::Status&)> on_device_lost;
  EngineMaker make_engine = CreateCpuEngine;
  EngineMaker make_cuda_engine = CreateCudaEngine;
  absl::Duration alive_interval = kAliveInterval;
  // Whether the process has been asked to end, which the leader is told then. From a thread of the worker's; null: it never is.
  std::function<bool()> is_leaving;
  // Called once when the leader has ended the call, after it was welcomed, or when the engine's health() has failed: what still
  // executes is given up, and comes back unless a device hangs. From a thread of the worker's; null: nothing is.
  std::function<void()> on_call_ended;
};

// Joins, makes its engine, and executes commands until the call ends or the group is lost; then everything that it made is gone.
// The reason for which it ended, never OK.
absl::Status RunWorker(WorkerChannel& channel, const WorkerOptions& options);

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_RANKS_RANK_WORKER_H_
