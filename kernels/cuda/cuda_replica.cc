// The methods of a head whose weights every rank of a group holds in full (Parallelism::kRows).
#include <cstdint>
#include <vector>

#include "kernels/core/head_tensors.h"
#include "kernels/cuda/computation/deferred_grad_weight.h"
#include "kernels/cuda/cuda_head.h"
#include "kernels/cuda/device_group.h"

namespace headwater::cuda {

absl::Status CudaHead::ClearElements(const TensorPlace& place, int64_t first, int64_t count) {
  if (count == 0) return absl::OkStatus();
  const int64_t span = place.OffsetOf(first + count - 1) - place.OffsetOf(first) + 1;
  return core_->Check(cudaMemsetAsync(place.At(first), 0, static_cast<size_t>(span * BytesOf(place.element)), core_->stream()),
                      "clearing a part of a tensor");
}

absl::Status CudaHead::WriteReplica(TensorCopy* copy, HeadTensor tensor, int64_t element_start, int64_t element_count,
                                    const void* in) {
  const Element from_element = ElementOf(TensorDataType(tensor));
  const Piece own = PieceOf(RankOf(0), tensor, element_start, element_count);  // in tensors of the rank's shard only
  const char* const own_in = static_cast<const char*>(in) + own.offset * BytesOf(from_element);
  const bool is_weight = IsWeightShaped(tensor);
  if (tensor == HeadTensor::kGradWeight || tensor == HeadTensor::kGradBias) {
    const TensorPlace gradient = PlaceOf(0, tensor);
    HEADWATER_RETURN_IF_ERROR(ClearElements(gradient, element_start, element_count));
    if (own.count == 0) return absl::OkStatus();
    return copy->Write(own_in, from_element, gradient, element_start + own.offset, own.count, nullptr);
  }
  if (tensor == HeadTensor::kWeight || tensor == HeadTensor::kBias || IsMaster(tensor)) {
    const TensorPlace stored = PlaceOf(0, is_weight ? HeadTensor::kWeight : HeadTensor::kBias);
    if (element_count > 0) {
      HEADWATER_RETURN_IF_ERROR(copy->Write(in, from_element, stored, element_start, element_count, nullptr));
    }
    if (!HasSeparateMaster(spec())) return absl::OkStatus();
    tensor = is_weight ? HeadTensor::kMasterWeight : HeadTensor::kMasterBias;
  }
  if (own.count == 0) return absl::OkStatus();
  return copy->Write(own_in, from_element, PlaceOf(0, tensor), own.first, own.count, nullptr);
}

absl::Status CudaHead::ReduceTensor(const DeviceMemory& memory, int64_t row_stride) {
  if (memory.bytes() == 0) return absl::OkStatus();
  const std::vector<int64_t> bounds = ShardBounds(row_stride);
  float* const gradient = memory.As<float>();
  HEADWATER_RETURN_IF_ERROR(core_->group()->bulk().ReduceScatterSum(gradient, bounds, core_->stream()));
  // The other ranks have taken these parts.
  const size_t own = static_cast<size_t>(RankOf(0));
  TensorPlace place;
  place.data = memory.As<char>();
  HEADWATER_RETURN_IF_ERROR(ClearElements(place, 0, bounds[own]));
  return ClearElements(place, bounds[own + 1], bounds.back() - bounds[own + 1]);
}

absl::Status CudaHead::DoReduceGradient() {
  if (!is_replica() || !spec().trainable) return absl::OkStatus();
  WorkLock lock(*core_);
  return core_->RunDecidedByShard([this](int32_t index) {
    HEADWATER_RETURN_IF_ERROR(core_->deferred().FlushFor(*this));
    const ShardStorage& replica = storage_[static_cast<size_t>(index)];
    HEADWATER_RETURN_IF_ERROR(ReduceTensor(replica.grad_weight, PaddedWidth(spec().hidden_size)));
    return ReduceTensor(replica.grad_bias, 1);
  });
}

absl::Status CudaHead::GatherWeights() {
  const ShardStorage& replica = storage_.front();
  const int64_t element_bytes = ElementBytes(spec().data_type);
  DeviceCommunicator& bulk = core_->group()->bulk();
  HEADWATER_RETURN_IF_ERROR(bulk.AllGatherParts(replica.weight.As<void>(),
                                                ShardBounds(PaddedWidth(spec().hidden_size) * element_bytes), core_->stream()));
  if (!spec().has_bias) return absl::OkStatus();
  return bulk.AllGatherParts(replica.bias.As<void>(), ShardBounds(element_bytes), core_->stream());
}

}  // namespace headwater::cuda
