#include "kernels/reference/row_losses.h"

#include <algorithm>
#include <cmath>

namespace headwater::reference {
namespace {

Real ClassWeight(const CrossEntropyOptions& options, size_t column) {
  return options.class_weights.empty() ? 1 : static_cast<Real>(options.class_weights[column]);
}

// ln p_v of softmax(z / temperature) over the first `columns` columns.
std::vector<Real> LogProbabilities(absl::Span<const Real> z, size_t columns, double temperature) {
  std::vector<Real> scaled = Tempered(z.first(columns), temperature);
  const Real lse = LogSumExp(scaled);
  for (Real& value : scaled) value -= lse;
  return scaled;
}

// ln(beta e^log_p + (1 - beta) e^log_q) for 0 < beta < 1.
Real LogMixture(Real log_p, Real log_q, Real beta) { return std::log(beta * std::exp(log_p) + (1 - beta) * std::exp(log_q)); }

// e^log_a (log_a - log_b), with 0 ln 0 = 0 for classes that a bias of -infinity rules out.
Real KlSummand(Real log_a, Real log_b) {
  const Real a = std::exp(log_a);
  return a == 0 ? 0 : a * (log_a - log_b);
}

// sum_v e^log_a_v (log_a_v - log_b_v).
Real KlDivergence(absl::Span<const Real> log_a, absl::Span<const Real> log_b) {
  Real sum = 0;
  for (size_t v = 0; v < log_a.size(); ++v) sum += KlSummand(log_a[v], log_b[v]);
  return sum;
}

// Sums over all columns but the first largest one, with d = the largest logit less the column's.
struct Spread {
  size_t top = 0;
  Real rest = 0;      // sum e^-d
  Real distance = 0;  // sum e^-d d
  Real squares = 0;   // sum e^-2d
};

Spread SpreadOf(absl::Span<const Real> z) {
  Spread spread;
  spread.top = static_cast<size_t>(std::max_element(z.begin(), z.end()) - z.begin());
  for (size_t v = 0; v < z.size(); ++v) {
    if (v == spread.top) continue;
    const Real distance = z[spread.top] - z[v];
    const Real e = std::exp(-distance);
    spread.rest += e;
    spread.distance += e == 0 ? 0 : e * distance;
    spread.squares += e * e;
  }
  return spread;
}

}  // namespace

RowLogits TransformLogits(absl::Span<const double> products, const LogitTransform& transform) {
  RowLogits logits;
  const size_t columns = static_cast<size_t>(transform.valid_vocab_size);
  for (size_t v = 0; v < columns; ++v) {
    const Real scaled = static_cast<Real>(transform.logit_scale) * products[v];
    if (!transform.softcap.has_value()) {
      logits.z.push_back(scaled);
      logits.derivative.push_back(transform.logit_scale);
      continue;
    }
    const Real softcap = *transform.softcap;
    // d tanh(u) / du = 1 / cosh(u)^2: keeps its digits where tanh is 1.
    const Real cosine = std::cosh(scaled / softcap);
    logits.z.push_back(softcap * std::tanh(scaled / softcap));
    logits.derivative.push_back(transform.logit_scale / (cosine * cosine));
  }
  return logits;
}

Real LogSumExp(absl::Span<const Real> z) {
  Real sum = 0;
  for (const Real value : z) sum += std::exp(value);
  return std::log(sum);
}

std::vector<Real> Tempered(absl::Span<const Real> z, double temperature) {
  std::vector<Real> u(z.begin(), z.end());
  for (Real& value : u) value /= temperature;
  return u;
}

Real Entropy(absl::Span<const Real> z) {
  const Spread spread = SpreadOf(z);
  return std::log1p(spread.rest) + spread.distance / (1 + spread.rest);
}

std::vector<Real> EntropyGradient(absl::Span<const Real> z) {
  const Spread spread = SpreadOf(z);
  const Real mean = spread.distance / (1 + spread.rest);
  std::vector<Real> gradient;
  for (const Real value : z) {
    const Real distance = z[spread.top] - value;
    gradient.push_back(std::exp(-distance) / (1 + spread.rest) * (distance - mean));
  }
  return gradient;
}

std::vector<Real> LseGradient(absl::Span<const Real> z) {
  const Real lse = LogSumExp(z);
  std::vector<Real> gradient;
  for (const Real value : z) gradient.push_back(std::exp(value - lse));
  return gradient;
}

Real LogSumSqProbs(absl::Span<const Real> z) {
  const Spread spread = SpreadOf(z);
  return std::log1p(spread.squares) - 2 * std::log1p(spread.rest);
}

Real MeanLogit(absl::Span<const Real> z) {
  Real sum = 0;
  for (const Real value : z) sum += value;
  return sum / static_cast<Real>(z.size());
}

Real TargetLogProbability(absl::Span<const Real> z, int64_t target) {
  const size_t y = static_cast<size_t>(target);
  Real rest = 0;
  for (size_t v = 0; v < z.size(); ++v) {
    if (v != y) rest += std::exp(z[v] - z[y]);
  }
  return -std::log1p(rest);
}

RowLoss CrossEntropyRow(absl::Span<const Real> logits, int64_t target, const CrossEntropyOptions& options) {
  const std::vector<Real> z = Tempered(logits, options.temperature);
  const size_t y = static_cast<size_t>(target);
  const Real columns = static_cast<Real>(z.size());
  const Real lse = LogSumExp(z);
  const Real hard_mass = (1 - static_cast<Real>(options.label_smoothing)) * ClassWeight(options, y);
  const Real smooth_mass = static_cast<Real>(options.label_smoothing) / columns;

  RowLoss row;
  row.hard = -hard_mass * TargetLogProbability(z, target);
  Real class_weight_sum = 0;
  for (size_t v = 0; v < z.size(); ++v) {
    if (smooth_mass != 0) row.hard += smooth_mass * ClassWeight(options, v) * (lse - z[v]);
    class_weight_sum += ClassWeight(options, v);
  }
  row.z_loss = options.z_loss * lse * lse;

  Real probability_of_others = 0;
  row.gradient.resize(z.size());
  for (size_t v = 0; v < z.size(); ++v) {
    const Real probability = std::exp(z[v] - lse);
    if (v != y) probability_of_others += probability;
    // The target's own share of the hard part follows when the others' sum is known.
    row.gradient[v] = (v == y ? 0 : hard_mass * probability);
    row.gradient[v] += smooth_mass * (class_weight_sum * probability - ClassWeight(options, v));
    row.gradient[v] += 2 * options.z_loss * lse * probability;
  }
  row.gradient[y] -= hard_mass * probability_of_others;
  const Real scale = options.token_scaling ? std::exp(TargetLogProbability(z, target)) : 1;
  row.hard *= scale;
  row.z_loss *= scale;
  for (Real& value : row.gradient) value *= scale / options.temperature;
  row.probability_mass = (hard_mass + smooth_mass * class_weight_sum + 2 * options.z_loss * lse) * scale / options.temperature;
  return row;
}

RowLoss JsdRow(absl::Span<const Real> student_z, absl::Span<const Real> teacher_z, int64_t target, const JsdOptions& options) {
  const size_t columns = std::min(student_z.size(), teacher_z.size());
  const std::vector<Real> log_q = LogProbabilities(student_z, columns, options.student_temperature);
  const std::vector<Real> log_p = LogProbabilities(teacher_z, columns, options.teacher_temperature);
  const Real beta = options.beta;
  const Real hard_weight = options.hard_loss_weight;

  Real divergence = 0;
  std::vector<Real> gradient(columns);  // with respect to student_z / student_temperature
  if (beta == 0) {
    divergence = KlDivergence(log_p, log_q);
    for (size_t v = 0; v < columns; ++v) gradient[v] = std::exp(log_q[v]) - std::exp(log_p[v]);
  } else if (beta == 1) {
    divergence = KlDivergence(log_q, log_p);
    for (size_t v = 0; v < columns; ++v) gradient[v] = KlSummand(log_q[v], log_p[v]) - std::exp(log_q[v]) * divergence;
  } else {
    std::vector<Real> log_m(columns);
    for (size_t v = 0; v < columns; ++v) log_m[v] = LogMixture(log_p[v], log_q[v], beta);
    const Real student_part = KlDivergence(log_q, log_m);
    divergence = beta * KlDivergence(log_p, log_m) + (1 - beta) * student_part;
    for (size_t v = 0; v < columns; ++v) {
      gradient[v] = (1 - beta) * (KlSummand(log_q[v], log_m[v]) - std::exp(log_q[v]) * student_part);
    }
  }

  RowLoss row;
  row.gradient.assign(student_z.size(), 0);
  if (hard_weight > 0) {
    row = CrossEntropyRow(student_z, target, options.hard_loss);
    row.hard *= hard_weight;
    row.z_loss *= hard_weight;
    for (Real& value : row.gradient) value *= hard_weight;
  }
  row.soft = (1 - hard_weight) * divergence;
  for (size_t v = 0; v < columns; ++v) row.gradient[v] += (1 - hard_weight) * gradient[v] / options.student_temperature;
  return row;
}

RowLoss TopKRow(absl::Span<const Real> student_z, int64_t row, const TopKOptions& options) {
  const std::vector<Real> log_q = LogProbabilities(student_z, student_z.size(), options.student_temperature);
  std::vector<bool> named(log_q.size(), false);
  RowLoss result;
  Real mass = 0;
  for (int64_t i = row * options.k; i < (row + 1) * options.k; ++i) {
    const int32_t id = options.ids[static_cast<size_t>(i)];
    if (id < 0) continue;
    const Real log_p = options.log_probs[static_cast<size_t>(i)];
    named[static_cast<size_t>(id)] = true;
    mass += std::exp(log_p);
    result.soft += std::exp(log_p) * (log_p - log_q[static_cast<size_t>(id)]);
  }
  const Real rest = 1 - mass < 1e-6L ? 0 : 1 - mass;
  Real student_rest = 0;
  for (size_t v = 0; v < log_q.size(); ++v) student_rest += named[v] ? 0 : std::exp(log_q[v]);
  if (rest > 0) result.soft += rest * (std::log(rest) - std::log(student_rest));
  for (size_t v = 0; v < log_q.size(); ++v) {
    const Real q = std::exp(log_q[v]);
    result.gradient.push_back((mass + rest) * q - (named[v] || rest == 0 ? 0 : rest * q / student_rest));
  }
  for (int64_t i = row * options.k; i < (row + 1) * options.k; ++i) {
    const int32_t id = options.ids[static_cast<size_t>(i)];
    if (id >= 0) result.gradient[static_cast<size_t>(id)] -= std::exp(static_cast<Real>(options.log_probs[static_cast<size_t>(i)]));
  }
  for (Real& value : result.gradient) value /= options.student_temperature;
  return result;
}

}  // namespace headwater::reference
