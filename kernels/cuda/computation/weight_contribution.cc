#include "kernels/cuda/computation/weight_contribution.h"

#include <algorithm>

#include "kernels/cuda/computation/matrix_rows.h"
#include "kernels/cuda/rows/parameters.h"

namespace headwater::cuda {
namespace {

// A product of fewer columns takes less time than the work between its parts.
constexpr int64_t kLeastColumnsInParts = 2048;
// Rows of grad_weight, and columns of M, then begin where vector loads may.
constexpr int64_t kPartGrain = 8;

// As AddProducts(), of a contribution with a list.
absl::Status AddList(EngineCore& core, const CudaHead& head, const WeightContribution& contribution, float factor,
                     const WeightScratch& scratch, bool overwrites, const WeightTarget& to) {
  const cudaStream_t stream = core.stream();
  const ShardWeights shard = head.shard_weights(0);
  EntryList list = contribution.list;
  if (overwrites) {
    const size_t bytes = static_cast<size_t>(shard.columns * shard.stride) * sizeof(float);
    HEADWATER_RETURN_IF_ERROR(core.Check(cudaMemsetAsync(to.weight, 0, bytes, stream), "clearing grad_weight"));
  }
  if (Workspace* const space = scratch.kept_list; space != nullptr) {
    const int64_t mark = space->used();
    HEADWATER_RETURN_IF_ERROR(core.Check(LaunchPlanKept(shard.stride, space, &list, stream), "a kept list's tables"));
    // Later work on the stream may have the memory.
    space->Rewind(mark);
  }
  if (list.dense.count > 0) {
    ProductShape shape;
    shape.kind = ProductKind::kGradWeight;
    shape.rows = contribution.scaled.rows;
    shape.vocab = shape.a_stride = list.dense.count;
    shape.is_part = true;
    shape.width = shard.width;
    shape.b_stride = contribution.scaled.stride;
    shape.out_stride = shard.stride;
    HEADWATER_RETURN_IF_ERROR(
        core.products().Run(shape, list.dense.matrix, contribution.scaled.data, list.dense.rows, factor, nullptr, stream));
    HEADWATER_RETURN_IF_ERROR(
        core.Check(LaunchScatterDenseRows(list.dense, shard.stride, !overwrites, to.weight, stream), "adding dense rows"));
  }
  HEADWATER_RETURN_IF_ERROR(
      core.Check(LaunchAddEntriesTimesRows(list, contribution.scaled, factor, to.weight, stream), "the list's grad_weight"));
  // The products left what was there, and 0 times an entry that is not finite is not 0.
  return core.Check(ClearPadding({to.weight, shard.columns, shard.width, shard.stride, Element::kFloat32}, stream),
                    "clearing grad_weight's padding");
}

}  // namespace

int64_t ColumnsAtOnce(const CudaHead& head, int64_t columns) {
  if (head.group() == nullptr || columns < kLeastColumnsInParts) return columns;
  return RoundUp(columns / 2, kPartGrain);
}

absl::Status AddTargets(EngineCore& core, const CudaHead& head, const WeightContribution& contribution, float factor,
                        absl::FunctionRef<WeightTarget(int32_t rank)> target) {
  if (!contribution.has_targets) return absl::OkStatus();
  for (int32_t rank = 0; rank < head.shard_count(); ++rank) {
    const ShardWeights shard = head.shard_weights(rank);
    if (shard.columns == 0) continue;
    const WeightTarget to = target(rank);
    HEADWATER_RETURN_IF_ERROR(core.Check(LaunchAddTargetRows(contribution.hidden, contribution.target_factor, contribution.targets,
                                                             contribution.groups, shard, factor, to.weight, to.bias, core.stream()),
                                         "adding the targets' rows to grad_weight"));
  }
  return absl::OkStatus();
}

absl::Status AddProducts(EngineCore& core, const CudaHead& head, const WeightContribution& contribution, float factor,
                         const WeightScratch& scratch, bool overwrites, absl::FunctionRef<WeightTarget(int32_t rank)> target) {
  const cudaStream_t stream = core.stream();
  if (contribution.list.rows > 0) return AddList(core, head, contribution, factor, scratch, overwrites, target(0));
  const float* factor_device = contribution.scaled_factor;
  if (factor_device != nullptr && factor != 1) {
    HEADWATER_RETURN_IF_ERROR(core.Check(cudaMemsetAsync(scratch.factor, 0, sizeof(float), stream), "clearing a factor"));
    HEADWATER_RETURN_IF_ERROR(
        core.Check(LaunchAddScaled(contribution.scaled_factor, 1, factor, scratch.factor, stream), "scaling a factor"));
    factor_device = scratch.factor;
  }
  for (int32_t rank = 0; rank < head.shard_count(); ++rank) {
    const ShardWeights shard = head.shard_weights(rank);
    if (shard.columns == 0) continue;
    const WeightTarget to = target(rank);
    const ConstMatrix& matrix = contribution.matrices[static_cast<size_t>(rank)];
    ProductShape shape;
    shape.kind = ProductKind::kGradWeight;
    shape.element = matrix.element;
    shape.rows = contribution.scaled.rows;
    shape.width = shard.width;
    shape.a_stride = matrix.stride;
    shape.b_stride = contribution.scaled.stride;
    shape.out_stride = shard.stride;
    shape.adds = !overwrites;
    const int64_t at_once = ColumnsAtOnce(head, shard.columns);
    for (int64_t start = 0; start < shard.columns; start += at_once) {
      shape.vocab = std::min(at_once, shard.columns - start);
      HEADWATER_RETURN_IF_ERROR(core.products().Run(shape, Advance(matrix.data, matrix.element, start), contribution.scaled.data,
                                                    to.weight + start * shard.stride, factor, factor_device, stream));
    }
    if (to.bias != nullptr) {
      HEADWATER_RETURN_IF_ERROR(core.Check(
          LaunchAddGradBias(matrix, contribution.row_factor, factor, scratch.bias, to.bias, stream), "adding to grad_bias"));
    }
  }
  return absl::OkStatus();
}

absl::Status AddWeightContribution(EngineCore& core, const CudaHead& head, const WeightContribution& contribution, float factor,
                                   const WeightScratch& scratch, bool overwrites,
                                   absl::FunctionRef<WeightTarget(int32_t rank)> target) {
  if (!overwrites) HEADWATER_RETURN_IF_ERROR(AddTargets(core, head, contribution, factor, target));
  HEADWATER_RETURN_IF_ERROR(AddProducts(core, head, contribution, factor, scratch, overwrites, target));
  return overwrites ? AddTargets(core, head, contribution, factor, target) : absl::OkStatus();
}

}  // namespace headwater::cuda
