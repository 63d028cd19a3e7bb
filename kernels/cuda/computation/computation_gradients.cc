// The gradients' half of a computation: from M and its factors to grad_hidden and grad_weight.
#include <algorithm>

#include "kernels/cuda/computation/computation.h"
#include "kernels/cuda/computation/deferred_grad_weight.h"
#include "kernels/cuda/computation/matrix_rows.h"
#include "kernels/cuda/computation/target_groups.h"
#include "kernels/cuda/profile_range.h"
#include "kernels/cuda/rows/conversions.h"

namespace headwater::cuda {

bool Computation::Defers(const Work& work) const {
  // A deferred product has other calls' rows in it, which deterministic mode excludes.
  if (core_.options().deterministic || whole_workspace_ || work.staged != nullptr || !work.backward ||
      work.term->plan->grad_weight == GradWeightMode::kNone || MayList(*work.term, work.rows)) {
    return false;
  }
  const bool leaves = work.wants_grad_hidden && std::any_of(work.parts.begin(), work.parts.end(),
                                                            [](const Part& part) { return part.member->gradient_leaves; });
  const bool overlaps = leaves || group_ != nullptr || work.parts.size() > 1;
  if (overlaps && work.rows > DeferredGradWeight::kMaxOverlappedRows) return false;
  return core_.deferred().Takes(*work.term->head, work.term->MatrixElement(), work.rows);
}

absl::Status Computation::ReserveOperands(Work* work) {
  absl::StatusOr<DeferredGradWeight::Operands> operands = core_.deferred().Reserve(work->term->head, work->rows);
  if (!operands.ok()) return operands.status();
  work->waits = true;
  TermBuffers& own = work->own;
  own.matrices = {operands->matrix};
  // Only the targets' share reads the rows themselves.
  if (work->term->plan->hard_weight > 0) own.hidden = operands->hidden;
  own.scaled = operands->scaled;
  own.row_factor = operands->row_factor;
  own.target_factor = operands->target_factor;
  own.targets = operands->targets;
  return absl::OkStatus();
}

absl::Status Computation::MakeGroups(Work* work) {
  const TermRun& term = *work->term;
  const bool adds_targets = work->backward && term.plan->grad_weight != GradWeightMode::kNone && term.plan->hard_weight > 0;
  if (!adds_targets || work->waits) return absl::OkStatus();
  int32_t* order = host_.Take<int32_t>(work->rows);
  int32_t* starts = host_.Take<int32_t>(work->rows + 1);
  const GroupCounts counts = GroupByTarget(work->targets, work->rows, order, starts);
  HEADWATER_RETURN_IF_ERROR(Upload(work->own.order, order, counts.rows));
  HEADWATER_RETURN_IF_ERROR(Upload(work->own.starts, starts, counts.groups + 1));
  work->groups = {work->own.order, work->own.starts, counts.groups};
  return absl::OkStatus();
}

absl::Status Computation::MultiplyByWeight(Work* work, const Slice& slice, int32_t rank) {
  const TermRun& term = *work->term;
  const ShardWeights shard = term.head->shard_weights(rank);
  const ConstMatrix matrix = MatrixOf(*work, slice, rank);
  ProductShape shape;
  shape.kind = ProductKind::kGradHidden;
  shape.element = matrix.element;
  shape.rows = slice.count;
  shape.vocab = shard.columns;
  shape.width = shard.width;
  shape.a_stride = matrix.stride;
  shape.b_stride = shape.out_stride = shard.stride;
  float* const out = ProductOut(*work, slice);
  if (!work->lists.empty()) {
    const DenseColumns& dense = work->list.dense;
    shape.vocab = shape.a_stride = dense.count;
    shape.is_part = true;
    if (dense.count > 0) {
      const uint16_t* const rows = dense.matrix + slice.first * dense.count;
      HEADWATER_RETURN_IF_ERROR(core_.products().Run(shape, rows, dense.rows, out, 1, nullptr, stream_));
    }
    for (const ListedRows& listed : work->lists) {
      const int64_t row = listed.rows.first - slice.first;
      if (row < 0 || row >= slice.count) continue;
      HEADWATER_RETURN_IF_ERROR(
          Check(LaunchEntriesTimesWeight(listed.list, shard, dense.count > 0, out + row * shard.stride, stream_),
                "the list's grad_hidden"));
    }
    return absl::OkStatus();
  }
  if (shard.element == matrix.element || shard.columns == 0) {
    return core_.products().Run(shape, matrix.data, shard.weight, out, 1, nullptr, stream_);
  }
  // 16-bit weights in the wide form: panel by panel.
  const int64_t panel_rows = std::max<int64_t>(kPanelBytes / (shard.stride * 4), 1);
  for (int64_t start = 0; start < shard.columns; start += panel_rows) {
    shape.vocab = std::min(panel_rows, shard.columns - start);
    shape.adds = start > 0;
    HEADWATER_RETURN_IF_ERROR(Check(LaunchConvert(Advance(shard.weight, shard.element, start * shard.stride), shard.element,
                                                  shape.vocab * shard.stride, work->own.panel, Element::kFloat32, stream_),
                                    "widening weights"));
    HEADWATER_RETURN_IF_ERROR(
        core_.products().Run(shape, static_cast<const float*>(matrix.data) + start, work->own.panel, out, 1, nullptr, stream_));
  }
  return absl::OkStatus();
}

float* Computation::ProductOut(const Work& work, const Slice& slice) const {
  if (!SumsShares(work)) return work.own.product;
  // Rows of the only term are the chunk's, in its order.
  return work.parts.front().shared.sum + slice.first * PaddedWidth(work.term->head->spec().hidden_size);
}

absl::Status Computation::FinishGradHidden(Work* work, const Slice& slice, int32_t rank) {
  return ForEachPart(*work, slice, [&](const Part& part, const Slice& rows) {
    return FinishPart(work, part, rows, rows.first - slice.first, rank);
  });
}

GradHiddenTarget Computation::OutputOf(const Member& member, const ChunkBuffers& buffers, const int32_t* map, uint8_t* non_finite) {
  const MutableRowsView& out = member.micro_batch->grad_hidden;
  GradHiddenTarget target;
  target.out = out.memory == MemorySpace::kDevice ? out.data : buffers.out;
  target.out_element = ElementOf(out.data_type);
  target.out_stride = out.column_count;
  target.map = map;
  target.scale = static_cast<float>(member.micro_batch->grad_hidden_scale);
  target.non_finite = non_finite;
  return target;
}

absl::Status Computation::FinishPart(Work* work, const Part& part, const Slice& slice, int64_t product_row, int32_t rank) {
  const ShardWeights shard = work->term->head->shard_weights(rank);
  if (SumsShares(*work)) {
    const MutableMatrix share = {ProductOut(*work, slice), slice.count, shard.width, shard.stride, Element::kFloat32};
    return Check(LaunchFinishShare(share, work->own.row_factor + slice.first, work->own.target_factor + slice.first,
                                   work->own.targets + slice.first, shard, stream_),
                 "finishing a rank's share of grad_hidden");
  }
  const ConstMatrix product = {work->own.product + product_row * shard.stride, slice.count, shard.width, shard.stride,
                               Element::kFloat32};
  GradHiddenTarget target;
  if (part.shared.sum != nullptr) {
    target.sum = part.shared.sum;
    target.sum_stride = shard.stride;
    target.map = work->own.chunk_rows + slice.first;
  } else {
    // The only term of its chunk: its rows are the chunk's.
    target = OutputOf(*part.member, part.shared, work->own.output_rows + slice.first,
                      part.shared.non_finite + (slice.first - part.first));
  }
  return Check(LaunchFinishGradHidden(product, work->own.row_factor + slice.first, work->own.target_factor + slice.first,
                                      work->own.targets + slice.first, shard, target, stream_),
               "finishing grad_hidden");
}

absl::Status Computation::AddGradHidden(Work* work, const Slice& slice, bool product_is_there) {
  HEADWATER_RETURN_IF_ERROR(ComputeGradHidden(work, slice, product_is_there));
  return DeliverGradHidden(work, slice);
}

absl::Status Computation::ComputeGradHidden(Work* work, const Slice& slice, bool product_is_there) {
  if (!work->wants_grad_hidden) return absl::OkStatus();
  const ProfileRange range("grad_hidden");
  for (int32_t rank = 0; rank < work->term->head->shard_count(); ++rank) {
    if (work->term->head->shard_weights(rank).columns == 0) {
      HEADWATER_RETURN_IF_ERROR(ClearShare(work, slice));
      continue;
    }
    if (!product_is_there || rank > 0) HEADWATER_RETURN_IF_ERROR(MultiplyByWeight(work, slice, rank));
    HEADWATER_RETURN_IF_ERROR(FinishGradHidden(work, slice, rank));
  }
  if (!IsOnlyTerm(*work)) return absl::OkStatus();
  return ForEachPart(*work, slice, [&](const Part& part, const Slice& rows) {
    return SumOverRanks(*part.chunk, part.shared, work->hidden.columns, {rows.first - part.first, rows.count});
  });
}

absl::Status Computation::DeliverGradHidden(Work* work, const Slice& slice) {
  // Where other terms of the chunk add to these rows, the chunk's end sees to them.
  if (!work->wants_grad_hidden || !IsOnlyTerm(*work)) return absl::OkStatus();
  HEADWATER_RETURN_IF_ERROR(ForEachPart(*work, slice, [&](const Part& part, const Slice& rows) {
    // A sum that several shards of this device have added to has its factors.
    ShareFactors factors;
    if (SumsShares(*work)) factors = {work->own.row_factor + rows.first, work->own.target_factor + rows.first};
    return WriteGradHidden(*part.member, *part.chunk, part.shared, {rows.first - part.first, rows.count}, factors);
  }));
  const bool any_leaves = std::any_of(work->parts.begin(), work->parts.end(), [](const Part& part) {
    return part.member->micro_batch->grad_hidden.memory == MemorySpace::kHost;
  });
  if (!any_leaves) return absl::OkStatus();
  HEADWATER_RETURN_IF_ERROR(core_.Order(gradient_stream(), core_.download_stream()));
  return ForEachPart(*work, slice, [&](const Part& part, const Slice& rows) {
    return SendGradHidden({part.member, part.chunk, part.shared.out, {rows.first - part.first, rows.count}});
  });
}

absl::Status Computation::AddGradWeight(Work* work, const Slice& slice) {
  const TermRun& term = *work->term;
  if (!work->backward || term.plan->grad_weight == GradWeightMode::kNone) return absl::OkStatus();
  const ProfileRange range("grad_weight");
  TermBuffers& own = work->own;
  const int64_t first = slice.first;
  const Element element = term.MatrixElement();
  const int64_t stride = PaddedWidth(term.head->spec().hidden_size);
  WeightContribution contribution;
  for (int32_t rank = 0; rank < term.head->shard_count(); ++rank) contribution.matrices.push_back(MatrixOf(*work, slice, rank));
  if (!work->lists.empty()) contribution.list = work->list;
  if (work->kept_matrix != nullptr && work->overflowed) {
    ConstMatrix& matrix = contribution.matrices.front();
    // The slot has room for exponentials: 16-bit rows without gaps.
    const int64_t kept_stride = ProductStride(matrix.columns);
    void* kept = Advance(work->kept_matrix, element, first * kept_stride);
    const size_t row_bytes = static_cast<size_t>(kept_stride * BytesOf(element));
    HEADWATER_RETURN_IF_ERROR(
        Check(cudaMemcpy2DAsync(kept, row_bytes, matrix.data, static_cast<size_t>(matrix.stride * BytesOf(element)), row_bytes,
                                static_cast<size_t>(slice.count), cudaMemcpyDeviceToDevice, stream_),
              "keeping the gradient of the logits"));
    matrix.data = kept;
    matrix.stride = kept_stride;
  }
  const ConstMatrix hidden = Rows(work->hidden, first, slice.count);
  void* scaled = Advance(own.scaled, element, first * stride);
  contribution.scaled = {scaled, slice.count, work->hidden.columns, stride, element};
  contribution.row_factor = own.row_factor + first;
  HEADWATER_RETURN_IF_ERROR(Check(LaunchScaleRows(hidden, contribution.row_factor,
                                                  {scaled, slice.count, work->hidden.columns, stride, element}, own.alpha, stream_),
                                  "scaling hidden states"));
  if (element == Element::kFloat16) contribution.scaled_factor = own.alpha;
  if (work->waits) {
    // Once for all slices.
    if (first + slice.count < work->rows) return absl::OkStatus();
    HEADWATER_RETURN_IF_ERROR(Decide());
    core_.deferred().Add(work->rows, term.plan->hard_weight > 0 ? work->targets : nullptr);
    return absl::OkStatus();
  }
  // Once for all slices, when the factors of all rows are there.
  if (work->groups.group_count > 0 && term.plan->hard_weight > 0 && first + slice.count == work->rows) {
    contribution.has_targets = true;
    contribution.hidden = work->hidden;
    contribution.target_factor = own.target_factor;
    contribution.targets = own.targets;
    contribution.groups = work->groups;
  }
  if (work->staged != nullptr && work->staged->keeps_rows) {
    work->staged->kept.push_back(std::move(contribution));
    return absl::OkStatus();
  }
  if (term.plan->grad_weight == GradWeightMode::kAccumulate) HEADWATER_RETURN_IF_ERROR(Decide());
  bool overwrites = false;
  if (work->staged == nullptr) {
    // Earlier rows are added first.
    const absl::StatusOr<bool> counts_as_zero = core_.deferred().FlushBefore(term.head);
    if (!counts_as_zero.ok()) return counts_as_zero.status();
    overwrites = *counts_as_zero;
    term.head->set_gradient_known(!overwrites);  // if it is left half-way
  }
  if (overwrites && contribution.has_targets) {
    // The targets' rows are added behind the product, when the caller's hidden states may be gone. grad_hidden's product is not
    // needed any more.
    HEADWATER_RETURN_IF_ERROR(
        Check(cudaMemcpyAsync(own.product, contribution.hidden.data, static_cast<size_t>(work->rows * stride * BytesOf(element)),
                              cudaMemcpyDeviceToDevice, stream_),
              "keeping hidden states"));
    contribution.hidden.data = own.product;
  }
  const WeightScratch scratch = {own.alpha + 1, own.bias_scratch};
  const auto target = [&](int32_t rank) {
    return work->staged == nullptr ? term.head->accumulator(rank) : term.head->staging_slot(rank, work->staged->slot.index());
  };
  if (!overwrites) HEADWATER_RETURN_IF_ERROR(AddTargets(core_, *term.head, contribution, 1, target));
  if (work->results_leave) {
    HEADWATER_RETURN_IF_ERROR(Check(cudaEventRecord(core_.results_event(), stream_), "recording an event"));
    products_go_on_ = true;
    // They read scaled rows.
    left_idle_ = RawHiddenOf(work->parts.front());
  }
  HEADWATER_RETURN_IF_ERROR(AddProducts(core_, *term.head, contribution, 1, scratch, overwrites, target));
  if (!overwrites) return absl::OkStatus();
  HEADWATER_RETURN_IF_ERROR(AddTargets(core_, *term.head, contribution, 1, target));
  term.head->set_gradient_known(true);
  return absl::OkStatus();
}

absl::Status Computation::AddOwedGradWeight(Work* work) {
  if (!work->owes_grad_weight) return absl::OkStatus();
  work->owes_grad_weight = false;
  return AddGradWeight(work, {0, work->rows});
}

absl::Status Computation::WriteGradHidden(const Member& member, const Chunk& chunk, const ChunkBuffers& buffers, const Slice& slice,
                                          const ShareFactors& factors) {
  const MutableRowsView& out = member.micro_batch->grad_hidden;
  if (!chunk.backward || out.data == nullptr || buffers.sum == nullptr || !has_results()) return absl::OkStatus();
  const int64_t stride = PaddedWidth(out.column_count);
  const ConstMatrix sum = {buffers.sum + slice.first * stride, slice.count, out.column_count, stride, Element::kFloat32};
  const GradHiddenTarget target = OutputOf(member, buffers, buffers.output_rows + slice.first, buffers.non_finite + slice.first);
  return Check(LaunchWriteGradHidden(sum, factors, target, gradient_stream()), "writing grad_hidden");
}

absl::Status Computation::SumOverRanks(const Chunk& chunk, const ChunkBuffers& buffers, int64_t width, const Slice& slice) {
  if (group_ == nullptr || !chunk.backward || buffers.sum == nullptr) return absl::OkStatus();
  const int64_t stride = PaddedWidth(width);
  HEADWATER_RETURN_IF_ERROR(core_.Order(stream_, gradient_stream()));
  return group_->sums().ReduceSum(buffers.sum + slice.first * stride, slice.count * stride, gradient_stream());
}

absl::Status Computation::ClearShare(Work* work, const Slice& slice) {
  const Part& part = work->parts.front();
  if (group_ == nullptr || part.chunk->terms.size() > 1) return absl::OkStatus();
  const int64_t stride = PaddedWidth(work->hidden.columns);
  return Check(cudaMemsetAsync(part.shared.sum + (slice.first - part.first) * stride, 0,
                               static_cast<size_t>(slice.count * stride) * sizeof(float), stream_),
               "clearing a rank's share of grad_hidden");
}

absl::Status Computation::SendGradHidden(const Delivery& delivery) {
  const MutableRowsView& out = delivery.member->micro_batch->grad_hidden;
  if (!delivery.chunk->backward || out.data == nullptr || out.memory == MemorySpace::kDevice || !has_results()) {
    return absl::OkStatus();
  }
  if (delivery.member->grad_hidden_place != Place::kPageable) return Send(delivery);
  // That copy would not return before the rows are there, and the device have nothing to do meanwhile.
  postponed_.push_back(delivery);
  return absl::OkStatus();
}

absl::Status Computation::SendPostponed() {
  for (const Delivery& delivery : postponed_) HEADWATER_RETURN_IF_ERROR(Send(delivery));
  postponed_.clear();
  return absl::OkStatus();
}

absl::Status Computation::Send(const Delivery& delivery) {
  const ProfileRange range("download");
  const MutableRowsView& out = delivery.member->micro_batch->grad_hidden;
  const int64_t row_bytes = out.column_count * ElementBytes(out.data_type);
  const cudaStream_t stream = core_.download_stream();
  // To pageable memory: until the ranks' sum is there.
  const DeviceGroup::Wait wait(group_);
  HEADWATER_RETURN_IF_ERROR(
      ForEachRun(BatchRowsOf(*delivery.chunk, delivery.slice), [&](int64_t index, int64_t row, int64_t count) {
        return Check(cudaMemcpyAsync(static_cast<char*>(out.data) + row * row_bytes,
                                     static_cast<const char*>(delivery.out) + (delivery.slice.first + index) * row_bytes,
                                     static_cast<size_t>(count * row_bytes), cudaMemcpyDefault, stream),
                     "the way back of grad_hidden");
      }));
  if (flow_ == nullptr || !IsOnHost(delivery.member->grad_hidden_place)) return absl::OkStatus();
  const Chunk& chunk = *delivery.chunk;
  const MicroBatchPlan& plan = *delivery.member->plan;
  const int64_t end = delivery.slice.first + delivery.slice.count;
  const bool chunk_goes_on = end < static_cast<int64_t>(chunk.batch_rows.size());
  const int64_t row_end = chunk_goes_on ? chunk.batch_rows[static_cast<size_t>(end)]
                                        : FinalRowsAfter(plan, static_cast<size_t>(&chunk - plan.chunks.data()));
  notes_.push_back({flow_, row_end, group_});
  return Check(cudaLaunchHostFunc(stream, &TellFlow, &notes_.back()), "telling of rows");
}

void Computation::TellFlow(void* note) {
  const auto* ready = static_cast<const ReadyNote*>(note);
  // A broken group leaves sums half-way, and the device continues behind them.
  if (ready->group != nullptr && !ready->group->status().ok()) return;
  ready->flow->GradHiddenReady(ready->row_end);
}

}  // namespace headwater::cuda
