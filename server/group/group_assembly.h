// GroupAssembly: how a leader and the workers that join it become one group.
//
// The engine is there at once, so that a server can be started around it and listen; it computes once the workers have joined.
// The first ranks are the leader's own: one, or one for each of its GPUs. Which worker becomes which rank is the order in which
// their processes came; the workers of one process follow each other, and share the rows that come to the first of them
// (ProcessRows).
#ifndef HEADWATER_SERVER_GROUP_GROUP_ASSEMBLY_H_
#define HEADWATER_SERVER_GROUP_GROUP_ASSEMBLY_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "headwater/kernels/communicator.h"
#include "headwater/v1/group_service.pb.h"
#include "server/group/engines_together.h"
#include "server/group/group_engine.h"
#include "server/group/ranks/rank_link.h"

namespace headwater::group {

struct AssemblyOptions {
  // Of each rank; shard_count, and shard_weights if any, for own_ranks + workers ranks; thread_count not 0 for CPU engines. The
  // leader's own rank r is on the GPU device_index + r.
  EngineOptions engine;
  std::string engine_name = "cpu";                    // or "cuda"
  EngineMaker make_engine = CreateCpuEngine;          // the leader's own ranks'
  std::string device_group_id;                        // for "cuda": MakeCudaGroupId()'s
  int32_t own_ranks = 1;                              // >= 1
  int32_t workers = 1;                                // ranks that join, >= 1
  std::string version;                                // that workers must have
  std::string listen_host = "0.0.0.0";                // where the leader's communicator listens
  absl::Duration setup_timeout = absl::Seconds(60);   // to connect, and to make the engines, once all workers are there
  absl::Duration silence_timeout = absl::Seconds(5);  // for a sign of life
  // Called when a worker has told that its process is to end, by each of those, more than once. Any thread; null: nothing is.
  std::function<void()> on_worker_leaving;
};

// The call by which a worker joins, as the leader's handler sees it.
class JoinCall {
 public:
  virtual ~JoinCall() = default;
  // False once the call has ended. Each by one thread at a time.
  virtual bool Read(v1::JoinRequest* message) = 0;
  virtual bool Send(const v1::JoinResponse& message) = 0;
  // Any thread.
  virtual void Cancel() = 0;
  virtual bool Cancelled() = 0;
  // The worker's address, as it stands before ":port"; empty for a process of the leader's host.
  virtual std::string host() const = 0;
};

class GroupAssembly {
 public:
  // Unavailable if its communicator cannot listen.
  static absl::StatusOr<std::unique_ptr<GroupAssembly>> Create(AssemblyOptions options);

  // Once: the group's engine, without ranks yet. May outlive this.
  std::unique_ptr<GroupEngine> TakeEngine() { return std::move(unowned_engine_); }

  // Serves a worker's call until it ends, or until the group does. kFeatureNotBuilt, before anything is read, if all workers are
  // there already, or if its process brings more of them than are missing; kInvalidCombination for another version or engine, or
  // for a rank of a process that is there, kProtocolViolation for no worker.
  absl::Status Serve(JoinCall& call);

  // Waits for all workers, and forms the group; after that the engine computes. Once, while the engine lives. kCancelled soon after
  // `cancelled`, which is asked several times a second, has returned true; what workers and the leader's own rank could not do, all
  // of it: another attempt needs another assembly.
  absl::Status Form(const std::function<bool()>& cancelled);

  // How each rank has spent its time, by rank; workers tell it twice a second. None before the group is formed. Any thread, while
  // the engine lives.
  std::vector<RankTimes> rank_times() const { return engine_.rank_times(); }

  // Ends the workers' calls, once no call of the engine is left: that is no failure of the group. Any thread, while the engine
  // lives.
  void Dismiss() { engine_.Dismiss(); }

 private:
  // A worker that has joined.
  struct Slot {
    std::string address;
    std::string process;  // which of a process's ranks it is, and how many that has
    int32_t process_index = 0;
    int32_t process_ranks = 1;
    std::shared_ptr<RankLink> link;
    int32_t rank = 0;  // 0: not known yet
    bool is_ready = false;
    v1::RankReady ready;
  };

  // What the leader's own ranks have come to.
  struct OwnRanks {
    std::vector<std::unique_ptr<LossEngine>> engines;  // by rank; none if one of them failed
    FirstFailure failure;                              // by rank
  };

  GroupAssembly(AssemblyOptions options, std::vector<std::unique_ptr<TcpMeeting>> meetings);
  // What is wrong with who joins, whatever others do.
  absl::Status CheckHello(const v1::RankHello& hello) const;
  // kFeatureNotBuilt if all workers are there.
  absl::Status CheckRoom();
  absl::Status Room() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // The same for one that is to be `slot`.
  absl::Status RoomFor(const Slot& slot) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // Waits until the worker's rank is known.
  absl::Status AwaitRank(JoinCall& call, const std::shared_ptr<Slot>& slot);
  // How many are there, now that this one is, or is no longer.
  void LogPresence(const char* event, const Slot& slot) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // The workers by rank, once all are there.
  std::vector<std::shared_ptr<Slot>> Numbered() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  void Welcome(const Slot& slot, v1::RankWelcome* welcome) ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // `addresses`: of all ranks, as the leader reaches them.
  OwnRanks MakeOwnRanks(const std::vector<std::string>& addresses, const std::string& secret,
                        const std::function<bool()>& given_up);
  // Why the group cannot be formed, as far as the ranks have told: all of their reasons. `own`: of the leader's ranks. `are_due`:
  // workers that are not ready are too late.
  absl::Status Refusals(const std::vector<std::shared_ptr<Slot>>& slots, const FirstFailure& own, bool are_due);
  // Waits until every worker has its engine, has said why not, or is gone; no longer than `timeout`. kCancelled.
  absl::Status AwaitReady(const std::vector<std::shared_ptr<Slot>>& slots, absl::Duration timeout,
                          const std::function<bool()>& cancelled);

  const AssemblyOptions options_;
  const std::vector<std::unique_ptr<TcpMeeting>> meetings_;  // of the leader's own ranks
  std::unique_ptr<GroupEngine> unowned_engine_;
  GroupEngine& engine_;
  absl::Mutex mutex_;
  std::vector<std::shared_ptr<Slot>> slots_ ABSL_GUARDED_BY(mutex_);
  bool complete_ ABSL_GUARDED_BY(mutex_) = false;  // ranks, addresses and the secret are known
  std::vector<std::string> addresses_ ABSL_GUARDED_BY(mutex_);
  std::string secret_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_GROUP_ASSEMBLY_H_
