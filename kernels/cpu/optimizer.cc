#include "kernels/cpu/optimizer.h"

#include <algorithm>
#include <cmath>
#include <variant>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/row_kernels.h"

namespace headwater::cpu {
namespace {

// Elements updated and then rounded to storage while they are in the cache.
constexpr int64_t kBlock = 4096;

AdamWScalars MakeAdamWScalars(const OptimizerStep& step, const AdamWSpec& adamw) {
  const double count = static_cast<double>(step.update_count);
  AdamWScalars scalars;
  scalars.multiplier = static_cast<float>(step.gradient_multiplier);
  scalars.decay = static_cast<float>(1 - step.learning_rate * adamw.weight_decay);
  scalars.one_minus_beta1 = static_cast<float>(1 - adamw.beta1);
  scalars.beta2 = static_cast<float>(adamw.beta2);
  scalars.one_minus_beta2 = static_cast<float>(1 - adamw.beta2);
  scalars.step_size = static_cast<float>(step.learning_rate / (1 - std::pow(adamw.beta1, count)));
  scalars.root_correction = static_cast<float>(std::sqrt(1 - std::pow(adamw.beta2, count)));
  scalars.epsilon = static_cast<float>(adamw.epsilon);
  return scalars;
}

SgdScalars MakeSgdScalars(const OptimizerStep& step, const SgdSpec& sgd) {
  SgdScalars scalars;
  scalars.multiplier = static_cast<float>(step.gradient_multiplier);
  scalars.learning_rate = static_cast<float>(step.learning_rate);
  scalars.weight_decay = static_cast<float>(sgd.weight_decay);
  scalars.momentum = static_cast<float>(sgd.momentum);
  scalars.one_minus_dampening = static_cast<float>(1 - sgd.dampening);
  scalars.first_step = step.update_count == 1;
  scalars.nesterov = sgd.nesterov;
  return scalars;
}

}  // namespace

void UpdateParameters(const OptimizerStep& step, const ParameterPiece& piece) {
  const RowKernels& kernels = GetRowKernels();
  const auto* adamw = std::get_if<AdamWSpec>(&step.settings);
  const auto* sgd = std::get_if<SgdSpec>(&step.settings);
  for (int64_t start = 0; start < piece.count; start += kBlock) {
    const int64_t count = std::min(kBlock, piece.count - start);
    if (adamw != nullptr) {
      kernels.adamw(MakeAdamWScalars(step, *adamw), count, piece.parameter + start, piece.gradient + start, piece.moment1 + start,
                    piece.moment2 + start);
    } else {
      // Without momentum there is no buffer to keep.
      float* buffer = sgd->momentum > 0 ? piece.moment1 + start : nullptr;
      kernels.sgd(MakeSgdScalars(step, *sgd), count, piece.parameter + start, piece.gradient + start, buffer);
    }
    if (piece.stored != nullptr) FromFloat(piece.parameter + start, count, piece.stored_type, piece.stored + start);
  }
}

}  // namespace headwater::cpu
