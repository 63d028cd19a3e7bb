// A head in double precision: kernels/reference, which is independent of the engines, with what a test has added to it.
#ifndef HEADWATER_TESTS_E2E_CPP_SUPPORT_FP64_HEAD_H_
#define HEADWATER_TESTS_E2E_CPP_SUPPORT_FP64_HEAD_H_

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace headwater::e2e {

using Doubles = std::vector<double>;

// sqrt(sum (actual - expected)^2) / sqrt(sum expected^2); NaN if either has one or the sizes differ.
template <typename Actual>
double RelativeError(const Actual& actual, const Doubles& expected) {
  if (static_cast<size_t>(actual.size()) != expected.size()) return std::numeric_limits<double>::quiet_NaN();
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += std::pow(static_cast<double>(actual[i]) - expected[i], 2);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference / norm);
}

// Weight [vocab_size, hidden_size], bias [vocab_size], AdamW. No softcap.
class Fp64Head {
 public:
  Fp64Head(int64_t vocab_size, int64_t hidden_size, const std::vector<float>& weight, const std::vector<float>& bias);

  struct Loss {
    double sum = 0;       // without scale
    Doubles grad_hidden;  // [rows, hidden_size], with scale
  };
  // Cross entropy over all rows (-100 is ignored); gradients times `scale`; weight gradients also times `factor` when they are
  // added.
  Loss CrossEntropy(const std::vector<float>& hidden, const std::vector<int32_t>& targets, double scale, double factor);
  // The divergence with `teacher`, beta strictly between 0 and 1; adds the gradient as above, with factor 1.
  Loss Jsd(const std::vector<float>& hidden, const Fp64Head& teacher, const std::vector<float>& teacher_hidden, double beta,
           double student_temperature, double teacher_temperature, double scale);
  // One AdamW step (betas 0.9 and 0.999, epsilon 1e-8) on the gradient, clipped to `max_norm`; forgets the gradient.
  void Apply(double learning_rate, double weight_decay, double max_norm);

  const Doubles& weight() const { return weight_; }
  const Doubles& bias() const { return bias_; }
  const Doubles& grad_weight() const { return grad_weight_; }
  const Doubles& grad_bias() const { return grad_bias_; }
  double GradNormSquared() const;

 private:
  const int64_t vocab_size_;
  const int64_t hidden_size_;
  Doubles weight_, bias_, grad_weight_, grad_bias_;
  Doubles moment1_, moment2_;  // weight, then bias
  int64_t update_count_ = 0;
};

}  // namespace headwater::e2e

#endif  // HEADWATER_TESTS_E2E_CPP_SUPPORT_FP64_HEAD_H_
