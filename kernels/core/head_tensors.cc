#include "kernels/core/head_tensors.h"

#include <variant>

#include "kernels/core/saturating.h"

namespace headwater {

bool IsWeightShaped(HeadTensor tensor) {
  return tensor == HeadTensor::kWeight || tensor == HeadTensor::kMasterWeight || tensor == HeadTensor::kGradWeight ||
         tensor == HeadTensor::kMoment1Weight || tensor == HeadTensor::kMoment2Weight;
}

bool IsMaster(HeadTensor tensor) { return tensor == HeadTensor::kMasterWeight || tensor == HeadTensor::kMasterBias; }

bool HasSeparateMaster(const HeadSpec& spec) {
  return spec.data_type != DataType::kFloat32 && !std::holds_alternative<std::monostate>(spec.optimizer);
}

int64_t OptimizerStateTensors(const OptimizerSpec& optimizer) {
  if (std::holds_alternative<AdamWSpec>(optimizer)) return 2;
  const auto* sgd = std::get_if<SgdSpec>(&optimizer);
  return sgd != nullptr && sgd->momentum > 0 ? 1 : 0;
}

bool HasTensor(const HeadSpec& spec, HeadTensor tensor) {
  if (!IsWeightShaped(tensor) && !spec.has_bias) return false;
  switch (tensor) {
    case HeadTensor::kWeight:
    case HeadTensor::kBias:
    case HeadTensor::kMasterWeight:
    case HeadTensor::kMasterBias:
      return true;
    case HeadTensor::kGradWeight:
    case HeadTensor::kGradBias:
      return spec.trainable;
    case HeadTensor::kMoment1Weight:
    case HeadTensor::kMoment1Bias:
      return OptimizerStateTensors(spec.optimizer) >= 1;
    case HeadTensor::kMoment2Weight:
    case HeadTensor::kMoment2Bias:
      return OptimizerStateTensors(spec.optimizer) >= 2;
  }
  return false;
}

bool IsWholeInReplica(const HeadSpec& spec, HeadTensor tensor) {
  switch (tensor) {
    case HeadTensor::kWeight:
    case HeadTensor::kBias:
    case HeadTensor::kGradWeight:
    case HeadTensor::kGradBias:
      return true;
    default:
      return IsMaster(tensor) && !HasSeparateMaster(spec);
  }
}

void AddPlanItem(const char* purpose, int64_t bytes, MemoryPlan* plan) {
  plan->items.push_back({purpose, bytes});
  plan->total_bytes = SaturatingAdd(plan->total_bytes, bytes);
}

void AddTensorItems(const HeadSpec& spec, int64_t row_stride, MemoryPlan* plan) {
  AddReplicaItems(spec, row_stride, spec.vocab_size, plan);
}

void AddReplicaItems(const HeadSpec& spec, int64_t row_stride, int64_t state_rows, MemoryPlan* plan) {
  const auto fp32_bytes_of = [&](int64_t rows) {
    return SaturatingMultiply(SaturatingAdd(SaturatingMultiply(rows, row_stride), spec.has_bias ? rows : 0), 4);
  };
  const int64_t weight_elements = SaturatingMultiply(spec.vocab_size, row_stride);
  const int64_t bias_elements = spec.has_bias ? spec.vocab_size : 0;
  const int64_t state_bytes = fp32_bytes_of(state_rows);
  AddPlanItem("weight", SaturatingMultiply(weight_elements, ElementBytes(spec.data_type)), plan);
  AddPlanItem("bias", SaturatingMultiply(bias_elements, ElementBytes(spec.data_type)), plan);
  AddPlanItem("grad_weight", spec.trainable ? SaturatingMultiply(weight_elements, 4) : 0, plan);
  AddPlanItem("grad_bias", spec.trainable ? SaturatingMultiply(bias_elements, 4) : 0, plan);
  AddPlanItem("master_weight", HasSeparateMaster(spec) ? state_bytes : 0, plan);
  AddPlanItem("optimizer_state", SaturatingMultiply(OptimizerStateTensors(spec.optimizer), state_bytes), plan);
  AddPlanItem("staging", SaturatingMultiply(spec.staging_slots, fp32_bytes_of(spec.vocab_size)), plan);
}

}  // namespace headwater
