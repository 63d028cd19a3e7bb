// 002: product 1 in the E form (e_product.cuh) against cuBLASLt's logits product, which does less: no softmax at all.
// Checks against fp64 on the CPU (bias, scale, softcap, maximum; ragged edges), then at full size against cuBLASLt's fp32 logits.
// Run: 002_e_product [sweep | final]

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
using headwater::sm90::Major;
using headwater::sm90::ProductTuning;

template <bool kWithBias, bool kWithSoftcap, bool kWithMax, class Config = headwater::sm90::Tile256>
void CheckSmall(int64_t rows, int64_t width, int64_t vocab, float logit_std, float logit_scale, float softcap,
                const ProductTuning& tuning) {
  Problem problem(rows, width, vocab, logit_std);
  const headwater::lab::Reference reference(problem, kWithBias, logit_scale, kWithSoftcap ? softcap : 0.0);
  problem.EnqueueTargetLogits(nullptr, kWithBias ? problem.bias.get() : nullptr, logit_scale, kWithSoftcap ? softcap : 0.0f);
  const auto params = problem.EParams<kWithBias, kWithSoftcap, kWithMax>(logit_scale, softcap);
  const headwater::sm90::Product<Major::kK, Major::kK, headwater::sm90::EProductEpilogue<kWithBias, kWithSoftcap, kWithMax>, Config>
      product(problem.hidden.get(), problem.weight.get(), problem.exponentials.get(), rows, vocab, width, params, tuning);
  product.Enqueue(nullptr);
  LAB_CUDA(cudaDeviceSynchronize());
  const std::string name = "N" + std::to_string(rows) + " H" + std::to_string(width) + " V" + std::to_string(vocab) +
                           (kWithBias ? " bias" : "") + (kWithSoftcap ? " softcap" : "") + (kWithMax ? " max" : "") + ": ";
  Check(name + "E", RelativeDifference(problem.exponentials.ToHost(), reference.exponentials), 1.9e-3);
  const std::vector<float> partial = problem.partial_sum.ToHost(), partial_max = problem.partial_max.ToHost();
  const int64_t tiles = (vocab + Config::kTileN - 1) / Config::kTileN;
  double worst_sum = 0.0, worst_max = 0.0;
  for (int64_t i = 0; i < rows; ++i) {
    double sum = 0.0, largest = -INFINITY;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      sum += static_cast<double>(partial[tile * rows + i]);
      largest = std::max(largest, static_cast<double>(partial_max[tile * rows + i]));
    }
    const double error = std::abs(sum / reference.sum[i] - 1.0);
    if (!(error <= worst_sum)) worst_sum = error;
    const double max_error = std::abs(largest - reference.largest[i]);
    if (!(max_error <= worst_max)) worst_max = max_error;
  }
  Check(name + "S, worst row", worst_sum, 2e-5);
  if (kWithMax) Check(name + "maximum, worst row (nats)", worst_max, 2e-5 * static_cast<double>(logit_std) * 5.0);
}

// S by a second, plain way: from fp32 logits, one block a row. Also compares E with the rounded exponentials of those logits.
__global__ void RowSumsKernel(const float* logits, const float* offset, const int32_t* targets, const __nv_bfloat16* exponentials,
                              int64_t vocab, double* sums, double* squares) {
  __shared__ double shared_sum;
  if (threadIdx.x == 0) shared_sum = 0.0;
  __syncthreads();
  const int64_t row = blockIdx.x;
  double sum = 0.0, difference = 0.0, reference = 0.0;
  for (int64_t j = threadIdx.x; j < vocab; j += blockDim.x) {
    const double e = j == targets[row] ? 0.0 : exp(static_cast<double>(logits[row * vocab + j]) - static_cast<double>(offset[row]));
    const double delta = static_cast<double>(__bfloat162float(exponentials[row * vocab + j])) - e;
    sum += e;
    difference += delta * delta;
    reference += e * e;
  }
  atomicAdd(&shared_sum, sum);
  atomicAdd(&squares[0], difference);
  atomicAdd(&squares[1], reference);
  __syncthreads();
  if (threadIdx.x == 0) sums[row] = shared_sum;
}

void CheckFull(const Problem& problem, const DeviceArray<float>& logits, int tile_columns) {
  const int64_t tiles = (problem.vocab + tile_columns - 1) / tile_columns;
  DeviceArray<double> sums(problem.rows), squares(2);
  squares.Zero();
  RowSumsKernel<<<static_cast<int>(problem.rows), 256>>>(logits.get(), problem.offset.get(), problem.targets.get(),
                                                         problem.exponentials.get(), problem.vocab, sums.get(), squares.get());
  LAB_CUDA(cudaGetLastError());
  const std::vector<double> expected = sums.ToHost(), square = squares.ToHost();
  const std::vector<float> partial = problem.partial_sum.ToHost();
  double worst = 0.0;
  for (int64_t i = 0; i < problem.rows; ++i) {
    double sum = 0.0;
    for (int64_t tile = 0; tile < tiles; ++tile) sum += static_cast<double>(partial[tile * problem.rows + i]);
    const double error = std::abs(sum / expected[i] - 1.0);
    if (!(error <= worst)) worst = error;
  }
  Check("full size against cuBLASLt's logits: E", std::sqrt(square[0] / square[1]), 1.9e-3);
  Check("full size against cuBLASLt's logits: S, worst row", worst, 2e-5);
}

}  // namespace

int main(int argc, char** argv) {
  const bool sweep = argc > 1 && std::strcmp(argv[1], "sweep") == 0;
  headwater::lab::PrintDevice("002_e_product");
  CheckSmall<false, false, false>(200, 136, 1096, 1.0f, 1.0f, 0.0f, {2});
  CheckSmall<false, false, true>(328, 640, 2600, 3.0f, 0.7f, 0.0f, {8});
  CheckSmall<false, false, false, headwater::sm90::Tile320>(328, 640, 2600, 3.0f, 0.7f, 0.0f, {2});
  CheckSmall<true, true, true>(200, 136, 1096, 20.0f, 1.0f, 30.0f, {1});
  headwater::lab::Bench bench;
  headwater::lab::BlasContext blas;
  const std::vector<int64_t> row_counts = sweep ? std::vector<int64_t>{4096} : std::vector<int64_t>{4096, 8192, 1024};
  for (const int64_t rows : row_counts) {
    const int64_t width = 4096, vocab = 128256;
    Problem problem(rows, width, vocab, 1.0f);
    problem.EnqueueTargetLogits(bench.stream());
    DeviceArray<float> logits(rows * vocab);
    DeviceArray<__nv_bfloat16> logits_bf16(rows * vocab);
    BlasProduct floor_16 =
        BlasProduct::Logits(blas, rows, width, vocab, problem.hidden.get(), problem.weight.get(), logits_bf16.get(), CUDA_R_16BF);
    BlasProduct floor_32 =
        BlasProduct::Logits(blas, rows, width, vocab, problem.hidden.get(), problem.weight.get(), logits.get(), CUDA_R_32F);
    floor_16.Search(bench, "logits, bf16 out");
    floor_32.Search(bench, "logits, fp32 out");
    std::vector<headwater::lab::Candidate> candidates = {floor_16.AsCandidate("cuBLASLt logits, bf16 out")};
    using headwater::sm90::kEvictFirst;
    using headwater::sm90::kEvictLast;
    using headwater::sm90::kEvictNormal;
    using headwater::sm90::Tile320;
    const auto best = problem.MakeEProduct({8});
    const auto best_320 = problem.MakeEProduct<Tile320>({8});
    const auto paced = problem.MakeEProduct({8, 2, 16});
    candidates.push_back(best.AsCandidate("E, 128 x 256"));
    candidates.push_back(best_320.AsCandidate("E, 128 x 320"));
    candidates.push_back(paced.AsCandidate("E, 128 x 256, paced 2 x 16"));
    floor_32.Enqueue(bench.stream());
    best.Enqueue(bench.stream());
    LAB_CUDA(cudaStreamSynchronize(bench.stream()));
    CheckFull(problem, logits, 256);
    best_320.Enqueue(bench.stream());
    LAB_CUDA(cudaStreamSynchronize(bench.stream()));
    CheckFull(problem, logits, 320);
    if (sweep) {
      const auto alone = problem.MakeEProduct<headwater::sm90::ProductConfig<256, 64, 4, 1>>({16});
      const auto fine = problem.MakeEProduct<headwater::sm90::ProductConfig<256, 32, 8, 2>>({8});
      const auto all_rows = problem.MakeEProduct({16});
      const auto kept = problem.MakeEProduct({8, 0, 8, kEvictLast, kEvictNormal, kEvictFirst});
      candidates.push_back(alone.AsCandidate("E, 128 x 256, no cluster"));
      candidates.push_back(fine.AsCandidate("E, 128 x 256, stages of 32"));
      candidates.push_back(all_rows.AsCandidate("E, 128 x 256, group 16"));
      candidates.push_back(kept.AsCandidate("E, 128 x 256, hidden kept, E evicted first"));
      bench.Run("sweep, N" + std::to_string(rows) + " H4096 V128256", candidates, BenchOptions{1.5, 0.4, 2, false});
    } else {
      candidates.push_back(floor_32.AsCandidate("cuBLASLt logits, fp32 out"));
      bench.Run("product 1, N" + std::to_string(rows) + " H4096 V128256", candidates, BenchOptions{2.0, 1.0, 2, true});
    }
  }
  return headwater::lab::AnyCheckFailed() ? 1 : 0;
}
