#include "tests/kernels/support/engine_run.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "gtest/gtest.h"
#include "kernels/reference/storage.h"
#include "tests/kernels/support/kernel_suite.h"

namespace headwater::testing {
namespace {

constexpr uint8_t kCanary = 0xA5;
// 0xFF.. is a NaN in every floating-point type; for integers 0x80.. is neither an id nor -1.
constexpr uint8_t kFloatPoison = 0xFF;
constexpr uint8_t kIntegerPoison = 0x80;

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <typename T>
std::vector<T> CopyOut(const GuardedBuffer& buffer) {
  std::vector<T> values(static_cast<size_t>(buffer.bytes()) / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), buffer.data(), values.size() * sizeof(T));
  return values;
}

bool SameSums(const LossSums& a, const LossSums& b) {
  // Doubles of equal bits; a NaN equals itself here.
  const double left[] = {a.loss_sum, a.soft_loss_sum, a.hard_loss_sum, a.z_loss_sum, a.token_weight_sum, a.target_weight_sum};
  const double right[] = {b.loss_sum, b.soft_loss_sum, b.hard_loss_sum, b.z_loss_sum, b.token_weight_sum, b.target_weight_sum};
  const double left_dither[] = {a.dither.squared_error, a.dither.squared_norm};
  const double right_dither[] = {b.dither.squared_error, b.dither.squared_norm};
  return std::memcmp(left, right, sizeof(left)) == 0 && std::memcmp(left_dither, right_dither, sizeof(left_dither)) == 0 &&
         a.dither.entry_count == b.dither.entry_count && a.valid_token_count == b.valid_token_count &&
         a.non_finite_row_count == b.non_finite_row_count;
}

CrossEntropySpec ToSpec(const reference::CrossEntropyOptions& options, const std::vector<float>& class_weights) {
  return {options.label_smoothing, options.z_loss, class_weights, options.temperature, options.token_scaling};
}

// The engine's loss options; class weights live in `class_weights`, a top-k teacher's rows where they are.
decltype(LossTerm::loss) ToSpec(const decltype(TestTerm::loss)& loss, std::vector<float>* class_weights) {
  if (const auto* top_k = std::get_if<reference::TopKOptions>(&loss)) {
    return TopKSpec{static_cast<int32_t>(top_k->k), top_k->ids, top_k->log_probs, top_k->student_temperature};
  }
  const auto* cross_entropy = std::get_if<reference::CrossEntropyOptions>(&loss);
  const auto* jsd = std::get_if<reference::JsdOptions>(&loss);
  const std::vector<double>& weights = (cross_entropy != nullptr ? *cross_entropy : jsd->hard_loss).class_weights;
  class_weights->assign(weights.begin(), weights.end());
  if (cross_entropy != nullptr) return ToSpec(*cross_entropy, *class_weights);
  return JsdSpec{jsd->beta,
                 jsd->student_temperature,
                 jsd->teacher_temperature,
                 jsd->hard_loss_weight,
                 jsd->hard_loss_weight > 0 ? ToSpec(jsd->hard_loss, *class_weights) : CrossEntropySpec{},
                 jsd->truncate_to_common};
}

}  // namespace

GuardedBuffer::GuardedBuffer(int64_t bytes, uint8_t poison)
    : storage_(static_cast<size_t>(bytes + 2 * kGuardBytes), kCanary), poison_(poison) {
  std::fill(storage_.begin() + kGuardBytes, storage_.end() - kGuardBytes, poison);
}

bool GuardedBuffer::guards_intact() const {
  if (storage_.empty()) return true;
  const auto is_canary = [](uint8_t byte) { return byte == kCanary; };
  return std::all_of(storage_.begin(), storage_.begin() + kGuardBytes, is_canary) &&
         std::all_of(storage_.end() - kGuardBytes, storage_.end(), is_canary);
}

bool GuardedBuffer::untouched() const {
  if (storage_.empty()) return true;
  return guards_intact() && std::all_of(storage_.begin() + kGuardBytes, storage_.end() - kGuardBytes,
                                        [this](uint8_t byte) { return byte == poison_; });
}

bool Gradient::operator==(const Gradient& other) const { return SameBits(weight, other.weight) && SameBits(bias, other.bias); }

bool Outcome::BitwiseEquals(const Outcome& other) const {
  if (terms.size() != other.terms.size()) return false;
  for (size_t i = 0; i < terms.size(); ++i) {
    const TermOutcome& a = terms[i];
    const TermOutcome& b = other.terms[i];
    const auto same_output = [&](const TokenOutput& output) { return SameBits(a.*output.kept, b.*output.kept); };
    const bool same = SameSums(a.sums, b.sums) && SameBits(a.argmax, b.argmax) &&
                      std::all_of(std::begin(kTokenOutputs), std::end(kTokenOutputs), same_output);
    if (!same) return false;
  }
  return SameBits(grad_hidden_bytes, other.grad_hidden_bytes) && gradients == other.gradients;
}

PreparedMicroBatch::PreparedMicroBatch(const Problem& problem, const std::vector<EngineHead*>& heads, const ComputeOptions& options)
    : hidden_(reference::Encode(problem.hidden_type, problem.hidden)) {
  micro_batch.hidden = {hidden_.data(), problem.rows, problem.hidden_size, problem.hidden_type};
  micro_batch.backward = options.backward;
  micro_batch.grad_hidden_scale = problem.grad_hidden_scale;
  micro_batch.grad_weight = options.grad_weight;
  micro_batch.refuse_non_finite = options.refuse_non_finite;
  if (options.grad_hidden) {
    grad_hidden_ = GuardedBuffer(problem.rows * problem.hidden_size * ElementBytes(problem.grad_hidden_type), kFloatPoison);
    micro_batch.grad_hidden = {grad_hidden_.data(), problem.rows, problem.hidden_size, problem.grad_hidden_type};
  }
  for (const TestTerm& in : problem.terms) {
    TermMemory& memory = memory_.emplace_back();
    LossTerm& term = terms.emplace_back();
    memory.targets = in.targets;
    memory.token_weights = in.token_weights;
    memory.entropy_factors = in.entropy_factors;
    memory.lse_factors = in.lse_factors;
    term.head = heads[static_cast<size_t>(in.head)];
    term.row_start = in.row_start;
    term.row_count = in.row_count;
    term.targets = memory.targets;
    term.ignore_index = in.ignore_index;
    term.token_weights = memory.token_weights;
    term.entropy_factors = memory.entropy_factors;
    term.lse_factors = memory.lse_factors;
    term.loss_scale = in.loss_scale;
    term.loss = ToSpec(in.loss, &memory.class_weights);
    term.gradient_resolution = in.gradient_resolution;
    term.dither_seed = in.dither_seed;
    if (in.teacher >= 0) {
      term.teacher_head = heads[static_cast<size_t>(in.teacher)];
      memory.teacher_hidden = reference::Encode(in.teacher_type, in.teacher_hidden);
      term.teacher_hidden = {memory.teacher_hidden.data(), in.row_count, term.teacher_head->spec().hidden_size, in.teacher_type};
    }
    if (!options.token_outputs) continue;
    const bool is_top_k = std::holds_alternative<reference::TopKOptions>(in.loss);
    for (size_t i = 0; i < (is_top_k ? 1 : std::size(kTokenOutputs)); ++i) {
      memory.outputs[i] = GuardedBuffer(in.row_count * static_cast<int64_t>(sizeof(float)), kFloatPoison);
      term.*kTokenOutputs[i].written = reinterpret_cast<float*>(memory.outputs[i].data());
    }
    if (is_top_k) continue;
    memory.outputs.back() = GuardedBuffer(in.row_count * static_cast<int64_t>(sizeof(int32_t)), kIntegerPoison);
    term.argmax = reinterpret_cast<int32_t*>(memory.outputs.back().data());
  }
  micro_batch.terms = terms;
  hidden_copy_ = hidden_;
  memory_copy_ = memory_;
}

void PreparedMicroBatch::Collect(const MicroBatchResult& result, Outcome* outcome) const {
  ExpectGuardsAndInputsIntact();
  ASSERT_EQ(result.terms.size(), memory_.size());
  outcome->terms.clear();
  for (size_t i = 0; i < memory_.size(); ++i) {
    const TermMemory& memory = memory_[i];
    TermOutcome& term = outcome->terms.emplace_back();
    term.sums = result.terms[i];
    for (size_t k = 0; k < std::size(kTokenOutputs); ++k) {
      if (terms[i].*kTokenOutputs[k].written != nullptr) term.*kTokenOutputs[k].kept = CopyOut<float>(memory.outputs[k]);
    }
    if (terms[i].argmax != nullptr) term.argmax = CopyOut<int32_t>(memory.outputs.back());
  }
  if (micro_batch.grad_hidden.data != nullptr) {
    outcome->grad_hidden_bytes = CopyOut<uint8_t>(grad_hidden_);
    outcome->grad_hidden = reference::Decode(micro_batch.grad_hidden.data_type, grad_hidden_.data(),
                                             micro_batch.grad_hidden.row_count * micro_batch.grad_hidden.column_count);
  }
}

void PreparedMicroBatch::ExpectGuardsAndInputsIntact() const {
  EXPECT_TRUE(grad_hidden_.guards_intact()) << "written outside of grad_hidden";
  EXPECT_TRUE(SameBits(hidden_, hidden_copy_)) << "hidden was changed";
  for (size_t i = 0; i < memory_.size(); ++i) {
    for (const GuardedBuffer& output : memory_[i].outputs) EXPECT_TRUE(output.guards_intact()) << "written outside of an output";
    EXPECT_TRUE(SameBits(memory_[i].targets, memory_copy_[i].targets));
    EXPECT_TRUE(SameBits(memory_[i].token_weights, memory_copy_[i].token_weights));
    EXPECT_TRUE(SameBits(memory_[i].entropy_factors, memory_copy_[i].entropy_factors));
    EXPECT_TRUE(SameBits(memory_[i].lse_factors, memory_copy_[i].lse_factors));
    EXPECT_TRUE(SameBits(memory_[i].class_weights, memory_copy_[i].class_weights));
    EXPECT_TRUE(SameBits(memory_[i].teacher_hidden, memory_copy_[i].teacher_hidden));
  }
}

void PreparedMicroBatch::ExpectOutputsUntouched() const {
  ExpectGuardsAndInputsIntact();
  EXPECT_TRUE(grad_hidden_.untouched());
  for (const TermMemory& memory : memory_) {
    for (const GuardedBuffer& output : memory.outputs) EXPECT_TRUE(output.untouched());
  }
}

std::unique_ptr<LossEngine> MakeSuiteEngine(const EngineOptions& options) {
  absl::StatusOr<std::unique_ptr<LossEngine>> engine = SuiteEngineFactory()(options);
  if (!engine.ok()) throw std::runtime_error("engine: " + engine.status().ToString());
  return *std::move(engine);
}

LoadedHeads::LoadedHeads(const std::vector<TestHead>& heads, const EngineOptions& options) : engine_(MakeSuiteEngine(options)) {
  for (const TestHead& in : heads) {
    absl::StatusOr<std::unique_ptr<EngineHead>> head = engine_->CreateHead(in.spec);
    if (!head.ok()) throw std::runtime_error("head: " + head.status().ToString());
    if (!in.weight.empty()) WriteTensorValues(**head, HeadTensor::kWeight, in.weight);
    if (!in.bias.empty()) WriteTensorValues(**head, HeadTensor::kBias, in.bias);
    heads_.push_back(*std::move(head));
  }
}

std::vector<EngineHead*> LoadedHeads::pointers() const {
  std::vector<EngineHead*> pointers;
  for (const auto& head : heads_) pointers.push_back(head.get());
  return pointers;
}

Gradient LoadedHeads::ReadGradient(int head) const {
  const EngineHead& engine_head = *heads_[static_cast<size_t>(head)];
  Gradient gradient;
  for (const auto& [tensor, values] :
       {std::pair{HeadTensor::kGradWeight, &gradient.weight}, {HeadTensor::kGradBias, &gradient.bias}}) {
    const int64_t count = engine_head.ElementCount(tensor);
    values->resize(static_cast<size_t>(count));
    if (count > 0) {
      EXPECT_TRUE(engine_head.ReadTensor(tensor, 0, count, values->data()).ok());
    }
  }
  return gradient;
}

std::vector<Gradient> LoadedHeads::ReadGradients() const {
  std::vector<Gradient> gradients;
  for (size_t i = 0; i < heads_.size(); ++i) gradients.push_back(ReadGradient(static_cast<int>(i)));
  return gradients;
}

void LoadedHeads::ZeroGradients() {
  for (const auto& head : heads_) {
    if (head->spec().trainable) {
      EXPECT_TRUE(head->ZeroGradient().ok());
    }
  }
}

absl::StatusOr<MicroBatchResult> LoadedHeads::TryCompute(const Problem& problem, const ComputeOptions& options, Outcome* outcome) {
  const PreparedMicroBatch prepared(problem, pointers(), options);
  absl::StatusOr<MicroBatchResult> result = engine_->Compute(prepared.micro_batch);
  if (!result.ok()) {
    prepared.ExpectGuardsAndInputsIntact();
  } else if (outcome != nullptr) {
    prepared.Collect(*result, outcome);
    outcome->gradients = ReadGradients();
  }
  return result;
}

Outcome LoadedHeads::Compute(const Problem& problem, const ComputeOptions& options) {
  Outcome outcome;
  const absl::StatusOr<MicroBatchResult> result = TryCompute(problem, options, &outcome);
  if (!result.ok()) throw std::runtime_error("Compute: " + result.status().ToString());
  return outcome;
}

std::unique_ptr<StagedContribution> LoadedHeads::Stage(const Problem& problem, ComputeOptions options, Outcome* outcome) {
  options.grad_weight = GradWeightMode::kStage;
  absl::StatusOr<MicroBatchResult> result = TryCompute(problem, options, outcome);
  if (!result.ok()) throw std::runtime_error("Compute: " + result.status().ToString());
  if (result->staged == nullptr) throw std::runtime_error("no contribution came back");
  return std::move(result->staged);
}

Outcome RunOnce(const Problem& problem, const EngineOptions& engine_options, const ComputeOptions& options) {
  LoadedHeads heads(problem.heads, engine_options);
  return heads.Compute(problem, options);
}

std::vector<double> ReadTensorValues(const EngineHead& head, HeadTensor tensor) {
  const int64_t count = head.ElementCount(tensor);
  const DataType type = head.TensorDataType(tensor);
  std::vector<uint8_t> bytes(static_cast<size_t>(count * ElementBytes(type)));
  const absl::Status status = head.ReadTensor(tensor, 0, count, bytes.data());
  if (!status.ok()) throw std::runtime_error("ReadTensor: " + status.ToString());
  return reference::Decode(type, bytes.data(), count);
}

void WriteTensorValues(EngineHead& head, HeadTensor tensor, const std::vector<double>& values) {
  const std::vector<uint8_t> bytes = reference::Encode(head.TensorDataType(tensor), values);
  const absl::Status status = head.WriteTensor(tensor, 0, static_cast<int64_t>(values.size()), bytes.data());
  if (!status.ok()) throw std::runtime_error("WriteTensor: " + status.ToString());
}

}  // namespace headwater::testing
