// 006: the whole E form in sequence (target logits, product 1, row factors, grad_hidden, grad_weight, targets' rows) against the
// three bare cuBLASLt products in sequence; and stage 2 of the plan, where only product 1 is our own. Checked against fp64 on the
// CPU. Run: 006_chain [once] [rows]...   (once: each kernel a single time, for a profiler)

#include <cstring>

#include "blas.cuh"
#include "problem.cuh"

namespace {

using headwater::lab::BenchOptions;
using headwater::lab::BlasProduct;
using headwater::lab::Check;
using headwater::lab::DeviceArray;
using headwater::lab::Problem;
using headwater::lab::RelativeDifference;
using headwater::lab::TargetGroups;

// The own kernels over one micro-batch, grad_weight added to.
struct Chain {
  const Problem& problem;
  TargetGroups groups;
  float* grad_weight;
  headwater::lab::PlainEProduct<headwater::sm90::Tile320> e_product;
  headwater::lab::GradHiddenProduct<> hidden_product;
  headwater::lab::GradWeightProduct<> weight_product;

  Chain(const Problem& problem_in, float* grad_weight_in)
      : problem(problem_in),
        groups(problem_in),
        grad_weight(grad_weight_in),
        e_product(problem_in.MakeEProduct<headwater::sm90::Tile320>({8})),
        hidden_product(problem_in.MakeGradHidden({8})),
        weight_product(problem_in.MakeGradWeight(grad_weight_in, {1})) {}
  void Enqueue(cudaStream_t stream) const {
    problem.EnqueueTargetLogits(stream);
    e_product.Enqueue(stream);
    problem.EnqueueFinishRows(stream, headwater::sm90::Tile320::kTileN);
    hidden_product.Enqueue(stream);
    weight_product.Enqueue(stream);
    EnqueueSubtractTargets(problem, groups, grad_weight, stream);
  }
};

// grad_hidden [R, H] bf16 from the plain product E * weight in fp32, as GradHiddenEpilogue does it: what a library product needs
// after it.
__global__ void __launch_bounds__(256)
    FinishGradHiddenKernel(const float* product, const float* row_factor, const float* target_factor, const int32_t* targets,
                           const __nv_bfloat16* weight, int64_t rows, int32_t width, __nv_bfloat16* out) {
  const int64_t i = 4 * (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x);
  if (i >= rows * width) return;
  const int64_t row = i / width;
  const float4 value = *reinterpret_cast<const float4*>(product + i);
  const auto* w = reinterpret_cast<const __nv_bfloat162*>(weight + static_cast<int64_t>(targets[row]) * width + i % width);
  const float2 low = __bfloat1622float2(w[0]), high = __bfloat1622float2(w[1]);
  const float factor = row_factor[row], target = target_factor[row];
  auto* destination = reinterpret_cast<__nv_bfloat162*>(out + i);
  destination[0] = __floats2bfloat162_rn(factor * value.x - target * low.x, factor * value.y - target * low.y);
  destination[1] = __floats2bfloat162_rn(factor * value.z - target * high.x, factor * value.w - target * high.y);
}

void CheckSmall(int64_t rows, int64_t width, int64_t vocab, float logit_std) {
  Problem problem(rows, width, vocab, logit_std);
  const headwater::lab::Reference reference(problem, false, 1.0, 0.0);
  DeviceArray<float> grad_weight(vocab * width);
  grad_weight.Zero();
  const Chain chain(problem, grad_weight.get());
  chain.Enqueue(nullptr);
  LAB_CUDA(cudaDeviceSynchronize());
  const std::vector<float> loss = problem.token_loss.ToHost();
  std::vector<double> expected_loss;
  for (const double sum : reference.sum) expected_loss.push_back(std::log1p(sum));
  const std::string name = "N" + std::to_string(rows) + " H" + std::to_string(width) + " V" + std::to_string(vocab) + " std " +
                           std::to_string(static_cast<int>(logit_std)) + ": ";
  Check(name + "token losses", RelativeDifference(loss, expected_loss), 3e-6);
  Check(name + "grad_hidden", RelativeDifference(problem.grad_hidden.ToHost(), reference.grad_hidden),
        logit_std > 4.0f ? 2.1e-3 : 1.9e-3);
  Check(name + "grad_weight", RelativeDifference(grad_weight.ToHost(), reference.grad_weight), logit_std > 4.0f ? 1.5e-3 : 2e-4);
}

}  // namespace

int main(int argc, char** argv) {
  headwater::lab::PrintDevice("006_chain");
  bool once = false;
  std::vector<int64_t> row_counts;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "once") == 0) {
      once = true;
    } else {
      row_counts.push_back(std::atoll(argv[i]));
    }
  }
  if (row_counts.empty()) row_counts = {4096, 8192, 1024};
  if (!once) {
    CheckSmall(256, 512, 4104, 1.0f);
    CheckSmall(256, 512, 4104, 8.0f);
  }
  headwater::lab::Bench bench;
  headwater::lab::BlasContext blas;
  for (const int64_t rows : row_counts) {
    const int64_t width = 4096, vocab = 128256;
    Problem problem(rows, width, vocab, 1.0f);
    DeviceArray<float> grad_weight(vocab * width), product(rows * width);
    DeviceArray<__nv_bfloat16> logits(rows * vocab), floor_hidden(rows * width);
    grad_weight.Zero();
    LAB_CUDA(cudaDeviceSynchronize());
    const Chain chain(problem, grad_weight.get());
    chain.Enqueue(bench.stream());
    LAB_CUDA(cudaStreamSynchronize(bench.stream()));
    BlasProduct floor_logits =
        BlasProduct::Logits(blas, rows, width, vocab, problem.hidden.get(), problem.weight.get(), logits.get(), CUDA_R_16BF);
    BlasProduct floor_grad_hidden = BlasProduct::GradHidden(blas, rows, width, vocab, problem.exponentials.get(),
                                                            problem.weight.get(), floor_hidden.get(), CUDA_R_16BF);
    BlasProduct grad_hidden_32 = BlasProduct::GradHidden(blas, rows, width, vocab, problem.exponentials.get(), problem.weight.get(),
                                                         product.get(), CUDA_R_32F);
    BlasProduct floor_grad_weight = BlasProduct::GradWeight(blas, rows, width, vocab, problem.exponentials.get(),
                                                            problem.scaled_hidden.get(), grad_weight.get(), 1.0f);
    if (!once) {
      floor_logits.Search(bench, "logits, bf16 out");
      floor_grad_hidden.Search(bench, "grad_hidden, bf16 out");
      grad_hidden_32.Search(bench, "grad_hidden, fp32 out");
      floor_grad_weight.Search(bench, "grad_weight, adding");
    } else {
      floor_logits.TakeFirst();
      floor_grad_hidden.TakeFirst();
      floor_grad_weight.TakeFirst();
    }
    const auto floor = [&](cudaStream_t stream) {
      floor_logits.Enqueue(stream);
      floor_grad_hidden.Enqueue(stream);
      floor_grad_weight.Enqueue(stream);
    };
    const auto own = [&](cudaStream_t stream) { chain.Enqueue(stream); };
    const auto mixed = [&](cudaStream_t stream) {
      problem.EnqueueTargetLogits(stream);
      chain.e_product.Enqueue(stream);
      problem.EnqueueFinishRows(stream, headwater::sm90::Tile320::kTileN);
      grad_hidden_32.Enqueue(stream);
      FinishGradHiddenKernel<<<static_cast<int>((rows * width / 4 + 255) / 256), 256, 0, stream>>>(
          product.get(), problem.row_factor.get(), problem.target_factor.get(), problem.targets.get(), problem.weight.get(), rows,
          static_cast<int32_t>(width), problem.grad_hidden.get());
      floor_grad_weight.Enqueue(stream);
      EnqueueSubtractTargets(problem, chain.groups, grad_weight.get(), stream);
    };
    if (once) {
      floor(bench.stream());
      LAB_CUDA(cudaStreamSynchronize(bench.stream()));
      continue;
    }
    const auto rest = [&](cudaStream_t stream) {
      problem.EnqueueTargetLogits(stream);
      problem.EnqueueFinishRows(stream, headwater::sm90::Tile320::kTileN);
      EnqueueSubtractTargets(problem, chain.groups, grad_weight.get(), stream);
    };
    const double flops = 3.0 * floor_logits.flops();
    bench.Run("cross entropy, N" + std::to_string(rows) + " H4096 V128256",
              {{"three cuBLASLt products", floor, flops},
               {"E form, all own", own, flops},
               {"E form, own product 1, cuBLASLt gradients", mixed, flops}},
              BenchOptions{2.0, 1.0, 2, true});
    // Apart from the others: it draws less power, and what follows it would run faster for that.
    bench.Run("of that: target logits, row factors, targets' rows",
              {{"rest", rest, 0.0, static_cast<double>(rows) * static_cast<double>(width) * (4 + 4 + 10)}},
              BenchOptions{0.5, 0.5, 1, false});
  }
  return headwater::lab::AnyCheckFailed() ? 1 : 0;
}
