#include "tests/kernels/support/plain_computation.h"

#include <algorithm>
#include <cmath>

#include "kernels/reference/storage.h"

namespace headwater::testing {
namespace {

using Row = std::vector<float>;

struct PlainLogits {
  Row z;
  Row derivative;
};

PlainLogits Logits(const TestHead& head, const double* x) {
  const LogitTransform& transform = head.spec.transform;
  PlainLogits logits;
  for (int64_t v = 0; v < transform.valid_vocab_size; ++v) {
    float sum = 0;
    const double* weight = &head.weight[static_cast<size_t>(v * head.spec.hidden_size)];
    for (int64_t h = 0; h < head.spec.hidden_size; ++h) sum += static_cast<float>(x[h]) * static_cast<float>(weight[h]);
    if (!head.bias.empty()) sum += static_cast<float>(head.bias[static_cast<size_t>(v)]);
    const float scale = static_cast<float>(transform.logit_scale);
    float z = scale * sum;
    float derivative = scale;
    if (transform.softcap.has_value()) {
      const float softcap = static_cast<float>(*transform.softcap);
      const float tanh = std::tanh(z / softcap);
      z = softcap * tanh;
      derivative = scale * (1 - tanh * tanh);
    }
    logits.z.push_back(z);
    logits.derivative.push_back(derivative);
  }
  return logits;
}

float LogSumExp(const Row& z) {
  const float maximum = *std::max_element(z.begin(), z.end());
  float sum = 0;
  for (const float value : z) sum += std::exp(value - maximum);
  return maximum + std::log(sum);
}

Row Tempered(Row z, double temperature) {
  for (float& value : z) value /= static_cast<float>(temperature);
  return z;
}

Row LogSoftmax(const Row& z, size_t columns, double temperature) {
  Row scaled = Tempered(Row(z.begin(), z.begin() + static_cast<std::ptrdiff_t>(columns)), temperature);
  const float lse = LogSumExp(scaled);
  for (float& value : scaled) value -= lse;
  return scaled;
}

float CrossEntropy(const Row& logits, size_t target, const reference::CrossEntropyOptions& options, Row* gradient) {
  const Row z = Tempered(logits, options.temperature);
  const auto class_weight = [&](size_t v) {
    return options.class_weights.empty() ? 1.0f : static_cast<float>(options.class_weights[v]);
  };
  const float lse = LogSumExp(z);
  const float hard_mass = static_cast<float>(1 - options.label_smoothing) * class_weight(target);
  const float smooth_mass = static_cast<float>(options.label_smoothing) / static_cast<float>(z.size());
  const float z_loss = static_cast<float>(options.z_loss);
  float loss = hard_mass * (lse - z[target]) + z_loss * lse * lse;
  float mass = hard_mass;
  for (size_t v = 0; v < z.size(); ++v) {
    loss += smooth_mass * class_weight(v) * (lse - z[v]);
    mass += smooth_mass * class_weight(v);
  }
  gradient->resize(z.size());
  for (size_t v = 0; v < z.size(); ++v) {
    (*gradient)[v] = std::exp(z[v] - lse) * (mass + 2 * z_loss * lse) - smooth_mass * class_weight(v);
  }
  (*gradient)[target] -= hard_mass;
  const float scale = options.token_scaling ? std::exp(z[target] - lse) : 1;
  for (float& value : *gradient) value *= scale / static_cast<float>(options.temperature);
  return scale * loss;
}

void AddFactors(const Row& logits, double temperature, float entropy_factor, float lse_factor, Row* gradient) {
  const Row u = Tempered(logits, temperature);
  const float lse = LogSumExp(u);
  float mean = 0;
  for (const float value : u) mean += std::exp(value - lse) * value;
  for (size_t v = 0; v < u.size(); ++v) {
    (*gradient)[v] += std::exp(u[v] - lse) * (lse_factor - entropy_factor * (u[v] - mean)) / static_cast<float>(temperature);
  }
}

float LogAddExp(float a, float b) {
  const float maximum = std::max(a, b);
  return maximum + std::log1p(std::exp(-std::abs(a - b)));
}

float Kl(const Row& log_a, const Row& log_b) {
  float sum = 0;
  for (size_t v = 0; v < log_a.size(); ++v) sum += std::exp(log_a[v]) * (log_a[v] - log_b[v]);
  return sum;
}

float Jsd(const Row& student, const Row& teacher, const reference::JsdOptions& options, Row* gradient) {
  const size_t columns = std::min(student.size(), teacher.size());
  const Row log_q = LogSoftmax(student, columns, options.student_temperature);
  const Row log_p = LogSoftmax(teacher, columns, options.teacher_temperature);
  const float beta = static_cast<float>(options.beta);
  const float temperature = static_cast<float>(options.student_temperature);
  gradient->assign(student.size(), 0.0f);
  if (beta == 0) {
    for (size_t v = 0; v < columns; ++v) (*gradient)[v] = (std::exp(log_q[v]) - std::exp(log_p[v])) / temperature;
    return Kl(log_p, log_q);
  }
  Row log_m = log_p;
  float own_share = 1;
  if (beta < 1) {
    own_share = 1 - beta;
    for (size_t v = 0; v < columns; ++v) log_m[v] = LogAddExp(log_p[v] + std::log(beta), log_q[v] + std::log1p(-beta));
  }
  const float student_part = Kl(log_q, log_m);
  for (size_t v = 0; v < columns; ++v) {
    (*gradient)[v] = own_share * std::exp(log_q[v]) * (log_q[v] - log_m[v] - student_part) / temperature;
  }
  return beta == 1 ? student_part : beta * Kl(log_p, log_m) + own_share * student_part;
}

float TopK(const Row& z, size_t row, const reference::TopKOptions& options, Row* gradient) {
  const float temperature = static_cast<float>(options.student_temperature);
  const Row log_q = LogSoftmax(z, z.size(), options.student_temperature);
  Row p(z.size(), 0.0f);
  std::vector<bool> named(z.size(), false);
  float loss = 0;
  float mass = 0;
  for (size_t i = row * static_cast<size_t>(options.k); i < (row + 1) * static_cast<size_t>(options.k); ++i) {
    if (options.ids[i] < 0) continue;
    const size_t v = static_cast<size_t>(options.ids[i]);
    named[v] = true;
    p[v] = std::exp(options.log_probs[i]);
    mass += p[v];
    loss += p[v] * (options.log_probs[i] - log_q[v]);
  }
  const float rest = 1 - mass < 1e-6f ? 0 : 1 - mass;
  float student_rest = 0;
  for (size_t v = 0; v < z.size(); ++v) student_rest += named[v] ? 0 : std::exp(log_q[v]);
  if (rest > 0) loss += rest * (std::log(rest) - std::log(student_rest));
  gradient->resize(z.size());
  for (size_t v = 0; v < z.size(); ++v) {
    const float q = std::exp(log_q[v]);
    (*gradient)[v] = ((mass + rest) * q - (named[v] ? p[v] : rest == 0 ? 0 : rest * q / student_rest)) / temperature;
  }
  return loss;
}

// A row's loss and its derivative with respect to z.
float RowLoss(const Problem& problem, const TestTerm& term, size_t row, const Row& z, Row* gradient) {
  const size_t target = term.targets.empty() ? 0 : static_cast<size_t>(term.targets[row]);
  if (const auto* options = std::get_if<reference::CrossEntropyOptions>(&term.loss)) {
    return CrossEntropy(z, target, *options, gradient);
  }
  if (const auto* top_k = std::get_if<reference::TopKOptions>(&term.loss)) return TopK(z, row, *top_k, gradient);
  const auto& options = std::get<reference::JsdOptions>(term.loss);
  const TestHead& teacher = problem.heads[static_cast<size_t>(term.teacher)];
  const double* x = &term.teacher_hidden[row * static_cast<size_t>(teacher.spec.hidden_size)];
  float loss = Jsd(z, Logits(teacher, x).z, options, gradient);
  if (options.hard_loss_weight > 0) {
    const float hard_weight = static_cast<float>(options.hard_loss_weight);
    Row hard_gradient;
    loss = (1 - hard_weight) * loss + hard_weight * CrossEntropy(z, target, options.hard_loss, &hard_gradient);
    for (size_t v = 0; v < z.size(); ++v) (*gradient)[v] = (1 - hard_weight) * (*gradient)[v] + hard_weight * hard_gradient[v];
  }
  return loss;
}

// Adds a row's products; fp32 accumulators.
struct Accumulators {
  std::vector<float> grad_hidden;
  std::vector<std::vector<float>> grad_weight;
  std::vector<std::vector<float>> grad_bias;
};

void AddRow(const Problem& problem, const TestTerm& term, int64_t hidden_row, const Row& grad_product, Accumulators* sums) {
  const TestHead& head = problem.heads[static_cast<size_t>(term.head)];
  std::vector<float>& grad_weight = sums->grad_weight[static_cast<size_t>(term.head)];
  std::vector<float>& grad_bias = sums->grad_bias[static_cast<size_t>(term.head)];
  const size_t hidden_size = static_cast<size_t>(problem.hidden_size);
  const double* x = &problem.hidden[static_cast<size_t>(hidden_row) * hidden_size];
  float* grad_hidden = &sums->grad_hidden[static_cast<size_t>(hidden_row) * hidden_size];
  for (size_t v = 0; v < grad_product.size(); ++v) {
    const double* weight = &head.weight[v * hidden_size];
    for (size_t h = 0; h < hidden_size; ++h) grad_hidden[h] += grad_product[v] * static_cast<float>(weight[h]);
    if (!grad_bias.empty()) grad_bias[v] += grad_product[v];
    if (grad_weight.empty()) continue;
    for (size_t h = 0; h < hidden_size; ++h) grad_weight[v * hidden_size + h] += grad_product[v] * static_cast<float>(x[h]);
  }
}

}  // namespace

PlainResult ComputePlain(const Problem& problem) {
  Accumulators sums;
  sums.grad_hidden.resize(problem.hidden.size());
  for (const TestHead& head : problem.heads) {
    sums.grad_weight.emplace_back(head.spec.trainable ? head.weight.size() : 0);
    sums.grad_bias.emplace_back(head.spec.trainable ? head.bias.size() : 0);
  }
  PlainResult result;
  for (const TestTerm& term : problem.terms) {
    const TestHead& head = problem.heads[static_cast<size_t>(term.head)];
    PlainTerm plain_term;
    plain_term.token_loss.resize(static_cast<size_t>(term.row_count));
    for (int64_t row = 0; row < term.row_count; ++row) {
      const size_t i = static_cast<size_t>(row);
      if (!term.targets.empty() && term.targets[i] == term.ignore_index) continue;
      const double token_weight = term.token_weights.empty() ? 1.0 : term.token_weights[i];
      const int64_t hidden_row = term.row_start + row;
      const PlainLogits logits = Logits(head, &problem.hidden[static_cast<size_t>(hidden_row * problem.hidden_size)]);
      Row gradient;
      plain_term.token_loss[i] = RowLoss(problem, term, i, logits.z, &gradient);
      plain_term.loss_sum += token_weight * plain_term.token_loss[i];
      for (float& value : gradient) value *= static_cast<float>(token_weight);
      if (const auto* options = std::get_if<reference::CrossEntropyOptions>(&term.loss)) {
        const auto factor_of = [i](const std::vector<float>& factors) { return factors.empty() ? 0.0f : factors[i]; };
        AddFactors(logits.z, options->temperature, factor_of(term.entropy_factors), factor_of(term.lse_factors), &gradient);
      }
      for (size_t v = 0; v < gradient.size(); ++v) {
        const float value = gradient[v] * logits.derivative[v] * static_cast<float>(term.loss_scale);
        gradient[v] = static_cast<float>(reference::RoundTo(head.spec.data_type, value));
      }
      AddRow(problem, term, hidden_row, gradient, &sums);
    }
    result.terms.push_back(std::move(plain_term));
  }
  for (const float value : sums.grad_hidden) {
    result.grad_hidden.push_back(
        reference::RoundTo(problem.grad_hidden_type, value * static_cast<float>(problem.grad_hidden_scale)));
  }
  for (const auto& values : sums.grad_weight) result.grad_weight.emplace_back(values.begin(), values.end());
  for (const auto& values : sums.grad_bias) result.grad_bias.emplace_back(values.begin(), values.end());
  return result;
}

const PlainResult& PlainOf(const Problem& problem, const Expected& expected) {
  if (expected.plain == nullptr) expected.plain = std::make_shared<PlainResult>(ComputePlain(problem));
  return *expected.plain;
}

}  // namespace headwater::testing
