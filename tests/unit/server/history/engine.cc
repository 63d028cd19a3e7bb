#include "engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>
#include <utility>

#include "headwater/kernels/error.h"

namespace headwater::history {
namespace {

// What a micro-batch adds to one head.
struct Gradient {
  std::vector<float> weight, bias;
};
using Gradients = std::map<HistoryHead*, Gradient>;

void AddTo(std::vector<float>& sum, const std::vector<float>& values, float factor) {
  for (size_t i = 0; i < values.size(); ++i) sum[i] += factor * values[i];
}

}  // namespace

absl::Status EngineControl::Take(const char* call) {
  if (await_points != nullptr) await_points->Pass();
  if (failing_call == nullptr || std::string_view(failing_call) != call) return absl::OkStatus();
  failing_call = nullptr;
  return failure;
}

HistoryHead::HistoryHead(const HeadSpec& spec, const MemoryPlan& plan, int32_t shard_count, EngineControl& control)
    : spec_(spec), plan_(plan), control_(control) {
  for (int64_t i = 0; i < shard_count; ++i) {
    const int64_t end = i + 1 == shard_count ? spec.vocab_size : i + 1;
    shards_.push_back({i, end, "history"});
  }
  const auto add = [&](HeadTensor weight, HeadTensor bias) {
    tensors_[static_cast<size_t>(weight)].resize(static_cast<size_t>(spec.vocab_size * spec.hidden_size));
    if (spec.has_bias) tensors_[static_cast<size_t>(bias)].resize(static_cast<size_t>(spec.vocab_size));
  };
  add(HeadTensor::kWeight, HeadTensor::kBias);
  if (spec.trainable) add(HeadTensor::kGradWeight, HeadTensor::kGradBias);
  if (std::holds_alternative<AdamWSpec>(spec.optimizer)) {
    add(HeadTensor::kMoment1Weight, HeadTensor::kMoment1Bias);
    add(HeadTensor::kMoment2Weight, HeadTensor::kMoment2Bias);
  }
  control_.heads.push_back(this);
}

HistoryHead::~HistoryHead() { std::erase(control_.heads, this); }

const std::vector<float>& HistoryHead::Tensor(HeadTensor tensor) const {
  if (tensor == HeadTensor::kMasterWeight) tensor = HeadTensor::kWeight;
  if (tensor == HeadTensor::kMasterBias) tensor = HeadTensor::kBias;
  return tensors_[static_cast<size_t>(tensor)];
}

absl::Status HistoryHead::DoReadTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const {
  if (absl::Status status = control_.Take("ReadTensor"); !status.ok()) return status;
  std::memcpy(out, Tensor(tensor).data() + element_start, static_cast<size_t>(element_count) * sizeof(float));
  return absl::OkStatus();
}

absl::Status HistoryHead::DoWriteTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in) {
  const absl::Status failure = control_.Take("WriteTensor");
  if (HasReason(failure, ErrorReason::kShardNotReady)) return failure;
  if (control_.bug == EngineBug::kSwapsByHalf && tensor == HeadTensor::kBias) return failure;
  std::memcpy(Tensor(tensor).data() + element_start, in, static_cast<size_t>(element_count) * sizeof(float));
  control_.Done();
  return failure;
}

absl::Status HistoryHead::DoZeroGradient() {
  const absl::Status failure = control_.Take("ZeroGradient");
  if (HasReason(failure, ErrorReason::kShardNotReady)) return failure;
  if (control_.bug == EngineBug::kKeepsGradient) return failure;
  for (const HeadTensor tensor : {HeadTensor::kGradWeight, HeadTensor::kGradBias}) {
    std::fill(Tensor(tensor).begin(), Tensor(tensor).end(), 0.0f);
  }
  control_.Done();
  return failure;
}

absl::Status HistoryHead::DoAddToGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, double factor,
                                          const float* in) {
  const absl::Status failure = control_.Take("AddToGradient");
  if (HasReason(failure, ErrorReason::kShardNotReady)) return failure;
  float* sum = Tensor(tensor).data() + element_start;
  for (int64_t i = 0; i < element_count; ++i) sum[i] += static_cast<float>(factor) * in[i];
  control_.Done();
  return failure;
}

absl::Status HistoryHead::DoResetOptimizerState() {
  const absl::Status failure = control_.Take("ResetOptimizerState");
  if (HasReason(failure, ErrorReason::kShardNotReady)) return failure;
  for (const HeadTensor tensor :
       {HeadTensor::kMoment1Weight, HeadTensor::kMoment1Bias, HeadTensor::kMoment2Weight, HeadTensor::kMoment2Bias}) {
    std::fill(Tensor(tensor).begin(), Tensor(tensor).end(), 0.0f);
  }
  return failure;
}

absl::StatusOr<GradientStats> HistoryHead::DoComputeGradientStats() const {
  if (absl::Status status = control_.Take("ComputeGradientStats"); !status.ok()) return status;
  GradientStats stats;
  for (const HeadTensor tensor : {HeadTensor::kGradWeight, HeadTensor::kGradBias}) {
    for (const float value : Tensor(tensor)) {
      if (!std::isfinite(value)) ++stats.non_finite_count;
      stats.norm_squared += static_cast<double>(value) * value;
    }
  }
  return stats;
}

absl::Status HistoryHead::DoApplyOptimizer(const OptimizerStep& step) {
  const absl::Status failure = control_.Take("ApplyOptimizer");
  if (HasReason(failure, ErrorReason::kShardNotReady) && control_.bug != EngineBug::kAppliesByHalf) return failure;
  update_count_ = step.update_count;
  const auto update = [&](HeadTensor weight, HeadTensor gradient, HeadTensor moment1, HeadTensor moment2) {
    for (size_t i = 0; i < Tensor(weight).size(); ++i) {
      const float scaled = static_cast<float>(Tensor(gradient)[i] * step.gradient_multiplier);
      const float change = static_cast<float>(step.learning_rate) * scaled;
      Tensor(weight)[i] -= change;
      Tensor(gradient)[i] = 0;
      if (Tensor(moment1).empty()) continue;
      const float square = scaled * scaled;
      Tensor(moment1)[i] += scaled;
      Tensor(moment2)[i] += square;
    }
  };
  update(HeadTensor::kWeight, HeadTensor::kGradWeight, HeadTensor::kMoment1Weight, HeadTensor::kMoment2Weight);
  update(HeadTensor::kBias, HeadTensor::kGradBias, HeadTensor::kMoment1Bias, HeadTensor::kMoment2Bias);
  control_.Done();
  return failure;
}

class HistoryStaged : public StagedContribution {
 public:
  HistoryStaged(Gradients gradients, EngineControl& control) : gradients_(std::move(gradients)), control_(control) {
    for (auto& [head, gradient] : gradients_) ++head->slots_taken_;
  }
  ~HistoryStaged() override {
    if (control_.bug != EngineBug::kLeaksSlot) Release();
  }

  absl::Status DoCommit(double factor) override {
    const absl::Status failure = control_.Take("Commit");
    if (HasReason(failure, ErrorReason::kShardNotReady)) return failure;
    const int times = control_.bug == EngineBug::kDropsCommit ? 0 : control_.bug == EngineBug::kAddsTwice ? 2 : 1;
    for (int time = 0; time < times; ++time) {
      for (auto& [head, gradient] : gradients_) {
        AddTo(head->Tensor(HeadTensor::kGradWeight), gradient.weight, static_cast<float>(factor));
        AddTo(head->Tensor(HeadTensor::kGradBias), gradient.bias, static_cast<float>(factor));
      }
    }
    Release();
    control_.Done();
    return failure;
  }

 private:
  void Release() {
    for (auto& [head, gradient] : gradients_) --head->slots_taken_;
    gradients_.clear();
  }

  Gradients gradients_;
  EngineControl& control_;
};

absl::StatusOr<MemoryPlan> HistoryEngine::PlanHead(const HeadSpec& spec) const {
  MemoryPlan plan;
  plan.total_bytes = spec.vocab_size * spec.hidden_size * 4;
  return plan;
}

absl::StatusOr<std::unique_ptr<EngineHead>> HistoryEngine::DoCreateHead(const HeadSpec& spec) {
  if (absl::Status status = control_.Take("CreateHead"); !status.ok()) return status;
  return std::make_unique<HistoryHead>(spec, *PlanHead(spec), options_.shard_count, control_);
}

absl::StatusOr<MicroBatchResult> HistoryEngine::DoCompute(const MicroBatch& micro_batch) {
  const absl::Status failure = control_.Take("Compute");
  if (const std::function<void()> work = std::exchange(control_.during_compute, nullptr); work != nullptr) work();
  const bool accumulates = micro_batch.grad_weight == GradWeightMode::kAccumulate;
  if (!failure.ok() && !(accumulates && HasReason(failure, ErrorReason::kEngineFailed))) return failure;
  if (micro_batch.flow != nullptr) {
    const int64_t rows = micro_batch.hidden.row_count;
    if (absl::Status status = micro_batch.flow->AwaitRows((rows + 1) / 2); !status.ok()) return status;
    if (absl::Status status = control_.Take("Upload"); !status.ok()) return status;
    if (absl::Status status = micro_batch.flow->AwaitRows(rows); !status.ok()) return status;
  }
  const int64_t width = micro_batch.hidden.column_count;
  const float* hidden = static_cast<const float*>(micro_batch.hidden.data);
  float* grad_hidden = static_cast<float*>(micro_batch.grad_hidden.data);
  Gradients gradients;
  for (const LossTerm& term : micro_batch.terms) {
    HistoryHead* head = static_cast<HistoryHead*>(term.head);
    for (const int32_t target : term.targets) {
      if (target != term.ignore_index && (target < 0 || target >= head->spec_.vocab_size)) {
        return MakeError(ErrorReason::kTargetOutOfVocab, "a target is out of the vocabulary");
      }
    }
    if (micro_batch.grad_weight == GradWeightMode::kNone || !head->spec_.trainable) continue;
    gradients[head].weight.resize(head->Tensor(HeadTensor::kGradWeight).size());
    gradients[head].bias.resize(head->Tensor(HeadTensor::kGradBias).size());
  }
  if (micro_batch.grad_weight == GradWeightMode::kStage) {
    for (const auto& [head, gradient] : gradients) {
      if (head->FreeStagingSlots() <= 0) return MakeError(ErrorReason::kStagingFull, "no staging slot is free");
    }
  }
  if (grad_hidden != nullptr) std::fill_n(grad_hidden, micro_batch.hidden.row_count * width, 0.0f);

  MicroBatchResult result;
  int64_t non_finite_rows = 0;
  for (const LossTerm& term : micro_batch.terms) {
    HistoryHead* head = static_cast<HistoryHead*>(term.head);
    const auto adds_to = gradients.find(head);
    LossSums& sums = result.terms.emplace_back();
    for (int64_t i = 0; i < term.row_count; ++i) {
      const int32_t target = term.targets[static_cast<size_t>(i)];
      if (term.lse != nullptr) term.lse[i] = 0;
      if (target == term.ignore_index) continue;
      const int64_t row = term.row_start + i;
      std::vector<float> value(hidden + row * width, hidden + (row + 1) * width);
      if (term.teacher_head != nullptr) {
        const float* teacher_hidden = static_cast<const float*>(term.teacher_hidden.data) + i * term.teacher_hidden.column_count;
        value[0] += std::trunc(static_cast<HistoryHead*>(term.teacher_head)->Tensor(HeadTensor::kWeight)[0]) * teacher_hidden[0];
      }
      const float weight = term.token_weights.empty() ? 1.0f : term.token_weights[static_cast<size_t>(i)];
      const float scale = static_cast<float>(term.loss_scale) * weight;
      ++sums.valid_token_count;
      sums.loss_sum += static_cast<double>(weight) * value[0];
      sums.token_weight_sum += weight;
      if (!std::all_of(value.begin(), value.end(), [](float x) { return std::isfinite(x); })) ++sums.non_finite_row_count;
      if (term.lse != nullptr) term.lse[i] = head->Tensor(HeadTensor::kWeight)[static_cast<size_t>(target * width)];
      for (int64_t k = 0; k < width; ++k) {
        const float product = scale * value[static_cast<size_t>(k)];
        if (grad_hidden != nullptr) grad_hidden[row * width + k] += product;
        if (adds_to != gradients.end()) adds_to->second.weight[static_cast<size_t>(target * width + k)] += product;
      }
      if (adds_to != gradients.end() && head->spec_.has_bias) adds_to->second.bias[static_cast<size_t>(target)] += scale;
    }
    non_finite_rows += sums.non_finite_row_count;
  }
  const bool is_repeat = micro_batch.backward && micro_batch.grad_weight == GradWeightMode::kNone;
  if (control_.bug == EngineBug::kRepeatsOtherwise && is_repeat && grad_hidden != nullptr) ++grad_hidden[0];
  if (micro_batch.refuse_non_finite && non_finite_rows > 0) {
    return MakeError(ErrorReason::kNonFiniteValues, "there are non-finite rows");
  }
  if (micro_batch.flow != nullptr) {
    const absl::Status decided = micro_batch.flow->Decide(nullptr);
    if (!decided.ok() && control_.bug != EngineBug::kAddsUndecided) return decided;
    if (grad_hidden != nullptr) micro_batch.flow->GradHiddenReady(micro_batch.hidden.row_count);
    if (!decided.ok()) {
      for (auto& [head, gradient] : gradients) AddTo(head->Tensor(HeadTensor::kGradWeight), gradient.weight, 1);
      return decided;
    }
  }
  if (micro_batch.grad_weight == GradWeightMode::kStage && !gradients.empty()) {
    result.staged = std::make_unique<HistoryStaged>(std::move(gradients), control_);
  } else if (accumulates) {
    for (auto& [head, gradient] : gradients) {
      AddTo(head->Tensor(HeadTensor::kGradWeight), gradient.weight, 1);
      AddTo(head->Tensor(HeadTensor::kGradBias), gradient.bias, 1);
    }
  }
  control_.Done();
  if (!failure.ok()) return failure;
  return result;
}

}  // namespace headwater::history
