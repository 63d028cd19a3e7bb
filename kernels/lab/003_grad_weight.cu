// 003: grad_weight [V, H] fp32 += E^T x', both operands transposed in memory, the addition done by the copy engine in L2, against
// cuBLASLt's product with beta = 1. Checked against fp64 on the CPU, then at full size against cuBLASLt.
// Run: 003_grad_weight [sweep | final]

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
  const headwater::lab::TargetGroups groups(problem);
  DeviceArray<float> grad_weight(vocab * width);
  std::vector<float> start(static_cast<size_t>(vocab * width));
  for (size_t i = 0; i < start.size(); ++i) start[i] = 0.01f * headwater::lab::NormalAt(9, i);
  LAB_CUDA(cudaMemcpy(grad_weight.get(), start.data(), grad_weight.bytes(), cudaMemcpyHostToDevice));
  problem.EnqueueTargetLogits(nullptr);
  const auto e_product = problem.MakeEProduct({});
  const auto product = problem.MakeGradWeight(grad_weight.get(), tuning);
  e_product.Enqueue(nullptr);
  problem.EnqueueFinishRows(nullptr);
  product.Enqueue(nullptr);
  EnqueueSubtractTargets(problem, groups, grad_weight.get(), nullptr);
  LAB_CUDA(cudaDeviceSynchronize());
  const std::string name = "N" + std::to_string(rows) + " H" + std::to_string(width) + " V" + std::to_string(vocab) + ": ";
  std::vector<double> expected = reference.grad_weight;
  for (size_t i = 0; i < expected.size(); ++i) expected[i] += static_cast<double>(start[i]);
  Check(name + "grad_weight, added to a full accumulator", RelativeDifference(grad_weight.ToHost(), expected), 1e-3);
  // The product alone, on exactly the operands it was given: fp32 accumulation is all the error there is.
  const std::vector<__nv_bfloat16> e = problem.exponentials.ToHost(), x = problem.scaled_hidden.ToHost();
  std::vector<double> bare(static_cast<size_t>(vocab * width), 0.0);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < vocab; ++j) {
      const double factor = static_cast<double>(__bfloat162float(e[i * vocab + j]));
      for (int64_t k = 0; k < width; ++k) bare[j * width + k] += factor * static_cast<double>(__bfloat162float(x[i * width + k]));
    }
  }
  grad_weight.Zero();
  product.Enqueue(nullptr);
  LAB_CUDA(cudaDeviceSynchronize());
  Check(name + "bare product", RelativeDifference(grad_weight.ToHost(), bare), 3e-6);
}

}  // namespace

int main(int argc, char** argv) {
  const bool sweep = argc > 1 && std::strcmp(argv[1], "sweep") == 0;
  headwater::lab::PrintDevice("003_grad_weight");
  CheckSmall(200, 136, 1096, {2});
  CheckSmall(648, 320, 1000, {8});
  headwater::lab::Bench bench;
  headwater::lab::BlasContext blas;
  const std::vector<int64_t> row_counts = sweep ? std::vector<int64_t>{4096} : std::vector<int64_t>{4096, 8192, 1024};
  for (const int64_t rows : row_counts) {
    const int64_t width = 4096, vocab = 128256;
    Problem problem(rows, width, vocab, 1.0f);
    DeviceArray<float> grad_weight(vocab * width), expected(vocab * width);
    problem.EnqueueTargetLogits(bench.stream());
    const auto e_product = problem.MakeEProduct({});
    e_product.Enqueue(bench.stream());
    problem.EnqueueFinishRows(bench.stream());
    LAB_CUDA(cudaStreamSynchronize(bench.stream()));
    BlasProduct floor = BlasProduct::GradWeight(blas, rows, width, vocab, problem.exponentials.get(), problem.scaled_hidden.get(),
                                                expected.get(), 1.0f);
    expected.Zero();
    floor.Search(bench, "grad_weight, adding");
    std::vector<headwater::lab::Candidate> candidates = {floor.AsCandidate("cuBLASLt grad_weight, adding")};
    using headwater::sm90::Major;
    using headwater::sm90::Tile320;
    using Direct = headwater::sm90::GradWeightDirectEpilogue;
    const auto own = problem.MakeGradWeight(grad_weight.get(), {1});
    const auto paced = problem.MakeGradWeight(grad_weight.get(), {8, 2, 16});
    const auto own_320 = problem.MakeGradWeight<Tile320>(grad_weight.get(), {1});
    const auto group_4 = problem.MakeGradWeight(grad_weight.get(), {4});
    const headwater::sm90::Product<Major::kMn, Major::kMn, Direct> direct(problem.exponentials.get(), problem.scaled_hidden.get(),
                                                                          grad_weight.get(), vocab, width, rows,
                                                                          Direct::Params{grad_weight.get(), 1.0f}, {1});
    candidates.push_back(own.AsCandidate("own, 128 x 256, group 1"));
    candidates.push_back(paced.AsCandidate("own, 128 x 256, group 8, paced 2 x 16"));
    if (sweep) {
      candidates.push_back(own_320.AsCandidate("own, 128 x 320, group 1"));
      candidates.push_back(group_4.AsCandidate("own, 128 x 256, group 4"));
      candidates.push_back(direct.AsCandidate("own, 128 x 256, group 1, red from registers"));
    }
    expected.Zero();
    LAB_CUDA(cudaDeviceSynchronize());
    for (int repeat = 0; repeat < 2; ++repeat) floor.Enqueue(bench.stream());
    for (size_t i = 1; i < candidates.size(); ++i) {
      LAB_CUDA(cudaMemsetAsync(grad_weight.get(), 0, grad_weight.bytes(), bench.stream()));
      for (int repeat = 0; repeat < 2; ++repeat) candidates[i].enqueue(bench.stream());
      LAB_CUDA(cudaStreamSynchronize(bench.stream()));
      Check("full size against cuBLASLt, added twice: " + candidates[i].name,
            RelativeDifference(grad_weight.get(), expected.get(), grad_weight.count()), 1e-5);
    }
    if (sweep) {
      bench.Run("sweep, N" + std::to_string(rows) + " H4096 V128256", candidates, BenchOptions{1.5, 0.4, 2, false});
    } else {
      bench.Run("grad_weight, N" + std::to_string(rows) + " H4096 V128256", candidates, BenchOptions{2.0, 1.0, 2, true});
    }
  }
  return headwater::lab::AnyCheckFailed() ? 1 : 0;
}
