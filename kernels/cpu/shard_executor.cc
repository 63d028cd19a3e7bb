#include "kernels/cpu/shard_executor.h"

#include <algorithm>
#include <string>
#include <utility>

#include "headwater/kernels/error.h"

namespace headwater::cpu {
namespace {

constexpr char kCouldNotBegin[] = " could not begin, and nothing was changed: ";

absl::Status ShardError(ErrorReason reason, int32_t rank, const char* what, const std::string& cause) {
  const std::string shard = std::to_string(rank);
  return MakeError(reason, "shard " + shard + what + cause, {{"shard", shard}});
}

std::string Text(const absl::Status& status) { return std::string(status.message()); }

}  // namespace

ShardExecutors::ShardExecutors(int32_t shard_count, int32_t thread_count, Probe probe, std::shared_ptr<Communicator> group)
    : probe_(std::move(probe)),
      group_(std::move(group)),
      shard_count_(shard_count),
      first_rank_(group_ == nullptr ? 0 : group_->rank()),
      ranks_(group_ == nullptr ? shard_count : 1) {
  MakeCommunicators();
  const int32_t threads = std::max(1, thread_count / held_count());
  for (int32_t i = 0; i < held_count(); ++i) pools_.push_back(std::make_shared<ThreadPool>(threads));
}

ShardExecutors::ShardExecutors(const ShardExecutors& of_rank)
    : probe_(of_rank.probe_ == nullptr ? nullptr
                                       : Probe([probe = of_rank.probe_, rank = of_rank.first_rank_](ShardPhase phase, int32_t) {
                                           return probe(phase, rank);
                                         })),
      shard_count_(1),
      first_rank_(0),
      pools_(of_rank.pools_),
      ranks_(1) {
  MakeCommunicators();
}

void ShardExecutors::MakeCommunicators() {
  communicators_.clear();
  if (group_ != nullptr) {
    communicators_.push_back(group_);
    return;
  }
  for (auto& communicator : MakeInProcessCommunicators(shard_count_)) communicators_.push_back(std::move(communicator));
}

int64_t ShardExecutors::progress() const {
  int64_t runs = 0;
  for (const auto& pool : pools_) runs += pool->runs();
  return runs;
}

absl::Status ShardExecutors::health() const {
  std::lock_guard<std::mutex> lock(health_mutex_);
  return health_;
}

absl::Status ShardExecutors::RunHeld(absl::FunctionRef<absl::Status(int32_t)> program) {
  std::vector<absl::Status> statuses(communicators_.size());
  ranks_.Run(held_count(), [&](int32_t index) { statuses[static_cast<size_t>(index)] = program(first_rank_ + index); });
  return Finish(statuses);
}

absl::Status ShardExecutors::Run(Work work) {
  return RunHeld([&](int32_t rank) { return RunOne(rank, work); });
}

absl::Status ShardExecutors::RunDecided(Work prepare, Work act) {
  std::vector<absl::Status> ready(communicators_.size());
  int32_t first_unready = shard_count_;  // of those elsewhere too; set by the first rank held
  const absl::Status status = RunHeld([&](int32_t rank) {
    absl::Status& own = ready[static_cast<size_t>(rank - first_rank_)];
    own = PrepareOne(rank, prepare);
    const auto decide_and_act = [&](const ShardContext& context) {
      // Positive if any is not ready, and largest for the first of them.
      double vote = own.ok() ? 0 : shard_count_ - rank;
      absl::Status told = context.communicator.AllReduceMax(&vote, 1);
      if (!told.ok()) return told;
      if (vote > 0) {
        if (rank == first_rank_) first_unready = shard_count_ - static_cast<int32_t>(vote);
        return absl::OkStatus();
      }
      told = CallProbe(ShardPhase::kAct, rank);
      return told.ok() ? act(context) : told;
    };
    return RunOne(rank, decide_and_act);
  });
  if (!status.ok() || first_unready == shard_count_) return status;
  if (holds(first_unready)) return ready[static_cast<size_t>(first_unready - first_rank_)];
  return ShardError(ErrorReason::kShardNotReady, first_unready, kCouldNotBegin, "it says why");
}

ShardContext ShardExecutors::ContextOf(int32_t rank) const {
  const size_t index = static_cast<size_t>(rank - first_rank_);
  return {rank, *communicators_[index], *pools_[index]};
}

absl::Status ShardExecutors::CallProbe(ShardPhase phase, int32_t rank) const {
  return probe_ == nullptr ? absl::OkStatus() : probe_(phase, rank);
}

absl::Status ShardExecutors::PrepareOne(int32_t rank, Work prepare) {
  absl::Status status = CallProbe(ShardPhase::kPrepare, rank);
  if (status.ok()) status = prepare(ContextOf(rank));
  return status.ok() ? status : ShardError(ErrorReason::kShardNotReady, rank, kCouldNotBegin, Text(status));
}

absl::Status ShardExecutors::RunOne(int32_t rank, Work program) {
  const ShardContext context = ContextOf(rank);
  absl::Status status = program(context);
  if (!status.ok() && !HasReason(status, ErrorReason::kEngineFailed)) {
    status = ShardError(ErrorReason::kEngineFailed, rank, " failed: ", Text(status));
  }
  if (!status.ok()) context.communicator.Abort(status);
  return status;
}

absl::Status ShardExecutors::Finish(const std::vector<absl::Status>& statuses) {
  const auto failed = std::find_if(statuses.begin(), statuses.end(), [](const absl::Status& rank) { return !rank.ok(); });
  if (failed == statuses.end()) return absl::OkStatus();
  if (group_ != nullptr) {
    std::lock_guard<std::mutex> lock(health_mutex_);
    if (health_.ok()) health_ = *failed;
  } else {
    MakeCommunicators();  // the old ones are aborted for good; no rank waits in them any more
  }
  return *failed;
}

}  // namespace headwater::cpu
