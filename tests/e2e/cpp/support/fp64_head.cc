#include "tests/e2e/cpp/support/fp64_head.h"

#include <algorithm>

namespace headwater::e2e {
namespace {

Doubles LogSoftmax(Doubles logits, double temperature) {
  double largest = -std::numeric_limits<double>::infinity();
  for (double& logit : logits) {
    logit /= temperature;
    largest = std::max(largest, logit);
  }
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit - largest);
  for (double& logit : logits) logit -= largest + std::log(sum);
  return logits;
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

Doubles Fp64Head::Logits(const float* row) const {
  Doubles logits = bias_;
  for (int64_t v = 0; v < vocab_size_; ++v) {
    for (int64_t h = 0; h < hidden_size_; ++h) logits[v] += static_cast<double>(row[h]) * weight_[v * hidden_size_ + h];
  }
  return logits;
}

void Fp64Head::AddGradient(const float* row, const Doubles& grad_logits, double factor, double* grad_row) {
  for (int64_t v = 0; v < vocab_size_; ++v) {
    for (int64_t h = 0; h < hidden_size_; ++h) {
      grad_row[h] += grad_logits[v] * weight_[v * hidden_size_ + h];
      grad_weight_[v * hidden_size_ + h] += factor * grad_logits[v] * row[h];
    }
    grad_bias_[v] += factor * grad_logits[v];
  }
}

Fp64Head::Loss Fp64Head::CrossEntropy(const std::vector<float>& hidden, const std::vector<int32_t>& targets, double scale,
                                      double factor) {
  Loss loss;
  loss.grad_hidden.resize(hidden.size());
  for (size_t t = 0; t < targets.size(); ++t) {
    if (targets[t] == -100) continue;
    const float* const row = hidden.data() + t * hidden_size_;
    const Doubles log_p = LogSoftmax(Logits(row), 1.0);
    loss.sum -= log_p[targets[t]];
    Doubles grad_logits(vocab_size_);
    for (int64_t v = 0; v < vocab_size_; ++v) grad_logits[v] = scale * (std::exp(log_p[v]) - (v == targets[t] ? 1.0 : 0.0));
    AddGradient(row, grad_logits, factor, loss.grad_hidden.data() + t * hidden_size_);
  }
  return loss;
}

Fp64Head::Loss Fp64Head::Jsd(const std::vector<float>& hidden, const Fp64Head& teacher, const std::vector<float>& teacher_hidden,
                             double beta, double student_temperature, double teacher_temperature, double scale) {
  Loss loss;
  loss.grad_hidden.resize(hidden.size());
  const size_t rows = hidden.size() / hidden_size_;
  for (size_t t = 0; t < rows; ++t) {
    const float* const row = hidden.data() + t * hidden_size_;
    const Doubles log_q = LogSoftmax(Logits(row), student_temperature);
    const Doubles log_p = LogSoftmax(teacher.Logits(teacher_hidden.data() + t * teacher.hidden_size_), teacher_temperature);
    // d/d log_q_v of the sum is (1 - beta) * q_v * log(q_v / m_v); the mixture's own derivative cancels.
    Doubles grad_log_q(vocab_size_);
    double grad_sum = 0;
    for (int64_t v = 0; v < vocab_size_; ++v) {
      const double p = std::exp(log_p[v]);
      const double q = std::exp(log_q[v]);
      const double log_m = std::log(beta * p + (1 - beta) * q);
      loss.sum += beta * p * (log_p[v] - log_m) + (1 - beta) * q * (log_q[v] - log_m);
      grad_log_q[v] = (1 - beta) * q * (log_q[v] - log_m);
      grad_sum += grad_log_q[v];
    }
    Doubles grad_logits(vocab_size_);
    for (int64_t v = 0; v < vocab_size_; ++v) {
      grad_logits[v] = scale / student_temperature * (grad_log_q[v] - std::exp(log_q[v]) * grad_sum);
    }
    AddGradient(row, grad_logits, 1.0, loss.grad_hidden.data() + t * hidden_size_);
  }
  return loss;
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
