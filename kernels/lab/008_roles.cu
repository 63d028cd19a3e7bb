// 008: what of a product's form costs energy, on grad_hidden's shape, where epilogues do not matter: one 256-column wgmma or two of
// 128, and which operand is A. The library's kernels for these products make the weights A and split them into many small wgmmas.
// Results go to an fp32 [m, n] by reduce-add: for timing alone.
// Run: 008_roles

#include "problem.cuh"

namespace {

using headwater::lab::BenchOptions;
using headwater::lab::DeviceArray;
using headwater::lab::Problem;
using headwater::sm90::GradWeightEpilogue;
using headwater::sm90::Major;
using headwater::sm90::ProductConfig;
using Halves = ProductConfig<256, 64, 4, 2, 2>;
template <Major kMajorA, Major kMajorB, class Config = headwater::sm90::Tile256>
using Plain = headwater::sm90::Product<kMajorA, kMajorB, GradWeightEpilogue, Config>;

}  // namespace

int main() {
  headwater::lab::PrintDevice("008_roles");
  headwater::lab::Bench bench;
  const int64_t rows = 4096, width = 4096, vocab = 128256;
  Problem problem(rows, width, vocab, 1.0f);
  DeviceArray<float> out(rows * width);
  out.Zero();
  problem.EnqueueTargetLogits(nullptr);
  const auto e_product = problem.MakeEProduct({});
  e_product.Enqueue(nullptr);
  LAB_CUDA(cudaDeviceSynchronize());
  const __nv_bfloat16* e = problem.exponentials.get();
  const __nv_bfloat16* w = problem.weight.get();
  const GradWeightEpilogue::Params params{1.0f};
  const Plain<Major::kK, Major::kMn> whole(e, w, out.get(), rows, width, vocab, params, {8, 0});
  const Plain<Major::kK, Major::kMn, Halves> halves(e, w, out.get(), rows, width, vocab, params, {8, 0});
  const Plain<Major::kMn, Major::kK> swapped(w, e, out.get(), width, rows, vocab, params, {8, 0});
  const Plain<Major::kMn, Major::kK, Halves> swapped_halves(w, e, out.get(), width, rows, vocab, params, {8, 0});
  const Plain<Major::kK, Major::kMn> paced(e, w, out.get(), rows, width, vocab, params, {8, 2, 16});
  const Plain<Major::kMn, Major::kK, Halves> swapped_paced(w, e, out.get(), width, rows, vocab, params, {8, 2, 16});
  bench.Run("grad_hidden's shape, N4096 H4096 V128256",
            {whole.AsCandidate("A = E, one wgmma of 256"), halves.AsCandidate("A = E, two of 128"),
             swapped.AsCandidate("A = W, one of 256"), swapped_halves.AsCandidate("A = W, two of 128"),
             paced.AsCandidate("A = E, one of 256, paced 2 x 16"), swapped_paced.AsCandidate("A = W, two of 128, paced 2 x 16")},
            BenchOptions{2.0, 0.8, 2, false});
  return 0;
}
