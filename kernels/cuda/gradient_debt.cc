#include "kernels/cuda/gradient_debt.h"

#include <algorithm>

#include "headwater/kernels/error.h"
#include "kernels/cuda/profile_range.h"
#include "kernels/cuda/target_groups.h"
#include "kernels/cuda/term_form.h"
#include "kernels/cuda/workspace.h"

namespace headwater::cuda {
namespace {

constexpr int64_t kElementBytes = 2;

absl::Status CheckKnown(const CudaHead& head) {
  if (head.gradient_known()) return absl::OkStatus();
  return MakeError(ErrorReason::kEngineFailed, "the head's gradient is not known: adding to it was left half-way; discard it");
}

}  // namespace

GradientDebt::Layout GradientDebt::LayOut(const CudaHead& head, int64_t capacity, Workspace* workspace) {
  const ShardWeights shard = head.shard_weights(0);
  Layout layout;
  layout.matrix = workspace->TakeBytes(capacity * ProductStride(shard.columns) * kElementBytes);
  layout.hidden = workspace->TakeBytes(capacity * shard.stride * kElementBytes);
  layout.scaled = workspace->TakeBytes(capacity * shard.stride * kElementBytes);
  layout.row_factor = workspace->Take<float>(capacity);
  layout.target_factor = workspace->Take<float>(capacity);
  layout.targets = workspace->Take<int32_t>(capacity);
  layout.order = workspace->Take<int32_t>(capacity);
  layout.starts = workspace->Take<int32_t>(capacity + 1);
  layout.factor = workspace->Take<float>(1);
  layout.bias_scratch = workspace->TakeBytes(head.spec().has_bias ? GradBiasScratchBytes(shard.columns) : 0);
  return layout;
}

int64_t GradientDebt::BytesFor(const CudaHead& head, int64_t capacity) {
  Workspace workspace;
  LayOut(head, capacity, &workspace);
  return workspace.used();
}

int64_t GradientDebt::Capacity(const CudaHead& head) const {
  int64_t capacity = kMaxRows;
  while (capacity >= kMaxMicroBatchRows && BytesFor(head, capacity) + Workspace::kAlignment > ShareOf(core_.workspace().bytes()))
    capacity /= 2;
  return capacity >= kMaxMicroBatchRows ? capacity : 0;
}

bool GradientDebt::Takes(const CudaHead& head, Element element, int64_t rows) const {
  return rows <= kMaxMicroBatchRows && element == Element::kBFloat16 && head.shard_count() == 1 &&
         head.shard_weights(0).columns > 0 && Capacity(head) > 0;
}

absl::Status GradientDebt::Prepare() {
  if (upload_.bytes() > 0) return absl::OkStatus();
  absl::StatusOr<PinnedMemory> memory = PinnedMemory::Allocate((2 * kMaxRows + 1) * 4);
  if (!memory.ok()) return memory.status();
  upload_ = *std::move(memory);
  targets_.reserve(static_cast<size_t>(kMaxRows));
  return absl::OkStatus();
}

absl::Status GradientDebt::Copy(void* to, const void* from, int64_t bytes) {
  return core_.Check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, core_.stream()),
                     "putting a gradient off");
}

// Makes the debt `head`'s, with room for `rows` more.
absl::Status GradientDebt::Open(CudaHead* head, int64_t rows) {
  if (head_ != nullptr && (head_ != head || rows_ + rows > capacity_)) HEADWATER_RETURN_IF_ERROR(Settle());
  if (head_ != nullptr) return absl::OkStatus();
  HEADWATER_RETURN_IF_ERROR(Prepare());
  capacity_ = Capacity(*head);
  const int64_t share = ShareOf(core_.workspace().bytes());
  const int64_t start = RoundUp(core_.workspace().bytes() - share, Workspace::kAlignment);
  Workspace workspace(core_.workspace().As<char>() + start, share);
  layout_ = LayOut(*head, capacity_, &workspace);
  head_ = head;
  return absl::OkStatus();
}

absl::Status GradientDebt::Add(CudaHead* head, const WeightContribution& contribution, const int32_t* host_targets) {
  const int64_t rows = contribution.scaled.rows;
  HEADWATER_RETURN_IF_ERROR(CheckKnown(*head));
  HEADWATER_RETURN_IF_ERROR(Open(head, rows));
  const ShardWeights shard = head->shard_weights(0);
  const int64_t stride = ProductStride(shard.columns);
  const int64_t row_bytes = shard.stride * kElementBytes;
  const ConstMatrix& matrix = contribution.matrices.front();
  HEADWATER_RETURN_IF_ERROR(
      core_.Check(cudaMemcpy2DAsync(static_cast<char*>(layout_.matrix) + rows_ * stride * kElementBytes,
                                    static_cast<size_t>(stride * kElementBytes), matrix.data,
                                    static_cast<size_t>(matrix.stride * kElementBytes), static_cast<size_t>(stride * kElementBytes),
                                    static_cast<size_t>(rows), cudaMemcpyDeviceToDevice, core_.stream()),
                  "putting a gradient off"));
  HEADWATER_RETURN_IF_ERROR(
      Copy(static_cast<char*>(layout_.scaled) + rows_ * row_bytes, contribution.scaled.data, rows * row_bytes));
  HEADWATER_RETURN_IF_ERROR(Copy(layout_.row_factor + rows_, contribution.row_factor, rows * 4));
  if (contribution.has_targets) {
    HEADWATER_RETURN_IF_ERROR(
        Copy(static_cast<char*>(layout_.hidden) + rows_ * row_bytes, contribution.hidden.data, rows * row_bytes));
    HEADWATER_RETURN_IF_ERROR(Copy(layout_.target_factor + rows_, contribution.target_factor, rows * 4));
    HEADWATER_RETURN_IF_ERROR(Copy(layout_.targets + rows_, contribution.targets, rows * 4));
    targets_.insert(targets_.end(), host_targets, host_targets + rows);
  } else {
    targets_.insert(targets_.end(), static_cast<size_t>(rows), -1);
  }
  rows_ += rows;
  return absl::OkStatus();
}

absl::Status GradientDebt::Settle() {
  if (head_ == nullptr) return absl::OkStatus();
  const ProfileRange range("settle_debt");
  const ShardWeights shard = head_->shard_weights(0);
  WeightContribution contribution;
  contribution.matrices = {{layout_.matrix, rows_, shard.columns, ProductStride(shard.columns), Element::kBFloat16}};
  contribution.hidden = {layout_.hidden, rows_, shard.width, shard.stride, Element::kBFloat16};
  contribution.scaled = {layout_.scaled, rows_, shard.width, shard.stride, Element::kBFloat16};
  contribution.row_factor = layout_.row_factor;
  if (upload_in_use_) {
    HEADWATER_RETURN_IF_ERROR(core_.Synchronize("settling a debt"));
    upload_in_use_ = false;
  }
  int32_t* order = upload_.As<int32_t>();
  int32_t* starts = order + kMaxRows;
  const GroupCounts counts = GroupByTarget(targets_.data(), rows_, order, starts);
  if (counts.groups > 0) {
    HEADWATER_RETURN_IF_ERROR(core_.Check(
        cudaMemcpyAsync(layout_.order, order, static_cast<size_t>(counts.rows) * 4, cudaMemcpyHostToDevice, core_.stream()),
        "an upload of row data"));
    HEADWATER_RETURN_IF_ERROR(core_.Check(
        cudaMemcpyAsync(layout_.starts, starts, static_cast<size_t>(counts.groups + 1) * 4, cudaMemcpyHostToDevice, core_.stream()),
        "an upload of row data"));
    upload_in_use_ = true;
    contribution.has_targets = true;
    contribution.target_factor = layout_.target_factor;
    contribution.targets = layout_.targets;
    contribution.groups = {layout_.order, layout_.starts, counts.groups};
  }
  CudaHead& head = *head_;
  const WeightScratch scratch = {layout_.factor, layout_.bias_scratch};
  Forget(head);
  head.set_gradient_known(false);  // if it is left half-way
  HEADWATER_RETURN_IF_ERROR(
      AddWeightContribution(core_, head, contribution, 1, scratch, [&](int32_t rank) { return head.accumulator(rank); }));
  head.set_gradient_known(true);
  return absl::OkStatus();
}

absl::Status GradientDebt::SettleFor(const CudaHead& head) {
  HEADWATER_RETURN_IF_ERROR(CheckKnown(head));
  return head_ == &head ? Settle() : absl::OkStatus();
}

void GradientDebt::Forget(const CudaHead& head) {
  if (head_ != &head) return;
  head_ = nullptr;
  capacity_ = rows_ = 0;
  targets_.clear();
}

}  // namespace headwater::cuda
