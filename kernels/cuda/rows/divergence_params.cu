#include <cmath>

#include "kernels/cuda/rows/divergence_params.h"

namespace headwater::cuda::divergence_row {
namespace {

// Coefficients of the near columns' polynomials, in powers of d = x / ln2. Let y = beta (e^x - 1) and K = log1p(y), the generating
// function of a coin's cumulants. Then L = K / ln2, and a column's loss is q (beta x e^x - K (1 + y)), of order x^2. For beta = 1
// it is q (e^x - 1 - x), with L = d. For beta = 0 it is q (x e^x + 1 - e^x), with p - q = q (e^x - 1) in L's place.
void SetSeries(Form form, double beta, KernelParams* params) {
  constexpr int kOrder = kSeriesTerms + 2;
  double y[kOrder] = {}, k[kOrder] = {}, loss[kOrder] = {}, factorial = 1;
  for (int n = 1; n < kOrder; ++n) {
    factorial *= n;
    y[n] = beta / factorial;
    // (1 + y) K' = y'.
    double sum = n * y[n];
    for (int i = 1; i < n; ++i) sum -= i * k[i] * y[n - i];
    k[n] = sum / n;
    const double x_exp = n / factorial;  // of x e^x
    if (form == Form::kForward) {
      loss[n] = x_exp - 1 / factorial;
    } else if (form == Form::kReverse) {
      loss[n] = n == 1 ? 0 : 1 / factorial;
    } else {
      loss[n] = beta * x_exp - k[n];
      for (int i = 1; i < n; ++i) loss[n] -= k[i] * y[n - i];
    }
  }
  double power = 1, inverse_factorial = 1;  // ln2^{n - 1}, 1 / n!
  for (int n = 1; n <= kSeriesTerms; ++n, power *= kLn2) {
    inverse_factorial /= n;
    const double slope = form == Form::kForward ? kLn2 * inverse_factorial : form == Form::kReverse ? (n == 1 ? 1.0 : 0.0) : k[n];
    params->slope[n - 1] = static_cast<float>(form == Form::kReverse ? slope : slope * power);
    const double unit = form == Form::kMixture ? 1 - beta : 1;  // q stands for that times q
    params->excess[n - 1] = static_cast<float>(loss[n + 1] / unit * power * kLn2);
  }
}

}  // namespace

Form FormOf(const DivergenceTerm& term) {
  return term.beta <= 0 ? Form::kForward : term.beta >= 1 ? Form::kReverse : Form::kMixture;
}

bool IsTransformed(const LogitsView& logits) { return logits.bias != nullptr || logits.transform.softcap != 0; }

KernelParams MakeKernelParams(const LogitsView& student, const LogitsView& teacher, const DivergenceTerm& term, double loss_scale) {
  const Form form = FormOf(term);
  const bool transformed = IsTransformed(student) || IsTransformed(teacher);
  KernelParams params{};
  const LogitsView* const views[kInputs] = {&student, &teacher};
  const double temperatures[kInputs] = {term.student_temperature, term.teacher_temperature};
  double scales[kInputs];
  for (int side = 0; side < kInputs; ++side) {
    const LogitsView& view = *views[side];
    params.inputs[side] = static_cast<const float*>(view.products);
    params.strides[side] = view.stride;
    const double cap = view.transform.softcap;
    params.sides[side] = {view.bias, view.bias_element, static_cast<float>(view.transform.logit_scale), static_cast<float>(cap),
                          cap == 0 ? 0.0f : static_cast<float>(1 / cap)};
    scales[side] = (transformed ? 1.0 : view.transform.logit_scale) * kLog2E / temperatures[side];
    params.log2_scales[side] = static_cast<float>(scales[side]);
    params.no_column[side] = scales[side] < 0 ? kNoColumn : -kNoColumn;
  }
  params.ratio = static_cast<float>(scales[0] / scales[1]);
  params.gradient_scale = loss_scale * student.transform.logit_scale;
  params.soft_weight = term.soft_weight;
  params.matrix_factor = params.gradient_scale * term.soft_weight / term.student_temperature;
  if (form != Form::kForward) params.matrix_factor *= kLn2;
  params.inverse_unit = params.inverse_rest_unit = params.top_unit = 1;
  if (form == Form::kMixture) {
    // About a column's share of a flat row: logarithms near 0 keep their digits.
    const int log_unit = static_cast<int>(std::log2(static_cast<double>(term.common_columns)));
    params.matrix_factor = std::ldexp(params.matrix_factor, -log_unit);
    params.odds = static_cast<float>(term.beta / (1 - term.beta));
    params.log_rest = static_cast<float>(std::log2(1 - term.beta));
    params.log_beta = static_cast<float>(std::log2(term.beta));
    params.log_unit = static_cast<float>(log_unit);
    params.log_rest_unit = params.log_rest + params.log_unit;
    params.log_beta_rest = params.log_beta - params.log_rest;
    params.inverse_unit = static_cast<float>(std::ldexp(1.0, -log_unit));
    params.inverse_rest_unit = static_cast<float>(std::ldexp(1 / (1 - term.beta), -log_unit));
    params.top_unit = static_cast<float>(std::ldexp(1 - term.beta, log_unit));
    params.beta_log_beta = static_cast<float>(term.beta * std::log2(term.beta));
    params.rest_log_rest = static_cast<float>((1 - term.beta) * std::log2(1 - term.beta));
  }
  params.unit_factor = SplitFactor(params.matrix_factor);
  SetSeries(form, term.beta, &params);
  return params;
}

}  // namespace headwater::cuda::divergence_row
