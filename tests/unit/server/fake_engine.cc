#include "fake_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <set>
#include <utility>

#include "headwater/kernels/digest.h"
#include "headwater/kernels/error.h"

namespace headwater::testing {

void FakeControl::FailNext(const std::string& name, const absl::Status& status, int skip) {
  absl::MutexLock lock(&mutex_);
  failures_[name] = Failure{status, skip};
}

void FakeControl::ClearFailures() {
  absl::MutexLock lock(&mutex_);
  failures_.clear();
}

absl::Status FakeControl::Note(const std::string& name) {
  if (on_call != nullptr) on_call();
  absl::MutexLock lock(&mutex_);
  ++counts_[name];
  const auto found = failures_.find(name);
  if (found == failures_.end() || found->second.skip-- > 0) return absl::OkStatus();
  const absl::Status status = found->second.status;
  failures_.erase(found);
  return status;
}

int FakeControl::CountOf(const std::string& name) const {
  absl::MutexLock lock(&mutex_);
  const auto found = counts_.find(name);
  return found == counts_.end() ? 0 : found->second;
}

// Fails the test if two calls use the weights, or the gradient, of a head at once that may not.
class FakeHead::Use {
 public:
  Use(const FakeHead& head, Access weights, Access gradient)
      : weights_(head.weight_users_, weights), gradient_(head.gradient_users_, gradient) {}

 private:
  struct Part {
    Part(std::atomic<int>& part_users, Access access)
        : users(part_users),
          weight(access == Access::kAlone    ? kAlone
                 : access == Access::kShares ? 1
                                             : 0) {
      const int others = users.fetch_add(weight);
      EXPECT_TRUE(weight == kAlone ? others == 0 : weight == 0 || others < kAlone) << "two calls overlap on one head";
    }
    ~Part() { users.fetch_sub(weight); }
    static constexpr int kAlone = 1 << 16;
    std::atomic<int>& users;
    const int weight;
  };
  const Part weights_, gradient_;
};

float RoundToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
}

HeadSpec SmallSpec(int64_t vocab_size, int64_t hidden_size) {
  HeadSpec spec;
  spec.vocab_size = vocab_size;
  spec.hidden_size = hidden_size;
  spec.transform.valid_vocab_size = vocab_size;
  spec.trainable = true;
  spec.staging_slots = 2;
  spec.optimizer = SgdSpec();
  return spec;
}

FakeHead::FakeHead(const HeadSpec& spec, int32_t shard_count, FakeControl& control) : spec_(spec), control_(control) {
  // Uneven: the first shard is one row, the others share the rest.
  const int64_t count = std::min<int64_t>(shard_count, spec.vocab_size);
  int64_t start = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t end = i + 1 == count ? spec.vocab_size : i == 0 ? 1 : start + std::max<int64_t>(1, (spec.vocab_size - 1) / count);
    shards_.push_back({start, end, "fake"});
    start = end;
  }
  const auto add = [&](HeadTensor weight, HeadTensor bias) {
    tensors_[weight].resize(static_cast<size_t>(spec.vocab_size * spec.hidden_size));
    if (spec.has_bias) tensors_[bias].resize(static_cast<size_t>(spec.vocab_size));
  };
  add(HeadTensor::kWeight, HeadTensor::kBias);
  if (spec.trainable) add(HeadTensor::kGradWeight, HeadTensor::kGradBias);
  if (has_master()) add(HeadTensor::kMasterWeight, HeadTensor::kMasterBias);
  const SgdSpec* sgd = std::get_if<SgdSpec>(&spec.optimizer);
  const bool is_adamw = std::holds_alternative<AdamWSpec>(spec.optimizer);
  if (is_adamw || (sgd != nullptr && sgd->momentum > 0)) add(HeadTensor::kMoment1Weight, HeadTensor::kMoment1Bias);
  if (is_adamw) add(HeadTensor::kMoment2Weight, HeadTensor::kMoment2Bias);
  plan_.total_bytes = spec.vocab_size * spec.hidden_size * 4;
}

bool FakeHead::has_master() const {
  return spec_.data_type != DataType::kFloat32 && !std::holds_alternative<std::monostate>(spec_.optimizer);
}

const std::vector<float>& FakeHead::Tensor(HeadTensor tensor) const {
  static const std::vector<float> none;
  if (!has_master() && tensor == HeadTensor::kMasterWeight) tensor = HeadTensor::kWeight;
  if (!has_master() && tensor == HeadTensor::kMasterBias) tensor = HeadTensor::kBias;
  const auto found = tensors_.find(tensor);
  return found == tensors_.end() ? none : found->second;
}

DataType FakeHead::TensorDataType(HeadTensor tensor) const {
  return tensor == HeadTensor::kWeight || tensor == HeadTensor::kBias ? spec_.data_type : DataType::kFloat32;
}

absl::Status FakeHead::DoReadTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const {
  const bool is_gradient = tensor == HeadTensor::kGradWeight || tensor == HeadTensor::kGradBias;
  const Use use(*this, Access::kShares, is_gradient ? Access::kAlone : Access::kNone);
  if (absl::Status status = control_.Note("ReadTensor"); !status.ok()) return status;
  const bool as_bfloat16 = TensorDataType(tensor) == DataType::kBFloat16;
  const float* from = Tensor(tensor).data() + element_start;
  if (!as_bfloat16) {
    std::memcpy(out, from, static_cast<size_t>(element_count) * sizeof(float));
    return absl::OkStatus();
  }
  for (int64_t i = 0; i < element_count; ++i) {
    static_cast<uint16_t*>(out)[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(from[i]) >> 16);
  }
  return absl::OkStatus();
}

absl::Status FakeHead::DoWriteTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in) {
  const Use use(*this, Access::kAlone, Access::kAlone);
  const absl::Status failure = control_.Note("WriteTensor");
  if (HasReason(failure, ErrorReason::kShardNotReady)) return failure;
  if (control_.bug == FakeBug::kSwapsByHalf && tensor == HeadTensor::kBias) return failure;
  const bool as_bfloat16 = TensorDataType(tensor) == DataType::kBFloat16;
  for (int64_t i = 0; i < element_count; ++i) {
    const float value =
        as_bfloat16 ? std::bit_cast<float>(uint32_t{static_cast<const uint16_t*>(in)[i]} << 16) : static_cast<const float*>(in)[i];
    const size_t index = static_cast<size_t>(element_start + i);
    const float stored = spec_.data_type == DataType::kBFloat16 ? RoundToBFloat16(value) : value;
    if (tensor == HeadTensor::kWeight || tensor == HeadTensor::kMasterWeight) {
      tensors_[HeadTensor::kWeight][index] = stored;
      if (has_master()) tensors_[HeadTensor::kMasterWeight][index] = value;
    } else if (tensor == HeadTensor::kBias || tensor == HeadTensor::kMasterBias) {
      tensors_[HeadTensor::kBias][index] = stored;
      if (has_master()) tensors_[HeadTensor::kMasterBias][index] = value;
    } else {
      tensors_.at(tensor)[index] = value;
    }
  }
  control_.Done();
  return failure;
}

absl::Status FakeHead::DoZeroGradient() {
  const Use use(*this, Access::kNone, Access::kAlone);
  const absl::Status failure = control_.Note("ZeroGradient");
  if (HasReason(failure, ErrorReason::kShardNotReady)) return failure;
  EXPECT_TRUE(spec_.trainable) << "a frozen head has no gradient";
  if (control_.bug == FakeBug::kKeepsGradient) return failure;
  for (const HeadTensor tensor : {HeadTensor::kGradWeight, HeadTensor::kGradBias}) {
    if (tensors_.contains(tensor)) std::fill(tensors_[tensor].begin(), tensors_[tensor].end(), 0.0f);
  }
  control_.Done();
  return failure;
}

absl::Status FakeHead::DoAddToGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, double factor,
                                       const float* in) {
  const Use use(*this, Access::kNone, Access::kAlone);
  const absl::Status failure = control_.Note("AddToGradient");
  if (HasReason(failure, ErrorReason::kShardNotReady)) return failure;
  if (!std::isfinite(static_cast<float>(factor)) || (tensor != HeadTensor::kGradWeight && tensor != HeadTensor::kGradBias)) {
    return MakeError(ErrorReason::kInvalidField, "factor must be finite in fp32, tensor a gradient");
  }
  const int64_t total = ElementCount(tensor);
  if (element_start < 0 || element_count < 0 || element_start > total || element_count > total - element_start) {
    return MakeError(ErrorReason::kChunkOutOfRange, "the range is not inside of the gradient");
  }
  for (int64_t i = 0; i < element_count; ++i) {
    const float product = static_cast<float>(factor) * in[i];
    tensors_[tensor][static_cast<size_t>(element_start + i)] += product;
  }
  control_.Done();
  return failure;
}

absl::Status FakeHead::DoResetOptimizerState() {
  const Use use(*this, Access::kAlone, Access::kNone);
  const absl::Status failure = control_.Note("ResetOptimizerState");
  if (HasReason(failure, ErrorReason::kShardNotReady)) return failure;
  for (const HeadTensor tensor :
       {HeadTensor::kMoment1Weight, HeadTensor::kMoment1Bias, HeadTensor::kMoment2Weight, HeadTensor::kMoment2Bias}) {
    if (tensors_.contains(tensor)) std::fill(tensors_[tensor].begin(), tensors_[tensor].end(), 0.0f);
  }
  return failure;
}

absl::StatusOr<GradientStats> FakeHead::DoComputeGradientStats() const {
  const Use use(*this, Access::kNone, Access::kAlone);
  if (absl::Status status = control_.Note("ComputeGradientStats"); !status.ok()) return status;
  GradientStats stats;
  for (const HeadTensor tensor : {HeadTensor::kGradWeight, HeadTensor::kGradBias}) {
    for (const float value : Tensor(tensor)) {
      if (!std::isfinite(value)) ++stats.non_finite_count;
      stats.norm_squared += static_cast<double>(value) * value;
    }
  }
  return stats;
}

absl::Status FakeHead::DoApplyOptimizer(const OptimizerStep& step) {
  const Use use(*this, Access::kAlone, Access::kAlone);
  const absl::Status failure = control_.Note("ApplyOptimizer");
  if (HasReason(failure, ErrorReason::kShardNotReady) && control_.bug != FakeBug::kAppliesByHalf) return failure;
  update_count_ = step.update_count;
  const auto update = [&](HeadTensor weight, HeadTensor master, HeadTensor gradient, HeadTensor moment1, HeadTensor moment2) {
    if (!tensors_.contains(weight)) return;
    for (size_t i = 0; i < tensors_[weight].size(); ++i) {
      const float scaled = static_cast<float>(tensors_[gradient][i] * step.gradient_multiplier);
      float& value = has_master() ? tensors_[master][i] : tensors_[weight][i];
      value -= static_cast<float>(step.learning_rate) * scaled;
      if (has_master()) tensors_[weight][i] = RoundToBFloat16(value);
      if (tensors_.contains(moment1)) tensors_[moment1][i] += scaled;
      if (tensors_.contains(moment2)) tensors_[moment2][i] += scaled * scaled;
      tensors_[gradient][i] = 0;
    }
  };
  update(HeadTensor::kWeight, HeadTensor::kMasterWeight, HeadTensor::kGradWeight, HeadTensor::kMoment1Weight,
         HeadTensor::kMoment2Weight);
  update(HeadTensor::kBias, HeadTensor::kMasterBias, HeadTensor::kGradBias, HeadTensor::kMoment1Bias, HeadTensor::kMoment2Bias);
  control_.Done();
  return failure;
}

// A contribution: what Compute() would have added. Its heads have a slot taken for it.
class FakeStaged : public StagedContribution {
 public:
  FakeStaged(FakeEngine::Gradients gradients, FakeControl& control) : gradients_(std::move(gradients)), control_(control) {
    for (auto& [head, tensors] : gradients_) ++head->slots_taken_;
  }
  // The one thing that other calls on the heads may overlap with.
  ~FakeStaged() override {
    if (control_.bug != FakeBug::kLeaksSlot) Release();
  }

  absl::Status DoCommit(double factor) override {
    EXPECT_FALSE(done_) << "a contribution is committed twice";
    std::vector<std::unique_ptr<FakeHead::Use>> uses;
    for (auto& [head, tensors] : gradients_)
      uses.push_back(std::make_unique<FakeHead::Use>(*head, FakeHead::Access::kNone, FakeHead::Access::kAlone));
    const absl::Status failure = control_.Note("Commit");
    if (HasReason(failure, ErrorReason::kShardNotReady)) return failure;
    if (control_.bug == FakeBug::kAddsTwice) factor *= 2;
    if (control_.bug != FakeBug::kDropsCommit) FakeEngine::Add(gradients_, static_cast<float>(factor));
    Release();
    control_.Done();
    return failure;
  }

 private:
  void Release() {
    if (done_) return;
    done_ = true;
    for (auto& [head, tensors] : gradients_) --head->slots_taken_;
  }

  const FakeEngine::Gradients gradients_;
  FakeControl& control_;
  bool done_ = false;
};

FakeEngine::FakeEngine(int32_t shard_count) { options_.shard_count = shard_count; }

absl::StatusOr<MemoryPlan> FakeEngine::PlanHead(const HeadSpec& spec) const {
  MemoryPlan plan;
  plan.total_bytes = spec.vocab_size * spec.hidden_size * 4;
  return plan;
}

absl::StatusOr<std::unique_ptr<EngineHead>> FakeEngine::DoCreateHead(const HeadSpec& spec) {
  if (absl::Status status = control_.Note("CreateHead"); !status.ok()) return status;
  return std::make_unique<FakeHead>(spec, options_.shard_count, control_);
}

void FakeEngine::Add(const Gradients& gradients, float factor) {
  for (const auto& [head, tensors] : gradients) {
    for (const auto& [tensor, values] : tensors) {
      std::vector<float>& accumulator = head->tensors_[tensor];
      for (size_t i = 0; i < values.size(); ++i) accumulator[i] += factor * values[i];
    }
  }
}

absl::StatusOr<MicroBatchResult> FakeEngine::DoCompute(const MicroBatch& micro_batch) {
  std::set<FakeHead*> heads;
  for (const LossTerm& term : micro_batch.terms) {
    heads.insert(static_cast<FakeHead*>(term.head));
    if (term.teacher_head != nullptr) heads.insert(static_cast<FakeHead*>(term.teacher_head));
  }
  std::vector<std::unique_ptr<FakeHead::Use>> uses;
  using Access = FakeHead::Access;
  for (FakeHead* head : heads) {
    const bool is_target = std::any_of(micro_batch.terms.begin(), micro_batch.terms.end(),
                                       [head](const LossTerm& term) { return term.head == head && head->spec_.trainable; });
    const Access gradient = !is_target || micro_batch.grad_weight == GradWeightMode::kNone ? Access::kNone
                            : micro_batch.grad_weight == GradWeightMode::kStage            ? Access::kAlone
                                                                                           : Access::kShares;
    uses.push_back(std::make_unique<FakeHead::Use>(*head, Access::kShares, gradient));
  }
  const absl::Status failure = control_.Note("Compute");
  if (control_.during_compute != nullptr) control_.during_compute();
  const bool accumulates = micro_batch.grad_weight == GradWeightMode::kAccumulate;
  if (!failure.ok() && !(accumulates && HasReason(failure, ErrorReason::kEngineFailed))) return failure;
  RowFlow* const flow = micro_batch.flow;
  EXPECT_TRUE(flow != nullptr || !micro_batch.digest_rows);
  if (flow != nullptr) {
    const int64_t rows = micro_batch.hidden.row_count;
    if (absl::Status status = flow->AwaitRows((rows + 1) / 2); !status.ok()) return status;
    if (absl::Status status = control_.Note("Upload"); !status.ok()) return status;
    if (absl::Status status = flow->AwaitRows(rows); !status.ok()) return status;
  }

  MicroBatchResult result;
  Gradients gradients;
  bool finite = true;
  float* grad_hidden = static_cast<float*>(micro_batch.grad_hidden.data);
  if (grad_hidden != nullptr)
    std::fill_n(grad_hidden, micro_batch.grad_hidden.row_count * micro_batch.grad_hidden.column_count, 0.0f);
  for (const LossTerm& term : micro_batch.terms) {
    FakeHead* head = static_cast<FakeHead*>(term.head);
    const int64_t width = head->spec_.hidden_size;
    LossSums& sums = result.terms.emplace_back();
    if (micro_batch.hidden.data_type != DataType::kFloat32 || micro_batch.hidden.column_count != width) {
      return MakeError(ErrorReason::kShapeMismatch, "the fake engine takes fp32 rows of the head's width");
    }
    const bool adds = micro_batch.grad_weight != GradWeightMode::kNone && head->spec_.trainable;
    if (adds) gradients[head][HeadTensor::kGradWeight].resize(head->tensors_[HeadTensor::kGradWeight].size());
    if (adds && head->spec_.has_bias) gradients[head][HeadTensor::kGradBias].resize(head->tensors_[HeadTensor::kGradBias].size());
    for (int64_t row = 0; row < term.row_count; ++row) {
      const float* hidden = static_cast<const float*>(micro_batch.hidden.data) + (term.row_start + row) * width;
      const int32_t token = term.targets.empty() ? 0 : term.targets[static_cast<size_t>(row)];
      if (term.lse != nullptr) term.lse[row] = 0;
      if (token == term.ignore_index) continue;
      if (token < 0 || token >= head->spec_.vocab_size) return MakeError(ErrorReason::kTargetOutOfVocab, "target out of range");
      std::vector<float> value(hidden, hidden + width);
      if (term.teacher_head != nullptr && term.teacher_hidden.data != nullptr) {
        const float* teacher_hidden = static_cast<const float*>(term.teacher_hidden.data) + row * term.teacher_hidden.column_count;
        value[0] += std::trunc(static_cast<FakeHead*>(term.teacher_head)->Tensor(HeadTensor::kWeight)[0]) * teacher_hidden[0];
      }
      if (term.lse != nullptr) term.lse[row] = head->Tensor(HeadTensor::kWeight)[static_cast<size_t>(token * width)];
      ++sums.valid_token_count;
      const float weight = term.token_weights.empty() ? 1.0F : term.token_weights[static_cast<size_t>(row)];
      sums.loss_sum += static_cast<double>(weight) * value[0];
      sums.token_weight_sum += weight;
      const bool row_is_finite = std::all_of(value.begin(), value.end(), [](float x) { return std::isfinite(x); });
      if (!row_is_finite) ++sums.non_finite_row_count;
      finite = finite && row_is_finite;
      const float scale = static_cast<float>(term.loss_scale) * weight;
      for (int64_t i = 0; i < width; ++i) {
        const float product = scale * value[static_cast<size_t>(i)];
        if (grad_hidden != nullptr) {
          grad_hidden[(term.row_start + row) * width + i] += static_cast<float>(micro_batch.grad_hidden_scale) * product;
        }
        if (adds) gradients[head][HeadTensor::kGradWeight][static_cast<size_t>(token * width + i)] += product;
      }
      if (adds && head->spec_.has_bias) gradients[head][HeadTensor::kGradBias][static_cast<size_t>(token)] += scale;
    }
  }
  EXPECT_FALSE(micro_batch.refuse_non_finite && micro_batch.grad_weight == GradWeightMode::kAccumulate);
  EXPECT_TRUE(micro_batch.backward || (micro_batch.grad_weight == GradWeightMode::kNone && grad_hidden == nullptr));
  const bool stages = micro_batch.grad_weight == GradWeightMode::kStage && !gradients.empty();
  for (const auto& [head, tensors] : gradients) {
    if (stages && head->FreeStagingSlots() <= 0) return MakeError(ErrorReason::kStagingFull, "no staging slot is free");
  }
  if (micro_batch.refuse_non_finite && !finite) return MakeError(ErrorReason::kNonFiniteValues, "there are non-finite rows");
  absl::Status decision;
  if (flow != nullptr) {
    DigestBuilder sum;
    sum.AddRows(0, 0, micro_batch.hidden.row_count, micro_batch.hidden.column_count * static_cast<int64_t>(sizeof(float)),
                micro_batch.hidden.data);
    decision = flow->Decide(micro_batch.digest_rows ? &sum : nullptr);
    if (!decision.ok() && control_.bug != FakeBug::kAddsUndecided) return decision;
    if (grad_hidden != nullptr) flow->GradHiddenReady(micro_batch.grad_hidden.row_count);
  }
  if (stages) {
    result.staged = std::make_unique<FakeStaged>(std::move(gradients), control_);
  } else if (accumulates) {
    absl::MutexLock lock(&adding_);
    Add(gradients, 1);
  }
  const bool is_repeat = micro_batch.backward && micro_batch.grad_weight == GradWeightMode::kNone;
  if (control_.bug == FakeBug::kRepeatsOtherwise && is_repeat && grad_hidden != nullptr) ++grad_hidden[0];
  control_.Done();
  if (!decision.ok()) return decision;
  if (!failure.ok()) return failure;
  return result;
}

}  // namespace headwater::testing
