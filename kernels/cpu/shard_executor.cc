#include "kernels/cpu/shard_executor.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "headwater/kernels/error.h"

namespace headwater::cpu {
namespace {

absl::Status ShardError(ErrorReason reason, int32_t rank, const char* what, const std::string& cause) {
  const std::string shard = std::to_string(rank);
  return MakeError(reason, "shard " + shard + what + cause, {{"shard", shard}});
}

std::string Text(const absl::Status& status) { return std::string(status.message()); }

}  // namespace

ShardExecutors::ShardExecutors(int32_t shard_count, int32_t thread_count, Probe probe)
    : probe_(std::move(probe)), communicators_(MakeInProcessCommunicators(shard_count)), ranks_(shard_count) {
  const int32_t threads = std::max(1, thread_count / shard_count);
  for (int32_t rank = 0; rank < shard_count; ++rank) pools_.push_back(std::make_unique<ThreadPool>(threads));
}

int64_t ShardExecutors::progress() const {
  int64_t runs = 0;
  for (const auto& pool : pools_) runs += pool->runs();
  return runs;
}

absl::Status ShardExecutors::Run(Work work) {
  std::vector<absl::Status> statuses(communicators_.size());
  ranks_.Run(shard_count(), [&](int32_t rank) { statuses[static_cast<size_t>(rank)] = RunOne(rank, work); });
  return Finish(statuses);
}

absl::Status ShardExecutors::RunDecided(Work prepare, Work act) {
  std::vector<absl::Status> ready(communicators_.size());
  std::vector<absl::Status> statuses(communicators_.size());
  ranks_.Run(shard_count(), [&](int32_t rank) {
    const size_t index = static_cast<size_t>(rank);
    ready[index] = PrepareOne(rank, prepare);
    const auto decide_and_act = [&](const ShardContext& context) {
      double not_ready = ready[index].ok() ? 0 : 1;
      absl::Status status = context.communicator.AllReduceMax(&not_ready, 1);
      if (!status.ok() || not_ready > 0) return status;
      status = CallProbe(ShardPhase::kAct, rank);
      return status.ok() ? act(context) : status;
    };
    statuses[index] = RunOne(rank, decide_and_act);
  });
  const absl::Status status = Finish(statuses);
  if (!status.ok()) return status;
  const auto failed = std::find_if(ready.begin(), ready.end(), [](const absl::Status& rank) { return !rank.ok(); });
  return failed == ready.end() ? absl::OkStatus() : *failed;
}

ShardContext ShardExecutors::ContextOf(int32_t rank) const {
  const size_t index = static_cast<size_t>(rank);
  return {rank, *communicators_[index], *pools_[index]};
}

absl::Status ShardExecutors::CallProbe(ShardPhase phase, int32_t rank) const {
  return probe_ == nullptr ? absl::OkStatus() : probe_(phase, rank);
}

absl::Status ShardExecutors::PrepareOne(int32_t rank, Work prepare) {
  constexpr char kWhat[] = " could not begin, and nothing was changed: ";
  try {
    absl::Status status = CallProbe(ShardPhase::kPrepare, rank);
    if (status.ok()) status = prepare(ContextOf(rank));
    return status.ok() ? status : ShardError(ErrorReason::kShardNotReady, rank, kWhat, Text(status));
  } catch (const std::exception& error) {
    return ShardError(ErrorReason::kShardNotReady, rank, kWhat, error.what());
  }
}

absl::Status ShardExecutors::RunOne(int32_t rank, Work program) {
  constexpr char kWhat[] = " failed: ";
  const ShardContext context = ContextOf(rank);
  absl::Status status;
  try {
    status = program(context);
    if (!status.ok() && !HasReason(status, ErrorReason::kEngineFailed)) {
      status = ShardError(ErrorReason::kEngineFailed, rank, kWhat, Text(status));
    }
  } catch (const std::exception& error) {
    status = ShardError(ErrorReason::kEngineFailed, rank, kWhat, error.what());
  }
  if (!status.ok()) context.communicator.Abort(status);
  return status;
}

absl::Status ShardExecutors::Finish(const std::vector<absl::Status>& statuses) {
  const auto failed = std::find_if(statuses.begin(), statuses.end(), [](const absl::Status& rank) { return !rank.ok(); });
  if (failed == statuses.end()) return absl::OkStatus();
  communicators_ = MakeInProcessCommunicators(shard_count());  // the old one is aborted for good; nobody waits in it any more
  return *failed;
}

}  // namespace headwater::cpu
