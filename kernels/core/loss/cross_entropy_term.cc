#include "kernels/core/loss/cross_entropy_term.h"

#include <cmath>

namespace headwater {

CrossEntropyTerm MakeCrossEntropyTerm(const CrossEntropySpec& spec, int64_t valid_vocab_size) {
  CrossEntropyTerm term;
  term.label_smoothing = spec.label_smoothing;
  term.z_loss = spec.z_loss;
  term.inverse_temperature = 1 / spec.temperature;
  term.token_scaling = spec.token_scaling;
  term.valid_vocab_size = valid_vocab_size;
  term.class_weight_sum = term.class_weight_bound = static_cast<double>(valid_vocab_size);
  if (!spec.class_weights.empty()) {
    term.class_weights = spec.class_weights.data();
    term.class_weight_sum = term.class_weight_bound = 0;
    for (int64_t v = 0; v < valid_vocab_size; ++v) {
      term.class_weight_sum += term.ClassWeight(v);
      term.class_weight_bound += std::abs(term.ClassWeight(v));
    }
  }
  return term;
}

}  // namespace headwater
