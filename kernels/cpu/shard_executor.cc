#include "kernels/cpu/shard_executor.h"

#include <algorithm>
#include <exception>
#include <string>

#include "headwater/kernels/error.h"

namespace headwater::cpu {

ShardExecutors::ShardExecutors(int32_t shard_count, int32_t thread_count)
    : communicators_(MakeInProcessCommunicators(shard_count)), ranks_(shard_count) {
  const int32_t threads = std::max(1, thread_count / shard_count);
  for (int32_t rank = 0; rank < shard_count; ++rank) pools_.push_back(std::make_unique<ThreadPool>(threads));
}

absl::Status ShardExecutors::Run(const std::function<absl::Status(const ShardContext&)>& program) {
  if (!failure_.ok()) return failure_;
  std::vector<absl::Status> statuses(communicators_.size());
  ranks_.Run(shard_count(), [&](int32_t rank) { statuses[static_cast<size_t>(rank)] = RunOne(rank, program); });
  for (const absl::Status& status : statuses) {
    if (!status.ok() && failure_.ok()) failure_ = status;
  }
  return failure_;
}

absl::Status ShardExecutors::RunOne(int32_t rank, const std::function<absl::Status(const ShardContext&)>& program) {
  const size_t index = static_cast<size_t>(rank);
  absl::Status status;
  try {
    status = program(ShardContext{rank, *communicators_[index], *pools_[index]});
  } catch (const std::exception& error) {
    status = MakeError(ErrorReason::kEngineFailed, "shard " + std::to_string(rank) + " failed: " + error.what(),
                       {{"shard", std::to_string(rank)}});
  }
  if (!status.ok()) communicators_[index]->Abort(status);
  return status;
}

}  // namespace headwater::cpu
