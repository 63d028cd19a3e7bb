// The methods of a head whose weights every rank of a group holds in full (Parallelism::kRows).
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/core/head_tensors.h"
#include "kernels/cpu/cpu_head.h"
#include "kernels/cpu/rows/convert.h"

namespace headwater::cpu {

void CpuHead::WriteReplica(int32_t rank, HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in) {
  const HeadShard& replica = Held(rank);
  const Piece own = PieceOf(rank, tensor, element_start, element_count);  // in tensors of the rank's shard only
  const bool is_weight = IsWeightShaped(tensor);
  const auto stored_at = [&] {
    const Place stored = PlaceOf(replica, is_weight ? HeadTensor::kWeight : HeadTensor::kBias);
    return stored.memory->As<char>() + element_start * stored.element_bytes;
  };
  const auto state_at = [&](HeadTensor state) { return PlaceOf(replica, state).memory->As<float>() + own.first; };
  const float* const floats = static_cast<const float*>(in);
  const size_t own_bytes = static_cast<size_t>(own.count) * sizeof(float);
  switch (tensor) {
    case HeadTensor::kWeight:
    case HeadTensor::kBias: {
      const int64_t element_bytes = ElementBytes(spec().data_type);
      std::memcpy(stored_at(), in, static_cast<size_t>(element_count * element_bytes));
      if (!HasSeparateMaster(spec()) || own.count == 0) return;
      ToFloat(static_cast<const char*>(in) + own.offset * element_bytes, spec().data_type, own.count,
              state_at(is_weight ? HeadTensor::kMasterWeight : HeadTensor::kMasterBias));
      return;
    }
    case HeadTensor::kMasterWeight:
    case HeadTensor::kMasterBias:
      FromFloat(floats, element_count, spec().data_type, stored_at());
      if (HasSeparateMaster(spec()) && own.count > 0) std::memcpy(state_at(tensor), floats + own.offset, own_bytes);
      return;
    case HeadTensor::kGradWeight:
    case HeadTensor::kGradBias: {
      float* const gradient = PlaceOf(replica, tensor).memory->As<float>() + element_start;
      std::fill_n(gradient, element_count, 0.0F);
      if (own.count > 0) std::memcpy(gradient + own.offset, floats + own.offset, own_bytes);
      return;
    }
    default:
      if (own.count > 0) std::memcpy(state_at(tensor), floats + own.offset, own_bytes);
  }
}

absl::Status CpuHead::DoReduceGradient() {
  if (!is_replica() || !spec().trainable) return absl::OkStatus();
  std::lock_guard<std::mutex> lock(core_->work_mutex);
  return core_->executors.RunDecided([](const ShardContext&) { return absl::OkStatus(); },
                                     [&](const ShardContext& context) {
                                       const HeadShard& replica = Held(context.rank);
                                       for (const MappedMemory* memory : {&replica.grad_weight, &replica.grad_bias}) {
                                         if (memory->bytes() == 0) continue;
                                         const std::vector<int64_t> bounds =
                                             ShardBounds(memory == &replica.grad_weight ? spec().hidden_size : 1);
                                         float* const gradient = memory->As<float>();
                                         absl::Status status = context.communicator.ReduceScatterSum(gradient, bounds);
                                         if (!status.ok()) return status;
                                         // The other ranks have taken these parts.
                                         const size_t own = static_cast<size_t>(context.rank);
                                         std::fill(gradient, gradient + bounds[own], 0.0F);
                                         std::fill(gradient + bounds[own + 1], gradient + bounds.back(), 0.0F);
                                       }
                                       return absl::OkStatus();
                                     });
}

absl::Status CpuHead::GatherWeights(const ShardContext& context) {
  const HeadShard& replica = Held(context.rank);
  const int64_t element_bytes = ElementBytes(spec().data_type);
  absl::Status status =
      context.communicator.AllGatherParts(replica.weight.As<char>(), ShardBounds(spec().hidden_size * element_bytes));
  if (!status.ok() || !spec().has_bias) return status;
  return context.communicator.AllGatherParts(replica.bias.As<char>(), ShardBounds(element_bytes));
}

}  // namespace headwater::cpu
