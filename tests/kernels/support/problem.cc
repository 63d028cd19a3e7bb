#include "tests/kernels/support/problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "kernels/reference/storage.h"

namespace headwater::testing {
namespace {

TestHead MakeHead(std::mt19937_64& random, const HeadSpec& spec, double logit_spread) {
  TestHead head = {.spec = spec};
  const double standard_deviation = logit_spread / std::sqrt(static_cast<double>(spec.hidden_size));
  head.weight = RandomValues(random, spec.vocab_size * spec.hidden_size, standard_deviation, spec.data_type);
  if (spec.has_bias) head.bias = RandomValues(random, spec.vocab_size, 0.5, spec.data_type);
  const double poison = std::numeric_limits<double>::quiet_NaN();
  const int64_t valid = spec.transform.valid_vocab_size;
  std::fill(head.weight.begin() + valid * spec.hidden_size, head.weight.end(), poison);
  if (spec.has_bias) std::fill(head.bias.begin() + valid, head.bias.end(), poison);
  return head;
}

std::vector<int32_t> MakeTargets(std::mt19937_64& random, const ProblemOptions& options, const Problem& problem) {
  const TestHead& head = problem.heads.front();
  std::uniform_int_distribution<int64_t> any(0, head.spec.transform.valid_vocab_size - 1);
  std::uniform_real_distribution<double> share(0, 1);
  std::vector<int32_t> targets;
  for (int64_t i = 0; i < options.rows; ++i) {
    int32_t target = static_cast<int32_t>(any(random));
    if (share(random) < 0.5) {
      // The most likely class if logit_scale > 0 and there is no bias.
      const std::vector<double> products = ProductsOf(head, &problem.hidden[static_cast<size_t>(i * options.hidden_size)], false);
      target = static_cast<int32_t>(std::max_element(products.begin(), products.end()) - products.begin());
    }
    if (share(random) < options.ignored_share) target = options.ignore_index;
    targets.push_back(target);
  }
  // The first and the last column are the edges of shards and of padding.
  if (options.rows > 4) {
    targets[1] = 0;
    targets[3] = static_cast<int32_t>(head.spec.transform.valid_vocab_size - 1);
  }
  return targets;
}

reference::CrossEntropyOptions MakeCrossEntropy(std::mt19937_64& random, const ProblemOptions& options, int64_t valid_vocab_size) {
  reference::CrossEntropyOptions loss = {.label_smoothing = options.label_smoothing,
                                         .z_loss = options.z_loss,
                                         .temperature = options.temperature,
                                         .token_scaling = options.token_scaling};
  std::uniform_real_distribution<double> weight(0.1, 2.0);
  if (options.class_weights) {
    for (int64_t v = 0; v < valid_vocab_size; ++v) {
      const double sign = options.negative_class_weights && v % 3 == 1 ? -1 : 1;
      loss.class_weights.push_back(reference::RoundTo(DataType::kFloat32, v % 11 == 5 ? 0.0 : sign * weight(random)));
    }
  }
  return loss;
}

// A teacher near the student, known by its most likely columns in any order. Some rows have no other mass, some not all entries,
// and one has none.
reference::TopKOptions MakeTopK(std::mt19937_64& random, const ProblemOptions& options, const Problem& problem) {
  const TestHead& head = problem.heads.front();
  std::normal_distribution<double> noise(0, options.teacher_noise);
  reference::TopKOptions teacher = {options.top_k, {}, {}, options.student_temperature};
  for (int64_t row = 0; row < options.rows; ++row) {
    std::vector<std::pair<double, int32_t>> logits;
    double sum = 0;
    const std::vector<double> products = ProductsOf(head, &problem.hidden[static_cast<size_t>(row * options.hidden_size)]);
    for (size_t v = 0; v < products.size(); ++v) {
      const double a = options.logit_scale * products[v];
      const double z = options.softcap > 0 ? options.softcap * std::tanh(a / options.softcap) : a;
      logits.emplace_back(z / options.student_temperature + noise(random), static_cast<int32_t>(v));
      sum += std::exp(logits.back().first);
    }
    std::sort(logits.rbegin(), logits.rend());
    const size_t used = row == 5 ? 0 : static_cast<size_t>(row % 4 == 2 ? options.top_k / 2 : options.top_k);
    if (row % 4 == 1) {
      sum = 0;
      for (size_t i = 0; i < used; ++i) sum += std::exp(logits[i].first);
    }
    std::shuffle(logits.begin(), logits.begin() + static_cast<std::ptrdiff_t>(used), random);
    for (size_t i = 0; i < static_cast<size_t>(options.top_k); ++i) {
      teacher.ids.push_back(i < used ? logits[i].second : -1);
      teacher.log_probs.push_back(i < used ? static_cast<float>(logits[i].first - std::log(sum))
                                           : std::numeric_limits<float>::quiet_NaN());
    }
  }
  return teacher;
}

}  // namespace

std::vector<ProblemOptions> CrossEntropyOptionCases() {
  return {
      {.name = "Plain"},
      {.name = "Bias", .bias = true},
      {.name = "Softcap", .softcap = 5, .logit_spread = 6},
      {.name = "LogitScale", .logit_scale = 0.37},
      {.name = "NegativeLogitScale", .logit_scale = -1.3},
      {.name = "ValidVocab", .valid_vocab_size = 90},
      {.name = "TokenWeights", .token_weights = true},
      {.name = "LabelSmoothing", .label_smoothing = 0.1},
      {.name = "ClassWeights", .class_weights = true},
      {.name = "SmoothedClassWeights", .class_weights = true, .label_smoothing = 0.3},
      {.name = "ZLoss", .z_loss = 1e-2},
      {.name = "IgnoredValidId", .ignored_share = 0.4, .ignore_index = 7},
      {.name = "LossScale", .loss_scale = 1.0 / 13},
      {.name = "GradHiddenScale", .grad_hidden_scale = -0.5},
      {.name = "NegativeClassWeights", .class_weights = true, .negative_class_weights = true, .label_smoothing = 0.2},
      {.name = "FullSmoothing", .label_smoothing = 1},
      {.name = "LowTemperature", .temperature = 0.1},
      {.name = "HighTemperature", .temperature = 10, .z_loss = 1e-2},
      {.name = "CappedTemperature", .softcap = 5, .logit_spread = 6, .temperature = 0.7},
      {.name = "TokenScaling", .token_scaling = true},
      {.name = "EntropyFactors", .entropy_factors = true},
      {.name = "LseFactors", .lse_factors = true},
      {.name = "AllFactors",
       .valid_vocab_size = 90,
       .token_weights = true,
       .entropy_factors = true,
       .lse_factors = true,
       .temperature = 0.8},
      {.name = "Everything",
       .bias = true,
       .logit_scale = 0.9,
       .softcap = 12,
       .valid_vocab_size = 97,
       .ignore_index = 7,
       .token_weights = true,
       .class_weights = true,
       .label_smoothing = 0.1,
       .z_loss = 1e-3,
       .loss_scale = 3,
       .grad_hidden_scale = 0.25},
      {.name = "EverythingWithFactors",
       .bias = true,
       .logit_scale = 0.9,
       .softcap = 12,
       .valid_vocab_size = 97,
       .ignore_index = 7,
       .token_weights = true,
       .entropy_factors = true,
       .lse_factors = true,
       .class_weights = true,
       .negative_class_weights = true,
       .temperature = 1.4,
       .token_scaling = true,
       .label_smoothing = 0.1,
       .z_loss = 1e-3,
       .loss_scale = 3,
       .grad_hidden_scale = 0.25},
  };
}

ProblemOptions WithType(ProblemOptions options, DataType type) {
  options.head_type = type;
  options.hidden_type = type;
  return options;
}

std::vector<double> RandomValues(std::mt19937_64& random, int64_t count, double standard_deviation, DataType type) {
  std::normal_distribution<double> normal(0, standard_deviation);
  std::vector<double> values(static_cast<size_t>(count));
  for (double& value : values) value = reference::RoundTo(type, normal(random));
  return values;
}

std::vector<double> ProductsOf(const TestHead& head, const double* x, bool with_bias) {
  std::vector<double> products;
  const int64_t width = head.spec.hidden_size;
  for (int64_t v = 0; v < head.spec.transform.valid_vocab_size; ++v) {
    const double bias = with_bias && !head.bias.empty() ? head.bias[static_cast<size_t>(v)] : 0;
    products.push_back(std::inner_product(x, x + width, &head.weight[static_cast<size_t>(v * width)], bias));
  }
  return products;
}

Problem MakeProblem(const ProblemOptions& options) {
  std::mt19937_64 random(options.seed);
  Problem problem = {.rows = options.rows,
                     .hidden_size = options.hidden_size,
                     .hidden_type = options.hidden_type,
                     .grad_hidden_type = options.hidden_type,
                     .grad_hidden_scale = options.grad_hidden_scale};

  HeadSpec spec = {.vocab_size = options.vocab_size,
                   .hidden_size = options.hidden_size,
                   .data_type = options.head_type,
                   .has_bias = options.bias,
                   .transform = {.logit_scale = options.logit_scale}};
  if (options.softcap > 0) spec.transform.softcap = options.softcap;
  spec.transform.valid_vocab_size = options.valid_vocab_size == 0 ? options.vocab_size : options.valid_vocab_size;
  spec.trainable = options.trainable;
  spec.staging_slots = options.staging_slots;
  problem.heads.push_back(MakeHead(random, spec, options.logit_spread));
  problem.hidden = RandomValues(random, options.rows * options.hidden_size, 1.0, options.hidden_type);

  TestTerm term = {.row_count = options.rows,
                   .ignore_index = options.ignore_index,
                   .loss_scale = options.loss_scale,
                   .gradient_resolution = options.gradient_resolution,
                   .dither_seed = options.seed};
  if (options.with_targets) term.targets = MakeTargets(random, options, problem);
  if (options.token_weights) {
    std::uniform_real_distribution<float> weight(0.2f, 3.0f);
    for (int64_t i = 0; i < options.rows; ++i)
      term.token_weights.push_back(i % 5 == 2 ? 0.0f : (i % 7 == 4 ? -1 : 1) * weight(random));
  }
  reference::CrossEntropyOptions cross_entropy = MakeCrossEntropy(random, options, spec.transform.valid_vocab_size);
  if (options.jsd) {
    HeadSpec teacher = spec;
    teacher.hidden_size = options.teacher_hidden_size == 0 ? options.hidden_size : options.teacher_hidden_size;
    if (options.teacher_vocab_size != 0) {
      teacher.vocab_size = options.teacher_vocab_size;
      teacher.transform.valid_vocab_size = options.teacher_vocab_size;
    }
    teacher.trainable = false;
    teacher.staging_slots = 0;
    problem.heads.push_back(MakeHead(random, teacher, options.logit_spread));
    term.teacher = 1;
    term.teacher_type = options.hidden_type;
    term.teacher_hidden = RandomValues(random, options.rows * teacher.hidden_size, 1.0, options.hidden_type);
    term.loss = reference::JsdOptions{options.beta,
                                      options.student_temperature,
                                      options.teacher_temperature,
                                      options.hard_loss_weight,
                                      std::move(cross_entropy),
                                      options.teacher_vocab_size != 0};
  } else if (options.top_k > 0) {
    term.loss = MakeTopK(random, options, problem);
  } else {
    term.loss = std::move(cross_entropy);
  }
  std::normal_distribution<float> factor(0, 1);
  for (int64_t i = 0; i < options.rows; ++i) {
    if (options.entropy_factors) term.entropy_factors.push_back(i % 4 == 3 ? 0.0f : factor(random));
    if (options.lse_factors) term.lse_factors.push_back(i % 6 == 1 ? 0.0f : factor(random));
  }
  problem.terms.push_back(std::move(term));
  return problem;
}

Problem SliceRows(const Problem& problem, int64_t row_start, int64_t row_count) {
  const auto slice = [&](auto& values, int64_t columns) {
    if (values.empty()) return;
    using Values = std::decay_t<decltype(values)>;
    values = Values(values.begin() + row_start * columns, values.begin() + (row_start + row_count) * columns);
  };
  Problem part = problem;
  part.rows = row_count;
  slice(part.hidden, problem.hidden_size);
  TestTerm& term = part.terms.front();
  term.row_count = row_count;
  slice(term.targets, 1);
  slice(term.token_weights, 1);
  slice(term.entropy_factors, 1);
  slice(term.lse_factors, 1);
  if (auto* top_k = std::get_if<reference::TopKOptions>(&term.loss)) {
    slice(top_k->ids, top_k->k);
    slice(top_k->log_probs, top_k->k);
  }
  if (term.teacher >= 0) slice(term.teacher_hidden, problem.heads[static_cast<size_t>(term.teacher)].spec.hidden_size);
  return part;
}

void MakeConfident(Problem* problem, int64_t row, int64_t target, double margin) {
  const int64_t width = problem->hidden_size;
  problem->terms[0].targets[static_cast<size_t>(row)] = static_cast<int32_t>(target);
  const double* x = &problem->hidden[static_cast<size_t>(row * width)];
  const double norm_squared = std::inner_product(x, x + width, x, 0.0);
  for (int64_t h = 0; h < width; ++h) {
    problem->heads[0].weight[static_cast<size_t>(target * width + h)] = margin * x[h] / norm_squared;
  }
}

void RoundToStorage(Problem* problem) {
  const auto round = [](std::vector<double>& values, DataType type) {
    for (double& value : values) value = reference::RoundTo(type, value);
  };
  for (TestHead& head : problem->heads) {
    round(head.weight, head.spec.data_type);
    round(head.bias, head.spec.data_type);
  }
  round(problem->hidden, problem->hidden_type);
  for (TestTerm& term : problem->terms) round(term.teacher_hidden, term.teacher_type);
}

Expected ComputeExpected(const Problem& problem) {
  Expected expected;
  for (const TestHead& head : problem.heads) {
    expected.heads.push_back({reference::Matrix(head.spec.vocab_size, head.spec.hidden_size, head.weight), head.bias,
                              head.spec.transform, head.spec.trainable});
  }
  std::vector<reference::Term> terms;
  for (const TestTerm& in : problem.terms) {
    reference::Term term = {.head = &expected.heads[static_cast<size_t>(in.head)],
                            .row_start = in.row_start,
                            .row_count = in.row_count,
                            .targets = in.targets,
                            .ignore_index = in.ignore_index};
    term.token_weights.assign(in.token_weights.begin(), in.token_weights.end());
    term.entropy_factors.assign(in.entropy_factors.begin(), in.entropy_factors.end());
    term.lse_factors.assign(in.lse_factors.begin(), in.lse_factors.end());
    term.loss_scale = in.loss_scale;
    term.loss = in.loss;
    term.gradient_resolution = in.gradient_resolution;
    term.dither_seed = in.dither_seed;
    term.dithered_type = in.dithered_type;
    term.dither_unit_type = in.dither_unit_type;
    if (in.teacher >= 0) {
      term.teacher_head = &expected.heads[static_cast<size_t>(in.teacher)];
      term.teacher_hidden = reference::Matrix(in.row_count, term.teacher_head->weight.columns, in.teacher_hidden);
    }
    terms.push_back(std::move(term));
  }
  expected.result =
      reference::Compute(reference::Matrix(problem.rows, problem.hidden_size, problem.hidden), terms, problem.grad_hidden_scale);
  return expected;
}

}  // namespace headwater::testing
