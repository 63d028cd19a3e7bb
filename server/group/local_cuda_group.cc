#include "server/group/local_cuda_group.h"

#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/communicator.h"
#include "headwater/kernels/device_group_id.h"
#include "server/group/group_engine.h"
#include "server/group/local_rank.h"

namespace headwater::group {
namespace {

// What made the group fail: the others only say that they were given up.
class FirstFailure {
 public:
  void Note(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (status_.ok()) status_ = status;
  }
  absl::Status status() const {
    absl::MutexLock lock(&mutex_);
    return status_;
  }

 private:
  mutable absl::Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<LossEngine>> CreateLocalCudaGroup(const EngineOptions& options) {
  const absl::StatusOr<std::string> id = MakeCudaGroupId();
  if (!id.ok()) return id.status();
  const size_t world_size = static_cast<size_t>(options.shard_count);
  auto communicators = MakeInProcessCommunicators(options.shard_count);
  std::vector<std::unique_ptr<LossEngine>> engines(world_size);
  FirstFailure failure;
  // Each waits for the others.
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < world_size; ++rank) {
    EngineOptions one = options;
    one.device_index = options.device_index + static_cast<int32_t>(rank);
    one.group.rank = static_cast<int32_t>(rank);
    one.group.world_size = options.shard_count;
    one.group.communicator = std::move(communicators[rank]);
    one.group.device_group_id = *id;
    one.group.shared_views = true;
    threads.emplace_back([one = std::move(one), rank, &engines, &failure] {
      absl::StatusOr<std::unique_ptr<LossEngine>> engine = CreateCudaEngine(one);
      if (engine.ok()) {
        engines[rank] = *std::move(engine);
      } else {
        failure.Note(engine.status());
        one.group.communicator->Abort(engine.status());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (absl::Status status = failure.status(); !status.ok()) return status;
  EngineOptions filled = engines.front()->options();
  filled.group = EngineGroup();
  const std::string name = engines.front()->name();
  std::vector<std::unique_ptr<Rank>> ranks;
  for (std::unique_ptr<LossEngine>& engine : engines) ranks.push_back(std::make_unique<LocalRank>(std::move(engine)));
  auto group = std::make_unique<GroupEngine>(name, filled, /*shared_budget=*/false);
  group->Form(std::move(ranks));
  return std::unique_ptr<LossEngine>(std::move(group));
}

}  // namespace headwater::group
