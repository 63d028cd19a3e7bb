#include "tests/e2e/cpp/support/fp64_head.h"

#include <algorithm>

#include "kernels/reference/loss_reference.h"

namespace headwater::e2e {
namespace {

reference::Matrix MatrixOf(const std::vector<float>& values, int64_t columns) {
  return {static_cast<int64_t>(values.size()) / columns, columns, Doubles(values.begin(), values.end())};
}

reference::Head HeadOf(int64_t vocab_size, int64_t hidden_size, const Doubles& weight, const Doubles& bias) {
  reference::Head head = {{vocab_size, hidden_size, weight}, bias, {}, true};
  head.transform.valid_vocab_size = vocab_size;
  return head;
}

void Add(const Doubles& share, double factor, Doubles* sum) {
  for (size_t i = 0; i < share.size(); ++i) (*sum)[i] += factor * share[i];
}

}  // namespace

Fp64Head::Fp64Head(int64_t vocab_size, int64_t hidden_size, const std::vector<float>& weight, const std::vector<float>& bias)
    : vocab_size_(vocab_size),
      hidden_size_(hidden_size),
      weight_(weight.begin(), weight.end()),
      bias_(bias.begin(), bias.end()),
      grad_weight_(weight.size()),
      grad_bias_(bias.size()),
      moment1_(weight.size() + bias.size()),
      moment2_(weight.size() + bias.size()) {}

Fp64Head::Loss Fp64Head::CrossEntropy(const std::vector<float>& hidden, const std::vector<int32_t>& targets, double scale,
                                      double factor) {
  const reference::Head head = HeadOf(vocab_size_, hidden_size_, weight_, bias_);
  reference::Term term;
  term.head = &head;
  term.row_count = static_cast<int64_t>(targets.size());
  term.targets = targets;
  term.loss_scale = scale;
  const reference::Result result = reference::Compute(MatrixOf(hidden, hidden_size_), {&term, 1}, 1);
  Add(result.gradient.at(&head).weight.data, factor, &grad_weight_);
  Add(result.gradient.at(&head).bias, factor, &grad_bias_);
  return {result.terms[0].sums.loss_sum, result.grad_hidden.data};
}

Fp64Head::Loss Fp64Head::Jsd(const std::vector<float>& hidden, const Fp64Head& teacher, const std::vector<float>& teacher_hidden,
                             double beta, double student_temperature, double teacher_temperature, double scale) {
  const reference::Head head = HeadOf(vocab_size_, hidden_size_, weight_, bias_);
  const reference::Head teacher_head = HeadOf(teacher.vocab_size_, teacher.hidden_size_, teacher.weight_, teacher.bias_);
  reference::JsdOptions options;
  options.beta = beta;
  options.student_temperature = student_temperature;
  options.teacher_temperature = teacher_temperature;
  reference::Term term;
  term.head = &head;
  term.row_count = static_cast<int64_t>(hidden.size()) / hidden_size_;
  term.loss_scale = scale;
  term.loss = options;
  term.teacher_head = &teacher_head;
  term.teacher_hidden = MatrixOf(teacher_hidden, teacher.hidden_size_);
  const reference::Result result = reference::Compute(MatrixOf(hidden, hidden_size_), {&term, 1}, 1);
  Add(result.gradient.at(&head).weight.data, 1, &grad_weight_);
  Add(result.gradient.at(&head).bias, 1, &grad_bias_);
  return {result.terms[0].sums.loss_sum, result.grad_hidden.data};
}

double Fp64Head::GradNormSquared() const {
  double sum = 0;
  for (const Doubles* tensor : {&grad_weight_, &grad_bias_}) {
    for (const double value : *tensor) sum += value * value;
  }
  return sum;
}

void Fp64Head::Apply(double learning_rate, double weight_decay, double max_norm) {
  constexpr double kBeta1 = 0.9;
  constexpr double kBeta2 = 0.999;
  const double clip = std::min(1.0, max_norm / (std::sqrt(GradNormSquared()) + 1e-6));
  ++update_count_;
  const double correction1 = 1 - std::pow(kBeta1, update_count_);
  const double correction2 = 1 - std::pow(kBeta2, update_count_);
  size_t moment = 0;
  const auto update = [&](Doubles& values, Doubles& gradient) {
    for (size_t i = 0; i < values.size(); ++i, ++moment) {
      const double g = clip * gradient[i];
      moment1_[moment] = kBeta1 * moment1_[moment] + (1 - kBeta1) * g;
      moment2_[moment] = kBeta2 * moment2_[moment] + (1 - kBeta2) * g * g;
      values[i] -= learning_rate * weight_decay * values[i];
      values[i] -= learning_rate * (moment1_[moment] / correction1) / (std::sqrt(moment2_[moment] / correction2) + 1e-8);
      gradient[i] = 0;
    }
  };
  update(weight_, grad_weight_);
  update(bias_, grad_bias_);
}

}  // namespace headwater::e2e
