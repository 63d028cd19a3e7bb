// GroupAssembly: forms a group from a leader and the workers that join it.
//
// The engine exists at once, so that a server can start around it and listen; it computes once the workers have joined. The first
// ranks are the leader's own: one, or one for each of its GPUs. Workers become ranks in the order in which their processes joined.
// Workers of one process are consecutive, and share the rows that come to the first of them (ProcessRows).
#ifndef HEADWATER_SERVER_GROUP_GROUP_ASSEMBLY_H_
#define HEADWATER_SERVER_GROUP_GROUP_ASSEMBLY_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "headwater/kernels/communicator.h"
#include "headwater/v1/group_service.pb.h"
#include "server/group/engines_together.h"
#include "server/group/group_engine.h"
#include "server/group/ranks/rank.h"

namespace headwater::group {

struct AssemblyOptions {
  // The options of each rank. shard_count, and shard_weights if any, are for own_ranks + workers ranks; thread_count is not 0 for
  // CPU engines. The leader's own rank r is on the GPU device_index + r.
  EngineOptions engine;
  std::string engine_name = "cpu";                    // or "cuda"
  EngineMaker make_engine = CreateCpuEngine;          // the leader's own ranks'
  std::string device_group_id;                        // for "cuda": MakeCudaGroupId()'s
  int32_t own_ranks = 1;                              // the leader's own; >= 1
  int32_t workers = 1;                                // ranks that join, >= 1
  std::string version;                                // required of workers
  std::string listen_host = "0.0.0.0";                // where the leader's communicator listens
  absl::Duration setup_timeout = absl::Seconds(60);   // to connect, and to make the engines, once all workers are there
  absl::Duration silence_timeout = absl::Seconds(5);  // for a sign of life
  // Called for each report of a worker that its process is to end; repeatedly. Any thread; null: no call.
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
  // The worker's address without ":port"; empty for a process of the leader's host.
  virtual std::string host() const = 0;
};

class GroupAssembly {
 public:
  // Unavailable if its communicator cannot listen.
  static absl::StatusOr<std::unique_ptr<GroupAssembly>> Create(AssemblyOptions options);

  // Returns the group's engine, without ranks yet. Called once. The engine may outlive this.
  std::unique_ptr<GroupEngine> TakeEngine() { return std::move(unowned_engine_); }

  // Serves a worker's call until it ends, or until the group does. Errors: kFeatureNotBuilt (before reading, if all workers have
  // joined; or if the process brings too many), kInvalidCombination (another version or engine, or a rank that has joined already),
  // kProtocolViolation (not a worker's call), kCancelled (it has left before all had joined).
  absl::Status Serve(JoinCall& call);

  // Waits for all workers, and forms the group; after that the engine computes. Called once, while the engine lives. kCancelled
  // soon after GiveUp(). Other errors list all failures of workers and own ranks: another attempt needs another assembly.
  absl::Status Form();
  // Ends Form(), now or later. Any thread.
  void GiveUp();

  // Each rank's times so far, by rank; workers report them twice a second. Empty before the group is formed. Any thread, while the
  // engine lives.
  std::vector<RankTimes> rank_times() const { return engine_.rank_times(); }

  // Ends the workers' calls, once no call of the engine is left, which is no failure of the group. Any thread, while the engine
  // lives.
  void Dismiss() { engine_.Dismiss(); }

 private:
  struct Slot {
    std::string address;
    v1::RankHello hello;  // with process_ranks >= 1
    std::shared_ptr<RankLink> link;
    int32_t rank = 0;                    // 0: not known yet
    std::optional<v1::RankReady> ready;  // once the worker has made its engine, or has failed to

    bool is_settled() const { return ready.has_value() || !link->status().ok(); }
  };
  using Slots = std::vector<std::shared_ptr<Slot>>;

  GroupAssembly(AssemblyOptions options, std::vector<std::unique_ptr<TcpMeeting>> meetings);
  EngineOptions OptionsOf(int32_t rank) const {
    return OptionsOfRank(options_.engine, rank, options_.own_ranks + options_.workers, options_.device_group_id);
  }
  // Checks a joining worker by itself.
  absl::Status CheckHello(const v1::RankHello& hello) const;
  // kFeatureNotBuilt if all workers have joined.
  absl::Status Room();
  // Gives `slot` a place. kFeatureNotBuilt and other errors if none is left.
  absl::Status TakePlace(const std::shared_ptr<Slot>& slot);
  // Logs how many workers have joined, after this one has joined or left.
  void LogPresence(const char* event, const Slot& slot) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // The workers by rank, once all have joined.
  Slots Numbered() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // `addresses`: of all ranks, as workers reach them.
  void Welcome(const Slot& slot, const std::vector<std::string>& addresses, const std::string& secret) const;
  // `addresses`: of all ranks, as the leader reaches them.
  EnginesTogether MakeOwnRanks(const std::vector<std::string>& addresses, const std::string& secret, const Slots& slots);
  // The reasons of all ranks for which the group cannot be formed; OK without one. `own`: the leader's ranks. `are_due`: workers
  // that are not ready are too late.
  static absl::Status Refusals(const Slots& slots, const FirstFailure& own, bool are_due);

  const AssemblyOptions options_;
  const std::vector<std::unique_ptr<TcpMeeting>> meetings_;  // of the leader's own ranks
  std::unique_ptr<GroupEngine> unowned_engine_;
  GroupEngine& engine_;
  absl::Mutex mutex_;                    // released after each change of a slot, and after each end of a link
  Slots slots_ ABSL_GUARDED_BY(mutex_);  // without those that have left before all were there
  bool given_up_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_GROUP_ASSEMBLY_H_
