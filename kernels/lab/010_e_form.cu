// 010: the product's E form through its launch functions (target arguments, exponentials and sums, losses and factors) against fp64
// on the CPU; the kernels that finish the gradients (finish_checks.cuh); then their times, product 1 against cuBLASLt's logits.
//
// Run: 010_e_form [check]
//
// Links: kernels/cuda/products/e_product.cu kernels/cuda/rows/finish.cu

#include <thread>

#include "blas.cuh"
#include "finish_checks.cuh"
#include "kernels/cuda/products/e_product.h"

namespace {

using headwater::cuda::BytesOf;
using headwater::cuda::ConstMatrix;
using headwater::cuda::Element;
using headwater::cuda::EProductPartialCount;
using headwater::cuda::FinishOptions;
using headwater::cuda::PaddedWidth;
using headwater::cuda::RowReport;
using headwater::cuda::ShardWeights;
using headwater::lab::Check;
using headwater::lab::DeviceArray;
using headwater::lab::DeviceGroups;
using headwater::lab::Errors;
using headwater::lab::HashAt;
using headwater::lab::Larger;
using headwater::lab::NormalAt;
using headwater::lab::Stored;

struct Options {
  const char* name;
  bool bias;
  double logit_scale;
  double softcap;
  bool class_weights;
  bool token_weights;
  double z_loss;
  double loss_scale;
  int shards;
  double offset = 0;  // of the exponentials, above the target's argument
};
constexpr Options kPlain{"plain", false, 1, 0, false, false, 0, 1, 1};
constexpr Options kAllOptions[] = {
    kPlain,
    {"bias, class weights, z-loss, 2 shards", true, 1, 0, true, true, 1e-3, 0.125, 2},
    {"scale -0.5, 2 shards", false, -0.5, 0, false, true, 0, 3, 2},
    {"bias, scale 3, softcap 30, class weights, z-loss", true, 3, 30, true, true, 1e-3, 1, 1},
    {"offset 9 above the target, z-loss, 2 shards", true, 1, 0, false, true, 1e-3, 1, 2, 9},
    {"offset 14 below the target, softcap 30", false, 3, 30, false, true, 0, 1, 1, -14},
};
constexpr double kWeightStd = 3;

// Rows, weights and their products in fp64. Every third row's logit of the target is about 20, the others' are small: confident.
class Shape {
 public:
  Shape(int64_t rows, int64_t vocab, int64_t width)
      : rows_(rows),
        vocab_(vocab),
        width_(width),
        weight_(
            Element::kBFloat16, vocab, width, PaddedWidth(width),
            [&](int64_t j, int64_t k) { return kWeightStd / std::sqrt(static_cast<double>(width)) * Normal(2, j * width + k); }),
        bias_(Element::kBFloat16, 1, vocab, vocab, [](int64_t, int64_t j) { return 0.5 * Normal(4, j); }),
        targets_(MakeTargets(rows, vocab)),
        hidden_(Element::kBFloat16, rows, width, PaddedWidth(width),
                [&](int64_t i, int64_t k) {
                  return i % 3 == 0 ? 20 / (kWeightStd * kWeightStd) * weight_.at(targets_[i], k) : Normal(1, i * width + k);
                }),
        device_targets_(targets_),
        products_(static_cast<size_t>(rows * vocab)) {
    title_ = "N" + std::to_string(rows) + " V" + std::to_string(vocab) + " H" + std::to_string(width);
    std::vector<std::thread> threads;
    const auto count = static_cast<int64_t>(std::max(1u, std::thread::hardware_concurrency()));
    for (int64_t t = 0; t < count; ++t) {
      threads.emplace_back([this, t, count] {
        for (int64_t j = t; j < vocab_; j += count) {
          for (int64_t i = 0; i < rows_; ++i)
            products_[i * vocab_ + j] = Dot(&hidden_.values[i * width_], &weight_.values[j * width_]);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  void Run() {
    for (const Options& options : kAllOptions) CheckForm(options);
    errors_.Report(title_);
  }

  // A row whose target lies far below its largest logit, or that holds a NaN, must be told; calm rows must not.
  void CheckOverflow() {
    Options options = kPlain;
    const Results calm = Compute(options);
    Check(title_ + ": no overflow", calm.overflow, 0.5);
    options.logit_scale = 40;
    Check(title_ + ": overflow told", Compute(options).overflow == 1 ? 0 : 1, 0.5);
    const std::vector<uint8_t> kept = hidden_.bytes.ToHost();
    LAB_CUDA(cudaMemset(hidden_.data(), 0xff, 2));
    Check(title_ + ": NaN told", Compute(kPlain).overflow == 1 ? 0 : 1, 0.5);
    LAB_CUDA(cudaMemcpy(hidden_.bytes.get(), kept.data(), kept.size(), cudaMemcpyHostToDevice));
    const Results again = Compute(kPlain);
    Check(title_ + ": repeated", again.exponentials == calm.exponentials && again.sums == calm.sums ? 0 : 1, 0.5);
  }

 private:
  struct Results {
    std::vector<double> arguments;
    std::vector<double> exponentials;  // [rows, vocab]
    std::vector<double> sums;          // [rows], of all shards
    std::vector<RowReport> reports;
    std::vector<float> row_factor, target_factor;
    int32_t overflow = 0;
  };

  static double Normal(uint64_t seed, int64_t index) { return static_cast<double>(NormalAt(seed, static_cast<uint64_t>(index))); }
  static std::vector<int32_t> MakeTargets(int64_t rows, int64_t vocab) {
    std::vector<int32_t> targets;
    for (int64_t i = 0; i < rows; ++i) {
      // The vocabulary's edges too.
      const auto any = static_cast<int32_t>(HashAt(3, static_cast<uint64_t>(i)) % static_cast<uint64_t>(vocab));
      targets.push_back(i % 50 == 7 ? static_cast<int32_t>(vocab - 1) : i % 50 == 9 ? 0 : any);
    }
    return targets;
  }
  double Dot(const double* a, const double* b) const {
    double sums[4] = {};
    int64_t k = 0;
    for (; k + 4 <= width_; k += 4) {
      for (int i = 0; i < 4; ++i) sums[i] += a[k + i] * b[k + i];
    }
    for (; k < width_; ++k) sums[0] += a[k] * b[k];
    return sums[0] + sums[1] + sums[2] + sums[3];
  }
  double ClassWeight(const Options& options, int64_t column) const {
    return options.class_weights ? static_cast<double>(0.5f + 0.25f * static_cast<float>(column % 5)) : 1.0;
  }
  double TokenWeight(const Options& options, int64_t row) const {
    return options.token_weights ? static_cast<double>(0.25f * static_cast<float>(row % 6)) : 1.0;
  }

  Results Compute(const Options& options) const {
    DeviceArray<double> arguments(rows_), sums(options.shards * rows_);
    DeviceArray<float> row_factor(rows_), target_factor(rows_), class_weights(vocab_), token_weights(rows_);
    DeviceArray<RowReport> reports(rows_);
    DeviceArray<int32_t> overflow(1);
    arguments.Zero();
    overflow.Zero();
    std::vector<float> host(static_cast<size_t>(vocab_));
    for (int64_t j = 0; j < vocab_; ++j) host[j] = static_cast<float>(ClassWeight(options, j));
    LAB_CUDA(cudaMemcpy(class_weights.get(), host.data(), class_weights.bytes(), cudaMemcpyHostToDevice));
    host.resize(static_cast<size_t>(rows_));
    for (int64_t i = 0; i < rows_; ++i) host[i] = static_cast<float>(TokenWeight(options, i));
    LAB_CUDA(cudaMemcpy(token_weights.get(), host.data(), token_weights.bytes(), cudaMemcpyHostToDevice));

    const headwater::cuda::Transform transform{options.logit_scale, options.softcap};
    Results results;
    results.exponentials.resize(static_cast<size_t>(rows_ * vocab_));
    const int64_t cut = vocab_ / 2 / 2 * 2;  // even: the bias of a shard begins at a multiple of 4 bytes
    std::vector<ShardWeights> shards;
    for (int s = 0; s < options.shards; ++s) {
      const int64_t start = s == 0 ? 0 : cut, end = s == options.shards - 1 ? vocab_ : cut;
      const auto* weight = static_cast<const uint8_t*>(weight_.data()) + start * weight_.stride * 2;
      const auto* bias = static_cast<const uint8_t*>(bias_.data()) + start * 2;
      shards.push_back({weight, options.bias ? bias : nullptr, Element::kBFloat16, start, end - start, width_, weight_.stride});
      LAB_CUDA(headwater::cuda::LaunchTargetArguments(hidden_.matrix(), shards.back(), device_targets_.get(), options.logit_scale,
                                                      arguments.get(), nullptr));
    }
    LAB_CUDA(cudaDeviceSynchronize());
    results.arguments = arguments.ToHost();
    std::vector<double> moved = results.arguments;
    for (double& argument : moved) argument += options.offset;
    const DeviceArray<double> other_offsets(moved);
    const double* const offsets = options.offset == 0 ? arguments.get() : other_offsets.get();
    for (int s = 0; s < options.shards; ++s) {
      const int64_t columns = shards[s].columns, e_stride = PaddedWidth(columns) + 8;
      const Stored exponentials(Element::kBFloat16, rows_, columns, e_stride);
      DeviceArray<float> partial(EProductPartialCount(rows_, columns));
      headwater::cuda::EProductParams params;
      params.hidden = hidden_.matrix();
      params.shard = shards[s];
      params.targets = device_targets_.get();
      params.offsets = offsets;
      params.transform = transform;
      params.exponentials = exponentials.data();
      params.e_stride = e_stride;
      params.partial_sums = partial.get();
      LAB_CUDA(headwater::cuda::LaunchEProduct(params, nullptr));
      LAB_CUDA(headwater::cuda::LaunchSumPartials(partial.get(), rows_, columns, sums.get() + s * rows_, nullptr));
      const std::vector<double> fetched = exponentials.Fetch();
      for (int64_t i = 0; i < rows_; ++i) {
        for (int64_t j = 0; j < columns; ++j) {
          results.exponentials[i * vocab_ + shards[s].vocab_start + j] = fetched[i * e_stride + j];
        }
      }
    }
    FinishOptions finish;
    finish.cross_entropy.term.z_loss = options.z_loss;
    finish.cross_entropy.term.class_weights = options.class_weights ? class_weights.get() : nullptr;
    finish.cross_entropy.term.class_weight_sum = static_cast<double>(vocab_);
    finish.cross_entropy.term.valid_vocab_size = vocab_;
    finish.loss_scale = options.loss_scale;
    finish.transform = transform;
    LAB_CUDA(headwater::cuda::LaunchFinishERows(
        sums.get(), options.shards, arguments.get(), offsets,
        {rows_, device_targets_.get(), options.token_weights ? token_weights.get() : nullptr}, finish, reports.get(),
        row_factor.get(), target_factor.get(), overflow.get(), /*dither=*/nullptr, nullptr));
    LAB_CUDA(cudaDeviceSynchronize());
    const std::vector<double> shard_sums = sums.ToHost();
    results.sums.assign(static_cast<size_t>(rows_), 0.0);
    for (size_t i = 0; i < shard_sums.size(); ++i) results.sums[i % static_cast<size_t>(rows_)] += shard_sums[i];
    results.reports = reports.ToHost();
    results.row_factor = row_factor.ToHost();
    results.target_factor = target_factor.ToHost();
    results.overflow = overflow.ToHost()[0];
    return results;
  }

  void CheckForm(const Options& options) {
    const Results got = Compute(options);
    double squares = 0, worst_e = 0, worst_target = 0, worst_argument = 0, worst_sum = 0, worst_loss = 0, worst_lse = 0,
           worst_z = 0;
    double worst_row_factor = 0, worst_target_factor = 0, worst_bound = 0;
    int64_t counted = 0;
    std::vector<double> logits(static_cast<size_t>(vocab_)), derivatives(static_cast<size_t>(vocab_), 1.0);
    for (int64_t i = 0; i < rows_; ++i) {
      const int64_t y = targets_[i];
      double argument = 0;
      for (int64_t j = 0; j < vocab_; ++j) {
        const double a = options.logit_scale * (products_[i * vocab_ + j] + (options.bias ? bias_.at(0, j) : 0.0));
        logits[j] = a;
        if (j == y) argument = a;
        if (options.softcap > 0) {
          logits[j] = options.softcap * std::tanh(a / options.softcap);
          derivatives[j] = 1 / (std::cosh(a / options.softcap) * std::cosh(a / options.softcap));
        }
      }
      double offset = argument + options.offset;
      if (options.softcap > 0) offset = options.softcap * std::tanh(offset / options.softcap);
      const double own = std::exp(logits[y] - offset);
      double scaled_sum = 0, largest = 0;
      for (int64_t j = 0; j < vocab_; ++j) {
        const double e = got.exponentials[i * vocab_ + j];
        if (j == y) {
          worst_target = Larger(worst_target, std::abs(e));
          continue;
        }
        const double exponential = std::exp(logits[j] - offset);
        scaled_sum += exponential;
        largest = std::max(largest, exponential);
        const double expected = exponential * derivatives[j];
        if (expected < 1e-36) continue;
        const double error = e / expected - 1;
        squares += error * error;
        worst_e = Larger(worst_e, std::abs(error));
        ++counted;
      }
      worst_argument = Larger(worst_argument, std::abs(got.arguments[i] - argument) / (1 + std::abs(argument)));
      worst_sum = Larger(worst_sum, std::abs(got.sums[i] / scaled_sum - 1));
      const double sum = scaled_sum / own;
      const double loss = std::log1p(sum), lse = logits[y] + loss, missing = sum / (1 + sum), weight = ClassWeight(options, y);
      const double z_slope = 2 * options.z_loss * lse;
      const RowReport& report = got.reports[i];
      worst_loss = Larger(worst_loss, std::abs(report.hard - weight * loss) / (weight * loss));
      worst_loss = Larger(worst_loss, std::abs(report.target_log_probability + loss) / loss);
      worst_lse = Larger(worst_lse, std::abs(report.lse - lse) / (1 + std::abs(lse)));
      worst_z = Larger(worst_z,
                       std::abs(report.z_loss - options.z_loss * lse * lse) / (1e-3 * (1 + std::abs(lse)) * (1 + std::abs(lse))));
      const double scale = options.loss_scale * TokenWeight(options, i) * options.logit_scale;
      const double row_factor = scale * (weight + z_slope) / (own + scaled_sum);
      const double row_size = std::abs(scale) * (weight + std::abs(z_slope)) / (own + scaled_sum) + 1e-30;
      worst_row_factor = Larger(worst_row_factor, std::abs(static_cast<double>(got.row_factor[i]) - row_factor) / row_size);
      const double target_factor = scale * (-weight * missing + z_slope * (1 - missing)) * derivatives[y];
      const double target_size = std::abs(scale) * (weight * missing + std::abs(z_slope) * (1 - missing)) * derivatives[y] + 1e-30;
      worst_target_factor =
          Larger(worst_target_factor, std::abs(static_cast<double>(got.target_factor[i]) - target_factor) / target_size);
      // A bound must be one.
      const double gradient =
          std::max(std::abs(row_factor) * largest, std::abs(scale * (-weight * missing + z_slope * (1 - missing))));
      worst_bound = Larger(worst_bound, gradient / (report.gradient_bound + 1e-30));
    }
    // What the tensor cores' accumulation costs grows with the logits.
    const double bound = 4e-5 * std::max(1.0, kWeightStd * std::abs(options.logit_scale));
    const std::string name = title_ + " " + options.name + ": ";
    errors_.Add(name + "E, root mean square of relative errors", std::sqrt(squares / static_cast<double>(counted)), 1.9e-3);
    errors_.Add(name + "E, worst", worst_e, 4.2e-3 + 2 * bound);
    errors_.Add(name + "E at the target", worst_target, 1e-300);
    errors_.Add(name + "target arguments", worst_argument, 1e-5);
    errors_.Add(name + "S", worst_sum, bound);
    errors_.Add(name + "loss", worst_loss, bound);
    errors_.Add(name + "log-sum-exp", worst_lse, bound);
    errors_.Add(name + "z-loss", worst_z, 2 * bound);
    errors_.Add(name + "row factor", worst_row_factor, bound);
    errors_.Add(name + "target factor", worst_target_factor, bound);
    errors_.Add(name + "gradient bound", worst_bound, 1 + bound);
    errors_.Add(name + "no overflow", got.overflow, 0.5);
  }

  int64_t rows_, vocab_, width_;
  Stored weight_, bias_;
  std::vector<int32_t> targets_;
  Stored hidden_;
  DeviceArray<int32_t> device_targets_;
  std::vector<double> products_;
  std::string title_;
  Errors errors_;
};

// --- Times -----------------------------------------------------------------------------------------------------------------------

void Time(int64_t rows, int64_t width, int64_t vocab) {
  using namespace headwater::lab;
  Bench bench;
  BlasContext blas;
  DeviceArray<__nv_bfloat16> hidden(rows * width), weight(vocab * width), exponentials(rows * vocab), scaled(rows * width);
  DeviceArray<float> logits(rows * vocab), partial(EProductPartialCount(rows, vocab)), row_factor(rows), target_factor(rows);
  DeviceArray<float> product(rows * width), grad_bias(vocab), alpha(1);
  DeviceArray<double> arguments(rows), sums(rows);
  DeviceArray<RowReport> reports(rows);
  DeviceArray<int32_t> targets(rows), overflow(1);
  DeviceArray<uint8_t> scratch(headwater::cuda::GradBiasScratchBytes(vocab));
  FillNormal(hidden, 1, 1.0f);
  FillNormal(weight, 2, 1.0f / std::sqrt(static_cast<float>(width)));
  FillTargets(targets, vocab, 3);
  product.Zero();
  grad_bias.Zero();
  overflow.Zero();
  LAB_CUDA(cudaDeviceSynchronize());
  const ConstMatrix x{hidden.get(), rows, width, width, Element::kBFloat16};
  const ShardWeights shard{weight.get(), nullptr, Element::kBFloat16, 0, vocab, width, width};
  headwater::cuda::EProductParams params;
  params.hidden = x;
  params.shard = shard;
  params.targets = targets.get();
  params.offsets = arguments.get();
  params.exponentials = exponentials.get();
  params.e_stride = vocab;
  params.partial_sums = partial.get();
  FinishOptions finish;
  finish.cross_entropy.term.class_weight_sum = static_cast<double>(vocab);
  finish.cross_entropy.term.valid_vocab_size = vocab;
  headwater::cuda::GradHiddenTarget target;
  target.out = scaled.get();
  target.out_element = Element::kBFloat16;
  target.out_stride = width;
  const std::vector<int32_t> host_targets = targets.ToHost();
  const DeviceGroups groups(host_targets);
  const std::vector<int32_t> same(static_cast<size_t>(rows), 17);
  const DeviceGroups one_group(same);
  const DeviceArray<int32_t> same_targets(same);

  const double r = static_cast<double>(rows), h = static_cast<double>(width), v = static_cast<double>(vocab);
  const double tiles = static_cast<double>(EProductPartialCount(1, vocab));
  const double flops = 2 * r * h * v;
  const std::vector<Candidate> light = {
      {"target arguments",
       [&](cudaStream_t s) { LAB_CUDA(headwater::cuda::LaunchTargetArguments(x, shard, targets.get(), 1, arguments.get(), s)); }, 0,
       4 * r * h},
      {"sums of partials",
       [&](cudaStream_t s) { LAB_CUDA(headwater::cuda::LaunchSumPartials(partial.get(), rows, vocab, sums.get(), s)); }, 0,
       4 * r * tiles},
      {"finish rows",
       [&](cudaStream_t s) {
         LAB_CUDA(headwater::cuda::LaunchFinishERows(sums.get(), 1, arguments.get(), arguments.get(),
                                                     {rows, targets.get(), nullptr}, finish, reports.get(), row_factor.get(),
                                                     target_factor.get(), overflow.get(),
                                                     /*dither=*/nullptr, s));
       },
       0, 100 * r},
      {"scaled rows, bf16",
       [&](cudaStream_t s) {
         LAB_CUDA(headwater::cuda::LaunchScaleRows(x, row_factor.get(), {scaled.get(), rows, width, width, Element::kBFloat16},
                                                   alpha.get(), s));
       },
       0, 4 * r * h},
      {"scaled rows, fp16",
       [&](cudaStream_t s) {
         LAB_CUDA(headwater::cuda::LaunchScaleRows({hidden.get(), rows, width, width, Element::kFloat16}, row_factor.get(),
                                                   {scaled.get(), rows, width, width, Element::kFloat16}, alpha.get(), s));
       },
       0, 6 * r * h},
      {"grad_hidden finished, bf16",
       [&](cudaStream_t s) {
         LAB_CUDA(headwater::cuda::LaunchFinishGradHidden({product.get(), rows, width, width, Element::kFloat32}, row_factor.get(),
                                                          target_factor.get(), targets.get(), shard, target, s));
       },
       0, 8 * r * h},
      {"targets' rows, about as many groups as rows",
       [&](cudaStream_t s) {
         LAB_CUDA(headwater::cuda::LaunchAddTargetRows(x, target_factor.get(), targets.get(),
                                                       {groups.order.get(), groups.starts.get(), groups.count}, shard, 1.0f,
                                                       logits.get(), nullptr, s));
       },
       0, 10 * r * h},
      {"targets' rows, one group",
       [&](cudaStream_t s) {
         LAB_CUDA(headwater::cuda::LaunchAddTargetRows(x, target_factor.get(), same_targets.get(),
                                                       {one_group.order.get(), one_group.starts.get(), one_group.count}, shard,
                                                       1.0f, logits.get(), nullptr, s));
       },
       0, 2 * r * h},
      {"grad_bias",
       [&](cudaStream_t s) {
         LAB_CUDA(headwater::cuda::LaunchAddGradBias({exponentials.get(), rows, vocab, vocab, Element::kBFloat16}, row_factor.get(),
                                                     1.0f, scratch.get(), grad_bias.get(), s));
       },
       0, 2 * r * v},
  };
  const Candidate e_product{"E product", [&](cudaStream_t s) { LAB_CUDA(headwater::cuda::LaunchEProduct(params, s)); }, flops, 0};
  light[0].enqueue(bench.stream());
  e_product.enqueue(bench.stream());
  BlasProduct floor = BlasProduct::Logits(blas, rows, width, vocab, hidden.get(), weight.get(), logits.get(), CUDA_R_32F);
  floor.Search(bench, "logits, fp32 out");
  bench.Run("product 1, N" + std::to_string(rows) + " H" + std::to_string(width) + " V" + std::to_string(vocab),
            {floor.AsCandidate("cuBLASLt logits, fp32 out"), e_product}, BenchOptions{1.5, 0.7, 2, false});
  for (size_t i = 0; i < 3; ++i) light[i].enqueue(bench.stream());
  // The targets' rows go into the memory of the logits.
  logits.Zero();
  LAB_CUDA(cudaDeviceSynchronize());
  Check("times: no overflow", overflow.ToHost()[0], 0.5);
  std::printf("\n== light kernels, back to back\n");
  for (const Candidate& candidate : light) {
    bench.TimeCalls(candidate, 5);
    const double ms = bench.TimeCalls(candidate, 50);
    std::printf("%-44s %8.4fms %6.2fTB/s\n", candidate.name.c_str(), ms, candidate.bytes / ms * 1e-9);
  }
}

}  // namespace

int main(int argc, char** argv) {
  headwater::lab::PrintDevice("010_e_form");
  for (const int64_t rows : {1, 130, 300}) {
    for (const int64_t vocab : {1000, 4104, 5001}) {
      for (const int64_t width : {64, 1000}) Shape(rows, vocab, width).Run();
    }
  }
  Shape(700, 8200, 96).Run();  // more tiles than clusters at once: every CTA goes round its pipeline again
  Shape(130, 5001, 64).CheckOverflow();
  headwater::lab::CheckFinish();
  if (argc < 2 || std::strcmp(argv[1], "check") != 0) Time(4096, 4096, 128256);
  return headwater::lab::AnyCheckFailed() ? 1 : 0;
}
