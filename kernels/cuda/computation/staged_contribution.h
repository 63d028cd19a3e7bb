// A contribution beside the accumulators, in staging slots on the device.
#ifndef HEADWATER_KERNELS_CUDA_COMPUTATION_STAGED_CONTRIBUTION_H_
#define HEADWATER_KERNELS_CUDA_COMPUTATION_STAGED_CONTRIBUTION_H_

#include <memory>
#include <vector>

#include "headwater/kernels/engine.h"
#include "kernels/core/head_base.h"
#include "kernels/cuda/computation/weight_contribution.h"
#include "kernels/cuda/computation/workspace.h"
#include "kernels/cuda/cuda_head.h"
#include "kernels/cuda/engine_core.h"

namespace headwater::cuda {

// An undecided contribution's data for one head: in its slot either the chunks' operands, or the sum of their products.
struct StagedHead {
  CudaHead* head = nullptr;
  StagingSlot slot;
  bool keeps_rows = false;
  Workspace space;                       // the slot, where rows are kept
  std::vector<WeightContribution> kept;  // by chunk and term, in order
};

class CudaStagedContribution final : public StagedContribution {
 public:
  CudaStagedContribution(std::shared_ptr<EngineCore> core, std::vector<std::unique_ptr<StagedHead>> heads)
      : core_(std::move(core)), heads_(std::move(heads)) {}
  absl::Status DoCommit(double factor) override;
  // Bytes of a workspace for the tables and rows of one list (PlanBytes()).
  static int64_t CommitSpaceOf(int64_t workspace_bytes);

 private:
  absl::Status Add(const StagedHead& staged, float factor);

  const std::shared_ptr<EngineCore> core_;
  std::vector<std::unique_ptr<StagedHead>> heads_;
  bool committed_ = false;
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_COMPUTATION_STAGED_CONTRIBUTION_H_
