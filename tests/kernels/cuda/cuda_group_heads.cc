#include "tests/kernels/cuda/cuda_group_heads.h"

#include <utility>

#include "gtest/gtest.h"
#include "tests/kernels/cuda/cuda_support.h"

namespace headwater::testing {

EngineOptions PlainOptions() { return {.workspace_bytes = int64_t{256} << 20, .timed_search = false}; }

std::vector<GroupCase> GroupCases() {
  return {
      {"Two", {1, 1}}, {"TwoUneven", {5, 2}}, {"Three", {9, 1, 4}}, {"Four", {1, 1, 1, 1}}, {"Eight", {1, 1, 1, 1, 1, 1, 1, 1}}};
}

GroupHeads::GroupHeads(CudaGroup& group, const std::vector<TestHead>& heads)
    : group_(group), heads_(static_cast<size_t>(group.world_size())) {
  group_.Run([&](int32_t rank) {
    for (const TestHead& in : heads) {
      std::unique_ptr<EngineHead> head = MakeHeadOn(group_.engine(rank), in.spec);
      WriteTensorValues(*head, HeadTensor::kWeight, in.weight);
      if (in.spec.has_bias) WriteTensorValues(*head, HeadTensor::kBias, in.bias);
      heads_[static_cast<size_t>(rank)].push_back(std::move(head));
    }
  });
}

std::vector<EngineHead*> GroupHeads::On(int32_t rank) const {
  std::vector<EngineHead*> heads;
  for (const auto& head : heads_[static_cast<size_t>(rank)]) heads.push_back(head.get());
  return heads;
}

std::vector<float> GroupHeads::Read(int head, HeadTensor tensor) const {
  std::vector<float> values(static_cast<size_t>(On(0)[static_cast<size_t>(head)]->ElementCount(tensor)));
  for (int32_t rank = 0; !values.empty() && rank < group_.world_size(); ++rank) {
    EXPECT_TRUE(
        On(rank)[static_cast<size_t>(head)]->ReadTensor(tensor, 0, static_cast<int64_t>(values.size()), values.data()).ok());
  }
  return values;
}

Outcome GroupHeads::Compute(const Problem& problem, const ComputeOptions& options,
                            std::vector<std::unique_ptr<StagedContribution>>* staged) {
  Outcome outcome;
  if (staged != nullptr) staged->resize(heads_.size());
  group_.Run([&](int32_t rank) {
    const PreparedMicroBatch prepared(problem, On(rank), options);
    absl::StatusOr<MicroBatchResult> result = group_.engine(rank).Compute(prepared.micro_batch);
    CheckStatus(result.status(), "Compute");
    if (rank == 0) {
      prepared.Collect(*result, &outcome);
    } else {
      prepared.ExpectGuardsAndInputsIntact();
    }
    if (staged != nullptr) (*staged)[static_cast<size_t>(rank)] = std::move(result->staged);
  });
  for (size_t head = 0; head < heads_.front().size(); ++head) {
    outcome.gradients.push_back(
        {Read(static_cast<int>(head), HeadTensor::kGradWeight), Read(static_cast<int>(head), HeadTensor::kGradBias)});
  }
  return outcome;
}

void GroupHeads::ZeroGradients() {
  group_.Run([&](int32_t rank) {
    for (EngineHead* head : On(rank)) {
      if (head->spec().trainable) CheckStatus(head->ZeroGradient(), "ZeroGradient");
    }
  });
}

}  // namespace headwater::testing
