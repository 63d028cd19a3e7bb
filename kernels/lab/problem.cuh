// One cross-entropy micro-batch on the device with everything the E form's kernels read and write, and its fp64 reference.

#ifndef HEADWATER_KERNELS_LAB_PROBLEM_CUH_
#define HEADWATER_KERNELS_LAB_PROBLEM_CUH_

#include <numeric>

#include "bench.cuh"
#include "e_form_rest.cuh"
#include "e_product.cuh"
#include "gradient_epilogues.cuh"
#include "sm90_host.cuh"

namespace headwater::lab {

template <class Config = sm90::Tile256>
using PlainEProduct = sm90::Product<sm90::Major::kK, sm90::Major::kK, sm90::EProductEpilogue<false, false, false>, Config>;
template <class Config = sm90::Tile256>
using GradWeightProduct = sm90::Product<sm90::Major::kMn, sm90::Major::kMn, sm90::GradWeightEpilogue, Config>;
template <class Config = sm90::Tile256>
using GradHiddenProduct = sm90::Product<sm90::Major::kK, sm90::Major::kMn, sm90::GradHiddenEpilogue, Config>;

// hidden ~ N(0, 1), weight ~ N(0, logit_std^2 / width): logits of the given standard deviation.
struct Problem {
  int64_t rows, width, vocab, tiles;
  DeviceArray<__nv_bfloat16> hidden, weight, exponentials, scaled_hidden, grad_hidden;
  DeviceArray<int32_t> targets;
  DeviceArray<float> bias, offset, partial_sum, partial_max, grad_loss, token_loss, row_factor, target_factor;

  Problem(int64_t rows_in, int64_t width_in, int64_t vocab_in, float logit_std)
      : rows(rows_in),
        width(width_in),
        vocab(vocab_in),
        tiles((vocab_in + 255) / 256),
        hidden(rows * width),
        weight(vocab * width),
        exponentials(rows * vocab),
        scaled_hidden(rows * width),
        grad_hidden(rows * width),
        targets(rows),
        bias(vocab),
        offset(rows),
        partial_sum(tiles * rows),
        partial_max(tiles * rows),
        grad_loss(rows),
        token_loss(rows),
        row_factor(rows),
        target_factor(rows) {
    FillNormal(hidden, 1, 1.0f);
    FillNormal(weight, 2, logit_std / std::sqrt(static_cast<float>(width)));
    FillTargets(targets, vocab, 3);
    std::vector<float> host_bias(static_cast<size_t>(vocab)), host_grad(static_cast<size_t>(rows));
    for (int64_t j = 0; j < vocab; ++j) host_bias[j] = 0.5f * NormalAt(4, static_cast<uint64_t>(j));
    for (int64_t i = 0; i < rows; ++i) host_grad[i] = 0.3f + 0.1f * static_cast<float>(i % 7);  // not uniform, no power of two
    LAB_CUDA(cudaMemcpy(bias.get(), host_bias.data(), bias.bytes(), cudaMemcpyHostToDevice));
    LAB_CUDA(cudaMemcpy(grad_loss.get(), host_grad.data(), grad_loss.bytes(), cudaMemcpyHostToDevice));
    LAB_CUDA(cudaDeviceSynchronize());
  }

  void EnqueueTargetLogits(cudaStream_t stream, const float* with_bias = nullptr, float logit_scale = 1.0f,
                           float softcap = 0.0f) const {
    sm90::TargetLogitKernel<<<static_cast<int>((rows + 7) / 8), 256, 0, stream>>>(
        hidden.get(), weight.get(), targets.get(), with_bias, logit_scale, softcap, static_cast<int32_t>(rows),
        static_cast<int32_t>(width), offset.get());
    LAB_CUDA(cudaGetLastError());
  }
  // `tile_columns`: those of the product that wrote the partial sums, at least 256.
  void EnqueueFinishRows(cudaStream_t stream, int tile_columns = 256) const {
    sm90::FinishRowsKernel<<<static_cast<int>((rows + 31) / 32), 512, 0, stream>>>(
        partial_sum.get(), static_cast<int32_t>((vocab + tile_columns - 1) / tile_columns), static_cast<int32_t>(rows),
        grad_loss.get(), token_loss.get(), row_factor.get(), target_factor.get());
    const int64_t vectors = rows * width / 8;
    sm90::ScaleRowsKernel<<<static_cast<int>((vectors + 255) / 256), 256, 0, stream>>>(
        hidden.get(), row_factor.get(), vectors, static_cast<int32_t>(width / 8), scaled_hidden.get());
    LAB_CUDA(cudaGetLastError());
  }

  template <bool kWithBias, bool kWithSoftcap, bool kWithMax>
  typename sm90::EProductEpilogue<kWithBias, kWithSoftcap, kWithMax>::Params EParams(float logit_scale = 1.0f,
                                                                                     float softcap = 0.0f) const {
    return {offset.get(), targets.get(), bias.get(), partial_sum.get(), partial_max.get(), logit_scale, softcap};
  }
  template <class Config = sm90::Tile256>
  PlainEProduct<Config> MakeEProduct(const sm90::ProductTuning& tuning) const {
    return PlainEProduct<Config>(hidden.get(), weight.get(), exponentials.get(), rows, vocab, width, EParams<false, false, false>(),
                                 tuning);
  }
  template <class Config = sm90::Tile256>
  GradWeightProduct<Config> MakeGradWeight(float* grad_weight, const sm90::ProductTuning& tuning) const {
    return GradWeightProduct<Config>(exponentials.get(), scaled_hidden.get(), grad_weight, vocab, width, rows,
                                     sm90::GradWeightEpilogue::Params{1.0f}, tuning);
  }
  template <class Config = sm90::Tile256>
  GradHiddenProduct<Config> MakeGradHidden(const sm90::ProductTuning& tuning) const {
    return GradHiddenProduct<Config>(
        exponentials.get(), weight.get(), grad_hidden.get(), rows, width, vocab,
        sm90::GradHiddenEpilogue::Params{row_factor.get(), target_factor.get(), targets.get(), weight.get()}, tuning);
  }
};

// The whole micro-batch in fp64 from the same bf16 inputs, on the CPU: for small shapes.
struct Reference {
  std::vector<double> exponentials;  // [rows, vocab], 0 at the target, with the softcap's factor
  std::vector<double> sum;           // [rows] S, without the target
  std::vector<double> largest;       // [rows] largest logit but the target's
  std::vector<double> grad_hidden;   // [rows, width]
  std::vector<double> grad_weight;   // [vocab, width], the targets' rows included

  Reference(const Problem& problem, bool with_bias, double logit_scale, double softcap) {
    const std::vector<__nv_bfloat16> x = problem.hidden.ToHost(), w = problem.weight.ToHost();
    const std::vector<int32_t> y = problem.targets.ToHost();
    const std::vector<float> b = problem.bias.ToHost(), g = problem.grad_loss.ToHost();
    const int64_t rows = problem.rows, width = problem.width, vocab = problem.vocab;
    exponentials.assign(static_cast<size_t>(rows * vocab), 0.0);
    sum.assign(static_cast<size_t>(rows), 0.0);
    largest.assign(static_cast<size_t>(rows), -INFINITY);
    grad_hidden.assign(static_cast<size_t>(rows * width), 0.0);
    grad_weight.assign(static_cast<size_t>(vocab * width), 0.0);
    std::vector<double> xd(x.size()), wd(w.size());
    for (size_t i = 0; i < x.size(); ++i) xd[i] = static_cast<double>(__bfloat162float(x[i]));
    for (size_t i = 0; i < w.size(); ++i) wd[i] = static_cast<double>(__bfloat162float(w[i]));
    std::vector<double> logit(static_cast<size_t>(vocab)), factor(static_cast<size_t>(vocab), 1.0);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < vocab; ++j) {
        double dot = std::inner_product(&xd[i * width], &xd[i * width] + width, &wd[j * width], 0.0);
        dot = logit_scale * (with_bias ? dot + static_cast<double>(b[j]) : dot);
        if (softcap > 0.0) {
          const double t = std::tanh(dot / softcap);
          dot = softcap * t;
          factor[j] = 1.0 - t * t;
        }
        logit[j] = dot;
      }
      for (int64_t j = 0; j < vocab; ++j) {
        if (j == y[i]) continue;
        const double e = std::exp(logit[j] - logit[y[i]]);
        sum[i] += e;
        largest[i] = std::max(largest[i], logit[j]);
        exponentials[i * vocab + j] = e * factor[j];
      }
      for (int64_t j = 0; j < vocab; ++j) {
        const double grad =
            static_cast<double>(g[i]) * (j == y[i] ? -sum[i] * factor[j] : exponentials[i * vocab + j]) / (1.0 + sum[i]);
        for (int64_t k = 0; k < width; ++k) {
          grad_hidden[i * width + k] += grad * wd[j * width + k];
          grad_weight[j * width + k] += grad * xd[i * width + k];
        }
      }
    }
  }
};

// The rows of a micro-batch grouped by target, as SubtractTargetsKernel wants them.
struct TargetGroups {
  DeviceArray<int32_t> order, starts;
  int groups = 0;
  explicit TargetGroups(const Problem& problem) : TargetGroups(problem.targets.ToHost()) {}

 private:
  static std::vector<int32_t> Order(const std::vector<int32_t>& targets) {
    std::vector<int32_t> order(targets.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return targets[a] < targets[b]; });
    return order;
  }
  static std::vector<int32_t> Starts(const std::vector<int32_t>& targets, const std::vector<int32_t>& order) {
    std::vector<int32_t> starts;
    for (size_t i = 0; i < order.size(); ++i) {
      if (i == 0 || targets[order[i]] != targets[order[i - 1]]) starts.push_back(static_cast<int32_t>(i));
    }
    starts.push_back(static_cast<int32_t>(order.size()));
    return starts;
  }
  explicit TargetGroups(const std::vector<int32_t>& targets) : order(Order(targets)), starts(Starts(targets, Order(targets))) {
    groups = static_cast<int>(starts.count()) - 1;
  }
};

inline void EnqueueSubtractTargets(const Problem& problem, const TargetGroups& groups, float* grad_weight, cudaStream_t stream) {
  sm90::SubtractTargetsKernel<<<groups.groups, 256, 0, stream>>>(problem.hidden.get(), problem.target_factor.get(),
                                                                 problem.targets.get(), groups.order.get(), groups.starts.get(),
                                                                 static_cast<int32_t>(problem.width), grad_weight);
  LAB_CUDA(cudaGetLastError());
}

}  // namespace headwater::lab

#endif  // HEADWATER_KERNELS_LAB_PROBLEM_CUH_
