#include "kernels/cuda/products/algorithm_search.h"

#include <algorithm>

#include "kernels/cuda/computation/deferred_grad_weight.h"
#include "kernels/cuda/computation/term_form.h"
#include "kernels/cuda/computation/weight_contribution.h"
#include "kernels/cuda/rows/conversions.h"

namespace headwater::cuda {
namespace {

// About the size of trained weights and normed hidden states; power, and so the ranking, depends on the values.
constexpr float kWeightScale = 0.02f;
constexpr float kHiddenScale = 1.0f;

absl::Status Fill(EngineCore& core, void* out, Element element, int64_t count, float scale) {
  return core.Check(LaunchFillNormal(out, element, count, /*seed=*/1, scale, core.stream()), "filling operands");
}

absl::Status SearchShard(EngineCore& core, CudaHead& head, int32_t rank) {
  const ShardWeights shard = head.shard_weights(rank);
  if (shard.columns == 0) return absl::OkStatus();
  HEADWATER_RETURN_IF_ERROR(Fill(core, const_cast<void*>(shard.weight), shard.element, shard.columns * shard.stride, kWeightScale));
  for (const int64_t rows : Products::kRowBuckets) {
    Workspace workspace(core.workspace().As<void>(), core.workspace().bytes());
    const int64_t stride = ProductStride(shard.columns);
    // Products of fp32, and M in the first half of each row or without gaps.
    float* logits = workspace.Take<float>(rows * stride);
    void* hidden = workspace.TakeBytes(rows * shard.stride * BytesOf(shard.element));
    float* grad_hidden = workspace.Take<float>(rows * shard.stride);
    bool matrix_only = false;  // exponentials, or an M whose logits come slice by slice
    if (!workspace.fits()) {
      matrix_only = true;
      workspace.Rewind(0);
      logits = static_cast<float*>(workspace.TakeBytes(rows * stride * 2));
      hidden = workspace.TakeBytes(rows * shard.stride * BytesOf(shard.element));
      grad_hidden = workspace.Take<float>(rows * shard.stride);
      if (!workspace.fits()) break;
    }
    HEADWATER_RETURN_IF_ERROR(Fill(core, hidden, shard.element, rows * shard.stride, kHiddenScale));
    ProductShape shape;
    shape.element = shard.element;
    shape.rows = rows;
    shape.vocab = shard.columns;
    shape.width = shard.width;
    if (!matrix_only) {
      shape.kind = ProductKind::kLogits;
      shape.a_stride = shape.b_stride = shard.stride;
      shape.out_stride = stride;
      HEADWATER_RETURN_IF_ERROR(core.products().Search(shape, hidden, shard.weight, logits, core.stream()));
    }
    HEADWATER_RETURN_IF_ERROR(Fill(core, logits, shard.element, rows * stride, kHiddenScale));
    shape.kind = ProductKind::kGradHidden;
    shape.a_stride = stride;
    shape.b_stride = shape.out_stride = shard.stride;
    HEADWATER_RETURN_IF_ERROR(core.products().Search(shape, logits, shard.weight, grad_hidden, core.stream()));
    if (!head.spec().trainable) continue;
    shape.kind = ProductKind::kGradWeight;
    shape.adds = true;
    shape.vocab = ColumnsAtOnce(head, shard.columns);
    HEADWATER_RETURN_IF_ERROR(core.products().Search(shape, logits, hidden, head.accumulator(rank).weight, core.stream()));
    if (shape.vocab == shard.columns) continue;
    shape.vocab = shard.columns - shape.vocab;
    HEADWATER_RETURN_IF_ERROR(core.products().Search(shape, logits, hidden, head.accumulator(rank).weight, core.stream()));
  }
  HEADWATER_RETURN_IF_ERROR(
      core.Check(cudaMemsetAsync(const_cast<void*>(shard.weight), 0,
                                 static_cast<size_t>(shard.columns * shard.stride * BytesOf(shard.element)), core.stream()),
                 "clearing the weights"));
  if (!head.spec().trainable) return absl::OkStatus();
  return core.Check(
      cudaMemsetAsync(head.accumulator(rank).weight, 0, static_cast<size_t>(shard.columns * shard.stride) * 4, core.stream()),
      "clearing the accumulator");
}

}  // namespace

absl::Status SearchAlgorithms(EngineCore& core, CudaHead& head) {
  if (!core.options().timed_search || core.options().deterministic || head.spec().data_type == DataType::kFloat32)
    return absl::OkStatus();
  // The whole workspace is used; rows of other heads may wait there.
  HEADWATER_RETURN_IF_ERROR(core.deferred().Flush());
  for (int32_t rank = 0; rank < head.shard_count(); ++rank) HEADWATER_RETURN_IF_ERROR(SearchShard(core, head, rank));
  return core.Synchronize("the search for algorithms");
}

}  // namespace headwater::cuda
