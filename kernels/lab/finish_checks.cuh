// Checks of finish.h's kernels against loops on the CPU: every element type, aligned and not, few and many rows.

#ifndef HEADWATER_KERNELS_LAB_FINISH_CHECKS_CUH_
#define HEADWATER_KERNELS_LAB_FINISH_CHECKS_CUH_

#include "kernels/cuda/rows/finish.h"
#include "stored.cuh"

namespace headwater::lab {

inline constexpr Element kStoredElements[] = {Element::kFloat32, Element::kBFloat16, Element::kFloat16};
inline constexpr Element kHiddenElements[] = {Element::kFloat32, Element::kBFloat16, Element::kFloat16, Element::kFloat64};

// One set of rows over a shard [kVocabStart, kVocabStart + kColumns) of a vocabulary of kVocab.
class FinishChecks {
 public:
  FinishChecks(int64_t rows, int64_t width, bool one_target) : rows_(rows), width_(width), stride_(PaddedWidth(width)) {
    std::vector<float> row_factor, target_factor;
    for (int64_t i = 0; i < rows; ++i) {
      // With one target the shard has it; otherwise about half the rows have theirs elsewhere.
      targets_.push_back(one_target ? kVocabStart + 3 : static_cast<int32_t>(HashAt(5, static_cast<uint64_t>(i)) % kVocab));
      row_factor.push_back(std::ldexp(NormalAt(6, static_cast<uint64_t>(i)), static_cast<int>(i % 5) * 4));
      target_factor.push_back(NormalAt(7, static_cast<uint64_t>(i)));
    }
    row_factor_.assign(row_factor.begin(), row_factor.end());
    target_factor_.assign(target_factor.begin(), target_factor.end());
    device_targets_ = DeviceArray<int32_t>(targets_);
    device_row_factor_ = DeviceArray<float>(row_factor);
    device_target_factor_ = DeviceArray<float>(target_factor);
    title_ = "finish R" + std::to_string(rows) + " H" + std::to_string(width) + (one_target ? " one target" : "");
  }

  void Run() {
    for (const Element x : kHiddenElements) {
      const Stored hidden(x, rows_, width_, stride_, [&](int64_t i, int64_t j) { return 2 * Normal(1, i, j); });
      for (const Element w : kStoredElements) CheckTargetArguments(hidden, w);
      for (const Element out : kStoredElements) CheckScaleRows(hidden, out);
      CheckAddTargetRows(hidden);
    }
    for (const Element w : kStoredElements) {
      for (const Element out : kStoredElements) {
        for (const int64_t offset : {0, 1}) CheckWriteGradHidden(w, out, offset);
      }
      CheckAddGradHidden(w);
    }
    for (const Element m : kStoredElements) CheckGradBias(m);
    errors_.Report(title_);
  }

 private:
  static constexpr int64_t kVocab = 200, kVocabStart = 50, kColumns = 101;

  double Normal(uint64_t seed, int64_t i, int64_t j) const {
    return static_cast<double>(NormalAt(seed, static_cast<uint64_t>(i * width_ + j)));
  }
  int64_t WeightRow(int64_t i) const {
    const int64_t row = targets_[i] - kVocabStart;
    return row >= 0 && row < kColumns ? row : -1;
  }
  Stored MakeWeights(Element element) const {
    return Stored(element, kColumns, width_, stride_, [&](int64_t i, int64_t j) { return Normal(2, i, j); });
  }
  static cuda::ShardWeights ShardOf(const Stored& weights, const void* bias) {
    return {weights.data(), bias, weights.element, kVocabStart, kColumns, weights.columns, weights.stride};
  }
  std::string Name(const std::string& what) const { return title_ + ", " + what; }

  void CheckTargetArguments(const Stored& hidden, Element w) {
    const Stored weights = MakeWeights(w);
    const Stored bias(w, 1, kColumns, kColumns, [&](int64_t, int64_t j) { return Normal(3, 0, j); });
    DeviceArray<double> arguments(std::vector<double>(static_cast<size_t>(rows_), -7.0));
    LAB_CUDA(cuda::LaunchTargetArguments(hidden.matrix(), ShardOf(weights, bias.data()), device_targets_.get(), -0.5,
                                         arguments.get(), nullptr));
    const std::vector<double> got = arguments.ToHost();
    double worst = 0;
    for (int64_t i = 0; i < rows_; ++i) {
      const int64_t row = WeightRow(i);
      double sum = row < 0 ? 0 : bias.at(0, row), size = std::abs(sum);
      for (int64_t j = 0; row >= 0 && j < width_; ++j) {
        sum += hidden.at(i, j) * weights.at(row, j);
        size += std::abs(hidden.at(i, j) * weights.at(row, j));
      }
      // Rows of other shards must be left alone.
      worst = Larger(worst, row < 0 ? std::abs(got[i] + 7.0) : std::abs(got[i] + 0.5 * sum) / size);
    }
    const bool narrow = BytesOf(hidden.element) == 2 && BytesOf(w) == 2;
    errors_.Add(Name(std::string("target arguments ") + NameOf(hidden.element) + " x " + NameOf(w)), worst, narrow ? 3e-7 : 1e-14);
  }

  void CheckScaleRows(const Stored& hidden, Element out) {
    const Stored scaled(out, rows_, width_, stride_);
    DeviceArray<float> alpha(1);
    LAB_CUDA(cuda::LaunchScaleRows(hidden.matrix(), device_row_factor_.get(), scaled.writable(), alpha.get(), nullptr));
    const std::vector<double> got = scaled.Fetch();
    const double factor = static_cast<double>(alpha.ToHost()[0]);
    double worst = 0, largest = 0, padding = 0;
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = 0; j < stride_; ++j) {
        const double value = got[i * stride_ + j];
        if (j >= width_) {
          padding = Larger(padding, std::abs(value));
          continue;
        }
        const double expected = hidden.at(i, j) * row_factor_[i] / factor;
        largest = Larger(largest, std::abs(value));
        // Two roundings, and fp16's smallest step.
        const double allowed =
            std::abs(expected) * (RoundingOf(out) + 2.5e-7) + (out == Element::kFloat16 ? std::ldexp(1.0, -25) : 1e-37);
        worst = Larger(worst, std::abs(value - expected) / allowed);
      }
    }
    const std::string name = Name(std::string("scaled rows ") + NameOf(hidden.element) + " to " + NameOf(out));
    errors_.Add(name, worst, 1.01);
    errors_.Add(name + ", padding", padding, 1e-300);
    int exponent = 0;
    errors_.Add(name + ", alpha a power of two", std::abs(std::frexp(factor, &exponent) - 0.5), 1e-300);
    errors_.Add(name + (out == Element::kFloat16 ? ", largest below 2^15" : ", alpha 1"),
                out == Element::kFloat16 ? largest : std::abs(factor - 1), out == Element::kFloat16 ? 32768.0 : 1e-300);
    if (out == Element::kFloat16) errors_.Add(name + ", largest from 2^14 on", 16384.0 / largest, 1.0);
  }

  void CheckAddTargetRows(const Stored& hidden) {
    const Stored weights(Element::kFloat32, kColumns, width_, stride_);
    const auto before = [&](int64_t i, int64_t j) { return Normal(8, i, j); };
    const DeviceGroups groups(targets_);
    std::vector<double> got[2], got_bias[2];
    for (int repeat = 0; repeat < 2; ++repeat) {
      const Stored gradient(Element::kFloat32, kColumns, width_, stride_, before);
      const Stored bias(Element::kFloat32, 1, kColumns, kColumns, before);
      LAB_CUDA(cuda::LaunchAddTargetRows(hidden.matrix(), device_target_factor_.get(), device_targets_.get(),
                                         {groups.order.get(), groups.starts.get(), groups.count}, ShardOf(weights, nullptr), 0.75f,
                                         static_cast<float*>(gradient.data()), static_cast<float*>(bias.data()), nullptr));
      got[repeat] = gradient.Fetch();
      got_bias[repeat] = bias.Fetch();
    }
    std::vector<double> expected(static_cast<size_t>(kColumns * stride_)), size = expected;
    std::vector<double> expected_bias(static_cast<size_t>(kColumns)), size_bias = expected_bias;
    for (int64_t v = 0; v < kColumns; ++v) {
      for (int64_t j = 0; j < width_; ++j) {
        expected[v * stride_ + j] = static_cast<double>(static_cast<float>(before(v, j)));
        size[v * stride_ + j] = std::abs(expected[v * stride_ + j]);
      }
      expected_bias[v] = static_cast<double>(static_cast<float>(before(0, v)));
      size_bias[v] = std::abs(expected_bias[v]);
    }
    for (int64_t i = 0; i < rows_; ++i) {
      const int64_t v = WeightRow(i);
      if (v < 0) continue;
      for (int64_t j = 0; j < width_; ++j) {
        expected[v * stride_ + j] += 0.75 * target_factor_[i] * hidden.at(i, j);
        size[v * stride_ + j] += std::abs(0.75 * target_factor_[i] * hidden.at(i, j));
      }
      expected_bias[v] += 0.75 * target_factor_[i];
      size_bias[v] += std::abs(0.75 * target_factor_[i]);
    }
    double worst = 0, worst_bias = 0;
    for (size_t i = 0; i < expected.size(); ++i) worst = Larger(worst, std::abs(got[0][i] - expected[i]) / (size[i] + 1e-300));
    for (size_t i = 0; i < expected_bias.size(); ++i) {
      worst_bias = Larger(worst_bias, std::abs(got_bias[0][i] - expected_bias[i]) / size_bias[i]);
    }
    const double bound = BytesOf(hidden.element) == 2 ? 1e-6 : 2e-7;
    const std::string name = Name(std::string("targets' rows ") + NameOf(hidden.element));
    errors_.Add(name, worst, bound);
    errors_.Add(name + ", bias", worst_bias, bound);
    errors_.Add(name + ", repeated", got[0] == got[1] && got_bias[0] == got_bias[1] ? 0 : 1, 0.5);
  }

  // The product with one value that is not finite in row 0, and each row's expected value.
  Stored MakeProduct() const {
    return Stored(Element::kFloat32, rows_, width_, stride_, [&](int64_t i, int64_t j) { return Normal(9, i, j); });
  }
  double Expected(const Stored& product, const Stored& weights, int64_t i, int64_t j, double* size) const {
    const int64_t v = WeightRow(i);
    const double own = row_factor_[i] * product.at(i, j), target = v < 0 ? 0 : target_factor_[i] * weights.at(v, j);
    *size = std::abs(own) + std::abs(target);
    return own + target;
  }
  // Row i goes to row rows - 1 - i.
  std::vector<int32_t> Reversed() const {
    std::vector<int32_t> map;
    for (int64_t i = 0; i < rows_; ++i) map.push_back(static_cast<int32_t>(rows_ - 1 - i));
    return map;
  }

  void CheckWriteGradHidden(Element w, Element out_element, int64_t offset) {
    const Stored weights = MakeWeights(w);
    const Stored product = MakeProduct();
    const Stored out(out_element, rows_, width_, width_, offset), summed_out(out_element, rows_, width_, width_, offset);
    const DeviceArray<int32_t> map(Reversed());
    DeviceArray<uint8_t> non_finite(rows_);
    non_finite.Zero();
    const float bad = INFINITY;
    LAB_CUDA(cudaMemcpy(product.data(), &bad, 4, cudaMemcpyHostToDevice));
    cuda::GradHiddenTarget target;
    target.out = out.data();
    target.out_element = out_element;
    target.out_stride = width_;
    target.map = map.get();
    target.scale = 0.375f;
    target.non_finite = non_finite.get();
    LAB_CUDA(cuda::LaunchFinishGradHidden(product.matrix(), device_row_factor_.get(), device_target_factor_.get(),
                                          device_targets_.get(), ShardOf(weights, nullptr), target, nullptr));
    target.out = summed_out.data();
    target.map = nullptr;
    target.non_finite = nullptr;
    LAB_CUDA(cuda::LaunchWriteGradHidden(product.matrix(), {}, target, nullptr));
    const std::vector<double> got = out.Fetch(), got_sum = summed_out.Fetch();
    const std::vector<uint8_t> flags = non_finite.ToHost();
    double worst = 0, worst_sum = 0, wrong_flags = 0;
    for (int64_t i = 0; i < rows_; ++i) {
      bool overflows = i == 0;
      for (int64_t j = 0; j < width_; ++j) {
        if (i == 0 && j == 0) continue;
        double size;
        const double expected = 0.375 * Expected(product, weights, i, j, &size);
        const double step = out_element == Element::kFloat16 ? std::ldexp(1.0, -25) : 1e-37;
        const double value = got[(rows_ - 1 - i) * width_ + j];
        if (std::isinf(value) && out_element == Element::kFloat16 && std::abs(expected) > 65500) {
          overflows = true;
        } else {
          worst = Larger(worst, std::abs(value - expected) / (std::abs(expected) * RoundingOf(out_element) + size * 2e-7 + step));
        }
        const double plain = 0.375 * product.at(i, j);
        worst_sum = Larger(worst_sum,
                           std::abs(got_sum[i * width_ + j] - plain) / (std::abs(plain) * (RoundingOf(out_element) + 1e-7) + step));
      }
      wrong_flags += (flags[i] != 0) != overflows;
    }
    if (!std::isinf(got[(rows_ - 1) * width_])) wrong_flags += 1;
    const std::string name = Name(std::string("grad_hidden, weights ") + NameOf(w) + ", to " + NameOf(out_element) +
                                  (offset > 0 ? ", not aligned" : ""));
    errors_.Add(name, worst, 1.01);
    errors_.Add(name + ", from a sum", worst_sum, 1.01);
    errors_.Add(name + ", rows that are not finite", wrong_flags, 0.5);
  }

  void CheckAddGradHidden(Element w) {
    const Stored weights = MakeWeights(w);
    const Stored product = MakeProduct();
    const Stored sum(Element::kFloat32, rows_, width_, stride_, [&](int64_t i, int64_t j) { return Normal(10, i, j); });
    const DeviceArray<int32_t> map(Reversed());
    cuda::GradHiddenTarget target;
    target.sum = static_cast<float*>(sum.data());
    target.sum_stride = stride_;
    target.map = map.get();
    LAB_CUDA(cuda::LaunchFinishGradHidden(product.matrix(), device_row_factor_.get(), device_target_factor_.get(),
                                          device_targets_.get(), ShardOf(weights, nullptr), target, nullptr));
    const std::vector<double> got = sum.Fetch();
    double worst = 0;
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = 0; j < width_; ++j) {
        double size;
        const double before = sum.at(rows_ - 1 - i, j);
        const double expected = before + Expected(product, weights, i, j, &size);
        worst = Larger(worst, std::abs(got[(rows_ - 1 - i) * stride_ + j] - expected) / (size + std::abs(before)));
      }
    }
    errors_.Add(Name(std::string("grad_hidden added, weights ") + NameOf(w)), worst, 2e-7);
  }

  // The matrix has `width` columns here, and NaN beyond them.
  void CheckGradBias(Element element) {
    const Stored matrix(element, rows_, stride_, stride_,
                        [&](int64_t i, int64_t j) { return j < width_ ? Normal(11, i, j) : static_cast<double>(NAN); });
    cuda::ConstMatrix view = matrix.matrix();
    view.columns = width_;
    DeviceArray<uint8_t> scratch(cuda::GradBiasScratchBytes(width_));
    std::vector<double> got[2];
    const auto before = [&](int64_t, int64_t j) { return Normal(12, 0, j); };
    for (int repeat = 0; repeat < 2; ++repeat) {
      const Stored bias(Element::kFloat32, 1, width_, width_, before);
      LAB_CUDA(
          cuda::LaunchAddGradBias(view, device_row_factor_.get(), 0.75f, scratch.get(), static_cast<float*>(bias.data()), nullptr));
      got[repeat] = bias.Fetch();
    }
    double worst = 0;
    for (int64_t j = 0; j < width_; ++j) {
      double sum = static_cast<double>(static_cast<float>(before(0, j))), size = std::abs(sum);
      for (int64_t i = 0; i < rows_; ++i) {
        sum += 0.75 * row_factor_[i] * matrix.at(i, j);
        size += std::abs(0.75 * row_factor_[i] * matrix.at(i, j));
      }
      worst = Larger(worst, std::abs(got[0][j] - sum) / size);
    }
    const std::string name = Name(std::string("grad_bias ") + NameOf(element));
    errors_.Add(name, worst, BytesOf(element) == 2 ? 1e-6 : 2e-7);
    errors_.Add(name + ", repeated", got[0] == got[1] ? 0 : 1, 0.5);
  }

  int64_t rows_, width_, stride_;
  std::vector<int32_t> targets_;
  std::vector<double> row_factor_, target_factor_;
  DeviceArray<int32_t> device_targets_;
  DeviceArray<float> device_row_factor_, device_target_factor_;
  std::string title_;
  Errors errors_;
};

inline void CheckFinish() {
  for (const int64_t rows : {1, 37, 300}) {
    for (const int64_t width : {64, 1003, 2056}) FinishChecks(rows, width, false).Run();
  }
  FinishChecks(300, 1003, true).Run();
  FinishChecks(1000, 264, true).Run();
}

}  // namespace headwater::lab

#endif  // HEADWATER_KERNELS_LAB_FINISH_CHECKS_CUH_
