#include "kernels/core/head_base.h"

#include <algorithm>
#include <cmath>

#include "headwater/kernels/error.h"
#include "kernels/core/head_tensors.h"

namespace headwater {

absl::Status ToFactor(double factor, float* out) {
  *out = static_cast<float>(factor);
  if (std::isfinite(*out)) return absl::OkStatus();
  return MakeError(ErrorReason::kInvalidField, "factor must be finite in fp32, got " + std::to_string(factor),
                   {{"field", "factor"}});
}

HeadBase::HeadBase(const HeadSpec& spec, MemoryPlan plan, std::vector<RowRange> shard_rows, const std::string& device,
                   int32_t slot_count)
    : spec_(spec),
      plan_(std::move(plan)),
      shard_rows_(std::move(shard_rows)),
      slot_count_(slot_count),
      slot_taken_(static_cast<size_t>(slot_count), false) {
  for (const RowRange& rows : shard_rows_) {
    if (rows.size() > 0) vocab_shards_.push_back({rows.start, rows.end, device});
  }
}

int64_t HeadBase::ElementCount(HeadTensor tensor) const {
  if (!HasTensor(spec_, tensor)) return 0;
  return IsWeightShaped(tensor) ? spec_.vocab_size * spec_.hidden_size : spec_.vocab_size;
}

DataType HeadBase::TensorDataType(HeadTensor tensor) const {
  return tensor == HeadTensor::kWeight || tensor == HeadTensor::kBias ? spec_.data_type : DataType::kFloat32;
}

int64_t HeadBase::ValidRows(int32_t rank) const {
  const RowRange& rows = shard_rows_[static_cast<size_t>(rank)];
  return std::clamp<int64_t>(spec_.transform.valid_vocab_size - rows.start, 0, rows.size());
}

std::vector<int64_t> HeadBase::ShardBounds(int64_t units_per_row) const {
  std::vector<int64_t> bounds = {0};
  for (const RowRange& rows : shard_rows_) bounds.push_back(rows.end * units_per_row);
  return bounds;
}

HeadBase::Piece HeadBase::PieceOf(int32_t rank, HeadTensor tensor, int64_t element_start, int64_t element_count) const {
  const RowRange& rows = shard_rows_[static_cast<size_t>(rank)];
  const int64_t columns = IsWeightShaped(tensor) ? spec_.hidden_size : 1;
  const int64_t first = std::max(element_start, rows.start * columns);
  const int64_t last = std::min(element_start + element_count, rows.end * columns);
  if (first >= last) return {};
  return {first - rows.start * columns, last - first, first - element_start};
}

int32_t HeadBase::ShardsWith(HeadTensor tensor, int64_t element_start, int64_t element_count) const {
  int32_t count = 0;
  for (size_t rank = 0; rank < shard_rows_.size(); ++rank) {
    if (PieceOf(static_cast<int32_t>(rank), tensor, element_start, element_count).count > 0) ++count;
  }
  return count;
}

absl::Status HeadBase::CheckRange(HeadTensor tensor, int64_t element_start, int64_t element_count) const {
  const int64_t total = ElementCount(tensor);
  if (element_start >= 0 && element_count >= 0 && element_start <= total && element_count <= total - element_start) {
    return absl::OkStatus();
  }
  return MakeError(ErrorReason::kChunkOutOfRange,
                   std::string(HeadTensorName(tensor)) + " has " + std::to_string(total) + " elements, the range begins at " +
                       std::to_string(element_start) + " and has " + std::to_string(element_count),
                   {{"field", HeadTensorName(tensor)},
                    {"elementCount", std::to_string(total)},
                    {"rangeStart", std::to_string(element_start)},
                    {"rangeCount", std::to_string(element_count)}});
}

absl::Status HeadBase::CheckAddToGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, double factor,
                                          float* alpha) const {
  if (tensor != HeadTensor::kGradWeight && tensor != HeadTensor::kGradBias) {
    return MakeError(ErrorReason::kInvalidField,
                     std::string("tensor must be grad_weight or grad_bias, got ") + HeadTensorName(tensor), {{"field", "tensor"}});
  }
  absl::Status status = ToFactor(factor, alpha);
  return status.ok() ? CheckRange(tensor, element_start, element_count) : status;
}

int32_t HeadBase::FreeStagingSlots() const {
  std::lock_guard<std::mutex> lock(slots_mutex_);
  return static_cast<int32_t>(std::count(slot_taken_.begin(), slot_taken_.end(), false));
}

int32_t HeadBase::TakeStagingSlot(int32_t first, int32_t end) {
  std::lock_guard<std::mutex> lock(slots_mutex_);
  for (size_t slot = static_cast<size_t>(first); slot < static_cast<size_t>(end); ++slot) {
    if (slot_taken_[slot]) continue;
    slot_taken_[slot] = true;
    return static_cast<int32_t>(slot);
  }
  return -1;
}

void HeadBase::FreeStagingSlot(int32_t slot) {
  std::lock_guard<std::mutex> lock(slots_mutex_);
  slot_taken_[static_cast<size_t>(slot)] = false;
}

}  // namespace headwater
