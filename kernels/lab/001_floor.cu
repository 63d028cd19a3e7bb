// 001: the floor. The three bare products of a loss head by cuBLASLt, each with its algorithm searched, alone and in sequence.
// Run: 001_floor [rows width vocab]...   (default 4096, 8192 and 1024 rows at width 4096, vocabulary 128256)

#include <memory>

#include "blas.cuh"
#include "problem.cuh"

namespace {

using headwater::lab::BenchOptions;
using headwater::lab::BlasProduct;

void RunShape(headwater::lab::Bench& bench, headwater::lab::BlasContext& blas, int64_t rows, int64_t width, int64_t vocab) {
  headwater::lab::Problem problem(rows, width, vocab, 1.0f);
  headwater::lab::DeviceArray<float> logits(rows * vocab), grad_weight(vocab * width), grad_hidden(rows * width);
  headwater::lab::DeviceArray<__nv_bfloat16> logits_bf16(rows * vocab);
  grad_weight.Zero();
  // The engine's own operand values: exponentials, scaled hidden states.
  problem.EnqueueTargetLogits(bench.stream());
  const auto e_product = problem.MakeEProduct({});
  e_product.Enqueue(bench.stream());
  problem.EnqueueFinishRows(bench.stream());
  LAB_CUDA(cudaStreamSynchronize(bench.stream()));

  BlasProduct logits_16 =
      BlasProduct::Logits(blas, rows, width, vocab, problem.hidden.get(), problem.weight.get(), logits_bf16.get(), CUDA_R_16BF);
  BlasProduct logits_32 =
      BlasProduct::Logits(blas, rows, width, vocab, problem.hidden.get(), problem.weight.get(), logits.get(), CUDA_R_32F);
  BlasProduct hidden_16 = BlasProduct::GradHidden(blas, rows, width, vocab, problem.exponentials.get(), problem.weight.get(),
                                                  problem.grad_hidden.get(), CUDA_R_16BF);
  BlasProduct hidden_32 = BlasProduct::GradHidden(blas, rows, width, vocab, problem.exponentials.get(), problem.weight.get(),
                                                  grad_hidden.get(), CUDA_R_32F);
  BlasProduct weight_add = BlasProduct::GradWeight(blas, rows, width, vocab, problem.exponentials.get(),
                                                   problem.scaled_hidden.get(), grad_weight.get(), 1.0f);
  BlasProduct weight_set = BlasProduct::GradWeight(blas, rows, width, vocab, problem.exponentials.get(),
                                                   problem.scaled_hidden.get(), grad_weight.get(), 0.0f);
  logits_16.Search(bench, "logits, bf16 out");
  logits_32.Search(bench, "logits, fp32 out");
  hidden_16.Search(bench, "grad_hidden, bf16 out");
  hidden_32.Search(bench, "grad_hidden, fp32 out");
  weight_add.Search(bench, "grad_weight, adding");
  weight_set.Search(bench, "grad_weight, overwriting");

  const auto sequence = [&](const BlasProduct& first) {
    return [&](cudaStream_t stream) {
      first.Enqueue(stream);
      hidden_16.Enqueue(stream);
      weight_add.Enqueue(stream);
    };
  };
  const double flops = 3.0 * logits_16.flops();
  bench.Run("N" + std::to_string(rows) + " H" + std::to_string(width) + " V" + std::to_string(vocab),
            {{"three products, bf16 logits", sequence(logits_16), flops},
             {"three products, fp32 logits", sequence(logits_32), flops},
             logits_16.AsCandidate("logits, bf16 out"),
             logits_32.AsCandidate("logits, fp32 out"),
             hidden_16.AsCandidate("grad_hidden, bf16 out"),
             hidden_32.AsCandidate("grad_hidden, fp32 out"),
             weight_add.AsCandidate("grad_weight, adding"),
             weight_set.AsCandidate("grad_weight, overwriting")},
            BenchOptions{2.0, 0.8, 2, true});
}

}  // namespace

int main(int argc, char** argv) {
  headwater::lab::PrintDevice("001_floor");
  headwater::lab::Bench bench;
  headwater::lab::BlasContext blas;
  std::vector<int64_t> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::atoll(argv[i]));
  if (sizes.empty()) sizes = {4096, 4096, 128256, 8192, 4096, 128256, 1024, 4096, 128256};
  for (size_t i = 0; i + 2 < sizes.size(); i += 3) RunShape(bench, blas, sizes[i], sizes[i + 1], sizes[i + 2]);
  return 0;
}
