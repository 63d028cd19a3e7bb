#include "kernels/cuda/computation/deferred_grad_weight.h"

#include <algorithm>

#include "headwater/kernels/error.h"
#include "kernels/cuda/computation/matrix_rows.h"
#include "kernels/cuda/computation/term_form.h"
#include "kernels/cuda/computation/workspace.h"
#include "kernels/cuda/profile_range.h"

namespace headwater::cuda {
namespace {

constexpr Element kElement = Element::kBFloat16;
constexpr int64_t kElementBytes = BytesOf(kElement);
constexpr int64_t kMinCapacity = 256;

absl::Status CheckKnown(const CudaHead& head) {
  if (head.gradient_known()) return absl::OkStatus();
  return MakeError(ErrorReason::kEngineFailed, "the head's gradient is not known: adding to it was left half-way; discard it");
}

}  // namespace

DeferredGradWeight::Layout DeferredGradWeight::LayOut(const CudaHead& head, int64_t capacity, Workspace* workspace) {
  const ShardWeights shard = head.shard_weights(0);
  Layout layout;
  layout.operands.matrix = workspace->TakeBytes(capacity * ProductStride(shard.columns) * kElementBytes);
  layout.operands.hidden = workspace->TakeBytes(capacity * shard.stride * kElementBytes);
  layout.operands.scaled = workspace->TakeBytes(capacity * shard.stride * kElementBytes);
  layout.operands.row_factor = workspace->Take<float>(capacity);
  layout.operands.target_factor = workspace->Take<float>(capacity);
  layout.operands.targets = workspace->Take<int32_t>(capacity);
  layout.order = workspace->Take<int32_t>(capacity);
  layout.starts = workspace->Take<int32_t>(capacity + 1);
  layout.factor = workspace->Take<float>(1);
  layout.bias_scratch = workspace->TakeBytes(head.spec().has_bias ? GradBiasScratchBytes(shard.columns) : 0);
  return layout;
}

int64_t DeferredGradWeight::BytesFor(const CudaHead& head, int64_t capacity) {
  Workspace workspace;
  LayOut(head, capacity, &workspace);
  return workspace.used();
}

int64_t DeferredGradWeight::Capacity(const CudaHead& head) const {
  int64_t capacity = kMaxRows;
  while (capacity >= kMinCapacity && BytesFor(head, capacity) + Workspace::kAlignment > ShareOf(core_.workspace().bytes()))
    capacity /= 2;
  return capacity >= kMinCapacity ? capacity : 0;
}

bool DeferredGradWeight::Takes(const CudaHead& head, Element element, int64_t rows) const {
  return rows <= kMaxMicroBatchRows && element == kElement && head.shard_count() == 1 && head.shard_weights(0).columns > 0 &&
         2 * rows <= Capacity(head);
}

absl::Status DeferredGradWeight::Prepare() {
  if (upload_.bytes() > 0) return absl::OkStatus();
  absl::StatusOr<PinnedMemory> memory = PinnedMemory::Allocate((2 * kMaxRows + 1) * 4);
  if (!memory.ok()) return memory.status();
  upload_ = *std::move(memory);
  return absl::OkStatus();
}

DeferredGradWeight::Operands DeferredGradWeight::OperandsOf(int64_t row) const {
  const ShardWeights shard = head_->shard_weights(0);
  const Operands& first = layout_.operands;
  return {Advance(first.matrix, kElement, row * ProductStride(shard.columns)),
          Advance(first.hidden, kElement, row * shard.stride),
          Advance(first.scaled, kElement, row * shard.stride),
          first.row_factor + row,
          first.target_factor + row,
          first.targets + row};
}

absl::StatusOr<DeferredGradWeight::Operands> DeferredGradWeight::Reserve(CudaHead* head, int64_t rows) {
  HEADWATER_RETURN_IF_ERROR(CheckKnown(*head));
  if (head_ != nullptr && (head_ != head || rows_ + rows > capacity_)) HEADWATER_RETURN_IF_ERROR(Flush());
  if (head_ == nullptr) {
    HEADWATER_RETURN_IF_ERROR(Prepare());
    capacity_ = Capacity(*head);
    const int64_t share = ShareOf(core_.workspace().bytes());
    const int64_t start = RoundUp(core_.workspace().bytes() - share, Workspace::kAlignment);
    Workspace workspace(core_.workspace().As<char>() + start, share);
    layout_ = LayOut(*head, capacity_, &workspace);
    head_ = head;
  }
  return OperandsOf(rows_);
}

void DeferredGradWeight::Add(int64_t rows, const int32_t* host_targets) {
  // Sorted here, where the device computes the rows, and not when it waits for the flush.
  if (host_targets != nullptr) targets_.Add(host_targets, rows, rows_);
  rows_ += rows;
}

absl::Status DeferredGradWeight::Flush() {
  if (head_ == nullptr) return absl::OkStatus();
  CudaHead& head = *head_;
  if (rows_ == 0) {
    Discard(head);
    return absl::OkStatus();
  }
  const ProfileRange range("flush_grad_weight");
  const ShardWeights shard = head.shard_weights(0);
  const Operands& operands = layout_.operands;
  WeightContribution contribution;
  contribution.matrices = {{operands.matrix, rows_, shard.columns, ProductStride(shard.columns), kElement}};
  contribution.hidden = {operands.hidden, rows_, shard.width, shard.stride, kElement};
  contribution.scaled = {operands.scaled, rows_, shard.width, shard.stride, kElement};
  contribution.row_factor = operands.row_factor;
  if (upload_in_use_) {
    HEADWATER_RETURN_IF_ERROR(core_.Synchronize("deferred products"));
    upload_in_use_ = false;
  }
  int32_t* order = upload_.As<int32_t>();
  int32_t* starts = order + kMaxRows;
  const GroupCounts counts = targets_.Write(order, starts);
  if (counts.groups > 0) {
    HEADWATER_RETURN_IF_ERROR(core_.Check(
        cudaMemcpyAsync(layout_.order, order, static_cast<size_t>(counts.rows) * 4, cudaMemcpyHostToDevice, core_.stream()),
        "an upload of row data"));
    HEADWATER_RETURN_IF_ERROR(core_.Check(
        cudaMemcpyAsync(layout_.starts, starts, static_cast<size_t>(counts.groups + 1) * 4, cudaMemcpyHostToDevice, core_.stream()),
        "an upload of row data"));
    upload_in_use_ = true;
    contribution.has_targets = true;
    contribution.target_factor = operands.target_factor;
    contribution.targets = operands.targets;
    contribution.groups = {layout_.order, layout_.starts, counts.groups};
  }
  const WeightScratch scratch = {layout_.factor, layout_.bias_scratch};
  const bool overwrites = head.TakeZeros();
  Discard(head);
  head.set_gradient_known(false);  // if it is left half-way
  HEADWATER_RETURN_IF_ERROR(AddWeightContribution(core_, head, contribution, 1, scratch, overwrites,
                                                  [&](int32_t rank) { return head.accumulator(rank); }));
  head.set_gradient_known(true);
  return absl::OkStatus();
}

absl::Status DeferredGradWeight::FlushFor(const CudaHead& head) {
  HEADWATER_RETURN_IF_ERROR(CheckKnown(head));
  if (head_ == &head) HEADWATER_RETURN_IF_ERROR(Flush());
  return head.WriteZeros();
}

absl::StatusOr<bool> DeferredGradWeight::FlushBefore(CudaHead* head) {
  HEADWATER_RETURN_IF_ERROR(CheckKnown(*head));
  if (head_ == head) HEADWATER_RETURN_IF_ERROR(Flush());
  return head->TakeZeros();
}

void DeferredGradWeight::Discard(const CudaHead& head) {
  if (head_ != &head) return;
  head_ = nullptr;
  capacity_ = rows_ = 0;
  targets_.Clear();
}

}  // namespace headwater::cuda
