// Model: steps, from the seal to the next one.
#include <algorithm>
#include <cmath>

#include "model.h"

namespace headwater::history {

double Model::NormSquared(const ModelHead& head) {
  double sum = 0;
  for (const std::vector<float>* values : {&head.gradient, &head.gradient_bias}) {
    for (const float value : *values) sum += static_cast<double>(value) * value;
  }
  return sum;
}

std::vector<double> Model::TotalsOf(const ModelStep& step) {
  double count = 0;
  ModelCounts totals;
  for (const auto& [id, record] : step.records) {
    if (record.state != 'C') continue;
    ++count;
    totals.valid_tokens += record.counts.valid_tokens;
    totals.loss += record.counts.loss;
    totals.token_weight += record.counts.token_weight;
    totals.non_finite_rows += record.counts.non_finite_rows;
  }
  return {count, totals.valid_tokens, totals.loss, totals.token_weight, totals.non_finite_rows};
}

namespace {

double NonFiniteCount(const ModelHead& head) {
  double count = 0;
  for (const std::vector<float>* values : {&head.gradient, &head.gradient_bias}) {
    for (const float value : *values) count += !std::isfinite(value);
  }
  return count;
}

}  // namespace

// ---- ends of steps and lives -----------------------------------------------------------------------------------------

void Model::OpenStep(ModelHead& head, int64_t step) {
  head.open = ModelStep();
  head.open.number = step;
  std::fill(head.gradient.begin(), head.gradient.end(), 0.0f);
  std::fill(head.gradient_bias.begin(), head.gradient_bias.end(), 0.0f);
  head.shadow.clear();
  head.replaced.clear();
  head.applied_reply.clear();
}

void Model::CloseStep(int name, char how) {
  DropAll(name);
  ModelHead& head = At(name);
  head.open.state = how;
  head.closed = head.open;
  OpenStep(head, head.closed->number + 1);
}

void Model::Reset(int name, int64_t step) {
  DropAll(name);
  ModelHead& head = At(name);
  head.closed.reset();
  head.restored_checkpoint.clear();
  OpenStep(head, step);
}

// The head's state is no longer a continuation.
void Model::StartAgain(int name, int64_t step) {
  Reset(name, step);
  At(name).epoch = -1;
  At(name).recovers.clear();
}

void Model::Lose(int name) {
  ModelHead& head = At(name);
  Reset(name, head.open.number);
  head.state = 'X';
  head.has_weight = head.has_bias = head.has_checksum = false;
}

// ---- calls -----------------------------------------------------------------------------------------------------------

std::string Model::CheckExpectation(const ModelStep& step, const heads::ExpectedMicroBatches& expected) const {
  std::set<int64_t> ids;
  if (const int64_t* count = std::get_if<int64_t>(&expected)) {
    if (*count < 0) return "INVALID_FIELD";
    for (int64_t id = 0; id < *count; ++id) ids.insert(id);
  } else {
    for (const int64_t id : std::get<std::vector<int64_t>>(expected)) {
      if (id < 0 || !ids.insert(id).second) return "INVALID_FIELD";
    }
  }
  for (const int64_t id : ids) {
    const auto found = step.records.find(id);
    if (found == step.records.end() || found->second.state == 'D' || found->second.state == 'N') return "MICRO_BATCH_MISSING";
  }
  for (const auto& [id, record] : step.records) {
    if (record.state == 'S') return "MICRO_BATCH_UNCOMMITTED";
  }
  for (const auto& [id, record] : step.records) {
    if (record.state == 'C' && !ids.contains(id)) return "MICRO_BATCH_UNEXPECTED";
  }
  return "";
}

Expected Model::Seal(const Event& event) {
  const Target& target = event.targets[0];
  if (std::string problem = CheckKey(target); !problem.empty()) return Refuse(problem);
  ModelHead& head = At(target.head);
  if (std::string problem = CheckExpectation(head.open, *event.expected); !problem.empty()) return Refuse(problem);
  const bool again = head.open.state == 'S';
  head.open.state = 'S';
  if (Fails(event, "ComputeGradientStats")) return Fail(event);
  return Answer(Numbers(again, NormSquared(head), NonFiniteCount(head), TotalsOf(head.open)));
}

std::string Model::CheckApply(const ModelHead& head, const heads::ApplyArguments& arguments) const {
  if (std::holds_alternative<std::monostate>(head.spec.optimizer)) return "OPTIMIZER_NOT_CONFIGURED";
  if (!std::isfinite(arguments.learning_rate) || arguments.learning_rate < 0) return "INVALID_FIELD";
  if (arguments.beta1.has_value() && !std::holds_alternative<AdamWSpec>(head.spec.optimizer)) return "INVALID_COMBINATION";
  if (arguments.momentum.has_value()) return "INVALID_COMBINATION";  // no head here has any
  return "";
}

Expected Model::Apply(const Event& event) {
  const Target& target = event.targets[0];
  const heads::ApplyArguments& arguments = event.apply;
  if (std::string problem = CheckHead(target.head, target.epoch, true, 'R'); !problem.empty()) return Refuse(problem);
  ModelHead& head = At(target.head);
  if (std::string problem = CheckApply(head, arguments); !problem.empty()) return Refuse(problem);
  if (head.closed.has_value() && head.closed->number == *target.step) {
    const bool same_expectation =
        !event.expected.has_value() || !head.applied_expectation.has_value() || *event.expected == *head.applied_expectation;
    if (head.closed->state != 'A' || !(head.applied == arguments) || !same_expectation) return Refuse("STEP_CONFLICT");
    Expected again = Answer(head.applied_reply);
    again.numbers[0] = 1;
    return again;
  }
  if (*target.step != head.open.number) return Refuse("STEP_MISMATCH");
  if (event.expected.has_value()) {
    if (std::string problem = CheckExpectation(head.open, *event.expected); !problem.empty()) return Refuse(problem);
    head.open.state = 'S';
  } else if (head.open.state == 'O') {
    return Refuse("MISSING_FIELD");
  }
  if (Fails(event, "ComputeGradientStats")) return Fail(event);
  const double norm_squared = NormSquared(head) * arguments.gradient_factor * arguments.gradient_factor;
  const double norm = std::sqrt(norm_squared + arguments.other_grad_norm_squared);
  if (NonFiniteCount(head) > 0 || !std::isfinite(norm)) return Refuse("NON_FINITE_GRADIENT");
  if (Fails(event, "ApplyOptimizer")) return Fail(event, {target.head});
  // As torch.nn.utils.clip_grad_norm_ does it.
  const double clip = arguments.max_grad_norm.has_value() ? std::min(1.0, *arguments.max_grad_norm / (norm + 1e-6)) : 1;
  const double multiplier = arguments.gradient_factor * clip;
  const auto update = [&](std::vector<float>& weight, const std::vector<float>& gradient, std::vector<float>& moment1,
                          std::vector<float>& moment2) {
    for (size_t i = 0; i < weight.size(); ++i) {
      const float scaled = static_cast<float>(gradient[i] * multiplier);
      const float change = static_cast<float>(arguments.learning_rate) * scaled;
      weight[i] -= change;
      if (moment1.empty()) continue;
      const float square = scaled * scaled;
      moment1[i] += scaled;
      moment2[i] += square;
    }
  };
  update(head.tensors.weight, head.gradient, head.tensors.moment1, head.tensors.moment2);
  update(head.tensors.bias, head.gradient_bias, head.tensors.moment1_bias, head.tensors.moment2_bias);
  const std::vector<double> totals = TotalsOf(head.open);
  ++head.version;
  ++head.update_count;
  head.has_checksum = false;
  CloseStep(target.head, 'A');
  head.applied = arguments;
  head.applied_expectation = event.expected;
  head.applied_reply = Numbers(0, head.open.number, head.version, norm, norm_squared, clip, totals, head.update_count);
  return Answer(head.applied_reply);
}

Expected Model::DiscardGradient(const Event& event) {
  const Target& target = event.targets[0];
  if (std::string problem = CheckHead(target.head, target.epoch, true, 'R'); !problem.empty()) return Refuse(problem);
  ModelHead& head = At(target.head);
  if (head.closed.has_value() && head.closed->number == *target.step) {
    if (head.closed->state != 'D') return Refuse("STEP_CONFLICT");
    return Answer(Numbers(head.open.number, 1));
  }
  if (*target.step != head.open.number) return Refuse("STEP_MISMATCH");
  if (Fails(event, "ZeroGradient")) return Fail(event, {target.head});
  CloseStep(target.head, 'D');
  return Answer(Numbers(head.open.number, 0));
}

// The trainer owns the optimizer: its weights close the step when all of them are there.
Expected Model::Replace(const Event& event) {
  const Target& target = event.targets[0];
  ModelHead& head = At(target.head);
  const HeadTensor tensor = event.tensors[0];
  const bool is_bias = tensor == HeadTensor::kBias;
  Reasons problems;
  if (is_bias && !head.spec.has_bias) problems.push_back("INVALID_FIELD");
  if (event.wrong_size) problems.push_back("DATA_LENGTH_MISMATCH");
  if (std::string problem = CheckHead(target.head, target.epoch, true, 'R'); !problem.empty()) {
    problems.push_back(problem);
    return Refuse(problems);
  }
  const int64_t count = head.spec.vocab_size * (is_bias ? 1 : kWidth);
  const std::vector<float> values = MakeNumbers(event.numbers, count);
  if (head.closed.has_value() && head.closed->number == *target.step) {
    const auto found = head.replaced.find(tensor);
    const bool same = head.closed->state == 'R' && found != head.replaced.end() && found->second == values;
    if (problems.empty() && same) return Answer({1});
    problems.push_back("STEP_CONFLICT");
    return Refuse(problems);
  }
  if (*target.step != head.open.number) {
    problems.push_back("STEP_MISMATCH");
  } else if (head.open.state != 'S') {
    problems.push_back("STEP_NOT_SEALED");
  }
  if (!problems.empty()) return Refuse(problems);
  head.shadow[tensor] = values;
  if (head.shadow.size() < (head.spec.has_bias ? 2u : 1u)) return Answer({0});
  if (Fails(event, "WriteTensor") || Fails(event, "ZeroGradient")) {
    const bool begun = Fails(event, "ZeroGradient") || event.failure == ErrorReason::kEngineFailed;
    if (begun) Lose(target.head);
    return Refuse(ErrorReasonName(event.failure));
  }
  const std::map<HeadTensor, std::vector<float>> shadow = head.shadow;
  CloseStep(target.head, 'R');
  head.tensors.weight = shadow.at(HeadTensor::kWeight);
  if (head.spec.has_bias) head.tensors.bias = shadow.at(HeadTensor::kBias);
  head.replaced = shadow;
  head.has_checksum = true;
  ++head.version;
  return Answer({1});
}

Expected Model::ReadGradient(const Event& event) {
  const Target& target = event.targets[0];
  if (std::string problem = CheckKey(target); !problem.empty()) return Refuse(problem);
  const ModelHead& head = At(target.head);
  if (Fails(event, event.op == Op::kGradientNorm ? "ComputeGradientStats" : "ReadTensor")) return Fail(event);
  return Answer(event.op == Op::kGradientNorm ? Numbers(NormSquared(head), NonFiniteCount(head)) : Numbers(head.gradient));
}

Expected Model::Take(const Event& event) {
  const Target& target = event.targets[0];
  if (std::string problem = CheckHead(target.head, kNoEpoch, true, 'A'); !problem.empty()) return Refuse(problem);
  ModelHead& head = At(target.head);
  Reasons problems;
  if (head.state == 'X') problems.push_back("STEP_LOST");
  if (target.epoch != kNoEpoch && target.epoch != head.epoch) problems.push_back("EPOCH_FENCED");
  if (!problems.empty()) return Refuse(problems);
  if (Fails(event, "ZeroGradient")) return Fail(event, {target.head});
  StartAgain(target.head, head.open.number);
  if (head.state == 'B') head.state = 'R';
  for (const int epoch : event.recovers) head.recovers.push_back(epoch < epoch_count_ ? epoch : kForeignEpoch);
  return Answer(HeadNumbers(target.head));
}

}  // namespace headwater::history
