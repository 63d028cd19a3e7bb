// A chunk's share of a head's gradient, ready to be added: at once, or when a contribution is committed. The only place that adds,
// so that a contribution that is committed later has the bits of a direct one.
#ifndef HEADWATER_KERNELS_CUDA_COMPUTATION_WEIGHT_CONTRIBUTION_H_
#define HEADWATER_KERNELS_CUDA_COMPUTATION_WEIGHT_CONTRIBUTION_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/cuda/computation/workspace.h"
#include "kernels/cuda/cuda_head.h"
#include "kernels/cuda/engine_core.h"
#include "kernels/cuda/products/gradient_list.h"
#include "kernels/cuda/rows/finish.h"

namespace headwater::cuda {

// M, the factors beside it (row_passes.h) and the rows they belong to. The device memory is the caller's.
struct WeightContribution {
  std::vector<ConstMatrix> matrices;     // M by shard
  EntryList list;                        // M of the only shard, without a bias; without rows: `matrices`
  ConstMatrix hidden;                    // [rows, padded]
  ConstMatrix scaled;                    // row_factor . hidden
  const float* scaled_factor = nullptr;  // a factor by which `scaled` is still to be multiplied; null: 1
  const float* row_factor = nullptr;     // [rows]
  bool has_targets = false;              // the next fields are used
  const float* target_factor = nullptr;
  const int32_t* targets = nullptr;
  TargetGroups groups;
};

struct WeightScratch {
  float* factor = nullptr;         // [1]
  void* bias = nullptr;            // GradBiasScratchBytes() of the widest shard; null without a bias
  Workspace* kept_list = nullptr;  // for a list that a slot keeps; null: it is where it was made
};

// Columns of a shard whose grad_weight is one product: all of them; on a rank of a group half. A product keeps the multiprocessors
// that it gets until it ends, from other streams whatever their priority. Where the first half ends, the rows of grad_hidden that
// the ranks have added up meanwhile are written. The micro-batch is answered while the device still has the second half to do.
int64_t ColumnsAtOnce(const CudaHead& head, int64_t columns);

// Enqueues target(rank) += factor * contribution for every shard, in two parts. The targets' rows read `hidden`; the products do
// not. The products come last, except where they overwrite the target, which counts as 0. Adding two numbers to 0 gives the same
// bits in either order, as long as the factor is a power of two.
absl::Status AddTargets(EngineCore& core, const CudaHead& head, const WeightContribution& contribution, float factor,
                        absl::FunctionRef<WeightTarget(int32_t rank)> target);
absl::Status AddProducts(EngineCore& core, const CudaHead& head, const WeightContribution& contribution, float factor,
                         const WeightScratch& scratch, bool overwrites, absl::FunctionRef<WeightTarget(int32_t rank)> target);
// Both, in order.
absl::Status AddWeightContribution(EngineCore& core, const CudaHead& head, const WeightContribution& contribution, float factor,
                                   const WeightScratch& scratch, bool overwrites,
                                   absl::FunctionRef<WeightTarget(int32_t rank)> target);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_COMPUTATION_WEIGHT_CONTRIBUTION_H_
