#include "kernels/reference/loss_reference.h"

#include <algorithm>
#include <cmath>

#include "kernels/reference/dithered_row.h"

namespace headwater::reference {
namespace {

// x . weight_v + bias_v over the valid vocabulary.
std::vector<double> Products(const Head& head, absl::Span<const double> x) {
  std::vector<double> products;
  for (int64_t v = 0; v < head.transform.valid_vocab_size; ++v) {
    double sum = head.bias.empty() ? 0.0 : head.bias[static_cast<size_t>(v)];
    const absl::Span<const double> weight = head.weight.row(v);
    for (size_t h = 0; h < x.size(); ++h) sum += x[h] * weight[h];
    products.push_back(sum);
  }
  return products;
}

double MaxAbs(absl::Span<const Real> values) {
  Real largest = 0;
  for (const Real value : values) largest = std::max(largest, std::abs(value));
  return static_cast<double>(largest);
}

// Adds a row's gradient, given d(objective) / d(x . weight^T + bias), to everything it belongs to.
void AddRowGradient(const Head& head, absl::Span<const double> x, absl::Span<const Real> grad_product, double grad_hidden_scale,
                    double* grad_hidden, HeadGradient* gradient) {
  for (int64_t v = 0; v < head.transform.valid_vocab_size; ++v) {
    const double value = static_cast<double>(grad_product[static_cast<size_t>(v)]);
    for (size_t h = 0; h < x.size(); ++h) {
      const int64_t column = static_cast<int64_t>(h);
      grad_hidden[h] += grad_hidden_scale * value * head.weight.at(v, column);
      if (gradient != nullptr) gradient->weight.at(v, column) += value * x[h];
    }
    if (gradient != nullptr && !gradient->bias.empty()) gradient->bias[static_cast<size_t>(v)] += value;
  }
}

// One row of a term: sums, outputs, gradient.
void ComputeRow(const Term& term, int64_t row, absl::Span<const double> x, double grad_hidden_scale, TermResult* result,
                double* grad_hidden, HeadGradient* gradient) {
  const size_t i = static_cast<size_t>(row);
  const bool has_target = !term.targets.empty();
  const int64_t target = has_target ? term.targets[i] : 0;
  const double token_weight = term.token_weights.empty() ? 1.0 : term.token_weights[i];

  const RowLogits logits = TransformLogits(Products(*term.head, x), term.head->transform);
  double class_weight = 1;
  double max_abs_logit = MaxAbs(logits.z);
  double temperature = 1;
  RowLoss loss;
  if (const auto* options = std::get_if<CrossEntropyOptions>(&term.loss)) {
    loss = CrossEntropyRow(logits.z, target, *options);
    temperature = options->temperature;
    max_abs_logit = std::max(max_abs_logit, max_abs_logit / temperature);
    if (!options->class_weights.empty()) class_weight = options->class_weights[static_cast<size_t>(target)];
  } else if (const auto* top_k = std::get_if<TopKOptions>(&term.loss)) {
    loss = TopKRow(logits.z, row, *top_k);
    max_abs_logit = std::max(max_abs_logit, max_abs_logit / top_k->student_temperature);
  } else {
    const JsdOptions& jsd = std::get<JsdOptions>(term.loss);
    const RowLogits teacher =
        TransformLogits(Products(*term.teacher_head, term.teacher_hidden.row(row)), term.teacher_head->transform);
    loss = JsdRow(logits.z, teacher.z, target, jsd);
    if (jsd.hard_loss_weight > 0 && !jsd.hard_loss.class_weights.empty()) {
      class_weight = jsd.hard_loss.class_weights[static_cast<size_t>(target)];
    }
    max_abs_logit = std::max(
        {max_abs_logit, max_abs_logit / jsd.student_temperature, MaxAbs(teacher.z), MaxAbs(teacher.z) / jsd.teacher_temperature});
  }

  LossSums& sums = result->sums;
  sums.soft_loss_sum += token_weight * static_cast<double>(loss.soft);
  sums.hard_loss_sum += token_weight * static_cast<double>(loss.hard);
  sums.z_loss_sum += token_weight * static_cast<double>(loss.z_loss);
  sums.loss_sum += token_weight * static_cast<double>(loss.soft + loss.hard + loss.z_loss);
  sums.token_weight_sum += token_weight;
  sums.target_weight_sum += token_weight * class_weight;
  sums.valid_token_count += 1;

  result->token_loss[i] = static_cast<double>(loss.soft + loss.hard + loss.z_loss);
  const std::vector<Real> u = Tempered(logits.z, temperature);
  result->lse[i] = static_cast<double>(LogSumExp(u));
  result->target_log_probability[i] = has_target ? static_cast<double>(TargetLogProbability(u, target)) : 0.0;
  result->entropy[i] = static_cast<double>(Entropy(u));
  result->mean_logits[i] = static_cast<double>(MeanLogit(u));
  result->log_sum_sq_probs[i] = static_cast<double>(LogSumSqProbs(u));
  result->argmax[i] = static_cast<int32_t>(std::max_element(logits.z.begin(), logits.z.end()) - logits.z.begin());
  result->max_abs_logit[i] = max_abs_logit;
  for (size_t v = 0; v < logits.z.size(); ++v) result->logits.at(row, static_cast<int64_t>(v)) = static_cast<double>(logits.z[v]);

  if (term.gradient_resolution > 0 && token_weight != 0) {
    std::vector<Real> slopes = logits.derivative;
    for (Real& slope : slopes) slope /= term.head->transform.logit_scale;
    const double factor = token_weight * term.loss_scale * term.head->transform.logit_scale;
    const Resolution resolution = {term.gradient_resolution, term.dither_seed,      term.row_start + row,
                                   term.dithered_type,       term.dither_unit_type, factor};
    if (const auto* jsd = std::get_if<JsdOptions>(&term.loss)) {
      DitherDivergence(slopes, *jsd, resolution, &loss, &sums.dither);
    } else {
      DitherCrossEntropy(u, slopes, target, resolution, &loss, &sums.dither);
    }
  }

  std::vector<Real> grad_product(logits.z.size());
  for (size_t v = 0; v < grad_product.size(); ++v) grad_product[v] = token_weight * loss.gradient[v];
  const auto add = [&](const std::vector<double>& factors, const std::vector<Real>& gradient_of_u) {
    for (size_t v = 0; v < grad_product.size() && !factors.empty(); ++v) {
      grad_product[v] += factors[i] * gradient_of_u[v] / temperature;
    }
  };
  add(term.entropy_factors, EntropyGradient(u));
  add(term.lse_factors, LseGradient(u));
  for (size_t v = 0; v < grad_product.size(); ++v) grad_product[v] *= term.loss_scale * logits.derivative[v];
  AddRowGradient(*term.head, x, grad_product, grad_hidden_scale, grad_hidden, gradient);
}

}  // namespace

Result Compute(const Matrix& hidden, absl::Span<const Term> terms, double grad_hidden_scale) {
  Result result;
  result.grad_hidden = Matrix(hidden.rows, hidden.columns);
  for (const Term& term : terms) {
    const Head& head = *term.head;
    HeadGradient* gradient = nullptr;
    if (head.trainable) {
      gradient = &result.gradient[&head];
      if (gradient->weight.data.empty()) {
        gradient->weight = Matrix(head.weight.rows, head.weight.columns);
        gradient->bias.assign(head.bias.size(), 0.0);
      }
    }
    const size_t rows = static_cast<size_t>(term.row_count);
    TermResult term_result;
    for (std::vector<double>* output :
         {&term_result.token_loss, &term_result.lse, &term_result.target_log_probability, &term_result.entropy,
          &term_result.mean_logits, &term_result.log_sum_sq_probs, &term_result.max_abs_logit}) {
      output->assign(rows, 0.0);
    }
    term_result.argmax.assign(rows, -1);
    term_result.logits = Matrix(term.row_count, head.transform.valid_vocab_size);
    for (int64_t row = 0; row < term.row_count; ++row) {
      if (!term.targets.empty() && term.targets[static_cast<size_t>(row)] == term.ignore_index) continue;
      const int64_t hidden_row = term.row_start + row;
      ComputeRow(term, row, hidden.row(hidden_row), grad_hidden_scale, &term_result,
                 &result.grad_hidden.data[static_cast<size_t>(hidden_row * hidden.columns)], gradient);
    }
    result.terms.push_back(std::move(term_result));
  }
  return result;
}

}  // namespace headwater::reference
