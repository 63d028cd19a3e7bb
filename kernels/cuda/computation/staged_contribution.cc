#include "kernels/cuda/computation/staged_contribution.h"

#include <algorithm>

#include "headwater/kernels/error.h"
#include "kernels/cuda/computation/deferred_grad_weight.h"
#include "kernels/cuda/rows/parameters.h"

namespace headwater::cuda {

absl::Status CudaStagedContribution::DoCommit(double factor) {
  if (committed_) return MakeError(ErrorReason::kInternal, "the contribution was committed before");
  float alpha = 0;
  HEADWATER_RETURN_IF_ERROR(ToFactor(factor, &alpha));
  absl::Status status;
  {
    WorkLock lock(*core_);
    // All heads of a call are of one kind.
    const bool is_alone = heads_.front()->head->group() == nullptr;
    const auto add_all = [&] {
      committed_ = true;  // or left half-way: not to be added again
      for (const auto& staged : heads_) HEADWATER_RETURN_IF_ERROR(Add(*staged, alpha));
      // The caller's memory is not used any more. The next user of the slot is behind this on the stream.
      if (is_alone) core_->LetWorkGoOn();
      return absl::OkStatus();
    };
    // A contribution that is kept as rows is added by way of the workspace.
    const absl::Status ready = core_->CheckWorkspace();
    if (is_alone) HEADWATER_RETURN_IF_ERROR(ready);
    status = is_alone ? core_->RunAlone(add_all) : core_->RunDecided([&ready](int32_t) { return ready; }, add_all);
  }
  if (HasReason(status, ErrorReason::kShardNotReady)) return status;
  committed_ = true;
  heads_.clear();
  return status;
}

int64_t CudaStagedContribution::CommitSpaceOf(int64_t workspace_bytes) {
  return workspace_bytes - DeferredGradWeight::ShareOf(workspace_bytes) - Workspace::kAlignment;
}

absl::Status CudaStagedContribution::Add(const StagedHead& staged, float factor) {
  const CudaHead& head = *staged.head;
  // Earlier contributions are added earlier.
  HEADWATER_RETURN_IF_ERROR(core_->deferred().FlushFor(head));
  if (staged.keeps_rows) {
    int64_t largest_columns = 0;
    for (int32_t rank = 0; rank < head.shard_count(); ++rank) {
      largest_columns = std::max(largest_columns, head.shard_weights(rank).columns);
    }
    const int64_t bytes = core_->workspace().bytes();
    Workspace workspace(core_->workspace().As<void>(), bytes - DeferredGradWeight::ShareOf(bytes));
    WeightScratch scratch;
    scratch.factor = workspace.Take<float>(1);  // see CommitSpaceOf()
    if (head.spec().has_bias) scratch.bias = workspace.TakeBytes(GradBiasScratchBytes(largest_columns));
    scratch.kept_list = &workspace;
    for (const WeightContribution& contribution : staged.kept) {
      HEADWATER_RETURN_IF_ERROR(AddWeightContribution(*core_, head, contribution, factor, scratch, /*overwrites=*/false,
                                                      [&](int32_t rank) { return head.accumulator(rank); }));
    }
    return absl::OkStatus();
  }
  for (int32_t rank = 0; rank < head.shard_count(); ++rank) {
    const ShardWeights shard = head.shard_weights(rank);
    const WeightTarget from = head.staging_slot(rank, staged.slot.index());
    const WeightTarget to = head.accumulator(rank);
    HEADWATER_RETURN_IF_ERROR(
        core_->Check(LaunchAddScaled(from.weight, shard.columns * shard.stride, factor, to.weight, core_->stream()),
                     "adding a contribution to grad_weight"));
    if (to.bias != nullptr) {
      HEADWATER_RETURN_IF_ERROR(core_->Check(LaunchAddScaled(from.bias, shard.columns, factor, to.bias, core_->stream()),
                                             "adding a contribution to grad_bias"));
    }
  }
  return absl::OkStatus();
}

}  // namespace headwater::cuda
