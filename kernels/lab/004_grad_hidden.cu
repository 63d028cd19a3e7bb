// 004: grad_hidden [N, H] bf16 from E [N, V] and weight [V, H], with the row factors and the target's term in the epilogue, against
// cuBLASLt's product with bf16 output. Checked against fp64 on the CPU, then at full size against cuBLASLt's fp32 product.
// Run: 004_grad_hidden [sweep | final]

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
using headwater::sm90::ProductTuning;

void CheckSmall(int64_t rows, int64_t width, int64_t vocab, const ProductTuning& tuning) {
  Problem problem(rows, width, vocab, 1.0f);
  const headwater::lab::Reference reference(problem, false, 1.0, 0.0);
  problem.EnqueueTargetLogits(nullptr);
  const auto e_product = problem.MakeEProduct({});
  const auto product = problem.MakeGradHidden(tuning);
  e_product.Enqueue(nullptr);
  problem.EnqueueFinishRows(nullptr);
  product.Enqueue(nullptr);
  LAB_CUDA(cudaDeviceSynchronize());
  Check("N" + std::to_string(rows) + " H" + std::to_string(width) + " V" + std::to_string(vocab) + ": grad_hidden",
        RelativeDifference(problem.grad_hidden.ToHost(), reference.grad_hidden), 2.0e-3);
}

// What the epilogue does, on a plain fp32 product.
__global__ void FinishKernel(const float* product, const float* row_factor, const float* target_factor, const int32_t* targets,
                             const __nv_bfloat16* weight, int64_t rows, int64_t width, float* out) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < rows * width;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t row = i / width;
    out[i] = row_factor[row] * product[i] - target_factor[row] * __bfloat162float(weight[targets[row] * width + i % width]);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool sweep = argc > 1 && std::strcmp(argv[1], "sweep") == 0;
  headwater::lab::PrintDevice("004_grad_hidden");
  CheckSmall(200, 136, 1096, {2});
  CheckSmall(328, 320, 2600, {8});
  headwater::lab::Bench bench;
  headwater::lab::BlasContext blas;
  const std::vector<int64_t> row_counts = sweep ? std::vector<int64_t>{4096} : std::vector<int64_t>{4096, 8192, 1024};
  for (const int64_t rows : row_counts) {
    const int64_t width = 4096, vocab = 128256;
    Problem problem(rows, width, vocab, 1.0f);
    DeviceArray<float> product_32(rows * width), expected(rows * width);
    DeviceArray<__nv_bfloat16> product_16(rows * width);
    problem.EnqueueTargetLogits(bench.stream());
    const auto e_product = problem.MakeEProduct({});
    e_product.Enqueue(bench.stream());
    problem.EnqueueFinishRows(bench.stream());
    LAB_CUDA(cudaStreamSynchronize(bench.stream()));
    BlasProduct floor_32 = BlasProduct::GradHidden(blas, rows, width, vocab, problem.exponentials.get(), problem.weight.get(),
                                                   product_32.get(), CUDA_R_32F);
    BlasProduct floor_16 = BlasProduct::GradHidden(blas, rows, width, vocab, problem.exponentials.get(), problem.weight.get(),
                                                   product_16.get(), CUDA_R_16BF);
    floor_32.Search(bench, "grad_hidden, fp32 out");
    floor_16.Search(bench, "grad_hidden, bf16 out");
    std::vector<headwater::lab::Candidate> candidates = {floor_16.AsCandidate("cuBLASLt grad_hidden, bf16 out")};
    using headwater::sm90::ProductConfig;
    const auto own = problem.MakeGradHidden({8});
    const auto paced = problem.MakeGradHidden({8, 2, 16});
    candidates.push_back(own.AsCandidate("own, 128 x 256"));
    candidates.push_back(paced.AsCandidate("own, 128 x 256, paced 2 x 16"));
    problem.grad_hidden.Poison();
    LAB_CUDA(cudaDeviceSynchronize());
    own.Enqueue(bench.stream());
    floor_32.Enqueue(bench.stream());
    FinishKernel<<<1056, 256, 0, bench.stream()>>>(product_32.get(), problem.row_factor.get(), problem.target_factor.get(),
                                                   problem.targets.get(), problem.weight.get(), rows, width, expected.get());
    LAB_CUDA(cudaStreamSynchronize(bench.stream()));
    Check("full size against cuBLASLt and a plain finish",
          RelativeDifference(problem.grad_hidden.get(), expected.get(), expected.count()), 1.9e-3);
    if (sweep) {
      const auto fine = problem.MakeGradHidden<ProductConfig<256, 32, 8, 2>>({8});
      const auto alone = problem.MakeGradHidden<ProductConfig<256, 64, 4, 1>>({16});
      const auto group_16 = problem.MakeGradHidden({16});
      candidates.push_back(fine.AsCandidate("own, 128 x 256, stages of 32"));
      candidates.push_back(alone.AsCandidate("own, 128 x 256, no cluster"));
      candidates.push_back(group_16.AsCandidate("own, 128 x 256, group 16"));
      bench.Run("sweep, N" + std::to_string(rows) + " H4096 V128256", candidates, BenchOptions{1.5, 0.4, 2, false});
    } else {
      candidates.push_back(floor_32.AsCandidate("cuBLASLt grad_hidden, fp32 out"));
      bench.Run("grad_hidden, N" + std::to_string(rows) + " H4096 V128256", candidates, BenchOptions{2.0, 1.0, 2, true});
    }
  }
  return headwater::lab::AnyCheckFailed() ? 1 : 0;
}
