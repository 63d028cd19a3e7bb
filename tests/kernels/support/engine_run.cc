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

std::vector<std::unique_ptr<EngineHead>> MakeHeads(LossEngine& engine, const std::vector<TestHead>& heads) {
  std::vector<std::unique_ptr<EngineHead>> made;
  for (const TestHead& in : heads) {
    absl::StatusOr<std::unique_ptr<EngineHead>> head = engine.CreateHead(in.spec);
    if (!head.ok()) throw std::runtime_error("head: " + head.status().ToString());
    if (!in.weight.empty()) WriteTensorValues(**head, HeadTensor::kWeight, in.weight);
    if (!in.bias.empty()) WriteTensorValues(**head, HeadTensor::kBias, in.bias);
    made.push_back(*std::move(head));
  }
  return made;
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

double Gradient::SquaredNorm() const {
  double sum = 0;
  for (const std::vector<float>* part : {&weight, &bias}) {
    for (const float value : *part) sum += static_cast<double>(value) * value;
  }
  return sum;
}

static_assert(sizeof(LossSums) == 12 * sizeof(double), "compared as memory, it has no padding");

bool Outcome::BitwiseEquals(const Outcome& other) const {
  if (terms.size() != other.terms.size()) return false;
  for (size_t i = 0; i < terms.size(); ++i) {
    const TermOutcome& a = terms[i];
    const TermOutcome& b = other.terms[i];
    const auto same_output = [&](const TokenOutput& output) { return SameBits(a.*output.kept, b.*output.kept); };
    const bool same = std::memcmp(&a.sums, &b.sums, sizeof(LossSums)) == 0 && SameBits(a.argmax, b.argmax) &&
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
  micro_batch.flow = options.flow;
  if (options.grad_hidden) {
    grad_hidden_ = GuardedBuffer(problem.rows * problem.hidden_size * ElementBytes(problem.grad_hidden_type), kFloatPoison);
    micro_batch.grad_hidden = {grad_hidden_.data(), problem.rows, problem.hidden_size, problem.grad_hidden_type};
  }
  for (const TestTerm& in : problem.terms) {
    Inputs& inputs = inputs_.emplace_back(Inputs{in.targets, in.token_weights, in.entropy_factors, in.lse_factors, {}, {}});
    Outputs& outputs = outputs_.emplace_back();
    LossTerm& term = terms.emplace_back();
    term.head = heads[static_cast<size_t>(in.head)];
    term.row_start = in.row_start;
    term.row_count = in.row_count;
    term.targets = inputs.targets;
    term.ignore_index = in.ignore_index;
    term.token_weights = inputs.token_weights;
    term.entropy_factors = inputs.entropy_factors;
    term.lse_factors = inputs.lse_factors;
    term.loss_scale = in.loss_scale;
    term.loss = ToSpec(in.loss, &inputs.class_weights);
    term.gradient_resolution = in.gradient_resolution;
    term.dither_seed = in.dither_seed;
    if (in.teacher >= 0) {
      term.teacher_head = heads[static_cast<size_t>(in.teacher)];
      inputs.teacher_hidden = reference::Encode(in.teacher_type, in.teacher_hidden);
      term.teacher_hidden = {inputs.teacher_hidden.data(), in.row_count, term.teacher_head->spec().hidden_size, in.teacher_type};
    }
    if (!options.token_outputs) continue;
    const bool is_top_k = std::holds_alternative<reference::TopKOptions>(in.loss);
    for (size_t i = 0; i < (is_top_k ? 1 : std::size(kTokenOutputs)); ++i) {
      outputs[i] = GuardedBuffer(in.row_count * static_cast<int64_t>(sizeof(float)), kFloatPoison);
      term.*kTokenOutputs[i].written = reinterpret_cast<float*>(outputs[i].data());
    }
    if (is_top_k) continue;
    outputs.back() = GuardedBuffer(in.row_count * static_cast<int64_t>(sizeof(int32_t)), kIntegerPoison);
    term.argmax = reinterpret_cast<int32_t*>(outputs.back().data());
  }
  micro_batch.terms = terms;
  hidden_copy_ = hidden_;
  inputs_copy_ = inputs_;
}

void PreparedMicroBatch::Collect(const MicroBatchResult& result, Outcome* outcome) const {
  ExpectGuardsAndInputsIntact();
  ASSERT_EQ(result.terms.size(), terms.size());
  outcome->terms.clear();
  for (size_t i = 0; i < terms.size(); ++i) {
    const Outputs& outputs = outputs_[i];
    TermOutcome& term = outcome->terms.emplace_back();
    term.sums = result.terms[i];
    for (size_t k = 0; k < std::size(kTokenOutputs); ++k) {
      if (terms[i].*kTokenOutputs[k].written != nullptr) term.*kTokenOutputs[k].kept = CopyOut<float>(outputs[k]);
    }
    if (terms[i].argmax != nullptr) term.argmax = CopyOut<int32_t>(outputs.back());
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
  EXPECT_TRUE(inputs_ == inputs_copy_) << "a term's input was changed";
  for (const Outputs& outputs : outputs_) {
    for (const GuardedBuffer& output : outputs) EXPECT_TRUE(output.guards_intact()) << "written outside of an output";
  }
}

void PreparedMicroBatch::ExpectOutputsUntouched() const {
  ExpectGuardsAndInputsIntact();
  EXPECT_TRUE(grad_hidden_.untouched());
  for (const Outputs& outputs : outputs_) {
    for (const GuardedBuffer& output : outputs) EXPECT_TRUE(output.untouched());
  }
}

std::unique_ptr<LossEngine> MakeSuiteEngine(const EngineOptions& options) {
  absl::StatusOr<std::unique_ptr<LossEngine>> engine = Suite().make(options);
  if (!engine.ok()) throw std::runtime_error("engine: " + engine.status().ToString());
  return *std::move(engine);
}

LoadedHeads::LoadedHeads(const std::vector<TestHead>& heads, const EngineOptions& options)
    : own_engine_(MakeSuiteEngine(options)), engine_(*own_engine_), heads_(MakeHeads(engine_, heads)) {}

LoadedHeads::LoadedHeads(LossEngine& engine, const std::vector<TestHead>& heads)
    : engine_(engine), heads_(MakeHeads(engine, heads)) {}

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
  absl::StatusOr<MicroBatchResult> result = engine_.Compute(prepared.micro_batch);
  if (!result.ok() || outcome == nullptr) {
    prepared.ExpectGuardsAndInputsIntact();
    return result;
  }
  prepared.Collect(*result, outcome);
  if (options.read_gradients) outcome->gradients = ReadGradients();
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
